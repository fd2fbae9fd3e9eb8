"""What does a compiler make of dropout that is recomputed?

The least number of GPT-2 blocks that shows it, two (batch 8, length 1024), everything in them
recomputed: by `jax.checkpoint`, and by jdelta, which writes random bits to memory before they are
read where the target is a TPU (`jdelta/_src/regions/random_bits.py`). Beside it the plain step.

    python -m benchmarks run dropout

Results (jax 0.12.0.1, libtpu 0.0.50.1, CUDA 13 plug-in) stand in docs/how-it-works.md: left alone,
the TPU compiler fuses the bits of bfloat16 models into the product of queries and keys, and writes
out their constants as arrays of the size of the scores.
"""

import dataclasses
import itertools

import jax.numpy as jnp

from benchmarks import cases, study
from benchmarks.models import checkpoint, find
from benchmarks.study import Row, mib
from jdelta import remat

TARGETS = ("tpu:v5e:2x2", "cuda:h100")
DTYPES = ("float32", "bfloat16")
HEADS = ("target", "dtype", "layers", "plain", "jax.checkpoint", "jdelta")


def row(target: str, dtype: str, scan: bool) -> Row:
    """Compile the three programs."""
    model = dataclasses.replace(find("gpt2"), layers=2, batch=8, dtype=jnp.dtype(dtype), scan=scan)
    by_hand = checkpoint("gpt2", prevent_cse=not scan)
    return {
        "plain": cases.traced(model.case("gpt2", lambda unit: unit), target).measured.peak,
        "checkpoint": cases.traced(model.case("gpt2", by_hand), target).measured.peak,
        "jdelta": cases.recomputed(model.case("gpt2", remat), target).measured.peak,
    }


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    sizes = (mib(r[form]) for form in ("plain", "checkpoint", "jdelta"))
    return [r["target"], r["dtype"], "scanned" if r["scan"] else "unrolled", *sizes]

