"""How near peaks come that were known before: simulated, and compiled with other kernels.

*simulated*: the plain step, and plans that keep 0, 20, 40 and 60 % of the bytes of all residuals
(nothing offloaded), simulated before anything was compiled, and compiled.

*kernels*: on a device XLA:GPU times kernels for products and takes the quickest: on an H200 mostly
those of cuBLAS in float32. Ahead of time there is nothing to time, and all are those that it writes
itself, with Triton. Here the plain step, two hand policies and a plan for 30 % of the plain peak
are compiled ahead of time once more, with Triton turned off. Other kernels fuse other operations,
so other buffers have to be packed, and a large one finds a gap or does not.

    python -m benchmarks run peaks --what simulated --target cuda:h100

Results (jax 0.12.0.1, CUDA 13 plug-in) stand in docs/results/peaks.md.
"""

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import jdelta
from benchmarks import cases, policies, steps, study
from benchmarks.plans.budgets import refusal
from benchmarks.study import Job, Row, Study, mib
from jdelta._src.hlo.measure import measure
from jdelta._src.passes.emit import Step, emit
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import Trace
from jdelta._src.residuals.items import items_of
from jdelta._src.residuals.pins import NO_PINS
from jdelta._src.residuals.region_inputs import with_region_inputs
from jdelta._src.solver import Knapsack

KEPT = (None, 0.0, 0.2, 0.4, 0.6)
GPUS = ("cuda:h100",)
OF_KERNELS = ("gpt2 scanned", "llama scanned", "gpt2-large scanned")
PLAN = "plan 30%"
VARIANTS = ("plain", "nothing_saveable", "dots_saveable", PLAN)
KERNEL_HEADS = ("step", "target", "program", "Triton", "cuBLAS", "more")
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def row(step: str, what: str, **asked: Any) -> Row:
    """One program of a step, simulated and compiled; or compiled with other kernels."""
    return (simulated_row if what == "simulated" else kernels_row)(step, **asked)


def simulated_row(step: str, target: str, kept: float | None) -> Row:
    """Simulate and compile one program; ``kept`` is None for the plain step."""
    staged, trace = traced(step, target)
    emission = emit(staged, None if kept is None else policy(staged, trace, kept))
    measured = measure(emission.lower(), staged.target, emission.options)[1]
    return {"simulated": emission.simulated, "compiled": measured.peak}


@functools.lru_cache(maxsize=1)
def traced(step: str, target: str) -> tuple[Step, Trace]:
    """A step for a target."""
    return cases.staged(steps.build(step, remat=jdelta.remat), target)


def policy(step: Step, trace: Trace, kept: float) -> Policy:
    """What DELTA's heuristic keeps in a part of the residuals' bytes, if keeping costs nothing."""
    target = step.target
    items = items_of(with_region_inputs(trace, target), target, 0.0, NO_PINS)
    total = sum(item.bytes for item in items.problem.items if item.needed)
    free = tuple(dataclasses.replace(item, holding=0.0) for item in items.problem.items)
    problem = dataclasses.replace(items.problem, items=free, capacity=kept * total)
    decisions = items.decisions(Knapsack().solve(problem).decisions)
    return Policy.of(items.policy_decisions(decisions), trace.loops, target.backend)


def error(r: Row) -> float:
    """What the simulation is too high by, as a part of the compiled peak."""
    return r["simulated"] / r["compiled"] - 1


def percent(r: Row) -> str:
    """The error, in percent."""
    return f"{error(r):+.1%}"


def errors(rows: list[Row]) -> str:
    """The errors of the simulation: one line a step and target."""
    lines: list[list[str]] = []
    for (step, target), step_rows in study.grouped(rows).items():
        group = {r["kept"]: r for r in step_rows}
        figures = (percent(group[k]) if k in group else "not run" for k in KEPT)
        lines.append([step, target, *figures])
    planned = [abs(error(r)) for r in rows if r["kept"] is not None]
    heads = ["step", "target", "plain", *(f"{k:.0%} kept" for k in KEPT[1:])]
    parts = [study.table(heads, lines, rows)]
    if planned:
        parts.append(f"Median of the plans' errors: {statistics.median(planned):.1%}")
    return study.page(parts)


def kernels_row(step: str, target: str, variant: str) -> Row:
    """Compile a program of a step both ways."""
    if variant == PLAN:
        case = steps.build(step, remat=jdelta.remat)
        budget = int(0.3 * policies.plain(step, target).measured.peak)
        figures, plan = cases.plan(case, budget, target)
        if plan is None:
            return figures
        program = cases.planned(case, plan)
    else:
        program = policies.variant(variant, step, target)
        assert not isinstance(program, str), program
    options = {**program.options, **NO_TRITON}
    _, other = measure(program.lower(), program.target, options)
    return {"triton": program.measured.peak, "cublas": other.peak}


def kernel_cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    head = [r["step"], r["target"], r["variant"]]
    if "error" in r:
        return [*head, refusal(r), "", ""]
    return [*head, mib(r["triton"]), mib(r["cublas"]), f"{r['cublas'] / r['triton'] - 1:+.1%}"]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: errors of the simulation, and other kernels."""
    simulated = [r for r in rows if r["what"] == "simulated"]
    kernels = [r for r in rows if r["what"] == "kernels"]
    of_kernels = study.table(KERNEL_HEADS, map(kernel_cells, kernels), kernels)
    return study.page([errors(simulated), of_kernels])


EVERY_STEP = tuple(dict.fromkeys((*steps.PLANNED, *OF_KERNELS)))


def jobs(
    what: Sequence[str] = ("simulated", "kernels"),
    step: Sequence[str] = EVERY_STEP,
    target: Sequence[str] = steps.TWO_TARGETS,
    kept: Sequence[float | None] = KEPT,
    variant: Sequence[str] = VARIANTS,
) -> list[Job]:
    """Parts of the residuals that are kept; variants on GPUs, as others have no such choice."""
    job_list: list[Job] = []
    if "simulated" in what:
        own = steps.PLANNED if step == EVERY_STEP else step
        job_list += study.product(own, target, what=["simulated"], kept=kept)
    if "kernels" in what:
        own = OF_KERNELS if step == EVERY_STEP else step
        gpus = [t for t in target if t in GPUS]
        job_list += study.product(own, gpus, what=["kernels"], variant=variant)
    return job_list


STUDY = Study(
    "peaks",
    "How near does a peak come that was simulated, or compiled with other kernels than a GPU's?",
    jobs,
    row,
    tables,
)
