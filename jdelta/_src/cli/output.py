"""What commands print: tables in colour on a terminal, plain text in a pipe, JSON if asked for."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jaxlib
from rich.console import Console
from rich.text import Text

from jdelta._src.decision import Decision
from jdelta._src.report.terminal import LABEL, WIDTH, aligned, labelled, terminal_width, wrapped

COLOURS = {
    Decision.SAVE: "green",
    Decision.OFFLOAD: "blue",
    Decision.SPILL: "magenta",
    Decision.RECOMPUTE: "yellow",
}
"""Of decisions; chosen to be told apart on dark and on light terminals."""

_OPTIONS = {
    "per_layer=False": "--no-per-layer",
    "reorder=True": "--reorder",
    "donate_argnums": "--donate",
    "donate_argnames": "--donate",
    "static_argnums": "--static",
    "static_argnames": "--static",
    "host_budget": "--host-budget",
    "spill=": "--spill",
    "solver=": "--solver",
    "target=": "--target",
    "pin=": "--pin",
    "plan.report(path)": "`jdelta plan --report FILE`",
    "plan.decisions has": "`jdelta explain PLAN '*'` has",
}
"""Options and calls in Python as texts name them, and what they are on the command line."""

_VALUE = r"(?:'([\w.:%/-]+)'|(?=['\w({]))"
"""What follows an option in Python: a text that needs no quotes in a shell, or anything else."""


_PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """A table with remarks below it.

    Attributes:
        head: Titles of the columns; none for a block of remarks only.
        body: The cells, row by row.
        figures: What is said below by what it is, in sentences.
        notes: Lines below, as they are.
        prose: Sentences below, in lines as long as there is room. In sentences options have the
            names of the command line.
    """

    head: Sequence[str] = ()
    body: Sequence[Sequence[str]] = ()
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
    with console.capture() as captured:  # rich ends the program by itself where a pipe is closed
        for number, block in enumerate(answer.blocks):
            if number:
                console.print()
            for line in _lines(block):
                console.print(line, soft_wrap=True)
    sys.stdout.write(captured.get())


def _lines(block: Block) -> list[Text]:
    """A block in lines, which are the same with colours and without."""
    table = [Text(line) for line in (aligned(block.head, block.body) if block.head else ())]
    for line, (decision, colour) in itertools.product(table, COLOURS.items()):
        line.highlight_regex(rf"(?<=  ){decision.value}(?=  |$)", colour)
    for line in table:
        line.stylize("dim")
        if set(line.plain) == {"-"}:
            break
    named = {label: in_options(text) for label, text in block.figures.items()}
    figures = [Text(line) for line in labelled(named).splitlines()]
    for line in figures:
        line.stylize("dim", 0, LABEL)
    width = min(WIDTH, terminal_width())
    prose = (_wrapped(in_options(text), width) for text in block.prose)
    return [*table, *figures, *map(Text, itertools.chain(block.notes, *prose))]


def _wrapped(text: str, width: int) -> list[str]:
    """A sentence in lines that are indented as it is, and a little more."""
    indent = " " * (len(text) - len(text.lstrip()))
    return wrapped(text, width, indent=f"{indent}  " if indent else "").splitlines() or [""]


def in_options(text: str) -> str:
    """A text of jdelta's with the command line's names of options: ``--solver milp``."""
    for python, option in _OPTIONS.items():
        name = rf"(?<![\w.-]){re.escape(python.removesuffix('='))}"
        text = re.sub(f"{name}={_VALUE}", lambda value, o=option: f"{o} {value[1] or ''}", text)
        text = re.sub(rf"{name}=" if python.endswith("=") else rf"{name}=?(?!\w)", option, text)
    return text


def failed(message: str) -> None:
    """Print an error to standard error."""
    console = Console(stderr=True)
    text = Text.assemble(("error: ", "bold red"), in_options(message))
    console.print(text, soft_wrap=not console.is_terminal)
    sys.stderr.flush()


def raised(error: BaseException) -> None:
    """Print an error that jdelta did not raise, and where the user's code did, if it was that."""
    stack = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in stack if _is_of_user(frame.filename)]
    if not own and isinstance(error, (OSError, ValueError)):
        failed(str(error))
        return
    said = traceback.TracebackException(type(error), error, None)
    said.__notes__ = None  # JAX's, on the frames that it has left out
    lines = [*traceback.format_list(own or stack), *said.format_exception_only()]
    print("Traceback, of your code:" if own else "Traceback:", file=sys.stderr)
    print("".join(lines), end="", file=sys.stderr, flush=True)


def _is_of_user(filename: str) -> bool:
    """Whether a file of code is neither jdelta's nor JAX's nor Python's."""
    is_installed = "site-packages" in filename
    folders = [os.path.dirname(module.__file__ or "") for module in (jax, jaxlib)] + [str(_PACKAGE)]
    folders += [] if is_installed else [os.path.dirname(os.__file__)]
    return not filename.startswith(("<frozen", *(folder + os.sep for folder in folders)))
