"""When transfers to and from the host happen: the part of a plan that a policy cannot say.

A ``jax.checkpoint`` policy says what is offloaded; XLA then starts copies to the host as late, and
fetches as early, as it likes, and may hold more memory than without offload. Here the staged step
is evaluated once more, and is the same program but for its timing:

- A copy to the host shares a barrier with a value of the forward pass that comes one or more units
  later, so it runs beside the compute between them, and the buffer is free after it.
- A fetch shares a barrier with the results of the backward unit some distance ahead of its use,
  so it runs beside that compute, and no earlier.
- The results of a backward unit share one barrier, so that gradients of weights are not put off
  while what they are made from stays in memory.
- A backward loop carries what the next iteration fetches from the host.

Which compiler needs which of these was measured: ``benchmarks/xla/transfers.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from jdelta import _jax
from jdelta._chips import Rates
from jdelta._cost import program_seconds
from jdelta._graph import graph_of
from jdelta._jax import Eqn, Jaxpr, Var
from jdelta._primitives import MATMULS

TIMED = frozenset({"cuda"})
"""Platforms whose compiler needs transfers timed: the TPU's undoes offload behind barriers."""

MOST_AHEAD = 3
"""Units that a transfer may be ahead of its use, or lag behind its producer."""


def timed(closed: Jaxpr, rates: Rates, platform: str) -> Callable[..., list[Any]]:
    """The program of a staged step with its transfers timed.

    Args:
        closed: The step under a policy, staged.
        rates: Rates of the target: they say how far ahead of its use a fetch has to start.
        platform: Platform of the target.

    Returns:
        A function of the flat arguments of ``closed`` to its flat results.
    """
    program = _jax.inline(closed)
    timing = _Timing(program, rates, platform)

    def run(*args: Any) -> list[Any]:
        return _Evaluation(timing).run(args)

    return run


@dataclass
class _Timing:
    """Where barriers and fetches go in a flat program.

    Attributes:
        program: The program, calls inlined; backward units are ``remat`` equations.
        units: Indices of the backward units, in program order.
        fetches: From a backward unit (its number) to the host values to fetch when it begins.
        ties: From an index to the host values to tie to a result of that equation, with the result.
    """

    program: Jaxpr
    rates: Rates
    platform: str
    units: list[int] = field(init=False)
    fetches: dict[int, list[Var]] = field(init=False)
    ties: dict[int, tuple[Var, list[Var]]] = field(init=False)

    def __post_init__(self) -> None:
        self.eqns: list[Eqn] = list(_jax.open_jaxpr(self.program).eqns)
        self.units = [i for i, eqn in enumerate(self.eqns) if _jax.is_shielded(eqn)]
        self.fetches = self._fetches()
        self.ties = self._ties()

    def _seconds(self, index: int) -> float:
        """Compute that can hide a transfer: whole units and loops, and matrix products."""
        eqn = self.eqns[index]
        if eqn.primitive.name not in MATMULS and not any(True for _ in _jax.subjaxprs(eqn)):
            return 0.0
        return program_seconds(graph_of(_jax.single(eqn)), self.rates, self.platform)

    def _fetches(self) -> dict[int, list[Var]]:
        """Issue each fetch as many units ahead as it takes to hide it."""
        needs = [_host_inputs(self.eqns[index]) for index in self.units]
        into = [_bytes(hosts) / self.rates.host_to_device for hosts in needs]
        compute = [self._seconds(index) for index in self.units]
        distance = 1 if sum(into) >= sum(compute) else MOST_AHEAD
        issued: dict[int, list[Var]] = defaultdict(list)
        for number, hosts in enumerate(needs):
            start, hidden = number, 0.0
            while start > max(0, number - distance) and hidden < into[number]:
                start -= 1
                hidden += compute[start]
            issued[start] += hosts
        return issued

    def _ties(self) -> dict[int, tuple[Var, list[Var]]]:
        """Tie each copy to the host to the first later value by which it can be done."""
        if not self.units:
            return {}
        first = self.units[0]
        forward = range(first)
        clock = [0.0]
        for index in forward:
            clock.append(clock[-1] + self._seconds(index))
        stops = self._stops(first)
        ties: dict[int, tuple[Var, list[Var]]] = {}
        link = 0.0
        for index in forward:
            if not _jax.crosses_to_host(self.eqns[index]):
                continue
            (host,) = self.eqns[index].outvars
            link = max(link, clock[index]) + _bytes([host]) / self.rates.device_to_host
            after = self._after(index, stops)
            if not after:
                continue  # the barrier before the first backward unit ends it
            done = [stop for stop in after if clock[stop + 1] >= link]
            stop = done[0] if done else after[-1]
            ties.setdefault(stop, (stops[stop], []))[1].append(host)
        return ties

    def _stops(self, first: int) -> dict[int, Var]:
        """Values of the forward pass that are in memory anyway, and that its end depends on."""
        kept = {
            v
            for index in self.units
            for v in self.eqns[index].invars
            if _jax.is_var(v) and not _jax.on_host(v.aval)
        }
        needed = {v for v in self.eqns[first].invars if _jax.is_var(v)}
        stops: dict[int, Var] = {}
        for index in reversed(range(first)):
            outs = [v for v in self.eqns[index].outvars if v in needed]
            if outs:
                needed.update(v for v in self.eqns[index].invars if _jax.is_var(v))
            stops.update((index, v) for v in outs if v in kept)
        return dict(sorted(stops.items()))

    def _after(self, index: int, stops: Mapping[int, Var]) -> list[int]:
        """The next stops that are computed from what equation ``index`` copies."""
        reached = set(self.eqns[index].invars)
        after: list[int] = []
        for later in range(index + 1, max(stops, default=0) + 1):
            eqn = self.eqns[later]
            if any(_jax.is_var(v) and v in reached for v in eqn.invars):
                reached.update(eqn.outvars)
                if later in stops and stops[later] in reached:
                    after.append(later)
                    if len(after) == MOST_AHEAD + 1:
                        break
        return after[1:]  # the first is the unit's own end


