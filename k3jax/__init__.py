"""Kimi K3 and Kimi K3.1 Pro in JAX and Flax."""

from importlib import import_module

# name -> module; imported on first use, so that `k3jax --help` and config work stay fast.
_WHERE = {
    "CheckpointError": "k3jax.errors",
    "Config": "k3jax.config",
    "ConfigError": "k3jax.errors",
    "Generation": "k3jax.generate",
    "InputError": "k3jax.errors",
    "K3Error": "k3jax.errors",
    "Model": "k3jax.runtime",
    "Tokenizer": "k3jax.tokenizer",
    "Transformer": "k3jax.model",
    "expert_loads": "k3jax.train.load_report",
    "load": "k3jax.loading",
}
__all__ = sorted([*_WHERE, "generate"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name == "generate":  # also the package's name; the function is what people call
        return import_module("k3jax.generate").generate
    if name not in _WHERE:
        raise AttributeError(f"module 'k3jax' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__():
    return __all__
