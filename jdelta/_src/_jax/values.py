"""Arrays, and the variables that stand for them in programs: what their types say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax._src.array import ArrayImpl
from jax.extend import core


class Atom(Protocol):
    """What an equation reads: a variable or a literal; ``b`` and ``2.0:f32[]`` of ``mul b 2.0``.

    Attributes:
        aval: Its type: ``f32[8,64]``.
        val: Of a literal, its value: ``2.0``. A variable has none.
    """

    @property
    def aval(self) -> Any: ...

    @property
    def val(self) -> Any: ...

    def __hash__(self) -> int: ...


Var: TypeAlias = Atom
"""A variable: what an equation makes, or a program is given; never a literal."""

_gensym: Callable[[], Any] = core.gensym
new_var: Callable[[Any], Var] = _gensym()


_NO_VARIABLES = frozenset({core.Literal, core.DropVar})


def is_var(atom: Atom) -> bool:
    """Whether an atom is a variable that something reads or writes, not a literal."""
    return type(atom) not in _NO_VARIABLES


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array (or tracer), and not a Python value that stays static."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_computed(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX's with its numbers: no tracer, no shape, no mutable ref."""
    return type(leaf) is ArrayImpl


def is_complex(var: Var) -> bool:
    """Whether a variable holds complex numbers."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, np.complexfloating)


def is_inexact(var: Var) -> bool:
    """Whether a variable holds real or complex numbers."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, np.inexact)


def is_real(var: Var) -> bool:
    """Whether a variable holds real numbers of floating point."""
    return is_inexact(var) and not is_complex(var)


def bytes_of(var: Var) -> int:
    """Bytes of a value; zero for keys and tokens."""
    dtype = getattr(var.aval, "dtype", None)
    return var.aval.size * dtype.itemsize if isinstance(dtype, np.dtype) else 0


def on_host(aval: Any) -> bool:
    """Whether a value lives in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def varying_axes(x: Any) -> frozenset[str]:
    """The axes of a ``shard_map`` that a value varies over, where it checks that."""
    return jax.typeof(x).mat.varying


def has_explicit_axes(aval: Any) -> bool:
    """Whether the type of a value says how it is cut over the axes of a mesh."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and jax.sharding.AxisType.Explicit in (mesh.axis_types or ())
