"""What ``Plan.result`` says: how the solver ended, what did not fit, what became of the rest."""

from __future__ import annotations

from jdelta._src.residuals.items import Items
from jdelta._src.search.candidate import CompiledCandidate, Found
from jdelta._src.sizes import format_bytes, format_some
from jdelta._src.solver.solution import Outcome

NEXT_IS_TOO_LARGE = "What is left of the budget is less than what comes next"
"""Begins the sentence about what did not fit."""

_BUDGET_IS_LEFT = (
    "Some of the budget is left: the plan is predicted to be quicker than the plain step, for what "
    "loops keep in stacks often takes longer to keep than to compute again."
)


def summary(outcome: Found, items: Items, own_seconds: float) -> str:
    """One to three sentences, such as ``"heuristic"`` or ``"The plain step fits: ..."``.

    Args:
        outcome: Of the search.
        items: What it decided on.
        own_seconds: What the step's own ``jax.checkpoint`` adds to it, 0 where it has none.
    """
    return " ".join(filter(None, (_ending(outcome, items), _own(outcome.best, own_seconds))))


def _ending(outcome: Found, items: Items) -> str:
    if outcome.best.decisions is None:
        return "The plain step fits: nothing is changed."
    if not items.residuals:
        return "The plan fits by the way in which loops, or the head, are run: see above."
    if all(r.name in items.pinned or r.region_input for r in items.residuals if r.needed):
        return "The decisions fit; all of them were taken by hand (pin=)."
    ending = (outcome.best.outcome or Outcome.HEURISTIC).value
    if refused := outcome.refused:
        return (
            f"{ending} {NEXT_IS_TOO_LARGE}: with "
            f"{format_some(refused.names, 3)} ({format_bytes(refused.bytes)}) kept too the step "
            f"takes {format_bytes(refused.peak)}."
        )
    left = not outcome.is_used and outcome.best.overhead < 0
    return f"{ending} {_BUDGET_IS_LEFT}" if left else ending


def _own(best: CompiledCandidate, seconds: float) -> str:
    """What becomes of the user's own ``jax.checkpoint``, which adds so many seconds to the step."""
    if not seconds:
        return ""
    if best.decisions is None:
        return "The step's own jax.checkpoint stays as it is."
    return "The step's own jax.checkpoint is planned too: what its policy keeps does not count."
