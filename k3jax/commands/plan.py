"""``k3jax plan``: what a model needs under a layout, without the machines."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Literal

import tyro

from k3jax.errors import InputError


@dataclass(frozen=True)
class Plan:
    """Plan memory, communication and time of a model under a layout; exit 1 if it does not fit."""

    model: str = "kimi-k3.1-pro"
    """A preset, or a folder with a config.json."""
    layout: str | None = None
    """A shipped layout, or a yaml file."""
    compare: tuple[str, ...] = ()
    """Layouts to rank, with --layout if it is given."""
    batch: int = 64
    """Sequences."""
    context: int = 131072
    """Tokens of a sequence, the new ones among them."""
    step: Literal["decode", "prefill"] = "decode"
    """One token a sequence, or a chunk of its prompt."""
    chunk: int = 4096
    """Tokens of a prefill step."""
    vision: bool = True
    """Count the vision tower, whole on every device; --no-vision for text only."""
    image: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """WIDTHxHEIGHT in pixels, once for each image: says how many tokens of the context they are."""
    compile: bool = False
    """Compile the step for the layout's TPU topology and add what the compiler says."""
    json: bool = False
    """Print JSON rather than tables."""
    plot: str | None = None
    """Write a picture to this file."""

    def run(self) -> int:
        names = list(dict.fromkeys((*((self.layout,) if self.layout else ()), *self.compare)))
        if not names:
            raise InputError("nothing to plan: give --layout or --compare")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a plan takes no accelerator

        from rich.console import Console

        from k3jax import plan
        from k3jax.config import Config
        from k3jax.plan import table
        from sharding import Layout, LayoutError
        from sharding.compile import ENVIRONMENT

        if self.compile:  # before libtpu is loaded
            for name, value in ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        config = Config.from_hf(_folder(self.model))
        try:
            layouts = [Layout.load(name) for name in names]
        except LayoutError as error:
            raise InputError(str(error)) from None
        images = [_size(text) for text in self.image]
        made: list[plan.Plan | plan.Refused] = []
        with Console(file=sys.stderr).status("") as status:
            for layout in layouts:
                try:
                    made.append(
                        plan.plan(
                            self.model,
                            config,
                            layout,
                            step=self.step,
                            batch=self.batch,
                            context=self.context,
                            chunk=self.chunk,
                            vision=self.vision,
                            images=images,
                            compile=self.compile,
                            progress=status.update,
                        )
                    )
                except LayoutError as error:
                    if not self.compare:
                        raise InputError(str(error)) from None
                    made.append(plan.Refused(layout.name, str(error)))
        if self.compare:
            made = plan.compare(made)
        planned = [p for p in made if isinstance(p, plan.Plan)]
        if self.plot and planned:
            from k3jax.plan.plot import plot

            plot(planned, self.plot)
        if self.json:
            found = [p.to_dict() for p in made]
            print(json.dumps(found if self.compare else found[0], indent=2))
        elif self.compare:
            table.render_comparison(made)
        else:
            table.render(planned[0])
        return int(not any(p.fits is not False for p in planned))


def _size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT as numbers."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise InputError(f"--image {text}: expected WIDTHxHEIGHT in pixels, such as 1024x768")
    return int(width), int(height)


def _folder(model: str):
    from k3jax.config import resolve

    return resolve(model)
