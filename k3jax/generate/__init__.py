"""Generation: sampling and the loop. The package is callable: ``k3jax.generate(model, ...)``."""

import sys
import types

from k3jax.generate.loop import Generation, generate
from k3jax.generate.sampling import sample

__all__ = ["Generation", "generate", "sample"]


class _Callable(types.ModuleType):
    """Importing a submodule binds ``k3jax.generate`` to this package, over a function so named.

    So the package itself has to be the function.
    """

    def __call__(self, *args, **kwargs):
        return generate(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
