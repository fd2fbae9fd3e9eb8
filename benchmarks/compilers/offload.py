"""Does the compiled program offload what was planned, and behind compute?

The stack is 16 unrolled layers with two bfloat16 residuals of 64 MiB each, all of them on the host;
its temporaries stand beside those of `jax.checkpoint` around each layer. GPT-2 (bfloat16, batch 8,
length 1024) keeps queries, keys and values on the host, under a budget of 60 % of the plain peak;
on a TPU v5e these take the link longer than a forward pass takes. So GPT-2, BERT and Llama also
have rows with nothing but the queries on the host, and the rest recomputed; Llama 3 only where its
weights fit. GPT2-XL (unrolled, otherwise as GPT-2) has every second residual on the host, as many
as make up half of the bytes, and recomputes or keeps the rest; its peak stands beside that of
`jax.checkpoint` around each block, and *kept* is what the plan keeps in them: both together are its
budget.
All figures are the compiler's, ahead of time; what is hidden is read off its schedule. On TPUs it
is also read with the cycles that the compiler expects of its instructions, in brackets: those know
what a product of such a shape makes of the matrix units, the roofline does not.

    python -m benchmarks run offload --target cuda:h100
"""

import functools
import glob
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jdelta
from benchmarks import cases, steps, study
from benchmarks.study import Job, Row, Study, mib, share
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.measure import Measurement, measure
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.links import offload_refusal
from jdelta._src.residuals.residual import residuals

LAYERS, ROWS, WIDTH = 16, 32768, 1024
QUERIES = {
    "gpt2": "*/query_proj",
    "bert-base": "*/query/add",
    "llama-160m": "*/query_proj",
    "llama3-8b": "*/query_proj",
}
STEPS = (
    *("gpt2 bfloat16 scanned", "gpt2 bfloat16 unrolled"),
    *("bert-base bfloat16 scanned", "bert-base bfloat16 unrolled"),
    *("llama bfloat16 scanned", "llama bfloat16 unrolled", "llama3-8b scanned"),
)
"""The steps whose queries move."""
HEADS = "program target taken by-hand kept planned host hidden".split()


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])


def stack(marked: Callable[..., Any]) -> Callable[..., Any]:
    """Loss and gradients of the stack."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w in weights:
                y = marked(w, y)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(weights)

    return step


def shapes(layers: int = LAYERS) -> tuple[Any, ...]:
    """The stack's weights and input."""
    pair = (jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16),) * 2
    return [pair] * layers, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)


