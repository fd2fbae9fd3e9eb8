"""When transfers of a program happen: read in it, as variables and places.

What ``transfer_timing.py`` times is priced here; what its places stand for are values of the
program that are in memory anyway, and that its end depends on.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var, transfers
from jdelta._src._jax.transfers import is_host
from jdelta._src.passes.transfer_timing import (
    Copy,
    TimedCopies,
    TimedFetches,
    place_in_head,
    time_copies,
    time_fetches,
)
from jdelta._src.passes.transfers_in_loops import Clock, hides_next, is_heavy, late_stacks
from jdelta._src.passes.weight_gradients import Gradients
from jdelta._src.program.primitives import MATMULS

SLOT_SECONDS = 0.45e-3
"""Seconds on the link of a copy that is short enough to hide behind an instruction of its own."""

HEAD = -1
"""Number of the head among the backward regions: it comes before the first."""


@dataclass(frozen=True)
class Timing:
    """When the transfers of a flat program happen.

    Attributes:
        program: The program, calls inlined; backward regions are ``remat`` equations.
        regions: Indices of the backward regions, in program order.
        ends: From an index to a result of that equation and the host values that are there by then.
        starts: From an index to a result of that equation and the copies (by index) to start after.
        head: Where in the head the first backward region's values are fetched: the index of an
            equation, and its result that they wait for.
        fetches: From a backward region (its number) to the host values to fetch when the one before
            it ends; `HEAD` stands for the head.
        own: From a backward region to the host values that are made after the region before it, by
            a second forward pass: it fetches them itself.
        late_stacks: Host stacks that may be written late: only one loop fetches them, in reverse.
        slots: Host values that get slots of host arrays, by backward region.
        slot_bytes: Bytes per device that a slot had better not exceed.
        in_turn: Whether fetches outside of loops wait for each other.
        gradients: Which gradients are there with what comes next.
    """

    program: Jaxpr
    regions: Sequence[int]
    ends: Mapping[int, tuple[Var, list[Var]]]
    starts: Mapping[int, tuple[Var, list[int]]]
    head: tuple[int, Var] | None
    fetches: Mapping[int, Sequence[Var]]
    own: Mapping[int, Sequence[Var]]
    late_stacks: frozenset[Var]
    slots: Sequence[Sequence[Var]]
    slot_bytes: float
    in_turn: bool
    gradients: Gradients


def timing_of(program: Jaxpr, clock: Clock, *, least: bool) -> Timing:
    """When the transfers of a flat program should happen.

    Args:
        program: The program, calls inlined.
        clock: Prices what can hide a transfer.
        least: Whether the least memory matters more than hiding transfers.
    """
    reading = Reading(program, clock, least)
    eqns, regions = reading.eqns, reading.regions
    offloads = any(reading.needs) or any(map(transfers.crosses_to_host, eqns))
    elapsed: Sequence[float] = ()
    stops: Mapping[int, Var] = {}
    copies, fetches, head = TimedCopies(), TimedFetches(), None
    if offloads:  # else there is nothing to time, and pricing takes long
        if regions:
            elapsed, stops = reading.elapsed(), reading.stops()
            copies = time_copies(reading.copies(stops), elapsed, len(regions), clock.habits)
        head = reading.head(elapsed, copies.done_seconds)
        fetches = time_fetches(*reading.seconds_of_regions(), least=least)
    issued, own = reading.fetches(fetches.starts, has_head=head is not None)
    ends: dict[int, tuple[Var, list[Var]]] = {}
    starts: dict[int, tuple[Var, list[int]]] = {}
    for copy in copies.copies:
        if copy.start is not None:
            starts.setdefault(copy.start, (stops[copy.start], []))[1].append(copy.place)
        if copy.end is not None:
            copied = eqns[copy.place].outvars[0]
            ends.setdefault(copy.end, (stops[copy.end], []))[1].append(copied)
    slot_bytes = math.inf if copies.are_bound else SLOT_SECONDS * clock.rates.device_to_host
    return Timing(
        program=program,
        regions=regions,
        ends=ends,
        starts=starts,
        head=head,
        fetches=issued,
        own=own,
        late_stacks=late_stacks(program, reading.writes_late),
        slots=[] if reading.are_tied else reading.slots(),
        slot_bytes=slot_bytes,
        in_turn=fetches.are_in_turn,
        gradients=Gradients.of(program, regions, loops=reading.are_tied),
    )


class Reading:
    """What is read of a flat program to time its transfers.

    Args:
        program: The program.
        clock: Prices what can hide a transfer.
        least: Whether nothing is fetched ahead of its use.

    Attributes:
        eqns: The program's equations.
        regions: Indices of the backward regions, in program order.
        needs: Host values of each backward region that the region before it has not fetched: a
            region's output is the next one's input, and still there when its own region needs it.
    """

    def __init__(self, program: Jaxpr, clock: Clock, least: bool):
        self.program, self.clock, self.least = program, clock, least
        self.eqns: list[Eqn] = list(_jax.open_jaxpr(program).eqns)
        self.regions = [i for i, eqn in enumerate(self.eqns) if _jax.is_shielded(eqn)]
        inputs = [_host_inputs(self.eqns[index]) for index in self.regions]
        self.needs = [
            [v for v in hosts if v not in before]
            for before, hosts in itertools.pairwise([[], *inputs])
        ]

    @property
    def are_tied(self) -> bool:
        """Whether barriers time the copies of this compiler."""
        return self.clock.habits.are_tied

    def seconds_of_regions(self) -> tuple[list[float], list[float]]:
        """For each backward region the seconds that its fetches and its compute take."""
        link = [self._bytes(hosts) / self.clock.rates.host_to_device for hosts in self.needs]
        regions = [_jax.single(self.eqns[index]) for index in self.regions]
        return link, [self.clock.seconds(region) for region in regions]

    def fetches(
        self, starts: Sequence[int], *, has_head: bool
    ) -> tuple[Mapping[int, list[Var]], Mapping[int, list[Var]]]:
        """What is fetched when a region starts: for it and later ones, and what it makes itself.

        Args:
            starts: For each region the one that its fetches should start with.
            has_head: Whether those of the first region start in the head.
        """
        issued: dict[int, list[Var]] = defaultdict(list)
        own: dict[int, list[Var]] = defaultdict(list)
        makers = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        for number, (hosts, start) in enumerate(zip(self.needs, starts, strict=False)):
            for v in hosts:
                first = bisect.bisect(self.regions, makers.get(v, -1))  # the first region after it
                earliest = first + 1 if first else 0
                if number < earliest:
                    own[number].append(v)
                else:
                    in_head = number == 0 and has_head
                    issued[HEAD if in_head else max(start, earliest)].append(v)
        return issued, own

    def head(self, elapsed: Sequence[float], done_seconds: float) -> tuple[int, Var] | None:
        """Where in the head the first fetch starts: an operand of a product, in memory anyway.

        Args:
            elapsed: Seconds of compute before each equation up to the first backward region.
            done_seconds: Seconds of compute after which all copies to the host can be done.
        """
        if self.least or not self.are_tied or not self.regions or not self.needs[0]:
            return None
        products = filter(_is_product, self.eqns[: self.regions[0]])
        stops = self._path({v for e in products for v in e.invars if _jax.is_var(v)})
        seconds = self._bytes(self.needs[0]) / self.clock.rates.host_to_device
        place = place_in_head(list(stops), elapsed, done_seconds, seconds)
        return None if place is None else (place, stops[place])

    def elapsed(self) -> list[float]:
        """Seconds of compute before each equation up to the first backward region.

        What depends on no product has no place of its own in XLA:GPU's schedule: it makes the masks
        of all dropouts at once. On TPUs they are where the program has them.
        """
        forward = self.eqns[: self.regions[0]]
        results = {v for eqn in forward for v in eqn.outvars}
        ended = [
            v
            for index in self.regions
            for v in self.eqns[index].invars
            if _jax.is_var(v) and v in results
        ]
        program = _jax.rebuild(self.program, forward, ended)
        each = self.clock.each(program)
        if self.are_tied:
            heavy = {v for eqn in forward if is_heavy(eqn) for v in eqn.outvars}
            after = set(_jax.dependents(forward, heavy))
            placed = (i in after or is_heavy(eqn) for i, eqn in enumerate(forward))
            each = [s if has_place else 0.0 for s, has_place in zip(each, placed, strict=True)]
        return list(itertools.accumulate(each, initial=0.0))

    def copies(self, stops: Mapping[int, Var]) -> list[Copy]:
        """The copies to the host before the first backward region."""
        forward = self.eqns[: self.regions[0]]
        read = {
            v: i
            for i, eqn in reversed(list(enumerate(forward)))
            for v in filter(is_host, eqn.invars)
        }
        rate = self.clock.rates.device_to_host
        return [
            Copy(
                index,
                self._bytes(eqn.outvars) / rate,
                read.get(eqn.outvars[0], len(forward)),
                self._after(index, stops),
            )
            for index, eqn in enumerate(forward)
            if transfers.crosses_to_host(eqn)
        ]

    def stops(self) -> dict[int, Var]:
        """Values of the forward pass that are in memory anyway, and that its end depends on."""
        forward = self.eqns[: self.regions[0]]
        products = filter(_is_product, forward) if self.are_tied else ()
        kept = {
            v
            for eqn in (*(self.eqns[i] for i in self.regions), *products)
            for v in eqn.invars
            if _jax.is_var(v) and not _jax.on_host(v.aval)
        }
        kept.update(e.invars[0] for e in forward if transfers.crosses_to_host(e))
        return self._path(kept)

    def slots(self) -> list[list[Var]]:
        """What one copy makes and only regions fetch, once for each of them.

        With explicit axes slices of a stack would each need a sharding of their own: none is made.
        """
        candidates = {e.outvars[0] for e in self.eqns if transfers.crosses_to_host(e)}
        candidates = {v for v in candidates if not _jax.has_explicit_axes(v.aval)}
        for eqn in self.eqns:
            fetched = _host_inputs(eqn) if _jax.is_shielded(eqn) else ()
            candidates.difference_update(
                v for v in eqn.invars if _jax.is_var(v) and v not in fetched
            )
        candidates.difference_update(filter(_jax.is_var, _jax.open_jaxpr(self.program).outvars))
        return [[v for v in hosts if v in candidates] for hosts in self.needs]

    def writes_late(self, loop: Eqn) -> bool:
        """Whether a forward loop copies to the host what it made an iteration before."""
        if self.least:
            return False
        return self.are_tied or hides_next(loop, self.clock, self.clock.habits.slack)

    def _path(self, among: set[Var]) -> dict[int, Var]:
        """Those values that the first backward region depends on, by equations that make them."""
        first = self.regions[0]
        needed = {v for v in self.eqns[first].invars if _jax.is_var(v)}
        stops: dict[int, Var] = {}
        for index in reversed(range(first)):
            outs = [v for v in self.eqns[index].outvars if v in needed]
            if outs:
                needed.update(v for v in self.eqns[index].invars if _jax.is_var(v))
            stops.update((index, v) for v in outs if v in among)
        return dict(sorted(stops.items()))

    def _bytes(self, values: Sequence[Var]) -> float:
        return float(sum(map(self.clock.bytes, values)))

    def _after(self, index: int, stops: Mapping[int, Var]) -> Iterator[int]:
        """The stops that are computed from what equation ``index`` copies."""
        begin, end = index + 1, max(stops, default=0) + 1
        for later in _jax.dependents(self.eqns[begin:end], self.eqns[index].invars):
            if begin + later in stops:
                yield begin + later


def _host_inputs(eqn: Eqn) -> list[Var]:
    """Host values that a backward region fetches itself, so that they can be fetched for it."""
    _, fetched = transfers.with_fetched_inputs(_jax.subjaxpr(eqn))
    return [v for v, is_fetched in zip(eqn.invars, fetched, strict=True) if is_fetched]


def _is_product(eqn: Eqn) -> bool:
    return eqn.primitive.name in MATMULS
