"""What is a step priced at as it is traced, and by what its compiler made of it?

First the plain step, in seconds: *traced* is the roofline that plans are made with, of the program
before it is compiled; *compiled* the same rates on the instructions of the compiled one, fusions as
XLA makes them. For a TPU the second takes what the compiler leaves on the chip for free, so there
the cycles that it notes on its instructions stand beside them, at the clock that the chip's
published FLOP/s need of its matrix units. Then what plans for 80, 60 and 40 % of the plain peak add
to it: by their own *estimate*, by the program as it is traced under them, and by the instructions
of both compiled programs. Nothing is run on a device.

    python -m benchmarks run prices --target cuda:h100
"""

from collections.abc import Sequence

import jdelta
from benchmarks import cases, steps, study
from benchmarks.plans.budgets import refusal
from benchmarks.study import Job, Row, Study

SHARES = (None, 0.8, 0.6, 0.4)
HEADS = "step target traced compiled above cycles above".split()
ADDED = "step target budget estimate traced compiled".split()


def row(step: str, target: str, share: float | None) -> Row:
    """Prices one program.

    Args:
        step: A key of `steps.STEPS`.
        target: Where to compile for.
        share: The budget of a plan, as a part of the plain peak; None for the plain step.
    """
    plain = cases.traced(steps.build(step), target)
    if share is None:
        return _seconds(plain)
    case = steps.build(step, remat=jdelta.remat)
    found, plan = cases.plan(case, int(share * plain.measured.peak), target)
    if plan is None:
        return found
    planned = cases.planned(case, plan)
    return {
        "peak": plan.compiled_peak,
        "estimate": plan.overhead_share,
        "traced": planned.added_as_traced(plain),
        "compiled": planned.added(plain) if plain.scheduled else None,
    }


def _seconds(plain: cases.Program) -> Row:
    """The plain step by all readings."""
    traced, compiled, target = plain.price.compute, plain.scheduled, plain.target
    if not compiled:
        return {"traced": traced}
    seconds = {"traced": traced, "compiled": compiled["scheduled"]}
    if target.name in cases.PER_CYCLE:
        seconds["cycles"] = compiled["cycles"] / cases.clock(target)
    return seconds


def cells(r: Row) -> list[str]:
    """One line of the first table: milliseconds, and what *traced* is above the others."""
    head = [r["step"], r["target"], f"{1e3 * r['traced']:.1f}"]
    if "compiled" not in r:
        return [*head, "refused", "", "", ""]
    return [
        *head,
        *(cell for k in ("compiled", "cycles") for cell in _beside(r["traced"], r.get(k))),
    ]


def _beside(traced: float, seconds: float | None) -> list[str]:
    """Another reading, and what the traced program is priced at above it."""
    return [f"{1e3 * seconds:.1f}", f"{traced / seconds - 1:+.0%}"] if seconds else ["", ""]


def added(r: Row) -> list[str]:
    """One line of the second table: what a plan adds, in percent of the plain step."""
    head = [r["step"], r["target"], f"{r['share']:.0%}"]
    if "error" in r:
        return [*head, refusal(r), "", ""]
    return [*head, *("" if r[k] is None else f"{r[k]:+.1%}" for k in ADDED[3:])]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: plain steps, and what plans add."""
    plain, plans = (
        [r for r in rows if (r["share"] is None) == is_plain] for is_plain in (True, False)
    )
    return "\n\n".join(
        [
            study.table(HEADS, map(cells, plain), plain),
            study.table(ADDED, map(added, plans), plans),
        ]
    )


def jobs(
    step: Sequence[str] = steps.PLANNED,
    target: Sequence[str] = steps.TWO_TARGETS,
    share: Sequence[float | None] = SHARES,
) -> list[Job]:
    return study.product(step, target, share=share)


STUDY = Study(
    "prices",
    "What is a step priced at as it is traced, and by what its compiler made of it?",
    jobs,
    row,
    tables,
)
