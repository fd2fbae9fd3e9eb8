"""What a loop over time costs within a fixed budget: plans that keep few of its states.

An iteration carries a state of 1 MiB. *as it is* is the plain step's peak, *states* how many of
them the plan keeps at a time. *runs* is how often an iteration is run, forward passes for
derivatives among them: once in the plain step, and by Griewank and Walther's formula under the
plan. *+* is what the plan is predicted to add to the step. On CPUs both steps are run, and
*measured +* is what the planned one takes more (the least of three runs each, in turns), where the
plain one fits in 8 GiB.

    python -m benchmarks run long_loops --target cpu
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jdelta
from benchmarks import study
from benchmarks.study import Job, Row, Study, mib, share
from jdelta._src.regions.binomial import runs_again

SIDE = 512
"""Of a state: 512 × 512 of float32 are 1 MiB."""

MOST = 8 << 30
"""Bytes that a plain step may take here to be run."""

HEADS = [
    *("step", "target", "iterations", "as it is", "budget", "peak", "states"),
    *("runs", "+", "measured +"),
]


def recurrent(w: Any, state: Any, force: Any) -> Any:
    """A recurrent network: a product and a tanh."""
    return jnp.tanh(state @ w) + force


def diffusion(w: Any, state: Any, force: Any) -> Any:
    """Heat that spreads over a plane, by finite differences; ``w`` says how fast where."""
    around = sum(jnp.roll(state, shift, axis) for shift in (1, -1) for axis in (0, 1))
    return state + 0.1 * jnp.tanh(w) * (around - 4 * state) + force


STEPS = {"recurrent network": recurrent, "diffusion": diffusion}


def training_step(name: str) -> Any:
    """The step of a cell of `STEPS`."""
    cell = STEPS[name]

    def step(w: Any, state: Any, forces: Any) -> Any:
        def loss(w: Any) -> Any:
            final, _ = lax.scan(lambda s, force: (cell(w, s, force), None), state, forces)
            return jnp.mean(final**2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    return step


def row(step: str, target: str, iterations: int, budget: str) -> Row:
    """Plans one loop to one budget; runs it if that is for the CPU."""
    fun = training_step(step)
    arrays = (
        0.02 * jax.random.normal(jax.random.key(0), (SIDE, SIDE)),
        jnp.ones((SIDE, SIDE)),
        jnp.linspace(0, 0.1, iterations),
    )
    args = arrays if target == "cpu" else jax.eval_shape(lambda: arrays)
    options = {} if target == "cpu" else {"target": target, "host_budget": 0}
    try:
        plan = jdelta.plan(fun, budget, *args, donate_argnums=0, **options)
    except jdelta.BudgetError as error:
        return {"error": str(error), "floor": error.floor}
    states = plan.grouping.states
    reruns = runs_again(iterations, states) + iterations if states else 0
    figures: Row = {
        "plain": plan.ceiling,
        "compiled_peak": plan.compiled_peak,
        "states": states,
        "runs": 1 + reruns / iterations,
        "overhead": plan.overhead,
        "step_seconds": plan.step_seconds,
    }
    if target == "cpu" and plan.ceiling <= MOST:
        figures["seconds"] = _in_turns({"plain": jax.jit(fun), "plan": plan.jit(fun)}, arrays)
    return figures


def _in_turns(steps: dict[str, Any], arrays: tuple[Any, ...]) -> dict[str, float]:
    """The least seconds of three runs of each step, one after the other."""
    seconds = dict.fromkeys(steps, float("inf"))
    for _ in range(4):  # the first compiles
        for name, step in steps.items():
            args = jax.block_until_ready(jax.tree.map(jnp.copy, arrays))
            begin = time.perf_counter()
            jax.block_until_ready(step(*args))
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return seconds


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    begun = [r["step"], r["target"], str(r["iterations"])]
    if "error" in r:
        return [*begun, "", r["budget"], "below floor", "", "", "", ""]
    seconds = r.get("seconds")
    measured = share(seconds["plan"] - seconds["plain"], seconds["plain"]) if seconds else ""
    return [
        *(*begun, mib(r["plain"]), r["budget"], mib(r["compiled_peak"]), str(r["states"])),
        *(f"{r['runs']:.2f}", share(r["overhead"], r["step_seconds"]), measured),
    ]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(
    step: Sequence[str] = tuple(STEPS),
    target: Sequence[str] = ("cpu", "tpu:v5p:2x2x1", "cuda:h100"),
    iterations: Sequence[int] = (1_000, 10_000),
    budget: Sequence[str] = ("256MiB", "64MiB", "24MiB"),
) -> list[Job]:
    """Every loop within every budget."""
    return study.product(step, target, iterations=iterations, budget=budget)


STUDY = Study(
    "long_loops",
    "What does a loop over time cost within a fixed budget?",
    jobs,
    row,
    tables,
)
