"""How tensors are spilled: where to, how much of it, and how fast."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jdelta._budget import parse_budget
from jdelta._errors import BudgetError, SpillError

ADAPTERS = ("disk", "memory")


@dataclass(frozen=True)
class Spill:
    """A place for spilled tensors.

    Attributes:
        path: An existing directory. Every process makes a directory of its own in it, mode 0700.
        limit: Most bytes of files at any time, as an int or ``"200GiB"``; ``None``: what is free.
        pool: Bound on host memory for tensors on their way to and from the directory.
        adapter: ``"disk"``, or ``"memory"``, which keeps in memory what it is given (for tests).
        checksum: Whether every read is checked against a checksum of what was written.
        write_rate: Most bytes a second to write; ``None``: as fast as it goes.
        read_rate: Most bytes a second to read; ``None``: as fast as it goes.
        least: Bytes of one tensor, in a loop of one iteration's, below which it is not spilled.
        timeout: Seconds without any answer of the device after which a step fails.
    """

    path: str
    limit: int | str | None = None
    pool: int | str = "256MiB"
    adapter: str = "disk"
    checksum: bool = True
    write_rate: float | None = None
    read_rate: float | None = None
    least: int | str = "1MiB"
    timeout: float = 60.0

    @classmethod
    def of(cls, spill: str | os.PathLike[str] | Spill) -> Spill:
        """The spill that a user means by a path or by a ``Spill``.

        Raises:
            SpillError: It is neither.
        """
        if isinstance(spill, Spill):
            return spill
        if isinstance(spill, (str, os.PathLike)):
            return cls(os.fspath(spill))
        raise SpillError(f"spill: expected a directory or a jdelta.Spill; got {spill!r}")

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.path.abspath(self.path))
        if self.adapter not in ADAPTERS:
            raise SpillError(
                f"adapter: expected one of {', '.join(map(repr, ADAPTERS))}; got {self.adapter!r}"
            )

    @property
    def limit_bytes(self) -> int | None:
        """``limit`` in bytes."""
        return None if self.limit is None else _bytes("limit", self.limit)

    @property
    def least_bytes(self) -> int:
        """``least`` in bytes."""
        return _bytes("least", self.least)

    @property
    def pool_bytes(self) -> int:
        """``pool`` in bytes."""
        return _bytes("pool", self.pool)


def _bytes(name: str, size: int | str) -> int:
    try:
        parsed = parse_budget(size).bytes
    except BudgetError:
        parsed = None
    if parsed is None:
        raise SpillError(f"{name}: expected bytes or a size such as '200GiB'; got {size!r}")
    return parsed
