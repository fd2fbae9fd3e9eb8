"""How many instructions do random bits take on a TPU?

A TPU's compiler notes on each fusion how many cycles it expects it to take; the vector unit of a
core runs 8 x 128 x 4 instructions in a cycle. A mask of random bits (`jax.random.bernoulli`) takes
more of them than its bytes take cycles, so their quotient is the instructions of an element. For
each of JAX's generators, in one long array and in one with the shape of attention's scores; beside
it jdelta's own roofline, by the instructions of the compiled text and by the traced program.

    python -m benchmarks run random_bits

Results (jax 0.12.0.1, libtpu 0.0.50.1, CUDA 13 plug-in) stand in docs/how-it-works.md;
`jdelta/_src/estimate/seconds.py` prices random bits by them.
"""

import argparse
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import jax

from benchmarks import cases, study
from benchmarks.study import Row
from jdelta._src.backends.target import resolve
from jdelta._src.program.graph import graph_of

TARGETS = ("tpu:v5e:2x2", "tpu:v5p:2x2x1", "tpu:v6e:2x2", "cuda:a100", "cuda:h100")
CORES = {"tpu:v5p:2x2x1": 2}
PER_CYCLE = 8 * 128 * 4
SHAPES = {"flat": (1 << 26,), "scores": (8, 12, 1024, 1024)}
GENERATORS = ("threefry2x32", "rbg")
HEADS = "generator shape target instructions compiled traced".split()


def row(generator: str, shape: str, target: str) -> Row:
    """Compiles one mask.

    Args:
        generator: A name of ``jax.random.key``'s ``impl``.
        shape: A key of `SHAPES`.
        target: One of `TARGETS`.
    """

    def mask(seed: Any) -> Any:
        return jax.random.bernoulli(jax.random.key(seed, impl=generator), 0.9, SHAPES[shape])

    where = resolve(target)
    staged = jax.jit(mask).trace(*where.abstract((jax.ShapeDtypeStruct((), "uint32"),)))
    lower = functools.partial(staged.lower, lowering_platforms=(where.platform,))
    program = cases.Program(graph_of(staged.jaxpr), lower, where)
    issued = program.scheduled["cycles"] * PER_CYCLE * CORES.get(target, 1)
    return {
        "instructions": issued / math.prod(SHAPES[shape]),
        "compiled": program.scheduled["scheduled"],
        "traced": program.price.compute,
    }


def cells(r: Row) -> list[str]:
    """One line of the table; seconds in microseconds."""
    counted = f"{r['instructions']:.1f}" if r["instructions"] else "-"
    times = (f"{1e6 * r[reading]:.0f}" for reading in ("compiled", "traced"))
    return [r["generator"], r["shape"], r["target"], counted, *times]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows))

