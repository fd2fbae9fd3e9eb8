"""Plans of training steps at shares of the plain step's peak.

For each step and target it compiles the plain step, plans to a share of its peak, and records what
was predicted, what the real compiler says (ahead of time, no hardware), how many compiles each plan
took, and the floor where the budget is below it. Predicted seconds are predictions.

*shares* are 80, 60, 50 and 40 %: a table of peaks for each target, and one that says where a plan
gains little. A plan that fits seldom needs the floor compiled; `--share 0.01` has all of them
compiled.

*sweep* is twenty budgets from 5 to 100 %: is each plan within its budget, and does a larger budget
ever make a plan slower?

*sharded* are steps of Llama 3 cut over many devices, all of it per device; the share is one of the
device's memory where that is less than the plain peak.

    python -m benchmarks run budgets --what shares --target cuda:h100
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import jdelta
from benchmarks import cases, steps, study
from benchmarks.models import Case
from benchmarks.plans import sharded
from benchmarks.study import Job, Row, Study, bound, mib, share
from jdelta._src.backends.target import resolve

SHARES = {
    "shares": (0.8, 0.6, 0.5, 0.4),
    "sweep": tuple(i / 20 for i in range(1, 21)),
    "sharded": (0.9, 0.7, 0.5),
}
"""By what is asked, the budgets of plans."""


def row(step: str, what: str, target: str, share: float) -> Row:
    """Plans one step to a share of the plain step's peak, or of the device if that has less."""
    if what == "sharded":
        cut = functools.partial(sharded.case, sharded.STEPS[step])
        return planned(cut, target, share, resolve(target).memory)
    return planned(functools.partial(steps.build, step), target, share, None)


def planned(build: Callable[..., Case], target: str, share: float, memory: int | None) -> Row:
    """What becomes of a step under a share of its plain peak; at most of so many bytes."""
    plain = cases.traced(build(), target).measured
    room = plain.peak if memory is None else min(plain.peak, memory)
    case = build(remat=jdelta.remat)
    start = time.perf_counter()
    figures, _ = cases.plan(case, int(share * room), target)
    seconds = time.perf_counter() - start
    return {"plain": plain.peak, "plain_refused": plain.refused, **figures, "seconds": seconds}


HEADS = "step target budget plain floor predicted compiled error use overhead compiles".split()


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    if "error" in r:
        rest = [mib(r["plain"]), mib(r["floor"]), "-", refusal(r), *"----"]
    else:
        rest = [
            mib(r["plain"]),
            bound(r, "floor"),
            mib(r["predicted_peak"]),
            mib(r["compiled_peak"]),
            f"{r['predicted_peak'] / r['compiled_peak'] - 1:+.1%}",
            share(r["compiled_peak"], r["budget"]),
            share(r["overhead"], r["step_seconds"]),
            str(r["compiles"]),
        ]
    return [r["step"], r["target"], mib(r["budget"]), *rest]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them, table by table."""
    of = {what: [r for r in rows if r["what"] == what] for what in SHARES}
    shares, sweep, cut = of.values()
    parts = [peaks([r for r in shares if r["target"] == t]) for t in study.values(shares, "target")]
    parts.append(study.table(WORTH, map(worth, study.grouped(shares).values()), shares))
    parts.append(study.table(VERDICT, map(verdict, study.grouped(sweep).values()), sweep))
    return study.page([*parts, study.table(HEADS, map(cells, cut), cut)])


def peaks(rows: list[Row]) -> str:
    """The table of a target: one line a step."""
    lines: list[list[str]] = []
    for (step, target), step_rows in study.grouped(rows).items():
        group = {r["share"]: r for r in step_rows}
        compiled = compiled_floors(step_rows)
        floor = str(min(compiled) >> 20) if compiled else "not compiled"
        shown = [_cell(group.get(share)) for share in SHARES["shares"]]
        lines.append([step, target, str(step_rows[0]["plain"] >> 20), floor, *shown])
    heads = ["step", "target", "plain", "floor", *(f"{s:.0%}" for s in SHARES["shares"])]
    return study.table(heads, lines, rows)


def compiled_floors(rows: list[Row]) -> list[int]:
    """The floors that were compiled, bytes."""
    return [r["floor"] for r in rows if r["floor"] and "floor" not in r.get("estimates", ())]


def _cell(r: Row | None) -> str:
    """Compiled peak, its prediction's error and the predicted overhead of one plan."""
    if r is None:
        return "not run"
    if "error" in r:
        return refusal(r)
    off = r["predicted_peak"] / r["compiled_peak"] - 1
    return f"{r['compiled_peak'] >> 20} ({off:+.1%}, {r['overhead'] / r['step_seconds']:.1%})"


