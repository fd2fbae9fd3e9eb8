"""Rows of a plan's table: one for residuals that are alike and share a decision."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jdelta._src.decision import Decision
from jdelta._src.residuals.residual import Residual
from jdelta._src.sizes import format_array, format_bytes, format_seconds, format_short

NUMBERED = re.compile(r"(?<=_)\d+(?=/|$)|(?<![^/])\d+(?=/|$)")
"""Numbers of regions that are alike."""

HEAD = ("residual", "count", "shape", "bytes", "decision", "line", "why")
"""Titles of the table's columns."""

_LINE = 15  # characters of the place in the user's code

_SMALL = 0.002

_ORDER = {Decision.SAVE: 0, Decision.OFFLOAD: 1, Decision.SPILL: 2, Decision.RECOMPUTE: 3}


@dataclass(frozen=True)
class Row:
    """Residuals that differ only in a number of their region's name and share a decision.

    Attributes:
        name: The common name, ``*`` for the number where there are several.
        regions: How many there are.
        sample: One of them.
        bytes: Bytes of all of them.
        seconds: Seconds to recompute all of them.
        holding: Seconds for copies that saving them takes.
        decision: What the plan does with them.
    """

    name: str
    regions: int
    sample: Residual
    bytes: int
    seconds: float
    holding: float
    decision: Decision

    @property
    def matters(self) -> bool:
        """Whether keeping it is a question at all: it is kept, or the backward pass reads it."""
        return self.sample.needed or self.decision is not Decision.RECOMPUTE

    @property
    def has_place(self) -> bool:
        """Whether its name says where in its region it is; else only its line does."""
        return "/" in self.sample.name.removeprefix(f"{self.sample.region}/")

    @property
    def why(self) -> str:
        """The reason for the decision, in a few words."""
        seconds = format_seconds(self.seconds)
        if self.sample.region_input:
            is_dropped = self.decision is Decision.RECOMPUTE
            return "recomputed from earlier regions" if is_dropped else "input of the region"
        if self.decision is not Decision.RECOMPUTE:
            return f"spares {seconds}"
        if not self.sample.needed:
            return "only others are made of it"
        if self.holding > self.seconds:
            return f"costs {seconds}, saving takes {format_seconds(self.holding)}"
        return f"costs {seconds}" if self.seconds else "free: computed where it is read"


def rows(residuals: Sequence[Residual], decisions: Mapping[str, Decision]) -> list[Row]:
    """The table's rows: saved ones first, larger ones first."""
    table_rows = [
        Row(
            name=name if len(group) > 1 else group[0].label,
            regions=len(group),
            sample=group[0],
            bytes=sum(r.bytes for r in group),
            seconds=sum(r.seconds for r in group),
            holding=sum(r.holding for r in group),
            decision=decisions[group[0].name],
        )
        for name, group in _alike(residuals, decisions)
    ]
    return sorted(table_rows, key=lambda row: (_ORDER[row.decision], -row.bytes))


_Array: TypeAlias = tuple[tuple[int, ...], str, int]
"""Shape, dtype and number of instances."""


def _alike(
    residuals: Sequence[Residual], decisions: Mapping[str, Decision]
) -> list[tuple[str, list[Residual]]]:
    """Residuals that differ only in numbers of layers, and the name that stands for them.

    Where frameworks number the layers of the whole model (``region_3/linear_7``), the numbers
    inside of regions are stars too, if no value of another shape has such a name.
    """
    groups: dict[tuple[str, str, Decision, _Array], list[Residual]] = {}
    for r in residuals:
        region, inner = NUMBERED.sub("*", r.region), r.label.removeprefix(r.region)
        array = r.shape, r.dtype, r.count
        groups.setdefault((region, inner, decisions[r.name], array), []).append(r)
    joined: dict[tuple[str, Decision, _Array], list[tuple[str, list[Residual]]]] = {}
    alike: Counter[tuple[str, _Array]] = Counter()
    for (region, inner, decision, array), group in groups.items():
        scopes, _, last = inner.rpartition("/")
        pattern = f"{region}{NUMBERED.sub('*', scopes)}/{last}"
        joined.setdefault((pattern, decision, array), []).append((region + inner, group))
        alike[pattern, array] += len(group)
    named_groups: list[tuple[str, list[Residual]]] = []
    for (pattern, _, array), parts in joined.items():
        is_one = len(parts) > 1 and _fitting(pattern, residuals) == alike[pattern, array]
        named_groups += [(pattern, [r for _, group in parts for r in group])] if is_one else parts
    return named_groups


def _fitting(pattern: str, residuals: Sequence[Residual]) -> int:
    """How many residuals have a name like this."""
    return len(fnmatch.filter([r.label for r in residuals], pattern))


def shown(table: Sequence[Row]) -> tuple[list[Row], str]:
    """The rows that matter, and a line about the others; empty if there are none."""
    total = sum(row.bytes for row in table)
    visible = [row for row in table if row.bytes >= total * _SMALL and row.matters]
    return visible, rest_of(table, visible, "small, or not used by the backward pass")


def rest_of(table: Sequence[Row], visible: Sequence[Row], what: str = "") -> str:
    """A line about the rows that are left out."""
    size = format_bytes(sum(row.bytes for row in table) - sum(row.bytes for row in visible))
    count = len(table) - len(visible)
    rows_left = f"… and {count} more row{'' if count == 1 else 's'} ({size})"
    if not count:
        return ""
    return f"{rows_left}: {what}" if what else f"{rows_left}; more of them: plan.report(path)"


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, under `HEAD`."""
    return (
        row.name,
        _count(row),
        format_array(row.sample.dtype, row.sample.shape),
        format_bytes(row.bytes),
        row.decision.value,
        row.sample.line,
        row.why,
    )


def text_cells(row: Row) -> tuple[str, ...]:
    """A row of the table where there is little room: with a line where the name has no place."""
    line = "" if row.has_place else row.sample.line
    short = {
        "shape": format_short(row.sample.dtype, row.sample.shape),
        "line": f"…{line[1 - _LINE :]}" if len(line) > _LINE else line,
    }
    return tuple(short.get(title, cell) for title, cell in zip(HEAD, cells(row), strict=True))


def _count(row: Row) -> str:
    """``×12`` unrolled regions, ``12 in loop`` iterations; nothing for a single one."""
    trips = f"{row.sample.count} in loop" if row.sample.count > 1 else ""
    return f"×{row.regions} {trips}".strip() if row.regions > 1 else trips
