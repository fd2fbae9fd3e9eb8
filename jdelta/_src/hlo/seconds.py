"""Roofline seconds and traffic of the instructions of a compiled HLO module.

Matrix products and convolutions are priced by their arithmetic, and so are operations on integers,
of which random bits take a hundred an element; everything else moves bytes.
Kernels that the text does not describe (attention of cuDNN, factorizations of cuSOLVER) pay for
their bytes alone; those of Pallas for TPUs for what their authors estimate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from jdelta._src.backends.chips import Rates, multiply_add_flops, product_kind
from jdelta._src.hlo.text import DEVICE, Array, Computation, Instruction, Module, Shape, leaves
from jdelta._src.program.windows import taps_inside

_FREE = frozenset(
    "add-dependency after-all bitcast conditional call constant get-tuple-element"
    " opt-barrier parameter partition-id replica-id tuple while".split()
)

# Custom calls that name a buffer, or a property of one, and run nothing.
_FREE_CALLS = frozenset(
    {
        "AllocateBuffer",
        "AssumeGatherIndicesInBound",
        "ConcatBitcast",
        "GatherScatterIndicesBitpacked",
    }
)

# On integers, at an operation an element. Of a rotation (left, right, either) only the shift to the
# right is here: GPUs rotate in one.
_INTEGER = frozenset("add and multiply shift-right-logical subtract xor".split())

_SLICES = frozenset({"dynamic-slice", "gather", "slice"})

# Input, kernel and output of the convolution that a call of cuDNN stands for: its operands by
# position, its result as -1. Window and dimension labels are always those of the forward pass.
_CUDNN = {
    "__cudnn$convForward": (0, 1, -1),
    "__cudnn$convBiasActivationForward": (0, 1, -1),
    "__cudnn$convForwardGraph": (0, 1, -1),
    "__cudnn$convBackwardInput": (-1, 1, 0),
    "__cudnn$convBackwardFilter": (0, -1, 1),
}


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction takes no time of its own: it names, groups or waits for values."""
    if instruction.opcode == "custom-call":
        return instruction.attribute("custom_call_target") in _FREE_CALLS
    return instruction.opcode in _FREE or instruction.opcode.endswith("-done")


def seconds(
    module: Module, computation: Computation, instruction: Instruction, rates: Rates
) -> float:
    """Roofline seconds of one instruction on the device, control flow and transfers left out.

    Args:
        module: The program.
        computation: The computation the instruction stands in.
        instruction: What is priced.
        rates: Rates of the target.
    """
    if is_free(instruction) or instruction.opcode in ("copy-start", "slice-start"):
        return 0.0
    work = products(module, computation, instruction)
    arithmetic = sum(flops / rates.flops(kind) for kind, flops in work)
    arithmetic = max(arithmetic, _integers(module, instruction) / rates.integer)
    read, written = traffic(module, computation, instruction, DEVICE)
    return max(arithmetic, (read + written) / rates.bandwidth)


# Arithmetic


def products(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[str, float]]:
    """The matrix products and convolutions in an instruction: kind and FLOPs of each."""
    if (inner := module.called(instruction)) and _op(instruction) in ("fusion", "async"):
        for part in inner:
            yield from products(module, inner, part)
    elif rule := _rule(instruction):
        arrays = [operand.array for operand in computation.operands(instruction)]
        # The operands of a kernel begin with indices, if it has any.
        first = next((a for a in arrays if "int" not in a.numpy_dtype), arrays[0])
        kind = product_kind(first.numpy_dtype, _precision(instruction))
        yield kind, multiply_add_flops(first.numpy_dtype) / 2.0 * rule(instruction, arrays)


def _precision(instruction: Instruction) -> str:
    """The precision that its first operand is taken with, as ``product_kind`` wants it."""
    cublas = instruction.config.get("gemm_backend_config", {}).get("precision_config", {})
    of_operands = cublas.get("operand_precision")
    asked = of_operands[0].lower() if of_operands else instruction.attribute("operand_precision")
    return asked.partition(",")[0] or "default"


def _integers(module: Module, instruction: Instruction) -> int:
    """Operations on integers in an instruction."""
    if (inner := module.called(instruction)) and _op(instruction) in ("fusion", "async"):
        return sum(_integers(module, part) for part in inner)
    if instruction.opcode not in _INTEGER:
        return 0
    return instruction.array.elements if instruction.array.dtype in ("s32", "u32") else 0


