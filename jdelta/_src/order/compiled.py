"""A scheduled HLO module as operators and tensors, in the compiler's own order.

Buffers as XLA assigns them, as far as the text says: views, loops and updates of a part share what
they are given, a fusion writes over an operand that it is the last to read, if it reads no element
after it has written it. XLA puts temporaries into the memory of a donated argument from its last
reader on until its result comes: such an argument is a tensor too, that the operator ``arguments``
makes before all others. What a TPU moves to its on-chip memory and back counts as if it stayed, so
that no order looks better for holding more there than there is room for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jdelta._src.hlo.text import HOST, Array, Computation, Instruction, Module, Shape, leaves
from jdelta._src.order.problem import Problem, Tensor
from jdelta._src.sizes import format_array

_GIVEN = frozenset({"parameter", "constant", "after-all", "partition-id", "replica-id"})
_SAME = frozenset({"bitcast", "opt-barrier", "while", "add-dependency"})
_VIEWS = (_SAME | {"tuple", "get-tuple-element"}) - {"while"}
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})
_ELEMENTWISE = frozenset(
    "abs add and compare convert cosine divide exponential log maximum minimum multiply negate not"
    " or power rsqrt select sine sqrt subtract tanh xor".split()
)
_IN_STEP = _ELEMENTWISE | {"bitcast", "reduce", "tuple"}
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")

_ARGUMENTS = 0
"""The operator that makes the arguments."""


def compiled_problem(module: Module) -> tuple[Problem, int]:
    """The problem that the entry of a module poses.

    Returns:
        The problem, and the bytes of its tensors that are arguments: not to be counted in what it
        allocates. Other arguments, and constants, are no tensors.
    """
    problem = _problem(module, module.entry, module.aliases)
    return problem, sum(problem.tensors[t].bytes for t in problem.allocated[_ARGUMENTS])


def _problem(
    module: Module, computation: Computation, aliases: Mapping[int, int] | None
) -> Problem:
    """The problem of a computation; `aliases` as for `_Builder.keep`."""
    builder = _Builder(module, computation)
    for instruction in computation:
        builder.add(instruction)
    builder.keep(aliases)
    builder.overwrite()
    return builder.problem()


@dataclass
class _Buffer:
    """A buffer of the program; one that is given is not counted.

    Attributes:
        bytes: Its size.
        maker: The operator that makes it.
        kind: Its type and shape.
        users: Operators that read it.
        kept: Whether it stays to the end.
        into: The buffer that it is written over.
        after: Operators whose reading frees its place: that of an argument.
    """

    bytes: int
    maker: int
    kind: str = ""
    users: dict[int, None] = field(default_factory=dict[int, None])
    kept: bool = False
    into: _Buffer | None = None
    after: frozenset[int] = frozenset()

    @property
    def place(self) -> _Buffer:
        """The buffer itself, or the one it is written over."""
        return self.into.place if self.into else self


class _Builder:
    def __init__(self, module: Module, computation: Computation):
        self._module = module
        self._computation = computation
        self._results_of: dict[str, list[_Buffer]] = {}
        self._waits: dict[str, frozenset[int]] = {}
        self._parameters: dict[int, list[_Buffer]] = {}
        self._buffers: list[_Buffer] = []
        self._predecessors: list[set[int]] = [set()]
        self._names: list[str] = ["arguments"]
        self._candidates: list[tuple[_Buffer, list[_Buffer]]] = []

    def add(self, instruction: Instruction) -> None:
        """Note what an instruction holds; it is an operator if it makes a buffer or runs a body."""
        before = [self._results_of[name] for name in instruction.operands]
        waits = frozenset[int]().union(*(self._waits[name] for name in instruction.operands))
        if instruction.opcode in _GIVEN:
            results = [_Buffer(0, _ARGUMENTS) for _ in leaves(instruction.shape)]
            self._results_of[instruction.name], self._waits[instruction.name] = results, waits
            if instruction.opcode == "parameter":
                self._parameters[int(instruction.argument)] = results
            return
        index = len(self._predecessors)
        results, new_buffers = self._results(instruction, before, index)
        inside = self._inside(instruction)
        self._results_of[instruction.name] = results
        if not new_buffers and not inside and instruction.opcode in _VIEWS:
            self._waits[instruction.name] = waits
            return
        self._waits[instruction.name] = frozenset({index})
        self._predecessors.append(set(waits) or {_ARGUMENTS})
        self._names.append(instruction.name)
        self._buffers += new_buffers
        if inside:
            self._buffers.append(_Buffer(inside, index, "inside"))
        for buffer in (b for part in before for b in part):
            if buffer.maker != index:
                buffer.users[index] = None
        for position, buffer in enumerate(results):
            if any(buffer is b for b in new_buffers):
                self._candidates.append((buffer, self._alike(instruction, position)))

    def _alike(self, instruction: Instruction, position: int) -> list[_Buffer]:
        """Buffers of operands that the result at a position may be written over."""
        inner = self._module.called(instruction) if instruction.opcode == "fusion" else None
        if inner:
            parts = _parts(inner)  # fewer than results where one part is a tuple itself
            read = _read_in_step(inner, parts[position]) if position < len(parts) else []
            operands = [instruction.operands[number] for number in read]
        elif instruction.opcode in _ELEMENTWISE:
            operands = instruction.operands
        else:
            return []
        return [self._results_of[name][0] for name in dict.fromkeys(operands)]

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
        problems = (_problem(self._module, self._module[b], None) for b in bodies)
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
        if opcode in _SAME or 'custom_call_target="ConcatBitcast"' in instruction.attributes:
            return list(before[0]), []  # the latter: slices that are moved one by one
        if opcode.endswith("-done"):
            return self._finished(instruction, before[0]), []
        arrays = list(leaves(instruction.shape))
        results: list[_Buffer] = []
        new_buffers: list[_Buffer] = []
        shared = self._shared(instruction, before)
        for position, array in enumerate(arrays):
            buffer = shared.get(position)
            if buffer is None:
                size = 0 if array.memory == HOST else array.bytes
                buffer = _Buffer(size, index, _kind(array))
                new_buffers.append(buffer)
            results.append(buffer)
        return results, new_buffers

    def _element(self, instruction: Instruction, tuple_buffers: list[_Buffer]) -> list[_Buffer]:
        (operand,) = self._computation.operands(instruction)
        return _part(operand.shape, int(instruction.attribute("index")), tuple_buffers)

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
        shared: dict[int, _Buffer] = {}
        for position, part in enumerate(_parts(inner)):
            operand = _updated(inner, part)
            buffer = before[operand][0] if operand is not None else None
            if buffer is not None:
                shared[position] = buffer
        return shared

    def _started(
        self, instruction: Instruction, before: Sequence[list[_Buffer]]
    ) -> dict[int, _Buffer]:
        """A start has its operands beside its result: they stay where they are."""
        operands = [b for part in before for b in part]
        begin = 1 if instruction.opcode == "copy-start" else 0
        if isinstance(instruction.shape, Array):
            return {}
        shared = {begin + i: buffer for i, buffer in enumerate(operands)}
        return {**self._moved(instruction, operands), **shared}

    def _moved(self, instruction: Instruction, operands: list[_Buffer]) -> dict[int, _Buffer]:
        """A copy between the memory of a device and that on its chip is the same value."""
        if instruction.opcode not in {"copy-start", "slice-start"}:
            return {}
        memories = [array.memory for array in leaves(instruction.shape)]
        on_chip = HOST not in memories[:2] and memories[0] != memories[1]
        return {0 if instruction.opcode == "copy-start" else 1: operands[0]} if on_chip else {}

    def keep(self, aliases: Mapping[int, int] | None) -> None:
        """Results stay; none of a body takes memory, and few that take an argument's place.

        Args:
            aliases: From results to the arguments whose place they take; None for a body.
        """
        for position, buffer in enumerate(self._root):
            buffer.kept = True
            if aliases is None:
                buffer.bytes = 0
            elif position in aliases and buffer.maker > _ARGUMENTS:
                self._replace(self._parameters[aliases[position]][0], buffer)

    def _replace(self, argument: _Buffer, result: _Buffer) -> None:
        """Put a result into an argument's place, if nothing reads the argument afterwards.

        Unless it is made by a reader of the argument, there is room in that place until it comes.
        """
        maker, readers = result.maker, set(argument.users)
        if any(reader > maker for reader in readers):
            return
        self._predecessors[maker].update(readers - {maker})
        if maker in readers:
            result.bytes = 0
        else:
            argument.bytes, result.after = result.bytes, frozenset(readers)
            self._buffers.append(argument)

    def overwrite(self) -> None:
        """Put what is made into buffers of operands that nothing reads afterwards.

        Other readers of those then have to come before in any order.
        """
        for result, operands in self._candidates:
            buffer = next((b.place for b in operands if self._dies(b.place, result)), None)
            if buffer:
                self._predecessors[result.maker].update(set(buffer.users) - {result.maker})
                self._predecessors[buffer.maker].update(result.after)
                buffer.users |= result.users
                buffer.kept, result.into = result.kept, buffer

    def _dies(self, buffer: _Buffer, result: _Buffer) -> bool:
        """Whether a buffer is not needed once a result is made, and fits in the result's place."""
        fits = buffer.bytes == result.bytes > 0 and not buffer.kept
        free = buffer.maker > max(result.after, default=_ARGUMENTS)
        return fits and free and max(buffer.users) == result.maker

    @property
    def _root(self) -> list[_Buffer]:
        return self._results_of[self._computation.root.name]

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


