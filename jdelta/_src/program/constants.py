"""Values that a program depends on as they are, whether they have a hash or not."""

from __future__ import annotations

from typing import Any

import jax


class Constant:
    """A value in a tree of arguments or results that is no array: ``Constant(jax.nn.gelu)``.

    To JAX it is part of the tree's structure. Values are compared as they compare themselves; those
    that cannot, such as records with arrays in them, are equal to nothing but themselves.
    """

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return False
        if self.value is other.value:
            return True
        try:
            return type(self.value) is type(other.value) and bool(self.value == other.value)
        except (TypeError, ValueError):
            return False

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:  # equal values are of one type
            return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def unwrapped(tree: Any) -> Any:
    """The tree with constants as they were."""
    return jax.tree.map(_value, tree, is_leaf=is_constant)


def is_constant(leaf: Any) -> bool:
    """Whether a leaf is a constant."""
    return isinstance(leaf, Constant)


def _value(leaf: Any) -> Any:
    return leaf.value if is_constant(leaf) else leaf


def _parts(constant: Constant) -> tuple[tuple[()], Constant]:
    return (), constant


def _from_parts(constant: Constant, _: Any) -> Constant:
    return constant


jax.tree_util.register_pytree_node(Constant, _parts, _from_parts)
