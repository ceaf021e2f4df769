"""One period of Kimi K3 at full size, decoding: its time, its floor by part, and its kernels."""