def _parts(fusion: Computation) -> list[Instruction]:
    """The results of a fusion."""
    return fusion.operands(fusion.root) if fusion.root.opcode == "tuple" else [fusion.root]


def _read_in_step(fusion: Computation, result: Instruction) -> list[int]:
    """Parameters of a fusion of which it reads no element after it has written that of a result.

    They lead to that result, to others and to reductions by what works element by element.
    """
    return [n for n, p in fusion.parameters.items() if _leads_to(fusion, p, result)]


def _leads_to(fusion: Computation, parameter: Instruction, result: Instruction) -> bool:
    todo, seen = [parameter.name], {parameter.name}
    while todo:
        name = todo.pop()
        for user, _ in fusion.users[name]:
            if user.opcode not in _IN_STEP:
                return False
            if user.opcode not in {"reduce", "tuple"} and user.name not in seen:
                seen.add(user.name)
                todo.append(user.name)
    return result.name in seen


def _part(shape: Shape, index: int, tuple_buffers: list[_Buffer]) -> list[_Buffer]:
    """The buffers of one part of a tuple."""
    assert not isinstance(shape, Array)
    counts = [len(list(leaves(part))) for part in shape]
    start = sum(counts[:index])
    return tuple_buffers[start : start + counts[index]]


def _updated(fusion: Computation, part: Instruction) -> int | None:
    """Which parameter a fusion's result is an update in place of; None if it is not."""
    while part.opcode == "bitcast":
        (part,) = fusion.operands(part)
    if part.opcode not in _UPDATES:
        return None
    while part.opcode in _UPDATES or part.opcode == "bitcast":
        part = fusion.operands(part)[0]
    return int(part.argument) if part.opcode == "parameter" else None
