"""Is a scan planned better if its layers may be decided differently? Plans of one step, both ways.

The budget is a share of the plain step's compiled peak. Overheads are predicted by one cost model
for both: the traced program under the plan, with the transfers that its schedule exposes, over the
plain program. Nothing is run on a device.

    python -m benchmarks.layers --target cuda:h100 --json benchmarks/results/layers.json
"""

import jdelta
from benchmarks import programs, record, steps
from benchmarks.record import Row, mib, share

STEPS = ("gpt2 scanned", "llama scanned", "bert-large scanned")
TARGETS = ("tpu:v5e:2x2", "cuda:h100")
SHARES = (0.75, 0.6, 0.5, 0.4)
WAYS = {"alike": False, "apart": True}
HEADS = ["step", "target", "budget", *(f"{way} {what}" for way in WAYS for what in ("used", "+"))]
HEADS.append("layers in an iteration")


def row(step: str, target: str, share: float) -> Row:
    """Plans one step to a share of the plain step's peak, both ways."""
    plain = programs.traced(steps.build(step), target)
    case = steps.build(step, remat=jdelta.remat)
    budget = int(share * plain.measured.peak)
    plans = {
        way: programs.plan(case, budget, target, per_layer=per_layer)[0]
        for way, per_layer in WAYS.items()
    }
    return {"budget": budget, "plain_seconds": plain.price.seconds, **plans}


def cells(r: Row) -> list[str]:
    """One line of the table; the budget in MiB."""
    figures: list[str] = []
    for way in WAYS:
        plan, plain = r[way], r["plain_seconds"]
        if "error" in plan:
            figures += ["below floor", mib(plan["floor"])]
        else:
            used = share(plan["compiled_peak"], r["budget"])
            figures += [used, share(plan["price"]["seconds"] - plain, plain)]
    layers = str(r["apart"].get("layers", ""))
    return [r["step"], r["target"], mib(r["budget"]), *figures, layers]


def markdown(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return record.table(HEADS, map(cells, rows))


def main() -> None:
    options = record.options(record.parser(__doc__, STEPS, TARGETS), markdown)
    jobs = record.jobs(options.target or TARGETS, options.step or STEPS, share=SHARES)
    rows = record.run(jobs, row, options.json)
    record.show("plans with layers decided alike and apart", HEADS, map(cells, rows))


if __name__ == "__main__":
    main()
