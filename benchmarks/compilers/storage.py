"""What the TPU and CUDA compilers store: the facts behind `jdelta/_src/estimate/buffers.py`.

Each program comes twice, with a question that differs in one thing only. Figures are temporaries
in MiB as the compiler reports them, ahead of time, and as `jdelta` simulates them.

    python -m benchmarks run storage

Results (jax 0.12.0.1, libtpu 0.0.50.1, CUDA 13 plug-in 0.12.0.1) stand in docs/internals/memory.md.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks import steps, study
from benchmarks.study import Job, Row, Study, mib
from jdelta._src.backends.target import resolve
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.estimate.memory import timeline
from jdelta._src.hlo.measure import measure
from jdelta._src.program.graph import graph_of

F32 = jnp.float32


def stack(
    elementwise: bool = False, cast: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A loop stacks float32 values, 256 MiB; a second one reads them in a product, or not only."""

    def program(x, w):
        def forward(c, _):
            c = jnp.tanh(c @ w)
            return c, c

        _, stacked = jax.lax.scan(forward, x, length=16)

        def backward(c, saved):
            saved = saved.astype(jnp.bfloat16).astype(F32) if cast else saved
            return c + saved.T @ c + (saved * 2.0 if elementwise else 0.0), None

        return jax.lax.scan(backward, x, stacked, reverse=True)[0]

    return program, (jax.ShapeDtypeStruct((2048, 2048), F32),) * 2


def weights(
    elementwise: bool = False, cast: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A loop over float32 weights, 256 MiB, that reads each in a product, or not only."""
    dtype = jnp.bfloat16 if cast else F32

    def program(x, ws):
        def body(c, w):
            w = w.astype(dtype)
            return jnp.tanh(c @ w) + (w if elementwise else 0), None

        return jax.lax.scan(body, x, ws)[0]

    x = jax.ShapeDtypeStruct((2048, 2048), dtype)
    return program, (x, jax.ShapeDtypeStruct((16, 2048, 2048), F32))


def rows(product: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A loop that stacks 64 MiB in each iteration: a matrix product, or an element-wise one."""

    def program(xs, ys):
        def body(_, row):
            x, y = row
            return None, x.T @ y if product else x[0][:, None] * y[0]

        return jax.lax.scan(body, None, (xs, ys))[1]

    return program, (jax.ShapeDtypeStruct((4, 8, 4096), F32),) * 2


def row_scatter(batched: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The derivative of picking one logit a row: by `take_along_axis`, or by a flat `take`."""

    def loss(w, x, labels):
        logits = x @ w
        picked = (
            jnp.take_along_axis(logits, labels[:, None], axis=-1)
            if batched
            else jnp.take(logits.reshape(-1), labels + jnp.arange(len(labels)) * 32768)
        )
        return jax.nn.logsumexp(logits, axis=-1).mean() - picked.mean()

    shapes = ((512, 32768), (4096, 512))
    args = tuple(jax.ShapeDtypeStruct(s, F32) for s in shapes)
    return jax.grad(loss, argnums=(0, 1)), (*args, jax.ShapeDtypeStruct((4096,), jnp.int32))


def picked() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A cross-entropy of bfloat16 logits that are cast to float32 first."""

    def program(w, x, labels):
        logits = (x @ w).astype(F32)
        ours = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        return jax.nn.logsumexp(logits, axis=-1).mean() - ours.mean()

    args = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 32768), (4096, 512)))
    return program, (*args, jax.ShapeDtypeStruct((4096,), jnp.int32))


