"""Eight host devices, strict dtype promotion, and quick compilation for every test.

Nearly all the time of the suite is compilation. Level 0 leaves out LLVM's optimisations, a third of
it, and changes no floating-point operation: XLA's own passes, which decide those, all run.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0"
)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Commands turn on a cache of programs in the home folder; a test must not depend on what is there.
jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_file():
    """A file's compiled programs go when it ends.

    XLA maps some memory for every program of a CPU and keeps it. A worker of the whole suite came
    to the 65,530 maps that Linux allows a process, and the compiler aborted.
    """
    yield
    jax.clear_caches()