def refusal(r: Row) -> str:
    """Why a row has no plan."""
    return "below floor" if r["floor"] else "over memory"


WORTH = [
    "step",
    "target",
    "least peak of plain",
    "added at 80 %",
    "least budget planned",
    "added there",
    "longest planning",
]


def worth(rows: list[Row]) -> list[str]:
    """One line: what bounds the plans of one step, what they cost, and how long planning takes."""
    planned = sorted((r for r in rows if r.get("compiles")), key=lambda r: r["share"])
    if not planned:
        return [rows[0]["step"], rows[0]["target"], refusal(rows[0]), "", "", "", ""]
    least, most = planned[0], planned[-1]
    at_80 = most["share"] == 0.8  # else that budget was refused
    compiled = compiled_floors(rows)
    floor = min(compiled or [r["floor"] for r in rows if r["floor"]])
    return [
        most["step"],
        most["target"],
        ("" if compiled else "~") + share(floor, most["plain"]),
        share(most["overhead"], most["step_seconds"]) if at_80 else "refused",
        f"{least['share']:.0%}",
        share(least["overhead"], least["step_seconds"]),
        f"{max(r['seconds'] for r in rows):.0f} s",
    ]


VERDICT = (
    *("step", "target", "budgets", "plans", "over budget", "slower than a smaller budget's"),
    *("97 % used, or nothing added", "error", "compiles"),
)


def verdict(group: list[Row]) -> list[str]:
    """What a sweep over the budgets of one step shows; error and compiles are medians."""
    plans = sorted((r for r in group if "error" not in r), key=lambda r: r["share"])
    over = sum(r["compiled_peak"] > r["budget"] for r in plans)
    slower = sum(b["overhead"] > a["overhead"] for a, b in itertools.pairwise(plans))
    used = sum(r["compiled_peak"] >= 0.97 * r["budget"] or not r["overhead"] for r in plans)
    error = statistics.median(abs(r["predicted_peak"] / r["compiled_peak"] - 1) for r in plans)
    compiles = statistics.median(r["compiles"] for r in plans)
    figures = (len(group), len(plans), over, slower, used, f"{error:.2%}", f"{compiles:g}")
    return [group[0]["step"], group[0]["target"], *map(str, figures)]


EVERY_STEP = (*steps.PLANNED, *sharded.STEPS)
EVERY_SHARE = tuple(sorted(set(itertools.chain.from_iterable(SHARES.values()))))


def jobs(
    what: Sequence[str] = tuple(SHARES),
    step: Sequence[str] = EVERY_STEP,
    target: Sequence[str] = steps.TWO_TARGETS,
    share: Sequence[float] = EVERY_SHARE,
) -> list[Job]:
    """By default the shares of what is asked; sharded steps are for devices of their own."""
    job_list: list[Job] = []
    for asked in what:
        own = SHARES[asked] if share == EVERY_SHARE else share
        cut = asked == "sharded"
        for label in (s for s in step if (s in sharded.STEPS) == cut):
            targets = [sharded.STEPS[label].target] if cut else target
            job_list += study.product([label], targets, what=[asked], share=own)
    return job_list


STUDY = Study(
    "budgets",
    "Is every promise kept by plans for shares of a step's peak, on one device and on many?",
    jobs,
    row,
    tables,
)
