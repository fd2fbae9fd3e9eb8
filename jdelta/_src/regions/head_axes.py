"""Along which axis the head of a model and its loss fall apart into pieces.

The head is the product that makes the logits, ``[batch, length, vocabulary]``; what follows makes
few numbers of them: a loss for each token, then sums over all tokens. Each token's part is computed
by itself, so some of the tokens may go through all of it before the others begin. Which axis of
each value the tokens are along, a rule for each primitive says; a primitive without one keeps the
head whole.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jdelta._src import _jax
from jdelta._src._jax import Eqn, Jaxpr, Var
from jdelta._src.program.primitives import CHEAP, EXPENSIVE, SPLITS
from jdelta._src.regions.head_product import free_axes, head_product

POINTWISE = (
    (CHEAP | EXPENSIVE | frozenset("stop_gradient copy copy_p reduce_precision name".split()))
    - SPLITS
    - frozenset("slice dynamic_slice pad rev random_wrap random_unwrap".split())
)
"""Primitives that compute each element of one element of each operand."""

WHOLE = frozenset("reduce_max reduce_min reduce_sum reduce_and reduce_or argmax argmin".split())
"""Reductions of each token's own values."""

STOPS = frozenset("stop_gradient argmax argmin sign floor ceil round is_finite".split())
"""Primitives through which no derivative goes."""


class _WholeError(Exception):
    """The head does not fall apart along an axis; the message says why."""


@dataclass(frozen=True)
class Head:
    """The head and the loss of a program, to be computed in pieces of tokens.

    Attributes:
        piece: What is computed of one piece: of ``sliced``, then ``consts``, the ``sums``, then the
            ``rows``.
        pieces: How many there are.
        sliced: What each piece reads a part of.
        axes: Along which axis each of them is cut.
        consts: What all pieces read whole.
        sums: Sums over all tokens.
        rows: Results with a part for each token, and along which axis.
        moving: The number of the one sum that has a derivative.
        eqns: Numbers of the equations in the program.
    """

    piece: Jaxpr
    pieces: int
    sliced: tuple[Var, ...]
    axes: tuple[int, ...]
    consts: tuple[Var, ...]
    sums: tuple[Var, ...]
    rows: tuple[tuple[Var, int], ...]
    moving: int
    eqns: frozenset[int]


def head_of(program: Jaxpr, most: int) -> Head | None:
    """The head in as many pieces as there may be along one axis; None if it stays whole.

    Args:
        program: The function that is differentiated, calls inlined.
        most: Pieces at most.
    """
    last = head_product(program)
    if last is None:
        return None
    product, of_tokens = last
    eqn = _jax.open_jaxpr(program).eqns[product]
    if any(atom.aval.dtype == np.float16 for atom in eqn.invars):  # its gradients may vanish
        return None
    for operand in (of_tokens, 1 - of_tokens):  # words may fall apart, where tokens do not
        shape = eqn.invars[operand].aval.shape
        free = free_axes(eqn.params, operand, len(shape))
        pieces = {axis: _divisor(shape[axis], most) for axis in free}
        tokens = math.prod(shape[i] for i in free)
        for axis in sorted(free, key=lambda axis: -pieces[axis]):
            if pieces[axis] > 1:
                with contextlib.suppress(_WholeError):
                    return _Cut(program, pieces[axis], tokens).head(product, operand, axis)
    return None


def _divisor(count: int, most: int) -> int:
    """The largest divisor of a number that is no larger than another."""
    return max(d for d in range(1, min(count, most) + 1) if count % d == 0)


