"""Layers and a slice of Kimi K3.1 Pro on several GPUs of one host, against one of them."""
