"""Flax modules as regions: Linen through a lifted transform, NNX through its state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.core import lift

from jdelta._src.errors import ArgumentError
from jdelta._src.program.constants import Constant
from jdelta._src.regions.frameworks.step_call import C
from jdelta._src.regions.region import RegionPolicy, region


def mark_class(
    fun: Any, policy: RegionPolicy | None, name: str | None, prevent_cse: bool | None
) -> Any:
    """The module class with its ``__call__`` as a region; None for what is no Flax module class."""
    inner = fun.func if isinstance(fun, functools.partial) else fun
    if not isinstance(inner, type):
        return None
    if issubclass(inner, nn.Module):
        return _linen(fun, policy, name, prevent_cse)
    if issubclass(inner, nnx.Module):
        return _nnx(fun, policy, name, prevent_cse)
    return None


def _linen(
    cls: Any, policy: RegionPolicy | None, name: str | None, prevent_cse: bool | None
) -> Any:
    def transform(fn: Callable[..., Any]) -> Callable[..., Any]:
        def lifted(scopes: Any, *args: Any, **kwargs: Any) -> Any:
            own = scopes[-1]  # scopes of modules given as attributes or arguments come first
            base = name or "/".join(own.path) or cls_name

            def packed(
                scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, args: Any, kwargs: Any
            ) -> Any:
                def pure(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
                    inner = scope_fn(variables, rngs)
                    return fn(inner, *args, **kwargs), repack_fn(inner)

                return region(pure, base, policy, prevent_cse)(variables, rngs, args, kwargs)

            run = lift.pack(packed, (True,), (True,), (True,), name="remat")
            return run(scopes, args, kwargs)

        return lifted

    cls_name = _name_of(cls)
    return _renamed(nn.transforms.lift_transform(transform, cls), cls)


def _nnx(cls: Any, policy: RegionPolicy | None, name: str | None, prevent_cse: bool | None) -> Any:
    base = name or _name_of(cls)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call_nnx(cls.__call__, base, policy, prevent_cse, (self, *args), kwargs)

    functools.update_wrapper(call, cls.__call__)
    return _renamed(type(cls)(cls.__name__, (cls,), {"__call__": call}), cls)


def has_nnx_state(arguments: Any) -> bool:
    """Whether NNX objects, whose state a call may change, are among the arguments."""
    leaves = jax.tree.leaves(arguments, is_leaf=_is_nnx)
    return any(_is_nnx(leaf) for leaf in leaves)


def bound(step: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """A step and the NNX objects that it is bound to; None where it is bound to none.

    Bound by ``functools.partial``, by ``nnx.cached_partial``, or as a method to its object.

    Raises:
        ArgumentError: They are bound by name.
    """
    if isinstance(step, MethodType):
        return (step.__func__, (step.__self__,)) if has_nnx_state(step.__self__) else None
    if isinstance(step, functools.partial):
        for name, value in step.keywords.items():
            if has_nnx_state(value):
                raise ArgumentError(
                    f"functools.partial binds {name}, which holds NNX objects, by name: bind it by "
                    f"position, functools.partial(step, {name})."
                )
        plain = functools.partial(step.func, **step.keywords) if step.keywords else step.func
        return (plain, step.args) if has_nnx_state(step.args) else None
    if isinstance(step, FunctionType) and step.__globals__.get("__name__") == nnx.graphlib.__name__:
        closed = inspect.getclosurevars(step).nonlocals
        return (closed["f"], closed["cached_args"]) if "cached_args" in closed else None
    return None


def _is_nnx(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def _is_state(leaf: Any) -> bool:
    return isinstance(leaf, nnx.State)


def call_nnx(
    fun: Callable[..., Any],
    base: str,
    policy: RegionPolicy | None,
    prevent_cse: bool | None,
    args: Any,
    kwargs: Any,
) -> Any:
    """Call a function of NNX objects as a region; changes of state come out of it."""
    flat, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_nnx)
    objects = [leaf for leaf in flat if _is_nnx(leaf)]
    graphdef, state = nnx.split(objects)
    leaves, state_tree = jax.tree.flatten(state)
    changed: list[int] = []
    outer: list[Any] = []

    def pure(rest: Any, *parts: Any) -> Any:
        state = _state_of(parts)
        leaves = jax.tree.leaves(state)
        merged = nnx.merge(graphdef, state)
        nodes, others = iter(merged), iter(rest)
        filled = [next(nodes) if _is_nnx(leaf) else next(others) for leaf in flat]
        args, kwargs = jax.tree.unflatten(tree, filled)
        out = fun(*args, **kwargs)
        after = nnx.state(merged)
        new, new_tree = jax.tree.flatten(after)
        same = new_tree == state_tree
        changed[:] = [i for i, x in enumerate(new) if not (same and x is leaves[i])]
        outer[:] = [new_tree]
        return out, [new[i] for i in changed]

    rest = [leaf for leaf in flat if not _is_nnx(leaf)]
    parts = _parts(state, len(objects))
    out, values = region(pure, base, policy, prevent_cse)(rest, *parts)
    if changed:
        new_leaves: list[Any] = list(leaves) if outer[0] == state_tree else [None] * len(changed)
        for i, value in zip(changed, values, strict=True):
            new_leaves[i] = value
        nnx.update(objects, jax.tree.unflatten(outer[0], new_leaves))
    return out


def without_objects(call: C) -> C:
    """The call of a step on the state of NNX objects: their new state comes out, as in ``nnx.jit``.

    Objects that several arguments share are split together, and stay shared. An object that the
    step was given and returns is the one that went in. A ``State`` is no object: steps that are
    given one return the new one.
    """
    flat, tree = jax.tree.flatten(call.args, is_leaf=lambda x: _is_nnx(x) or _is_state(x))
    objects = [leaf for leaf in flat if _is_nnx(leaf)]
    if not objects:
        return call
    with nnx.update_context("jdelta"):  # takes what nnx.cached_partial has laid out for nnx.jit
        graphdef, state = nnx.split(objects)
    parts = iter(_parts(state, len(objects)))
    args = jax.tree.unflatten(tree, [next(parts) if _is_nnx(leaf) else leaf for leaf in flat])
    places = [i for i, leaf in enumerate(flat) if _is_nnx(leaf)]  # no arrays: plans keep `fun`

    def fun(*args: Any) -> Any:
        leaves = tree.flatten_up_to(args)
        merged = nnx.merge(graphdef, _state_of([leaves[i] for i in places]))
        for i, merged_object in zip(places, merged, strict=True):
            leaves[i] = merged_object
        placeholders = {id(node): _Given(path) for path, node in _nodes(merged)}
        out = call.fun(*jax.tree.unflatten(tree, leaves))
        out = jax.tree.map(lambda leaf: placeholders.get(id(leaf), leaf), out, is_leaf=_is_nnx)
        return out, _parts(nnx.state(merged), len(places))

    def finish(results: Any) -> Any:
        out, after = results
        nnx.update(objects, _state_of(after))
        own = dict(_nodes(objects))
        out = jax.tree.map(
            lambda leaf: own[leaf.path] if isinstance(leaf, _Given) else leaf,
            out,
            is_leaf=lambda leaf: isinstance(leaf, _Given),
        )
        return call.finish(out)

    out = None if call.out_shardings is None else (call.out_shardings, None)
    static = call.static, Constant(graphdef)
    return replace(call, fun=fun, args=args, static=static, out_shardings=out, finish=finish)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Given:
    """In the results of a step, an object that it was given.

    Attributes:
        path: From the list of all such objects: ``(0, "layers", 2)``.
    """

    path: tuple[Any, ...]


def _nodes(objects: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The NNX objects in some, with their paths."""
    return ((path, node) for path, node in nnx.iter_graph(objects) if _is_nnx(node))


def _parts(state: Any, count: int) -> list[Any]:
    """The state of each of several objects; what two of them share belongs to the first."""
    return [state.get(i) for i in range(count)]


def _state_of(parts: Sequence[Any]) -> Any:
    return nnx.State({i: part for i, part in enumerate(parts) if part is not None})


def _name_of(cls: Any) -> str:
    return (cls.func if isinstance(cls, functools.partial) else cls).__name__


def _renamed(marked: Any, cls: Any) -> Any:
    """Give the marked class the name of the original, which Flax names parameters by."""
    new = marked.func if isinstance(marked, functools.partial) else marked
    old = cls.func if isinstance(cls, functools.partial) else cls
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(new, attribute, getattr(old, attribute))
    return marked
