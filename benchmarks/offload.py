"""Does the compiled program offload what was planned, and behind compute?

The stack is 16 unrolled layers with two bfloat16 residuals of 64 MiB each, all of them on the host;
its temporaries stand beside those of `jax.checkpoint` around each layer. GPT-2 (bfloat16, batch 8,
length 1024) keeps queries, keys and values on the host, under a budget of 60 % of the plain peak.
All figures are the compiler's, ahead of time; what is hidden is read off its schedule.

    python -m benchmarks.offload --target cuda:h100 --json rows.json
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jdelta
from benchmarks import record
from benchmarks.models import build
from benchmarks.record import Row, mib, share
from jdelta._measure import Measurement, measure
from jdelta._target import resolve

LAYERS, ROWS, WIDTH = 16, 32768, 1024
PROGRAMS = ("stack", "gpt2 scanned", "gpt2 unrolled")
TARGETS = ("tpu:v5e:2x2", "tpu:v5p:2x2x1", "cuda:h100", "cuda:a100")
HEADS = "program target temporaries by-hand planned host hidden".split()
HEADS_OF_ATTENTION = {f"*/{name}_proj": "offload" for name in ("query", "key", "value")}


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])


def stack(unit: Callable[..., Any]) -> Callable[..., Any]:
    """Loss and gradients of the stack."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w in weights:
                y = unit(w, y)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(weights)

    return step


def shapes() -> tuple[Any, ...]:
    """The stack's weights and input."""
    pair = (jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16),) * 2
    return [pair] * LAYERS, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)


def size(*arrays: Any) -> int:
    """Bytes of arrays, such as the stack's arguments and its results."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def by_hand(target: str) -> Measurement:
    """The stack under `jax.checkpoint`, nothing saved inside a layer."""
    where = resolve(target)
    traced = jax.jit(stack(jax.checkpoint(layer))).trace(*where.abstract(shapes()))
    return measure(traced.lower(lowering_platforms=(where.platform,)), where)[1]


def row(step: str, target: str) -> Row:
    """One program on one target."""
    if step == "stack":
        weights, x = shapes()
        marked, pin = stack(jdelta.remat(layer)), {"*/tanh*": "offload"}
        plan = jdelta.plan(marked, "1GiB", weights, x, target=target, pin=pin)
        found = {
            "temporaries": plan.compiled_peak - size(weights, weights, x),
            "by_hand": by_hand(target).temporaries,
        }
    else:
        options = {"scan": True} if step == "gpt2 scanned" else {}
        case = build(
            "gpt2", batch=8, length=1024, dtype=jnp.bfloat16, remat=jdelta.remat, **options
        )
        args, pin = (case.state, case.batch), HEADS_OF_ATTENTION
        plan = jdelta.plan(case.step, 0.6, *args, target=target, donate_argnums=0, pin=pin)
        found = {}
    away = [r for r in plan.residuals if plan.decisions[r.name] is jdelta.Decision.OFFLOAD]
    overlap = plan.overlap
    return {
        **found,
        "compiled_peak": plan.compiled_peak,
        "budget": plan.budget,
        "planned": sum(r.bytes for r in away),
        "host": plan.host_bytes,
        "hidden": overlap.hidden,
        "seconds_out": overlap.seconds_out,
        "seconds_in": overlap.seconds_in,
        "exposed_out": overlap.exposed_out,
        "exposed_in": overlap.exposed_in,
    }


def cells(r: Row) -> list[str]:
    """One line of the table."""
    sizes = (mib(r.get(key)) for key in ("temporaries", "by_hand", "planned", "host"))
    return [r["step"], r["target"], *sizes, share(r["hidden"], 1.0)]


def main() -> None:
    options = record.parser(__doc__, PROGRAMS, TARGETS).parse_args()
    jobs = [
        {"step": step, "target": target}
        for step in options.step or PROGRAMS
        for target in options.target or TARGETS
    ]
    rows = record.run(jobs, row, options.json)
    record.show("offloaded as planned? (MiB)", HEADS, map(cells, rows))


if __name__ == "__main__":
    main()
