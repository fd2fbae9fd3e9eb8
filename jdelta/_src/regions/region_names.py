"""Names of the regions that are found in a program: the same in layers that are alike.

A region is called by what the modules of its products share (``h/3``). The first and the last layer
of a model often have more in their regions than the others, an embedding or the loss: they are
called like the others, and what they have more is set apart, so that the rest has equal names.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from jdelta._src import _jax
from jdelta._src._jax import Eqn
from jdelta._src.program.names import Path, common, inner_path, scope_path
from jdelta._src.program.primitives import MATMULS
from jdelta._src.regions.modules import LISTED

UNNAMED = "region"
"""What a region is called whose products are in no module, or in several."""

MOST_PAIRS = 1 << 22
"""Pairs of equations up to which two regions are compared."""

_NUMBER = re.compile(r"_?\d+")


@dataclass(frozen=True)
class Named:
    """A run of equations that is to be a region.

    Attributes:
        base: Its name, without the number of the call.
        eqns: Its equations.
    """

    base: str
    eqns: Sequence[Eqn]


def named(runs: Sequence[Sequence[Eqn]]) -> list[Named]:
    """The names of runs of equations, what only some of a kind have set apart in scopes.

    Args:
        runs: The equations of each region of a program, in order.
    """
    bases = _bases([_product_paths(_contents(eqns)) for eqns in runs])
    titles = [_title(base, eqns) for base, eqns in zip(bases, runs, strict=True)]
    kinds = [_kind(tuple(title.split("/"))) for title in titles]
    signatures = [
        tuple(_signature(eqn, base) for eqn in eqns) for eqns, base in zip(runs, bases, strict=True)
    ]
    usual = {kind: _most_common(kind, kinds, signatures) for kind in dict.fromkeys(kinds)}
    return [
        Named(title, _apart(eqns, own, usual[kind]))
        for title, eqns, kind, own in zip(titles, runs, kinds, signatures, strict=True)
    ]


_Signature = tuple[str, str, tuple[object, ...]]
"""Of an equation: the kind of its path in its region, its primitive, the shapes of its results."""


def _is_of_user(eqns: Sequence[Eqn]) -> bool:
    """Whether the user put a ``jax.checkpoint`` around what a region is."""
    return len(eqns) == 1 and _jax.is_checkpoint(eqns[0])


def _contents(eqns: Sequence[Eqn]) -> Sequence[Eqn]:
    """The equations of a region, those of the user's ``jax.checkpoint`` if it is one."""
    if not _is_of_user(eqns):
        return eqns
    outvars = list(filter(_jax.is_var, eqns[0].outvars))
    return _jax.open_jaxpr(_jax.inline(_jax.program_of(eqns, outvars))).eqns or eqns


def _title(base: Path, eqns: Sequence[Eqn]) -> str:
    """The module's path; where that has no name, that of the function that the user marked."""
    function = _jax.function_name(_jax.subjaxpr(eqns[0])) if _is_of_user(eqns) else ""
    is_named = base and not (base[0] == LISTED and len(base) == 2)
    return "/".join(base) if is_named or (base and not function) else function or UNNAMED


def _product_paths(eqns: Sequence[Eqn]) -> list[Path]:
    """The modules of the products, or of all equations; those that have one."""
    products = [eqn for eqn in eqns if eqn.primitive.name in MATMULS]
    return [p for eqn in products or eqns if (p := _module(scope_path(_jax.name_stack(eqn))))]


def _module(path: Path) -> Path:
    """The scopes up to the formula of a ``jnp.einsum``: it names a value, but no region."""
    return tuple(itertools.takewhile(lambda scope: "->" not in scope, path))


def _kind(path: Path) -> str:
    """What layers that are alike have in common: ``h/mlp`` for ``h/3/mlp``, ``h_3/mlp``."""
    return "/".join(_NUMBER.sub("", part) for part in path)


def _bases(paths: Sequence[Sequence[Path]]) -> list[Path]:
    """A module for each region; of one with more in it than its like, the one of its like."""
    shared = list(map(common, paths))
    count = Counter(map(_kind, filter(None, shared)))
    usual = {kind for kind, times in count.items() if times > 1}
    return [
        base if _kind(base) in usual else _mostly(some, usual) or base
        for base, some in zip(shared, paths, strict=True)
    ]


def _mostly(paths: Sequence[Path], usual: set[str]) -> Path:
    """The module of a usual kind that more than half of the products are in; empty if none is."""
    inside = Counter(
        path[:n] for path in paths for n in range(1, len(path) + 1) if _kind(path[:n]) in usual
    )
    (base, times), *_ = [*inside.most_common(1), ((), 0)]
    return base if 2 * times > len(paths) else ()


def _signature(eqn: Eqn, base: Path) -> _Signature:
    path = inner_path(scope_path(_jax.name_stack(eqn)), base)
    shapes = tuple(getattr(v.aval, "shape", ()) for v in eqn.outvars)
    return _kind(path), eqn.primitive.name, shapes


def _most_common(
    kind: str, kinds: Sequence[str], signatures: Sequence[tuple[_Signature, ...]]
) -> tuple[_Signature, ...]:
    """What most regions of a kind are made of; empty where no two are alike."""
    alike = Counter(s for s, k in zip(signatures, kinds, strict=True) if k == kind)
    usual, times = alike.most_common(1)[0]
    return usual if times > 1 else ()


def _apart(
    eqns: Sequence[Eqn], own: Sequence[_Signature], usual: Sequence[_Signature]
) -> list[Eqn]:
    """Equations, those in scopes of their own that the region has more than others of its kind."""
    if not usual or own == usual or len(own) * len(usual) > MOST_PAIRS:
        return list(eqns)
    blocks = SequenceMatcher(None, own, usual, autojunk=False).get_matching_blocks()
    same = {i for block in blocks for i in range(block.a, block.a + block.size)}
    first, last = min(same, default=0), max(same, default=0)
    counted = {path for path, _, _ in usual}
    return [
        eqn
        if i in same or signature[0] not in counted
        else _jax.in_scopes(eqn, "before" if i < first else "after" if i > last else "between")
        for i, (eqn, signature) in enumerate(zip(eqns, own, strict=True))
    ]
