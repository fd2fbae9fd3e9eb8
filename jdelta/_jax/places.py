"""Places in the user's code, as ``file:line (function)``: of equations, tracers and errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from jax._src import source_info_util

from jdelta._jax.programs import Eqn

_HERE = str(Path(__file__).parent.parent)


def _is_users(path: str) -> bool:
    return source_info_util.is_user_filename(path) and not path.startswith((_HERE, "<"))


def place_of(eqn: Eqn) -> str:
    """Where an equation was written; empty where that is not known."""
    return _of_source(eqn.source_info)


def place_of_tracer(tracer: Any) -> str:
    """Where a traced value was computed; empty where that is not known."""
    while hasattr(tracer, "primal"):  # that of a value being differentiated
        tracer = tracer.primal
    return _of_source(getattr(tracer, "_line_info", None))


def _of_source(info: Any) -> str:
    frames = source_info_util.user_frames(info.traceback) if info else ()
    users = [f for f in frames if _is_users(f.file_name)]
    users.sort(key=lambda f: "site-packages" in f.file_name)  # a library that the user calls
    return next((f"{f.file_name}:{f.start_line} ({f.function_name})" for f in users), "")


def place_of_error(error: BaseException) -> str:
    """The innermost line of the user's that an error came through; empty where there is none.

    Where JAX evaluates a program again, what caused an error says where that was written.
    """
    return next(filter(None, map(_innermost, _causes(error))), "")


def _causes(error: BaseException | None) -> Iterator[TracebackType | None]:
    while error is not None:
        yield error.__traceback__
        error = error.__cause__ or error.__context__


def _innermost(trace: TracebackType | None) -> str:
    frames = [f for f in traceback.extract_tb(trace) if _is_users(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
