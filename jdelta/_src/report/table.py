"""A plan as text: one row for residuals that are alike, then the figures of the whole step."""

from __future__ import annotations

import fnmatch
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jdelta._src.backends.platforms import backend_of
from jdelta._src.decision import Decision
from jdelta._src.plan.record import Figures, PlanRecord, Question, SearchRecord
from jdelta._src.regions.region import Grouping
from jdelta._src.residuals.residual import Residual
from jdelta._src.sizes import format_array, format_bytes, format_seconds, format_short, format_some
from jdelta._src.solver import DEFAULT_SOLVER
from jdelta._src.spill import Spill

NUMBERED = re.compile(r"(?<=_)\d+(?=/|$)|(?<![^/])\d+(?=/|$)")
"""Numbers of regions that are alike."""
HEAD = ("residual", "count", "shape", "bytes", "decision", "line", "why")
"""Titles of the table's columns."""
WIDTH = 100
"""Characters in a line of the table; a name that is too long for its column has its own line."""

NO_ROWS = "The step keeps nothing for a backward pass: there is nothing to decide."
"""What to say in place of a table without rows."""

_LINE = 15  # characters of the place in the user's code
_LABEL = 14  # characters that the label of a figure takes
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
            return "from earlier regions" if is_dropped else "enters a region"
        if self.decision is not Decision.RECOMPUTE:
            return f"saves {seconds}"
        if not self.sample.needed:
            return "read only through others"
        if self.holding > self.seconds:
            return f"{seconds}, saving takes {format_seconds(self.holding)}"
        return f"takes {seconds}" if self.seconds else "fused where it is read"


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


def format_table(table: Sequence[Row]) -> str:
    """The rows as aligned text; small ones, and those no decision is needed for, in one line."""
    if not table:
        return NO_ROWS
    visible, rest = shown(table)
    lines = aligned(HEAD, list(map(text_cells, visible)))
    return "\n".join([*lines, rest] if rest else lines)


def text_cells(row: Row) -> tuple[str, ...]:
    """A row of the table where there is little room: with a line where the name has no place."""
    line = "" if row.has_place else row.sample.line
    short = {
        "shape": format_short(row.sample.dtype, row.sample.shape),
        "line": f"…{line[1 - _LINE :]}" if len(line) > _LINE else line,
    }
    return tuple(short.get(title, cell) for title, cell in zip(HEAD, cells(row), strict=True))


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
        row.sample.line,
        row.why,
    )


def aligned(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, its columns as wide as they have to be, those without a cell left out.

    What the first column has no room for stands in a line of its own, in front of its row.
    """
    used = [i for i in range(len(head)) if not body or any(line[i] for line in body)]
    first, *others = ([line[i] for line in (head, *body)] for i in used)
    widths = [max(map(len, column)) for column in others]
    room = max(WIDTH - sum(widths) - 2 * len(widths), len(first[0]))
    width = max(len(cell) for cell in first if len(cell) <= room)
    lines: list[str] = []
    for label, *row in zip(first, *others, strict=True):
        is_long = len(label) > width
        padded = map(str.ljust, ("" if is_long else label, *row), (width, *widths))
        lines += [label] if is_long else []
        lines.append(_cut("  ".join(padded).rstrip()))
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def _count(row: Row) -> str:
    """``×12`` unrolled regions, ``12 in loop`` iterations; nothing for a single one."""
    trips = f"{row.sample.count} in loop" if row.sample.count > 1 else ""
    return f"×{row.regions} {trips}".strip() if row.regions > 1 else trips


def summary(plan: PlanRecord) -> str:
    """The figures of the whole step, one a line."""
    return labelled(summary_lines(plan))


def labelled(figures: Mapping[str, str]) -> str:
    """Figures by what they are, one a line."""
    return "\n".join(
        textwrap.fill(
            f"{label:<{_LABEL}}{text}",
            WIDTH,
            subsequent_indent=" " * _LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for label, text in figures.items()
    )


def summary_lines(plan: PlanRecord) -> dict[str, str]:
    """The figures of the whole step by what they are."""
    question, answer, figures, search = plan.question, plan.answer, plan.figures, plan.search
    lines = {
        "target": question.target,
        "budget": format_bytes(question.budget),
        "asked": _asked(question),
        "compiled peak": f"{format_bytes(figures.compiled_peak)} "
        f"(predicted {format_bytes(figures.predicted_peak)}; "
        f"{_bounds(search, floor=answer.policy is not None)})",
        "code": _code(question.target, figures.code_bytes),
        "on the host": _on_the_host(figures),
        "in files": _in_files(question.spill, figures),
        "loops": _loops(answer.grouping),
        "updates": _updates(answer.updates_moved),
        "undone": _undone(figures.undone),
        "overhead": f"{format_seconds(figures.overhead)} on a step of "
        f"{format_seconds(figures.step_seconds)} (predicted, "
        f"{100 * figures.overhead_share:.1f} %)",
        "result": search.result,
    }
    return {label: text for label, text in lines.items() if text}


def _asked(question: Question) -> str:
    """What was asked that is not so by default: ``solver milp; pinned h/mlp/* to save``."""
    pins = [f"{pattern} to {decision.value}" for pattern, decision in question.pins]
    parts = (
        f"solver {question.solver}" if question.solver != DEFAULT_SOLVER else "",
        f"pinned {format_some(pins, 3)}" if pins else "",
        "layers decided alike" if not question.per_layer else "",
        "updates in loops where that takes less" if question.reorder else "",
    )
    return "; ".join(filter(None, parts))


def _bounds(search: SearchRecord, *, floor: bool) -> str:
    """Floor and plain step; where that is the plan, there is no floor to speak of."""
    ceiling = _bound("plain step", search.ceiling, "ceiling" in search.estimates)
    lowest = _bound("floor", search.floor, "floor" in search.estimates)
    return f"{lowest}, {ceiling}" if floor else ceiling


def _bound(label: str, size: int, is_predicted: bool) -> str:
    return f"{label} {format_bytes(size)}{' predicted' if is_predicted else ''}"


def _code(target: str, size: int) -> str:
    if not backend_of(target.partition(":")[0]).reading.code_in_memory:
        return ""
    return f"{format_bytes(size)}, in device memory beside the peak"


def _on_the_host(figures: Figures) -> str:
    overlap = figures.overlap
    if not overlap.transfers:
        return format_bytes(figures.host_bytes)
    return (
        f"{format_bytes(figures.host_bytes)}; "
        f"{format_seconds(overlap.seconds_out + overlap.seconds_in)} of transfers, "
        f"{overlap.hidden:.0%} of it behind compute (read in the compiled schedule)"
    )


def _in_files(spill: Spill | None, figures: Figures) -> str:
    if spill is None or figures.spill_rates is None:
        return ""
    return (
        f"{format_bytes(figures.spill_bytes)} in {spill.path}, which takes "
        f"{format_bytes(round(figures.spill_rates.write))}/s and gives "
        f"{format_bytes(round(figures.spill_rates.read))}/s"
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
