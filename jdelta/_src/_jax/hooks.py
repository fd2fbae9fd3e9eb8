"""What is put into a running trace: a session, and functions in the place of JAX's own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax

session_context: Any = jax.make_user_context(None)
"""Ambient object of the running trace. JAX keys its trace caches by it: no stale trace is used."""


def current_session() -> Any:
    """The object that the innermost ``with session_context(...)`` was entered with, or None."""
    return session_context.value


class Hook:
    """A function of JAX's in whose place another can be put, for all threads.

    What is put there has to leave alone what is not traced for a session of its own.
    """

    def __init__(self, plain: Callable[..., Any], put: Callable[[Callable[..., Any]], None]):
        self._plain = plain
        self._put = put
        self._others: list[Callable[..., Any]] = []
        self._lock = threading.Lock()
        functools.update_wrapper(self, plain)

    @contextlib.contextmanager
    def replaced(self, other: Callable[..., Any]) -> Generator[None]:
        """While open, JAX calls ``other``; its first argument is what JAX would have called."""
        with self._lock:
            self._others.append(other)
            self._put(self)
        try:
            yield
        finally:
            with self._lock:
                self._others.remove(other)
                if not self._others:
                    self._put(self._plain)

    def __call__(self, *args: Any, **options: Any) -> Any:
        for other in self._others[-1:]:  # another thread may be taking it out
            return other(self._plain, *args, **options)
        return self._plain(*args, **options)


def _put_vjp(vjp: Callable[..., Any]) -> None:
    inspect.unwrap(jax.value_and_grad).__globals__["vjp"] = vjp
    jax.vjp = vjp


def _put_scan(scan: Callable[..., Any]) -> None:
    jax.lax.scan = scan


def _put_linearize(linearize: Callable[..., Any]) -> None:
    jax.linearize = linearize


VJP = Hook(jax.vjp, _put_vjp)
"""What ``jax.grad`` and its like call, each in their own module."""

SCAN = Hook(jax.lax.scan, _put_scan)

LINEARIZE = Hook(jax.linearize, _put_linearize)
"""What differentiates once and gives the derivative as a function of its own."""
