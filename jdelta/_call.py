"""Calls of a step, in all forms that ``jax.jit`` takes, as calls of a pure function by position."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from jdelta import _jax
from jdelta._format import format_array, format_some
from jdelta._target import Target, is_on_host

Static = tuple[int | str, ...]
"""Arguments that are constants of the program: by number or by name."""


def _as_they_are(results: Any) -> Any:
    return results


@dataclass(frozen=True)
class Call:
    """One call of a step.

    Attributes:
        fun: A pure function of ``args``.
        args: What is traced: arguments given by position, then those given by name.
        numbers: The number of each in the signature of the step; None where it has only a name.
        static: Everything else that the program depends on, hashable.
        finish: From what ``fun`` returns to what the step does.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    numbers: tuple[int | None, ...]
    static: Any
    finish: Callable[[Any], Any] = _as_they_are

    @property
    def key(self) -> Any:
        """What a program is made for: structure, shapes, dtypes and places of the arguments."""
        leaves, tree = jax.tree.flatten(self.args)
        return tree, tuple(map(_kind, leaves)), self.numbers, self.static

    def abstract(self, target: Target) -> Call:
        """The call with shapes in place of arrays, placed on a target."""
        return replace(self, args=target.abstract(self.args), finish=_as_they_are)

    def donated(self, donate_argnums: Sequence[int]) -> tuple[int, ...]:
        """Where among ``args`` the donated arguments stand."""
        return tuple(i for i, number in enumerate(self.numbers) if number in donate_argnums)


def call_of(step: Callable[..., Any], static: Static, args: Sequence[Any], given: Any) -> Call:
    """A call ``step(*args, **given)``.

    Raises:
        TypeError: The step does not take these arguments, or a static one is not hashable.
    """
    args, given = _bound(step, args, given)
    constants = _constants(step, static)
    fixed: dict[int | str, Any] = {i: x for i, x in enumerate(args) if i in constants}
    fixed |= {name: x for name, x in given.items() if name in constants}
    hash(tuple(fixed.values()))
    positions = [i for i in range(len(args)) if i not in fixed]
    names = sorted(name for name in given if name not in fixed)
    count, by_name = len(args), tuple(given)  # no arrays: plans keep the function

    def fun(*values: Any) -> Any:
        filled = dict(zip([*positions, *names], values, strict=True)) | fixed
        return step(*map(filled.get, range(count)), **{name: filled[name] for name in by_name})

    traced = (*(args[i] for i in positions), *(given[name] for name in names))
    numbers = (*positions, *(None for _ in names))
    call = Call(fun, traced, numbers, tuple(fixed.items()))
    if "flax.nnx" in sys.modules:
        from jdelta import flax

        return flax.without_objects(call)
    return call


def several(given: Any) -> tuple[Any, ...]:
    """Numbers or names of arguments, where one alone may be given."""
    return (given,) if isinstance(given, (int, str)) else tuple(given)


def _bound(
    step: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments by position as far as the step takes them so."""
    if not given:
        return args, given
    try:
        signature = inspect.signature(step)
    except ValueError:  # some callables have none
        return args, given
    bound = signature.bind(*args, **given)
    return bound.args, bound.kwargs


def _constants(step: Callable[..., Any], static: Static) -> set[int | str]:
    """Numbers and names of the static arguments, each by both where it has both."""
    if not static:
        return set()
    try:
        names = list(inspect.signature(step).parameters)
    except ValueError:
        names = []
    numbers = {n % len(names) if n < 0 and names else n for n in static if isinstance(n, int)}
    by_number: set[int | str] = {names[n] for n in numbers if n < len(names)}
    by_name = {names.index(n) for n in static if n in names}
    return {*static, *numbers, *by_number, *by_name}


def _kind(leaf: Any) -> Any:
    """What of a leaf a program depends on."""
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jax.typeof(leaf)  # as the array that a counter of Python's becomes after one step
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf)
    weak = getattr(leaf, "weak_type", False)
    return leaf.shape, leaf.dtype, weak, _jax.is_ref(leaf), _place(leaf)


def _place(leaf: Any) -> Any:
    """Where an array lives: on one device it is all the same how that is said."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or sharding is None:
        return None
    if len(sharding.device_set) > 1:
        return sharding
    (device,) = sharding.device_set
    kind = sharding.memory_kind or device.default_memory().kind
    here = jax.local_devices()[0]
    # Arrays without a place of their own go to the first device.
    return None if (device, kind) == (here, here.default_memory().kind) else (device, kind)


def described(args: Any) -> tuple[str, ...]:
    """A line for each leaf of the arguments: its path, dtype and shape, and how it is cut.

    Args:
        args: Arguments placed on a target.
    """
    return tuple(
        f"args{jax.tree_util.keystr(path)}: {_described(leaf)}"
        for path, leaf in jax.tree.leaves_with_path(args)
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


def difference(planned: Sequence[str], given: Sequence[str]) -> str | None:
    """How arguments differ from those that a plan was made for; None if they do not."""
    expected, came = (dict(line.split(": ", 1) for line in lines) for lines in (planned, given))
    changed = [
        f"{path}: expected {expected.get(path, 'none')}, came {came.get(path, 'none')}"
        for path in dict.fromkeys([*expected, *came])
        if expected.get(path) != came.get(path)
    ]
    return format_some(changed, 4, "; ") if changed else None
