"""Plans at twenty budgets, from 5 to 100 % of the plain step's peak.

Is each within its budget, and does a larger budget ever make a plan slower? What is measured of a
plan is what `budgets` measures.
"""

import itertools
import statistics
from collections.abc import Sequence

from benchmarks import steps, study
from benchmarks.plans import budgets
from benchmarks.study import Job, Row, Study

SHARES = tuple(i / 20 for i in range(1, 21))
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


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: one line a step and target."""
    return study.table(VERDICT, map(verdict, study.grouped(rows).values()), rows)


def jobs(
    step: Sequence[str] = steps.PLANNED,
    target: Sequence[str] = steps.TWO_TARGETS,
    share: Sequence[float] = SHARES,
) -> list[Job]:
    return study.product(step, target, share=share)


STUDY = Study(
    "sweep",
    "Does a larger budget ever make a plan slower, and is any plan over its budget?",
    jobs,
    budgets.row,
    tables,
)
