"""What the head and the loss in pieces spare of a step, and what they cost.

*logits* are the bytes of one array of them, on one device. The budget is the plain step's compiled
peak less 80 % of that. *pieces* is the most that the plan makes. *alone* is the least peak that a
plan without pieces reaches in that step (`per_layer=False`), where it does not reach the budget.
*+* is what the compiled instructions of the planned program take more than those of the plain step:
with the pieces' own cost is what the plan recomputes otherwise.

    python -m benchmarks run head --target cuda:h100
"""

from collections.abc import Sequence

import jdelta
from benchmarks import cases, steps, study
from benchmarks.steps import REGIONS
from benchmarks.study import Job, Row, Study, mib, share
from jdelta._src.regions.head_axes import large_head

SPARED = 0.8
"""Of the bytes of the logits: what the budget takes from the plain step's peak."""

STEPS = ("gpt2 batch 32 scanned", "llama with 256,000 words scanned")
HEADS = "step target plain logits budget peak pieces alone +".split()


def row(step: str, target: str) -> Row:
    """Plans one step in which nothing is marked, with the head in pieces and without."""
    case = steps.build(step, remat=REGIONS["found"])
    plain = cases.traced(case, target)
    head = large_head(plain.graph)
    assert head is not None, f"{step} has no head"
    budget = int(plain.measured.peak - SPARED * head.bytes)
    figures, plan = cases.plan(case, budget, target, host_budget=0)
    added = cases.planned(case, plan).added(plain) if plan else None
    alone, _ = cases.plan(case, budget, target, host_budget=0, per_layer=False)
    pieces = plan.grouping.pieces if isinstance(plan, jdelta.Plan) else 0
    return {
        "plain": plain.measured.peak,
        "logits": head.bytes,
        "plan": figures,
        "pieces": pieces,
        "alone": alone,
        "added": added,
    }


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    plan, alone = r["plan"], r["alone"]
    begun = [r["step"], r["target"], mib(r["plain"]), mib(r["logits"])]
    least = mib(alone["floor"]) if "error" in alone else "fits"
    if "error" in plan:
        return [*begun, "", "below floor", "", least, ""]
    sizes = [mib(plan["budget"]), mib(plan["compiled_peak"])]
    return [*begun, *sizes, str(r["pieces"] or ""), least, share(r["added"], 1)]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(
    step: Sequence[str] = STEPS, target: Sequence[str] = ("cuda:h100", "tpu:v5p:2x2x1")
) -> list[Job]:
    """Every step on every target."""
    return study.product(step, target)


STUDY = Study(
    "head",
    "What do the head and the loss in pieces spare, and what do they cost?",
    jobs,
    row,
    tables,
)
