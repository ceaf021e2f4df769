"""Gated DSA and MLA at Kimi K3.1's sizes: ours, the floors, and the peers' figures."""
