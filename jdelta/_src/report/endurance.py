"""How long a drive lasts under a plan that spills."""

from __future__ import annotations

from dataclasses import dataclass

from jdelta._src.errors import BudgetError, SpillError
from jdelta._src.plan.record import PlanRecord
from jdelta._src.sizes import parse_size

_YEAR = 365 * 24 * 3600.0


@dataclass(frozen=True)
class Endurance:
    """What a plan asks of a drive that trains without a pause (TBA, section 4.4).

    Attributes:
        seconds: Until the drive has taken all writes that it is rated for; ``inf`` if nothing is
            written.
        bandwidth: Bytes per second that it has to take, so that all is written in half a step.
    """

    seconds: float
    bandwidth: float

    @property
    def years(self) -> float:
        """The same in years."""
        return self.seconds / _YEAR


def endurance(
    plan: PlanRecord,
    rated_writes: int | str,
    step_seconds: float | None = None,
    *,
    devices: int = 1,
) -> Endurance:
    """Estimate how long a drive lasts under a plan.

    Args:
        plan: The plan.
        rated_writes: Bytes that the drive is rated for in its life: an ``int``, or ``"600TB"``.
        step_seconds: Seconds of a step as measured; default: as predicted.
        devices: Devices that write to the drive.

    Raises:
        SpillError: An amount is not above zero, or not understood.
    """
    try:
        rated = parse_size(rated_writes).bytes
    except BudgetError:
        rated = None
    predicted = plan.figures.step_seconds + plan.figures.overhead
    seconds = predicted if step_seconds is None else step_seconds
    if rated is None or not seconds > 0:
        raise SpillError(
            "endurance: expected the bytes that the drive is rated for, such as '600TB', and "
            f"seconds above zero; got {rated_writes!r} and {seconds!r}"
        )
    written = plan.figures.spill_written * devices
    life = rated * seconds / written if written else float("inf")
    return Endurance(life, written / (seconds / 2))
