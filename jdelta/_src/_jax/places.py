"""Places in the user's code, as ``file:line (function)``: of equations, tracers and errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax._src import source_info_util

from jdelta._src._jax.jaxprs import Eqn, open_jaxpr

_HERE = str(Path(__file__).parents[2])
_JAX = str(Path(jax.__file__).parent)


def _is_users(path: str) -> bool:
    return source_info_util.is_user_filename(path) and not path.startswith((_HERE, "<"))


def place_of(eqn: Eqn) -> str:
    """Where an equation was written; empty where that is not known."""
    return _of_source(eqn.source_info)


def line_of(eqn: Eqn | None) -> str:
    """Where an equation was written, in short: ``model.py:31``; empty where that is not known."""
    frame = _users_frame(eqn.source_info) if eqn is not None else None
    return f"{Path(frame.file_name).name}:{frame.start_line}" if frame else ""


def at_call(eqn: Eqn, call: Eqn) -> Eqn:
    """An equation of a call's body; of one of JAX's own functions, where that was called.

    JAX keeps what it has traced: the body of ``jax.nn.gelu`` says where it was called first.
    """
    body = open_jaxpr(call.params["jaxpr"]) if call.primitive.name == "jit" else None
    # JAX notes `gelu at /path/functions.py:12`.
    file = (body.debug_info.func_src_info or "").rpartition(" at ")[2] if body else ""
    if not file.startswith(_JAX):
        return eqn
    info = eqn.source_info.replace(traceback=call.source_info.traceback)
    return eqn.replace(source_info=info)


def place_of_tracer(tracer: Any) -> str:
    """Where a traced value was computed; empty where that is not known."""
    while hasattr(tracer, "primal"):  # that of a value being differentiated
        tracer = tracer.primal
    return _of_source(getattr(tracer, "_line_info", None))


def _of_source(info: Any) -> str:
    frame = _users_frame(info)
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})" if frame else ""


def _users_frame(info: Any) -> Any:
    """The innermost frame of the user's own code, else of a library's that the user calls."""
    frames = source_info_util.user_frames(info.traceback) if info else ()
    users = [f for f in frames if _is_users(f.file_name)]
    users.sort(key=lambda f: "site-packages" in f.file_name)
    return next(iter(users), None)


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
