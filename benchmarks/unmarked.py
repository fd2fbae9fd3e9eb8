"""What does it cost not to mark anything? Plans of one step at one budget, marked and not.

The budget is a share of the plain step's compiled peak. Overheads are predicted by one cost model
for all: *plan* is what the plan says that its decisions add to the plain step, *+* what the traced
program under the plan, with the transfers that its schedule exposes, takes more than the plain one.
Nothing is run on a device.

    python -m benchmarks.unmarked --target cuda:h100 --json benchmarks/results/unmarked.json
"""

from benchmarks import budgets, cases, record
from benchmarks.models import build
from benchmarks.record import Row, mib, share
from benchmarks.steps import UNITS

STEPS = {**budgets.SMALL, "unet": {"name": "unet"}}
SHARES = (0.8, 0.6, 0.5)
HEADS = [
    "step",
    "target",
    "budget",
    *(f"{units} {what}" for units in UNITS for what in ("peak", "plan", "+")),
]


def row(step: str, target: str, share: float) -> Row:
    """Plans one step to a share of the plain step's peak, both ways."""
    plain = cases.traced(build(**STEPS[step]), target)
    budget = int(share * plain.measured.peak)
    plans = {
        units: cases.plan(build(**STEPS[step], remat=remat), budget, target)[0]
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


def markdown(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return record.table(HEADS, map(cells, rows))


def main() -> None:
    options = record.options(record.parser(__doc__, STEPS, budgets.TARGETS), markdown)
    jobs = record.jobs(options.target or budgets.TARGETS, options.step or STEPS, share=SHARES)
    rows = record.run(jobs, row, options.json)
    record.show("plans of marked and unmarked steps (MiB)", HEADS, map(cells, rows))


if __name__ == "__main__":
    main()