def _op(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


_Rule = Callable[[Instruction, list[Array]], float]


def _rule(instruction: Instruction) -> _Rule | None:
    if instruction.opcode != "custom-call":
        return {"dot": _dot, "convolution": _convolution}.get(_op(instruction))
    name = instruction.attribute("custom_call_target")
    if name in _CUDNN:
        return _cudnn
    if _estimate(instruction).get("flops"):
        return _kernel
    if name == "__cublas$triangularSolve":
        return _triangular_solve
    return _cublas if name.startswith("__cublas$") else None


def _estimate(instruction: Instruction) -> dict[str, str]:
    """What the author of a TPU kernel says that it takes: {"flops": "68719476736", ...}."""
    return instruction.config.get("custom_call_config", {}).get("cost_estimate", {})


def _kernel(instruction: Instruction, operands: list[Array]) -> float:
    return float(_estimate(instruction)["flops"])


def _dot(instruction: Instruction, operands: list[Array]) -> float:
    axes = re.findall(r"\d+", instruction.attribute("lhs_contracting_dims"))
    return 2.0 * instruction.array.elements * math.prod(operands[0].dims[int(i)] for i in axes)


def _cublas(instruction: Instruction, operands: list[Array]) -> float:
    numbers = instruction.config["gemm_backend_config"]["dot_dimension_numbers"]
    axes: list[str] = numbers.get("lhs_contracting_dimensions", [])
    return 2.0 * instruction.array.elements * math.prod(operands[0].dims[int(i)] for i in axes)


def _triangular_solve(instruction: Instruction, operands: list[Array]) -> float:
    """As many as the product of the square matrix with the right-hand sides, zeros included."""
    return 2.0 * instruction.array.elements * operands[0].dims[-1]


def _convolution(instruction: Instruction, operands: list[Array]) -> float:
    return _window_flops(instruction, operands[0], operands[1], instruction.array)


def _cudnn(instruction: Instruction, operands: list[Array]) -> float:
    roles = _CUDNN[instruction.attribute("custom_call_target")]
    arrays = [*operands[:2], instruction.array]
    return _window_flops(instruction, *(arrays[role] for role in roles))


def _window_flops(instruction: Instruction, lhs: Array, rhs: Array, out: Array) -> float:
    """FLOPs of a convolution, without those that fall on padding or between dilated elements.

    TPU matrix products are printed as convolutions too, and encode a batch dimension as a window
    of which all but one tap falls between elements.
    """
    labels = re.split("_|->", instruction.attribute("dim_labels"))
    left, right, result = (
        dict(zip(text, array.dims, strict=True))
        for text, array in zip(labels, (lhs, rhs, out), strict=True)
    )
    window = dict(re.findall(r"(\w+)=([\w\-]+)", instruction.attribute("window")))
    taps = math.prod(
        _taps(window, int(axis), left[axis], right[axis], result[axis])
        for axis in filter(str.isdigit, result)
    )
    return 2.0 * result["b"] * result["f"] * right["i"] * taps


def _taps(window: dict[str, str], axis: int, size: int, taps: int, outputs: int) -> int:
    """Pairs of output position and kernel tap that meet an element of the input."""

    def field(name: str, default: str) -> str:
        return window[name].split("x")[axis] if name in window else default

    return taps_inside(
        size,
        taps,
        outputs,
        stride=int(field("stride", "1")),
        dilation=int(field("lhs_dilate", "1")),
        spacing=int(field("rhs_dilate", "1")),
        padding=int(field("pad", "0_0").split("_")[0]),
    )


# Traffic


def traffic(
    module: Module, computation: Computation, instruction: Instruction, memory: int
) -> tuple[int, int]:
    """Bytes that an instruction reads from and writes to one memory.

    A stack of which only a slice is read or updated in place counts the slice.
    """
    if is_free(instruction):
        return 0, 0
    read = sum(
        _read(module, computation, instruction, position, bytes_in(operand.shape, memory))
        for position, operand in enumerate(computation.operands(instruction))
    )
    return read, _written(module, computation, instruction, result(instruction), memory)


def bytes_in(shape: Shape, memory: int) -> int:
    """Bytes of the arrays of a shape that live in one memory."""
    return sum(array.bytes for array in leaves(shape) if array.memory == memory)


def result(instruction: Instruction) -> Shape:
    """What an instruction writes.

    A start has its operands and a context beside its result: ``copy-start`` is (destination,
    source, context), the others are ((operands), result, context).
    """
    shape = instruction.shape
    if not instruction.opcode.endswith("-start") or isinstance(shape, Array):
        return shape
    return shape[0 if instruction.opcode == "copy-start" else 1]


def _read(
    module: Module, computation: Computation, user: Instruction, position: int, size: int
) -> int:
    """Bytes that ``user`` reads of an operand which has ``size`` bytes."""
    if size == 0:
        return 0
    if (inner := module.called(user)) and _op(user) in ("fusion", "async"):
        return _read_of(module, inner, inner.parameters[position].name, size)
    if user.opcode == "bitcast":
        return _read_of(module, computation, user.name, size)
    if _op(user) in _SLICES and position == 0:
        return min(size, sum(array.bytes for array in leaves(result(user))))
    return 0 if _op(user) == "dynamic-update-slice" and position == 0 else size


def _read_of(module: Module, computation: Computation, name: str, size: int) -> int:
    """Bytes that all users of a value inside a fusion read of it."""
    if computation.root.name == name:
        return size
    read = 0
    for user, position in computation.users[name]:
        if _is_relayout(user):
            read += _read_of(module, computation, user.name, size)
        else:
            read += _read(module, computation, user, position, size)
    return min(size, read)


def _is_relayout(instruction: Instruction) -> bool:
    """Whether an instruction inside a fusion only says how its operand is tiled (TPUs)."""
    aliased = "output_to_operand_aliasing" in instruction.attributes
    return instruction.opcode == "fusion" and len(instruction.operands) == 1 and aliased


def _written(
    module: Module, computation: Computation, instruction: Instruction, shape: Shape, memory: int
) -> int:
    """Bytes of a result of ``shape`` that are written to ``memory``."""
    if bytes_in(shape, memory) == 0:
        return 0
    if (inner := module.called(instruction)) and _op(instruction) in ("fusion", "async"):
        return _written(module, inner, inner.root, shape, memory)
    operands = computation.operands(instruction)
    if instruction.opcode == "tuple" and not isinstance(shape, Array):
        parts = zip(operands, shape, strict=True)
        return sum(_written(module, computation, part, s, memory) for part, s in parts)
    if instruction.opcode == "bitcast":
        return _written(module, computation, operands[0], shape, memory)
    if _op(instruction) == "dynamic-update-slice":
        return operands[1].array.bytes
    return bytes_in(shape, memory)
