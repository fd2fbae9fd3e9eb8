"""How tensors are spilled: where to, how much of it, and how fast."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from jdelta._src.errors import BudgetError, SpillError
from jdelta._src.sizes import parse_size
from jdelta._src.spill.adapter import Adapter

BLOCK = 1 << 20
"""Bytes of a block, to which tensors are cut; as ``kBlockBytes`` in pool.h."""

ADAPTERS = ("disk", "memory", "kvikio")


@dataclass(frozen=True)
class Spill:
    """A place for spilled tensors.

    Attributes:
        path: An existing directory. Every process makes a directory of its own in it, mode 0700.
        limit: Most bytes of files at any time, as an int or ``"200GiB"``; ``None``: what is free.
        pool: Bound on host memory for tensors on their way to and from the directory.
        adapter: ``"disk"``; ``"kvikio"`` (GPUDirect Storage, where KvikIO is installed);
            ``"memory"``, which keeps in memory what it is given; or an object with the methods of
            ``Adapter``.
        checksum: Whether every read is checked against a checksum of what was written.
        write_rate: Most bytes a second to write; ``None``: as fast as it goes.
        read_rate: Most bytes a second to read; ``None``: as fast as it goes.
        least: Bytes of one tensor, in a loop of one iteration's, below which it is not spilled.
        timeout: Seconds without any answer of the device after which a step fails. XLA ends a
            process of several CPU devices when one has waited for another for a minute, so give
            less there.
    """

    path: str
    limit: int | str | None = None
    pool: int | str = "256MiB"
    adapter: str | Adapter = "disk"
    checksum: bool = True
    write_rate: float | None = None
    read_rate: float | None = None
    least: int | str = "1MiB"
    timeout: float = 40.0

    @classmethod
    def of(cls, spill: str | os.PathLike[str] | Spill) -> Spill:
        """The spill that a user means by a path or by a ``Spill``.

        Raises:
            SpillError: The path is empty.
        """
        if isinstance(spill, Spill):
            return spill
        path = os.fspath(spill)
        if not path:
            raise SpillError(f"spill: expected a directory, got {path!r}")
        return cls(path)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.path.abspath(self.path))
        if self.adapter not in ADAPTERS and not isinstance(self.adapter, Adapter):
            raise SpillError(
                f"adapter: expected {', '.join(map(repr, ADAPTERS))} or an object with the methods "
                f"write and read; got {self.adapter!r}"
            )
        for name in ("write_rate", "read_rate", "timeout"):
            _positive(name, getattr(self, name))
        if self.pool_bytes < BLOCK:
            raise SpillError(f"pool: expected at least {BLOCK} bytes; got {self.pool!r}")
        _ = self.limit_bytes

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


def _positive(name: str, number: float | None) -> None:
    if number is not None and not 0 < number < math.inf:
        raise SpillError(f"{name}: expected a number above zero; got {number!r}")


def _bytes(name: str, size: int | str) -> int:
    try:
        parsed = parse_size(size).bytes
    except BudgetError:
        parsed = None
    if parsed is None:
        raise SpillError(f"{name}: expected bytes or a size such as '200GiB'; got {size!r}")
    return parsed
