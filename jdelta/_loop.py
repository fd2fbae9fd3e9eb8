"""How often the loops of a compiled HLO module run, and what counts their trips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jdelta._hlo import Computation, Instruction, Module

_COPIES = frozenset({"bitcast", "copy", "copy-done", "copy-start"})


@dataclass(frozen=True)
class Loop:
    """A ``while``.

    Attributes:
        body: What it runs.
        trips: How often; 1 when the text does not say.
        counters: Start and step of the elements of its state that count the trips.
    """

    body: Computation
    trips: int
    counters: dict[int, tuple[int, int]]


def read_loop(module: Module, computation: Computation, instruction: Instruction) -> Loop:
    """The loop of a ``while`` in ``computation``.

    GPU compilers note the number of trips on the instruction; for TPUs it is read off a condition
    that compares a counter with a constant.
    """
    body = module[instruction.attribute("body")]
    if "known_trip_count" in instruction.config:
        return _noted(body, instruction.config)
    condition = module[instruction.attribute("condition")]
    bound = _bound(condition)
    if bound is None:
        return Loop(body, 1, {})
    index, stop = bound
    start = _start(computation, instruction, index)
    return Loop(body, max(0, stop - start), {index: (start, 1)})


def _noted(body: Computation, config: dict[str, Any]) -> Loop:
    step = config.get("known_init_step", {"init": 0, "step": 1})
    index = config.get("known_induction_variable", {"tuple_index": 0})
    counters: list[dict[str, Any]] = [{**index, **step}, *config.get("dynamic_variables", [])]
    return Loop(
        body,
        int(config["known_trip_count"]["n"]),
        {int(c["tuple_index"]): (int(c["init"]), int(c["step"])) for c in counters},
    )


def _bound(condition: Computation) -> tuple[int, int] | None:
    """Which element of its state a loop counts, and up to where: ``counter < constant``."""
    root = condition.root
    if root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    counter, stop = condition.operands(root)
    if counter.opcode != "get-tuple-element" or stop.opcode != "constant":
        return None
    return int(counter.attribute("index")), int(stop.argument)


def _start(computation: Computation, instruction: Instruction, index: int) -> int:
    """Where the counter starts; JAX's scans start at 0."""
    (state,) = computation.operands(instruction)
    if state.opcode != "tuple":
        return 0
    value = computation[state.operands[index]]
    while value.opcode in _COPIES:
        value = computation[value.operands[0]]
    return int(value.argument) if value.opcode == "constant" else 0
