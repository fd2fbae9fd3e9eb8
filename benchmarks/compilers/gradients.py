"""When does XLA:GPU compute gradients of weights, where everything in the layers is recomputed?

Every block recomputed whole, by `jax.checkpoint` and by jdelta, which ties gradients to what comes
next in the backward pass: those of a head's weights to what the backward loop begins with, those of
a block outside of loops to what it hands on (`weight_gradients.py` in `jdelta/_src/passes`), and of
those inside a loop the ones that would raise its peak to what its iteration computes next
(`weight_gradients_in_loops.py`). *loops as they are* leaves the last out, *seconds* compares the
two by what their compiled instructions are predicted to take.

    python -m benchmarks run gradients

Results (jax 0.12.0.1, CUDA 13 plug-in) stand in docs/how-it-works.md: left alone, XLA puts off the
gradient of the head over the whole backward loop, and keeps the gradient of the logits for it; and
those of an iteration's MLP until its attention is done with.
"""

from unittest import mock

from benchmarks import cases, study
from benchmarks.plans.budgets import STEPS
from benchmarks.models import build, checkpoint
from benchmarks.study import Row, mib
from jdelta import remat
from jdelta._src.passes import transfer_timing

TARGETS = ("cuda:h100",)
NAMES = ["gpt2 unrolled", *(name for name in STEPS if name.endswith(" scanned"))]
HEADS = ("step", "target", "jax.checkpoint", "loops as they are", "jdelta", "less", "seconds")


def row(step: str, target: str) -> Row:
    """Compile the three programs."""
    case = build(**STEPS[step], remat=remat)
    by_hand = checkpoint(STEPS[step]["name"], prevent_cse=not STEPS[step].get("scan", False))
    with mock.patch.object(transfer_timing, "with_gradients_in_place", lambda program, *_: program):
        loose = cases.recomputed(case, target)
    tied = cases.recomputed(case, target)
    return {
        "checkpoint": cases.traced(build(**STEPS[step], remat=by_hand), target).measured.peak,
        "loose": loose.measured.peak,
        "jdelta": tied.measured.peak,
        "seconds": [made.scheduled["scheduled"] for made in (loose, tied)],
    }


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    peaks = r["checkpoint"], r["loose"], r["jdelta"]
    less, (loose, tied) = f"{1 - r['jdelta'] / r['checkpoint']:.1%}", r["seconds"]
    return [r["step"], r["target"], *map(mib, peaks), less, f"{tied / loose - 1:+.1%}"]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows))

