"""Programs of this repository as sides of a measurement: compiled, chained, and what they chose."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def chain(step: Callable, calls: int, sets: int = 0) -> Callable:
    """``calls`` steps one after the other, over inputs and states in turn.

    With ``sets`` the shared arrays are a list of as many that take turns too, such as caches that a
    step only reads. The inputs of a step pass a barrier together with the output before them.
    Otherwise XLA would merge steps into one kernel, or compute once what two have in common.
    """
    step = jax.jit(step)

    def program(shared, inputs, states):
        states, outputs = list(states), []
        for i in range(calls):
            x, at = inputs[i % len(inputs)], i % max(1, len(states))
            if outputs:
                x, outputs[-1] = lax.optimization_barrier((x, outputs[-1]))
            carried = states[at] if states else None
            o, carried = step(shared[i % sets] if sets else shared, x, carried)
            if states:
                states[at] = carried
            outputs.append(o)
        return outputs, states

    return program


@jax.jit
def _all_finite(x):
    return jnp.isfinite(x).all()  # in one pass: x may be 26 GB


class Program:
    """A side of ours: a compiled program and its arguments. Its states are donated and come back
    in place."""

    def __init__(self, name: str, compiled, arguments: Sequence[Any], calls: int):
        self.name, self.calls = name, calls
        self.error: str | None = None
        self.compiled, self.arguments = compiled, list(arguments)
        self.out: Any = None

    def launch(self) -> None:
        self.out = None  # at a million tokens there is room for one output
        self.out, self.arguments[2] = self.compiled(*self.arguments)

    direct = launch

    def wait(self) -> None:
        jax.block_until_ready((self.out, self.arguments[2]))

    def finite(self) -> bool:
        """Whether all outputs and states are; integers are."""
        leaves = jax.tree.leaves((self.out, self.arguments[2]))
        leaves = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
        return all(bool(_all_finite(x)) for x in leaves)

    @property
    def temporaries(self) -> int:
        """Bytes of scratch memory; a decode step in place has less than a state."""
        found = self.compiled.memory_analysis()
        return -1 if found is None else found.temp_size_in_bytes


class Said(logging.Handler):
    """What ops logged about their choices in this thread, in order and each once."""

    def __init__(self, *loggers: str):
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []
        self.thread = threading.get_ident()
        self.loggers = [logging.getLogger(name) for name in loggers]

    @property
    def first(self) -> str:
        """The outer op speaks before the inner."""
        return self.messages[0] if self.messages else ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.thread == self.thread and message not in self.messages:
            self.messages.append(message)

    def __enter__(self):
        for logger in self.loggers:
            logger.setLevel(logging.DEBUG)
            logger.addHandler(self)
        return self

    def __exit__(self, *error):
        for logger in self.loggers:
            logger.removeHandler(self)
