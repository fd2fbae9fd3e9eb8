"""What to say of a plan, or of a budget, that is refused: what came, why, and what to do."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from jdelta._src import _jax
from jdelta._src.decision import Decision
from jdelta._src.errors import BudgetError, TraceError
from jdelta._src.estimate.memory import Timeline
from jdelta._src.hlo.measure import Measurement
from jdelta._src.search.advice import described, donation
from jdelta._src.search.candidate import CompiledCandidate
from jdelta._src.search.propose import Proposals
from jdelta._src.sizes import format_bytes, format_some

MUCH_OF_WHAT_LACKS = 0.5
"""Part of what a budget lacks that a compiler has to keep for an error to speak of it."""


def not_there(names: Sequence[str], away: Mapping[str, int], measurement: Measurement) -> str:
    """What to say where the program keeps on the device what the plan puts on the host.

    Args:
        names: What is not on the host.
        away: From what should be there to bytes.
        measurement: Of the program.
    """
    return (
        f"The plan puts {format_bytes(sum(away.values()))} on the host, but the compiled program "
        f"holds {format_bytes(measurement.host)} there: the compiler keeps {format_some(names, 5)} "
        "on the device. Take these out of pin=."
    )


def wrong_order(fetches: Sequence[str]) -> str:
    """What to say where the compiler does not surely fetch the rows that it was asked for."""
    return (
        f"The compiled program reads {', '.join(fetches[:3])} back from the host in the wrong "
        "order, or in one that its text does not tell, so gradients might be wrong. Upgrade "
        "jaxlib, set jax_optimization_level back, or pin nothing to the host."
    )


def too_small(
    bound: int, floor: CompiledCandidate, least: int, proposals: Proposals, *, is_undone: bool
) -> BudgetError:
    """The error of a budget below the floor.

    Args:
        bound: The budget, bytes.
        floor: Everything recomputed, compiled.
        least: The least compiled peak of any plan, that of the floor or below it, bytes.
        proposals: What proposed it.
        is_undone: Whether the compiler keeps what was to be recomputed, outside of loops.
    """
    decisions, residuals = floor.decisions or {}, proposals.items.residuals
    inside = (r for r in residuals if not r.region_input and decisions[r.name] is Decision.SAVE)
    kept = sum(r.bytes for r in inside)
    few = f" but {format_bytes(kept)}" if kept else ""
    count = len(floor.levels)
    nested = f", {count} input{'' if count == 1 else 's'} of regions too," if count else ""
    host = floor.measurement.host
    away = f" and {format_bytes(host)} on the host" if host else ""
    if files := floor.emission.spilled.bytes:
        away += f" or in files ({format_bytes(files)})"
    exactly = "" if least == floor.peak else f" of {format_bytes(least, up=True)}"
    reason = _given(bound, floor) + _merged(bound, floor, proposals, is_undone=is_undone)
    return BudgetError(
        f"The budget of {format_bytes(bound)} is below the floor{exactly}: with every residual "
        f"recomputed{few}{nested}{away} the step still needs {format_bytes(floor.peak, up=True)} "
        f"per device.{reason} {_advice(floor, least, proposals)}{_makeup(floor)}",
        floor=least,
    )


def above_plain(
    bound: int, plain: CompiledCandidate, floor: CompiledCandidate, proposals: Proposals
) -> BudgetError:
    """The error of a budget below the plain step, which takes less than everything recomputed.

    Args:
        bound: The budget, bytes.
        plain: The plain step, compiled.
        floor: Everything recomputed, compiled.
        proposals: What proposed it.
    """
    reason = _given(bound, plain) + _merged(bound, floor, proposals, is_undone=False)
    return BudgetError(
        f"The budget of {format_bytes(bound)} is below the floor: the step as it is needs "
        f"{format_bytes(plain.peak, up=True)} per device; with every residual recomputed it needs "
        f"{format_bytes(floor.peak, up=True)}, which is no less.{reason} "
        f"{_advice(plain, plain.peak, proposals)}{_makeup(plain)}",
        floor=plain.peak,
    )


def grown(bound: int, known: CompiledCandidate, plan: CompiledCandidate) -> BudgetError:
    """The error of a plan that takes more than when it was measured, and more than the budget.

    Args:
        bound: The budget, bytes.
        known: The plan, its measurement from disk.
        plan: The plan, compiled once more.
    """
    return BudgetError(
        f"Compiled once more, the plan takes {format_bytes(plan.peak)}, over the budget of "
        f"{format_bytes(bound)}; an earlier process measured {format_bytes(known.peak)}. The "
        "compiler tunes programs for attached devices, each time anew. Plan again: the new figure "
        "is kept."
    )


def nothing_kept(
    bound: int, plain: CompiledCandidate, proposals: Proposals
) -> BudgetError | TraceError:
    """The error of a budget below a step of which nothing can be decided.

    Args:
        bound: The budget, bytes.
        plain: The step, compiled.
        proposals: What proposed it; its trace says why it has no regions, or nothing where it keeps
            nothing for a backward pass.
    """
    needed = (
        f"The budget of {format_bytes(bound)} is below the {format_bytes(plain.peak, up=True)} per "
        "device that the step needs."
    )
    if uncut := proposals.trace.uncut:
        return TraceError(f"{needed} {uncut}", floor=plain.peak)
    advice = donation(plain.emission.timeline.graph, proposals.step, plain.peak)
    trace = proposals.trace
    reason = (
        "It keeps nothing for a backward pass, so there is nothing to recompute or to move: "
        if trace.automatic or trace.regions
        else "Nothing is differentiated in it, and jdelta plans whole training steps, with "
        "jax.grad or jax.value_and_grad inside. If it is to have no gradient, "
    )
    return BudgetError(
        f"{needed} {reason}raise the budget, {f'donate {advice}, ' if advice else ''}or give the "
        f"step less at once (a smaller batch, or a jax.lax.map with batch_size=).{_makeup(plain)}",
        floor=plain.peak,
        budget=bound,
        ceiling=plain.peak,
    )


def _advice(candidate: CompiledCandidate, least: int, proposals: Proposals) -> str:
    """What to do about a budget below the floor, but for what was done already."""
    step = proposals.step
    donate = donation(candidate.emission.timeline.graph, step, candidate.peak)
    steps = (
        f"raise the budget to {format_bytes(least, up=True)} or more",
        f"donate {donate}" if donate else "",
        "make the batch smaller",
        "mark regions of your own with jdelta.remat"
        if step.automatic
        else "mark smaller regions with jdelta.remat",
    )
    *first, last = filter(None, steps)
    text = f"{', '.join(first)}, or {last}."
    return text[0].upper() + text[1:]


def _given(bound: int, candidate: CompiledCandidate) -> str:
    """That no plan fits, where what the step is given and gives exceeds the budget by itself."""
    fixed = candidate.measurement.fixed
    if fixed <= bound:
        return ""
    return f" Its arguments and results alone take {format_bytes(fixed, up=True)}: no plan fits."


def _makeup(candidate: CompiledCandidate) -> str:
    """What a compiled peak is made of, and what is largest in it."""
    parts, largest = _parts(candidate), _largest(candidate)
    told = "; ".join(filter(None, (parts, largest)))
    return f" The peak: {told}." if told else ""


def _parts(candidate: CompiledCandidate) -> str:
    """The parts of a compiled peak; nothing where the compiler does not say."""
    measured = candidate.measurement
    parts = {
        "arguments": measured.arguments,
        "results": measured.outputs - measured.aliased,
        "temporaries": measured.temporaries,
    }
    if measured.refused or not any(parts.values()):
        return ""
    if candidate.emission.pool:
        parts["pool= of spill="] = candidate.emission.pool
    return ", ".join(f"{part} {format_bytes(size)}" for part, size in parts.items())


def _merged(bound: int, floor: CompiledCandidate, proposals: Proposals, *, is_undone: bool) -> str:
    """What to do about a compiler that merges recompute with what it repeats, if that matters."""
    undone, backend = set(floor.measurement.undone), proposals.step.target.backend
    residuals = (r for r in proposals.items.residuals if r.name in undone)
    kept = sorted(residuals, key=lambda r: -r.bytes)
    size = sum(r.bytes for r in kept)
    if not kept or not (is_undone or size >= MUCH_OF_WHAT_LACKS * (floor.peak - bound)):
        return ""
    names = format_some([r.name for r in kept], 3)
    said = f" The compiler keeps {format_bytes(size)} all the same ({names})"
    if not backend.tolerances.undoes_recompute:
        return (
            f"{said}: it takes their recompute for what it repeats, and undoes it. Run the layers "
            "under jax.lax.scan, where the two are apart."
        )
    spill = "" if proposals.step.store else "spill to files (spill=), "
    return (
        f" Before jax 0.12 XLA for CPUs undoes recompute outside of loops ({names}): "
        f"{_upgrade()}, run the layers under jax.lax.scan, {spill}or plan for the accelerator that "
        "is to train (target='tpu:v5e:2x2')."
    )


def _upgrade() -> str:
    """How to get a JAX that does not, with the Python at hand."""
    is_new = sys.version_info >= (3, 12)
    return "upgrade jax" if is_new else "take Python 3.12 or newer and upgrade jax"


def _largest(candidate: CompiledCandidate) -> str:
    """What is alive at the simulated peak, and what its operation takes itself, for messages.

    But for what is larger than all temporaries of the compiled program: the compiler makes no such
    value.
    """
    timeline = candidate.emission.timeline
    room = candidate.measurement.temporaries if _parts(candidate) else math.inf
    values, alive = timeline.graph.values, timeline.alive(timeline.peak_index)
    rows = [described(timeline, v) for v in alive if values[v].bytes <= room][:4]
    if 0 < timeline.peak_workspace <= room:
        rows.insert(0, _itself(timeline))
    return f"the largest temporaries are {', '.join(rows)}" if rows else ""


def _itself(timeline: Timeline) -> str:
    """What the operation at the peak takes for itself."""
    op = timeline.graph.operations[timeline.peak_index]
    line = _jax.line_of(op.equation)
    place = f" at {line}" if line else ""
    return f"{format_bytes(timeline.peak_workspace)} that {op.primitive}{place} takes for itself"
