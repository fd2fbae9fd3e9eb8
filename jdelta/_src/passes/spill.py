"""Spilled values: the part of a plan that writes them to files, and reads them back.

To JAX a spilled value is an offloaded one, so that the staged step copies it to host memory and
back. Here the step is evaluated once more, and where it had such a pair of copies it now writes
the value and reads it: what goes from the forward to the backward pass is a token. Loops stack the
tokens of their iterations.

A read begins when the backward pass gets to it: in a loop with its iteration, elsewhere with the
backward region that needs it, since its token depends on what that region is given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdelta._src import _jax
from jdelta._src._jax import Env, Eqn, Jaxpr, Var, transfers
from jdelta._src._jax.sharding import Spec
from jdelta._src.errors import SpillError
from jdelta._src.passes.host_slots import zero_of
from jdelta._src.passes.program import Context, Program
from jdelta._src.passes.spill_record import Emitted, Place
from jdelta._src.program.names import RegionName
from jdelta._src.program.scan import Scan
from jdelta._src.spill import Store, read, write


def spilled(program: Program, context: Context) -> Program:
    """The program with its spilled values written and read.

    Raises:
        SpillError: The step does with a spilled value what a token cannot.
    """
    assert context.store is not None
    # JAX hands on what a ref that nothing reads was given, too: that is not worth a file.
    wanted = _jax.with_outputs(program.jaxpr, [True] * len(program.jaxpr.out_avals))
    flat = transfers.copied_once(_jax.inline(wanted))
    spilling = _Spilling.of(program, context, context.store)
    places: dict[int, Place] = {}

    def run(*args: Any) -> list[Any]:
        evaluation = _Run(spilling, places, itertools.count())
        results = evaluation.program(flat, args)
        if not spilling.store.by_callback:  # JAX leaves out what nobody reads, but no callback
            for slot in places.keys() - evaluation.read:
                del places[slot]
        return [_unspilled(x, "the step hands out") for x in results]

    return replace(program.evaluated(run), spilled=Emitted(places))


@dataclass(frozen=True)
class _Spilling:
    """How the values of a step are spilled.

    Attributes:
        store: Where to.
        is_spilled: Whether the plan spills the value of a name.
        specs: From names to how their values are sharded over the mesh.
        mesh: The devices of the step; None for one, and inside of a ``shard_map``.
    """

    store: Store
    is_spilled: Callable[[RegionName], bool]
    specs: Mapping[str, Spec]
    mesh: Mesh | None

    @classmethod
    def of(cls, program: Program, context: Context, store: Store) -> _Spilling:
        shardings = context.shardings(program.jaxpr)
        specs = {name: shardings.specs[var] for name, var in shardings.named.items()}
        places = (getattr(leaf, "sharding", None) for leaf in context.arguments)
        meshes = (getattr(sharding, "mesh", None) for sharding in places)
        mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
        return cls(store, context.is_spilled, specs, mesh)


@dataclass(frozen=True)
class _Record:
    """A place in the program where a value is written.

    Attributes:
        slot: Its number in the store.
        aval: Shape and dtype of the value, that of one iteration in a loop.
        sharding: How it is cut over devices; None where it is not, and inside of a ``shard_map``.
    """

    slot: int
    aval: Any
    sharding: NamedSharding | None


@dataclass(frozen=True)
class _Away:
    """Stands for a spilled value, or a stack of them.

    Attributes:
        token: What writing it gave.
        record: Where it was written.
    """

    token: Any
    record: _Record


@dataclass
class _Run:
    """One evaluation, or the part of it that is in a loop.

    Attributes:
        spilling: How values are spilled.
        places: Where values are written, by slot.
        slots: Hands out slots.
        read: Slots of what the program has read back: it may do so once.
        row: Number of the iteration, over all loops around.
        kept: Iterations that have their values in files at once.
        trips: Iterations of all loops around.
    """

    spilling: _Spilling
    places: dict[int, Place]
    slots: Any
    read: set[int] = field(default_factory=set[int])
    row: Any = 0
    kept: int = 1
    trips: int = 1

    def program(self, program: Jaxpr, args: Sequence[Any]) -> list[Any]:
        """Evaluate a flat program; some of its values may be away."""
        names: dict[Var, RegionName] = {}
        back: dict[int, Any] = {}

        def run(_: int, eqn: Eqn, env: Env) -> None:
            name = _jax.named_value(eqn)
            if isinstance(name, RegionName):
                names[eqn.outvars[0]] = name
            results = self._results(eqn, _jax.read(env, eqn.invars), names, back)
            if results is None:
                _jax.run(eqn, env)
            else:
                _jax.write(env, eqn, results)

        return _jax.interpret(program, args, run)

    def _results(
        self,
        eqn: Eqn,
        inputs: Sequence[Any],
        names: Mapping[Var, RegionName],
        back: dict[int, Any],
    ) -> Sequence[Any] | None:
        """The results of an equation; None if it has nothing to do with values that are away.

        Args:
            eqn: The equation.
            inputs: Its operands, some of which may be away.
            names: The names of values.
            back: What was read, by slot.
        """
        away = [x for x in inputs if isinstance(x, _Away)]
        if transfers.crosses_to_host(eqn):
            name = names.get(eqn.invars[0])
            if name is not None and self.spilling.is_spilled(name):
                return [self._write(name, inputs[0])]
        elif transfers.crosses_to_device(eqn) and away:
            return [self._read(away[0], back)]
        elif _jax.is_shielded(eqn):
            return self._region(eqn, inputs, back)
        if away or any(map(transfers.has_transfers, _jax.subjaxprs(eqn))):
            if eqn.primitive.name == "scan":
                return self._loop(eqn, inputs, back)
            if eqn.primitive.name == "shard_map":
                return self._mapped(eqn, inputs)
            if _jax.is_call(eqn):
                return self.program(_jax.inline(_jax.subjaxpr(eqn)), inputs)
            self._check(eqn, away)
        return None

    def _write(self, name: RegionName, value: Any) -> _Away:
        sharding = self._sharding(name, value)
        record = _Record(next(self.slots), jax.typeof(value), sharding)
        shape = sharding.shard_shape(value.shape) if sharding else value.shape
        size = math.prod(shape) * value.dtype.itemsize
        self.places[record.slot] = Place(str(name), size, self.kept, self.trips)
        place: dict[str, Any] = {"slot": record.slot, "row": self.row, "sharding": sharding}
        return _Away(write(self.spilling.store, value, **place), record)

    def _read(self, away: _Away, back: dict[int, Any], after: Any = None) -> Any:
        """Read a value, not before another one is there; one that was read already as it is."""
        record = away.record
        if record.slot in back:
            return back[record.slot]
        if record.slot in self.read:
            raise SpillError(
                f"Two loops of the backward pass read one spilled value, {record.aval}, which can "
                'be read once. Pin it to "save", or plan without spill=.'
            )
        self.read.add(record.slot)
        place: dict[str, Any] = {"slot": record.slot, "row": self.row, "sharding": record.sharding}
        token = _after(away.token, after)
        back[record.slot] = read(self.spilling.store, token, record.aval, **place)
        return back[record.slot]

    def _region(self, eqn: Eqn, inputs: Sequence[Any], back: dict[int, Any]) -> list[Any]:
        """A backward region: what it reads is read when it begins."""
        body = _jax.inline(_jax.subjaxpr(eqn))
        body, fetched = transfers.with_fetched_inputs(body)
        floats = [x for x in inputs if not isinstance(x, _Away) and _is_float(x)]
        after = floats[-1] if floats else None  # cotangents come last
        own: list[Any] = []
        for x, is_fetched in zip(inputs, fetched, strict=True):
            if is_fetched:
                x = self._read(x, back, after) if isinstance(x, _Away) else _fetched(x, after)
            own.append(_hidden(x, after))
        return self.program(body, own)

    def _loop(self, eqn: Eqn, inputs: Sequence[Any], back: dict[int, Any]) -> list[Any]:
        """A loop: it takes and makes stacks of tokens."""
        loop = Scan.of(eqn, inputs)
        consts = [self._read(x, back) if isinstance(x, _Away) else x for x in loop.consts]
        start = [_unspilled(x, "a loop carries") for x in loop.carry]
        taken = [x.record if isinstance(x, _Away) else None for x in loop.xs]
        xs = [x.token if isinstance(x, _Away) else x for x in loop.xs]
        stacks = any(_jax.on_host(v.aval) for v in eqn.outvars)
        records: list[_Record | None] = []

        def step(carry: Any, rows: Any) -> Any:
            index, *rows = rows
            inside = replace(
                self,
                row=self.row * loop.length + index,
                kept=self.kept * (loop.length if stacks else 1),
                trips=self.trips * loop.length,
            )
            own = [_Away(x, r) if r else x for x, r in zip(rows, taken, strict=True)]
            outputs = inside.program(loop.body, [*consts, *carry, *own])
            ys = outputs[loop.n_carry :]
            records[:] = [y.record if isinstance(y, _Away) else None for y in ys]
            return (
                [_unspilled(x, "a loop carries") for x in outputs[: loop.n_carry]],
                [y.token if isinstance(y, _Away) else y for y in ys],
            )

        numbers = jnp.arange(loop.length, dtype=jnp.int32)
        carry, ys = loop.scan(step, start, [numbers, *xs])
        return [*carry, *(_Away(y, r) if r else y for y, r in zip(ys, records, strict=True))]

    def _mapped(self, eqn: Eqn, inputs: Sequence[Any]) -> list[Any]:
        """A ``shard_map``: each device writes and reads what is its own."""
        params, body = eqn.params, _jax.inline(_jax.subjaxpr(eqn))
        mesh = params["mesh"]
        if set(_jax.manual_axes(eqn)) != set(mesh.axis_names):
            raise SpillError(
                "The step has a shard_map over some axes of its mesh, and values in it cannot be "
                "spilled. Map over all axes, or plan without spill=."
            )
        taken = [x.record if isinstance(x, _Away) else None for x in inputs]
        here = [x.token if isinstance(x, _Away) else x for x in inputs]
        inside = replace(self, spilling=replace(self.spilling, mesh=None))
        records: list[_Record | None] = []

        def run(*args: Any) -> Any:
            own = [_Away(x[0], r) if r else x for x, r in zip(args, taken, strict=True)]
            outputs = inside.program(body, own)
            records[:] = [y.record if isinstance(y, _Away) else None for y in outputs]
            return [y.token[None] if isinstance(y, _Away) else y for y in outputs]

        in_specs = [
            _of_tokens(r.aval) if r else s for r, s in zip(taken, params["in_specs"], strict=True)
        ]
        out_specs = [
            _of_tokens(v.aval) if _jax.on_host(v.aval) else s
            for v, s in zip(_jax.open_jaxpr(body).outvars, params["out_specs"], strict=True)
        ]
        call = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            check_vma=params["check_vma"],
        )
        with jax.named_scope(_jax.name_stack(eqn)):  # so that recompute is known as such
            values = call(*here)
        return [_Away(y, r) if r else y for y, r in zip(values, records, strict=True)]

    def _sharding(self, name: RegionName, value: Any) -> NamedSharding | None:
        """How a value is cut; over axes that do not cut it evenly it is not."""
        mesh = self.spilling.mesh
        if mesh is None:
            return None
        spec = self.spilling.specs.get(name) or ((),) * value.ndim
        cut: list[tuple[str, ...]] = []
        for size, axes in zip(value.shape, spec, strict=True):
            names = tuple(axis.name for axis in axes)
            known = all(name in mesh.shape for name in names)
            parts = math.prod(mesh.shape[name] for name in names) if known else 0
            cut.append(names if parts and size % parts == 0 else ())
        return NamedSharding(mesh, PartitionSpec(*(names or None for names in cut)))

    def _check(self, eqn: Eqn, away: Sequence[_Away]) -> None:
        """Refuse what a token cannot stand for."""
        what = away[0].record.aval if away else "a value inside of it"
        raise SpillError(
            f"The step hands a spilled value to {eqn.primitive.name!r} ({what}), which can take "
            'no token. Pin the values around it to "save", or plan without spill=.'
        )


def _hidden(x: Any, after: Any) -> Any:
    """The same value, not before another one is there, though the compiler cannot know it.

    XLA for CPUs has no barriers: it would take what a region computes again for what the forward
    pass has computed, and keep that.
    """
    if isinstance(x, _Away) or x is after or not _may_wait(x, after):
        return x
    if _jax.on_host(jax.typeof(x)):  # without it XLA:GPU undoes the copy there and back
        return lax.optimization_barrier((x, after))[0]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        bits = _hidden(jax.random.key_data(x), after)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
    return lax.select(zero_of(after) == 0, x, jnp.zeros_like(x))


def _fetched(x: Any, after: Any) -> Any:
    """An offloaded value, copied to the device once another one is there."""
    return jax.device_put(_hidden(x, after), jax.memory.Space.Device)


def _after(token: Any, after: Any) -> Any:
    """The token, not before a value is there."""
    return token + zero_of(after) if _may_wait(token, after) else token


def _may_wait(x: Any, after: Any) -> bool:
    """Whether a value that waits for another one keeps its type.

    In a ``shard_map`` types say over which axes values vary.
    """
    return after is not None and _jax.varying_axes(after) <= _jax.varying_axes(x)


def _of_tokens(aval: Any) -> PartitionSpec:
    """How the tokens of a value in a ``shard_map`` are cut, which stand in one more dimension.

    Each device has one of its own, as far as types say that the value differs.
    """
    return PartitionSpec(tuple(sorted(aval.mat.varying)) or None)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating)) and x.size > 0


def _unspilled(x: Any, what: str) -> Any:
    """The value, which must not be away."""
    if isinstance(x, _Away):
        raise SpillError(
            f'{what.capitalize()} a spilled value, {x.record.aval}. Pin it to "save", or plan '
            "without spill=."
        )
    return x
