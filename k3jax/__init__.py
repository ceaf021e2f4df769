"""Kimi K3 and Kimi K3.1 Pro in JAX and Flax."""
