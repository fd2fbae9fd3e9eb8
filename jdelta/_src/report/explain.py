"""Why a plan does with a value what it does, and what would change that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jdelta._src.backends.target import Target, published
from jdelta._src.decision import Decision
from jdelta._src.errors import PlanMismatchError
from jdelta._src.plan.record import PlanRecord
from jdelta._src.report.rows import Row, rows
from jdelta._src.residuals.file_link import to_files
from jdelta._src.residuals.items import Items, items_of
from jdelta._src.residuals.links import offload_refusal
from jdelta._src.residuals.pins import Pins, fitting, meant
from jdelta._src.residuals.residual import Residual
from jdelta._src.sizes import format_array, format_bytes, format_seconds, format_some
from jdelta._src.solver import DEFAULT_SOLVER, SOLVERS
from jdelta._src.solver.problem import Item

_BISECTIONS = 12


@dataclass(frozen=True)
class Explanation:
    """What is known of a residual and of the decision for it.

    Attributes:
        name: Its name; ``*`` stands for the number of alike regions.
        decision: What the plan does with it.
        pinned: Whether that was decided by hand.
        shape: Shape of one instance.
        dtype: Its dtype.
        instances: How many there are at once, all alike regions together.
        bytes: Bytes of all of them on one device.
        lifespan: Predicted seconds from the end of the forward work on one of them to its use in
            the backward pass, in the plain step.
        recompute: Predicted seconds to compute all of them again, the chain included.
        holding: Predicted seconds for copies that saving them takes.
        line: Where the user's code computes it, ``model.py:31``; empty where that is not known.
        chain: What has to be computed again before it, as the plan decides about the others.
        transfers: Predicted seconds of their transfers, out and in, on the link; None where they
            may not be offloaded.
        refusal: Why they may not be offloaded; empty where they may.
        hidden: Share of all transfers that the compiled schedule hides; None where the plan
            transfers nothing.
        turning: Device bytes for residuals at which the decision becomes another one, less those
            that the plan keeps now; None where no amount does that.
        unknown_solver: The solver that was asked for, where a file holds only its ``repr``, so that
            ``turning`` is what the default solver says; empty otherwise.
        is_nested: Whether it enters a region and earlier regions compute it again. How often they
            do depends on the others, so only the plan's overhead has these seconds.
        is_refusal_told: Whether an explanation in front of it has the same refusal, so that its
            text leaves it out.
    """

    name: str
    decision: Decision
    pinned: bool
    shape: tuple[int, ...]
    dtype: str
    instances: int
    bytes: int
    lifespan: float
    recompute: float
    holding: float
    line: str
    chain: tuple[str, ...]
    transfers: tuple[float, float] | None
    refusal: str
    hidden: float | None
    turning: int | None
    unknown_solver: str = ""
    is_nested: bool = False
    is_refusal_told: bool = False

    def __str__(self) -> str:
        """The explanation in sentences."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        times = f" × {self.instances}" if self.instances > 1 else ""
        yield f"{self.name}: {self.decision.value}{' (pinned)' if self.pinned else ''}"
        if self.line:
            yield f"  computed at {self.line}"
        array = format_array(self.dtype, self.shape)
        yield f"  {array}{times}, {format_bytes(self.bytes)} per device"
        yield f"  alive for {format_seconds(self.lifespan)} if kept (predicted)"
        after = f", after {format_some(self.chain, 4)}" if self.chain else ""
        if self.holding:
            yield f"  save: {format_seconds(self.holding)} of copies to and from stacks of loops"
        if self.is_nested:
            yield "  recompute: by earlier regions; the plan's overhead has the seconds"
        else:
            yield f"  recompute: {format_seconds(self.recompute)}{after}"
        if not self.is_refusal_told:
            yield f"  offload: {self._offload()}"
        yield f"  {self._turning()}"
        if self.unknown_solver and not self.pinned:
            yield f"  So says {DEFAULT_SOLVER}: no file can hold the plan's {self.unknown_solver}."

    def _offload(self) -> str:
        if self.transfers is None:
            return self.refusal
        out, into = map(format_seconds, self.transfers)
        hidden = "" if self.hidden is None else f"; the schedule hides {self.hidden:.0%} of all"
        return f"{out} out, {into} in{hidden}"

    def _turning(self) -> str:
        if self.pinned:
            return "No amount of memory for residuals changes this decision: it was pinned."
        if self.turning is None:
            return "No amount of memory for residuals changes this decision."
        way, budget = ("more", "larger") if self.turning > 0 else ("less", "smaller")
        return (
            f"With about {format_bytes(abs(self.turning))} {way} memory for residuals (a {budget} "
            "budget) it would be decided otherwise."
        )


def explain(plan: PlanRecord, name: str) -> tuple[Explanation, ...]:
    """What is known of residuals, and why the plan does with them what it does.

    The question is the one that was asked: by the same solver, with the same pins, and as much room
    on the host and in files.

    Args:
        plan: The plan; one that was loaded will do, and no compiler is needed.
        name: The name of a residual, or a pattern such as ``"h/mlp/*"``, as ``pin`` takes it; names
            with ``*`` that the plan's table prints are such patterns.

    Returns:
        One explanation for residuals that are alike: pinned ones first, then in the order of the
        plan's table.

    Raises:
        PlanMismatchError: No residual has such a name.
        TargetError: The plan is for a device of the machine it was made on, not of this one.
    """
    residuals, pinned = plan.answer.residuals, dict(plan.answer.pinned)
    matches = fitting(residuals, name)
    if not matches:
        raise PlanMismatchError(
            f"The plan has no residual called {name!r}; {meant(residuals, name)}"
        )
    where = _Explaining(plan, published(plan.question.target))
    by_hand = [r for r in matches if r.name in pinned]
    others = [r for r in matches if r.name not in pinned]
    explained = rows(by_hand, plan.decisions) + rows(others, plan.decisions)
    return tuple(_refused_once(map(where.row, explained)))


