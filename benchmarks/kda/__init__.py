"""Kimi Delta Attention at Kimi K3's sizes: ours, its floor, and what others reach on the same GPU."""
