"""A plan as it is printed: its headline, its table, its figures, in 25 lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jdelta._src.plan.record import PlanRecord
from jdelta._src.report.figures import headline, hint_line, summary_lines
from jdelta._src.report.rows import HEAD, rest_of, rows, shown, text_cells
from jdelta._src.report.terminal import LABEL, aligned, labelled, terminal_width, wrapped

MOST_LINES = 25
"""Lines of a printed plan: what a terminal shows at once."""

NO_ROWS = "The step keeps nothing for a backward pass: there is nothing to decide."
"""What to say in place of a table without rows."""

_IN_HEADLINE = ("target", "budget")  # figures that are not printed twice

_DROPPED_FIRST = ("line", "shape", "count")  # columns, where names need their room

_NEVER_CUT = "result"  # the figure that is a sentence, which says most at its end

_MOST_LINES_OF = {"headline": 3, "hint": 2, "figure": 3}  # each, once it is wrapped


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
    parts = Printed(headline(plan), hint_line(plan), (), "", shown_figures, width)
    for count in range(len(visible), -1, -1):
        left = sorted(visible, key=lambda row: -row.bytes)[:count]
        body = _narrowed([text_cells(row) for row in visible if row in left], width)
        rest = rest if count == len(visible) else rest_of(table, left)
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


def _shortened(label: str, text: str, width: int, most: int) -> str:
    """What a figure says, so that it fills at most so many lines."""
    return text if label == _NEVER_CUT else wrapped(text, width - LABEL, most).replace("\n", " ")
