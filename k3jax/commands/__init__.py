"""One module a subcommand of ``k3jax``. They import jax only when they run."""