def _host_inputs(eqn: Eqn) -> list[Var]:
    """Host values that a backward unit fetches itself, so that they can be fetched for it."""
    before = _jax.open_jaxpr(_jax.subjaxpr(eqn)).invars
    after = _jax.open_jaxpr(_jax.with_fetched_inputs(_jax.subjaxpr(eqn))).invars
    triples = zip(eqn.invars, before, after, strict=True)
    return [outer for outer, old, new in triples if old is not new]


def _bytes(values: Sequence[Var]) -> float:
    return float(sum(v.aval.size * v.aval.dtype.itemsize for v in values))


class _Evaluation:
    """One evaluation of a flat program under its timing."""

    def __init__(self, timing: _Timing):
        self.timing = timing
        self.env: dict[Var, Any] = {}
        self.device: dict[Var, Any] = {}
        self.last_read = _last_reads(timing.program)

    def run(self, args: Sequence[Any]) -> list[Any]:
        inner = _jax.open_jaxpr(self.timing.program)
        self.env.update(zip(inner.constvars, _jax.consts_of(self.timing.program), strict=True))
        self.env.update(zip(inner.invars, args, strict=True))
        units = {index: number for number, index in enumerate(self.timing.units)}
        for index, eqn in enumerate(self.timing.eqns):
            if index in units:
                self._unit(eqn, units[index])
            elif eqn.primitive.name == "scan" and any(map(_is_host, eqn.invars)):
                self._bind(eqn, _prefetching_scan(eqn, self._read(eqn.invars)))
            else:
                one = _jax.open_jaxpr(_jax.single(eqn))
                values = _jax.evaluate(_jax.single(eqn), *self._read(one.invars))
                self.env.update(zip(one.outvars, values, strict=True))
            if index in self.timing.ties:
                value, hosts = self.timing.ties[index]
                self._tie([value, *hosts])
        return self._read(inner.outvars)

    def _read(self, atoms: Sequence[Any]) -> list[Any]:
        return [self.env[a] if _jax.is_var(a) else a.val for a in atoms]

    def _bind(self, eqn: Eqn, values: Sequence[Any]) -> None:
        self.env.update(zip(eqn.outvars, values, strict=True))

    def _tie(self, names: Sequence[Var]) -> None:
        """Put values behind one barrier: none of them is used before all of them are there."""
        names = list(dict.fromkeys(names))
        values = lax.optimization_barrier([self.env[v] for v in names])
        self.env.update(zip(names, values, strict=True))

    def _unit(self, eqn: Eqn, number: int) -> None:
        """A backward unit: fetches for later ones begin with it, its results end together."""
        if number == 0:
            self._issue(0, [v for v in eqn.invars if _jax.is_var(v) and not _is_host(v)][-1:])
        body = _jax.with_fetched_inputs(_jax.subjaxpr(eqn))
        inputs = [
            self.device[v] if _jax.is_var(v) and v in self.device else x
            for v, x in zip(eqn.invars, self._read(eqn.invars), strict=True)
        ]
        self._bind(eqn, _jax.evaluate(body, *lax.optimization_barrier(inputs)))
        used = [v for v in eqn.outvars if v in self.last_read]
        self._issue(number + 1, used)

    def _issue(self, number: int, after: Sequence[Var]) -> None:
        """Fetch what unit ``number`` is to have fetched, once the values ``after`` are there."""
        hosts = self.timing.fetches.get(number, [])
        if after:
            self._tie([*after, *hosts])
        for v in hosts:
            self.device[v] = jax.device_put(self.env[v], jax.memory.Space.Device)


