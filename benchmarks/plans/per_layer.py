"""What is it worth to decide about layers of a scan apart? Plans of one step at one budget.

*alike* has one decision for all layers (`per_layer=False`), *apart* may have others for every
second, third or fourth one. The budget is a share of the plain step's compiled peak, *used* the
compiled peak as a share of the budget, *+* the predicted overhead. Nothing is run on a device.

    python -m benchmarks run per_layer --target cuda:h100
"""

from collections.abc import Sequence

import jdelta
from benchmarks import cases, steps, study
from benchmarks.study import Job, Row, Study, mib, share

SHARES = tuple(i / 20 for i in range(8, 18))
STEPS = (
    *(name for name in steps.PLANNED if name.endswith(" scanned")),
    "mlp scanned",  # few residuals, all large
)
WAYS = {"alike": False, "apart": True}
HEADS = ["step", "target", "budget", *(f"{way} {what}" for way in WAYS for what in ("used", "+"))]


def row(step: str, target: str, share: float) -> Row:
    """Plans one step to a share of the plain step's peak, both ways."""
    budget = int(share * cases.traced(steps.build(step), target).measured.peak)
    plans = {
        way: cases.plan(steps.build(step, remat=jdelta.remat), budget, target, per_layer=per_layer)[
            0
        ]
        for way, per_layer in WAYS.items()
    }
    return {"budget": budget, **plans}


def cells(r: Row) -> list[str]:
    """One line of the table; budgets in MiB."""
    figures: list[str] = []
    for plan in (r[way] for way in WAYS):
        if "error" in plan:
            figures += ["below floor", mib(plan["floor"])]
        else:
            used = share(plan["compiled_peak"], plan["budget"])
            figures += [used, share(plan["overhead"], plan["step_seconds"])]
    layers = r["apart"].get("layers", 1)
    figures[-1] += f" ({layers} an iteration)" if layers > 1 else ""
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
    "per_layer",
    "What is it worth to decide about layers of a scan apart?",
    jobs,
    row,
    tables,
)
