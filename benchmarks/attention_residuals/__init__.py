"""Attention Residuals at Kimi K3's sizes: ours, the floors, and the peer's figures."""
