"""Loops whose transfers run beside the compute of another iteration.

XLA ends every transfer of a loop in the iteration that starts it, so what a body makes late, or
reads early, is not hidden. Hence the forward loop carries what it made and copies it to the host in
the *next* iteration (on a TPU only where that hides what its own cannot); the last iteration's
values stay on the device, since the backward loop needs them first. The backward loop carries what
it will need and fetches it in the iteration *before*. Each takes one more buffer per offloaded
value.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jdelta._src import _jax
from jdelta._src._jax import Env, Eqn, Jaxpr, Var, transfers
from jdelta._src._jax.sharding import UNSHARDED, Shardings, parts_of
from jdelta._src.backends.backend import Backend, Transfers
from jdelta._src.backends.chips import Rates
from jdelta._src.estimate.seconds import program_seconds
from jdelta._src.program.graph import graph_of
from jdelta._src.program.primitives import LOOPS, MATMULS
from jdelta._src.program.scan import Scan, operands_on_path


@dataclass(frozen=True)
class Clock:
    """Prices what can hide a transfer.

    Attributes:
        rates: Rates of the target.
        backend: Its compiler.
        shardings: How the values of the step are cut over devices.
    """

    rates: Rates
    backend: Backend
    shardings: Shardings = UNSHARDED

    @property
    def habits(self) -> Transfers:
        """When the target's compiler runs transfers."""
        return self.backend.transfers

    def seconds(self, program: Jaxpr) -> float:
        """Roofline seconds of a whole program."""
        graph = graph_of(program, self.shardings)
        return program_seconds(graph, self.rates, self.backend)

    def bytes(self, var: Var) -> int:
        """Bytes of a value on one device, wherever it is."""
        return _jax.bytes_of(var) // parts_of(self.shardings.specs.get(var, ()))

    def each(self, program: Jaxpr) -> list[float]:
        """Roofline seconds of each equation of a program.

        Products and loops take what they take; what the program takes beyond that is shared out
        among the others, which are fused in ways that no equation knows of by itself.
        """
        eqns = _jax.open_jaxpr(program).eqns
        alone = [self.seconds(_jax.single(eqn)) for eqn in eqns]
        heavy = [s if is_heavy(eqn) else 0.0 for eqn, s in zip(eqns, alone, strict=True)]
        rest = sum(alone) - sum(heavy)
        share = max(0.0, self.seconds(program) - sum(heavy)) / rest if rest else 0.0
        return [h or share * a for h, a in zip(heavy, alone, strict=True)]


def is_heavy(eqn: Eqn) -> bool:
    """Whether an equation takes what it takes, whatever is around it: products and loops."""
    return eqn.primitive.name in MATMULS or any(True for _ in _jax.subjaxprs(eqn))


@dataclass(frozen=True)
class Late:
    """A host stack that is written one iteration late.

    Attributes:
        last: The value of the last iteration, on the device; it is not in the stack.
        shift: Row of an iteration's value in the stack, less that iteration's own row.
    """

    last: Any
    shift: int


def late_stacks(program: Jaxpr, writes_late: Callable[[Eqn], bool]) -> frozenset[Var]:
    """Host stacks that are written late: only their loop's backward loop reads them.

    Args:
        program: The flat program.
        writes_late: Whether a loop that could write late is to.
    """
    inner = _jax.open_jaxpr(program)
    readers: dict[Var, list[Eqn]] = defaultdict(list)
    for eqn in inner.eqns:
        for v in filter(_jax.is_var, eqn.invars):
            readers[v].append(eqn)
    results = set(filter(_jax.is_var, inner.outvars))
    stacks: set[Var] = set()
    for eqn in inner.eqns:
        if eqn.primitive.name == "scan":
            hosts = [v for v in eqn.outvars if transfers.is_host(v) and v not in results]
            back = [v for v in hosts if _only_fetched_back(v, readers[v], eqn)]
            stacks.update(back if back and writes_late(eqn) else ())
    return frozenset(stacks)


def _only_fetched_back(stack: Var, readers: Sequence[Eqn], maker: Eqn) -> bool:
    """Whether all that reads a stack is a loop that fetches, in reverse, what ``maker`` stacked."""
    if len(readers) != 1 or readers[0].primitive.name != "scan":
        return False
    (eqn,) = readers
    mirrored = eqn.params["reverse"] != maker.params["reverse"]
    same = eqn.params["length"] == maker.params["length"]
    loop = Scan.of(eqn, eqn.invars)
    rows = [x for x, is_away in zip(loop.xs, loop.fetched()[1], strict=True) if is_away]
    return mirrored and same and any(x is stack for x in rows)


