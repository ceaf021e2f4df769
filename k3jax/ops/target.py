"""The device that a program being traced will run on, so that an op can pick its kernel."""

from __future__ import annotations

import jax

HOPPER = ("NVIDIA H100", "NVIDIA H200", "NVIDIA H800", "NVIDIA H20", "NVIDIA GH200")
# As topologies of libtpu 0.0.52 say them: v5e, v5p, v6e and tpu7x (tests/aot/test_kda_aot.py); the
# short names are those of the hardware's own tools.
TPU = ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "TPU v5e", "TPU v5p", "TPU v6e")


def device_kind() -> str:
    """Its name, as in ``jax.Device.device_kind``; "cpu" on a host.

    The mesh under `jax.shard_map` says it, also when it describes hardware that is not here;
    without one it is the default device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.device_kind
    default = jax.config.jax_default_device
    return default.device_kind if isinstance(default, jax.Device) else jax.devices()[0].device_kind


def is_hopper(kind: str) -> bool:
    """Whether a device has what the Mosaic GPU kernels use: warpgroup matmuls and TMA copies."""
    return kind.startswith(HOPPER)


def is_tpu(kind: str) -> bool:
    """Whether a device is a TPU that the Mosaic TPU kernels are compiled for."""
    return kind in TPU
