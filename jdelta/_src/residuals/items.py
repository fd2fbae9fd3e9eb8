"""From residuals to the items of a planning problem: bytes on the target, seconds on each link."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jdelta._src.backends.target import Target
from jdelta._src.decision import Decision
from jdelta._src.errors import BudgetError, OffloadError, SpillError
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.program.graph import Value
from jdelta._src.residuals.links import EXPOSED, Link, to_host
from jdelta._src.residuals.pins import Pins, pinned
from jdelta._src.residuals.residual import Residual
from jdelta._src.sizes import format_bytes, format_some
from jdelta._src.solver.problem import AWAY, Item, Memory, Move, Problem

_UNSAVEABLE = float(1 << 62)
"""Bytes of an item that must not be saved: more than any device has, yet finite to sum up."""


@dataclass(frozen=True)
class Items:
    """The residuals of a step as a problem, those that the user pinned taken out.

    Attributes:
        problem: What is left to decide, with capacity zero. To drop a region input is to move it.
        deep: The same with region inputs to be decided about; None where there are none that may
            be moved.
        unpinned: The same with all residuals, none pinned: it prices complete decisions.
        residuals: All residuals of the step.
        pins: What the user decided.
        pinned: The same by the names of residuals.
        leaving: What becomes of each region input that does not stay.
    """

    problem: Problem
    deep: Problem | None
    unpinned: Problem
    residuals: tuple[Residual, ...]
    pins: Pins
    pinned: Mapping[str, Decision]
    leaving: Mapping[str, Decision]

    def decisions(self, chosen: Sequence[Decision]) -> dict[str, Decision]:
        """Decisions for all residuals, given those for the items.

        What is kept or moved although nothing in the backward pass would read it (given all else
        that is kept) is dropped: JAX would not keep it either. What is pinned to stay, stays.
        """
        free = {item.name: d for item, d in zip(self.problem.items, chosen, strict=True)}
        wished = [self.pinned.get(r.name) or self._wished(r, free) for r in self.residuals]
        kept = {name for name, decision in self.pinned.items() if decision not in AWAY}
        for r, is_recomputed in zip(self.residuals, self.unpinned.recomputed(wished), strict=True):
            kept.update(r.sources if is_recomputed else ())
        return {
            r.name: d if r.needed or r.name in kept else Decision.RECOMPUTE
            for r, d in zip(self.residuals, wished, strict=True)
        }

    def policy_decisions(self, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
        """Decisions by all names that a value goes by."""
        entering = {r.entering: decisions[r.name] for r in self.residuals if r.entering}
        return {**decisions, **entering}

    def decisions_by_hand(self, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
        """The same, but a region's input is not handed to the region that makes it, unless pinned.

        Of ``{"region_0/tanh": SAVE}`` that enters ``region_1`` it makes
        ``{"region_0/tanh": RECOMPUTE, "region_1/input": SAVE}``.
        """
        stays = (r for r in self.residuals if decisions[r.name] is Decision.SAVE)
        entering = {r.name for r in stays if r.entering and r.name not in self.pinned}
        return self.policy_decisions(decisions) | dict.fromkeys(entering, Decision.RECOMPUTE)

    def with_region_inputs(self) -> Items:
        """The problem in which region inputs may leave the device."""
        return replace(self, problem=self.deep or self.problem)

    def in_parts(self, parts: int, regions: Collection[str]) -> Problem:
        """The problem with equal parts of each item of these regions, decided apart."""
        split = {r.name for r in self.residuals if r.region in regions}
        items: list[Item] = []
        places: list[range] = []
        for item in self.problem.items:
            count = parts if item.name in split else 1
            places.append(range(len(items), len(items) + count))
            for number in range(count):
                sources = tuple(places[s][number % len(places[s])] for s in item.sources)
                items.append(_part_of(item, number, count, sources))
        return replace(self.problem, items=tuple(items))

    def without(self, *closed: Decision) -> Items:
        """The same problem with these links closed to all but what is pinned, and region inputs."""
        items = tuple(_without(item, *closed) for item in self.problem.items)
        return replace(self, problem=replace(self.problem, items=items))

    def recompute_seconds(self, decisions: Mapping[str, Decision]) -> float:
        """Seconds to compute again what complete decisions drop."""
        return self.unpinned.recompute_seconds([decisions[r.name] for r in self.residuals])

    def overhead_but_for_host(self, decisions: Mapping[str, Decision]) -> float:
        """Seconds that complete decisions add to the step, transfers to the host left out."""
        memories = tuple(m for m in self.unpinned.memories if m.decision is not Decision.OFFLOAD)
        problem = replace(self.unpinned, memories=memories)
        return problem.overhead([decisions[r.name] for r in self.residuals])

    def overhead(self, decisions: Mapping[str, Decision]) -> float:
        """Seconds that complete decisions add to the step."""
        return self.unpinned.overhead([decisions[r.name] for r in self.residuals])

    def check_moved(self, decisions: Mapping[str, Decision]) -> None:
        """Refuse a pattern that moves nothing, since the backward pass reads nothing of it.

        Args:
            decisions: Those of the plan.

        Raises:
            OffloadError: It should go to the host.
            SpillError: It should go to files.
        """
        for pattern, text in self.pins.decisions.items():
            decision = Decision(text)
            if decision not in AWAY:
                continue
            names = [
                r.name
                for r in self.pins.fitting(self.residuals, pattern)
                if self.pinned.get(r.name) is decision
            ]
            if names and all(decisions[name] is Decision.RECOMPUTE for name in names):
                raise _ERRORS[decision](
                    f"pin: {pattern!r} moves nothing: nothing reads {format_some(names, 5)} in the "
                    "backward pass, since all that is computed from it is kept. Pin that to "
                    '"recompute" too, or take this out of pin=.'
                )

    def _wished(self, r: Residual, free: Mapping[str, Decision]) -> Decision:
        """The decision for a residual; a region input stays, or leaves for another memory."""
        if not r.region_input:
            return free[r.name]
        stays = free.get(r.name, Decision.SAVE) is Decision.SAVE
        return Decision.SAVE if stays else self.leaving[r.name]


def _without(item: Item, *closed: Decision) -> Item:
    """The item with these links closed to it."""
    return replace(item, moves=tuple(m for m in item.moves if m.to not in closed))


def _part_of(item: Item, number: int, parts: int, sources: tuple[int, ...]) -> Item:
    return replace(
        item,
        name=f"{item.name}#{number}",
        bytes=item.bytes / parts,
        seconds=item.seconds / parts,
        holding=item.holding / parts,
        sources=sources,
        moves=tuple(
            Move(
                move.to,
                move.seconds_out / parts,
                move.seconds_in / parts,
                move.bytes / parts,
                move.seconds_exposed / parts,
            )
            for move in item.moves
        ),
    )


def items_of(
    residuals: Sequence[Residual],
    target: Target,
    host_budget: float,
    pins: Pins,
    files: Link | None = None,
) -> Items:
    """State the planning problem of a step.

    Args:
        residuals: Its residuals.
        target: What it is compiled for.
        host_budget: Bytes that may be offloaded to the host.
        pins: What the user decided by hand.
        files: The link to files, if there is one.

    Raises:
        PlanMismatchError: A pin fits no residual, or moves what cannot be.
        BudgetError: More is pinned to another memory than there is room for.
    """
    host = to_host(target, host_budget)
    links = (host, files) if files else (host,)
    decided = pinned(residuals, links, pins)
    rooms = {link.decision: _room(link, residuals, decided) for link in links}
    inside = [r for r in residuals if not r.region_input]
    free = [r for r in residuals if r.region_input and r.name not in decided]
    leaving = _leaving(free, links, rooms)
    left = {
        d: room - sum(r.bytes for r in free if leaving.get(r.name) is d)
        for d, room in rooms.items()
    }
    some = [r for r in residuals if not r.region_input or r.name in leaving]
    maker = _Maker(target, links)

    def memories(rooms: Mapping[Decision, float]) -> tuple[Memory, ...]:
        return tuple(link.memory(residuals, rooms[link.decision]) for link in links)

    roomy, filled = memories(rooms), memories(left)
    return Items(
        problem=Problem(maker.items(inside, decided), 0.0, roomy),
        deep=Problem(maker.deep_items(some, decided, filled, leaving), 0.0, filled)
        if leaving
        else None,
        unpinned=Problem(maker.items(residuals, {}), 0.0, roomy),
        residuals=tuple(residuals),
        pins=pins,
        pinned=decided,
        leaving=leaving,
    )


def _room(link: Link, residuals: Sequence[Residual], pinned: Mapping[str, Decision]) -> float:
    """Bytes that the memory at a link has room for beside what is pinned there.

    Raises:
        BudgetError: It has not even room for that.
    """
    away = sum(r.bytes for r in residuals if pinned.get(r.name) is link.decision)
    if away > link.room:
        where, bound = _NAMES[link.decision]
        raise BudgetError(
            f"pin= puts {format_bytes(away)} {where}, more than {bound}, "
            f"{format_bytes(link.room)}. Pin less there, or raise {bound}."
        )
    return link.room - away


_NAMES = {
    Decision.OFFLOAD: ("on the host", "host_budget"),
    Decision.SPILL: ("in files", "the limit of spill"),
}
"""How messages call what is in a memory, and its bound."""


def _leaving(
    inputs: Sequence[Residual], links: Sequence[Link], rooms: Mapping[Decision, float]
) -> dict[str, Decision]:
    """Where region inputs go that do not stay: by the first link first, till its memory is full."""
    leaving: dict[str, Decision] = {}
    for link in links:
        movable = [r for r in inputs if r.name not in leaving and link.refusal(r) is None]
        filled = itertools.accumulate(r.bytes for r in movable)
        pairs = zip(movable, filled, strict=True)
        room = rooms[link.decision]
        leaving.update((r.name, link.decision) for r, total in pairs if total <= room)
    return leaving


@dataclass(frozen=True)
class _Maker:
    """Makes items for a target, from which these links lead."""

    target: Target
    links: Sequence[Link]

    def items(
        self, residuals: Sequence[Residual], pinned: Mapping[str, Decision]
    ) -> tuple[Item, ...]:
        """Items for the residuals; those pinned to a memory are there anyway, so they are none."""
        index: dict[str, int] = {}
        items: list[Item] = []
        in_use = {r.name for r in residuals if r.region_input and r.needed}  # whatever is dropped
        for r in residuals:
            if pinned.get(r.name, Decision.RECOMPUTE) is Decision.RECOMPUTE:
                index[r.name] = len(items)
                sources = tuple(index[s] for s in r.sources if s in index and s not in in_use)
                items.append(self._item(r, sources, is_pinned=r.name in pinned))
        return tuple(items)

    def deep_items(
        self,
        residuals: Sequence[Residual],
        pinned: Mapping[str, Decision],
        memories: Sequence[Memory],
        leaving: Mapping[str, Decision],
    ) -> tuple[Item, ...]:
        """Items with region inputs among them: one that is not saved costs its transfers."""
        items = self.items(residuals, pinned)
        exposed = {
            memory.decision: _exposed(
                memory, [i for i in items if leaving.get(i.name) is memory.decision]
            )
            for memory in memories
        }

        def moved(item: Item, to: Decision) -> Item:
            move = item.move(to)
            assert move is not None
            seconds = exposed[to] * (move.seconds_out + move.seconds_in)
            bare = 0.0 if seconds else move.seconds_exposed  # hidden by nothing
            return _without(replace(item, seconds=seconds + bare), *AWAY)

        return tuple(moved(i, leaving[i.name]) if i.name in leaving else i for i in items)

    def _item(self, r: Residual, sources: tuple[int, ...], *, is_pinned: bool) -> Item:
        """One residual as an item; ``is_pinned`` leaves nothing but to recompute it."""
        compiler = Compiler(self.target.backend)
        value = Value(r.shape, r.dtype, r.bytes // max(1, r.count), r.spec)
        stored = compiler.stored_bytes(value, read_narrowly=r.read_narrowly)
        size = (stored if r.loops else compiler.bytes(value)) * r.count
        moves = () if is_pinned else (link.move(r) for link in self.links)
        return Item(
            name=r.name,
            bytes=_UNSAVEABLE if is_pinned else size,
            seconds=r.seconds,
            sources=sources,
            needed=r.needed,
            holding=r.holding,
            moves=tuple(move for move in moves if move),
        )


def _exposed(memory: Memory, items: Sequence[Item]) -> float:
    """Share of the transfers that is exposed if all these items move to a memory."""
    moves = [move for item in items if (move := item.move(memory.decision))]
    moving = sum(move.seconds_out + move.seconds_in for move in moves)
    hidden = memory.hidden_out + memory.hidden_in
    return max(EXPOSED, 1 - hidden / moving) if moving else 1.0


_ERRORS = {Decision.OFFLOAD: OffloadError, Decision.SPILL: SpillError}
