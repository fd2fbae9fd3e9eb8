"""Finds host stacks that a loop reads in another order than its program says.

XLA for GPUs turns a slice of a stack in host memory into a copy whose offset is a linear function
of the trip. jaxlib 0.10.2 and 0.11.0 get it wrong for loops that walk backwards (openxla/xla pull
requests 46231 and 46308): residuals come back in the wrong order, and gradients are silently
wrong. Both the function and the index it stands for are in the text of the compiled program.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jdelta._src.hlo.loops import Loop, read_loop
from jdelta._src.hlo.text import HOST, Array, Computation, Instruction, Module

_CONFIG = "dynamic_slice_config"

_ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "bitcast": int,
    "clamp": lambda low, value, high: max(low, min(value, high)),
    "convert": int,
    "copy": int,
    "maximum": max,
    "minimum": min,
    "multiply": operator.mul,
    "negate": lambda value: -value,
    "reshape": int,
    "select": lambda chosen, this, other: this if chosen else other,
    "subtract": operator.sub,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq,
    "GE": operator.ge,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
    "NE": operator.ne,
}
_LITERALS = {"true": 1, "false": 0}


class _UnknownError(Exception):
    """The text does not tell a value."""


def forward_fetches(module: Module) -> list[str]:
    """The fetches of a program that do not surely read the slice of a host stack that is indexed.

    A fetch is not listed if the compiler gave its copy no offset of its own (on TPUs, and in loops
    that XLA pipelines, the index itself is used). It is listed if its offset is another one, or
    the text does not tell the offset or the index.

    Args:
        module: The compiled program.

    Returns:
        Names of the slice instructions, in the order of the text.
    """
    wrong: dict[str, None] = {}
    for computation in module.computations.values():
        for instruction in computation:
            if instruction.opcode == "while":
                state = _State(module, computation, read_loop(module, computation, instruction))
                wrong.update(dict.fromkeys(_wrong_fetches(state)))
    return list(wrong)


def _wrong_fetches(state: _State) -> Iterator[str]:
    """Compares the first two trips and the last, as offset and index are linear in the trip."""
    loop = state.loop
    for trip in sorted({0, 1, loop.trips - 1} & set(range(loop.trips))):
        fetches = _fetches(state.scope(trip))
        yield from (fetch.name for fetch, at in fetches if not _is_right(fetch, at, trip))


def _is_right(fetch: Instruction, scope: _Scope, trip: int) -> bool:
    try:
        return _noted_offset(fetch, trip) == _indexed_offset(fetch, scope)
    except _UnknownError:
        return False


def _noted_offset(fetch: Instruction, trip: int) -> int:
    """Where the copy starts to read, bytes.

    jaxlib 0.12 has the linear function in a message of its own.
    """
    config: dict[str, Any] = fetch.config[_CONFIG]
    known = {"loop_index", "byte_offset", "byte_stride", "linear"}
    if not config.keys() <= known or int(config.get("loop_index", 0)):
        raise _UnknownError
    linear: dict[str, Any] = config.get("linear", config)
    return int(linear.get("byte_offset", 0)) + trip * int(linear.get("byte_stride", 0))


def _indexed_offset(fetch: Instruction, scope: _Scope) -> int:
    """Where the slice of the indices starts, bytes; indices are clamped to the stack."""
    stack, *indices = scope.computation.operands(fetch)
    limits = zip(stack.array.dims, fetch.array.dims, strict=True)
    starts = [
        max(0, min(scope.value(index.name), size - taken))
        for index, (size, taken) in zip(indices, limits, strict=True)
    ]
    return sum(start * step for start, step in zip(starts, _byte_strides(stack.array), strict=True))


def _byte_strides(array: Array) -> list[int]:
    """Bytes from one element to the next along each axis."""
    order = array.order or tuple(reversed(range(len(array.dims))))
    strides = dict[int, int]()
    step = array.bits // 8
    for axis in order:
        strides[axis] = step
        step *= array.dims[axis]
    return [strides[axis] for axis in range(len(array.dims))]


@dataclass(frozen=True)
class _State:
    """The scalars that a loop hands from one trip to the next.

    Attributes:
        module: The program.
        around: The computation that the loop is in.
        loop: The loop.
        known: Those computed so far, by element and trip.
    """

    module: Module
    around: Computation
    loop: Loop
    known: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    def scope(self, trip: int) -> _Scope:
        """The body in one trip."""
        return _Scope(self.module, self.loop.body, lambda _, index: self.element(index, trip))

    def element(self, index: int | None, trip: int) -> int:
        """An element of the state at the start of a trip.

        Raises:
            _UnknownError: The text does not tell.
        """
        if index in self.loop.counters:
            start, step = self.loop.counters[index]
            return start + step * trip
        if index is None or index >= len(self.loop.initial):
            raise _UnknownError
        first = next((t for t in range(trip, 0, -1) if (index, t) in self.known), 0)
        for t in range(first, trip + 1):  # upwards, so that none needs more than the one before
            if (index, t) not in self.known:
                self.known[index, t] = self._computed(index, t)
        return self.known[index, trip]

    def _computed(self, index: int, trip: int) -> int:
        if trip == 0:
            return _Scope(self.module, self.around, _nothing).value(self.loop.initial[index])
        result = self.loop.body.root
        if result.opcode != "tuple":
            raise _UnknownError
        return self.scope(trip - 1).value(result.operands[index])


def _nothing(_: int, __: int | None) -> int:
    """Of the parameters of what a loop is in nothing is known."""
    raise _UnknownError


@dataclass(frozen=True)
class _Scope:
    """Values of the scalars of a computation.

    Attributes:
        module: The program.
        computation: The computation.
        parameter: The value of a parameter, by number, or of an element of it.
    """

    module: Module
    computation: Computation
    parameter: Callable[[int, int | None], int]

    def inside(self, instruction: Instruction) -> _Scope | None:
        """The computation of a fusion, whose parameters have values here."""
        inner = self.module.called(instruction)
        if inner is None or not instruction.opcode.startswith(("fusion", "async", "call")):
            return None
        return _Scope(self.module, inner, lambda n, _: self.value(instruction.operands[n]))

    def value(self, name: str) -> int:
        """The value of a scalar.

        Raises:
            _UnknownError: It is no scalar, or comes from elsewhere.
        """
        instruction = self.computation[name]
        if instruction.array.elements != 1:
            raise _UnknownError
        match instruction.opcode:
            case "constant":
                return _literal(instruction.argument)
            case "parameter":
                return self.parameter(int(instruction.argument), None)
            case "get-tuple-element":
                return self._element(instruction)
            case "compare":
                compare = _COMPARISONS[instruction.attribute("direction")]
                return int(compare(*map(self.value, instruction.operands)))
            case _:
                return self._computed(instruction)

    def _element(self, instruction: Instruction) -> int:
        (source,) = self.computation.operands(instruction)
        index = int(instruction.attribute("index"))
        if source.opcode == "parameter":
            return self.parameter(int(source.argument), index)
        inner = self.inside(source)
        if inner is None or inner.computation.root.opcode != "tuple":
            raise _UnknownError
        return inner.value(inner.computation.root.operands[index])

    def _computed(self, instruction: Instruction) -> int:
        if inner := self.inside(instruction):
            return inner.value(inner.computation.root.name)
        if instruction.opcode not in _ARITHMETIC:
            raise _UnknownError
        return _ARITHMETIC[instruction.opcode](*map(self.value, instruction.operands))


def _literal(text: str) -> int:
    match = re.search(r"-?\d+|true|false", text)
    if match is None:
        raise _UnknownError
    return _LITERALS[match[0]] if match[0] in _LITERALS else int(match[0])


def _fetches(scope: _Scope) -> Iterator[tuple[Instruction, _Scope]]:
    """Slices of host stacks in a computation and its fusions that have an offset of their own."""
    for instruction in scope.computation:
        if inner := scope.inside(instruction):
            yield from _fetches(inner)
        elif instruction.opcode == "dynamic-slice" and _CONFIG in instruction.config:
            stack = scope.computation.operands(instruction)[0]
            if stack.array.memory == HOST:
                yield instruction, scope
