"""Peaks of steps whose blocks are recomputed whole, by `jax.checkpoint` and by jdelta.

*dropout*: the least number of GPT-2 blocks that shows what becomes of it, two (batch 8, length
1024). jdelta writes random bits to memory before they are read where the target is a TPU
(`jdelta/_src/regions/random_bits.py`). Left alone, the TPU compiler fuses the bits of bfloat16
models into the product of queries and keys, and writes out their constants as arrays of the size of
the scores. Beside it the plain step.

*gradients*: whole models on GPUs. jdelta ties gradients of weights to what comes next in the
backward pass: those of a head's weights to what the backward loop begins with, those of a block
outside of loops to what it hands on (`weight_gradients.py` in `jdelta/_src/passes`), and of those
inside a loop the ones that would raise its peak to what its iteration computes next
(`weight_gradients_in_loops.py`). Left alone, XLA puts off the gradient of the head over the whole
backward loop, and keeps the gradient of the logits for it; and those of an iteration's MLP until
its attention is done with. *loops as they are* leaves the ties inside loops out, *seconds* compares
the two by what their compiled instructions are predicted to take.

Results (jax 0.12.0.1, libtpu 0.0.50.1, CUDA 13 plug-in) stand in docs/results/recompute.md.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax.numpy as jnp

from benchmarks import cases, steps, study
from benchmarks.models import Case, checkpoint, find, identity
from benchmarks.study import Job, Row, Study, mib
from jdelta import remat
from jdelta._src.passes import timed_transfers

TWO_BLOCKS: dict[str, dict[str, Any]] = {
    f"gpt2 2 layers {dtype} {form}": {"dtype": jnp.dtype(dtype), "scan": form == "scanned"}
    for dtype in ("float32", "bfloat16")
    for form in ("unrolled", "scanned")
}
MODELS = (
    "gpt2 length 512 unrolled",
    *(name for name in steps.PLANNED if name.endswith(" scanned")),
)
GPUS = ("cuda:h100",)
DROPOUT_HEADS = ("step", "target", "plain", "jax.checkpoint", "jdelta")
HEADS = ("step", "target", "jax.checkpoint", "loops as they are", "jdelta", "less", "seconds")


def row(step: str, target: str) -> Row:
    """Compiles the programs of one step."""
    return (of_dropout if step in TWO_BLOCKS else of_gradients)(step, target)


def of_dropout(step: str, target: str) -> Row:
    """Two blocks: plain, by `jax.checkpoint` and by jdelta."""
    by_hand = checkpoint("gpt2", prevent_cse=not TWO_BLOCKS[step]["scan"])
    return {
        "plain": cases.traced(two_blocks(step, identity), target).measured.peak,
        "checkpoint": cases.traced(two_blocks(step, by_hand), target).measured.peak,
        "jdelta": cases.recomputed(two_blocks(step, remat), target).measured.peak,
    }


def two_blocks(step: str, decorator: Any) -> Case:
    """The step of two GPT-2 blocks with a decorator around each."""
    model = dataclasses.replace(find("gpt2"), layers=2, batch=8, **TWO_BLOCKS[step])
    return model.case("gpt2", decorator)


def of_gradients(step: str, target: str) -> Row:
    """A model: by `jax.checkpoint`, and by jdelta with loops as they are and with ties in them."""
    case = steps.build(step, remat=remat)
    by_hand = steps.build(step, remat=steps.checkpointed(step))
    with mock.patch.object(timed_transfers, "with_gradients_in_place", lambda program, *_: program):
        loose = cases.recomputed(case, target)
        loose_peak, loose_seconds = loose.measured.peak, loose.scheduled["scheduled"]
    tied = cases.recomputed(case, target)
    return {
        "checkpoint": cases.traced(by_hand, target).measured.peak,
        "loose": loose_peak,
        "jdelta": tied.measured.peak,
        "seconds": [loose_seconds, tied.scheduled["scheduled"]],
    }


def of_two_blocks(r: Row) -> list[str]:
    """One line of the table of dropout; sizes in MiB."""
    return [r["step"], r["target"], *(mib(r[form]) for form in ("plain", "checkpoint", "jdelta"))]


def cells(r: Row) -> list[str]:
    """One line of the table of gradients; sizes in MiB."""
    peaks = r["checkpoint"], r["loose"], r["jdelta"]
    less, (loose, tied) = f"{1 - r['jdelta'] / r['checkpoint']:.1%}", r["seconds"]
    return [r["step"], r["target"], *map(mib, peaks), less, f"{tied / loose - 1:+.1%}"]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: of dropout, and of gradients."""
    dropout = [r for r in rows if r["step"] in TWO_BLOCKS]
    gradients = [r for r in rows if r["step"] not in TWO_BLOCKS]
    return study.page(
        [
            study.table(DROPOUT_HEADS, map(of_two_blocks, dropout), dropout),
            study.table(HEADS, map(cells, gradients), gradients),
        ]
    )


def jobs(
    step: Sequence[str] = (*TWO_BLOCKS, *MODELS), target: Sequence[str] = steps.TWO_TARGETS
) -> list[Job]:
    """Models on GPUs only: no other compiler puts gradients off."""
    candidates = study.product(step, target)
    return [j for j in candidates if j.label in TWO_BLOCKS or j.arguments["target"] in GPUS]


STUDY = Study(
    "recompute",
    "What do the compilers make of blocks that are recomputed whole, with dropout and without?",
    jobs,
    row,
    tables,
)
