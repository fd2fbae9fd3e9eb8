"""Staging a function while what does not depend on its arguments is computed outside of it.

A value that leaves a function by a closure (kept in a list, read by a rule made inside) is then
one of the trace around it, and may be used there, as it may where JAX differentiates the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core


def outside_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function to be staged, with all else computed by the trace that this is called under."""
    around = core.trace_ctx.trace

    @functools.wraps(fun)
    def staged(*args: Any) -> Any:
        split = _Split(around, core.trace_ctx.trace)
        with core.set_current_trace(split):
            results = fun(*jax.tree.map(split.own, args))
        return jax.tree.map(split.inner_value, results)

    return staged


class _Split(core.Trace):
    """Two traces: of what depends on a function's arguments, and of the rest."""

    def __init__(self, around: Any, inner: Any):
        super().__init__()
        self.requires_low = False
        self.around = around
        self.inner = inner

    def own(self, value: Any) -> Any:
        """A value of the inner trace."""
        return _Own(self, value)

    def inner_value(self, value: Any) -> Any:
        """What the inner trace calls a value."""
        return value.inner if self._is_own(value) else value

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, _Own) and value.owner is self

    def stage_value(self, val: Any) -> Any:
        return val

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: Any, /) -> Any:
        trace = self.inner if any(map(self._is_own, tracers)) else self.around
        args = list(map(self.inner_value, tracers))
        results = primitive.bind_with_trace(trace, args, tuple(map(core.typeof, args)), params)
        if trace is self.around:
            return results
        return list(map(self.own, results)) if primitive.multiple_results else self.own(results)

    def process_call(self, primitive: Any, fun: Any, tracers: Any, params: Any, /) -> Any:
        return self.process_primitive(primitive, tracers, dict(params, subfuns=(fun,)))

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **options: Any
    ) -> Any:
        return self.process_primitive(primitive, tracers, dict(options, subfuns=(fun, jvp)))

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **options: Any
    ) -> Any:
        return self.process_primitive(primitive, tracers, dict(options, subfuns=(fun, fwd, bwd)))


class _Own(core.Tracer[Any]):
    """A value of the inner trace of a ``_Split``."""

    __slots__ = ("inner", "owner")

    def __init__(self, trace: _Split, inner: Any):
        super().__init__(trace, core.typeof(inner))
        self.inner = inner
        self.owner = trace

    def full_lower(self) -> Any:
        return self
