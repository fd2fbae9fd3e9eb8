"""What is it worth to decide about layers of a scan apart? Plans of one step at one budget.

*alike* has one decision for all layers (`per_layer=False`), *apart* may have others for every
second, third or fourth one. The budget is a share of the plain step's compiled peak, *used* the
compiled peak as a share of the budget, *+* the predicted overhead. Nothing is run on a device.

    python -m benchmarks.per_layer --target cuda:h100 --json benchmarks/results/per_layer.json
"""

import jdelta
from benchmarks import cases, record
from benchmarks.budgets import STEPS as ALL
from benchmarks.budgets import TARGETS
from benchmarks.models import build
from benchmarks.record import Row, mib, share

SHARES = tuple(i / 20 for i in range(8, 18))
STEPS = {
    **{name: step for name, step in ALL.items() if step.get("scan")},
    "mlp scanned": {"name": "mlp", "batch": 32768, "scan": True},  # few residuals, all large
}
WAYS = {"alike": False, "apart": True}
HEADS = ["step", "target", "budget", *(f"{way} {what}" for way in WAYS for what in ("used", "+"))]


def row(step: str, target: str, share: float) -> Row:
    """Plans one step to a share of the plain step's peak, both ways."""
    budget = int(share * cases.traced(build(**STEPS[step]), target).measured.peak)
    plans = {
        way: cases.plan(
            build(**STEPS[step], remat=jdelta.remat), budget, target, per_layer=per_layer
        )[0]
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


def markdown(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return record.table(HEADS, map(cells, rows))


def main() -> None:
    options = record.options(record.parser(__doc__, STEPS, TARGETS), markdown)
    jobs = record.jobs(options.target or TARGETS, options.step or STEPS, share=SHARES)
    rows = record.run(jobs, row, options.json)
    record.show("decisions for all layers, and for some (MiB)", HEADS, map(cells, rows))


if __name__ == "__main__":
    main()
