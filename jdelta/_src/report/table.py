"""A plan as text: whether it fits, one row for residuals that are alike, then its figures."""

from __future__ import annotations

import fnmatch
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Characters in a line where there is no terminal that says how many it has."""
LEAST_WIDTH = 40
"""Characters in a line of the narrowest terminal that is thought of."""
MOST_LINES = 25
"""Lines of a printed plan: what a terminal shows at once."""
LABEL = 14
"""Characters that the label of a figure takes."""

NO_ROWS = "The step keeps nothing for a backward pass: there is nothing to decide."
"""What to say in place of a table without rows."""

_LINE = 15  # characters of the place in the user's code
_SMALL = 0.002
_NO_BREAK = "\u00a0"
_IN_HEADLINE = ("target", "budget")  # figures that are not printed twice
_DROPPED_FIRST = ("line", "shape", "count")  # columns, where names need their room
_NEVER_CUT = "result"  # the figure that is a sentence, which says most at its end
_MOST_LINES_OF = {"headline": 3, "hint": 2, "figure": 3}  # each, once it is wrapped
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


def terminal_width() -> int:
    """Characters in a line: what the terminal has, or `WIDTH` in a pipe, a file or a notebook."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH, MOST_LINES)).columns)


@dataclass(frozen=True)
class Printed:
    """The parts of a printed plan, in `MOST_LINES` lines of a given width.

    Attributes:
        headline: Whether it fits, what it costs, what was compiled.
        hint: What would lower the peak; empty where nothing is known.
        body: Rows of the table, under `HEAD`. A column without a cell is left out.
        rest: A line about the rows that are left out; empty if there are none.
        figures: What is said below by what it is.
        width: Characters in a line.
    """

    headline: str
    hint: str
    body: Sequence[tuple[str, ...]]
    rest: str
    figures: Mapping[str, str]
    width: int

    def __str__(self) -> str:
        """The plan as it is printed."""
        return "\n\n".join(filter(None, (self.title, self.table, self._labelled())))

    @property
    def title(self) -> str:
        """What stands above the table."""
        parts = {"headline": self.headline, "hint": self.hint}
        return "\n".join(
            wrapped(text, self.width, _MOST_LINES_OF[part]) for part, text in parts.items() if text
        )

    @property
    def table(self) -> str:
        """The rows as aligned text."""
        if not self.body:
            nothing = NO_ROWS if {"loops", "head"}.isdisjoint(self.figures) else ""
            return wrapped(self.rest or nothing, self.width)
        lines = aligned(HEAD, self.body, self.width)
        return "\n".join([*lines, wrapped(self.rest, self.width)] if self.rest else lines)

    def _labelled(self) -> str:
        return labelled(self.figures, self.width)


def printed(plan: PlanRecord, width: int | None = None) -> Printed:
    """The parts of a plan that there is room for.

    Rows of the table make room for all else, the smallest first; figures are cut where even that
    is not enough, but for the result: it takes more than `MOST_LINES` before a word of it is lost.

    Args:
        plan: The plan.
        width: Characters in a line; default: those of the terminal.
    """
    width = terminal_width() if width is None else width
    table = rows(plan.answer.residuals, plan.decisions)
    visible, rest = shown(table)
    figures = summary_lines(plan)
    shown_figures = {
        label: _shortened(label, text, width, _MOST_LINES_OF["figure"])
        for label, text in figures.items()
        if label not in _IN_HEADLINE
    }
    parts = Printed(headline(plan), _hint(plan), (), "", shown_figures, width)
    for count in range(len(visible), -1, -1):
        left = sorted(visible, key=lambda row: -row.bytes)[:count]
        body = _narrowed([text_cells(row) for row in visible if row in left], width)
        rest = rest if count == len(visible) else _rest(table, left)
        parts = replace(parts, body=body, rest=rest)
        if len(str(parts).splitlines()) <= MOST_LINES:
            return parts
    one_line = {label: _shortened(label, t, width, 1) for label, t in shown_figures.items()}
    return replace(parts, figures=one_line)


