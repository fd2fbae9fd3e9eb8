"""Host memory that a compiled program allocates, read off its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jdelta._src.hlo.seconds import bytes_in, is_free, result
from jdelta._src.hlo.text import HOST, Computation, Instruction, Module

_IN_PLACE = frozenset({"dynamic-update-slice", "dynamic-update-slice-start"})


def buffers(module: Module) -> tuple[int, ...]:
    """Bytes of each buffer that instructions make in host memory, largest first.

    The TPU compiler's own figure counts all but the largest of the arrays twice that are written
    in slices outside of loops (jax 0.12.0.1, libtpu 0.0.50.1); its buffer assignment holds each
    once, as does this list. Where buffers take each other's place its sum is the larger one.
    """
    sizes = (
        bytes_in(result(instruction), HOST)
        for computation in module.computations.values()
        for instruction in computation
        if _makes(instruction, computation)
    )
    return tuple(sorted(filter(None, sizes), reverse=True))


def without_place(planned: Mapping[str, int], buffer_sizes: Sequence[int]) -> list[str]:
    """Names for whose bytes no buffer has room.

    Args:
        planned: From the names of values to their bytes; several may share a buffer.
        buffer_sizes: Bytes of each buffer.
    """
    room = list(buffer_sizes)
    missing: list[str] = []
    for name in sorted(planned, key=planned.__getitem__, reverse=True):
        fitting = [(left, index) for index, left in enumerate(room) if left >= planned[name]]
        if fitting:
            room[min(fitting)[1]] -= planned[name]
        else:
            missing.append(name)
    return missing


def _makes(instruction: Instruction, computation: Computation) -> bool:
    """Whether the result is a buffer of its own: of custom calls too, AllocateBuffer is one."""
    if instruction.opcode == "custom-call":
        return True
    if instruction.opcode in _IN_PLACE or is_free(instruction):
        return False
    return not (
        instruction.opcode.startswith("fusion")  # on GPUs it writes a slice of its operand
        and any(bytes_in(i.shape, HOST) for i in computation.operands(instruction))
    )
