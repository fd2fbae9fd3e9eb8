"""What JAX and XLA are told before anything is compiled, for all tests alike."""

import contextlib
import gc
import os
import tempfile

import jax
import pytest

from jdelta._src.cache import cache_dir
from tests.flags import flags

# Tracing makes millions of objects that live as long as it does: collecting seldom saves a tenth.
gc.freeze()
gc.set_threshold(100_000, 20, 50)

DEVICES = 8
jax.config.update("jax_num_cpu_devices", DEVICES)

# Tests ask for numbers and bytes. LLVM without optimisation changes neither (XLA's own passes are
# the same), and a compile for a CPU takes a third of the time. Code made in one part, not in 32 for
# as many threads, spares two fifths of what is left. A TPU's compiler spends four of five seconds
# on the code of its kernels; the least effort spares that. Tests of what the effort decides are
# marked `full_effort`, those among them that take minutes `full`. What the environment sets is for
# all tests: JAX_EXEC_TIME_OPTIMIZATION_EFFORT=0, or JAX_OPTIMIZATION_LEVEL=UNKNOWN (JAX 0.12).
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK += " --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # its older way to write kernels takes a quarter less time
    QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", QUICK)
EFFORT = "jax_exec_time_optimization_effort"
LEAST, ALL = -1.0, 0.0
if EFFORT not in jax.config.values:
    EFFORT, LEAST, ALL = "jax_optimization_level", "O0", "UNKNOWN"
if EFFORT.upper() in os.environ:
    LEAST = jax.config.values[EFFORT]
os.environ.setdefault(EFFORT.upper(), str(LEAST))  # of examples too
jax.config.update(EFFORT, LEAST)

# A program that one test compiles is not compiled again for another, nor by another process. What
# was kept on disk before, by another revision maybe, is not read.
# What is built of C++ is: its name says of which sources, and building takes half a minute.
_native = cache_dir() / "native"
_own = dict[str, tempfile.TemporaryDirectory]()
for _variable in ("JAX_COMPILATION_CACHE_DIR", "JDELTA_CACHE_DIR"):
    if _variable not in os.environ:
        _own[_variable] = tempfile.TemporaryDirectory(prefix="tests-")
        os.environ[_variable] = _own[_variable].name
        if _variable == "JDELTA_CACHE_DIR":
            with contextlib.suppress(OSError):
                _native.mkdir(parents=True, exist_ok=True)
                (cache_dir() / "native").symlink_to(_native)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 2)  # to write takes time too
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_sessionfinish():
    """Collect what is left once: pytest does so five times, each of which takes seconds here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def effort(request):
    marked = any(map(request.node.get_closest_marker, ("full", "full_effort")))
    with flags(**{EFFORT: ALL if marked else LEAST}):
        yield