def size(*arrays: Any) -> int:
    """Bytes of arrays, such as the stack's arguments and its results."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def by_hand(target: str, layers: int = LAYERS) -> Measurement:
    """The stack under `jax.checkpoint`, nothing saved inside a layer."""
    where = resolve(target)
    traced = jax.jit(stack(jax.checkpoint(layer))).trace(*where.abstract(shapes(layers)))
    return measure(traced.lower(lowering_platforms=(where.platform,)), where)[1]


def heads_away(target: str, step: str) -> tuple[Row, jdelta.Plan]:
    """A step with queries, keys and values on the host."""
    case = steps.build(step, remat=jdelta.remat)
    pin = {f"*/{name}_proj": "offload" for name in ("query", "key", "value")}
    args = case.state, case.batch
    return {}, jdelta.plan(case.step, 0.6, *args, target=target, donate_argnums=0, pin=pin)


def queries(step: str, target: str, decision: str, **options: Any) -> jdelta.Plan:
    """A step of `STEPS` with one decision for the queries of all layers, and the rest recomputed.

    `options` are arguments of `models.build` in place of the step's own.
    """
    case = steps.build(step, **options, remat=jdelta.remat)
    args = case.state, case.batch
    pin = {"*": "recompute", QUERIES[steps.STEPS[step]["name"]]: decision}
    return jdelta.plan(case.step, None, *args, target=target, donate_argnums=0, pin=pin)


def queries_away(target: str, step: str) -> tuple[Row, jdelta.Plan]:
    """A step with its queries on the host."""
    return {}, queries(step, target, "offload")


def stack_away(target: str) -> tuple[Row, jdelta.Plan]:
    """The stack with both residuals of each layer on the host."""
    weights, x = shapes()
    marked, pin = stack(jdelta.remat(layer)), {"*": "recompute", "*/tanh*": "offload"}
    plan = jdelta.plan(marked, "1GiB", weights, x, target=target, pin=pin)
    temporaries = plan.compiled_peak - size(weights, weights, x)
    return {"temporaries": temporaries, "by_hand": by_hand(target).temporaries}, plan


def half_away(target: str, rest: str) -> tuple[Row, jdelta.Plan]:
    """GPT2-XL with half of its residuals' bytes on the host, and the rest recomputed or saved.

    The budget is the peak of recompute by hand, and what is kept.
    """
    step = "gpt2-xl unrolled"
    hand = cases.traced(steps.build(step, remat=steps.checkpointed(step)), target)
    case = steps.build(step, remat=jdelta.remat)
    args = case.state, case.batch
    step_trace = trace(case.step, *hand.target.abstract(args))
    needed = [r for g in step_trace.regions for r in residuals(g, hand.target) if r.needed]
    movable = [r for r in needed if offload_refusal(r, hand.target) is None]
    order = (*movable[::2], *movable[1::2])
    filled = itertools.accumulate(r.bytes for r in order)
    half = sum(r.bytes for r in needed) / 2
    away = {r.name for r, total in zip(order, filled, strict=True) if total <= half}
    here = (r.bytes for r in needed if r.name not in away and not r.region_input)
    budget = hand.measured.peak + (sum(here) if rest == "save" else 0)
    pin = {"*": rest, **dict.fromkeys(map(glob.escape, away), "offload")}
    plan = jdelta.plan(case.step, budget, *args, target=target, donate_argnums=0, pin=pin)
    return {"by_hand": hand.measured.peak}, plan


MAKES: dict[str, Callable[[str], tuple[Row, jdelta.Plan]]] = {
    "stack": stack_away,
    **{f"{step}, queries": functools.partial(queries_away, step=step) for step in STEPS},
    **{
        f"{step}, q, k and v": functools.partial(heads_away, step=step)
        for step in ("gpt2 bfloat16 scanned", "gpt2 bfloat16 unrolled")
    },
    "gpt2-xl unrolled, half": functools.partial(half_away, rest="recompute"),
    "gpt2-xl unrolled, half, rest kept": functools.partial(half_away, rest="save"),
}


def row(step: str, target: str) -> Row:
    """One program on one target."""
    figures, plan = MAKES[step](target)
    chosen = plan.decisions
    away = [r for r in plan.residuals if chosen[r.name] is jdelta.Decision.OFFLOAD]
    kept = [r for r in plan.residuals if chosen[r.name] is jdelta.Decision.SAVE]
    overlap = plan.overlap
    noted: Row = {}
    if target in cases.PER_CYCLE:
        text = plan.compiled.as_text() or ""
        noted = {"by_cycles": cases.overlap_by_cycles(text, resolve(target)).hidden}
    return {
        **figures,
        "compiled_peak": plan.compiled_peak,
        "budget": plan.budget,
        "planned": sum(r.bytes for r in away),
        "kept": sum(r.bytes for r in kept if r.needed and not r.region_input),
        "host": plan.host_bytes,
        "hidden": overlap.hidden,
        **noted,
        "seconds_out": overlap.seconds_out,
        "seconds_in": overlap.seconds_in,
        "exposed_out": overlap.exposed_out,
        "exposed_in": overlap.exposed_in,
    }


def cells(r: Row) -> list[str]:
    """One line of the table."""
    taken = r.get("temporaries", r["compiled_peak"])
    kept = r.get("kept") if "by_hand" in r else None
    sizes = map(mib, (taken, r.get("by_hand"), kept, r["planned"], r["host"]))
    return [r["step"], r["target"], *sizes, hidden(r)]


def hidden(r: Row) -> str:
    """What a schedule hides, by the roofline and by the cycles that are noted on it."""
    noted = f" ({share(r['by_cycles'], 1.0)})" if "by_cycles" in r else ""
    return share(r["hidden"], 1.0) + noted


def tables(rows: list[Row]) -> str:
    """Two tables of the docs: peaks beside recompute by hand, and what schedules hide."""
    beside = [r for r in rows if "by_hand" in r]
    others = [r for r in rows if "by_hand" not in r]
    shares = {(r["step"], r["target"]): hidden(r) for r in others}
    lines = [
        [step, *(shares.get((step, target), "not run") for target in steps.FOUR_TARGETS)]
        for step in study.values(others, "step")
    ]
    return study.page(
        [
            study.table(HEADS, map(cells, beside), beside),
            study.table(["program", *steps.FOUR_TARGETS], lines, others),
        ]
    )


def jobs(
    step: Sequence[str] = tuple(MAKES), target: Sequence[str] = steps.FOUR_TARGETS
) -> list[Job]:
    return [Job(s, {"target": t}) for s in step for t in target]


STUDY = Study(
    "offload",
    "Does the compiled program offload what was planned, and behind compute?",
    jobs,
    row,
    tables,
)