def _is_host(atom: Any) -> bool:
    return _jax.is_var(atom) and _jax.on_host(atom.aval)


def _last_reads(program: Jaxpr) -> set[Var]:
    """Variables that something reads."""
    inner = _jax.open_jaxpr(program)
    read = {v for eqn in inner.eqns for v in eqn.invars if _jax.is_var(v)}
    return read | {v for v in inner.outvars if _jax.is_var(v)}


def _prefetching_scan(eqn: Eqn, inputs: Sequence[Any]) -> list[Any]:
    """A loop over host stacks that fetches for the next iteration while it computes this one."""
    n_consts, n_carry = _jax.scan_counts(eqn)
    body = _jax.with_fetched_inputs(_jax.inline(eqn.params["jaxpr"]))
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    consts, carry, xs = _split(inputs, n_consts, n_carry)
    before = _jax.open_jaxpr(eqn.params["jaxpr"]).invars[n_consts + n_carry :]
    after = _jax.open_jaxpr(body).invars[n_consts + n_carry :]
    away = [_is_host(b) and not _is_host(a) for b, a in zip(before, after, strict=True)]
    stacks = [x for x, is_away in zip(xs, away, strict=True) if is_away]

    def fetch(index: Any) -> list[Any]:
        row = lax.clamp(0, index, length - 1)
        slices = (lax.dynamic_index_in_dim(s, row, keepdims=False) for s in stacks)
        return [jax.device_put(s, jax.memory.Space.Device) for s in slices]

    def step(state: Any, rows: Any) -> Any:
        index, ready, values = state
        following = index - 1 if reverse else index + 1
        fetched, here = iter(ready), iter(rows)
        slices = [next(fetched) if is_away else next(here) for is_away in away]
        outputs = _jax.evaluate(body, *consts, *values, *slices)
        return (following, fetch(following), outputs[:n_carry]), outputs[n_carry:]

    first = length - 1 if reverse else 0
    near = [x for x, is_away in zip(xs, away, strict=True) if not is_away]
    state = (jax.numpy.int32(first), fetch(first), list(carry))
    (_, _, carry), ys = lax.scan(
        step, state, near, length=length, reverse=reverse, unroll=eqn.params["unroll"]
    )
    return [*carry, *ys]


def _split(values: Sequence[Any], consts: int, carry: int) -> tuple[Any, Any, Any]:
    return values[:consts], values[consts : consts + carry], values[consts + carry :]
