"""One module a subcommand of ``k3jax``. They import jax only when they run."""

import os
from pathlib import Path


def prepare_jax() -> None:
    """What a command that computes does first.

    Compiled programs are kept in ``~/.cache/k3jax``, so that only a first run waits for them; JAX's
    own setting (``JAX_COMPILATION_CACHE_DIR`` or ``jax.config``) wins where there is one. Where
    libtpu is installed to plan for TPUs and there is none, JAX looks for one in silence.
    """
    import jax

    from sharding.compile import ENVIRONMENT

    if not any(Path("/dev").glob("accel*")) and not Path("/dev/vfio").exists():
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache/k3jax/xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