@dataclass
class _Cut:
    """The head while it is cut.

    Attributes:
        program: The program that it is in.
        pieces: Into how many pieces.
        tokens: How many there are in all.
        axes: From each value with a part for each token to the axis that tokens are along.
        inside: Numbers of the equations that are in the head.
        sliced: Values from outside that are cut, with their axes.
        sums: Sums over all tokens.
        behind: Values that are computed of the logits.
    """

    program: Jaxpr
    pieces: int
    tokens: int
    axes: dict[Var, int] = field(default_factory=dict[Var, int])
    inside: set[int] = field(default_factory=set[int])
    sliced: dict[Var, int] = field(default_factory=dict[Var, int])
    sums: list[Var] = field(default_factory=list[Var])
    behind: set[Var] = field(default_factory=set[Var])

    def __post_init__(self) -> None:
        self.inner = _jax.open_jaxpr(self.program)
        self.makers = {v: i for i, eqn in enumerate(self.inner.eqns) for v in eqn.outvars}

    def head(self, product: int, operand: int, axis: int) -> Head:
        """The head that begins with a product, cut along an axis of one of its operands."""
        eqns = self.inner.eqns
        first = eqns[product]
        self.axes[first.invars[operand]] = self.sliced[first.invars[operand]] = axis
        self._follow(product, first)
        for index in range(product + 1, len(eqns)):
            eqn, read = eqns[index], _jax.variables(eqns[index])
            if any(v in self.axes and v in self.behind for v in read):
                self._follow(index, eqn)
            elif not self.behind.isdisjoint(read):
                self.behind.update(eqn.outvars)
                if self._is_sum_of_sums(eqn):
                    self.inside.add(index)
                    self.sums += eqn.outvars
        return self._closed()

    def _is_sum_of_sums(self, eqn: Eqn) -> bool:
        """Whether an equation makes of sums over tokens another one: of ``sum / count``, say."""
        behind = [_jax.is_var(a) and a in self.behind for a in eqn.invars]
        all_sums = all(a in self.sums for a, b in zip(eqn.invars, behind, strict=True) if b)
        match eqn.primitive.name:
            case "mul":
                is_linear = sum(behind) == 1
            case "div":
                is_linear = behind == [True, False]
            case "add" | "sub" | "add_any" | "neg" | "copy":
                is_linear = all(behind)
            case "convert_element_type":
                before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
                is_linear = np.promote_types(before, after) == after  # else pieces are rounded
            case _:
                is_linear = False
        return all_sums and is_linear

    def _follow(self, index: int, eqn: Eqn) -> None:
        """Put an equation that reads a part for each token into the head."""
        if any(v in self.sums for v in _jax.variables(eqn)):
            raise _WholeError("a sum over tokens is read for each token")
        self.inside.add(index)
        self.behind.update(eqn.outvars)
        if eqn.primitive.name == "reduce_sum" and self.axis(eqn.invars[0]) in eqn.params["axes"]:
            self.sums += eqn.outvars
            return
        axis = self._forward(eqn)
        self.axes.update(dict.fromkeys(eqn.outvars, axis))

    def axis(self, atom: Any) -> int | None:
        """The axis that an operand's tokens are along; None where it is the same for all."""
        return self.axes.get(atom) if _jax.is_var(atom) else None

    def _forward(self, eqn: Eqn) -> int:
        """The axis of the result of an equation, of which some operands have one."""
        rule = _RULES.get(eqn.primitive.name)
        if rule is None and eqn.primitive.name not in POINTWISE:
            raise _WholeError(eqn.primitive.name)
        return (rule or _pointwise)(self, eqn)

    def need(self, atom: Any, axis: int) -> None:
        """Have an operand cut along an axis."""
        if not _jax.is_var(atom):
            raise _WholeError("a literal array")
        if (known := self.axes.get(atom)) is not None:
            if known != axis:
                raise _WholeError("tokens along two axes")
            return
        if atom in self.behind:
            raise _WholeError("a sum over tokens is read for each token")
        self._read(atom, axis)

    def _read(self, value: Var, axis: int) -> None:
        """Cut a value from outside; what is made larger on its way is made in pieces."""
        if value.aval.shape[axis] % self.pieces:
            raise _WholeError("tokens do not divide")
        maker = self.makers.get(value)
        eqn = None if maker is None else self.inner.eqns[maker]
        self.axes[value] = axis
        if eqn is not None and maker is not None and self._is_made_larger(eqn):
            backward = _BACKWARD.get(eqn.primitive.name, _pointwise_backward)
            self.inside.add(maker)
            backward(self, eqn, axis)
        else:
            self.sliced[value] = axis

    def _is_made_larger(self, eqn: Eqn) -> bool:
        """Whether an equation makes more than a number for each token, of what may be cut."""
        name, (result, *_) = eqn.primitive.name, eqn.outvars
        return result.aval.size > self.tokens and (name in POINTWISE or name in _BACKWARD)

    def _closed(self) -> Head:
        """The head as a record; its equations on values of one piece."""
        eqns = [self.inner.eqns[i] for i in sorted(self.inside)]
        computed = {v for eqn in eqns for v in eqn.outvars}
        read = [v for eqn in eqns for v in _jax.variables(eqn) if v not in computed]
        consts = [v for v in dict.fromkeys(read) if v not in self.sliced]
        if not self.behind.isdisjoint(consts):
            raise _WholeError("a sum over tokens is read for each token")
        results = set(filter(_jax.is_var, self.inner.outvars))
        outside = [e for i, e in enumerate(self.inner.eqns) if i not in self.inside]
        later = results.union(v for eqn in outside for v in _jax.variables(eqn))
        of_tokens = [v for v in computed if v in later and v in self.axes]
        rows = sorted(of_tokens, key=self.makers.__getitem__)
        sums = [v for v in self.sums if v in later]
        size = sum(map(_jax.bytes_of, rows))
        if size > sum(map(_jax.bytes_of, self.sliced)):
            raise _WholeError("the logits are a result")
        reached = self._moving(eqns)
        moving = [i for i, v in enumerate(sums) if v in reached]
        if len(moving) != 1 or sums[moving[0]].aval.shape:
            raise _WholeError("not one sum has a derivative")
        piece = self._piece(eqns, [*self.sliced, *consts], [*sums, *rows])
        return Head(
            piece,
            self.pieces,
            tuple(self.sliced),
            tuple(self.sliced.values()),
            tuple(consts),
            tuple(sums),
            tuple((v, self.axes[v]) for v in rows),
            moving[0],
            frozenset(self.inside),
        )

    @staticmethod
    def _moving(eqns: Sequence[Eqn]) -> set[Var]:
        """What derivatives with regard to the logits, or to what they are made of, go through."""
        moving: set[Var] = set()
        for eqn in eqns:
            begins = eqn.primitive.name == "dot_general"
            reads = begins or not moving.isdisjoint(_jax.variables(eqn))
            if reads and eqn.primitive.name not in STOPS:
                moving.update(filter(_jax.is_inexact, eqn.outvars))
        return moving

    def _piece(self, eqns: Sequence[Eqn], inputs: Sequence[Var], outputs: Sequence[Var]) -> Jaxpr:
        """The equations as a program on values of one piece."""
        became: dict[Var, Var] = {}

        def new(value: Var) -> Var:
            if value not in became:
                became[value] = _jax.new_var(self._type(value))
            return became[value]

        invars = list(map(new, inputs))
        written = [
            eqn.replace(
                invars=[new(a) if _jax.is_var(a) else a for a in eqn.invars],
                outvars=[new(v) if _jax.is_var(v) else v for v in eqn.outvars],
                params=self._params(eqn),
            )
            for eqn in eqns
        ]
        return _jax.closed_jaxpr(_jax.body_of(written, invars, list(map(new, outputs))))

    def _type(self, value: Var) -> Any:
        """The type of a value of one piece."""
        axis = self.axes.get(value)
        if axis is None:
            return value.aval
        shape = list(value.aval.shape)
        shape[axis] //= self.pieces
        return value.aval.update(shape=tuple(shape))

    def _params(self, eqn: Eqn) -> dict[str, Any]:
        """The parameters of an equation on values of one piece."""
        (result, *_), params = eqn.outvars, dict(eqn.params)
        axis = self.axes.get(result)
        if axis is None:
            return params
        shape = self._type(result).shape
        match eqn.primitive.name:
            case "broadcast_in_dim" | "iota":
                params["shape"] = shape
            case "reshape":
                params["new_sizes"] = shape
            case "slice":
                limits = list(params["limit_indices"])
                limits[axis] = shape[axis]
                params["limit_indices"] = tuple(limits)
            case "gather":
                operand = eqn.invars[0]
                at = self.axes.get(operand) if _jax.is_var(operand) else None
                sizes = list(params["slice_sizes"])
                if at is not None and sizes[at] == operand.aval.shape[at]:
                    sizes[at] //= self.pieces
                params["slice_sizes"] = tuple(sizes)
            case _:
                pass
        return params


