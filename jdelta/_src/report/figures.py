"""The figures of a plan as text: whether it fits, what it costs, what was asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jdelta._src.backends.platforms import backend_of
from jdelta._src.decision import Decision
from jdelta._src.plan.record import Figures, PlanRecord, Question, SearchRecord
from jdelta._src.regions.region import Grouping
from jdelta._src.sizes import format_bytes, format_seconds, format_some
from jdelta._src.solver import DEFAULT_SOLVER
from jdelta._src.spill import Spill


def headline(plan: PlanRecord) -> str:
    """Whether a plan fits, what it costs, and what was compiled to find it."""
    question, figures = plan.question, plan.figures
    is_plain, fits = plan.answer.policy is None, figures.compiled_peak <= question.budget
    verdict = ("Fits as it is" if is_plain else "Fits") if fits else "Does not fit"
    away = "".join(
        f", {format_bytes(size)} {place}"
        for size, place in (
            (figures.host_bytes, "on the host"),
            (figures.spill_bytes, "in files"),
        )
        if size
    )
    count = plan.search.compiles
    return (
        f"{verdict}: {_use(plan)}{away}, {_cost(plan)}; compiled {count} "
        f"program{'' if count == 1 else 's'}."
    )


def hint_line(plan: PlanRecord) -> str:
    return f"Hint: {plan.search.hint}" if plan.search.hint else ""


def _use(plan: PlanRecord) -> str:
    peak, budget = plan.figures.compiled_peak, plan.question.budget
    return f"{format_bytes(peak)} of {format_bytes(budget)} on {plan.question.target}"


def _cost(plan: PlanRecord) -> str:
    if plan.answer.policy is None:
        return "nothing is added to a step"
    share = 100 * plan.figures.overhead_share
    if not share:
        return "no time is added to a step (predicted)"
    return f"+{share:.1f} % of a step (predicted)" if share >= 0.05 else "+<0.1 % (predicted)"


def in_one_line(plan: PlanRecord) -> str:
    """What a plan is, for its ``repr``."""
    counts = Counter(plan.decisions.values())
    if plan.answer.policy is None:
        return f"{_use(plan)}, the plain step"
    parts = [f"{counts[Decision.SAVE]} of {counts.total()} residuals kept"]
    for decision, name in ((Decision.OFFLOAD, "offloaded"), (Decision.SPILL, "spilled")):
        parts += [f"{counts[decision]} {name}"] if counts[decision] else []
    return ", ".join([_use(plan), *parts, f"+{100 * plan.figures.overhead_share:.1f} %"])


def _compiled_peak(plan: PlanRecord) -> str:
    """The peak, and how that is where the values that are saved take more by themselves."""
    peak, predicted = plan.figures.compiled_peak, plan.figures.predicted_peak
    text = f"{format_bytes(peak)} per device (predicted {format_bytes(predicted)})"
    decisions = plan.decisions
    read = (r for r in plan.answer.residuals if r.needed)
    saved = sum(r.bytes for r in read if decisions[r.name] is Decision.SAVE)
    if saved <= peak:
        return text
    return (
        f"{text}; the values saved would take {format_bytes(saved)}, but the compiler stores only "
        "some: others share memory, are computed where they are read, or stay on the chip"
    )


def summary_lines(plan: PlanRecord) -> dict[str, str]:
    """The figures of the whole step by what they are."""
    question, answer, figures, search = plan.question, plan.answer, plan.figures, plan.search
    lines = {
        "target": question.target,
        "budget": format_bytes(question.budget),
        "asked": _asked(question),
        "compiled peak": _compiled_peak(plan),
        "bounds": "" if answer.policy is None else _bounds(search),
        "code": _code(question.target, figures.code_bytes),
        "on the host": _on_the_host(figures),
        "in files": _in_files(question.spill, figures),
        "loops": _loops(answer.grouping),
        "head": _head(answer.grouping),
        "updates": _updates(answer.updates_moved),
        "undone": _undone(figures.undone),
        "overhead": f"{format_seconds(figures.overhead)} on a step of "
        f"{format_seconds(figures.step_seconds)} (predicted, "
        f"{100 * figures.overhead_share:.1f} %)",
        "result": search.result,
    }
    return {label: text for label, text in lines.items() if text}


def _asked(question: Question) -> str:
    """What was asked that is not so by default: ``solver milp; pinned h/mlp/* to save``."""
    pins = [f"{pattern} to {decision.value}" for pattern, decision in question.pins]
    parts = (
        f"solver {question.solver}" if question.solver != DEFAULT_SOLVER else "",
        f"pinned {format_some(pins, 3)}" if pins else "",
        "layers decided alike" if not question.per_layer else "",
        "updates in loops where that takes less" if question.reorder else "",
    )
    return "; ".join(filter(None, parts))


def _bounds(search: SearchRecord) -> str:
    """Floor and plain step."""
    floor, ceiling = (", predicted" if b in search.estimates else "" for b in ("floor", "ceiling"))
    return (
        f"floor {format_bytes(search.floor, up=True)} (the least that a plan needs{floor}), "
        f"plain step {format_bytes(search.ceiling)} (without jdelta{ceiling})"
    )


def _code(target: str, size: int) -> str:
    if not backend_of(target.partition(":")[0]).reading.code_in_memory:
        return ""
    return f"{format_bytes(size)}, in device memory beside the peak"


def _on_the_host(figures: Figures) -> str:
    overlap = figures.overlap
    if not overlap.transfers:
        return format_bytes(figures.host_bytes) if figures.host_bytes else ""
    return (
        f"{format_bytes(figures.host_bytes)}; "
        f"{format_seconds(overlap.seconds_out + overlap.seconds_in)} of transfers, "
        f"{overlap.hidden:.0%} of it behind compute (read in the compiled schedule)"
    )


def _in_files(spill: Spill | None, figures: Figures) -> str:
    if spill is None or figures.spill_rates is None:
        return ""
    return (
        f"{format_bytes(figures.spill_bytes)} in {spill.path}, which takes "
        f"{format_bytes(round(figures.spill_rates.write))}/s and gives "
        f"{format_bytes(round(figures.spill_rates.read))}/s"
    )


def _loops(grouping: Grouping) -> str:
    if grouping.states:
        return (
            f"of those with many iterations {grouping.states} states are kept at a time, and the "
            "iterations between them are run again"
        )
    if grouping.layers == 1:
        return ""
    how = "under one more checkpoint" if grouping.nested else "each decided for by itself"
    return f"{grouping.layers} layers in an iteration, {how}"


def _head(grouping: Grouping) -> str:
    if not grouping.pieces:
        return ""
    return f"and loss in up to {grouping.pieces} pieces of tokens: no array of all logits is made"


def _updates(saved: int) -> str:
    return f"inside the backward loops: {format_bytes(saved)} less" if saved else ""


def _undone(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"by the compiler, which keeps or recomputes otherwise: {format_some(names, 3)}"