def _narrowed(body: Sequence[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """The rows without the columns that leave too little room for names."""
    kept = [list(line) for line in body]
    longest = max((len(line[0]) for line in kept), default=0)
    for title, room in (*((title, longest) for title in _DROPPED_FIRST), ("why", len(HEAD[0]))):
        columns = [[HEAD[i], *(line[i] for line in kept)] for i in range(1, len(HEAD))]
        taken = sum(2 + max(map(len, column)) for column in columns if any(column[1:]))
        if room + taken > width:
            for line in kept:
                line[HEAD.index(title)] = ""
    return [tuple(line) for line in kept]


def headline(plan: PlanRecord) -> str:
    """Whether a plan fits, what it costs, and what was compiled to find it."""
    question, figures = plan.question, plan.figures
    is_plain, fits = plan.answer.policy is None, figures.compiled_peak <= question.budget
    verdict = ("Fits as it is" if is_plain else "Fits") if fits else "Does not fit"
    away = "".join(
        f", {format_bytes(size)} {place}"
        for size, place in (
            (figures.host_bytes, "on the host"),
            (figures.spill_bytes, "in files"),
        )
        if size
    )
    count = plan.search.compiles
    return (
        f"{verdict}: {_use(plan)}{away}, {_cost(plan)}; compiled {count} "
        f"program{'' if count == 1 else 's'}."
    )


def _hint(plan: PlanRecord) -> str:
    return f"Hint: {plan.search.hint}" if plan.search.hint else ""


def _use(plan: PlanRecord) -> str:
    peak, budget = plan.figures.compiled_peak, plan.question.budget
    return f"{format_bytes(peak)} of {format_bytes(budget)} on {plan.question.target}"


def _cost(plan: PlanRecord) -> str:
    if plan.answer.policy is None:
        return "nothing is added to a step"
    share = 100 * plan.figures.overhead_share
    if not share:
        return "no time is added to a step (predicted)"
    return f"+{share:.1f} % of a step (predicted)" if share >= 0.05 else "+<0.1 % (predicted)"


def in_one_line(plan: PlanRecord) -> str:
    """What a plan is, for its ``repr``."""
    counts = Counter(plan.decisions.values())
    if plan.answer.policy is None:
        return f"{_use(plan)}, the plain step"
    parts = [f"{counts[Decision.SAVE]} of {counts.total()} residuals kept"]
    for decision, name in ((Decision.OFFLOAD, "offloaded"), (Decision.SPILL, "spilled")):
        parts += [f"{counts[decision]} {name}"] if counts[decision] else []
    return ", ".join([_use(plan), *parts, f"+{100 * plan.figures.overhead_share:.1f} %"])


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
    return visible, _rest(table, visible, "small, or not used by the backward pass")


def _rest(table: Sequence[Row], visible: Sequence[Row], what: str = "") -> str:
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


def aligned(
    head: Sequence[str], body: Sequence[Sequence[str]], width: int | None = None
) -> list[str]:
    """Lines of a table, its columns as wide as they have to be, those without a cell left out.

    What the first column has no room for stands in a line of its own, in front of its row. A row
    that is longer than a line goes on in the next one, broken between two columns.

    Args:
        head: Titles of the columns.
        body: The cells, row by row.
        width: Characters in a line; default: those of the terminal.
    """
    most = terminal_width() if width is None else width
    used = [i for i in range(len(head)) if not body or any(line[i] for line in body)]
    first, *others = ([line[i] for line in (head, *body)] for i in used)
    widths = [max(map(len, column)) for column in others]
    room = most - sum(widths) - 2 * len(widths)
    room = room if room >= len(first[0]) else most  # rows that go on in the next line have room
    left = max(len(cell) for cell in first if len(cell) <= room)
    heading, *rest = zip(first, *others, strict=True)
    lines = _folded(heading, (left, *widths), most)
    lines.append("-" * max(map(len, lines)))
    for label, *row in rest:
        is_long = len(label) > left
        lines += [_cut(label, most)] if is_long else []
        lines += _folded(("" if is_long else label, *row), (left, *widths), most)
    return lines


def _folded(row: Sequence[str], widths: Sequence[int], most: int) -> list[str]:
    """A row in lines, broken between its columns only, all rows at the same ones."""
    padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
    joined = "  ".join(cell.replace(" ", _NO_BREAK) for cell in padded)
    lines = textwrap.wrap(
        joined, most, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ").rstrip() for line in lines]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"


def wrapped(text: str, width: int, most: int | None = None, indent: str = "") -> str:
    """A text in lines, all but the first of them indented, at most so many."""
    lines = textwrap.wrap(
        text.replace(" %", f"{_NO_BREAK}%"),
        width,
        subsequent_indent=indent,
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_NO_BREAK, " ")


def _shortened(label: str, text: str, width: int, most: int) -> str:
    """What a figure says, so that it fills at most so many lines."""
    return text if label == _NEVER_CUT else wrapped(text, width - LABEL, most).replace("\n", " ")


def _count(row: Row) -> str:
    """``×12`` unrolled regions, ``12 in loop`` iterations; nothing for a single one."""
    trips = f"{row.sample.count} in loop" if row.sample.count > 1 else ""
    return f"×{row.regions} {trips}".strip() if row.regions > 1 else trips


def labelled(figures: Mapping[str, str], width: int | None = None) -> str:
    """Figures by what they are, one a line.

    Args:
        figures: What is said by what it is.
        width: Characters in a line; default: those of the terminal.
    """
    most = terminal_width() if width is None else width
    return "\n".join(
        wrapped(f"{label:<{LABEL}}{text}", most, indent=" " * LABEL)
        for label, text in figures.items()
    )


def _compiled_peak(plan: PlanRecord) -> str:
    """The peak, and how that is where the values that are saved take more by themselves."""
    peak, predicted = plan.figures.compiled_peak, plan.figures.predicted_peak
    text = f"{format_bytes(peak)} per device (predicted {format_bytes(predicted)})"
    decisions = plan.decisions
    read = (r for r in plan.answer.residuals if r.needed)
    saved = sum(r.bytes for r in read if decisions[r.name] is Decision.SAVE)
    if saved <= peak:
        return text
    return (
        f"{text}; the values saved would take {format_bytes(saved)}, but the compiler stores only "
        "some: others share memory, are computed where they are read, or stay on the chip"
    )


def summary_lines(plan: PlanRecord) -> dict[str, str]:
    """The figures of the whole step by what they are."""
    question, answer, figures, search = plan.question, plan.answer, plan.figures, plan.search
    lines = {
        "target": question.target,
        "budget": format_bytes(question.budget),
        "asked": _asked(question),
        "compiled peak": _compiled_peak(plan),
        "bounds": "" if answer.policy is None else _bounds(search),
        "code": _code(question.target, figures.code_bytes),
        "on the host": _on_the_host(figures),
        "in files": _in_files(question.spill, figures),
        "loops": _loops(answer.grouping),
        "head": _head(answer.grouping),
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


def _bounds(search: SearchRecord) -> str:
    """Floor and plain step."""
    floor, ceiling = (", predicted" if b in search.estimates else "" for b in ("floor", "ceiling"))
    return (
        f"floor {format_bytes(search.floor, up=True)} (the least that a plan needs{floor}), "
        f"plain step {format_bytes(search.ceiling)} (without jdelta{ceiling})"
    )


def _code(target: str, size: int) -> str:
    if not backend_of(target.partition(":")[0]).reading.code_in_memory:
        return ""
    return f"{format_bytes(size)}, in device memory beside the peak"


def _on_the_host(figures: Figures) -> str:
    overlap = figures.overlap
    if not overlap.transfers:
        return format_bytes(figures.host_bytes) if figures.host_bytes else ""
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
    if grouping.states:
        return (
            f"of those with many iterations {grouping.states} states are kept at a time, and the "
            "iterations between them are run again"
        )
    if grouping.layers == 1:
        return ""
    how = "under one more checkpoint" if grouping.nested else "each decided for by itself"
    return f"{grouping.layers} layers in an iteration, {how}"


def _head(grouping: Grouping) -> str:
    if not grouping.pieces:
        return ""
    return f"and loss in up to {grouping.pieces} pieces of tokens: no array of all logits is made"


def _updates(saved: int) -> str:
    return f"inside the backward loops: {format_bytes(saved)} less" if saved else ""


def _undone(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"by the compiler, which keeps or recomputes otherwise: {format_some(names, 3)}"
