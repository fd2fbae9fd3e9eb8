"""A plan as text: one row for residuals that are alike, then the figures of the whole step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jdelta._decision import Decision
from jdelta._format import format_array, format_bytes, format_seconds, format_some
from jdelta._region import Grouping
from jdelta._residual import Residual

if TYPE_CHECKING:
    from jdelta._plan import Plan

NUMBERED = re.compile(r"(?<=_)\d+(?=/|$)|(?<![^/])\d+(?=/|$)")
"""Numbers of regions that are alike."""
HEAD = ("residual", "count", "shape", "bytes", "decision", "why")
"""Titles of the table's columns."""

NO_ROWS = "The step keeps nothing for a backward pass: there is nothing to decide."
"""What to say in place of a table without rows."""

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
    def why(self) -> str:
        """The reason for the decision, in a few words."""
        recompute = f"recompute {format_seconds(self.seconds)}"
        if self.sample.boundary:
            return "enters a unit: stays unless it is moved"
        if self.decision is Decision.SAVE:
            return f"saves {recompute}"
        if self.decision is Decision.OFFLOAD:
            return f"transfer instead of {recompute}"
        if self.decision is Decision.SPILL:
            return f"file instead of {recompute}"
        if not self.sample.needed:
            return "backward reads it only through others"
        if self.holding > self.seconds:
            return f"{recompute}, saving takes {format_seconds(self.holding)}"
        return recompute if self.seconds else "fused where it is read"


def rows(residuals: Sequence[Residual], decisions: Mapping[str, Decision]) -> list[Row]:
    """The table's rows: saved ones first, larger ones first."""
    groups: dict[tuple[object, ...], list[Residual]] = {}
    for r in residuals:
        inner = r.label.removeprefix(r.region)
        key = (NUMBERED.sub("*", r.region), inner, decisions[r.name], r.shape, r.dtype, r.count)
        groups.setdefault(key, []).append(r)
    made = [
        Row(
            name=f"{key[0]}{key[1]}" if len(group) > 1 else group[0].label,
            regions=len(group),
            sample=group[0],
            bytes=sum(r.bytes for r in group),
            seconds=sum(r.seconds for r in group),
            holding=sum(r.holding for r in group),
            decision=decisions[group[0].name],
        )
        for key, group in groups.items()
    ]
    return sorted(made, key=lambda row: (_ORDER[row.decision], -row.bytes))


def format_table(table: Sequence[Row]) -> str:
    """The rows as aligned text; small ones, and those no decision is needed for, in one line."""
    if not table:
        return NO_ROWS
    visible, rest = shown(table)
    lines = aligned(HEAD, list(map(cells, visible)))
    return "\n".join([*lines, rest] if rest else lines)


def shown(table: Sequence[Row]) -> tuple[list[Row], str]:
    """The rows that matter, and a line about the others; empty if there are none."""
    total = sum(row.bytes for row in table)
    visible = [row for row in table if row.bytes >= total * _SMALL and row.matters]
    size = format_bytes(total - sum(row.bytes for row in visible))
    count = len(table) - len(visible)
    rest = f"… and {count} rows of values that are small or not read ({size})" if count else ""
    return visible, rest


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, under `HEAD`."""
    return (
        row.name,
        _count(row),
        format_array(row.sample.dtype, row.sample.shape),
        format_bytes(row.bytes),
        row.decision.value,
        row.why,
    )


def aligned(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, its columns as wide as they have to be."""
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *body)
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _count(row: Row) -> str:
    """``×12`` unrolled regions, ``12 in loop`` iterations; nothing for a single one."""
    trips = f"{row.sample.count} in loop" if row.sample.count > 1 else ""
    return f"×{row.regions} {trips}".strip() if row.regions > 1 else trips


def summary(plan: Plan) -> str:
    """The figures of the whole step, one a line."""
    return labelled(summary_lines(plan))


def labelled(figures: Mapping[str, str]) -> str:
    """Figures by what they are, one a line."""
    return "\n".join(f"{label:<14}{text}" for label, text in figures.items())


def summary_lines(plan: Plan) -> dict[str, str]:
    """The figures of the whole step by what they are."""
    lines = {
        "target": plan.target,
        "budget": format_bytes(plan.budget),
        "compiled peak": f"{format_bytes(plan.compiled_peak)} "
        f"(predicted {format_bytes(plan.predicted_peak)}; "
        f"{_bounds(plan)})",
        "code": _code(plan),
        "on the host": _on_the_host(plan),
        "in files": _in_files(plan),
        "loops": _loops(plan.grouping),
        "updates": _updates(plan.updates_moved),
        "undone": _undone(plan.undone),
        "overhead": f"{format_seconds(plan.overhead)} on a step of "
        f"{format_seconds(plan.step_seconds)} (predicted, "
        f"{100 * plan.overhead_share:.1f} %)",
        "result": plan.result,
    }
    return {label: text for label, text in lines.items() if text}


def _bounds(plan: Plan) -> str:
    """Floor and plain step; where that is the plan, there is no floor to speak of."""
    ceiling = _bound(plan, "plain step", "ceiling")
    return f"{_bound(plan, 'floor', 'floor')}, {ceiling}" if plan.policy else ceiling


def _bound(plan: Plan, label: str, field: str) -> str:
    predicted = " predicted" if field in plan.estimates else ""
    return f"{label} {format_bytes(getattr(plan, field))}{predicted}"


def _code(plan: Plan) -> str:
    if not plan.target.startswith("tpu"):
        return ""
    return f"{format_bytes(plan.code_bytes)}, in device memory beside the peak"


def _on_the_host(plan: Plan) -> str:
    if not plan.overlap.transfers:
        return format_bytes(plan.host_bytes)
    seconds = plan.overlap.seconds_out + plan.overlap.seconds_in
    return (
        f"{format_bytes(plan.host_bytes)}; {format_seconds(seconds)} of transfers, "
        f"{plan.overlap.hidden:.0%} of it behind compute (read in the compiled schedule)"
    )


def _in_files(plan: Plan) -> str:
    if plan.spill is None or plan.spill_rates is None:
        return ""
    return (
        f"{format_bytes(plan.spill_bytes)} in {plan.spill.path}, which takes "
        f"{format_bytes(round(plan.spill_rates.write))}/s and gives "
        f"{format_bytes(round(plan.spill_rates.read))}/s"
    )


def _loops(grouping: Grouping) -> str:
    if grouping.layers == 1:
        return ""
    how = "under one more checkpoint" if grouping.nested else "each decided for by itself"
    return f"{grouping.layers} layers in an iteration, {how}"


def _updates(saved: int) -> str:
    return f"inside the backward loops: {format_bytes(saved)} less" if saved else ""


def _undone(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"by the compiler, which keeps or recomputes otherwise: {format_some(names, 3)}"
