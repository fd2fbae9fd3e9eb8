"""Modules of a program's equations: those that hold the weights that the equations read.

Frameworks that pass their parameters as a tree (NNX, Equinox, plain JAX) put no scopes around what
a module computes, but the paths of the tree say where each weight lives: what reads
``params['h'][0]['mlp']['kernel']`` belongs to the module ``h/0/mlp``. Such paths are written into
the name stacks of equations that have no scope, so that all who read scopes see modules.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var
from jdelta._src.program.names import Path, common, scope_path
from jdelta._src.program.primitives import FREE, VIEWS

_AROUND = frozenset("params model module state states variables trainable batch_stats".split())
"""What the trees of frameworks have around a model: ``state.params['h']``."""

LISTED = "layer"
"""What modules are called that are in a list without a name."""

_INSIDE = frozenset("value raw_value data_array".split())
"""What they have inside a parameter: ``['kernel'].value``."""

PASSED_ON = VIEWS | FREE | {"convert_element_type", "slice", "dynamic_slice"}
"""Primitives whose result is still the weight that they read."""

_MAPPED = frozenset({"jaxpr", "branches"})
"""Parameters with bodies whose inputs are the last ones of their equation."""


@dataclass(frozen=True)
class Weight:
    """An argument that lies in a module.

    Attributes:
        module: Path of that module: ``("h", "0", "mlp")``.
        trained: Whether the step differentiates with respect to it.
    """

    module: Path
    trained: bool = True


Weights: TypeAlias = Mapping[Var, Weight]


def module_paths(arguments: Any, depth: int) -> list[Path]:
    """For each leaf of a function's arguments the path of the module that it lies in.

    Args:
        arguments: The arguments, a tree.
        depth: How many keys of a path say which argument it is.

    Returns:
        Paths; empty for what lies in no module, such as a batch of data.
    """
    paths: list[Path] = []
    for path, part in jax.tree_util.tree_flatten_with_path(arguments, is_leaf=_has_label)[0]:
        own = _labelled(part.label) if _has_label(part) else _module(path[depth:])
        paths += [own] * len(jax.tree.leaves(part))
    return paths


def _has_label(part: Any) -> bool:
    """Whether a part of a tree is a parameter that says its own path: penzai's do."""
    return isinstance(getattr(part, "label", None), str) and hasattr(part, "value")


def _labelled(label: str) -> Path:
    """``("block_0", "up", "Linear")`` for ``block_0/up/Linear.weights``."""
    return tuple(_scopes(label.rpartition(".")[0]))


class ClosedOver:
    """The modules of a step's arguments, for what a function closes over."""

    def __init__(self, args: Sequence[Any] = ()):
        leaves = zip(jax.tree.leaves(args), module_paths(args, depth=1), strict=True)
        # With the arguments themselves: the number of one that is gone may be given again.
        self._weights = {id(leaf): (leaf, Weight(path, trained=False)) for leaf, path in leaves}

    def __getitem__(self, value: Any) -> Weight | None:
        """What weight a value is; None for one that is no argument."""
        return self._weights.get(id(value), (None, None))[1]


def _module(keys: Sequence[Any]) -> Path:
    """``("h", "0", "mlp")`` for the keys of ``.states[0]['h'][0]['mlp']['kernel'].value``."""
    parts = [part for key in keys for part in _parts(key)]
    while parts and parts[-1] in _INSIDE:
        parts.pop()
    del parts[-1:]
    while parts and parts[0] in _AROUND:
        is_list = parts.pop(0) == "states"
        del parts[: is_list and parts[:1] != [] and parts[0].isdigit()]
    return (LISTED, *parts) if parts and parts[0].isdigit() else tuple(parts)


def _parts(key: Any) -> list[str]:
    """A key of a tree as scopes: Haiku has paths as keys, ``'gpt/~/h_0/linear'``."""
    named = (str(getattr(key, a)) for a in ("key", "name", "idx") if hasattr(key, a))
    return _scopes(next(named, str(key)))


