"""Calls of a step, in all forms that ``jax.jit`` takes, as calls of a pure function by position."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jdelta._src import _jax
from jdelta._src.backends.target import Target, committed_sharding, is_on_host
from jdelta._src.errors import ArgumentError
from jdelta._src.plan.user_step import Jitted, several
from jdelta._src.program.constants import Constant
from jdelta._src.sizes import format_array, format_some


def _as_they_are(results: Any) -> Any:
    return results


@dataclass(frozen=True)
class Call:
    """One call of a step.

    Attributes:
        fun: A pure function of ``args``.
        args: What is traced: arguments given by position, then those given by name.
        numbers: The number of each in the signature of the step; None where it has only a name.
        names: What the user calls each: ``("state", "batch")``.
        static: Everything else that the program depends on, hashable.
        in_shardings: Where each is to be: a sharding or a tree of them, None for where it is.
        out_shardings: Where the results are to be, likewise.
        finish: From what ``fun`` returns to what the step does.
        own_mesh: The mesh that the program names, where it was looked for and found.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    numbers: tuple[int | None, ...]
    names: tuple[str, ...]
    static: Any
    in_shardings: tuple[Any, ...] | None = None
    out_shardings: Any = None
    finish: Callable[[Any], Any] = _as_they_are
    own_mesh: Mesh | None = None

    @functools.cached_property
    def key(self) -> Any:
        """What a program is made for: structure, shapes, dtypes and places of the arguments."""
        leaves, tree = jax.tree.flatten(self.args)
        return tree, tuple(map(_kind, leaves)), self.numbers, self.static

    @property
    def placed(self) -> tuple[Any, ...]:
        """The arguments, as shapes where they have to move.

        Those without a place of their own are replicated over the mesh that the program runs over,
        as ``jax.jit`` does.

        Raises:
            ArgumentError: An argument is nothing that JAX traces.
        """
        self._check_traceable()
        mesh = self._mesh or self.own_mesh
        if self._has_places or mesh is None:
            return self._moved
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: x if _jax.is_ref(x) else _at(x, everywhere), self._moved)

    @property
    def may_have_own_mesh(self) -> bool:
        """Whether a mesh that the program names, if there is one, says where the arguments go."""
        return not (self._mesh or self.own_mesh or self._has_places) and jax.device_count() > 1

    def over_own_mesh(self) -> Call:
        """The call with the mesh that its program names, which is traced to find it."""
        with contextlib.suppress(Exception):  # what is wrong with it is said where it is traced
            if self.may_have_own_mesh:
                program = jax.jit(self.fun).trace(*self.args).jaxpr
                return replace(self, own_mesh=next(_jax.meshes_in(program), None))
        return self

    @functools.cached_property
    def _moved(self) -> tuple[Any, ...]:
        """The arguments where ``in_shardings`` puts them."""
        if self.in_shardings is None:
            return self.args
        return _over(self.in_shardings, self.args, "in_shardings", _at)

    @functools.cached_property
    def _has_places(self) -> bool:
        return any(committed_sharding(leaf) for leaf in jax.tree.leaves(self._moved))

    @functools.cached_property
    def _mesh(self) -> Mesh | None:
        """The mesh that is set, else that of the results."""
        if mesh := _jax.current_mesh():
            return mesh
        named = jax.tree.leaves(self.out_shardings, is_leaf=_is_place)
        meshes = (s.mesh for s in named if isinstance(s, NamedSharding))
        return next((m for m in meshes if isinstance(m, Mesh)), None)

    def abstract(self, target: Target) -> Call:
        """The call with shapes in place of arrays, placed on a target.

        Raises:
            ArgumentError: An argument is nothing that JAX traces.
        """
        out = _places(self.out_shardings, target.sharding)
        args = target.abstract(self.placed)
        return replace(self, args=args, in_shardings=None, out_shardings=out, finish=_as_they_are)

    def donated(self, donate: Sequence[int | str]) -> tuple[int, ...]:
        """Where among ``args`` the donated arguments stand."""
        return tuple(
            i
            for i, (number, name) in enumerate(zip(self.numbers, self.names, strict=True))
            if name in donate or (number is not None and number in donate)
        )

    def _check_traceable(self) -> None:
        """Refuse arguments that JAX cannot trace, by the user's names."""
        for name, arg in zip(self.names, self.args, strict=True):
            for path, leaf in jax.tree.leaves_with_path(arg):
                if not _is_traceable(leaf):
                    where = f"{name}{jax.tree_util.keystr(path)}"
                    raise ArgumentError(
                        f"The argument {where} is a {type(leaf).__name__} ({leaf!r:.40}), which "
                        "JAX cannot trace: expected arrays, numbers, or trees of them. If the "
                        f"program depends on it, make it static: static_argnames={name!r}."
                    )


