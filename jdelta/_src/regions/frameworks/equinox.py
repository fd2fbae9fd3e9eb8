"""Equinox modules as arguments and results of a step, as ``eqx.filter_jit`` takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax

from jdelta._src.program.constants import Constant, unwrapped
from jdelta._src.regions.frameworks.step_call import C


def is_module(leaf: Any) -> bool:
    """Whether a value is an Equinox module, a bound method of one included."""
    return isinstance(leaf, eqx.Module)


def filter_jitted(step: Callable[..., Any]) -> tuple[Callable[..., Any], bool, bool] | None:
    """What ``eqx.filter_jit`` made a step of, and whether it donates the first and other arguments.

    None for what it has not made.
    """
    if type(step).__name__ != "_JitWrapper" or not is_module(step):
        return None
    wrapped: Any = step
    return wrapped.__wrapped__, wrapped.donate_first, wrapped.donate_rest


def without_constants(call: C, *, everywhere: bool) -> C:
    """The call with what is no array in its modules as constants, in arguments and in results.

    Args:
        call: The call.
        everywhere: Whether all arguments are taken so, as by a step under ``eqx.filter_jit``; else
            the modules among them.
    """
    is_whole = (lambda _: True) if everywhere else is_module
    args = tuple(_filtered(arg, is_whole) for arg in call.args)
    if jax.tree.structure(args) == jax.tree.structure(call.args):
        return call

    def fun(*args: Any) -> Any:
        return _filtered(call.fun(*unwrapped(args)), lambda _: True)

    return replace(call, fun=fun, args=args, finish=lambda results: call.finish(unwrapped(results)))


def _filtered(tree: Any, is_whole: Callable[[Any], bool]) -> Any:
    """The tree with what is no array as constants, in the parts that are ``is_whole``."""
    return jax.tree.map(
        lambda part: jax.tree.map(_kept, part) if is_whole(part) else part, tree, is_leaf=is_whole
    )


def _kept(leaf: Any) -> Any:
    is_array = eqx.is_array(leaf) or isinstance(leaf, (jax.ShapeDtypeStruct, Constant))
    return leaf if is_array or hasattr(leaf, "aval") else Constant(leaf)