def _pointwise(cut: _Cut, eqn: Eqn) -> int:
    axis = next(a for a in map(cut.axis, eqn.invars) if a is not None)
    _pointwise_backward(cut, eqn, axis)
    return axis


def _pointwise_backward(cut: _Cut, eqn: Eqn, axis: int) -> None:
    for atom in eqn.invars:
        if atom.aval.shape and not (atom.aval.shape[axis] == 1 < eqn.outvars[0].aval.shape[axis]):
            cut.need(atom, axis)


def _product(cut: _Cut, eqn: Eqn) -> int:
    """A product: tokens are free in one of its operands, and the other is the same for all."""
    left, right = (free_axes(eqn.params, i, len(a.aval.shape)) for i, a in enumerate(eqn.invars))
    axes = cut.axis(eqn.invars[0]), cut.axis(eqn.invars[1])
    batch = len(eqn.params["dimension_numbers"][1][0])
    match axes:
        case int(axis), None if axis in left:
            return batch + left.index(axis)
        case None, int(axis) if axis in right:
            return batch + len(left) + right.index(axis)
        case _:
            raise _WholeError("a product over tokens")


def _reduction(cut: _Cut, eqn: Eqn) -> int:
    axis, axes = cut.axis(eqn.invars[0]), eqn.params["axes"]
    if axis is None or axis in axes:
        raise _WholeError(f"{eqn.primitive.name} over tokens")
    return axis - sum(a < axis for a in axes)


