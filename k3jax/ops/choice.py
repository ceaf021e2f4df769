"""Which implementation of an op runs: the kernel of a device, or the portable form and why."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax

from k3jax.errors import InputError


class Kernel(NamedTuple):
    """Where a kernel runs.

    Attributes:
      runs_on: device kind -> bool.
      refusal: arguments -> why the kernel cannot take them; None if it can.
    """

    runs_on: Callable[[str], bool]
    refusal: Callable[..., str | None]


def choose(kernels: Mapping[str, Kernel], device: str, arguments: tuple):
    """(name, reason): the first kernel for a device kind if it takes the arguments, else "xla"."""
    for name, kernel in kernels.items():
        if kernel.runs_on(device):
            refused = kernel.refusal(*arguments)
            return (name, f"for {device}") if refused is None else ("xla", f"{name}: {refused}")
    return "xla", f"no kernel for {device}"


def select(
    op: str,
    implementation: str,
    implementations: Collection[str],
    kernels: Mapping[str, Kernel],
    device: str,
    arguments: tuple,
) -> tuple[str, str]:
    """(name, reason) of what runs for ``implementation``, a name or "auto".

    Raises:
      InputError: the name is unknown, its kernel is for other devices or refuses the arguments.
    """
    if implementation == "auto":
        return choose(kernels, device, arguments)
    if implementation not in implementations:
        names = ", ".join(["auto", *implementations])
        raise InputError(f"{op}: implementation {implementation!r} is not one of {names}")
    if implementation in kernels:
        kernel = kernels[implementation]
        if not kernel.runs_on(device):
            raise InputError(f"{op}: {implementation} does not run on {device}")
        refused = kernel.refusal(*arguments)
        if refused is not None:
            raise InputError(f"{op}: {implementation} cannot run: {refused}")
    return implementation, "asked for"


def differentiable(kernel: Callable[..., Any], portable: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose gradients, for all arrays, are those of the portable form."""

    @jax.custom_vjp
    def call(*inputs):
        return kernel(*inputs)

    def keep(*inputs):
        return call(*inputs), inputs

    def pull(inputs, cotangent):
        return jax.vjp(portable, *inputs)[1](cotangent)

    call.defvjp(keep, pull)
    return call
