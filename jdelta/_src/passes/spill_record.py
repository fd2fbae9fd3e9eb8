"""What a step writes to files and reads back, and whether the compiled program does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jdelta._src.backends.target import Target
from jdelta._src.decision import Decision
from jdelta._src.errors import SpillError
from jdelta._src.residuals.residual import Residual
from jdelta._src.sizes import format_bytes, format_some
from jdelta._src.spill import try_out


@dataclass(frozen=True)
class Place:
    """A place in the program where a value is written.

    Attributes:
        name: Name of the value.
        bytes: Bytes per device of one instance.
        kept: Instances in files at once: iterations of the loops that keep them.
        trips: Instances that a step writes: iterations of all loops around.
    """

    name: str
    bytes: int
    kept: int
    trips: int


@dataclass(frozen=True)
class Emitted:
    """What a step writes.

    Attributes:
        places: The places by their number in the store, the slot.
    """

    places: Mapping[int, Place] = field(default_factory=dict[int, Place])

    @property
    def bytes(self) -> int:
        """Bytes per device that are in files at once."""
        return sum(place.bytes * place.kept for place in self.places.values())

    @property
    def written(self) -> int:
        """Bytes per device that a step writes."""
        return sum(place.bytes * place.trips for place in self.places.values())


def check_handlers(target: Target) -> None:
    """Check that what a step spills comes back on this machine's GPUs, where that can be run.

    Raises:
        SpillError: It does not.
    """
    if target.backend.spilling.tries_handlers and not target.ahead_of_time:
        for device in target.devices():
            try_out(device)


def check_spilled(
    residuals: Sequence[Residual],
    decisions: Mapping[str, Decision],
    emitted: Emitted,
    files: Sequence[tuple[int, int]],
) -> None:
    """Check that a compiled program writes and reads all that a plan spills.

    XLA removes a write whose value nobody reads, and a residual may be spilled by name that the
    step, as it was emitted, does not hand from the forward to the backward pass.

    Args:
        residuals: Residuals of the step.
        decisions: What the plan does with each.
        emitted: What the step was emitted to write.
        files: Slots and bytes that the compiled program writes and reads.

    Raises:
        SpillError: Some of them are not written, or not read, with all of their bytes.
    """
    planned = [r for r in residuals if decisions[r.name] is Decision.SPILL]
    if not planned:
        return
    sizes = _bytes_in_files(emitted, files)
    missing = [r for r in planned if max(sizes[name] for name in _names(r)) < r.bytes]
    if missing:
        names = format_some([r.name for r in missing], 5)
        raise SpillError(
            f"The plan spills {format_bytes(sum(r.bytes for r in planned))}, but the compiled "
            f"program does not write and read back all bytes of {names} "
            f"({format_bytes(sum(r.bytes for r in missing))}). Take these out of pin=, or plan "
            "without spill=."
        )


def _names(r: Residual) -> set[str]:
    return {r.name, r.entering or r.name}


def _bytes_in_files(emitted: Emitted, files: Sequence[tuple[int, int]]) -> Counter[str]:
    """Bytes per device, by name, that the program holds in files at once and reads again."""
    sizes: Counter[str] = Counter()
    for slot, place in emitted.places.items():
        if (slot, place.bytes) in files:
            sizes[place.name] += place.bytes * place.kept
    return sizes
