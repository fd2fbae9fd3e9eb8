"""Turns what XLA says about a failed operation into a ``SpillError``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from jdelta._src.errors import SpillError

_MARK = "SpillError: "
"""What handlers.cc puts before every message."""


@contextlib.contextmanager
def named_errors() -> Generator[None]:
    """Raises ``SpillError`` for an error of the runtime that a store has caused.

    It goes around the place where the results of a step are waited for: JAX dispatches steps
    asynchronously, so their errors come up there.
    """
    try:
        yield
    except Exception as error:  # mostly, but not always, a JaxRuntimeError
        _, mark, message = str(error).partition(_MARK)
        if not mark:
            raise
        raise SpillError(message) from error