def hides_next(eqn: Eqn, clock: Clock, slack: float) -> bool:
    """Whether an iteration of a loop hides its copies to the host only if the next one makes them.

    So it is where what is computed from the values in their own is too short; the compiler may do
    the rest (dropout masks, say) before. The link takes one copy after the other.

    Args:
        eqn: The ``scan``.
        clock: Prices the iteration.
        slack: Times its own seconds that a copy is given.
    """
    body = _jax.inline(eqn.params["jaxpr"])
    eqns, seconds = _jax.open_jaxpr(body).eqns, clock.each(body)
    total, free, taken = sum(seconds), 0.0, 0.0
    for inner in filter(transfers.crosses_to_host, eqns):
        copy = slack * clock.bytes(inner.outvars[0]) / clock.rates.device_to_host
        ready_seconds = total - sum(seconds[i] for i in _jax.dependents(eqns, inner.invars))
        free, taken = max(free, ready_seconds) + copy, taken + copy
    return taken <= total < free


def forward_loop(
    eqn: Eqn, inputs: Sequence[Any], may_be_late: frozenset[Var], clock: Clock
) -> tuple[list[Any], dict[Var, Late]]:
    """Evaluate a loop that stacks values on the host, one iteration late.

    Args:
        eqn: The ``scan``.
        inputs: Its operands.
        may_be_late: Its results that may be written late.
        clock: Tells what can hide their copies.

    Returns:
        The results of the ``scan``, the first row of a late stack holding nothing; and what is to
        be known of each late stack.
    """
    loop = Scan.of(eqn, inputs)
    stacks = eqn.outvars[loop.n_carry :]
    body, away = transfers.with_copies_left_out(
        loop.body, loop.n_carry, [v in may_be_late for v in stacks]
    )
    made_empty = [_zeros(v) for v, is_away in zip(loop.stacked(body), away, strict=True) if is_away]
    begin = _after_loops(body, loop, sum(x.nbytes for x in made_empty), clock)

    def step(state: Any, rows: Any) -> Any:
        made_before, values = state
        pending = list(made_before)

        def run(index: int, eqn: Eqn, env: Env) -> None:
            _jax.run(eqn, env)
            if begin and begin[0] == index:
                env[begin[1]], pending[:] = lax.optimization_barrier((env[begin[1]], pending))

        outputs = _jax.interpret(body, [*loop.consts, *values, *rows], run)
        hosts = iter([jax.device_put(x, jax.memory.Space.Host) for x in pending])
        carry, ys = outputs[: loop.n_carry], outputs[loop.n_carry :]
        offloaded = [y for y, is_away in zip(ys, away, strict=True) if is_away]
        kept = [next(hosts) if is_away else y for y, is_away in zip(ys, away, strict=True)]
        return (offloaded, carry), kept

    (last, carry), ys = loop.scan(step, (made_empty, loop.carry), loop.xs)
    shift = -1 if loop.reverse else 1
    late_results = [v for v, is_away in zip(stacks, away, strict=True) if is_away]
    return [*carry, *ys], {v: Late(x, shift) for v, x in zip(late_results, last, strict=True)}


