"""The cycles that a TPU's compiler expects of instructions, beside the roofline that jdelta uses.

*products* of bfloat16: square matrices, those of an MLP and a projection of GPT-2 (8 sequences of
1024), and its queries with its keys. *noted* are the cycles that the compiler writes on its
instructions, at the clock that the chip's peak implies. Both agree on large matrices, narrow ones
do not fill the matrix units.

*masks* of random bits (`jax.random.bernoulli`): the vector unit of a core runs 8 x 128 x 4
instructions in a cycle, and a mask takes more of them than its bytes take cycles, so their quotient
is the instructions of an element. For each of JAX's generators, in one long array and in one with
the shape of attention's scores; beside it jdelta's own roofline, by the instructions of the
compiled text and by the traced program. `jdelta/_src/estimate/seconds.py` prices random bits by
them.

Results (jax 0.12.0.1, libtpu 0.0.50.1, CUDA 13 plug-in) stand in docs/results/cycles.md.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import cases, study
from benchmarks.study import Job, Row, Study
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.overlap import read_overlap
from jdelta._src.hlo.text import parse
from jdelta._src.program.graph import graph_of

TARGETS = ("tpu:v5e:2x2", "tpu:v5p:2x2x1", "tpu:v6e:2x2", "cuda:a100", "cuda:h100")
CORES = {"tpu:v5p:2x2x1": 2}
PER_CYCLE = 8 * 128 * 4
"""Instructions that the vector unit of a TPU's core runs in a cycle."""

PRODUCTS = {
    "square": ("ij,jk->ik", (4096, 4096), (4096, 4096)),
    "MLP": ("ij,jk->ik", (8192, 768), (768, 3072)),
    "projection": ("ij,jk->ik", (8192, 768), (768, 768)),
    "scores": ("bij,bkj->bik", (96, 1024, 64), (96, 1024, 64)),
}
SHAPES = {"flat": (1 << 26,), "scores": (8, 12, 1024, 1024)}
GENERATORS = ("threefry2x32", "rbg")
MASKS = {
    f"mask, {generator}, {shape}": (generator, shape)
    for generator, shape in itertools.product(GENERATORS, SHAPES)
}
"""By label the name of ``jax.random.key``'s ``impl``, and a key of `SHAPES`."""

PRODUCT_HEADS = ("product", "target", "roofline", "noted", "more")
MASK_HEADS = "generator shape target instructions compiled traced".split()


def row(step: str, target: str) -> Row:
    """Compiles one product, or one mask."""
    return (of_mask if step in MASKS else of_product)(step, target)


def of_product(step: str, target: str) -> Row:
    """Compiles one product, and prices it twice."""
    equation, *shapes = PRODUCTS[step]
    where = resolve(target)
    operands = where.abstract([jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes])
    traced = jax.jit(lambda x, y: jnp.einsum(equation, x, y)).trace(*operands)
    text = traced.lower(lowering_platforms=(where.platform,)).compile().as_text() or ""
    return {
        "roofline": read_overlap(parse(text), where.rates).compute,
        "noted": cases.overlap_by_cycles(text, where).compute,
    }


def of_mask(step: str, target: str) -> Row:
    """Compiles one mask, and counts its instructions."""
    generator, shape = MASKS[step]

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


def product_cells(r: Row) -> list[str]:
    """One line of the table of products, in microseconds."""
    both = r["roofline"], r["noted"]
    more = f"{r['noted'] / r['roofline'] - 1:+.0%}"
    return [r["step"], r["target"], *(f"{1e6 * seconds:.0f}" for seconds in both), more]


def mask_cells(r: Row) -> list[str]:
    """One line of the table of masks; seconds in microseconds."""
    counted = f"{r['instructions']:.1f}" if r["instructions"] else "-"
    times = (f"{1e6 * r[reading]:.0f}" for reading in ("compiled", "traced"))
    return [*MASKS[r["step"]], r["target"], counted, *times]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: products, and masks."""
    products = [r for r in rows if r["step"] in PRODUCTS]
    masks = [r for r in rows if r["step"] in MASKS]
    return study.page(
        [
            study.table(PRODUCT_HEADS, map(product_cells, products), products),
            study.table(MASK_HEADS, map(mask_cells, masks), masks),
        ]
    )


def jobs(step: Sequence[str] = (*PRODUCTS, *MASKS), target: Sequence[str] = TARGETS) -> list[Job]:
    """Products for TPUs only, and those whose matrix units are known."""
    candidates = study.product(step, target)
    return [j for j in candidates if j.label in MASKS or j.arguments["target"] in cases.PER_CYCLE]


STUDY = Study(
    "cycles",
    "What does a TPU's compiler expect instructions to take, beside jdelta's roofline?",
    jobs,
    row,
    tables,
)
