"""Text for a terminal: tables in columns, and figures by their labels."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

WIDTH = 100
"""Characters in a line where there is no terminal that says how many it has."""

LEAST_WIDTH = 40
"""Characters in a line of the narrowest terminal that is thought of."""

LABEL = 14
"""Characters that the label of a figure takes."""

_NO_BREAK = "\u00a0"


def terminal_width() -> int:
    """Characters in a line: what the terminal has, or `WIDTH` in a pipe, a file or a notebook."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


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
