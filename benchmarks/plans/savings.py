"""How little memory can a step do with, and what do 40 to 70 % less cost?

For each step and target: the floor (the least compiled peak) with the predicted overhead there, and
plans for less than the plain step's compiled peak, twice: "total" counts the whole peak, as budgets
do; "activation" counts only what the plain step needs beside arguments and results
(peak - arguments - outputs + aliased), which is what papers quote. The steps of DELTA's own
evaluation also get its -72 %. Two convolutional networks get the parts of the plain peak at which
DTR's paper (Kirisame et al. 2021) says how long they take. Regions are those that the models mark,
or found by jdelta. Seconds are predictions.

    python -m benchmarks run savings --step resnet50 --target cuda:h100
"""

import functools
from collections.abc import Sequence
from typing import Any

from benchmarks import cases, policies, steps, study
from benchmarks.plans.budgets import refusal
from benchmarks.study import Job, Row, Study, mib, share

KINDS = ("floor", "total", "activation")
SAVINGS = (0.4, 0.5, 0.6, 0.7)
DELTA = {"resnet50", "resnet101", "bert-large scanned", "bert-large unrolled"}
THEIRS = 0.72
PAPER = (*SAVINGS, THEIRS)
DTR = {
    "inception-v4": {0.89: 1.07, 0.72: 1.10, 0.55: 1.15, 0.38: 1.25},
    "densenet121": {0.91: 1.16, 0.73: 1.22, 0.55: 1.29, 0.39: 1.52},
}
"""From a part of the plain peak to the seconds over the plain step's that DTR's paper publishes."""
TOO_SMALL = 1024  # bytes; a budget that no step fits
HEADS = [
    *"step target regions of plain least saved overhead".split(),
    *(f"-{saving:.0%}" for saving in PAPER),
]
DTR_HEADS = ["step", "target", "regions", "memory", "DTR", "jdelta"]


def row(
    step: str, target: str, units: str, of: str, saving: float | None = None, **options: Any
) -> Row:
    """Plans one step to a saving.

    Args:
        step: A key of `steps.STEPS`.
        target: Where to compile for.
        units: Who says what a region is, a key of `steps.REGIONS`.
        of: What is saved, one of `KINDS`.
        saving: The part of it that is saved; None for the floor.
        **options: Arguments of `models.build` in place of the step's own.
    """
    plain = plain_figures(step, target, tuple(options.items()))
    case = steps.build(step, remat=steps.REGIONS[units], **options)
    budget = floor(case, target) if saving is None else _budget(plain, of, saving)
    return {"plain": plain, "plan": cases.plan(case, budget, target)[0]}


@functools.lru_cache(maxsize=1)
def plain_figures(step: str, target: str, options: tuple[tuple[str, Any], ...]) -> Row:
    """What the plain step takes, and how much of it is resident, that is no activation."""
    plain = cases.traced(steps.build(step, **dict(options)), target)
    measured = plain.measured
    if measured.refused:  # a refusal tells the peak only; arguments and results are the same
        case = policies.build("nothing_saveable", step, **dict(options))
        measured = cases.traced(case, target).measured
    resident = measured.arguments + measured.outputs - measured.aliased
    return {**plain.figures(), "resident": resident}


def floor(case: Any, target: str) -> int:
    """The least peak that a plan reaches, bytes."""
    figures, _ = cases.plan(case, TOO_SMALL, target)
    return figures["floor"]


def _budget(plain: Row, of: str, saving: float) -> int:
    """What is left of the plain peak, bytes."""
    resident = plain["resident"] if of == "activation" else 0
    return int(resident + (1 - saving) * (plain["peak"] - resident))


def counted(r: Row) -> tuple[int, int]:
    """The plain peak and the plan's, bytes: total, or without what is resident."""
    resident = r["plain"]["resident"] if r["of"] == "activation" else 0
    return r["plain"]["peak"] - resident, _peak(r) - resident


def _peak(r: Row) -> int:
    """The plan's compiled peak, bytes; the floor of a budget that was refused, 0 if unknown."""
    return r["plan"].get("compiled_peak") or r["plan"]["floor"] or 0


def saved(r: Row) -> str:
    """Part of the plain peak that the plan saves."""
    plain, peak = counted(r)
    return share(plain - peak, plain)


def overhead(r: Row) -> str:
    """What the plan adds to the plain step's predicted seconds; empty where there is none."""
    if "error" in r["plan"]:
        return ""
    seconds = r["plain"]["price"]["seconds"]
    return share(r["plan"]["price"]["seconds"] - seconds, seconds)


def tables(rows: list[Row]) -> str:
    """The tables of the docs: all savings of a step in a line, and one for each point of DTR's."""
    points = [r for r in rows if r["step"] in DTR]
    others = [r for r in rows if r["step"] not in DTR]
    lines = study.grouped(others, "units").values()
    least = study.table(HEADS, (cells(line, of) for line in lines for of in KINDS[1:]), others)
    return study.page([least, study.table(DTR_HEADS, map(point, points), points)])


def point(r: Row) -> list[str]:
    """The seconds of a step at a part of its plain peak over its own: DTR's, and the plan's."""
    part = round(1 - r["saving"], 2)
    plan, seconds = r["plan"], r["plain"]["price"]["seconds"]
    ours = refusal(plan) if "error" in plan else f"{plan['price']['seconds'] / seconds:.2f}"
    theirs = f"{DTR[r['step']][part]:.2f}"
    return [r["step"], r["target"], r["units"], f"{part:.0%}", theirs, ours]


def cells(rows: list[Row], of: str) -> list[str]:
    """What the plans of one step save at most, and what each saving adds to its seconds."""
    least = {**min(filter(_peak, rows), key=_peak), "of": of}
    added = {r["saving"]: r for r in rows if r["of"] == of}
    head = [least[k] for k in ("step", "target", "units", "of")]
    figures = [*map(mib, counted(least)), saved(least), overhead(least)]
    return [*head, *figures, *(_added(added.get(saving)) for saving in PAPER)]


def _added(r: Row | None) -> str:
    """A cell of the table: empty where no plan was asked for."""
    if r is None:
        return ""
    return refusal(r["plan"]) if "error" in r["plan"] else overhead(r)


def jobs(
    step: Sequence[str] = (*steps.PUBLISHED, "unet", *DTR),
    target: Sequence[str] = steps.FOUR_TARGETS,
    units: Sequence[str] = tuple(steps.REGIONS),
    of: Sequence[str] = KINDS,
    saving: Sequence[float] = PAPER,
) -> list[Job]:
    """The floor has one row, with no saving; steps of a paper's evaluation get its savings."""
    return [
        Job(job.label, {**job.arguments, "saving": part})
        for job in study.product(step, target, units=units, of=of)
        for part in _savings(job.label, job.arguments["of"], saving)
    ]


def _savings(step: str, of: str, asked: Sequence[float]) -> list[float | None]:
    if step in DTR:
        published = [round(1 - part, 2) for part in DTR[step]] if of == "total" else []
        return [part for part in published if asked == PAPER or part in asked]
    if of == "floor":
        return [None]
    return [part for part in asked if part != THEIRS or step in DELTA]


STUDY = Study(
    "savings",
    "How little memory can a step do with, and what do 40 to 70 % less cost?",
    jobs,
    row,
    tables,
)
