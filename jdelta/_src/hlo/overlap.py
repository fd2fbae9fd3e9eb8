"""How much of the transfers between device and host a compiled program hides behind compute.

The text of a compiled program is its schedule. It is run here on three clocks: one for compute,
which takes instruction after instruction, at roofline speed unless it is told another, and one for
each direction of the link to the host, which takes one transfer at a time. A transfer starts when
its start is reached and the link is free; what is left of it when its done is reached is exposed.

Left out: transfers and compute that take device memory's bandwidth from each other, copies between
device memory and the memory on a TPU's chip, links between devices, and the time of launches.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jdelta._src.backends.chips import Rates
from jdelta._src.hlo.loops import read_loop
from jdelta._src.hlo.seconds import seconds, traffic
from jdelta._src.hlo.text import HOST, Computation, Instruction, Module

Price = Callable[[Module, Computation, Instruction, Rates], float]
"""What an instruction takes on the device, in seconds."""


@dataclass(frozen=True)
class Transfer:
    """One instruction of the schedule that moves data over the link to the host.

    Attributes:
        name: The instruction.
        direction: "out" from device to host, "in" from host to device.
        bytes: Bytes of one execution.
        seconds: Time of one execution on the link.
        exposed: Seconds that compute waits for one execution, on average over all.
        trips: Executions per step.
    """

    name: str
    direction: str
    bytes: int
    seconds: float
    exposed: float
    trips: int


@dataclass(frozen=True)
class Overlap:
    """What the schedule makes of all transfers of a program.

    Attributes:
        transfers: The transfers in the order of their first execution.
        compute: Seconds of everything else in the program, at roofline speed or as it was priced.
    """

    transfers: tuple[Transfer, ...]
    compute: float

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Overlap:
        """The overlap that ``dataclasses.asdict`` turned into ``record``."""
        return cls(tuple(Transfer(**t) for t in record["transfers"]), float(record["compute"]))

    @property
    def bytes_out(self) -> int:
        """Bytes moved from device to host."""
        return sum(t.trips * t.bytes for t in self._going("out"))

    @property
    def bytes_in(self) -> int:
        """Bytes moved from host to device."""
        return sum(t.trips * t.bytes for t in self._going("in"))

    @property
    def seconds_out(self) -> float:
        """Seconds of all transfers from device to host on the link."""
        return sum(t.trips * t.seconds for t in self._going("out"))

    @property
    def seconds_in(self) -> float:
        """Seconds of all transfers from host to device on the link."""
        return sum(t.trips * t.seconds for t in self._going("in"))

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for transfers, both ways together."""
        return self.exposed_out + self.exposed_in

    @property
    def seconds(self) -> float:
        """Seconds of the whole program."""
        return self.compute + self.exposed

    @property
    def exposed_out(self) -> float:
        """Seconds that compute waits for transfers from device to host."""
        return sum(t.trips * t.exposed for t in self._going("out"))

    @property
    def exposed_in(self) -> float:
        """Seconds that compute waits for transfers from host to device."""
        return sum(t.trips * t.exposed for t in self._going("in"))

    @property
    def hidden(self) -> float:
        """Share of the seconds on the link that run behind compute; 1 without transfers."""
        total = self.seconds_out + self.seconds_in
        exposed = min(total, self.exposed)  # up to rounding
        return 1.0 - exposed / total if total else 1.0

    def _going(self, direction: str) -> Iterator[Transfer]:
        return (transfer for transfer in self.transfers if transfer.direction == direction)


NO_TRANSFERS = Overlap((), 0.0)
"""Of a program that is not read: one that keeps nothing on the host, but for GPUs."""


def read_overlap(module: Module, rates: Rates, price: Price = seconds) -> Overlap:
    """Reads the schedule of a compiled program.

    Args:
        module: The program as the compiler of a TPU or a GPU prints it.
        rates: Rates of the target.
        price: Prices what computes.
    """
    run = _Run(module, rates, price)
    now = _Clock()
    run.computation(now, run.module.entry)
    return Overlap(tuple(log.transfer() for log in now.logs.values()), now.compute)


@dataclass(frozen=True)
class Span:
    """Something that goes on for a while in a run of the schedule.

    Attributes:
        lane: "compute", "out" (device to host) or "in" (host to device).
        name: The instruction that transfers; empty for compute.
        start: Seconds since the program's start.
        end: Seconds since the program's start.
        bytes: Bytes moved; 0 for compute.
    """

    lane: str
    name: str
    start: float
    end: float
    bytes: int = 0


def read_lanes(module: Module, rates: Rates) -> tuple[Span, ...]:
    """When compute and each transfer run, in the same simulation as that of ``read_overlap``.

    Args:
        module: The program as the compiler of a TPU or a GPU prints it.
        rates: Rates of the target.
    """
    run = _Run(module, rates)
    now = _Clock(spans=[])
    run.computation(now, run.module.entry)
    return tuple(now.spans or ())


@dataclass
class _Log:
    """All executions of a transfer."""

    name: str
    direction: str
    bytes: int
    seconds: float
    exposed: float = 0.0
    trips: int = 0

    def transfer(self) -> Transfer:
        mean = self.exposed / self.trips
        return Transfer(self.name, self.direction, self.bytes, self.seconds, mean, self.trips)


