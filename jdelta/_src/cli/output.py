"""What commands print: tables in colour on a terminal, plain text in a pipe, JSON if asked for."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jdelta._src.decision import Decision
from jdelta._src.report.table import WIDTH, aligned, labelled

COLOURS = {
    Decision.SAVE: "green",
    Decision.OFFLOAD: "blue",
    Decision.SPILL: "magenta",
    Decision.RECOMPUTE: "yellow",
}
"""Of decisions; chosen to be told apart on dark and on light terminals."""


_WHOLE = 24
"""Characters up to which names in the first column stay in one line: they are to be copied."""


@dataclass(frozen=True)
class Block:
    """A table with a title above and remarks below it.

    Attributes:
        head: Titles of the columns; none for a block of remarks only.
        body: The cells, row by row.
        title: A line above.
        figures: What is said below by what it is.
        notes: Lines below, as they are.
        prose: Sentences below, in lines as long as there is room.
    """

    head: Sequence[str] = ()
    body: Sequence[Sequence[str]] = ()
    title: str = ""
    figures: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: Sequence[str] = ()
    prose: Sequence[str] = ()


@dataclass(frozen=True)
class Answer:
    """What a command says.

    Attributes:
        record: For programs.
        blocks: For people.
        code: Exit status.
    """

    record: Any
    blocks: Sequence[Block] = ()
    code: int = 0


def show(answer: Answer, *, as_json: bool) -> None:
    """Print an answer to standard output."""
    if as_json:
        print(json.dumps(answer.record, indent=1))
        return
    console = Console()
    for number, block in enumerate(answer.blocks):
        if number:
            console.print()
        (_coloured if console.is_terminal else _plain)(console, block)


def _plain(console: Console, block: Block) -> None:
    lines = [block.title] if block.title else []
    lines += aligned(block.head, block.body) if block.head else []
    lines += [labelled(block.figures)] if block.figures else []
    prose = (textwrap.fill(text, WIDTH) for text in block.prose)
    print("\n".join([*lines, *block.notes, *prose]))


def _coloured(console: Console, block: Block) -> None:
    if block.title:
        console.print(Text(block.title, "bold"))
    if block.head:
        table = Table(box=None, header_style="dim", pad_edge=False)
        longest = max((len(row[0]) for row in block.body), default=0)
        first, *others = block.head
        table.add_column(first, overflow="fold", ratio=2, min_width=min(longest, _WHOLE))
        for name in others:
            table.add_column(name, overflow="fold")
        for row in block.body:
            table.add_row(*map(_cell, row))
        console.print(table)
    if block.figures:
        grid = Table.grid(padding=(0, 1))
        for label, text in block.figures.items():
            grid.add_row(Text(label, "dim", no_wrap=True), Text(text))
        console.print(grid)
    for note in (*block.notes, *block.prose):
        console.print(Text(note))


def _cell(text: str) -> Text:
    styles = {decision.value: colour for decision, colour in COLOURS.items()}
    return Text(text, styles.get(text, ""))


def failed(message: str) -> None:
    """Print an error to standard error."""
    console = Console(stderr=True)
    text = Text.assemble(("error: ", "bold red"), message)
    console.print(text, soft_wrap=not console.is_terminal)
    sys.stderr.flush()