def backward_loop(
    eqn: Eqn, inputs: Sequence[Any], late_writes: Mapping[Var, Late], clock: Clock
) -> list[Any]:
    """Evaluate a loop over host stacks that fetches for the next iteration while it computes.

    Args:
        eqn: The ``scan``.
        inputs: Its operands.
        late_writes: The stacks that were written late.
        clock: Tells when one fetch should end and the next begin.

    Returns:
        The results of the ``scan``.
    """
    loop = Scan.of(eqn, inputs)
    body, away = loop.fetched()
    rows_from = loop.n_consts + loop.n_carry
    names = [v for v, is_away in zip(eqn.invars[rows_from:], away, strict=True) if is_away]
    stacks = [x for x, is_away in zip(loop.xs, away, strict=True) if is_away]
    device_stacks = [x for x, is_away in zip(loop.xs, away, strict=True) if not is_away]
    first = loop.length - 1 if loop.reverse else 0
    stops = _stops(body, loop, [clock.bytes(x) for x in names], clock)

    def fetch(stack: Any, name: Var, row: Any) -> Any:
        row = row + late_writes[name].shift if name in late_writes else row
        row = lax.clamp(0, row, loop.length - 1)
        value = lax.dynamic_index_in_dim(stack, row, keepdims=False)
        return jax.device_put(value, jax.memory.Space.Device)

    def step(state: Any, rows: Any) -> Any:
        row, ready, values = state
        following = row - 1 if loop.reverse else row + 1
        fetched, here = iter(ready), iter(rows)
        slices = [next(fetched) if is_away else next(here) for is_away in away]
        coming = [fetch(stacks[0], names[0], following)] if stacks else []

        def run(index: int, eqn: Eqn, env: Env) -> None:
            _jax.run(eqn, env)
            if index not in stops:
                return
            # One after the other, as the link will have it: XLA hides each as if it were alone.
            stop = stops[index]
            tied = (env[stop], coming[-1], following)
            env[stop], coming[-1], row = lax.optimization_barrier(tied)
            if len(coming) < len(stacks):
                coming.append(fetch(stacks[len(coming)], names[len(coming)], row))

        outputs = _jax.interpret(body, [*loop.consts, *values, *slices], run)
        coming += [fetch(stacks[i], names[i], following) for i in range(len(coming), len(stacks))]
        return (following, coming, outputs[: loop.n_carry]), outputs[loop.n_carry :]

    ready = [
        late_writes[n].last if n in late_writes else fetch(s, n, jax.numpy.int32(first))
        for s, n in zip(stacks, names, strict=True)
    ]
    (_, _, carry), ys = loop.scan(step, (jax.numpy.int32(first), ready, loop.carry), device_stacks)
    return [*carry, *ys]


def _stops(body: Jaxpr, loop: Scan, sizes: Sequence[int], clock: Clock) -> dict[int, Var]:
    """Values of a body by which each fetch should be done.

    The compute of an iteration is shared out by bytes. Only values that the next iteration depends
    on, and that depend on the one before, come in question; and only operands of products, which
    are written to memory anyway. XLA:GPU counts instructions to know how early a fetch has to
    start, and an iteration ends with many short ones: so there the last fetch is done before those,
    while a TPU's compiler has the rest of the iteration for it.
    """
    eqns = _jax.open_jaxpr(body).eqns
    path = operands_on_path(body, loop.n_consts, loop.n_carry)
    done = list(itertools.accumulate(clock.each(body)))
    fitting = {i: v for i, eqn in enumerate(eqns) for v in reversed(eqn.outvars) if v in path}
    counts = clock.habits.counts_instructions
    shared = done[max(fitting)] if counts and fitting else done[-1]
    ends = [shared * (part / sum(sizes)) for part in itertools.accumulate(sizes)]
    goals = [end for end in ends if end < done[-1]]
    stops: dict[int, Var] = {}
    for index, value in fitting.items():
        if goals and done[index] >= goals[0]:
            stops[index] = value
            goals.pop(0)
    return stops


def _after_loops(body: Jaxpr, loop: Scan, size: int, clock: Clock) -> tuple[int, Var] | None:
    """Where copies of an iteration start if the body has loops of its own.

    XLA ends copies before an inner loop begins. So they start after the last one, at an operand of
    a product, if the compute in front of the first does not hide them, and that is more.

    Returns:
        The index of an equation and its result that they wait for; None to start at once.
    """
    eqns = _jax.open_jaxpr(body).eqns
    path = operands_on_path(body, loop.n_consts, loop.n_carry)
    loops = [i for i, eqn in enumerate(eqns) if eqn.primitive.name in LOOPS]
    stops = ((i, v) for i in range(max(loops, default=0), len(eqns)) for v in eqns[i].outvars)
    begin = next(((i, v) for i, v in stops if v in path), None)
    if not loops or begin is None:
        return None
    seconds = clock.each(body)
    before, left = sum(seconds[: loops[0]]), sum(seconds[begin[0] + 1 :])
    return begin if before < min(left, size / clock.rates.device_to_host) else None


def _zeros(value: Any) -> Any:
    sharding = value.aval.sharding if _jax.has_explicit_axes(value.aval) else None
    return lax.full(value.aval.shape, 0, value.aval.dtype, sharding=sharding)
