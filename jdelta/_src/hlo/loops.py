"""How often the loops of a compiled HLO module run, and what counts their trips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jdelta._src.hlo.text import Computation, Instruction, Module

_COPIES = frozenset({"bitcast", "copy", "copy-done", "copy-start"})


@dataclass(frozen=True)
class Loop:
    """A ``while``.

    Attributes:
        body: What it runs.
        trips: How often; 1 when the text does not say.
        counters: Start and step of the elements of its state that are known to count the trips.
        initial: What each element of its state is before the first trip; empty where that is not
            listed. They are instructions of the computation that the loop is in.
    """

    body: Computation
    trips: int
    counters: dict[int, tuple[int, int]]
    initial: tuple[str, ...] = ()


def read_loop(module: Module, computation: Computation, instruction: Instruction) -> Loop:
    """The loop of a ``while`` in ``computation``.

    GPU compilers note the number of trips on the instruction; for TPUs it is read off a condition
    that compares a counter with a constant.
    """
    body = module[instruction.attribute("body")]
    (state,) = computation.operands(instruction)
    initial = state.operands if state.opcode == "tuple" else ()
    if "known_trip_count" in instruction.config:
        trips, counters = _noted(instruction.config)
        return Loop(body, trips, counters, initial)
    condition = module[instruction.attribute("condition")]
    bound = _bound(condition)
    if bound is None:
        return Loop(body, 1, {}, initial)
    index, stop = bound
    start = _start(computation, initial, index)
    return Loop(body, max(0, stop - start), {index: (start, 1)}, initial)


def _noted(config: dict[str, Any]) -> tuple[int, dict[int, tuple[int, int]]]:
    """Trips and counters by what a GPU compiler notes; a pipelined loop has some without start."""
    step = config.get("known_init_step", {"init": 0, "step": 1})
    index = config.get("known_induction_variable", {"tuple_index": 0})
    noted: list[dict[str, Any]] = [{**index, **step}, *config.get("dynamic_variables", [])]
    counters = {
        int(c["tuple_index"]): (int(c["init"]), int(c["step"]))
        for c in noted
        if c.keys() >= {"tuple_index", "init", "step"}
    }
    return int(config["known_trip_count"]["n"]), counters


def _bound(condition: Computation) -> tuple[int, int] | None:
    """Which element of its state a loop counts, and up to where: ``counter < constant``."""
    root = condition.root
    if root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    counter, stop = condition.operands(root)
    if counter.opcode != "get-tuple-element" or stop.opcode != "constant":
        return None
    return int(counter.attribute("index")), int(stop.argument)


def _start(computation: Computation, initial: Sequence[str], index: int) -> int:
    """Where the counter starts; JAX's scans start at 0."""
    if not initial:
        return 0
    value = computation[initial[index]]
    while value.opcode in _COPIES:
        value = computation[value.operands[0]]
    return int(value.argument) if value.opcode == "constant" else 0