@dataclass
class _Clock:
    """Where a run stands, in seconds since its start.

    Attributes:
        time: What has passed.
        compute: The part of it that was not spent waiting for transfers.
        free: When each direction of the link is free.
        flying: Ends of the transfers whose done is still to come, by their start and direction.
        logs: All transfers so far, by instruction and direction.
        spans: Everything that ran so far, compute without gaps in one; None if not wanted.
    """

    time: float = 0.0
    compute: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: {"out": 0.0, "in": 0.0})
    flying: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    logs: dict[tuple[str, str], _Log] = field(default_factory=dict[tuple[str, str], _Log])
    spans: list[Span] | None = None

    def work(self, duration: float) -> None:
        self._compute(duration)
        self.time += duration
        self.compute += duration

    def start(self, name: str, direction: str, size: int, duration: float) -> None:
        log = self.logs.setdefault((name, direction), _Log(name, direction, size, duration))
        log.trips += 1
        begin = max(self.time, self.free[direction])
        self.free[direction] = begin + duration
        self.flying[name, direction] = self.free[direction]
        if self.spans is not None:
            self.spans.append(Span(direction, name, begin, begin + duration, size))

    def done(self, name: str) -> None:
        for key in [key for key in self.flying if key[0] == name]:
            wait = max(0.0, self.flying.pop(key) - self.time)
            self.logs[key].exposed += wait
            self.time += wait

    def _compute(self, duration: float) -> None:
        if self.spans is None or not duration:
            return
        last = next((i for i, s in enumerate(reversed(self.spans)) if s.lane == "compute"), None)
        at = None if last is None else len(self.spans) - 1 - last
        if at is not None and self.spans[at].end == self.time:
            self.spans[at] = replace(self.spans[at], end=self.time + duration)
        else:
            self.spans.append(Span("compute", "", self.time, self.time + duration))


@dataclass(frozen=True)
class _Run:
    """The simulation of a module.

    Attributes:
        module: What is run.
        rates: Rates of the target.
        price: Prices what computes.
        prices: Known device seconds and bytes from and to the host, by computation and
            instruction.
        quiet: Known seconds of computations that move nothing, by name; ``None`` for the others.
    """

    module: Module
    rates: Rates
    price: Price = seconds
    prices: dict[tuple[str, str], tuple[float, int, int]] = field(
        default_factory=dict[tuple[str, str], tuple[float, int, int]]
    )
    quiet: dict[str, float | None] = field(default_factory=dict[str, float | None])

    def computation(self, now: _Clock, computation: Computation) -> None:
        """Advances ``now`` by one execution of a computation."""
        for instruction in computation:
            self._instruction(now, computation, instruction)

    def _instruction(self, now: _Clock, computation: Computation, instruction: Instruction) -> None:
        match instruction.opcode:
            case "while":
                loop = read_loop(self.module, computation, instruction)
                self._repeat(now, loop.body, loop.trips)
            case "call":
                self._repeat(now, self.module[instruction.called or ""], 1)
            case "conditional":
                self._conditional(now, instruction)
            case opcode if opcode.endswith("-done"):
                now.done(instruction.operands[0])
            case _:
                self._operation(now, computation, instruction)

    def _operation(self, now: _Clock, computation: Computation, instruction: Instruction) -> None:
        device, fetched, stored = self._price(computation, instruction)
        moved = fetched + stored
        if fetched:
            now.start(instruction.name, "in", fetched, fetched / self.rates.host_to_device)
        if stored:
            now.start(instruction.name, "out", stored, stored / self.rates.device_to_host)
        if not (moved and instruction.opcode.endswith("-start")):
            now.done(instruction.name)
            now.work(device)

    def _price(self, computation: Computation, instruction: Instruction) -> tuple[float, int, int]:
        key = computation.name, instruction.name
        if key not in self.prices:
            where = self.module, computation, instruction
            self.prices[key] = self.price(*where, self.rates), *traffic(*where, HOST)
        return self.prices[key]

    def _repeat(self, now: _Clock, body: Computation, trips: int) -> None:
        duration = self._quiet(body)
        if duration is None:
            for _ in range(trips):
                self.computation(now, body)
        else:
            now.work(trips * duration)

    def _quiet(self, body: Computation) -> float | None:
        """Seconds of a computation; ``None`` when it moves anything to or from the host."""
        if body.name not in self.quiet:
            alone = _Clock()
            self.computation(alone, body)
            self.quiet[body.name] = None if alone.logs else alone.compute
        return self.quiet[body.name]

    def _conditional(self, now: _Clock, instruction: Instruction) -> None:
        """Takes the slowest branch."""
        runs: list[_Clock] = []
        for branch in _branches(instruction):
            runs.append(copy.deepcopy(now))
            self._repeat(runs[-1], self.module[branch], 1)
        slowest = max(runs, key=lambda run: run.time)
        vars(now).update(vars(slowest))


def _branches(instruction: Instruction) -> list[str]:
    names = ("branch_computations", "true_computation", "false_computation")
    listed = ",".join(instruction.attribute(name) for name in names)
    return re.findall(r"[\w.\-]+", listed)
