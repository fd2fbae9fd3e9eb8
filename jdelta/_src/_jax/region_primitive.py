"""The primitive that a region is while nothing has differentiated it, and one in its derivative.

A ``custom_jvp`` in its place would be batched after its rule has run, when a ``custom_vjp`` in the
region is differentiated already, which JAX cannot batch; and ``jax.checkpoint`` with ``jax_remat3``
on, which asks its policy before JVP, would look for names in it in vain. Beside ``_jax`` this is
the only file that touches what moves between versions of JAX.

The other is put on each tangent that leaves a region while a step is recorded. It changes nothing,
and its transpose is asked for only where a cotangent comes back: what no gradient reaches (the
attention weights that a layer returns for a picture, what a metric is computed from) needs nothing
kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax._src.interpreters import remat
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jdelta._src import _jax
from jdelta._src._jax import Jaxpr

JvpRule: TypeAlias = Callable[..., tuple[Sequence[Any], Sequence[Any]]]
"""From primals, those tangents that are not zero, and the number of each one's primal (and the
primitive's parameters) to results and their tangents."""

Shield: TypeAlias = Callable[[Any, str], bool]
"""From a policy and the name of a region to whether recompute there is shielded from CSE."""


def region_primitive(rule: JvpRule, shield: Shield) -> Callable[..., list[Any]]:
    """What binds a new primitive, which evaluates its parameter ``jaxpr``.

    Args:
        rule: Its derivative.
        shield: Asked where ``jax.checkpoint`` goes around it with ``jax_remat3`` on; may refuse
            the policy by raising.
    """
    primitive = core.Primitive(_jax.REGION)
    primitive.multiple_results = True
    primitive.def_impl(_evaluated)
    primitive.def_effectful_abstract_eval(_abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(_evaluated, multiple_results=True))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, rule)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive)
    remat.rules[primitive] = functools.partial(_remat, primitive, shield)
    return primitive.bind


def cotangent_primitive(tell: Callable[..., None]) -> Callable[..., Any]:
    """What binds a new primitive, a linear identity.

    Args:
        tell: Called with the parameters of each that a cotangent has come back through.
    """

    def transposed(cotangent: Any, _: Any, /, **params: Any) -> list[Any]:
        tell(**params)
        return [cotangent]

    def identity(x: Any, **_: Any) -> Any:
        return x

    primitive = core.Primitive(_jax.COTANGENT)
    primitive.def_impl(identity)
    primitive.def_abstract_eval(identity)
    mlir.register_lowering(primitive, mlir.lower_fun(identity, multiple_results=False))
    ad.deflinear2(primitive, transposed)
    batching.defvectorized(primitive)
    return primitive.bind


def _evaluated(*xs: Any, jaxpr: Jaxpr, **_: Any) -> list[Any]:
    return _jax.evaluate(jaxpr, *xs)


def _abstract(*_: Any, jaxpr: Jaxpr, **__: Any) -> Any:
    return list(jaxpr.out_avals), _jax.by_position(_jax.open_jaxpr(jaxpr))


def _jvp(rule: JvpRule, primals: Sequence[Any], tangents: Sequence[Any], /, **params: Any) -> Any:
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    outputs, moved = rule(primals, [tangents[i] for i in moving], moving, **params)
    return outputs, [
        ad.Zero(jax.typeof(x).to_tangent_aval()) if t.dtype == jax.dtypes.float0 else t
        for x, t in zip(outputs, moved, strict=True)
    ]


def _batch(
    primitive: Any, axis: Any, args: Sequence[Any], dims: Sequence[Any], /, **params: Any
) -> tuple[list[Any], list[int]]:
    run = functools.partial(_jax.evaluate, params.pop("jaxpr"))
    batched = jax.vmap(
        run,
        in_axes=tuple(dims),
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )
    closed = _jax.jaxpr_of(batched, *args)
    outputs = primitive.bind(
        *_jax.consts_of(closed), *args, jaxpr=_jax.hoist_consts(closed), **params
    )
    return outputs, [0] * len(outputs)


def _remat(primitive: Any, shield: Shield, context: Any, /, *args: Any, **params: Any) -> Any:
    """What ``jax.checkpoint`` with ``jax_remat3`` on does with a region: see ``_linearized``."""
    is_trace = isinstance(context, remat.RematTrace)  # jax 0.10 gives the policy itself
    policy = context.policy if is_trace else context
    policy = policy or jax.checkpoint_policies.nothing_saveable
    run = functools.partial(primitive.bind, **params)
    shielded = shield(policy, params["name"])
    outputs, kept, recompute = _linearized(run, policy, args, prevent_cse=shielded)
    return (outputs, kept, recompute) if is_trace else (outputs, functools.partial(recompute, kept))


def _linearized(
    run: Callable[..., list[Any]],
    policy: Callable[..., Any],
    args: Sequence[Any],
    *,
    prevent_cse: bool,
) -> tuple[list[Any], list[Any], Callable[..., list[Any]]]:
    """Linearise a region under a policy, in all its arguments that are real or complex.

    Returns:
        The results; what is kept; and what stands for the region in the backward pass: a function
        of that and the arguments with the same results, whose derivative starts from what is kept.
    """
    inexact = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not inexact:
        return run(*args), [], lambda _, *xs: run(*xs)

    checkpointed = _jax.checkpointed(run, policy, prevent_cse=prevent_cse)
    of_inexact = _jax.of_some(checkpointed, args, inexact)
    outputs, tangents_of = jax.linearize(of_inexact, *(args[i] for i in inexact))
    kept, tree = jax.tree.flatten(tangents_of)

    @jax.custom_jvp
    def recompute(_: Sequence[Any], *xs: Any) -> list[Any]:
        return run(*xs)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        linear = jax.tree.unflatten(tree, primals[0])
        return recompute(*primals), linear(*(tangents[1 + i] for i in inexact))

    recompute.defjvp(jvp)
    return outputs, kept, recompute
