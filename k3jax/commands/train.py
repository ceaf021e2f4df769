"""``k3jax train``: train a model from a recipe."""

from __future__ import annotations

from dataclasses import dataclass, fields

from k3jax.errors import InputError

_EXTRA = ("optax", "tokenizers")


@dataclass(frozen=True)
class Train:
    """Train a model as a recipe says."""

    config: str
    """The recipe, a YAML file."""
    data: str | None = None
    """A prepared corpus; without it the corpus is made from this Python's standard library."""
    out: str | None = None
    """The run's folder; runs/<recipe name> without it."""
    seconds: float | None = None
    """Stop in time to have saved by then; the same command goes on from there."""
    resume: bool = True
    """Go on from what the run's folder holds; --no-resume starts over."""
    steps: int | None = None
    """In place of the recipe's."""
    batch_size: int | None = None
    """In place of the recipe's."""

    def run(self) -> None:
        try:
            from k3jax.train.loop import main

            options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}
            main(self.config, **options)
        except ModuleNotFoundError as error:
            if error.name not in _EXTRA:
                raise
            raise InputError(f"training needs {error.name}: pip install 'k3jax[train]'") from None
