"""Reads the text of a compiled HLO module: computations, instructions, shapes and loops."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

DEVICE, HOST = 0, 5
"""Memory spaces as layouts print them: device memory is the default, host memory is ``S(5)``."""

_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_LINE = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)")
_ARRAY = re.compile(r"(?P<dtype>\w+)(?:\[(?P<dims>[^\]]*)\])?(?:\{(?P<layout>[^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_TILE = re.compile(r"T\(([\d,]+)\)")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)")
_WIDTH = re.compile(r"[a-z]+(\d+)")

_DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
}


@dataclass(frozen=True)
class Array:
    """Shape of one array.

    Attributes:
        dtype: HLO's name of the element type ("bf16", "s4", "f8e4m3fn").
        dims: Extents.
        order: Axes from the fastest to the slowest varying one; empty when not printed.
        memory: Memory space it lives in.
        tile: Extents of the tiles it is stored in, of its slowest axis first; empty when it is not.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    memory: int = DEVICE
    tile: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of one element; types narrower than a byte are packed, truth values are not."""
        match = _WIDTH.match(self.dtype)
        return int(match[1]) if match else 8 * (self.dtype == "pred")

    @property
    def bytes(self) -> int:
        """Bytes in memory: extents of tiled axes count as multiples of the tile's."""
        stored = list(self.dims)
        for axis, tile in zip(self.order, reversed(self.tile), strict=False):
            stored[axis] = -(-stored[axis] // tile) * tile
        return -(-math.prod(stored) * self.bits // 8)

    @property
    def numpy_dtype(self) -> str:
        """The name that numpy and ml_dtypes have for the element type."""
        if self.dtype in _DTYPES:
            return _DTYPES[self.dtype]
        if match := re.fullmatch(r"f(\d)(e\d+m\d+\w*)", self.dtype):
            return f"float{match[1]}_{match[2]}"
        return re.sub(r"^([su])(?=\d)", lambda m: {"s": "int", "u": "uint"}[m[1]], self.dtype)


Shape = Array | tuple["Shape", ...]


def leaves(shape: Shape) -> Iterator[Array]:
    """The arrays of a shape, in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Its name, unique within the computation.
        opcode: What it does, as printed.
        shape: Shape of its result.
        operands: Names of the instructions it reads.
        argument: Text between the parentheses: a constant's literal, a parameter's number.
        attributes: Everything after them.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    argument: str
    attributes: str

    @property
    def array(self) -> Array:
        """Its result, or the first array of it."""
        return next(leaves(self.shape))

    @cached_property
    def called(self) -> str | None:
        """The computation that a fusion, a call or an asynchronous start runs."""
        match = _CALLED.search(self.attributes)
        return match and match[1]

    def attribute(self, name: str) -> str:
        """The value of an attribute without its braces, quotes or sign; empty if not there."""
        value = rf'\b{name}=(?:\{{([^}}]*)\}}|"([^"]*)"|%?([\w.\->]+))'
        match = re.search(value, self.attributes)
        return next(filter(None, match.groups()), "") if match else ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """What the back end noted on the instruction: nothing where that is no JSON.

        A custom call has attributes of MLIR there, if its handler is an FFI one: a Cholesky
        decomposition on a GPU ``{lower = true}``.
        """
        _, separator, text = self.attributes.partition("backend_config=")
        try:
            config = json.JSONDecoder().raw_decode(text)[0] if separator else {}
        except json.JSONDecodeError:
            return {}
        return cast(dict[str, Any], config) if isinstance(config, dict) else {}


@dataclass(frozen=True)
class Computation:
    """Instructions in the order of execution, if the module is scheduled, by name."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that this one reads."""
        return [self[name] for name in instruction.operands]

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by number."""
        return {int(i.argument): i for i in self if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Who reads each instruction, and as which operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self:
            for position, name in enumerate(instruction.operands):
                users[name].append((instruction, position))
        return users


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        computations: Its computations by name.
        entry: The one that runs.
        aliases: From results to the arguments whose place they may take, both counted leaf by leaf.
    """

    computations: dict[str, Computation]
    entry: Computation
    aliases: dict[int, int] = field(default_factory=dict[int, int])

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]

    def called(self, instruction: Instruction) -> Computation | None:
        """The computation that a fusion, a call or an asynchronous start runs."""
        return self.computations.get(instruction.called or "")


def parse(text: str) -> Module:
    """Reads a module in the form that ``jax.stages.Compiled.as_text`` prints."""
    computations: dict[str, Computation] = {}
    entry = ""
    header: re.Match[str] | None = None
    body: list[tuple[bool, Instruction]] = []
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            body.append((bool(match["root"]), _instruction(match["name"], match["rest"])))
        elif match := _HEADER.fullmatch(line):
            header, body = match, []
            entry = match["name"] if match["entry"] else entry
        elif line.startswith("}") and header:
            computations[header["name"]] = _computation(header["name"], body)
            header = None
    head = text[: text.find("\n")]
    aliases = {int(result or 0): int(argument) for result, argument in _ALIAS.findall(head)}
    return Module(computations, computations[entry], aliases)


def _computation(name: str, body: list[tuple[bool, Instruction]]) -> Computation:
    root = next((i for is_root, i in body if is_root), body[-1][1])
    return Computation(name, {i.name: i for _, i in body}, root)


def _instruction(name: str, text: str) -> Instruction:
    """Reads ``SHAPE opcode(operands), attributes``."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    start = text.index("(", end)
    close = _closing(text, start)
    argument = text[start + 1 : close - 1]
    opcode = text[end:start].strip()
    return Instruction(
        name=name,
        opcode=opcode,
        shape=_shape(text[:end]),
        operands=() if opcode == "constant" else tuple(_NAME.findall(argument)),
        argument=argument,
        attributes=text[close:],
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` has closed."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.end()
    raise ValueError(f"unbalanced parentheses in HLO text: {text[:200]!r}")


def _shape(text: str) -> Shape:
    text = _COMMENT.sub("", text).strip()
    if not text.startswith("("):
        return _array(text)
    return tuple(_shape(part) for part in _split(text[1:-1]))


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that stand in no bracket."""
    depth = start = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    if text[start:].strip():
        yield text[start:]


def _array(text: str) -> Array:
    match = _ARRAY.match(text)
    if match is None:
        raise ValueError(f"no shape in HLO text: {text[:200]!r}")
    order, _, rest = (match["layout"] or "").partition(":")
    memory, tile = re.search(r"S\((\d+)\)", rest), _TILE.search(rest)
    return Array(
        dtype=match["dtype"],
        dims=_numbers(match["dims"]),
        order=_numbers(order),
        memory=int(memory[1]) if memory else DEVICE,
        tile=_numbers(tile[1]) if tile else (),
    )


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))
