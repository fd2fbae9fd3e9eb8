"""How far do peaks depend on whose kernels XLA:GPU takes for products?

On a device it times kernels and takes the quickest, in float32 mostly those of cuBLAS, in bfloat16
those that it writes itself with Triton. Ahead of time there is nothing to time: all are Triton's.
Here the plain step, everything recomputed and a plan for half of the plain peak are compiled ahead
of time once more, with Triton turned off.

    python -m benchmarks.xla.kernels --json benchmarks/results/kernels.json

Results (jax 0.12.0.1, CUDA 13 plug-in) stand in docs/how-it-works.md: a kernel of cuBLAS cannot
compute what it multiplies, so that has a buffer of its own, and may have one more than ahead of
time was seen.
"""

from benchmarks import programs, record
from benchmarks.budgets import STEPS, refusal
from benchmarks.models import build
from benchmarks.record import Row, mib
from jdelta import remat
from jdelta._measure import measure

TARGETS = ("cuda:h100",)
NAMES = [name for name in STEPS if name.endswith(" scanned")]
VARIANTS = ("plain", "recomputed", "plan 50%")
HEADS = ("step", "target", "program", "Triton", "cuBLAS", "more")
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def row(step: str, target: str, variant: str) -> Row:
    """Compile a program of a step both ways."""
    plain = programs.traced(build(**STEPS[step]), target)
    program = plain
    case = build(**STEPS[step], remat=remat)
    if variant == "recomputed":
        program = programs.recomputed(case, target)
    elif variant != "plain":
        figures, plan = programs.plan(case, plain.measured.peak // 2, target)
        if plan is None:
            return figures
        program = programs.planned(case, plan)
    options = {**program.options, **NO_TRITON}
    _, other = measure(program.lower(), program.target, options)
    return {"triton": program.measured.peak, "cublas": other.peak}


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    head = [r["step"], r["target"], r["variant"]]
    if "error" in r:
        return [*head, refusal(r), "", ""]
    return [*head, mib(r["triton"]), mib(r["cublas"]), f"{r['cublas'] / r['triton'] - 1:+.1%}"]


def markdown(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return record.table(HEADS, map(cells, rows))


def main() -> None:
    options = record.options(record.parser(__doc__, NAMES, TARGETS), markdown)
    jobs = record.jobs(options.target or TARGETS, options.step or NAMES, variant=VARIANTS)
    rows = record.run(jobs, row, options.json)
    record.show("peak by whose kernels multiply (MiB)", HEADS, map(cells, rows))


if __name__ == "__main__":
    main()
