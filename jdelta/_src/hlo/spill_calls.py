"""Reads from a compiled program what it writes to files and reads back."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jdelta._src.hlo.text import Array, Computation, Instruction, Module, leaves
from jdelta._src.spill.callbacks import scope
from jdelta._src.spill.library import READ, WRITE

_ATTRIBUTE = re.compile(r"\bslot = (\d+)")


def file_calls(program: Module) -> tuple[tuple[int, int], ...]:
    """Slot and bytes per device of all that it both writes and reads, in the order of the slots.

    Handlers are custom calls. A callback is a custom call of JAX, or on a TPU values that are sent
    to the host and received from it, which have its scope's name.
    """
    return tuple(sorted(_calls(program, WRITE).items() & _calls(program, READ).items()))


def _calls(program: Module, call: str) -> dict[int, int]:
    """Bytes by slot of what goes one way."""
    sizes: dict[int, int] = {}
    for computation in program.computations.values():
        for instruction in computation:
            slot = _slot(instruction, call)
            if slot is not None:
                size = max(map(_bytes, _values(instruction, computation, call)), default=0)
                sizes[slot] = max(size, sizes.get(slot, 0))
    return sizes


def _slot(instruction: Instruction, call: str) -> int | None:
    if instruction.opcode not in ("custom-call", "send", "recv"):
        return None
    if instruction.attribute("custom_call_target") == call:
        match = _ATTRIBUTE.search(instruction.attributes)
    else:
        match = re.search(scope(call, r"(\d+)/"), instruction.attribute("op_name"))
    return int(match[1]) if match else None


def _values(instruction: Instruction, computation: Computation, call: str) -> Iterable[Array]:
    """What is written, or read, and the numbers that go with it."""
    if call == READ:
        return leaves(instruction.shape)
    return (array for value in computation.operands(instruction) for array in leaves(value.shape))


def _bytes(array: Array) -> int:
    """Bytes of the value itself, as the host gets it: without tiles."""
    return array.elements * array.bits // 8
