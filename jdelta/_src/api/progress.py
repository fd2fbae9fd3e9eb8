"""One line that says what jdelta is doing, on a terminal or in a notebook, as its log tells.

What plans only logs: at INFO, to loggers below ``jdelta._src``. While the line is shown these pass
on to it; the logger ``jdelta`` and its handlers get no record that they would not get without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

IS_LEAD = "is_lead"
"""Attribute of log records that stand in front of those that follow: ``budget 2 of 8``."""

_INNER = logging.getLogger("jdelta._src")
_OUTER = logging.getLogger("jdelta")

_TEST_RUN = ("PYTEST_VERSION", "PYTEST_CURRENT_TEST")
"""Environment variables of a run of tests, in whose output a line has no place."""


class Line(Protocol):
    """A place for one line of text that is written over and over."""

    def show(self, text: str) -> None:
        """Write over what was there."""
        ...

    def close(self) -> None:
        """Leave no trace."""
        ...


@dataclass
class _Showing:
    """Those who want the line shown, in all threads.

    Attributes:
        lock: Held while these are changed.
        count: How many there are.
        undo: What is to be undone after the last of them.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    count: int = 0
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


_showing = _Showing()


@contextlib.contextmanager
def showing(progress: bool = True) -> Generator[None]:
    """Show what jdelta is doing, until the last of those who ask for it is done.

    There is one line, however many plans are made inside of each other or by several threads. None
    is shown in a pipe, where a test runs, or where the user's own handlers log the same on the
    terminal; and of a job only by its first process.

    Args:
        progress: Whether it is asked for.
    """
    if not progress:
        yield
        return
    with _showing.lock:
        if not _showing.count:
            line = _line()
            if line is not None:
                _showing.undo.enter_context(_told_to(line))
        _showing.count += 1
    try:
        yield
    finally:
        with _showing.lock:
            _showing.count -= 1
            if not _showing.count:
                _showing.undo.close()


@contextlib.contextmanager
def _told_to(line: Line) -> Generator[None]:
    """Let a line show what is logged."""
    handler = _ToLine(line)
    level, propagate = _INNER.level, _INNER.propagate
    _INNER.addHandler(handler)
    _INNER.setLevel(logging.INFO)
    _INNER.propagate = False
    try:
        yield
    finally:
        _INNER.removeHandler(handler)
        _INNER.setLevel(level)
        _INNER.propagate = propagate
        handler.close()


class _ToLine(logging.Handler):
    """Writes each message over the one before, and hands on what would be logged without it."""

    def __init__(self, line: Line):
        super().__init__(logging.INFO)
        self._line: Line | None = line
        self._lead = ""

    def emit(self, record: logging.LogRecord) -> None:
        if _OUTER.isEnabledFor(record.levelno):
            _OUTER.callHandlers(record)
        with contextlib.suppress(Exception):  # nothing fails because nothing is shown
            self._show(record)

    def _show(self, record: logging.LogRecord) -> None:
        # Asked for only now: the devices are at work by the time that something is logged.
        if self._line is None or jax.process_index() > 0:
            return
        text = record.getMessage()
        if getattr(record, IS_LEAD, False):
            self._lead = f"{text}: "
            text = "starting"
        self._line.show(f"jdelta: {self._lead}{text}")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            if self._line is not None:
                self._line.close()
        self._line = None
        super().close()


def _line() -> Line | None:
    """The place for the line; None where there is none."""
    if any(name in os.environ for name in _TEST_RUN):
        return None
    if _in_notebook():
        return _NotebookLine()
    is_shown = _is_terminal(sys.stderr) and not _is_logged_on_a_terminal()
    return _TerminalLine() if is_shown else None


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; what stands in for a stream may not be able to tell."""
    with contextlib.suppress(AttributeError, ValueError):
        return bool(stream.isatty())
    return False


def _in_notebook() -> bool:
    """Whether the code runs in a Jupyter kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def _is_logged_on_a_terminal() -> bool:
    """Whether the user's own handlers show there what the line would say."""
    return _INNER.isEnabledFor(logging.INFO) and any(
        isinstance(handler, logging.StreamHandler)
        and handler.level <= logging.INFO
        and _is_terminal(handler.stream)
        for handler in _handlers(_INNER)
    )


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    """The handlers that a record of a logger comes to."""
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


class _TerminalLine:
    """A line on standard error with the seconds that went by, drawn by rich."""

    def __init__(self):
        self._progress: Any = None

    def show(self, text: str) -> None:
        """Write over what was there."""
        self._progress = self._progress or _begun()
        self._progress.update(0, description=text)

    def close(self) -> None:
        """Leave no trace."""
        if self._progress is not None:
            self._progress.stop()


def _begun() -> Any:
    """What rich draws, with one task."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    room = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=room),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        expand=True,
        refresh_per_second=5,
        # What the step prints while it is traced goes above the line, but out of no pipe.
        redirect_stdout=_is_terminal(sys.stdout),
    )
    progress.add_task("", total=None)
    progress.start()
    return progress


class _NotebookLine:
    """A line among the outputs of a cell; rich would need ``ipywidgets`` for it."""

    def __init__(self):
        self._update: Any = None

    def show(self, text: str) -> None:
        """Write over what was there."""
        shown = {"text/plain": text}
        if self._update is None:
            display: Any = sys.modules["IPython"].display.display
            self._update = display(shown, raw=True, display_id=True).update
        else:
            self._update(shown, raw=True)

    def close(self) -> None:
        """Leave no trace."""
        if self._update is not None:
            self._update({"text/plain": ""}, raw=True)
