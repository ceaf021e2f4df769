"""Kimi Delta Attention at Kimi K3's sizes: ours, its floor, and the peers' figures."""
