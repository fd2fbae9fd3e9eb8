"""Throughput over activation memory: TBA's curve of recompute, offload and keep (ROK)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jdelta._src.decision import Decision

_OTHERS = ("plain", "planned", "limit")


@dataclass(frozen=True)
class RokPoint:
    """One measured run of a training step, as in TBA (arXiv 2408.10013, section 4).

    Attributes:
        way: What becomes of activations: "keep", "recompute", "spill", or any other word.
        batch: Batch size.
        activation: Bytes that the step takes beside arguments and results.
        rate: FLOP/s: the plain step's floating-point work over the seconds of a step.
        step: Name of what is trained.
    """

    way: str
    batch: int
    activation: int
    rate: float
    step: str = ""


@dataclass(frozen=True)
class RokCurve:
    """The runs of one step in one way.

    Attributes:
        step: Name of what is trained.
        way: What becomes of activations.
        role: Name of its colour: a decision, or "plain", "planned" or "limit".
        points: The runs, by batch size.
    """

    step: str
    way: str
    role: str
    points: tuple[RokPoint, ...]


def curves(points: Sequence[RokPoint]) -> list[RokCurve]:
    """One curve for each step and way, in the order in which they come."""
    decisions = {decision.value for decision in Decision}
    others = [way for way in dict.fromkeys(p.way for p in points) if way not in decisions]
    roles = {way: _OTHERS[i % len(_OTHERS)] for i, way in enumerate(others)}
    return [
        RokCurve(step, way, roles.get(way, way), tuple(sorted(runs, key=lambda p: p.batch)))
        for step, way in dict.fromkeys((p.step, p.way) for p in points)
        if (runs := [p for p in points if (p.step, p.way) == (step, way)])
    ]
