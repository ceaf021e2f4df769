"""One module a subcommand of ``k3jax``. They import jax only when they run."""

from pathlib import Path


def keep_compiled_programs() -> None:
    """Keep compiled programs in ``~/.cache/k3jax``, so that only a first run waits for them.

    JAX's own setting (``JAX_COMPILATION_CACHE_DIR`` or ``jax.config``) wins where there is one.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache/k3jax/xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
