"""How far do peaks depend on whose kernels XLA:GPU takes for products?

On a device it times kernels and takes the quickest: on an H200 mostly those of cuBLAS in float32.
Ahead of time there is nothing to time, and all are those that it writes itself, with Triton. Here
the plain step, two hand policies and a plan for 30 % of the plain peak are compiled ahead of time
once more, with Triton turned off.

    python -m benchmarks run kernels

Results (jax 0.12.0.1, CUDA 13 plug-in) stand in docs/how-it-works.md: other kernels fuse other
operations, so other buffers have to be packed, and a large one finds a gap or does not.
"""

from collections.abc import Sequence

from benchmarks import cases, policies, steps, study
from benchmarks.plans.budgets import refusal
from benchmarks.study import Job, Row, Study, mib
from jdelta import remat
from jdelta._src.hlo.measure import measure

TARGETS = ("cuda:h100",)
NAMES = ("gpt2 scanned", "llama scanned", "gpt2-large scanned")
PLAN = "plan 30%"
VARIANTS = ("plain", "nothing_saveable", "dots_saveable", PLAN)
HEADS = ("step", "target", "program", "Triton", "cuBLAS", "more")
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def row(step: str, target: str, variant: str) -> Row:
    """Compile a program of a step both ways."""
    if variant == PLAN:
        case = steps.build(step, remat=remat)
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


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    head = [r["step"], r["target"], r["variant"]]
    if "error" in r:
        return [*head, refusal(r), "", ""]
    return [*head, mib(r["triton"]), mib(r["cublas"]), f"{r['cublas'] / r['triton'] - 1:+.1%}"]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(
    step: Sequence[str] = NAMES,
    target: Sequence[str] = TARGETS,
    variant: Sequence[str] = VARIANTS,
) -> list[Job]:
    return study.product(step, target, variant=variant)


STUDY = Study(
    "kernels",
    "How far do peaks depend on whose kernels XLA:GPU takes for products?",
    jobs,
    row,
    tables,
)
