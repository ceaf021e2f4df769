"""``k3jax train``: train a model from a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from k3jax.errors import InputError

_EXTRA = ("optax", "tokenizers")


@dataclass(frozen=True)
class Train:
    """Train a model as a recipe says."""

    config: str
    """The recipe, a YAML file."""

    def run(self) -> None:
        try:
            from k3jax.train.loop import main

            main(self.config)
        except ModuleNotFoundError as error:
            if error.name not in _EXTRA:
                raise
            raise InputError(f"training needs {error.name}: pip install 'k3jax[train]'") from None
