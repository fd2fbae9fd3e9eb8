"""A scheduled HLO module as operators and tensors, in the compiler's own order.

Buffers as XLA assigns them, as far as the text says: views, loops and updates of a part share what
they are given, a loop fusion writes over an operand of its shape that it is the last to read. Not
seen: XLA may put temporaries into the memory of a donated argument while its result is not there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jdelta._format import format_array
from jdelta._hlo import DEVICE, Array, Computation, Instruction, Module, Shape, leaves
from jdelta._order.problem import Problem, Tensor

_GIVEN = frozenset({"parameter", "constant", "after-all", "partition-id", "replica-id"})
_SAME = frozenset({"bitcast", "opt-barrier", "while", "add-dependency"})
_VIEWS = (_SAME | {"tuple", "get-tuple-element"}) - {"while"}
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})
_ELEMENTWISE = frozenset(
    "abs add and compare convert cosine divide exponential log maximum minimum multiply negate not"
    " or power rsqrt select sine sqrt subtract tanh xor".split()
)
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


def compiled_problem(module: Module) -> Problem:
    """The problem that the entry of a module poses; constants and arguments are given."""
    return _problem(module, module.entry, is_body=False)


def _problem(module: Module, computation: Computation, *, is_body: bool) -> Problem:
    builder = _Builder(module, computation)
    for instruction in computation:
        builder.add(instruction)
    builder.overwrite()
    builder.keep(None if is_body else module.aliases)
    return builder.problem()


@dataclass
class _Buffer:
    """A buffer of the program; one that is given is not counted."""

    bytes: int
    maker: int
    kind: str = ""
    users: dict[int, None] = field(default_factory=dict[int, None])
    kept: bool = False
    into: _Buffer | None = None

    @property
    def place(self) -> _Buffer:
        """The buffer itself, or the one it is written over."""
        return self.into.place if self.into else self


class _Builder:
    def __init__(self, module: Module, computation: Computation):
        self._module = module
        self._computation = computation
        self._held: dict[str, list[_Buffer]] = {}
        self._waits: dict[str, frozenset[int]] = {}
        self._parameters: dict[int, list[_Buffer]] = {}
        self._buffers: list[_Buffer] = []
        self._predecessors: list[set[int]] = []
        self._names: list[str] = []
        self._candidates: list[tuple[_Buffer, list[_Buffer]]] = []

    def add(self, instruction: Instruction) -> None:
        """Note what an instruction holds; it is an operator if it makes a buffer or runs a body."""
        before = [self._held[name] for name in instruction.operands]
        waits = frozenset[int]().union(*(self._waits[name] for name in instruction.operands))
        if instruction.opcode in _GIVEN:
            held = [_Buffer(0, -1) for _ in leaves(instruction.shape)]
            self._held[instruction.name], self._waits[instruction.name] = held, waits
            if instruction.opcode == "parameter":
                self._parameters[int(instruction.argument)] = held
            return
        index = len(self._predecessors)
        held, made = self._results(instruction, before, index)
        inside = self._inside(instruction)
        self._held[instruction.name] = held
        if not made and not inside and instruction.opcode in _VIEWS:
            self._waits[instruction.name] = waits
            return
        self._waits[instruction.name] = frozenset({index})
        self._predecessors.append(set(waits))
        self._names.append(instruction.name)
        self._buffers += made
        if inside:
            self._buffers.append(_Buffer(inside, index, "inside"))
        for buffer in (b for part in before for b in part):
            if buffer.maker != index:
                buffer.users[index] = None
        if _is_elementwise(instruction):
            self._candidates += [(b, self._alike(instruction, b)) for b in made]

    def _alike(self, instruction: Instruction, result: _Buffer) -> list[_Buffer]:
        """Buffers of operands of the result's type and shape."""
        operands = {o.name: o for o in self._computation.operands(instruction)}.values()
        alike = [
            o for o in operands if isinstance(o.shape, Array) and _kind(o.shape) == result.kind
        ]
        return [self._held[o.name][0] for o in alike]

    def _inside(self, instruction: Instruction) -> int:
        """Bytes that the body of a loop, or the largest branch, needs beside what it is given."""
        if instruction.opcode == "while":
            bodies = [instruction.attribute("body")]
        elif instruction.opcode == "conditional":
            branches = instruction.attribute("branch_computations").replace("%", "").split(", ")
            both = [instruction.attribute(f"{which}_computation") for which in ("true", "false")]
            bodies = [name for name in (*branches, *both) if name]
        else:
            return 0
        problems = (_problem(self._module, self._module[b], is_body=True) for b in bodies)
        return max((p.peak(p.program) for p in problems), default=0)

    def _results(
        self, instruction: Instruction, before: Sequence[list[_Buffer]], index: int
    ) -> tuple[list[_Buffer], list[_Buffer]]:
        """What an instruction holds, leaf by leaf, and which of these buffers it makes."""
        opcode = instruction.opcode
        if opcode == "tuple":
            return [b for part in before for b in part], []
        if opcode == "get-tuple-element":
            return self._element(instruction, before[0]), []
        if opcode in _SAME:
            return list(before[0]), []
        if opcode.endswith("-done"):
            return self._finished(instruction, before[0]), []
        arrays = list(leaves(instruction.shape))
        held: list[_Buffer] = []
        made: list[_Buffer] = []
        shared = self._shared(instruction, before)
        for position, array in enumerate(arrays):
            buffer = shared.get(position)
            if buffer is None:
                size = array.bytes if array.memory == DEVICE else 0
                buffer = _Buffer(size, index, _kind(array))
                made.append(buffer)
            held.append(buffer)
        return held, made

    def _element(self, instruction: Instruction, whole: list[_Buffer]) -> list[_Buffer]:
        (operand,) = self._computation.operands(instruction)
        return _part(operand.shape, int(instruction.attribute("index")), whole)

    def _finished(self, instruction: Instruction, started: list[_Buffer]) -> list[_Buffer]:
        """The result of what was started: the first part of a copy, the second of all else."""
        start = self._computation.operands(instruction)[0]
        count = len(list(leaves(instruction.shape)))
        if isinstance(start.shape, Array) or len(started) == count:
            return started
        return _part(start.shape, 0 if start.opcode == "copy-start" else 1, started)

    def _shared(
        self, instruction: Instruction, before: Sequence[list[_Buffer]]
    ) -> dict[int, _Buffer]:
        """Results, by position, that are in the buffer of an operand."""
        if instruction.opcode.endswith("-start"):
            return self._started(instruction, before)
        if instruction.opcode in _UPDATES:
            return {0: before[0][0]}
        aliases = instruction.attributes.partition("output_to_operand_aliasing=")[2][:400]
        if instruction.opcode == "custom-call" and aliases:
            pairs = _ALIAS.findall(aliases.partition("}}")[0] + "}")
            return {int(to or 0): before[int(operand)][0] for to, operand in pairs}
        inner = self._module.called(instruction) if instruction.opcode == "fusion" else None
        if inner is None:
            return {}
        parts = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
        found: dict[int, _Buffer] = {}
        for position, part in enumerate(parts):
            operand = _updated(inner, part)
            buffer = before[operand][0] if operand is not None else None
            if buffer is not None:
                found[position] = buffer
        return found

    def _started(
        self, instruction: Instruction, before: Sequence[list[_Buffer]]
    ) -> dict[int, _Buffer]:
        """A start has its operands beside its result: they stay where they are."""
        operands = [b for part in before for b in part]
        begin = 1 if instruction.opcode == "copy-start" else 0
        if isinstance(instruction.shape, Array):
            return {}
        return {begin + i: buffer for i, buffer in enumerate(operands)}

    def keep(self, aliases: Mapping[int, int] | None) -> None:
        """Results stay; none of a body takes memory, and none that takes an argument's place.

        Args:
            aliases: From results to the arguments whose place they take; None for a body.
        """
        for position, buffer in enumerate(b.place for b in self._root):
            buffer.kept = True
            argument = None if aliases is None else aliases.get(position)
            if aliases is None:
                buffer.bytes = 0
            elif argument is not None and buffer.maker >= 0:
                readers = self._parameters[argument][0].users
                if all(reader <= buffer.maker for reader in readers):
                    buffer.bytes = 0
                    self._predecessors[buffer.maker].update(set(readers) - {buffer.maker})

    def overwrite(self) -> None:
        """Put results into buffers of operands that nothing reads afterwards.

        Other readers of those then have to come before in any order.
        """
        results = {id(b) for b in self._root}
        for result, operands in self._candidates:
            index = result.maker
            for buffer in (b.place for b in operands if id(b) not in results):
                fits = buffer.maker >= 0 and buffer.bytes == result.bytes > 0
                if fits and max(buffer.users) == index:
                    self._predecessors[index].update(set(buffer.users) - {index})
                    buffer.users |= result.users
                    result.into = buffer
                    break

    @property
    def _root(self) -> list[_Buffer]:
        return self._held[self._computation.root.name]

    def problem(self) -> Problem:
        """What was noted."""
        tensors = (
            Tensor(b.bytes, b.maker, tuple(b.users), b.kept, b.kind)
            for b in self._buffers
            if b.bytes and not b.into
        )
        before = tuple(tuple(sorted(p)) for p in self._predecessors)
        return Problem(before, tuple(tensors), tuple(self._names))


def _kind(array: Array) -> str:
    return format_array(array.dtype, array.dims)


def _is_elementwise(instruction: Instruction) -> bool:
    """Whether an instruction may write over an operand that dies."""
    if instruction.opcode == "fusion":
        return instruction.attribute("kind") == "kLoop"
    return instruction.opcode in _ELEMENTWISE


def _part(shape: Shape, index: int, whole: list[_Buffer]) -> list[_Buffer]:
    """The buffers of one part of a tuple."""
    assert not isinstance(shape, Array)
    counts = [len(list(leaves(part))) for part in shape]
    start = sum(counts[:index])
    return whole[start : start + counts[index]]


def _updated(fusion: Computation, part: Instruction) -> int | None:
    """Which parameter a fusion's result is an update in place of; None if it is not."""
    while part.opcode == "bitcast":
        (part,) = fusion.operands(part)
    if part.opcode not in _UPDATES:
        return None
    while part.opcode in _UPDATES or part.opcode == "bitcast":
        part = fusion.operands(part)[0]
    return int(part.argument) if part.opcode == "parameter" else None
