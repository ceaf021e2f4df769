"""The routed experts at Kimi K3's sizes: ours, the floors, and the peers' figures."""
