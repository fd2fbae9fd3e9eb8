"""What coarser decisions cost: plans of one step at one budget, decided in two ways.

*regions*: those that the model marks, and those that jdelta finds in a step where nothing is
marked. Overheads are predicted by one cost model for all: *plan* is what the plan says that its
decisions add to the plain step, *+* what the traced program under the plan, with the transfers that
its schedule exposes, takes more than the plain one.

*layers*: *alike* has one decision for all layers of a scan (`per_layer=False`), *apart* may have
others for every second, third or fourth one. *used* is the compiled peak as a share of the budget,
*+* the predicted overhead.

The budget is a share of the plain step's compiled peak. Nothing is run on a device.

    python -m benchmarks run grouping --what layers --target cuda:h100
"""

import itertools
from collections.abc import Sequence

import jdelta
from benchmarks import cases, steps, study
from benchmarks.steps import REGIONS
from benchmarks.study import Job, Row, Study, mib, share

LAYERS = {"alike": False, "apart": True}
"""By how layers are decided, the argument `per_layer` of a plan."""

STEPS = {
    "regions": (*steps.SMALL, "unet"),
    "layers": (
        *(name for name in steps.PLANNED if name.endswith(" scanned")),
        "mlp scanned",  # few residuals, all large
    ),
}
SHARES = {"regions": (0.8, 0.6, 0.5), "layers": tuple(i / 20 for i in range(8, 18))}
HEADS = {
    "regions": [f"{regions} {what}" for regions in REGIONS for what in ("peak", "plan", "+")],
    "layers": [f"{way} {what}" for way in LAYERS for what in ("used", "+")],
}


def row(step: str, what: str, target: str, share: float) -> Row:
    """Plans one step to a share of the plain step's peak, both ways."""
    plain = cases.traced(steps.build(step), target)
    budget = int(share * plain.measured.peak)
    if what == "layers":
        case = steps.build(step, remat=jdelta.remat)
        options = {way: {"per_layer": apart} for way, apart in LAYERS.items()}
        plans = {way: cases.plan(case, budget, target, **options[way])[0] for way in LAYERS}
        return {"budget": budget, **plans}
    plans = {
        regions: cases.plan(steps.build(step, remat=remat), budget, target)[0]
        for regions, remat in REGIONS.items()
    }
    return {"budget": budget, "plain_seconds": plain.price.seconds, **plans}


def regions_cells(r: Row) -> list[str]:
    """What regions that are marked or found come to; sizes in MiB."""
    figures: list[str] = []
    for regions in REGIONS:
        plan, plain = r[regions], r["plain_seconds"]
        if "error" in plan:
            figures += ["below floor", mib(plan["floor"]), "-"]
        else:
            added = share(plan["price"]["seconds"] - plain, plain)
            figures += [mib(plan["compiled_peak"]), share(plan["overhead"], plain), added]
    return figures


def layers_cells(r: Row) -> list[str]:
    """What layers that are decided alike or apart come to."""
    figures: list[str] = []
    for plan in (r[way] for way in LAYERS):
        if "error" in plan:
            figures += ["below floor", mib(plan["floor"])]
        else:
            used = share(plan["compiled_peak"], plan["budget"])
            figures += [used, share(plan["overhead"], plan["step_seconds"])]
    layers = r["apart"].get("layers", 1)
    figures[-1] += f" ({layers} an iteration)" if layers > 1 else ""
    return figures


CELLS = {"regions": regions_cells, "layers": layers_cells}


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: a table of regions, and one of layers; budgets in MiB."""
    parts: list[str] = []
    for what, cells in CELLS.items():
        group = [r for r in rows if r["what"] == what]
        lines = [[r["step"], r["target"], mib(r["budget"]), *cells(r)] for r in group]
        parts.append(study.table(["step", "target", "budget", *HEADS[what]], lines, group))
    return study.page(parts)


EVERY_STEP = tuple(dict.fromkeys(itertools.chain.from_iterable(STEPS.values())))
EVERY_SHARE = tuple(sorted(set(itertools.chain.from_iterable(SHARES.values()))))


def jobs(
    what: Sequence[str] = tuple(CELLS),
    step: Sequence[str] = EVERY_STEP,
    target: Sequence[str] = steps.TWO_TARGETS,
    share: Sequence[float] = EVERY_SHARE,
) -> list[Job]:
    """By default the steps and shares that regions, and those that layers are looked at with."""
    job_list: list[Job] = []
    for w in what:
        own_steps = STEPS[w] if step == EVERY_STEP else step
        own_shares = SHARES[w] if share == EVERY_SHARE else share
        job_list += study.product(own_steps, target, what=[w], share=own_shares)
    return job_list


STUDY = Study(
    "grouping",
    "What does it cost to leave regions to be found, and to decide all layers of a scan alike?",
    jobs,
    row,
    tables,
)
