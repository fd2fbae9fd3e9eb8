"""When transfers to and from the host happen: the part of a plan that a policy cannot say.

A ``jax.checkpoint`` policy says what is offloaded; XLA then starts copies to the host as late, and
fetches as early, as it likes, and may hold more memory than without offload. Here the staged step
is evaluated once more, and is the same program but for its timing:

- A copy to the host shares a barrier with a later value of the forward pass, up to some units on,
  so it runs beside the compute between them, and the buffer is free after it. It starts behind
  another barrier if the link is busy till then.
- A fetch shares a barrier with the results of the backward unit some distance ahead of its use,
  so it runs beside that compute, and no earlier. The first unit's fetches run beside the head: what
  the step computes between its forward and its backward units.
- TPUs undo what such barriers say, so copies go to slots of host arrays there, and a fetch reads
  at an index computed from those results: see ``host_slots.py``.
- The results of a backward unit share one barrier, so that gradients of weights are not put off
  while what they are made from stays in memory: see ``weight_gradients.py``, and for those of loops
  ``weight_gradients_in_loops.py``.
- Loops do both one iteration apart: see ``transfers_in_loops.py``. Loops around forward and
  backward pass (micro-batches) are timed inside.

Which compiler needs which of these was measured: ``benchmarks/compilers/transfers.py``.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdelta._src import _jax
from jdelta._src._jax import Env, Eqn, Jaxpr, Var, transfers
from jdelta._src._jax.transfers import is_host
from jdelta._src.passes.host_slots import IN_TURN, Stacks
from jdelta._src.passes.program import Context, Program
from jdelta._src.passes.transfers_in_loops import (
    Clock,
    Late,
    backward_loop,
    forward_loop,
    hides_next,
    is_heavy,
    late_stacks,
)
from jdelta._src.passes.weight_gradients import Gradients, has_regions, start, tie, without_growth
from jdelta._src.passes.weight_gradients_in_loops import with_gradients_in_place
from jdelta._src.program.primitives import MATMULS
from jdelta._src.program.scan import Scan

IN_FLIGHT = 2
"""Copies to the host that XLA has under way at a time."""

SLOT_SECONDS = 0.45e-3
"""Seconds on the link of a copy that is short enough to hide behind an instruction of its own."""

HEAD = -1
"""Number of the head among the backward units: it comes before the first."""

MOST_AHEAD = 3
"""Units that a transfer may be ahead of its use, or lag behind its producer."""


def timed(program: Program, context: Context) -> Program:
    """The program with its transfers timed, if its compiler would choose the wrong time."""
    if not _is_timed(program.jaxpr, context):
        return program
    return program.evaluated(_timed(program.flat, context))


def _is_timed(jaxpr: Jaxpr, context: Context) -> bool:
    """Whether a compiler would choose the wrong time for what a program does."""
    habits = context.backend.transfers
    return habits.are_timed if context.offloads else habits.are_tied and has_regions(jaxpr)


def _timed(flat: Jaxpr, context: Context) -> Callable[..., list[Any]]:
    """What computes the results of a program with its transfers timed."""
    program = transfers.copied_once(flat)
    shardings = context.shardings(program)
    if context.backend.transfers.are_tied:
        in_place = with_gradients_in_place(program, context.backend, shardings)
        if in_place is not program:  # only a changed program is worth the partitioner's time again
            program, shardings = in_place, context.shardings(in_place)
    timing = _Timing(program, Clock(context.rates, context.backend, shardings), context.least)

    def run(*args: Any) -> list[Any]:
        return _Evaluation(timing, context).run(args)

    return run


@dataclass
class _Timing:
    """Where barriers and fetches go in a flat program.

    Attributes:
        program: The program, calls inlined; backward units are ``remat`` equations.
        clock: Prices what can hide a transfer.
        least: Whether nothing is fetched ahead of its use.
        eqns: The program's equations.
        units: Indices of the backward units, in program order.
        needs: Host values that each backward unit is the first to fetch.
        offloads: Whether anything goes to the host for a unit.
        elapsed: Seconds of compute before each equation up to the first backward unit.
        head: Where in the head the first backward unit's values are fetched: the index of an
            equation, and its result that they wait for.
        fetches: From a backward unit (its number) to the host values to fetch when the one before
            it ends; `HEAD` stands for the head.
        own: From a backward unit to the host values that are made after the unit before it, by a
            second forward pass: it fetches them itself.
        written: When the last copy to the host can be done, in seconds of compute.
        is_bound: Whether the copies to the host take longer than the compute that could hide them.
        in_turn: Whether fetches outside of loops wait for each other.
        ties: From an index to a result of that equation and the host values to tie to it.
        starts: From an index to a result of that equation and the copies (by index) to start after.
        late: Host stacks that may be written late, since only one loop fetches them, in reverse.
        stacked: Host values that get slots of host arrays, by backward unit.
        gradients: Which gradients are there with what comes next.
    """

    program: Jaxpr
    clock: Clock
    least: bool
    eqns: list[Eqn] = field(init=False)
    units: list[int] = field(init=False)
    needs: list[list[Var]] = field(init=False)
    offloads: bool = field(init=False)
    elapsed: list[float] = field(init=False, default_factory=list)
    head: tuple[int, Var] | None = field(init=False, default=None)
    fetches: dict[int, list[Var]] = field(init=False, default_factory=dict)
    own: dict[int, list[Var]] = field(init=False, default_factory=dict)
    written: float = field(init=False, default=0.0)
    is_bound: bool = field(init=False, default=False)
    in_turn: bool = field(init=False, default=False)
    ties: dict[int, tuple[Var, list[Var]]] = field(init=False, default_factory=dict)
    starts: dict[int, tuple[Var, list[int]]] = field(init=False, default_factory=dict)
    late: frozenset[Var] = field(init=False)
    stacked: list[list[Var]] = field(init=False)
    gradients: Gradients = field(init=False)

    def __post_init__(self) -> None:
        self.eqns = list(_jax.open_jaxpr(self.program).eqns)
        self.units = [i for i, eqn in enumerate(self.eqns) if _jax.is_shielded(eqn)]
        self.needs = self._needs()
        self.offloads = any(self.needs) or any(map(transfers.crosses_to_host, self.eqns))
        if self.offloads:  # else there is nothing to time, and pricing takes long
            self.elapsed = self._elapsed()
            self._time_copies()
            self.head = self._head() if self.tied and not self.least else None
            self.fetches, self.own = self._fetches()
        self.late = late_stacks(self.program, self._writes_late)
        self.stacked = [] if self.tied else self._stacked()
        ways = {"loops": self.tied, "vectors": self.offloads}
        self.gradients = Gradients.of(self.program, self.units, **ways)

    @property
    def tied(self) -> bool:
        """Whether barriers time the copies of this platform."""
        return self.clock.habits.are_tied

    def _fetches(self) -> tuple[dict[int, list[Var]], dict[int, list[Var]]]:
        """Issue each fetch as many units ahead as it takes to hide it, once its value is made."""
        into = [self._bytes(hosts) / self.clock.rates.host_to_device for hosts in self.needs]
        units = [_jax.single(self.eqns[index]) for index in self.units]
        compute = [self.clock.seconds(unit) for unit in units]
        bound_by_link = sum(into) >= sum(compute)
        distance = 0 if self.least else 1 if bound_by_link else MOST_AHEAD
        self.in_turn = self.least or sum(into) >= IN_TURN * sum(compute)
        issued: dict[int, list[Var]] = defaultdict(list)
        own: dict[int, list[Var]] = defaultdict(list)
        made = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        for number, hosts in enumerate(self.needs):
            start, hidden = number, 0.0
            while start > max(0, number - distance) and hidden < into[number]:
                start -= 1
                hidden += compute[start]
            for v in hosts:
                first = bisect.bisect(self.units, made.get(v, -1))  # the first unit after it
                earliest = first + 1 if first else 0
                if number < earliest:
                    own[number].append(v)
                else:
                    head = number == 0 and self.head
                    issued[HEAD if head else max(start, earliest)].append(v)
        return issued, own

    def _head(self) -> tuple[int, Var] | None:
        """Where in the head the first fetch starts: an operand of a product, in memory anyway.

        It is the last from which on the head hides the fetch, else the first; in any case one by
        which all copies to the host can be done.
        """
        if not self.units or not self.needs[0]:
            return None
        first = self.units[0]
        products = filter(_is_product, self.eqns[:first])
        stops = self._path({v for e in products for v in e.invars if _jax.is_var(v)})
        left = {i: self.elapsed[first] - self.elapsed[i + 1] for i in stops}
        ended = [i for i in stops if self.elapsed[i + 1] >= self.written]
        seconds = self._bytes(self.needs[0]) / self.clock.rates.host_to_device
        hiding = [i for i in ended if left[i] >= seconds]
        index = max(hiding, default=min(ended, default=None))
        return None if index is None else (index, stops[index])

    def _needs(self) -> list[list[Var]]:
        """Host values of each backward unit that no unit before it has fetched.

        A unit's output is the next one's input, and still there when its own unit needs it.
        """
        needs = [_host_inputs(self.eqns[index]) for index in self.units]
        return [
            [v for v in hosts if v not in before]
            for before, hosts in itertools.pairwise([[], *needs])
        ]

    def _elapsed(self) -> list[float]:
        """Compute before each equation.

        What depends on no product has no place of its own in XLA:GPU's schedule: it makes the masks
        of all dropouts at once. On TPUs they are where the program has them.
        """
        if not self.units:
            return []
        forward = self.eqns[: self.units[0]]
        made = {v for eqn in forward for v in eqn.outvars}
        ended = [
            v
            for index in self.units
            for v in self.eqns[index].invars
            if _jax.is_var(v) and v in made
        ]
        program = _jax.rebuild(self.program, forward, ended)
        each = self.clock.each(program)
        if self.tied:
            heavy = {v for eqn in forward if is_heavy(eqn) for v in eqn.outvars}
            after = set(_jax.dependents(forward, heavy))
            placed = (i in after or is_heavy(eqn) for i, eqn in enumerate(forward))
            each = [s if has_place else 0.0 for s, has_place in zip(each, placed, strict=True)]
        return list(itertools.accumulate(each, initial=0.0))

    def _time_copies(self) -> None:
        """Tie each copy to the host to the first later value by which it can be done.

        XLA has few copies in flight: one more would end another as soon as it starts. So it does
        not start before an earlier one has ended, unless a backward loop before the first unit
        reads what it copies.
        """
        if not self.units:
            return
        forward, clock = self.eqns[: self.units[0]], self.elapsed
        out = [self._seconds_out(eqn) for eqn in forward]
        unit = clock[-1] / len(self.units)
        self.is_bound = sum(out) >= clock[-1]
        longest = unit * (1 if self.is_bound else MOST_AHEAD)
        stops, slack = self._stops(), self.clock.habits.slack
        ends = [-1] * IN_FLIGHT
        read = {
            v: i
            for i, eqn in reversed(list(enumerate(forward)))
            for v in filter(is_host, eqn.invars)
        }
        for index, eqn in enumerate(forward):
            if not transfers.crosses_to_host(eqn):
                continue
            until = read.get(eqn.outvars[0], len(forward))
            begin = max(index, ends[-IN_FLIGHT] + 1) if self.tied else index
            begin = begin if begin <= until else index
            if begin > index:
                stop = begin - 1
                self.starts.setdefault(stop, (stops[stop], []))[1].append(index)
            free = max(self.written, clock[begin])
            given = free + slack * out[index]
            self.written = free + out[index] if self.tied else given
            goal = min(given, clock[index] + longest)
            stopped = (s for s in self._after(index, stops) if begin <= s < until)
            late = (s for s in stopped if clock[s + 1] >= goal)
            end = next(late, None)  # without any, the barrier before the first backward unit
            ends.append(ends[-1] if end is None else end)
            if end is not None:
                self.ties.setdefault(end, (stops[end], []))[1].append(eqn.outvars[0])

    def _seconds_out(self, eqn: Eqn) -> float:
        """Seconds that an equation keeps the link to the host busy."""
        rate = self.clock.rates.device_to_host
        return self._bytes(eqn.outvars) / rate if transfers.crosses_to_host(eqn) else 0.0

    def _bytes(self, values: Sequence[Var]) -> float:
        return float(sum(map(self.clock.bytes, values)))

    def _stacked(self) -> list[list[Var]]:
        """What one copy makes and only units fetch, once for each of them.

        With explicit axes slices of a stack would each need a sharding of their own: none is made.
        """
        made = {e.outvars[0] for e in self.eqns if transfers.crosses_to_host(e)}
        made = {v for v in made if not _jax.has_explicit_axes(v.aval)}
        for eqn in self.eqns:
            fetched = _host_inputs(eqn) if _jax.is_shielded(eqn) else ()
            made.difference_update(v for v in eqn.invars if _jax.is_var(v) and v not in fetched)
        made.difference_update(filter(_jax.is_var, _jax.open_jaxpr(self.program).outvars))
        return [[v for v in hosts if v in made] for hosts in self.needs]

    def _writes_late(self, loop: Eqn) -> bool:
        """Whether a forward loop copies to the host what it made an iteration before."""
        if self.least:
            return False
        return self.tied or hides_next(loop, self.clock, self.clock.habits.slack)

    def _stops(self) -> dict[int, Var]:
        """Values of the forward pass that are in memory anyway, and that its end depends on."""
        forward = self.eqns[: self.units[0]]
        products = filter(_is_product, forward) if self.tied else ()
        kept = {
            v
            for eqn in (*(self.eqns[i] for i in self.units), *products)
            for v in eqn.invars
            if _jax.is_var(v) and not _jax.on_host(v.aval)
        }
        kept.update(e.invars[0] for e in forward if transfers.crosses_to_host(e))
        return self._path(kept)

    def _path(self, among: set[Var]) -> dict[int, Var]:
        """Those values that the first backward unit depends on, by the equations that make them."""
        first = self.units[0]
        needed = {v for v in self.eqns[first].invars if _jax.is_var(v)}
        found: dict[int, Var] = {}
        for index in reversed(range(first)):
            outs = [v for v in self.eqns[index].outvars if v in needed]
            if outs:
                needed.update(v for v in self.eqns[index].invars if _jax.is_var(v))
            found.update((index, v) for v in outs if v in among)
        return dict(sorted(found.items()))

    def _after(self, index: int, stops: Mapping[int, Var]) -> Iterator[int]:
        """The stops that are computed from what equation ``index`` copies."""
        begin, end = index + 1, max(stops, default=0) + 1
        for later in _jax.dependents(self.eqns[begin:end], self.eqns[index].invars):
            if begin + later in stops:
                yield begin + later


def _host_inputs(eqn: Eqn) -> list[Var]:
    """Host values that a backward unit fetches itself, so that they can be fetched for it."""
    _, fetched = transfers.with_fetched_inputs(_jax.subjaxpr(eqn))
    return [v for v, is_fetched in zip(eqn.invars, fetched, strict=True) if is_fetched]


class _Evaluation:
    """One evaluation of a flat program under its timing."""

    def __init__(self, timing: _Timing, context: Context):
        self.timing = timing
        self.context = context
        self.numbers = {index: number for number, index in enumerate(timing.units)}
        self.delayed = {copy for _, copies in timing.starts.values() for copy in copies}
        self.device: dict[Var, Any] = {}
        self.late: dict[Var, Late] = {}
        clock = timing.clock
        slot = math.inf if timing.is_bound else SLOT_SECONDS * clock.rates.device_to_host
        specs = clock.shardings.specs
        self.stacks = Stacks(timing.stacked, specs, slot=slot, in_turn=timing.in_turn)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The results of the program."""
        return _jax.interpret(self.timing.program, args, self._run)

    def _run(self, index: int, eqn: Eqn, env: Env) -> None:
        """Evaluate one equation, and end and start what is due then."""
        results = self._results(index, eqn, env)
        if results is None:
            _jax.run(eqn, env)
        else:
            _jax.write(env, eqn, results)
        self._passed(index, env)

    def _results(self, index: int, eqn: Eqn, env: Env) -> Sequence[Any] | None:
        """The results of what is evaluated in another way; None for all else."""
        if index in self.numbers:
            return self._unit(eqn, self.numbers[index], env)
        if index in self.delayed:
            return [None]
        if transfers.crosses_to_host(eqn) and eqn.outvars[0] in self.stacks.slots:
            return self._write(eqn, env)
        if eqn.primitive.name != "scan":
            return None
        if any(map(is_host, eqn.outvars)):
            return self._forward_loop(eqn, env)
        if any(map(is_host, eqn.invars)):
            # What is fetched an iteration ahead takes one more buffer.
            return None if self.timing.least else self._backward_loop(eqn, env)
        return self._outer_loop(eqn, env)

    def _passed(self, index: int, env: Env) -> None:
        """What ends and what starts when an equation is done."""
        timing = self.timing
        if index in timing.ties:
            self._end(*timing.ties[index], env)
        value, copies = timing.starts.get(index, (None, ()))
        for eqn in (timing.eqns[i] for i in copies):
            source = eqn.invars[0]
            env[value], away = lax.optimization_barrier((env[value], env[source]))
            env[eqn.outvars[0]] = jax.device_put(away, jax.memory.Space.Host)
        if timing.head and timing.head[0] == index:
            self._fetch(HEAD, [timing.head[1]], env)
        if early := timing.gradients.early.get(index + 1):
            tie(early, env)
            for v, growth in timing.gradients.grown[index + 1].items():
                env[v] = growth(env[growth.of])

    def _forward_loop(self, eqn: Eqn, env: Env) -> list[Any]:
        values, late = forward_loop(
            eqn, _jax.read(env, eqn.invars), self.timing.late, self.timing.clock
        )
        self.late |= late
        return values

    def _backward_loop(self, eqn: Eqn, env: Env) -> list[Any]:
        return backward_loop(eqn, _jax.read(env, eqn.invars), self.late, self.timing.clock)

    def _outer_loop(self, eqn: Eqn, env: Env) -> list[Any] | None:
        """A loop with forward and backward pass in it: each iteration is timed by itself."""
        offloads = transfers.has_transfers(eqn.params["jaxpr"])
        context = replace(self.context, arguments=(), offloads=offloads)
        if not offloads and (_jax.is_backward(eqn) or not _is_timed(eqn.params["jaxpr"], context)):
            return None
        loop = Scan.of(eqn, _jax.read(env, eqn.invars))
        body = _timed(loop.body, context)

        def step(carry: Any, rows: Any) -> Any:
            outputs = body(*loop.consts, *carry, *rows)
            return outputs[: loop.n_carry], outputs[loop.n_carry :]

        carry, stacked = loop.scan(step, loop.carry, loop.xs)
        return [*carry, *stacked]

    def _unit(self, eqn: Eqn, number: int, env: Env) -> list[Any]:
        """A backward unit: fetches for later ones begin with it, its results end together."""
        if number == 0:
            index = self.timing.units[0]
            self._fetch(0, self.timing.gradients.early.get(index) or start(eqn), env)
        if number in self.timing.own:
            self._bring(self.timing.own[number], start(eqn), env)
        body, _ = transfers.with_fetched_inputs(_jax.subjaxpr(eqn))
        inputs = [
            self.device[v] if is_host(v) and v in self.device else x
            for v, x in zip(eqn.invars, _jax.read(env, eqn.invars), strict=True)
        ]
        body, grown = without_growth(body)
        inputs = [
            self.stacks.whole(v, x) if is_host(v) and v in self.stacks.slots else x
            for v, x in zip(eqn.invars, lax.optimization_barrier(inputs), strict=True)
        ]
        results = _jax.evaluate(body, *inputs)
        env.update(zip(eqn.outvars, results, strict=True))
        self._fetch(number + 1, self.timing.gradients.results[number], env)
        ended = zip(_jax.read(env, eqn.outvars), grown, strict=True)
        return [growth(value) if growth else value for value, growth in ended]

    def _fetch(self, number: int, after: Sequence[Var], env: Env) -> None:
        """Fetch what is due before a backward unit, ``after`` these values are there."""
        self._bring(self.timing.fetches.get(number, ()), after, env)

    def _bring(self, hosts: Sequence[Var], after: Sequence[Var], env: Env) -> None:
        """Fetch host values, ``after`` these values are there."""
        if after:
            tie((*after, *(hosts if self.timing.tied else ())), env)
        if self.stacks.slots and hosts:
            real = (v for v in after if jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.size)
            self.stacks.wait(env[v] for v in real)
        for v in hosts:
            if v in self.stacks.slots:
                self.device[v] = self.stacks.read(v)
            else:
                self.device[v] = jax.device_put(env[v], jax.memory.Space.Device)

    def _end(self, value: Var, hosts: Sequence[Var], env: Env) -> None:
        """End copies to the host by the time that a value is there."""
        stacked = [v for v in hosts if v in self.stacks.slots]
        if stacked:
            env[value] = self.stacks.tie(stacked, env[value])
        copied = [v for v in hosts if v not in self.stacks.slots]
        if copied:
            tie((value, *copied), env)

    def _write(self, eqn: Eqn, env: Env) -> list[Any]:
        """A copy to the host goes to its slot; nothing but a fetch reads it."""
        self.stacks.write(eqn.outvars[0], *_jax.read(env, eqn.invars))
        return [None]


def _is_product(eqn: Eqn) -> bool:
    return eqn.primitive.name in MATMULS
