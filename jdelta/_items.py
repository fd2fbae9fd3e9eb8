"""From residuals to the items of a planning problem: bytes on the target, seconds of each way."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jdelta._budget import format_bytes
from jdelta._decision import Decision
from jdelta._errors import BudgetError, PlanMismatchError
from jdelta._fusion import Compiler
from jdelta._graph import Value
from jdelta._problem import Item, Problem
from jdelta._residual import Residual
from jdelta._target import Target

_UNSAVEABLE = float(1 << 62)
"""Bytes of an item that must not be saved: more than any device has, yet finite to sum up."""

HIDING = 0.8
"""Share of the compute of units with offload that is expected to hide transfers."""

EXPOSED = 0.15
"""Share of a transfer that is expected to be exposed although there is compute to hide it."""

LEAST_OFFLOAD = 1 << 20
"""Bytes below which a buffer is not offloaded: the transfer would be all latency."""


def offload_refusal(residual: Residual, target: Target) -> str | None:
    """Why a residual must not be offloaded; None if it may."""
    if target.offload_refusal:
        return target.offload_refusal
    if residual.loops > 1:
        return "in nested loops, where XLA fails on offloaded values"
    if residual.conditional:
        return "in a branch of a cond, where XLA fails on offloaded values"
    if residual.bytes < LEAST_OFFLOAD * residual.count or not residual.shape:
        return "too small to be worth a transfer"
    if residual.dtype.startswith("key"):
        return "a PRNG key"
    return None


@dataclass(frozen=True)
class Items:
    """The residuals of a step as a problem, those that the user pinned taken out.

    Attributes:
        problem: What is left to decide, with capacity zero. To drop a boundary means to offload it.
        deep: The same with boundaries to be decided about too; None where there are none that may
            be offloaded.
        whole: The same with all residuals, none pinned: it prices complete decisions.
        residuals: All residuals of the step.
        pinned: Decisions of the user's, by name.
    """

    problem: Problem
    deep: Problem | None
    whole: Problem
    residuals: tuple[Residual, ...]
    pinned: Mapping[str, Decision]

    def decisions(self, chosen: Sequence[Decision]) -> dict[str, Decision]:
        """Decisions for all residuals, given those for the items.

        What a solver keeps although nothing in the backward pass would read it (given all else
        that is kept) is dropped: JAX would not keep it either. Pins stay as they are.
        """
        free = {item.name: d for item, d in zip(self.problem.items, chosen, strict=True)}
        given = [self.pinned.get(r.name) or _given(r, free) for r in self.residuals]
        again = self.whole.recomputed(given)
        kept = set(self.pinned)
        for r, more in zip(self.residuals, again, strict=True):
            kept.update(r.sources if more else ())
        return {
            r.name: d if r.needed or r.name in kept else Decision.RECOMPUTE
            for r, d in zip(self.residuals, given, strict=True)
        }

    def policy_decisions(self, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
        """Decisions by all names that a value goes by."""
        entering = {r.entering: decisions[r.name] for r in self.residuals if r.entering}
        return {**decisions, **entering}

    def with_boundaries(self) -> Items:
        """The problem in which boundaries may leave the device."""
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

    def without_offload(self) -> Items:
        """The same problem with nothing offloaded but what is pinned, and boundaries."""
        closed = tuple(
            replace(item, seconds_out=math.inf, seconds_in=math.inf) for item in self.problem.items
        )
        return replace(self, problem=replace(self.problem, items=closed))

    def recompute_seconds(self, decisions: Mapping[str, Decision]) -> float:
        """Seconds that complete decisions add to the step, transfers left out."""
        kept = {Decision.OFFLOAD: Decision.SAVE}
        given = [decisions[r.name] for r in self.residuals]
        return self.whole.overhead([kept.get(d, d) for d in given])

    def overhead(self, decisions: Mapping[str, Decision]) -> float:
        """Seconds that complete decisions add to the step."""
        return self.whole.overhead([decisions[r.name] for r in self.residuals])


def _part_of(item: Item, number: int, parts: int, sources: tuple[int, ...]) -> Item:
    return replace(
        item,
        name=f"{item.name}#{number}",
        bytes=item.bytes / parts,
        seconds=item.seconds / parts,
        sources=sources,
        seconds_out=item.seconds_out / parts,
        seconds_in=item.seconds_in / parts,
        host_bytes=item.host_bytes / parts,
        seconds_exposed=item.seconds_exposed / parts,
    )


def items_of(
    residuals: Sequence[Residual],
    target: Target,
    host_budget: float,
    pin: Mapping[str, Decision | str],
) -> Items:
    """State the planning problem of a step.

    Raises:
        PlanMismatchError: A pattern of ``pin`` fits no residual, or pins to the host what cannot
            be offloaded.
        BudgetError: More is pinned to the host than ``host_budget``.
    """
    pinned = _pinned(residuals, target, pin)
    away = sum(r.bytes for r in residuals if pinned.get(r.name) is Decision.OFFLOAD)
    hidden = _hidden(residuals, target)
    room = host_budget - away
    if room < 0:
        raise BudgetError(
            f"pin= puts {format_bytes(away)} on the host, more than host_budget, "
            f"{format_bytes(host_budget)}. Pin less there, or raise host_budget."
        )
    inside = [r for r in residuals if not r.boundary]
    free = [r for r in residuals if r.boundary and r.name not in pinned]
    entering = _fitting(free, target, room)
    taken = sum(r.bytes for r in entering)
    leaving = [r for r in residuals if not r.boundary or r in entering]
    return Items(
        problem=Problem(_items(inside, target, pinned), 0.0, room, *hidden),
        deep=Problem(_deep_items(leaving, target, pinned, hidden), 0.0, room - taken, *hidden)
        if entering
        else None,
        whole=Problem(_items(residuals, target, {}), 0.0, math.inf, *hidden),
        residuals=tuple(residuals),
        pinned=pinned,
    )


def _fitting(boundaries: Sequence[Residual], target: Target, room: float) -> list[Residual]:
    """The boundaries that may leave the device, as many of the first as host memory takes."""
    movable = [r for r in boundaries if offload_refusal(r, target) is None]
    filled = itertools.accumulate(r.bytes for r in movable)
    return [r for r, total in zip(movable, filled, strict=True) if total <= room]


def _hidden(residuals: Sequence[Residual], target: Target) -> tuple[float, float]:
    """Seconds of transfer, out and in, that compute is expected to hide; compiling tells.

    A backward pass takes about twice a forward pass, which is what computing all residuals takes.
    """
    hiding = {r.region for r in residuals if offload_refusal(r, target) is None}
    forward = sum(r.seconds for r in residuals if r.region in hiding)
    return HIDING * forward, HIDING * 2 * forward


def _items(
    residuals: Sequence[Residual], target: Target, pinned: Mapping[str, Decision]
) -> tuple[Item, ...]:
    """Items for the residuals; those pinned to memory are there anyway, so they are none."""
    index: dict[str, int] = {}
    items: list[Item] = []
    for r in residuals:
        if pinned.get(r.name) not in (Decision.SAVE, Decision.OFFLOAD):
            index[r.name] = len(items)
            sources = tuple(index[s] for s in r.sources if s in index)
            items.append(_item(r, sources, target, held=r.name in pinned))
    return tuple(items)


def _deep_items(
    residuals: Sequence[Residual],
    target: Target,
    pinned: Mapping[str, Decision],
    hidden: tuple[float, float],
) -> tuple[Item, ...]:
    """Items with boundaries among them: one that is not saved costs its transfers."""
    entering = {r.name for r in residuals if r.boundary}
    items = _items(residuals, target, pinned)
    moving = sum(i.seconds_out + i.seconds_in for i in items if i.name in entering)
    exposed = max(EXPOSED, 1 - sum(hidden) / moving) if moving else 1.0

    def boundary(item: Item) -> Item:
        seconds = exposed * (item.seconds_out + item.seconds_in)
        return replace(item, seconds=seconds, seconds_out=math.inf, seconds_in=math.inf)

    return tuple(boundary(item) if item.name in entering else item for item in items)


def _given(r: Residual, free: Mapping[str, Decision]) -> Decision:
    """The decision for a residual; a boundary stays, or leaves for the host."""
    if not r.boundary:
        return free[r.name]
    return Decision.SAVE if free.get(r.name, Decision.SAVE) is Decision.SAVE else Decision.OFFLOAD


def _item(r: Residual, sources: tuple[int, ...], target: Target, *, held: bool) -> Item:
    """One residual as an item; ``held`` leaves recomputing it as the only way."""
    compiler, rates = Compiler(target.platform), target.rates
    value = Value(r.shape, r.dtype, r.bytes // max(1, r.count), r.spec)
    stored = compiler.stored_bytes(value, read_narrowly=r.read_narrowly)
    size = (stored if r.loops else compiler.bytes(value)) * r.count
    closed = held or offload_refusal(r, target) is not None
    moved = r.bytes * r.repeats
    return Item(
        name=r.name,
        bytes=_UNSAVEABLE if held else size,
        seconds=r.seconds,
        sources=sources,
        needed=r.needed,
        seconds_out=math.inf if closed else moved / rates.device_to_host,
        seconds_in=math.inf if closed else moved / rates.host_to_device,
        host_bytes=r.bytes,
        seconds_exposed=EXPOSED * moved * (1 / rates.device_to_host + 1 / rates.host_to_device),
    )


def _pinned(
    residuals: Sequence[Residual], target: Target, pin: Mapping[str, Decision | str]
) -> dict[str, Decision]:
    pinned: dict[str, Decision] = {}
    for pattern, given in pin.items():
        decision = Decision(given)
        fitting = [r for r in residuals if fnmatch.fnmatchcase(r.name, pattern)]
        if not fitting:
            raise PlanMismatchError(
                f"pin: no residual is called {pattern!r}; there are "
                f"{', '.join(r.name for r in residuals[:8])}… (print a plan to see all)"
            )
        if decision is Decision.RECOMPUTE:
            fitting = [r for r in fitting if not r.boundary]
        if not fitting:
            raise PlanMismatchError(
                f"pin: {pattern!r} fits only what enters a region, which jax.checkpoint keeps: "
                "save or offload it, or mark a larger unit with jdelta.remat"
            )
        for r in fitting:
            refusal = offload_refusal(r, target) if decision is Decision.OFFLOAD else None
            if refusal:
                raise PlanMismatchError(f"pin: {r.name!r} cannot be offloaded: {refusal}")
            pinned[r.name] = decision
    return pinned
