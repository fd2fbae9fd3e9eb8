"""What may become of a residual between the forward pass and its use in the backward pass."""

from __future__ import annotations

import enum

from jdelta._src.errors import ArgumentError


class Decision(enum.Enum):
    """Where a residual lives from its last forward use to its first backward use."""

    SAVE = "save"
    """Kept in device memory."""

    OFFLOAD = "offload"
    """Copied to pinned host memory and fetched back before use."""

    SPILL = "spill"
    """Written to files and read back before use."""

    RECOMPUTE = "recompute"
    """Dropped, and computed again in the backward pass from what is left."""

    @classmethod
    def _missing_(cls, value: object) -> Decision:
        expected = ", ".join(d.value for d in cls)
        raise ArgumentError(f"{value!r} is no decision; expected {expected}")
