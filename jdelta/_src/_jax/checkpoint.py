"""``jax.checkpoint`` with its policies and names, the same whether ``jax_remat3`` is on or off.

With it off, a checkpoint and a name have a primitive each. With it on, both have the parameter
``_prim``: an object that is told by its class and holds all else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint
from jax.extend.core import primitives
from jax.interpreters import partial_eval

from jdelta._src._jax.equation import from_template, name_stack
from jdelta._src._jax.jaxprs import Eqn, Jaxpr, consts_of, hoist_consts, jaxpr_of, open_jaxpr, stage
from jdelta._src._jax.values import Var


def checkpointed(
    fun: Callable[..., Any], policy: Callable[..., Any], *, prevent_cse: bool
) -> Callable[..., Any]:
    """``jax.checkpoint``, the same whether ``jax_remat3`` is on or off.

    With it on, ``jax.checkpoint`` looks for names before JVP, where a region has none yet (and jax
    0.10 ignores policies). The primitive that it binds with the flag off is there in both cases.
    """

    def call(*args: Any) -> Any:
        closed, tree = stage(fun, *args)
        results = primitives.remat_p.bind(
            *consts_of(closed),
            *jax.tree.leaves(args),
            jaxpr=open_jaxpr(hoist_consts(closed)),
            prevent_cse=prevent_cse,
            differentiated=False,
            policy=policy,
        )
        return jax.tree.unflatten(tree, results)

    return call


def remat_equation(
    body: Jaxpr,
    policy: Callable[..., Any],
    operands: Sequence[Var],
    results: Sequence[Var],
    like: Eqn,
    *,
    prevent_cse: bool,
) -> Eqn:
    """What ``jax.checkpoint`` leaves in a backward pass: a call of ``body``, an open program.

    Args:
        body: What is computed: again, and of cotangents.
        policy: The policy that it was written under.
        operands: What ``body`` is given.
        results: What it makes.
        like: An equation of the same place in the user's code.
        prevent_cse: Whether recompute in it is shielded.
    """
    params = {"jaxpr": body, "policy": policy, "prevent_cse": prevent_cse, "differentiated": True}
    return from_template(_remat_equation(), operands, results, like, **params)


@functools.cache
def _remat_equation() -> Eqn:
    """A ``jax.checkpoint``, as a template."""
    policy = jax.checkpoint_policies.nothing_saveable
    call = checkpointed(jax.lax.neg, policy, prevent_cse=False)
    return open_jaxpr(jaxpr_of(call, np.float32(0))).eqns[0]


def watch_checkpoints(look: Callable[[Any, Jaxpr], None]) -> None:
    """Have each ``jax.checkpoint`` looked at when it is differentiated, before it asks its policy.

    A policy is asked about one equation after the other; only here is all of them at hand.

    Args:
        look: Called with the policy and the body; may raise.
    """
    rules = partial_eval.custom_partial_eval_rules
    rules[primitives.remat_p] = _looking(rules[primitives.remat_p], look)
    for method in ("lin", "vjp_fwd"):  # with jax_remat3 on
        if hasattr(ad_checkpoint.RematTraced, method):
            plain = getattr(ad_checkpoint.RematTraced, method)
            setattr(ad_checkpoint.RematTraced, method, _looking3(plain, look))


def _looking(rule: Callable[..., Any], look: Callable[[Any, Jaxpr], None]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def looking(trace: Any, /, *tracers: Any, **params: Any) -> Any:
        if not params["differentiated"]:  # else it is a backward pass, differentiated once more
            look(params["policy"], params["jaxpr"])
        return rule(trace, *tracers, **params)

    return looking


def _looking3(method: Callable[..., Any], look: Callable[[Any, Jaxpr], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def looking(self: Any, /, *args: Any, **options: Any) -> Any:
        if not any("jvp(" in name_stack(eqn) for eqn in open_jaxpr(self.jaxpr).eqns):
            look(self.policy, self.jaxpr)
        return method(self, *args, **options)

    return looking


def remat3_body(eqn: Eqn) -> Jaxpr | None:
    """The body of a ``jax.checkpoint`` made with ``jax_remat3`` on; None for other equations."""
    prim: Any = eqn.params.get("_prim")
    return prim.jaxpr if type(prim).__name__ == "RematTraced" else None


def is_shielded(eqn: Eqn) -> bool:
    """Whether the equation recomputes behind a barrier against CSE."""
    if eqn.primitive is not primitives.remat_p:
        return False
    return bool(eqn.params["differentiated"]) and bool(eqn.params["prevent_cse"])


def answer(policy: Callable[..., Any], eqn: Eqn) -> str:
    """What a ``jax.checkpoint`` policy says of an equation: "save", "offload" or "recompute".

    Args:
        policy: The policy.
        eqn: The equation; the policy is told its primitive, the types of its operands, literals
            too, and its parameters.

    Raises:
        TypeError: It says something else.
    """
    avals = [atom.aval for atom in eqn.invars]
    said = policy(eqn.primitive, *avals, **_told(policy, eqn, 1 + len(avals)))
    kind = (
        ("recompute", "save")[said] if isinstance(said, bool) else _ANSWERS.get(type(said).__name__)
    )
    if kind is None:
        raise TypeError(
            "a policy returns True, False or what jax.checkpoint_policies return (Saveable, "
            f"Recompute, Offloadable(src, dst)); this one returned {said!r}"
        )
    return kind


_ANSWERS = {"SaveableType": "save", "RecomputeType": "recompute", "Offloadable": "offload"}
"""From the types of JAX's own answers to what they mean."""


def _told(policy: Callable[..., Any], eqn: Eqn, count: int) -> Mapping[str, Any]:
    """The parameters of an equation, but for those that have the name of a positional argument.

    The policies of JAX call their first argument ``prim``; so do some primitives a parameter.

    Args:
        policy: What is to be called.
        eqn: The equation.
        count: How many arguments it is given by position.
    """
    arguments = inspect.signature(policy).parameters.values()
    by_position = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    taken = {a.name for a in by_position[:count] if a.kind is a.POSITIONAL_OR_KEYWORD}
    return {name: value for name, value in eqn.params.items() if name not in taken}


def named_value(eqn: Eqn) -> str | None:
    """The name that a ``checkpoint_name`` equation gives; None for any other equation."""
    if eqn.primitive is primitives.name_p:
        return eqn.params["name"]
    prim: Any = eqn.params.get("_prim")  # with jax_remat3 on
    is_name = type(prim).__name__ in ("CheckpointName", "CheckpointNameFwd")
    return prim.name if is_name else None


def plain(eqn: Eqn) -> Eqn:
    """The equation; a ``checkpoint_name`` made with ``jax_remat3`` on as it is made with it off."""
    name = named_value(eqn)
    if name is None or eqn.primitive is primitives.name_p:
        return eqn
    return eqn.replace(primitive=primitives.name_p, params={"name": name})


def renamed(eqn: Eqn, name: str) -> Eqn:
    """A ``checkpoint_name`` equation with another name."""
    return eqn.replace(params={**eqn.params, "name": name})


def name_equation(source: Var, target: Var, name: str, like: Eqn) -> Eqn:
    """``target = checkpoint_name(source, name)``, at the source line of ``like``."""
    return from_template(_name_equation(), [source], [target], like, name=name)


@functools.cache
def _name_equation() -> Eqn:
    """A ``checkpoint_name``, as a template, made as it is with ``jax_remat3`` off."""
    bind = functools.partial(primitives.name_p.bind, name="")
    return open_jaxpr(jaxpr_of(bind, np.float32(0))).eqns[0]
