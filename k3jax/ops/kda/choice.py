"""Which implementation of an op runs: the kernel of a device, or the portable form and why."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jax import Array

from k3jax.errors import InputError


class Kernel(NamedTuple):
    """Where a kernel runs.

    Attributes:
      runs_on: device kind -> bool.
      refusal: arrays -> why the kernel cannot take their shapes or dtypes; None if it can.
    """

    runs_on: Callable[[str], bool]
    refusal: Callable[..., str | None]


def choose(kernels: Mapping[str, Kernel], device: str, arrays: tuple[Array, ...]):
    """(name, reason): the first kernel for a device kind if it takes the arrays, else "xla"."""
    for name, kernel in kernels.items():
        if kernel.runs_on(device):
            refused = kernel.refusal(*arrays)
            return (name, f"for {device}") if refused is None else ("xla", f"{name}: {refused}")
    return "xla", f"no kernel for {device}"


def select(
    op: str,
    implementation: str,
    implementations: Mapping[str, Callable],
    kernels: Mapping[str, Kernel],
    device: str,
    arrays: tuple[Array, ...],
) -> tuple[str, str]:
    """(name, reason) of what runs for ``implementation``, a name or "auto".

    Raises:
      InputError: the name is unknown, its kernel is for other devices or refuses the arrays.
    """
    if implementation == "auto":
        return choose(kernels, device, arrays)
    if implementation not in implementations:
        names = ", ".join(["auto", *implementations])
        raise InputError(f"{op}: implementation {implementation!r} is not one of {names}")
    if implementation in kernels:
        kernel = kernels[implementation]
        if not kernel.runs_on(device):
            raise InputError(f"{op}: {implementation} does not run on {device}")
        refused = kernel.refusal(*arrays)
        if refused is not None:
            raise InputError(f"{op}: {implementation} cannot run: {refused}")
    return implementation, "asked for"
