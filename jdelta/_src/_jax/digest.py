"""What a program is, as a digest: equal programs have equal ones in every process.

Everything that makes another program counts: primitives, the parameters of equations, constants by
their bytes, effects, how values are wired. What differs between two traces of one program does not:
source lines, scopes, numbers of variables, addresses in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config
from jax.core import Tracer

from jdelta._src._jax.jaxprs import Eqn, Jaxpr, consts_of, open_jaxpr
from jdelta._src._jax.values import Var, is_var

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.dtype)


def digest(closed: Jaxpr, *beside: object) -> str:
    """The digest of a program, 16 hexadecimal digits.

    Args:
        closed: The program.
        *beside: What else makes it another one, such as how its values are sharded.
    """
    return _hashed(_Digests().program(closed), repr(beside)).hex()[:16]


def names_count() -> contextlib.AbstractContextManager[None]:
    """While open, JAX's cache of executables on disk tells programs apart by their names too.

    Else it gives an executable with the names of whichever equal program was compiled first.
    """
    return config.compilation_cache_include_metadata_in_key(True)


def _hashed(*parts: object) -> bytes:
    """The digest of parts, each told from the next."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        hasher.update(b"%d:" % len(data))
        hasher.update(data)
    return hasher.digest()


class _Digests:
    """The digests of one program's parts, those that occur more than once made once."""

    def __init__(self):
        self._known: dict[int, tuple[object, Any]] = {}  # keeps the object, so that ids stay

    def program(self, closed: Jaxpr) -> bytes:
        """A jaxpr with its constants."""
        return self._once(closed, self._program)

    def _once(self, part: Any, make: Any) -> Any:
        if id(part) not in self._known:
            self._known[id(part)] = part, make(part)
        return self._known[id(part)][1]

    def _program(self, closed: Jaxpr) -> bytes:
        inner = open_jaxpr(closed)
        numbers: dict[Var, int] = {}

        def new(variables: Sequence[Var]) -> list[str]:
            numbers.update((v, len(numbers) + i) for i, v in enumerate(variables))
            return [self._once(v.aval, _aval) for v in variables]

        def read(atom: Any) -> str:
            if is_var(atom):
                return f"{numbers[atom]}"
            return f"={atom.val!r} {_aval(atom.aval)}" if _is_scalar(atom.val) else self._hex(atom)

        parts: list[object] = [*new(inner.constvars), "in", *new(inner.invars)]
        parts += map(self.value, consts_of(closed))
        for eqn in inner.eqns:
            parts += ("eqn", *map(read, eqn.invars), *new(eqn.outvars), self._equation(eqn))
        return _hashed(*parts, "out", *map(read, inner.outvars), _texts(inner.effects))

    def _hex(self, literal: Any) -> str:
        return self.value(literal.val).hex()

    def _equation(self, eqn: Eqn) -> bytes:
        """Its primitive, parameters and effects, and the settings that it was traced under."""
        settings = getattr(eqn, "ctx", None)
        under = [str(getattr(settings, name, "")) for name in ("compute_type", "xla_metadata")]
        params = (
            part for name in sorted(eqn.params) for part in (name, self.value(eqn.params[name]))
        )
        return _hashed(eqn.primitive.name, *params, _texts(eqn.effects), *under)

    def value(self, value: Any) -> bytes:
        """A parameter or a constant."""
        if hasattr(value, "eqns"):
            return self.program(value)
        if hasattr(value, "__array__") and hasattr(value, "dtype"):
            return self._once(value, _array)
        if isinstance(value, _SCALARS):
            return _hashed(type(value).__name__, repr(value))
        if isinstance(value, enum.Enum):
            return _hashed(_name(type(value)), value.name)
        if isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
            return _hashed(*_mesh(value))
        if isinstance(value, jax.sharding.Sharding):
            return _sharding(value)
        return self._composed(value)

    def _composed(self, value: Any) -> bytes:
        """What is made of other values, else what it says of itself."""
        if isinstance(value, Mapping):
            rows = sorted((self.value(k), self.value(v)) for k, v in value.items())
            return _hashed("mapping", *(part for row in rows for part in row))
        if isinstance(value, (tuple, list)):
            return _hashed(_name(type(value)), *map(self.value, value))
        if isinstance(value, (set, frozenset)):
            return _hashed("set", *sorted(map(self.value, value)))
        if isinstance(value, functools.partial):
            return _hashed("partial", *map(self.value, (value.func, value.args, value.keywords)))
        if callable(getattr(value, "call_wrapped", None)):  # a function as JAX wraps it
            return self.value(value.f)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value) if f.compare]
            fields = (self.value(getattr(value, name, None)) for name in names)
            return _hashed(_name(type(value)), *fields)
        return _callable(value) if callable(value) else _hashed(_name(type(value)), _text(value))


def _callable(fun: Any) -> bytes:
    """A function by its name and its code: what it closes over may change between traces."""
    code = getattr(fun, "__code__", None)
    said = (code.co_code, code.co_names) if code else (b"", ())
    return _hashed(_name(fun if hasattr(fun, "__qualname__") else type(fun)), *said)


def _array(value: Any) -> bytes:
    """An array by its bytes; one that is traced, or not all on this process, by its type."""
    dtype = value.dtype
    head = value.shape, str(dtype), getattr(value, "weak_type", False)
    if isinstance(value, Tracer):
        return _hashed(*head)
    if isinstance(value, jax.Array):
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if not value.is_fully_addressable:
            return _hashed(*head)
    data = np.ascontiguousarray(np.asarray(value))
    if data.dtype == object:
        return _hashed(*head, *map(_text, data.ravel()))
    return _hashed(*head, hashlib.blake2b(data.reshape(-1).view(np.uint8).data).digest())


def _aval(aval: Any) -> str:
    """The type of a value: the numbers in it, and where it is."""
    names = ("shape", "dtype", "weak_type", "memory_space")
    said = [type(aval).__name__, *(_text(getattr(aval, name, "")) for name in names)]
    inner = getattr(aval, "inner_aval", None)  # of a mutable reference
    spec = getattr(getattr(aval, "sharding", None), "spec", "")
    return " ".join([*said, _text(spec), _aval(inner) if inner is not None else ""])


def _sharding(sharding: jax.sharding.Sharding) -> bytes:
    """How it cuts, not over which devices: a plan is made for others than those that train."""
    kind = type(sharding).__name__, str(sharding.memory_kind)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _hashed(*kind, *_mesh(sharding.mesh), str(sharding.spec))
    return _hashed(*kind)


def _mesh(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> tuple[str, ...]:
    return "mesh", str(tuple(mesh.shape.items())), str(mesh.axis_types)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def _name(named: Any) -> str:
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"


def _text(value: object) -> str:
    """What a value says of itself, but for where it is in memory."""
    return _ADDRESS.sub("", str(value))


def _texts(values: Any) -> str:
    return " ".join(sorted(map(_text, values)))
