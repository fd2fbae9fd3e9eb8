"""``jdelta.remat``: marks a function or a Flax module class as a region."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from jdelta._src.regions.region import RegionPolicy, region

T = TypeVar("T", bound=Callable[..., Any])


@overload
def remat(fun: T, /) -> T: ...
@overload
def remat(
    *,
    policy: RegionPolicy | None = None,
    name: str | None = None,
    prevent_cse: bool | None = None,
) -> Callable[[T], T]: ...
@overload
def remat(
    fun: T,
    /,
    *,
    policy: RegionPolicy | None = None,
    name: str | None = None,
    prevent_cse: bool | None = None,
) -> T: ...
def remat(
    fun: Any = None,
    /,
    *,
    policy: RegionPolicy | None = None,
    name: str | None = None,
    prevent_cse: bool | None = None,
) -> Any:
    """Mark a Flax module class (Linen or NNX) or any function as a region.

    A *region* is a part of the step that is recomputed as one. A function of Haiku's may make
    parameters and draw keys inside. Equinox modules are pytrees: mark the method that computes, or
    a function that is given the module.

    Results, gradients, parameter names and random bits are those of the unmarked function. Under a
    plan (``Plan.jit``, ``jdelta.jit`` or ``policy=``) each value inside is saved, offloaded or
    recomputed as the plan says; without one nothing is rematerialised, the values only carry
    names. A region inside another one belongs to the outer one.

    Args:
        fun: A Linen or NNX module class, whose ``__call__`` is the region, or a function. Leaves of
            its arguments that are not arrays (bools, numbers, strings) stay static.
        policy: A ``jdelta.Plan`` to follow; default: the plan of the step being compiled.
        name: Name of the region in plans; default: the module path of a Linen module, else the
            name of the class or function with a number for each call.
        prevent_cse: As in ``jax.checkpoint``; default: on outside of loops, off inside.

    Returns:
        The function or class with the same signature; without ``fun`` a decorator.

    Raises:
        TypeError: ``fun`` is not a class or function that can be marked.

    Example:
        >>> import jax, jax.numpy as jnp, jdelta
        >>> @jdelta.remat
        ... def layer(w, x):
        ...     return x + jnp.tanh(x @ w)
        >>> def step(w, x):
        ...     return jax.grad(lambda w: jnp.sum(layer(w, layer(w, x))))(w)
        >>> shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> sorted({r.region for r in jdelta.plan(step, None, shape, shape).residuals})
        ['layer_0', 'layer_1']
    """
    if fun is None:
        return functools.partial(remat, policy=policy, name=name, prevent_cse=prevent_cse)
    if isinstance(fun, (type, functools.partial)) and "flax" in sys.modules:
        from jdelta._src.regions.frameworks import flax

        marked = flax.mark_class(fun, policy, name, prevent_cse)
        if marked is not None:
            return marked
    if isinstance(fun, type) or not callable(fun):
        raise TypeError(
            "jdelta.remat marks a function or a Flax module class (linen.Module or nnx.Module); "
            f"got {fun!r}. Of a class of Equinox or Haiku, mark the method that computes: "
            "__call__ = jdelta.remat(__call__)."
        )
    return _function(fun, policy, name, prevent_cse)


def _name_of(fun: Callable[..., Any]) -> str:
    """The function's own name; that of its class for what is called ``__call__``."""
    name = getattr(fun, "__name__", type(fun).__name__).strip("<>")
    return fun.__qualname__.split(".")[-2] if name == "__call__" else name


def _function(
    fun: Callable[..., Any],
    policy: RegionPolicy | None,
    name: str | None,
    prevent_cse: bool | None,
) -> Callable[..., Any]:
    base = name or _name_of(fun)
    marked = region(fun, base, policy, prevent_cse)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "flax.nnx" in sys.modules:
            from jdelta._src.regions.frameworks import flax

            if flax.has_nnx_state((args, kwargs)):
                return flax.call_nnx(fun, base, policy, prevent_cse, args, kwargs)
        if "haiku" in sys.modules:
            from jdelta._src.regions.frameworks import haiku

            if haiku.inside_transform():
                return haiku.call(fun, base, policy, prevent_cse, args, kwargs)
        return marked(*args, **kwargs)

    return call
