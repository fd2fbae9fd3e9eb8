"""Host memory that a compiled program allocates, read off its text."""

from __future__ import annotations

from jdelta._hlo import HOST, Instruction, Module
from jdelta._hlo_cost import bytes_in, is_free, result

_IN_PLACE = frozenset({"dynamic-update-slice", "dynamic-update-slice-start"})


def allocated(module: Module) -> int:
    """Bytes of all buffers that instructions make in host memory: at least what is alive at once.

    The TPU compiler's own figure counts all but the largest of the arrays twice that are written
    in slices outside of loops (jax 0.12.0.1, libtpu 0.0.50.1); its buffer assignment holds each
    once, as does this sum. Where buffers take each other's place this sum is the larger one.
    """
    return sum(
        bytes_in(result(instruction), HOST)
        for computation in module.computations.values()
        for instruction in computation
        if _makes(instruction)
    )


def _makes(instruction: Instruction) -> bool:
    """Whether the result is a buffer of its own: of custom calls too, AllocateBuffer is one."""
    if instruction.opcode == "custom-call":
        return True
    return instruction.opcode not in _IN_PLACE and not is_free(instruction)
