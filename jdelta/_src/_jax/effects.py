"""What equations do beside giving results: what may be done again, and what has to happen once.

A callback of ``jax.debug`` may run as often as what it stands in is computed. An ``io_callback``,
and what makes, reads or writes a mutable ref (``jax.new_ref``), happens once and in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jax._src import core, effects

from jdelta._src._jax.values import Atom, Var

_ONCE = frozenset({"InternalMutableArrayEffect", "FfiEffect"})
"""Effects that ``jax.checkpoint`` takes, though what has them cannot be done again."""


def happens_once(eqn_or_jaxpr: Any) -> bool:
    """Whether an equation, or a program, has something in it that must not be done again.

    What is given a ref may have rules of its own that write it, of which its effects say nothing.
    """
    return any(map(_is_once, eqn_or_jaxpr.effects)) or any(map(is_ref, eqn_or_jaxpr.invars))


def _is_once(effect: Any) -> bool:
    is_repeatable = effects.remat_allowed_effects.contains(effect)
    return not is_repeatable or type(effect).__name__ in _ONCE or is_of_ref(effect)


def is_of_ref(effect: Any) -> bool:
    """Whether an effect is on a mutable ref."""
    return isinstance(effect, effects.JaxprInputEffect)


def effects_of(inputs: Iterable[Var], eqns: Iterable[Any]) -> frozenset[Any]:
    """The effects of a program: those of its equations, on refs among its inputs only."""
    refs = set(inputs)
    unique = {effect for eqn in eqns for effect in eqn.effects}
    return frozenset(e for e in unique if not is_of_ref(e) or getattr(e, "input", None) in refs)


def effects_on(eqn: Any, became: Mapping[Var, Atom]) -> Any:
    """The effects of an equation that other variables stand in."""
    return core.subst_input_effects(eqn.effects, became)


def by_position(jaxpr: Any) -> Any:
    """The effects of a program as the rules of primitives give them: inputs by number."""
    return core.positional_effects(jaxpr)


def is_ref(leaf: Any) -> bool:
    """Whether a value, or a shape that stands for it, is a mutable ref."""
    return bool(getattr(leaf, "is_ref", False)) or type(getattr(leaf, "aval", None)).__name__ == (
        "AbstractRef"
    )