def _reshape(cut: _Cut, eqn: Eqn) -> int:
    """The axis with as much in front of it, if pieces of it are the same."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axis = cut.axis(eqn.invars[0])
    if axis is None or eqn.params.get("dimensions") is not None:
        raise _WholeError("a reshape")
    return _same_axis(before, after, axis, cut.pieces)


def _same_axis(before: Sequence[int], after: Sequence[int], axis: int, pieces: int) -> int:
    front = math.prod(before[:axis])
    for i, size in enumerate(after):
        if math.prod(after[:i]) == front and size % pieces == 0:
            return i
    raise _WholeError("a reshape across tokens")


def _reshape_backward(cut: _Cut, eqn: Eqn, axis: int) -> None:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    cut.need(eqn.invars[0], _same_axis(after, before, axis, cut.pieces))


def _squeeze(cut: _Cut, eqn: Eqn) -> int:
    axis, dims = cut.axis(eqn.invars[0]), eqn.params["dimensions"]
    if axis is None or axis in dims:
        raise _WholeError("a squeeze")
    return axis - sum(d < axis for d in dims)


def _slice(cut: _Cut, eqn: Eqn) -> int:
    """A part along other axes: all sequences without their last token, when these are cut."""
    axis = cut.axis(eqn.invars[0])
    if axis is None or eqn.outvars[0].aval.shape[axis] != eqn.invars[0].aval.shape[axis]:
        raise _WholeError("a slice of tokens")
    return axis


def _transpose(cut: _Cut, eqn: Eqn) -> int:
    return list(eqn.params["permutation"]).index(cut.axis(eqn.invars[0]))


def _broadcast(cut: _Cut, eqn: Eqn) -> int:
    axis, dims = cut.axis(eqn.invars[0]), eqn.params["broadcast_dimensions"]
    if axis is None:
        raise _WholeError("a broadcast to a size that is computed")
    return dims[axis]


def _broadcast_backward(cut: _Cut, eqn: Eqn, axis: int) -> None:
    operand, dims = eqn.invars[0], list(eqn.params["broadcast_dimensions"])
    if axis in dims and operand.aval.shape[dims.index(axis)] > 1:
        cut.need(operand, dims.index(axis))


def _gather(cut: _Cut, eqn: Eqn) -> int:
    """Numbers of each token: one of them by an index, or all of them at some places."""
    operand, indices = eqn.invars
    numbers, axis = eqn.params["dimension_numbers"], cut.axis(operand)
    if axis is None:
        raise _WholeError("a gather by what is computed for tokens")
    rank = len(eqn.outvars[0].aval.shape)
    if axis in numbers.operand_batching_dims:
        place = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        cut.need(indices, place)
        return [i for i in range(rank) if i not in numbers.offset_dims][place]
    left = [
        i
        for i in range(len(operand.aval.shape))
        if i not in numbers.collapsed_slice_dims and i not in numbers.operand_batching_dims
    ]
    is_all = eqn.params["slice_sizes"][axis] == operand.aval.shape[axis]
    if axis not in left or not is_all or axis in numbers.start_index_map:
        raise _WholeError("a gather among tokens")
    if cut.axis(indices) is not None:
        raise _WholeError("a gather among tokens")
    return numbers.offset_dims[left.index(axis)]


_RULES: Mapping[str, Callable[[_Cut, Eqn], int]] = {
    "dot_general": _product,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "gather": _gather,
    **dict.fromkeys(WHOLE, _reduction),
}
"""From primitives to what says the axis of their result."""

_BACKWARD: Mapping[str, Callable[[_Cut, Eqn, int], None]] = {
    "broadcast_in_dim": _broadcast_backward,
    "reshape": _reshape_backward,
}
"""From primitives to what has their operands cut, so that a result is made in pieces."""
