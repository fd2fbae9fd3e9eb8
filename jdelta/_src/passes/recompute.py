"""A policy written into the recorded step: its backward pass computes again what the policy drops.

The recorded step keeps every value that its backward pass reads. Here the backward part of each
region becomes one ``remat`` equation. That begins with the forward equations that make what the
policy drops, from what the policy keeps and from what enters the region; what it puts on the host
is copied there where it is made, and back where it is read. It is the program that JAX makes when
it differentiates the step under the policy, but nothing is traced or differentiated again for it.
Where the policy drops what enters a region, its backward part begins with forward equations of
earlier regions, too (``dropped_inputs.py``): no ``jax.checkpoint`` around a region says that.

Regions of the program itself are written so, and those of a ``scan`` whose backward pass is another
``scan``; both may be in the body of a further one. A step with a region that is in it in another
way JAX has to differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from jdelta._src import _jax
from jdelta._src._jax import Atom, Eqn, Jaxpr, Var
from jdelta._src.passes.dropped_inputs import DroppedInputs
from jdelta._src.passes.region_parts import NO_PARTS, Parts, backward_runs, parts_of
from jdelta._src.program.hlo_names import RECOMPUTE, RegionMarks
from jdelta._src.program.primitives import BITS
from jdelta._src.program.rewriting import Equations, Loop
from jdelta._src.regions.policy import Policy


def with_recompute(program: Jaxpr, policy: Policy) -> Jaxpr | None:
    """The recorded step under a policy; None where JAX has to make that program.

    Args:
        program: The step as it was recorded, calls inlined, with the names of plans.
        policy: What is kept, and where.
    """
    try:
        written = _Writer(policy).written(program, is_backward=False)
    except _OtherwiseError:
        return None
    return _jax.with_outputs(written, [True] * len(_jax.open_jaxpr(written).outvars))


class _OtherwiseError(Exception):
    """A region is in the step in a way that is not written here."""


@dataclass(frozen=True)
class _Origin:
    """Where a value of a forward pass is made.

    Attributes:
        depth: 0: in the program that the loop of the forward pass is in; 1: in the forward pass.
        number: Of the equation.
        eqns: The equations that it is one of.
    """

    depth: int
    number: int
    eqns: Equations

    @property
    def place(self) -> tuple[int, int]:
        """To be sorted by."""
        return self.depth, self.number

    @property
    def eqn(self) -> Eqn:
        """The equation."""
        return self.eqns[self.number]

    @property
    def name(self) -> str | None:
        """The name that the equation gives its result, if it gives any."""
        return _jax.named_value(self.eqn)


@dataclass
class _Passes:
    """The forward and the backward pass of a program, or of a loop: then each is a loop's body.

    Attributes:
        forward: The equations of the forward pass.
        backward: The equations of the backward pass; the same where both are in one program.
        results: What leaves the backward pass.
        cotangents: Values that only exist in the backward pass.
        same: From variables of the backward pass to those of the forward pass that they are.
        handed_on: What gives the backward pass a value of the forward pass, or its copy on the host
            (given first), as a variable there.
        around: The equations of the program that the loop of the forward pass is in: what changes
            in no iteration is computed there.
        entering: From variables of the forward pass to those around that they are.
        dropped: What enters its regions and is dropped; None where nothing is.
    """

    forward: Equations
    backward: Equations
    results: set[Atom]
    cotangents: set[Var]
    same: Mapping[Var, Var]
    handed_on: Callable[[Var, Var], Var]
    around: Equations | None = None
    entering: Mapping[Var, Var] = field(default_factory=dict[Var, Var])
    dropped: DroppedInputs | None = None

    def leaves(self, value: Var, inside: Collection[int]) -> bool:
        """Whether a value of the backward pass is read by other than some of its equations."""
        return value in self.results or self.backward.is_read_outside(value, inside)

    def forward_value(self, value: Var) -> Var:
        """The value of the forward pass that one of the backward pass is."""
        return self.same.get(value, value)

    def origin(self, value: Var) -> _Origin | None:
        """Where an earlier region makes a value; None where nothing is dropped, or none does."""
        number = self.dropped.maker(value) if self.dropped else None
        return None if number is None else _Origin(1, number, self.forward)

    def made_earlier(self, value: Var, *, is_on_the_way: bool) -> tuple[_Origin | None, Var]:
        """Where a value is computed again that a region does not make itself.

        Args:
            value: The value.
            is_on_the_way: Whether what enters a region is computed from it.

        Returns:
            None where it need not be, and what is read for it then.

        Raises:
            _OtherwiseError: It is to be, and cannot be.
        """
        assert self.dropped
        is_asked_for = is_on_the_way or self.dropped.enters(value)
        source = self.dropped.available(value) if is_asked_for else value
        if source is value and self.dropped.enters(value):  # nothing in this pass makes it
            raise _OtherwiseError
        return (self.origin(value), value) if source is None else (None, source)

    def forward_values(self, inside: Sequence[int], around: Sequence[int]) -> dict[Var, _Origin]:
        """From the values that a region makes in the forward pass to where it makes them."""
        outer = (
            {}
            if self.around is None
            else {v: _Origin(0, i, self.around) for i in around for v in self.around[i].outvars}
        )
        return outer | {
            v: _Origin(1, i, self.forward) for i in inside for v in self.forward[i].outvars
        }


@dataclass(frozen=True)
class _Body:
    """The body of a backward part while it is put together.

    Attributes:
        operands: From what it is given to what stands for that in it.
        eqns: Its equations.
    """

    operands: dict[Var, Var] = field(default_factory=dict[Var, Var])
    eqns: list[Eqn] = field(default_factory=list[Eqn])

    def operand(self, value: Var) -> Var:
        """What stands for a value that it is given."""
        return self.operands.setdefault(value, _jax.new_var(value.aval))


class _Writer:
    """Writes one policy."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.marks = RegionMarks(name for name, _ in policy.regions)
        self.away = policy.offloaded | policy.spilled
        self.copies: dict[Var, Var] = {}

    def written(self, program: Jaxpr, *, is_backward: bool) -> Jaxpr:
        """A program with the regions in it written."""
        inner = _jax.open_jaxpr(program)
        eqns = Equations(inner.eqns)
        if any(self.marks.region(e) and _jax.is_backward_of_backward(e) for e in inner.eqns):
            raise _OtherwiseError
        regions = self._parts(eqns, is_backward=is_backward)
        flat: list[str] = []
        loops: list[str] = []
        inside: set[int] = set()
        for name, parts in regions.items():
            around = {*parts.around_forward, *parts.around_backward}
            if parts.backward:
                flat.append(name)
            elif len(around) == 1 and parts.around_backward:
                inside |= around
            elif parts.around_backward:
                loops.append(name)
            if parts.backward and around:
                raise _OtherwiseError
        for index in inside:
            back = is_backward or _jax.is_backward(eqns[index])
            changed = _jax.with_bodies(eqns[index], self._in_body(is_backward=back))
            if changed is eqns[index]:  # an equation whose bodies are not rewritten
                raise _OtherwiseError
            eqns.eqns[index] = changed
        backward_eqns = (e for e in inner.eqns if is_backward or _jax.is_backward(e))
        cotangents = {v for eqn in backward_eqns for v in eqn.outvars}
        results = set(filter(_jax.is_var, inner.outvars))
        dropped = self._dropped(eqns, is_apart=False)
        passes = _Passes(eqns, eqns, results, cotangents, {}, _itself, dropped=dropped)
        self._loops(loops, regions, regions, passes)
        self._regions(flat, regions, regions, passes)
        return _jax.rebuild(program, eqns.result(), eqns.now(inner.outvars))

    def _in_body(self, *, is_backward: bool) -> Callable[[Jaxpr], Jaxpr]:
        """What writes the regions that a body has both parts of."""

        def change(body: Jaxpr) -> Jaxpr:
            written = self.written(_jax.inline(body), is_backward=is_backward)
            if body is not _jax.open_jaxpr(body):
                return written
            if _jax.consts_of(written):
                raise _OtherwiseError
            return _jax.open_jaxpr(written)

        return change

    def _dropped(self, eqns: Equations, *, is_apart: bool) -> DroppedInputs | None:
        levels, kept = dict(self.policy.levels), self.policy.kept
        return DroppedInputs(eqns, levels, kept, is_apart=is_apart) if levels else None

    def _parts(self, eqns: Equations, *, is_backward: bool) -> dict[str, Parts]:
        return parts_of(eqns.eqns, self.marks, is_backward=is_backward)

    def _regions(
        self,
        names: Iterable[str],
        forward: Mapping[str, Parts],
        backward: Mapping[str, Parts],
        passes: _Passes,
        around: Mapping[str, Parts] = MappingProxyType({}),
    ) -> None:
        """Write regions whose parts are equations of two passes, and maybe of those around."""
        runs = backward_runs(backward, passes.backward)
        in_order = sorted((run[0], name, run) for name in names for run in runs[name])
        for _, name, run in in_order:  # what one part holds is for those after it
            outside = around.get(name, NO_PARTS).forward
            values = passes.forward_values(forward.get(name, NO_PARTS).forward, outside)
            self._region(name, values, run, passes)

    def _region(
        self, name: str, values: Mapping[Var, _Origin], indices: Sequence[int], passes: _Passes
    ) -> None:
        """Put a backward part of a region into one equation, with what it computes again.

        Args:
            name: The region.
            values: What it makes in the forward pass.
            indices: The equations of the backward part.
            passes: Both passes.
        """
        backward = [passes.backward[i] for i in indices]
        made_here = {v for eqn in backward for v in eqn.outvars}
        reads = (v for eqn in backward for v in _jax.variables(eqn))
        read = list(dict.fromkeys(v for v in reads if v not in made_here))
        own = {v: u for v in read if (u := passes.forward_value(v)) in values}
        recomputed, sources = self._slice(own.values(), values, passes)
        forward = {origin.place: origin.eqn for origin in (*values.values(), *recomputed)}.values()
        if any(eqn.effects or _jax.happens_once(eqn) for eqn in (*backward, *forward)):
            raise _OtherwiseError
        if any(map(self._is_deep, forward)):
            raise _OtherwiseError
        self._round([values[v] for v in sources if v in values], forward)

        body = _Body()
        first: dict[Var, Var] = {}  # from values of the forward pass to the same computed again
        for value, source in sources.items():
            origin = values.get(source) or passes.origin(source)
            if origin and origin.name in self.away:
                host = passes.handed_on(self._on_host(source, origin), source)
                fetch = _jax.copy_equation(body.operand(host), origin.eqn, to_host=False)
                body.eqns.append(_jax.in_scopes(fetch, RECOMPUTE))
                first[value] = fetch.outvars[0]
            elif source in passes.cotangents:
                first[value] = body.operand(source)
            else:
                first[value] = body.operand(passes.handed_on(source, source))
        for origin in recomputed:
            if origin.depth:
                first |= {v: first[u] for v, u in passes.entering.items() if u in first}
            body.eqns.append(_jax.in_scopes(_jax.in_fresh_variables(origin.eqn, first), RECOMPUTE))
        second = {v: first[own[v]] if v in own else body.operand(v) for v in read}
        body.eqns.extend(_jax.in_fresh_variables(eqn, second) for eqn in backward)
        inside = frozenset(indices)
        computed = [v for eqn in backward for v in eqn.outvars]
        results = {v: second[v] for v in computed if passes.leaves(v, inside)}
        if passes.dropped:
            computed = [v for origin in recomputed for v in origin.eqn.outvars]
            for value in passes.dropped.to_hold(computed, name):
                result = passes.dropped.results[value] = _jax.new_var(value.aval)
                passes.cotangents.add(result)
                results[result] = first[value]
        operands = sorted(body.operands, key=lambda v: v in passes.cotangents)
        call = _jax.remat_equation(
            _jax.body_of(body.eqns, [body.operands[v] for v in operands], list(results.values())),
            self.policy,
            operands,
            list(results),
            backward[0],
            prevent_cse=self.policy.prevents_cse(name),
        )
        if not passes.backward.together(indices, call):
            raise _OtherwiseError

    def _slice(
        self, needed: Iterable[Var], values: Mapping[Var, _Origin], passes: _Passes
    ) -> tuple[list[_Origin], dict[Var, Var]]:
        """The forward equations that make values again, and what they start from.

        Args:
            needed: The values, each made by the region.
            values: All that the region makes in the forward pass.
            passes: Both passes.

        Returns:
            The equations, in order; and from each value that they start from, in order, to what is
            read for it: itself, but where it enters a region and is kept or held there.
        """
        recomputed: dict[tuple[int, int], _Origin] = {}
        sources: dict[Var, Var] = {}
        todo = [(value, False) for value in needed]
        seen = set[Var]()
        while todo:
            value, is_earlier = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            origin, source = values.get(value), value
            if origin is None and passes.dropped:
                origin, source = passes.made_earlier(value, is_on_the_way=is_earlier)
                is_earlier = True
            if origin is None or origin.name in self.policy.kept:
                sources[value] = source
            else:
                recomputed[origin.place] = origin
                read = _jax.variables(origin.eqn)
                todo += [(passes.entering.get(v, v), is_earlier) for v in read]
        places = {v: values[v].place if v in values else (-1, -1) for v in sources}
        in_order = [recomputed[place] for place in sorted(recomputed)]
        return in_order, {v: sources[v] for v in sorted(sources, key=places.__getitem__)}

    def _round(self, kept: Iterable[_Origin], forward: Iterable[Eqn]) -> None:
        """Round what is kept on the device and read in the forward pass, as JAX does.

        Else the compiler may keep what it is made of, in a wider type.
        """
        read = {v for eqn in forward for v in _jax.variables(eqn)}
        for origin in kept:
            (value,) = origin.eqn.outvars
            if origin.name not in self.away and value in read and _jax.is_real(value):
                unrounded = _jax.new_var(value.aval)
                rounding = _jax.rounding_equation(unrounded, value, origin.eqn)
                origin.eqns.eqns[origin.number] = origin.eqn.replace(outvars=[unrounded])
                origin.eqns.add(origin.number, rounding)

    def _on_host(self, value: Var, origin: _Origin) -> Var:
        """The copy on the host of a value of the forward pass."""
        if value not in self.copies:
            put = _jax.copy_equation(value, origin.eqn, to_host=True)
            origin.eqns.add(origin.number, put)
            self.copies[value] = put.outvars[0]
        return self.copies[value]

    def _is_deep(self, eqn: Eqn) -> bool:
        """Whether the policy keeps a value in a loop of the region, or rewrites what is in it."""
        inside = [e for body in _jax.subjaxprs(eqn) for e in _jax.equations(body)]
        kept = any(_jax.named_value(e) in self.policy.kept for e in inside)
        is_random = any(e.primitive.name in BITS for e in (eqn, *inside))
        return kept or (self.policy.writes_bits and is_random)

    def _loops(
        self,
        names: Iterable[str],
        forward: Mapping[str, Parts],
        backward: Mapping[str, Parts],
        passes: _Passes,
    ) -> None:
        """Write regions in loops whose backward passes are other loops."""
        pairs: dict[tuple[int, int], list[str]] = {}
        for name in names:
            in_backward = backward[name].around_backward
            here = forward.get(name, NO_PARTS).around_forward
            if (
                backward[name].backward
                or len(here) != 1
                or not set(here).isdisjoint(
                    in_backward if passes.forward is passes.backward else ()
                )
            ):
                raise _OtherwiseError
            for index in in_backward:
                pairs.setdefault((here[0], index), []).append(name)
        if len({back for _, back in pairs}) < len(pairs):
            raise _OtherwiseError
        if any(passes.forward[i].primitive.name != "scan" for i, _ in pairs):
            raise _OtherwiseError
        loops = {i: Loop.at(i, passes.forward) for i, _ in pairs}
        bodies = {i: loop.equations() for i, loop in loops.items()}
        for (index, back), some in pairs.items():
            around = {name: forward[name] for name in some}
            self._pair(loops[index], bodies[index], back, around, passes)
        for index, loop in loops.items():
            passes.forward.replace_loop(index, loop, bodies[index])

    def _pair(
        self,
        here: Loop,
        body: Equations,
        backward: int,
        around: Mapping[str, Parts],
        passes: _Passes,
    ) -> None:
        """Write the regions of a loop whose backward pass is another loop.

        Args:
            here: The loop.
            body: The equations of its body.
            backward: The other loop.
            around: Where the regions are in what the loop is in: what no iteration changes is made
                there.
            passes: What the two loops are in.
        """
        if passes.backward[backward].primitive.name != "scan":
            raise _OtherwiseError
        back = Loop.at(backward, passes.backward)
        if (here.length, here.is_reversed) != (back.length, not back.is_reversed):
            raise _OtherwiseError
        outer = passes.forward
        outside = {v for p in around.values() for i in p.forward for v in outer[i].outvars}
        entering = {v: o for v, o in here.consts.items() if o in outside}
        same = back.same_as(here, outside, passes.forward_value)
        known = {u: v for v, u in reversed(same.items())}

        def handed_on(value: Var, source: Var) -> Var:
            if value not in known:
                known[value] = back.handed(here, value, source, passes.handed_on)
            return known[value]

        inner = _Passes(
            body,
            back.equations(),
            set(filter(_jax.is_var, back.results)),
            back.cotangents(same),
            same,
            handed_on,
            outer,
            entering,
            self._dropped(body, is_apart=True),
        )
        parts = self._parts(inner.forward, is_backward=False)
        parts_back = self._parts(inner.backward, is_backward=True)
        deeper = [name for name in around if parts_back[name].around_backward]
        self._loops(deeper, parts, parts_back, inner)
        self._regions(around.keys() - set(deeper), parts, parts_back, inner, around)
        passes.backward.replace_loop(backward, back, inner.backward)


def _itself(value: Var, _: Var) -> Var:
    return value