def _refused_once(explanations: Iterable[Explanation]) -> Iterator[Explanation]:
    """Explanations of which each refusal is told by the first that has it."""
    told: set[str] = set()
    for explanation in explanations:
        yield replace(explanation, is_refusal_told=explanation.refusal in told)
        told |= {explanation.refusal} - {""}


class _Explaining:
    """What all explanations of a plan share."""

    def __init__(self, plan: PlanRecord, target: Target):
        self.plan = plan
        self.target = target
        self.residuals = plan.answer.residuals
        question, rates = plan.question, plan.figures.spill_rates
        spill, room = question.spill, question.host_budget
        files = to_files(spill, rates, self.residuals, target) if spill and rates else None
        host_room = math.inf if room is None else room
        pins = Pins(dict(plan.answer.pinned))
        if Decision.OFFLOAD in pins.decisions.values():  # jaxlib here may refuse what that one did
            target = replace(target, offload_refusal=None)
        self.items: Items = items_of(self.residuals, target, host_room, pins, files)
        self.solver = plan.solver or SOLVERS[DEFAULT_SOLVER]
        self.decisions: Mapping[str, Decision] = plan.decisions
        policy = plan.answer.policy
        self.dropped = dict(policy.levels) if policy else {}
        self.by_name = {r.name: r for r in self.residuals}
        self.solved: dict[float, Mapping[str, Decision]] = {}

    def row(self, row: Row) -> Explanation:
        r = row.sample
        chain = self._chain(r)
        refusal = offload_refusal(r, self.target) or ""
        rates = self.target.rates
        moved = row.bytes * r.repeats
        seconds = moved / rates.device_to_host, moved / rates.host_to_device
        overlap = self.plan.figures.overlap
        return Explanation(
            name=row.name,
            decision=row.decision,
            pinned=r.name in self.items.pinned,
            shape=r.shape,
            dtype=r.dtype,
            instances=r.count * row.regions,
            bytes=row.bytes,
            lifespan=self._lifespan(r),
            recompute=row.regions * (r.seconds + sum(c.seconds for c in chain)),
            holding=row.holding,
            line=r.line,
            chain=tuple(c.name for c in chain),
            transfers=None if refusal else seconds,
            refusal=refusal,
            hidden=overlap.hidden if overlap.transfers else None,
            turning=self._turning(r),
            unknown_solver="" if self.plan.solver else self.plan.question.solver,
            is_nested=(r.entering or r.name) in self.dropped,
        )

    def _chain(self, r: Residual) -> list[Residual]:
        """What the plan drops of what the residual is computed from, first things first."""
        sources: dict[str, Residual] = {}
        todo = list(r.sources)
        while todo:
            source = self.by_name[todo.pop()]
            dropped = self.decisions[source.name] is Decision.RECOMPUTE and not source.region_input
            if source.name not in sources and dropped:
                sources[source.name] = source
                todo += source.sources
        return [source for source in self.residuals if source.name in sources]

    def _lifespan(self, r: Residual) -> float:
        """Forward and backward work on what comes after it; a backward pass takes twice as long.

        Of an iteration of a loop it is the mean: half of them come later.
        """
        order = [other.name for other in self.residuals]
        later = self.residuals[order.index(r.name) + 1 :]
        after = sum(o.seconds for o in later if o.region != r.region)
        return 3 * (after + sum(o.seconds for o in later if o.region == r.region) / 2)

    def _free(self) -> list[Item]:
        """What the solver decides about; an item that is pinned is not asked about."""
        return [i for i in self.items.problem.items if i.name not in self.items.pinned]

    def _turning(self, r: Residual) -> int | None:
        """By how much more (or less) memory for residuals the decision would be another one.

        Solvers are no monotone functions of the capacity, so this is where one step of many was
        found, not the first.
        """
        free = self._free()
        is_free = any(item.name == r.name for item in free)
        if not is_free or not (r.needed or self.decisions[r.name] is not Decision.RECOMPUTE):
            return None
        saved = self.decisions[r.name] is Decision.SAVE
        now = sum(i.bytes for i in free if self.decisions[i.name] is Decision.SAVE)
        same, other = now, 0.0 if saved else sum(i.bytes for i in free)
        if self._is_saved(r.name, other) == saved or self._is_saved(r.name, same) != saved:
            return None
        for _ in range(_BISECTIONS):
            middle = (same + other) / 2
            is_same = self._is_saved(r.name, middle) == saved
            same, other = (middle, other) if is_same else (same, middle)
        return round(other - now)

    def _is_saved(self, name: str, capacity: float) -> bool:
        if capacity not in self.solved:
            problem = replace(self.items.problem, capacity=capacity)
            self.solved[capacity] = self.items.decisions(self.solver.solve(problem).decisions)
        return self.solved[capacity][name] is Decision.SAVE
