"""Transfers to and from the host, timed: the part of a plan that a policy cannot say.

A ``jax.checkpoint`` policy says what is offloaded; XLA then starts copies to the host as late, and
fetches as early, as it likes, and may hold more memory than without offload. Here the staged step
is evaluated once more, and is the same program but for its timing:

- A copy to the host shares a barrier with a later value of the forward pass, up to some regions on,
  so it runs beside the compute between them, and the buffer is free after it. It starts behind
  another barrier if the link is busy till then.
- A fetch shares a barrier with the results of the backward region some distance ahead of its use,
  so it runs beside that compute, and no earlier. The first region's fetches run beside the head:
  what the step computes between its forward and its backward regions.
- TPUs undo what such barriers say, so copies go to slots of host arrays there, and a fetch reads
  at an index computed from those results: see ``host_slots.py``.
- The results of a backward region share one barrier, so that gradients of weights are not put off
  while what they are made from stays in memory: see ``weight_gradients.py``, and for those of loops
  ``weight_gradients_in_loops.py``.
- Loops do both one iteration apart: see ``transfers_in_loops.py``. Loops around forward and
  backward pass (micro-batches) are timed inside.

When each of them happens, ``transfer_timing.py`` and ``program_timing.py`` say; how, where barriers
hold, ``transfer_barriers.py``. Which compiler needs which of these was measured:
``benchmarks/compilers/transfers.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from jdelta._src import _jax
from jdelta._src._jax import Env, Eqn, Jaxpr, Var, transfers
from jdelta._src._jax.transfers import is_host
from jdelta._src.passes.host_slots import Slots
from jdelta._src.passes.program import Context, Program
from jdelta._src.passes.program_timing import HEAD, Timing, timing_of
from jdelta._src.passes.transfer_barriers import Barriers, tie
from jdelta._src.passes.transfers_in_loops import Clock, Late, backward_loop, forward_loop
from jdelta._src.passes.weight_gradients import has_regions, start, without_growth
from jdelta._src.passes.weight_gradients_in_loops import with_gradients_in_place
from jdelta._src.program.scan import Scan


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
    clock = Clock(context.rates, context.backend, shardings)
    timing = timing_of(program, clock, least=context.least)

    def run(*args: Any) -> list[Any]:
        return _Evaluation(timing, clock, context).run(args)

    return run


class _Evaluation:
    """One evaluation of a flat program under its timing."""

    def __init__(self, timing: Timing, clock: Clock, context: Context):
        self.timing = timing
        self.clock = clock
        self.context = context
        self.eqns = _jax.open_jaxpr(timing.program).eqns
        self.numbers = {index: number for number, index in enumerate(timing.regions)}
        self.delayed = {copy for _, copies in timing.starts.values() for copy in copies}
        self.device: dict[Var, Any] = {}
        self.late_writes: dict[Var, Late] = {}
        self.transfers = Barriers()
        if not context.backend.transfers.are_tied:
            size = timing.slot_bytes
            specs = clock.shardings.specs
            self.transfers = Slots(timing.slots, specs, slot=size, in_turn=timing.in_turn)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The results of the program."""
        return _jax.interpret(self.timing.program, args, self._run)

    def _run(self, index: int, eqn: Eqn, env: Env) -> None:
        """Evaluate one equation, and end and start what is due then."""
        if index in self.numbers:
            _jax.write(env, eqn, self._region(eqn, self.numbers[index], env))
        elif transfers.crosses_to_host(eqn):
            if index not in self.delayed:
                self.transfers.copy(eqn, env)
        elif (results := self._loop(eqn, env)) is not None:
            _jax.write(env, eqn, results)
        else:
            _jax.run(eqn, env)
        self._passed(index, env)

    def _loop(self, eqn: Eqn, env: Env) -> Sequence[Any] | None:
        """The results of a loop that is timed; None for all else."""
        if eqn.primitive.name != "scan":
            return None
        if any(map(is_host, eqn.outvars)):
            return self._forward_loop(eqn, env)
        if any(map(is_host, eqn.invars)):
            # What is fetched an iteration ahead takes one more buffer.
            return None if self.context.least else self._backward_loop(eqn, env)
        return self._outer_loop(eqn, env)

    def _passed(self, index: int, env: Env) -> None:
        """What ends and what starts when an equation is done."""
        timing = self.timing
        if index in timing.ends:
            self.transfers.end(*timing.ends[index], env)
        if index in timing.starts:
            value, copies = timing.starts[index]
            self.transfers.copy_after(value, [self.eqns[copy] for copy in copies], env)
        if timing.head and timing.head[0] == index:
            self._fetch(HEAD, [timing.head[1]], env)
        if early := timing.gradients.early.get(index + 1):
            tie(early, env)
            for v, growth in timing.gradients.grown[index + 1].items():
                env[v] = growth(env[growth.of])

    def _forward_loop(self, eqn: Eqn, env: Env) -> list[Any]:
        values, late_writes = forward_loop(
            eqn, _jax.read(env, eqn.invars), self.timing.late_stacks, self.clock
        )
        self.late_writes |= late_writes
        return values

    def _backward_loop(self, eqn: Eqn, env: Env) -> list[Any]:
        return backward_loop(eqn, _jax.read(env, eqn.invars), self.late_writes, self.clock)

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

    def _region(self, eqn: Eqn, number: int, env: Env) -> list[Any]:
        """A backward region: fetches for later ones begin with it, its results end together."""
        if number == 0:
            index = self.timing.regions[0]
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
            self.transfers.fetched_value(v, x) if is_host(v) else x
            for v, x in zip(eqn.invars, lax.optimization_barrier(inputs), strict=True)
        ]
        results = _jax.evaluate(body, *inputs)
        env.update(zip(eqn.outvars, results, strict=True))
        self._fetch(number + 1, self.timing.gradients.results[number], env)
        ended = zip(_jax.read(env, eqn.outvars), grown, strict=True)
        return [growth(value) if growth else value for value, growth in ended]

    def _fetch(self, number: int, after: Sequence[Var], env: Env) -> None:
        """Fetch what is due before a backward region, ``after`` these values are there."""
        self._bring(self.timing.fetches.get(number, ()), after, env)

    def _bring(self, hosts: Sequence[Var], after: Sequence[Var], env: Env) -> None:
        """Fetch host values, ``after`` these values are there."""
        self.device.update(self.transfers.fetch(hosts, after, env))
