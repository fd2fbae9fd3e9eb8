"""What a TPU's compiler expects a product to take, beside the roofline that jdelta prices it by.

Products of bfloat16: square matrices, those of an MLP and a projection of GPT-2 (8 sequences of
1024), and its queries with its keys. *noted* are the cycles that the compiler writes on its
instructions, at the clock that the chip's peak implies.

    python -m benchmarks run cycles

Results (jax 0.12.0.1, libtpu) stand in docs/how-it-works.md: both agree on large matrices, narrow
ones do not fill the matrix units.
"""

import jax
import jax.numpy as jnp

from benchmarks import cases, study
from benchmarks.study import Row
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.overlap import read_overlap
from jdelta._src.hlo.text import parse

TARGETS = tuple(cases.PER_CYCLE)
PRODUCTS = {
    "square": ("ij,jk->ik", (4096, 4096), (4096, 4096)),
    "MLP": ("ij,jk->ik", (8192, 768), (768, 3072)),
    "projection": ("ij,jk->ik", (8192, 768), (768, 768)),
    "scores": ("bij,bkj->bik", (96, 1024, 64), (96, 1024, 64)),
}
HEADS = ("product", "target", "roofline", "noted", "more")


def row(step: str, target: str) -> Row:
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


def cells(r: Row) -> list[str]:
    """One line of the table, in microseconds."""
    both = r["roofline"], r["noted"]
    more = f"{r['noted'] / r['roofline'] - 1:+.0%}"
    return [r["step"], r["target"], *(f"{1e6 * seconds:.0f}" for seconds in both), more]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows))

