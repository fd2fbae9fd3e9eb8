"""How the values of a program are sharded, as XLA's own propagation (Shardy) assigns it.

With automatic axes only arguments and constraints have shardings when a step is traced; the rest is
found while it is compiled. The same propagation is run here on the step's lowered program, in which
a call without results reads every value. Nothing is compiled for that, and no
device is needed. Every contact with the dialects of JAX's compiler is in this file.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var
from jdelta._src.errors import TargetError

_PIPELINE = "builtin.module(sdy-propagation-pipeline)"
_CALL, _SHARDING = "jdelta_show", "sdy.sharding"


class Axis(NamedTuple):
    """A mesh axis, or a part of one.

    Attributes:
        name: Its name; a part's says which part.
        size: Devices along it.
    """

    name: str
    size: int


Spec: TypeAlias = tuple[tuple[Axis, ...], ...]
"""For each dimension of a value the mesh axes it is sharded over; empty when it is not sharded."""


@dataclass(frozen=True)
class Shardings:
    """How a program's values are sharded.

    Attributes:
        specs: From variables to their specifications; those not sharded may be left out.
        named: From names that ``checkpoint_name`` gave to values to their variables, if these have
            specifications.
        sizes: Devices along each mesh axis of the step.
    """

    specs: Mapping[Var, Spec] = field(default_factory=lambda: MappingProxyType({}))
    named: Mapping[str, Var] = field(default_factory=lambda: MappingProxyType({}))
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def of_one(self, name: str, shape: Sequence[int]) -> Spec:
        """The specification of a named value without the dimensions that ``jax.vmap`` added.

        Args:
            name: The name of a value with a specification.
            shape: Its shape before ``jax.vmap``.
        """
        var = self.named[name]
        spec, batched = self.specs[var], var.aval.shape
        if not spec:
            return ()
        for kept in itertools.combinations(reversed(range(len(batched))), len(shape)):
            dimensions = kept[::-1]  # the last ones first, since most are added in front
            if tuple(batched[i] for i in dimensions) == tuple(shape):
                return _plain(spec[i] for i in dimensions)
        return ()


UNSHARDED = Shardings()


def local_shape(shape: Sequence[int], spec: Spec) -> tuple[int, ...]:
    """The shape of the largest part of a value that one device has."""
    if not spec:
        return tuple(shape)
    return tuple(-(-size // parts(axes)) for size, axes in zip(shape, spec, strict=True))


def parts(axes: Sequence[Axis]) -> int:
    """How many parts axes cut a dimension into."""
    return math.prod(axis.size for axis in axes)


def shardings_of(closed: Jaxpr, args: Any, platform: str) -> Shardings:
    """How a program is sharded for arguments.

    Args:
        closed: The program.
        args: A pytree; its leaves are the program's arguments, with shardings.
        platform: What it is lowered for.

    Raises:
        TargetError: JAX is told to use another partitioner.
    """
    leaves = jax.tree.leaves(args)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    sizes = {name: size for s in shardings for name, size in _mesh_shape(s).items()}
    if math.prod(sizes.values()) == 1:
        return UNSHARDED
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise TargetError(
            "jdelta reads how values are sharded from Shardy, but jax_use_shardy_partitioner is "
            'off. Turn it on: jax.config.update("jax_use_shardy_partitioner", True).'
        )
    program, variables = _numbered(closed)
    traced = jax.jit(functools.partial(_jax.evaluate, program)).trace(*leaves)
    module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    specs: dict[Var, Spec] = {}
    for number, spec in _propagated(module):
        var = variables[number]
        if var not in specs or parts_of(spec) < parts_of(specs[var]):  # a body that is called twice
            specs[var] = spec
    for var, sharding, leaf in zip(_jax.open_jaxpr(closed).invars, shardings, leaves, strict=True):
        specs[var] = _argument_spec(sharding, np.ndim(leaf))
    named = {
        name: eqn.outvars[0]
        for eqn in _jax.equations(closed)
        if (name := _jax.named_value(eqn)) is not None and eqn.outvars[0] in specs
    }
    return Shardings(specs, named, sizes)


def parts_of(spec: Spec) -> int:
    """How many parts a value is cut into."""
    return math.prod(map(parts, spec))


def _mesh_shape(sharding: Any) -> Mapping[str, int]:
    return sharding.mesh.shape if isinstance(sharding, NamedSharding) else {}


def _argument_spec(sharding: Any, rank: int) -> Spec:
    """The specification of an argument."""
    if not isinstance(sharding, NamedSharding):
        return ()
    shape = sharding.mesh.shape
    axes = [() if a is None else a if isinstance(a, tuple) else (a,) for a in sharding.spec]
    axes += [()] * (rank - len(axes))
    return _plain(tuple(Axis(name, shape[name]) for name in names) for names in axes)


# The program that shows its values


@functools.cache
def _template() -> Eqn:
    """A call without results, which no pass removes: it shows a value and leaves it as it is."""

    def show(x: Any) -> None:
        jax.ffi.ffi_call(_CALL, (), has_side_effect=True)(x, number=0)

    (eqn,) = _jax.open_jaxpr(_jax.jaxpr_of(show, np.float32(0))).eqns
    return eqn


def _shown(var: Var, number: int, like: Eqn) -> Eqn:
    """The call for one variable, in the context (meshes, above all) of ``like``."""
    call = _template()
    params: dict[str, Any] = dict(call.params)
    ((name, _),) = params["attributes"]
    params |= {"attributes": ((name, number),), "input_layouts": (tuple(range(var.aval.ndim)),)}
    return like.replace(
        primitive=call.primitive, params=params, invars=[var], outvars=[], effects=call.effects
    )


def _numbered(closed: Jaxpr) -> tuple[Jaxpr, list[Var]]:
    """The program showing every value that it computes, in bodies of loops and calls too.

    Returns:
        The program, and the variable that each number stands for.
    """
    numbers: dict[Var, int] = {}
    done: dict[int, Jaxpr] = {}

    def show(variables: Sequence[Any], like: Eqn) -> list[Eqn]:
        arrays = [v for v in variables if _jax.is_var(v) and _is_array(v)]
        return [_shown(v, numbers.setdefault(v, len(numbers)), like) for v in arrays]

    def body(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in done:
            inner = _jax.open_jaxpr(jaxpr)
            eqns = [one for first in inner.eqns[:1] for one in show(inner.invars, first)]
            for eqn in inner.eqns:
                eqns += [_jax.with_bodies(eqn, body), *show(eqn.outvars, eqn)]
            done[id(jaxpr)] = _jax.with_equations(jaxpr, eqns)
        return done[id(jaxpr)]

    return body(closed), list(numbers)


def _is_array(var: Var) -> bool:
    return isinstance(getattr(var.aval, "dtype", None), np.dtype)


# The module after propagation


def _propagated(module: Any) -> Iterator[tuple[int, Spec]]:
    """The number and the specification of each value of a lowered program."""
    with module.context:
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
        meshes = {
            _text(op, "sym_name"): _axes(op.attributes["mesh"])
            for op in module.body.operations
            if op.name == "sdy.mesh"
        }
        for op in _operations(module.operation):
            if op.name == "stablehlo.custom_call" and _text(op, "call_target_name") == _CALL:
                config = ir.DictAttr(op.attributes["mhlo.backend_config"])
                number: int = ir.IntegerAttr(config["number"]).value
                yield number, _spec(_sharding(op.operands[0]), meshes)


def _sharding(value: Any) -> Any:
    """The sharding of a value; None where it has none."""
    if isinstance(value, ir.BlockArgument):
        return _sharding_of_argument(value.owner.owner.operation, value.arg_number)
    op = value.owner.operation
    if op.name in ("sdy.reshard", "sdy.sharding_constraint"):
        return op.attributes["sharding"]
    key = "out_shardings" if op.name == "sdy.manual_computation" else _SHARDING
    return _of_many(op, value.result_number, key)


def _sharding_of_argument(op: Any, index: int) -> Any:
    """The sharding of an argument of a body."""
    if op.name == "sdy.manual_computation":
        return None  # a part; what is left to automatic axes inside is not read
    if op.name != "func.func":
        return _of_many(op, index)
    if "arg_attrs" not in op.attributes:
        return None
    attributes = ir.DictAttr(op.attributes["arg_attrs"][index])
    return next((entry.attr for entry in attributes if entry.name == _SHARDING), None)


def _of_many(op: Any, index: int, key: str = _SHARDING) -> Any:
    if key not in op.attributes:
        return None
    return sdy.TensorShardingPerValueAttr(op.attributes[key]).shardings[index]


def _spec(sharding: Any, meshes: Mapping[str, Mapping[str, int]]) -> Spec:
    if sharding is None:
        return ()
    sharding = sdy.TensorShardingAttr(sharding)
    mesh = sharding.mesh_or_ref
    is_name = isinstance(mesh, ir.FlatSymbolRefAttr)
    sizes = meshes[ir.FlatSymbolRefAttr(mesh).value] if is_name else _axes(mesh)
    dimensions = map(sdy.DimensionShardingAttr, sharding.dimension_shardings)
    return _plain(
        tuple(_axis(sdy.AxisRefAttr(axis), sizes) for axis in dimension.axes)
        for dimension in dimensions
    )


def _plain(axes: Iterable[tuple[Axis, ...]]) -> Spec:
    """The specification; the empty one where no dimension is sharded."""
    spec = tuple(tuple(axis for axis in one if axis.size > 1) for one in axes)
    return spec if any(spec) else ()


def _text(op: Any, attribute: str) -> str:
    return ir.StringAttr(op.attributes[attribute]).value


def _operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _axes(mesh: Any) -> dict[str, int]:
    return {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(mesh).axes)}


def _axis(axis: Any, sizes: Mapping[str, int]) -> Axis:
    if axis.sub_axis_info is None:
        return Axis(axis.name, sizes[axis.name])
    part = sdy.SubAxisInfoAttr(axis.sub_axis_info)
    return Axis(f"{axis.name}:{part.pre_size}", part.size)
