"""Links from the device to other memories: how fast they are, and which residuals may not go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jdelta._src.backends.target import Target
from jdelta._src.decision import Decision
from jdelta._src.residuals.residual import Residual
from jdelta._src.solver.problem import Memory, Move

HIDING = 0.8
"""Share of the compute of regions with offload that is expected to hide transfers."""

EXPOSED = 0.15
"""Share of a transfer that is expected to be exposed although there is compute to hide it."""

LEAST_OFFLOAD = 1 << 20
"""Bytes below which a buffer is not offloaded: the transfer would be all latency."""


@dataclass(frozen=True)
class Link:
    """What leads from the device to another memory.

    Attributes:
        decision: What moves a residual there.
        out: Bytes per second from the device.
        into: Bytes per second back.
        room: Bytes that residuals may take there.
        refusal: Why a residual must not go there; None if it may.
        hidden_out: Seconds out that are hidden although the forward pass takes less.
        bare: Names of the residuals whose transfers nothing hides.
        waiting: Seconds a byte that the device waits for the host, out and back together.
    """

    decision: Decision
    out: float
    into: float
    room: float
    refusal: Callable[[Residual], str | None]
    hidden_out: float = 0.0
    bare: frozenset[str] = frozenset()
    waiting: float = 0.0

    def move(self, r: Residual) -> Move | None:
        """How a residual moves there; None where it must not."""
        if self.refusal(r):
            return None
        moved = r.bytes * r.repeats
        out, into, waited = moved / self.out, moved / self.into, moved * self.waiting
        if r.name in self.bare:
            return Move(self.decision, 0.0, 0.0, r.bytes, waited + out + into)
        return Move(self.decision, out, into, r.bytes, waited + EXPOSED * (out + into))

    def memory(self, residuals: Sequence[Residual], room: float) -> Memory:
        """The memory, and seconds of transfer that compute is expected to hide; compiling tells.

        A backward pass takes about twice a forward pass, which is what computing all residuals
        takes.
        """
        hiding = {r.region for r in residuals if self.refusal(r) is None}
        forward = HIDING * sum(r.seconds for r in residuals if r.region in hiding)
        return Memory(self.decision, room, max(forward, self.hidden_out), 2 * forward)


def to_host(target: Target, room: float) -> Link:
    """Pinned host memory."""
    rates = target.rates

    def refusal(r: Residual) -> str | None:
        return offload_refusal(r, target)

    return Link(Decision.OFFLOAD, rates.device_to_host, rates.host_to_device, room, refusal)


def offload_refusal(residual: Residual, target: Target) -> str | None:
    """Why a residual must not be offloaded; None if it may."""
    if target.offload_refusal:
        return target.offload_refusal
    if residual.loops > 1:
        return "in nested loops, where XLA fails on offloaded values"
    if residual.conditional:
        return "in a branch of a cond, where XLA fails on offloaded values"
    if residual.bytes < LEAST_OFFLOAD * residual.count or not residual.shape:
        return "too small to be worth a transfer"
    if residual.dtype.startswith("key"):
        return "a PRNG key"
    return None
