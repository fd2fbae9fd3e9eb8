"""What would help a step next, in sentences: nothing that was done already."""

from __future__ import annotations

from collections.abc import Iterator

from jdelta._src.backends.platforms import backend_of
from jdelta._src.plan.record import PlanRecord

_DEAR = 0.1
"""From this share of a step on, an overhead is worth a look at other budgets."""


def advice(plan: PlanRecord) -> list[str]:
    """What would help next: what lowers the peak, as the search saw it, then options left out."""
    sentences = [plan.search.hint] if plan.search.hint else []
    if plan.answer.policy is not None:
        sentences += _options(plan)
    return sentences


def _options(plan: PlanRecord) -> Iterator[str]:
    """Options of ``jdelta.plan`` that were left out, or that forbid something."""
    question, figures = plan.question, plan.figures
    is_stacked = any(residual.count > 1 for residual in plan.answer.residuals)
    devices = backend_of(question.target.partition(":")[0]).devices
    if is_stacked and not question.reorder:
        yield (
            "Try reorder=True: weight updates then run inside the backward loops, where that takes "
            "less memory."
        )
    if is_stacked and not question.per_layer:
        yield "Without per_layer=False layers of a loop may be decided differently."
    if question.host_budget == 0 and devices.have_own_memory and figures.overhead:
        yield "Nothing may go to the host (host_budget=0): offload may cost less than recompute."
    if figures.overhead_share > _DEAR:
        yield (
            f"The plan adds {figures.overhead_share:.0%} to a step: jdelta.frontier, or jdelta "
            "frontier on the command line, shows what more memory would save."
        )