def call_of(step: Jitted, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """A call ``step(*args, **kwargs)``.

    Raises:
        TypeError: The step does not take these arguments.
        ArgumentError: A static argument has no hash, or all are given as one tuple.
    """
    _refuse_packed(step, args, kwargs)
    args, kwargs = _bound(step, args, kwargs)
    fixed = _fixed(step, args, kwargs)
    positions = [i for i in range(len(args)) if i not in fixed]
    names = sorted(name for name in kwargs if name not in fixed)
    # no arrays: plans keep `fun`
    count, by_name, before = len(args), tuple(kwargs), len(step.first)

    def fun(*values: Any) -> Any:
        first, rest = values[:before], values[before:]
        filled = dict(zip([*positions, *names], rest, strict=True)) | fixed
        named = {name: filled[name] for name in by_name}
        return step.fun(*first, *map(filled.get, range(count)), **named)

    fun.__name__ = step.name  # what profiles and dumps call the program
    traced = (*step.first, *(args[i] for i in positions), *(kwargs[name] for name in names))
    own = step.first_names
    call = Call(
        fun,
        traced,
        (*(None for _ in own), *positions, *(None for _ in names)),
        (*own, *(_name(step, i) for i in positions), *names),
        tuple((key, Constant(value)) for key, value in fixed.items()),
        _in_shardings(step, len(own), len(positions), len(names)),
        step.out_shardings,
    )
    if "equinox" in sys.modules:
        from jdelta._src.regions.frameworks import equinox

        call = equinox.without_constants(call, everywhere=step.filtered)
    if "flax.nnx" in sys.modules:
        from jdelta._src.regions.frameworks import flax

        call = flax.without_objects(call)
    return call


def _bound(
    step: Jitted, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments by position as far as the step takes them so."""
    if not kwargs or not step.parameters:
        return args, kwargs
    bound = step.signature.bind(*args, **kwargs)
    return bound.args, bound.kwargs


def _refuse_packed(step: Jitted, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a tuple of all arguments in the place of the first, where the step takes more.

    Raises:
        ArgumentError: It is one: the step takes its parts, and does not take it.
    """
    is_one = len(args) == 1 and isinstance(args[0], (tuple, list)) and not kwargs
    if is_one and len(step.parameters) > 1 and step.binds(*args[0]) and not step.binds(*args):
        kind, names = type(args[0]).__name__, ", ".join(step.parameters)
        raise ArgumentError(
            f"{step.name} takes {names}, and was given one argument, a {kind} of {len(args[0])}, "
            f"for {_name(step, 0)}. If that holds all of them, give each by itself."
        )


def _name(step: Jitted, number: int) -> str:
    """What the user calls an argument given by position."""
    names = step.positions
    return names[number] if number < len(names) else f"args[{number}]"


def _fixed(step: Jitted, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """The static arguments of a call."""
    fixed: dict[int | str, Any] = {i: x for i, x in enumerate(args) if i in step.static}
    fixed |= {name: x for name, x in kwargs.items() if name in step.static}
    for key, value in fixed.items():
        try:
            hash(value)
        except TypeError as error:
            name = _name(step, key) if isinstance(key, int) else key
            raise ArgumentError(
                f"{step.name}: the static argument {name} is a {type(value).__name__}, which has "
                "no hash. Give static arguments a type that has one (a frozen dataclass, a tuple), "
                "or close over it: functools.partial."
            ) from error
    return fixed


def _is_traceable(leaf: Any) -> bool:
    """Whether a leaf has a type that JAX traces."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return True
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _in_shardings(step: Jitted, own: int, count: int, named: int) -> tuple[Any, ...] | None:
    """Where each traced argument is to be.

    Raises:
        ArgumentError: Some are given by name, which no ``in_shardings`` says anything about.
    """
    places = step.in_shardings
    if places is None:
        return None
    if named:
        raise ArgumentError(
            f"in_shardings says where arguments given by position are to be; {step.name} was also "
            "given some by name. Give them by position."
        )
    if not isinstance(places, (tuple, list)):
        return (*(None for _ in range(own)), *(places for _ in range(count)))
    if len(places) != count:
        raise ArgumentError(
            f"in_shardings has {len(places)} parts, but {step.name} was given {count} arguments "
            "that are not static. Give one for each, or one sharding for all."
        )
    return (*(None for _ in range(own)), *places)


def _places(tree: Any, place: Callable[[Sharding], Sharding]) -> Any:
    """A tree of shardings, each placed; None where nothing is said."""
    return jax.tree.map(lambda s: s and place(_sharding(s)), tree, is_leaf=_is_place)


def _over(tree: Any, values: Any, option: str, change: Callable[[Any, Any], Any]) -> Any:
    """``values`` changed leaf by leaf, as a tree of shardings, or the beginning of one, says."""

    def under(place: Any, part: Any) -> Any:
        if place is None:
            return part
        sharding = _sharding(place)
        return jax.tree.map(lambda leaf: change(leaf, sharding), part)

    try:
        return jax.tree.map(under, tuple(tree), values, is_leaf=_is_place)
    except ValueError as error:
        raise ArgumentError(f"{option} does not fit the arguments: {error}") from error


def _is_place(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (Sharding, PartitionSpec))


def _sharding(place: Any) -> Sharding:
    """The sharding that is meant; a mere specification is for the mesh that is set.

    Raises:
        ArgumentError: There is no mesh, or it is no sharding.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(place, PartitionSpec) and not mesh.empty:
        return NamedSharding(mesh, place)
    if isinstance(place, Sharding):
        return place
    raise ArgumentError(
        f"in_shardings and out_shardings: expected a sharding, got {place!r}. Write "
        "NamedSharding(mesh, spec), or set the mesh (jax.set_mesh) for a mere PartitionSpec."
    )


def _at(leaf: Any, sharding: Sharding) -> Any:
    """The shape of an argument at another place."""
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def _kind(leaf: Any) -> Any:
    """What of a leaf a program depends on."""
    if _jax.is_computed(leaf):  # most are, at each call of a step
        return leaf.shape, leaf.dtype, leaf.weak_type, False, _place(leaf.sharding)
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jax.typeof(leaf)  # as the array that a counter of Python's becomes after one step
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf)
    weak = getattr(leaf, "weak_type", False)
    has_place = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    place = _place(getattr(leaf, "sharding", None)) if has_place else None
    return leaf.shape, leaf.dtype, weak, _jax.is_ref(leaf), place


@functools.lru_cache
def _place(sharding: Sharding | None) -> Any:
    """Where an array lives: on one device it is all the same how that is said."""
    if sharding is None or len(sharding.device_set) > 1:
        return sharding
    (device,) = sharding.device_set
    kind = sharding.memory_kind or device.default_memory().kind
    here = jax.local_devices()[0]
    # Arrays without a place of their own go to the first device.
    return None if (device, kind) == (here, here.default_memory().kind) else (device, kind)


def described(call: Call) -> tuple[str, ...]:
    """A line for each leaf of the arguments: ``state['w']: float32[8,64] P(data) over data=4``.

    Args:
        call: A call with arguments placed on a target.
    """
    return tuple(
        f"{name}{jax.tree_util.keystr(path)}: {_described(leaf)}"
        for name, arg in zip(call.names, call.args, strict=True)
        for path, leaf in jax.tree.leaves_with_path(arg)
    )


def _described(leaf: Any) -> str:
    if isinstance(leaf, (bool, int, float, complex)):
        return format_array(jax.typeof(leaf).dtype, ())
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return "ref " * _jax.is_ref(leaf) + format_array(leaf.dtype, leaf.shape) + _cut(leaf)


def _cut(leaf: Any) -> str:
    """How an array is cut over devices, and its memory if that is not the device's own.

    The same for all ways to say the same: mesh axes of one device, and dimensions at the end that
    are not cut, are left out.
    """
    sharding = getattr(leaf, "sharding", None)
    where = " in host memory" if is_on_host(leaf) else ""
    if sharding is None or len(sharding.device_set) == 1:
        return where
    if not isinstance(sharding, NamedSharding):
        return f" {sharding}"
    mesh = sharding.mesh
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    types = {name: "" if kinds[name] is AxisType.Auto else f" {kinds[name].name}" for name in sizes}
    cuts = [_axes(entry, sizes) for entry in sharding.spec]
    while cuts and cuts[-1] == "None":
        cuts.pop()
    over = ", ".join(f"{name}={size}{types[name]}" for name, size in sizes.items())
    return f" P({', '.join(cuts)}) over {over}{where}"


def _axes(entry: Any, sizes: Mapping[str, int]) -> str:
    """The mesh axes that a dimension is cut over, those of one device left out."""
    axes = [axis for axis in several(() if entry is None else entry) if axis in sizes]
    return axes[0] if len(axes) == 1 else f"({', '.join(axes)})" if axes else "None"


def _changed(path: str, expected: str | None, came: str | None) -> str:
    """How one leaf of the arguments differs; None where it is not there."""
    if came is None:
        return f"{path} is missing, expected {expected}"
    if expected is None:
        return f"{path} was not there, came {came}"
    return f"{path}: expected {expected}, came {came}"


def arguments_of(paths: Iterable[str]) -> list[str]:
    """The names of the arguments that lines of `described`, or paths in arguments, begin with."""
    return sorted({name[0] for path in paths if (name := re.match(r"\w+", path))})


def difference(planned: Sequence[str], actual: Sequence[str]) -> str | None:
    """How arguments differ from those that a plan was made for; None if they do not."""
    expected, came = (dict(line.split(": ", 1) for line in lines) for lines in (planned, actual))
    changed = [
        _changed(path, expected.get(path), came.get(path))
        for path in dict.fromkeys([*expected, *came])
        if expected.get(path) != came.get(path)
    ]
    return format_some(changed, 4, "; ") if changed else None
