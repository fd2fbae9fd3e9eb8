"""What would help a step next, in sentences: nothing that was done already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jdelta._src.backends.platforms import backend_of
from jdelta._src.passes.emit import local_bytes
from jdelta._src.plan.call import Call
from jdelta._src.plan.record import PlanRecord
from jdelta._src.report.pictures import Picture
from jdelta._src.sizes import format_bytes

_DEAR = 0.1
"""From this share of a step on, an overhead is worth a look at other budgets."""

_WORTH = 2**10
"""Bytes: a learning rate that has the shape of the loss is not worth a word."""

_LARGE = 1 / 3
"""From this part of the peak on, one value is what makes it."""


def advice(plan: PlanRecord, picture: Picture | None, call: Call | None) -> list[str]:
    """What would help next.

    Args:
        plan: The plan.
        picture: Its step as simulated; None where there is no step.
        call: The call that it was made for, likewise.
    """
    sentences: list[str] = []
    if call is not None:
        sentences += donations(call, call.donated(plan.question.donate_argnums))
    if plan.answer.policy is not None:
        sentences += _largest(picture) if picture else ()
        sentences += _options(plan)
    return sentences


def donations(call: Call, donate: Sequence[int]) -> Iterator[str]:
    """Which arguments might be donated too: results have their shapes, and no memory to reuse.

    Args:
        call: A call of the step.
        donate: Where among its arguments the donated ones stand.
    """
    leaves: list[Any] = jax.tree.leaves(jax.eval_shape(call.fun, *call.args))
    results = Counter(map(_kind, leaves))
    for number in donate:
        results -= Counter(map(_kind, _arrays(call.args[number])))
    for index, (number, name) in enumerate(zip(call.numbers, call.names, strict=True)):
        if index in donate:
            continue
        arrays = _arrays(call.args[index])
        taken = results & Counter(map(_kind, arrays))
        results -= taken
        sizes = {_kind(array): local_bytes(array) for array in arrays}
        size = sum(count * sizes[kind] for kind, count in taken.items())
        if size >= _WORTH:
            how = f"argnums={number}" if number is not None else f"argnames={name!r}"
            yield (
                f"Donate {name}, which the step returns anew (donate_{how}): up to "
                f"{format_bytes(size)} less."
            )


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")]


def _kind(array: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(array.shape), array.dtype


def _largest(picture: Picture) -> Iterator[str]:
    """The value that makes most of the peak, if one does."""
    peak = max(picture.planned, key=lambda moment: moment.bytes, default=None)
    if peak is None or not peak.alive:
        return
    name, size = peak.alive[0]
    share = size / picture.simulated[1]
    if share >= _LARGE:
        yield (
            f"At the peak {name} takes {share:.0%} of the memory. Make it in parts (fewer rows at "
            "once) or in a narrower dtype: that lowers the floor, too."
        )


def _options(plan: PlanRecord) -> Iterator[str]:
    """Options of ``jdelta.plan`` that were left out, or that forbid something."""
    question, figures = plan.question, plan.figures
    is_stacked = any(residual.count > 1 for residual in plan.answer.residuals)
    devices = backend_of(question.target.partition(":")[0]).devices
    if is_stacked and not question.reorder:
        yield (
            "Try reorder=True: weight updates then run inside the backward loops, where that takes "
            "less memory."
        )
    if is_stacked and not question.per_layer:
        yield "Without per_layer=False layers of a loop may be decided differently."
    if question.host_budget == 0 and devices.have_own_memory and figures.overhead:
        yield "Nothing may go to the host (host_budget=0): offload may cost less than recompute."
    if figures.overhead_share > _DEAR:
        yield (
            f"The plan adds {figures.overhead_share:.0%} to a step: jdelta.frontier, or jdelta "
            "frontier on the command line, shows what more memory would save."
        )
