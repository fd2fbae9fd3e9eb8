"""What does it cost not to mark anything? Plans of one step at one budget, marked and not.

The budget is a share of the plain step's compiled peak. Overheads are predicted by one cost model
for all: *plan* is what the plan says that its decisions add to the plain step, *+* what the traced
program under the plan, with the transfers that its schedule exposes, takes more than the plain one.
Nothing is run on a device.

    python -m benchmarks run unmarked --target cuda:h100
"""

from collections.abc import Sequence

from benchmarks import cases, steps, study
from benchmarks.steps import UNITS
from benchmarks.study import Job, Row, Study, mib, share

STEPS = (*steps.SMALL, "unet")
SHARES = (0.8, 0.6, 0.5)
HEADS = [
    "step",
    "target",
    "budget",
    *(f"{units} {what}" for units in UNITS for what in ("peak", "plan", "+")),
]


def row(step: str, target: str, share: float) -> Row:
    """Plans one step to a share of the plain step's peak, both ways."""
    plain = cases.traced(steps.build(step), target)
    budget = int(share * plain.measured.peak)
    plans = {
        units: cases.plan(steps.build(step, remat=remat), budget, target)[0]
        for units, remat in UNITS.items()
    }
    return {"budget": budget, "plain_seconds": plain.price.seconds, **plans}


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    figures: list[str] = []
    for units in UNITS:
        plan, plain = r[units], r["plain_seconds"]
        if "error" in plan:
            figures += ["below floor", mib(plan["floor"]), "-"]
        else:
            added = share(plan["price"]["seconds"] - plain, plain)
            figures += [mib(plan["compiled_peak"]), share(plan["overhead"], plain), added]
    return [r["step"], r["target"], mib(r["budget"]), *figures]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(
    step: Sequence[str] = STEPS,
    target: Sequence[str] = steps.TWO_TARGETS,
    share: Sequence[float] = SHARES,
) -> list[Job]:
    return study.product(step, target, share=share)


STUDY = Study(
    "unmarked",
    "What does it cost not to mark anything?",
    jobs,
    row,
    tables,
)
