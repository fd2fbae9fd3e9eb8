"""What the head and the loss in pieces spare of a step, and what they cost.

*logits* are the bytes of one array of them, on one device. *whole* is the least peak that a plan
reaches with the head as it is (`per_layer=False`). The budget is that less 80 % of the logits, so
that a plan with pieces has to meet it; *pieces* is the most that it makes. *+* is what the compiled
instructions of its program take more than those of the plan with the whole head: a TPU's by the
cycles that its compiler notes, a GPU's by the roofline.

    python -m benchmarks run head --target cuda:h100
"""

from collections.abc import Sequence

from benchmarks import cases, steps, study
from benchmarks.steps import REGIONS
from benchmarks.study import Job, Row, Study, mib, share
from jdelta._src.regions.head_product import large_head

SPARED = 0.8
"""Of the bytes of the logits: how far the budget is below the least peak with a whole head."""

STEPS = ("gpt2 batch 32 scanned", "llama with 256,000 words scanned")
HEADS = "step target logits whole budget peak pieces +".split()
TOO_SMALL = 1024  # bytes; a budget that no step fits


def row(step: str, target: str) -> Row:
    """Plans one step in which nothing is marked, with the whole head and in pieces."""
    case = steps.build(step, remat=REGIONS["found"])
    options = {"host_budget": 0}
    head = large_head(cases.traced(case, target).graph)
    assert head is not None, f"{step} has no head"
    least, _ = cases.plan(case, TOO_SMALL, target, **options, per_layer=False)
    reference, other = cases.plan(case, least["floor"], target, **options, per_layer=False)
    budget = int(least["floor"] - SPARED * head.bytes)
    figures, plan = cases.plan(case, budget, target, **options)
    row: Row = {"logits": head.bytes, "whole": reference, "plan": figures}
    if plan and other:
        row["pieces"] = plan.grouping.pieces
        row["added"] = _added(cases.planned(case, plan), cases.planned(case, other))
    return row


def _added(program: cases.Program, other: cases.Program) -> float:
    """What a program takes more than another by its compiled instructions, as a part of that."""
    kind = "cycles" if other.scheduled["cycles"] else "scheduled"
    return program.scheduled[kind] / other.scheduled[kind] - 1


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    plan, reference = r["plan"], r["whole"]
    peak = reference.get("compiled_peak", reference["floor"])
    begun = [r["step"], r["target"], mib(r["logits"]), mib(peak), mib(plan["budget"])]
    if "added" not in r:
        return [*begun, "below floor", "", ""]
    return [*begun, mib(plan["compiled_peak"]), str(r["pieces"] or ""), share(r["added"], 1)]


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