def product(
    rows: int, contracted: int, chained: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A product of float32 matrices, over any dimension: six tiles of the result each 128 rows.

    The first matrix is an argument, or made by another product for this one.
    """

    def program(a, b):
        return a @ b

    def after_another(a, b, c):
        return (a @ c) @ b

    shapes = ((rows, 768 if chained else contracted), (contracted, 768), (768, contracted))
    args = tuple(jax.ShapeDtypeStruct(s, F32) for s in shapes)
    return (after_another, args) if chained else (program, args[:2])


def sum_read_twice(kept: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A sum of two products, read before and after a third product; the two are then too, or not.

    So do residual blocks: the gradient of what follows the sum needs its sign.
    """

    def program(x, w, v):
        a, b = x @ w, x @ v
        both = a + b
        after = jnp.maximum(both, 0.0) @ w
        result = jnp.where(both > 0, after, 0.0)
        return result * a * b if kept else result

    return program, (jax.ShapeDtypeStruct((4096, 4096), F32),) * 3


def activation(exact: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of two dense layers with a GELU between them, exact or by `tanh`."""

    def loss(w, v, x):
        return jnp.mean((jax.nn.gelu(x @ w, approximate=not exact) @ v) ** 2)

    return jax.grad(loss, argnums=(0, 1)), (jax.ShapeDtypeStruct((4096, 4096), F32),) * 3


def dropout() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of two dense layers with dropout between them."""

    def loss(w, v, x):
        h = x @ w
        mask = jax.random.bernoulli(jax.random.key(0), 0.9, h.shape)
        return jnp.mean((jnp.where(mask, h, 0.0) @ v) ** 2)

    return jax.grad(loss, argnums=(0, 1)), (jax.ShapeDtypeStruct((4096, 4096), F32),) * 3


def attention(masked: bool, keys: int = 1024) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of bfloat16 attention with its softmax in float32, a mask before it or not.

    The more keys there are, the fewer heads.
    """

    def loss(q, k, v):
        scores = jnp.einsum("hqd,hkd->hqk", q, k).astype(F32)
        if masked:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e30)
        weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
        out = jnp.einsum("hqk,hkd->hqd", weights, v)
        return jnp.mean(out.astype(F32) ** 2)

    heads = 96 * 1024 // keys
    shapes = ((heads, 1024, 64), (heads, keys, 64), (heads, keys, 64))
    args = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    return jax.grad(loss, argnums=(0, 1, 2)), args


def residual_layers(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of layers that add to what comes in; the products are kept too."""

    def loss(w, x):
        for _ in range(layers):
            x = x + jnp.tanh(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    return jax.grad(loss), (jax.ShapeDtypeStruct((4096, 4096), F32),) * 2


def recomputed(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of layers whose results are kept, the 128 MiB inside each computed again."""

    def forward(ws, x):
        for w in ws:
            x = checkpoint_name(jnp.tanh(x @ w) @ w.T, "kept")
        return jnp.mean(x**2)

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    x, w = ((2048, 512), (512, 16384))
    args = [jax.ShapeDtypeStruct(w, F32)] * layers, jax.ShapeDtypeStruct(x, F32)
    return jax.grad(jax.checkpoint(forward, policy=policy)), args


def table(tied: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Float32 rows are cast and looked up; as many are cast and multiplied: the same, or others."""

    def program(rows, others, w, ids):
        def layer(x, _):
            x = jnp.tanh(x @ w)
            return x, x

        x, stacked = jax.lax.scan(layer, rows.astype(jnp.bfloat16)[ids], length=4)
        x = x + stacked.sum(0)
        return x.T @ (rows if tied else others).astype(jnp.bfloat16)

    rows = jax.ShapeDtypeStruct((65536, 512), F32)
    w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    return program, (rows, rows, w, jax.ShapeDtypeStruct((65536,), jnp.int32))


def image(features: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Two convolutions, 64 images of 112 x 112 pixels and some features between them."""

    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def program(x, first, second):
        return convolved(convolved(x, first), second)

    shapes = ((64, 112, 112, 8), (3, 3, 8, features), (3, 3, features, 8))
    return program, tuple(jax.ShapeDtypeStruct(s, F32) for s in shapes)


PROGRAMS = {
    "256 MiB stack, read by products only": stack(),
    "256 MiB stack, read element-wise too": stack(elementwise=True),
    "256 MiB stack, cast to bfloat16, read element-wise too": stack(elementwise=True, cast=True),
    "256 MiB stacked weights, read by products only": weights(),
    "256 MiB stacked weights, read element-wise too": weights(elementwise=True),
    "256 MiB stacked weights, cast to bfloat16, element-wise too": weights(
        elementwise=True, cast=True
    ),
    "64 MiB stacked in each iteration, made by a product": rows(product=True),
    "64 MiB stacked in each iteration, made element-wise": rows(product=False),
    "512 MiB logits, gradient of take_along_axis": row_scatter(batched=True),
    "512 MiB logits, gradient of flat take": row_scatter(batched=False),
    "256 MiB bfloat16 logits, cast, one of each row picked": picked(),
    "48 tiles, product over 50272 = 16 · 3142": product(1024, 50272),
    "48 tiles, product over 50264 = 8 · 6283": product(1024, 50264),
    "48 tiles, product over 50257": product(1024, 50257),
    "48 tiles, product over 50257 of what another made": product(1024, 50257, chained=True),
    "126 tiles, product over 50257": product(21 * 128, 50257),
    "132 tiles, product over 50257": product(22 * 128, 50257),
    "192 tiles, product over 50257": product(4096, 50257),
    "sum of two 64 MiB products, read twice": sum_read_twice(kept=False),
    "sum of two 64 MiB products, these read at the end too": sum_read_twice(kept=True),
    "gradient through a 64 MiB GELU by tanh": activation(exact=False),
    "gradient through a 64 MiB GELU by erfc": activation(exact=True),
    "gradient through 64 MiB with dropout": dropout(),
    "gradient through 192 MiB scores, softmax in float32": attention(masked=False),
    "gradient through 192 MiB scores, masked in float32": attention(masked=True),
    "gradient through 192 MiB scores, softmax over 16384": attention(masked=False, keys=16384),
    "gradient through 192 MiB scores, softmax over 32768": attention(masked=False, keys=32768),
    "gradient of 4 layers that add 64 MiB": residual_layers(4),
    "gradient of 8 layers that add 64 MiB": residual_layers(8),
    "gradient of 2 layers, 128 MiB in each recomputed": recomputed(2),
    "gradient of 4 layers, 128 MiB in each recomputed": recomputed(4),
    "128 MiB table, cast and looked up; another, cast, multiplied": table(tied=False),
    "128 MiB table, cast and looked up; the same, cast, multiplied": table(tied=True),
    "196 MiB images of 64 features": image(64),
    "392 MiB images of 128 features": image(128),
}
FIGURES = ("temporaries", "simulated")
HEADS = ["program", *(head for t in steps.TWO_TARGETS for head in (t, "simulated"))]


def row(step: str, target: str) -> Row:
    """Temporary bytes of a program on a target: as compiled, and as jdelta simulates them."""
    program, shapes = PROGRAMS[step]
    where = resolve(target)
    traced = jax.jit(program).trace(*where.abstract(shapes))
    simulated = timeline(graph_of(traced.jaxpr), Compiler(where.backend)).peak
    lowered = traced.lower(lowering_platforms=(where.platform,))
    return {"temporaries": measure(lowered, where)[1].temporaries, "simulated": simulated}


def tables(rows: list[Row]) -> str:
    """One line a program; sizes in MiB."""
    by_job = {(r["step"], r["target"]): r for r in rows}
    lines = [
        [step, *(_cell(by_job.get((step, t)), k) for t in steps.TWO_TARGETS for k in FIGURES)]
        for step in study.values(rows, "step")
    ]
    return study.table(HEADS, lines, rows)


def _cell(r: Row | None, figure: str) -> str:
    return mib(r[figure]) if r else "not run"


def jobs(
    step: Sequence[str] = tuple(PROGRAMS), target: Sequence[str] = steps.TWO_TARGETS
) -> list[Job]:
    return study.product(step, target)


STUDY = Study(
    "storage",
    "What do the compilers store, and does jdelta simulate as much?",
    jobs,
    row,
    tables,
)
