"""Plans of training steps at shares of the plain step's peak, on two compilers.

For each step and target it compiles the plain step, plans to a share of its peak, and records what
was predicted, what the real compiler says (ahead of time, no hardware), how many compiles each plan
took, and the floor where the budget is below it. Predicted seconds are predictions.

A plan that fits seldom needs the floor compiled; `--share 0.01` has all floors compiled.

The first tables are peaks, one a target; the last one says where a plan gains little.
"""

import time
from collections.abc import Sequence

import jdelta
from benchmarks import cases, steps, study
from benchmarks.study import Job, Row, Study, bound, mib, share

SHARES = (0.8, 0.6, 0.5, 0.4)


def row(step: str, target: str, share: float) -> Row:
    """Plan one step to a share of the plain step's peak."""
    plain = cases.traced(steps.build(step), target).measured.peak
    case = steps.build(step, remat=jdelta.remat)
    start = time.perf_counter()
    figures, _ = cases.plan(case, int(share * plain), target)
    return {"plain": plain, **figures, "seconds": time.perf_counter() - start}


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
    """The rows as the docs show them: peaks of each target, and where a plan gains little."""
    found = [peaks([r for r in rows if r["target"] == t]) for t in study.values(rows, "target")]
    lines = map(worth, study.grouped(rows).values())
    return "\n\n".join([*found, study.table(WORTH, lines, rows)])


def peaks(rows: list[Row]) -> str:
    """The table of a target: one line a step."""
    lines: list[list[str]] = []
    for (step, target), found in study.grouped(rows).items():
        group = {r["share"]: r for r in found}
        compiled = compiled_floors(found)
        floor = str(min(compiled) >> 20) if compiled else "not compiled"
        shown = [_cell(group.get(share)) for share in SHARES]
        lines.append([step, target, str(found[0]["plain"] >> 20), floor, *shown])
    heads = ["step", "target", "plain", "floor", *(f"{s:.0%}" for s in SHARES)]
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


def jobs(
    step: Sequence[str] = steps.PLANNED,
    target: Sequence[str] = steps.TWO_TARGETS,
    share: Sequence[float] = SHARES,
) -> list[Job]:
    return study.product(step, target, share=share)


STUDY = Study(
    "budgets",
    "Is every promise kept by plans for 80, 60, 50 and 40 % of a step's peak?",
    jobs,
    row,
    tables,
)
