"""The link to files: what may be spilled, and how much of it compute hides.

TBA (arXiv 2408.10013) spills no parameters, inputs and small tensors, which are no residuals or
refused here, and nothing that is read at once. Its *adaptive offloading* walks the scopes of the
forward pass and keeps everything from the first one on whose tensors could not be written and read
back in time, or for which the pool is too small. Here that is a price and no bound, since a budget
may leave no choice: what is spilled from that scope on costs its transfers in full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jdelta._src.backends.target import Target
from jdelta._src.decision import Decision
from jdelta._src.residuals.links import Link
from jdelta._src.residuals.residual import Residual
from jdelta._src.spill import Spill, SpillRates


@dataclass(frozen=True)
class Scope:
    """A region of the forward pass, an iteration of a loop each.

    Attributes:
        region: Name of the region.
        bytes: Bytes that can be spilled.
        seconds: Seconds of its forward pass.
    """

    region: str
    bytes: float
    seconds: float


def hidden_scopes(scopes: Sequence[Scope], bandwidth: float, pool: float) -> int:
    """How many scopes, from the first one on, can be spilled for nothing (TBA, section 3.4).

    Everything from the first scope ``n`` on is kept for which::

        (sum_{p<n} bytes_p + 2 bytes_n) / (3 forward - 2 sum_{p<n} seconds_p) > bandwidth

    The whole takes three times the forward pass; the backward passes of the scopes before ``n``
    come after that of ``n`` itself, which has to be written and read by then.

    TBA has memory for whatever is on its way. Here the pool is bounded, so everything is kept, too,
    from the first scope on that would wait for it: when the scope ends, the pool has to hold what
    the directory has not taken yet, and ahead of its backward pass, what has been read for that.

    Args:
        scopes: The scopes in the order of the forward pass.
        bandwidth: Bytes per second, the lower one of writing and reading.
        pool: Bytes of memory for values on their way.
    """
    forward = sum(scope.seconds for scope in scopes)
    written = passed = 0.0
    for number, scope in enumerate(scopes):
        is_late = written + 2 * scope.bytes > bandwidth * (3 * forward - 2 * passed)
        written += scope.bytes
        passed += scope.seconds
        if is_late or scope.bytes > pool or written - bandwidth * passed > pool:
            return number
    return len(scopes)


def to_files(
    spill: Spill, rates: SpillRates, residuals: Sequence[Residual], target: Target
) -> Link:
    """Files in a directory.

    Args:
        spill: The directory.
        rates: How fast it takes and gives bytes.
        residuals: The residuals of the step, in the order of the forward pass.
        target: Where the step runs.
    """
    host, crosses = target.rates, target.backend.devices.have_own_memory
    waiting = 1 / host.device_to_host + 1 / host.host_to_device if crosses else 0.0
    last = residuals[-1].region if residuals and residuals[-1].loops == 0 else None

    def refusal(r: Residual) -> str | None:
        return _refusal(r, spill.least_bytes, last)

    scopes = list(_scopes(residuals, [r.needed and refusal(r) is None for r in residuals]))
    hidden = hidden_scopes(scopes, min(rates.write, rates.read), spill.pool_bytes)
    exposed = {scope.region for scope in scopes[hidden:]}
    return Link(
        Decision.SPILL,
        rates.write,
        rates.read,
        float("inf") if spill.limit_bytes is None else spill.limit_bytes,
        refusal,
        hidden_out=sum(scope.bytes for scope in scopes[:hidden]) / rates.write,
        bare=frozenset(r.name for r in residuals if r.loops == 0 and r.region in exposed),
        waiting=waiting,
    )


def _scopes(residuals: Sequence[Residual], spillable: Sequence[bool]) -> Iterator[Scope]:
    """The scopes of a step; iterations of a loop decide alike, and so share its bytes evenly."""
    pairs = zip(residuals, spillable, strict=True)
    for region, group in itertools.groupby(pairs, key=lambda pair: pair[0].region):
        members = list(group)
        trips = max((r.count if r.loops else 1) for r, _ in members)
        size = sum(r.bytes * r.repeats for r, may_be in members if may_be)
        seconds = sum(r.seconds for r, _ in members)
        yield from itertools.repeat(Scope(region, size / trips, seconds / trips), trips)


def _refusal(r: Residual, least: int, last: str | None) -> str | None:
    """Why a residual must not be spilled; None if it may."""
    if r.conditional:
        return "in a branch of a cond, which no token leaves"
    if not r.shape or r.bytes < least * r.count:
        return "too small to be worth a file"
    if last and (r.region == last or (r.entering or "").startswith(f"{last}/")):
        return "in the last region of the forward pass, so read at once"
    if not _has_bytes(r.dtype):
        return f"of dtype {r.dtype}, which has no whole bytes"
    return None


def _has_bytes(dtype: str) -> bool:
    """Whether elements of a dtype are whole bytes: no keys, no ``int4``."""
    return not dtype.startswith("key") and not dtype.endswith(("int2", "int4", "e2m1fn"))
