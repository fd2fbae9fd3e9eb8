"""Copies between device and host memory in a staged program: found, moved, made once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var


def crosses_to_host(eqn: Eqn) -> bool:
    """Whether the equation copies a value from the device to the host."""
    return is_transfer(eqn) and _jax.on_host(eqn.outvars[0].aval)


def crosses_to_device(eqn: Eqn) -> bool:
    """Whether the equation fetches a value from the host."""
    return is_transfer(eqn) and _jax.on_host(eqn.invars[0].aval)


def is_host(atom: Any) -> bool:
    """Whether a value of a program is on the host."""
    return _jax.is_var(atom) and _jax.on_host(atom.aval)


def has_transfers(jaxpr: Jaxpr) -> bool:
    """Whether a program copies values between device and host memory, loops looked into."""
    return any(
        is_transfer(eqn) or any(map(has_transfers, _jax.subjaxprs(eqn)))
        for eqn in _jax.open_jaxpr(jaxpr).eqns
    )


def is_transfer(eqn: Eqn) -> bool:
    """Whether the equation copies a value between device and host memory."""
    if eqn.primitive.name != "device_put" or len(eqn.invars) != 1 or not _jax.is_var(eqn.invars[0]):
        return False
    return _jax.on_host(eqn.invars[0].aval) != _jax.on_host(eqn.outvars[0].aval)


def with_fetched_inputs(closed: Jaxpr, skip: int = 0) -> tuple[Jaxpr, list[bool]]:
    """The program taking from the device what it would fetch from the host at once.

    An input on the host that the program only fetches is replaced by the fetched value.

    Args:
        closed: The program.
        skip: How many of its first inputs to leave alone.

    Returns:
        The program, and for each further input whether it was replaced.
    """
    inner = _jax.open_jaxpr(closed)
    fetches = {e.invars[0]: e for e in inner.eqns if crosses_to_device(e)}
    reads = Counter(v for e in inner.eqns for v in e.invars if _jax.is_var(v))
    reads.update(v for v in inner.outvars if _jax.is_var(v))
    rest = inner.invars[skip:]
    replaced = [v in fetches and reads[v] == 1 for v in rest]
    gone = {id(fetches[v]) for v, is_replaced in zip(rest, replaced, strict=True) if is_replaced}
    inputs = [fetches[v].outvars[0] if r else v for v, r in zip(rest, replaced, strict=True)]
    eqns = [e for e in inner.eqns if id(e) not in gone]
    invars = [*inner.invars[:skip], *inputs]
    return _jax.rebuild(closed, eqns, inner.outvars, invars=invars), replaced


def with_copies_left_out(
    closed: Jaxpr, skip: int, which: Sequence[bool]
) -> tuple[Jaxpr, list[bool]]:
    """The program returning from the device what it would copy to the host last.

    Args:
        closed: The program.
        skip: How many of its first results to leave alone.
        which: For each further result whether its copy is to be left out.

    Returns:
        The program, and for each further result whether a copy of it was left out.
    """
    inner = _jax.open_jaxpr(closed)
    copies = {e.outvars[0]: e.invars[0] for e in inner.eqns if crosses_to_host(e)}
    rest = inner.outvars[skip:]
    away = [w and _jax.is_var(v) and v in copies for v, w in zip(rest, which, strict=True)]
    outputs = [copies[v] if is_away else v for v, is_away in zip(rest, away, strict=True)]
    return _jax.rebuild(closed, inner.eqns, [*inner.outvars[:skip], *outputs]), away


def copied_once(closed: Jaxpr) -> Jaxpr:
    """The program copying to the host once what it copies there under several names."""
    inner = _jax.open_jaxpr(closed)
    named: dict[Var, Var] = {}
    first: dict[Var, Var] = {}
    became: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for eqn in inner.eqns:
        eqn = eqn.replace(invars=[became.get(v, v) if _jax.is_var(v) else v for v in eqn.invars])
        if _jax.named_value(eqn) is not None and _jax.is_var(eqn.invars[0]):
            named[eqn.outvars[0]] = named.get(eqn.invars[0], eqn.invars[0])
        if crosses_to_host(eqn):
            source = named.get(eqn.invars[0], eqn.invars[0])
            copy = first.setdefault(source, eqn.outvars[0])
            if copy is not eqn.outvars[0]:
                became[eqn.outvars[0]] = copy
                continue
        eqns.append(eqn)
    outvars = [became.get(v, v) if _jax.is_var(v) else v for v in inner.outvars]
    return _jax.rebuild(closed, eqns, outvars)