def _scopes(text: str) -> list[str]:
    return [part for raw in text.split("/") if (part := re.sub(r"[^\w.\-]+", "", raw))]


def with_modules(program: Jaxpr, weights: Iterable[Weight | None]) -> Jaxpr:
    """A program whose equations without a scope are in that of the module they belong to.

    An equation belongs to the module whose weight it reads; one between two such equations to what
    their modules share.

    Args:
        program: The program.
        weights: For each of its constants and inputs what weight it is.
    """
    inner = _jax.open_jaxpr(program)
    pairs = zip((*inner.constvars, *inner.invars), weights, strict=True)
    known = {v: w for v, w in pairs if w is not None and w.module and _jax.is_inexact(v)}
    return _jax.with_equations(program, _placed(inner.eqns, known)) if known else program


def _placed(eqns: Sequence[Eqn], weights: Weights) -> list[Eqn]:
    """Equations in the scopes of their modules."""
    known = dict(weights)
    read = [_read(eqn, known) for eqn in eqns]
    return [
        _jax.in_scopes(eqn, *place) if place else _with_bodies_placed(eqn, known)
        for eqn, place in zip(eqns, _places(eqns, read), strict=True)
    ]


def _read(eqn: Eqn, known: dict[Var, Weight]) -> Path | None:
    """The module whose weight an equation reads; None where it reads none.

    Empty for a loop, for what the user checkpoints, and for a call that reads weights of several
    modules: their bodies say more.
    What is only another view of a weight becomes known.
    """
    weights = [known[v] for v in eqn.invars if _jax.is_var(v) and v in known]
    if not weights:
        return None
    has_body = any(True for _ in _jax.subjaxprs(eqn))
    is_whole = _jax.is_call(eqn) and not _jax.is_checkpoint(eqn)
    if has_body and not (is_whole and len({w.module for w in weights}) == 1):
        return ()
    weight = max(weights, key=lambda w: (w.trained, len(w.module)))
    if eqn.primitive.name in PASSED_ON:
        known.update((v, weight) for v in eqn.outvars if _jax.is_var(v))
    return weight.module


def _places(eqns: Sequence[Eqn], read: Sequence[Path | None]) -> list[Path]:
    """For each equation the scope to put it in; empty where it has its own, or belongs nowhere."""
    own = [bool(scope_path(_jax.name_stack(eqn))) for eqn in eqns]
    anchors = [() if scoped else module for scoped, module in zip(own, read, strict=True)]
    before = itertools.accumulate(anchors, _last)
    after = list(itertools.accumulate(reversed(anchors), _last))[::-1]
    return [
        () if scoped else common([a or (), b or ()]) if module is None else module
        for scoped, module, a, b in zip(own, read, before, after, strict=True)
    ]


def _last(earlier: Path | None, now: Path | None) -> Path | None:
    return earlier if now is None else now


def _with_bodies_placed(eqn: Eqn, known: Weights) -> Eqn:
    """An equation whose bodies have their own equations in the scopes of modules."""

    def placed(body: Jaxpr) -> Jaxpr:
        invars = _jax.open_jaxpr(body).invars
        pairs = zip(eqn.invars[len(eqn.invars) - len(invars) :], invars, strict=True)
        inside = {v: known[a] for a, v in pairs if _jax.is_var(a) and a in known}
        eqns = _placed(_jax.open_jaxpr(body).eqns, inside) if inside else None
        return _jax.with_equations(body, eqns) if eqns else body

    bodies = {name for name, value in eqn.params.items() if _holds_bodies(value)}
    return _jax.with_bodies(eqn, placed) if bodies and bodies <= _MAPPED else eqn


def _holds_bodies(value: Any) -> bool:
    return any(hasattr(v, "eqns") for v in (value if isinstance(value, (tuple, list)) else [value]))
