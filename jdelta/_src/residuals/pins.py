"""Decisions taken by hand: which residuals a name or a pattern of ``pin=`` means."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from jdelta._src.decision import Decision
from jdelta._src.errors import PlanMismatchError
from jdelta._src.residuals.links import Link
from jdelta._src.residuals.residual import Residual
from jdelta._src.sizes import format_some
from jdelta._src.solver.problem import AWAY

_NO_NAMES: Mapping[str, Sequence[str]] = MappingProxyType({})


def _nothing(_: str) -> str | None:
    """Tells of no name why it cannot be decided."""


@dataclass(frozen=True)
class Pins:
    """What the user decided by hand about a step.

    Attributes:
        decisions: From names and patterns (``"h/mlp/*"``) to decisions; the last that fits counts.
        users: From the user's own names to those of the residuals that have them, for example
            ``{"layer_out": ["h_1/layer_out", "h_2/layer_out"]}``.
        unpinnable: From a name that no residual has to why what is called so cannot be decided;
            to None if nothing is.
    """

    decisions: Mapping[str, Decision | str]
    users: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    unpinnable: Callable[[str], str | None] = field(default=_nothing)

    def fitting(self, residuals: Sequence[Residual], pattern: str) -> list[Residual]:
        """The residuals that one of the names and patterns means."""
        return fitting(residuals, pattern, self.users)


NO_PINS = Pins(MappingProxyType({}))


def fitting(
    residuals: Sequence[Residual],
    pattern: str,
    users: Mapping[str, Sequence[str]] = _NO_NAMES,
) -> list[Residual]:
    """The residuals that a name or a pattern means.

    Those that are called exactly so, in what is printed or by the user's own ``checkpoint_name``;
    if there are none, those that it fits as a pattern, its brackets taken for themselves as in
    printed names (``layers[0]/h_*/tanh``), and only then for a choice of characters.

    Args:
        residuals: The residuals.
        pattern: For example ``"h_0/mlp/tanh"``, ``"decoder_layer_input"`` or ``"h_*/mlp/*"``.
        users: From the user's own names to those of the residuals that have them.
    """
    readings: tuple[Callable[[Residual], bool], ...] = (
        lambda r: pattern in (r.name, r.label, r.entering),
        lambda r: pattern == r.user_name or r.name in users.get(pattern, ()),
        lambda r: _fits(r, pattern.replace("[", "[[]")),
        lambda r: _fits(r, pattern),
    )
    matches = ([r for r in residuals if fits(r)] for fits in readings)
    return next(filter(None, matches), [])


def meant(residuals: Sequence[Residual], name: str) -> str:
    """What may be meant by a name that no residual has: ``did you mean 'LM/h_1/*'?``.

    Args:
        residuals: The residuals.
        name: A name, or a pattern.
    """
    if not residuals:
        return "the step keeps nothing for a backward pass, so there are none"
    labels = [r.label for r in residuals]
    begun = name.rstrip("/")
    patterns = f"{begun}/*", f"*/{name}", f"*/{begun}/*"
    alike = (pattern for pattern in patterns if fitting(residuals, pattern))
    likely = next(alike, next(iter(difflib.get_close_matches(name, labels, n=1)), None))
    if likely:
        return f"did you mean {likely!r}? plan.decisions has all names"
    return f"there are {format_some(labels, 8)} (plan.decisions has all)"


def _fits(r: Residual, pattern: str) -> bool:
    return fnmatch.fnmatchcase(r.name, pattern) or fnmatch.fnmatchcase(r.label, pattern)


def pinned(residuals: Sequence[Residual], links: Sequence[Link], pins: Pins) -> dict[str, Decision]:
    """The decisions of the user's, by the names of residuals.

    Args:
        residuals: The residuals.
        links: What leads from the device to other memories.
        pins: What the user decided.

    Raises:
        PlanMismatchError: A pattern fits no residual, moves what cannot be moved, or is a name that
            a later one decides about.
    """
    decided: dict[str, Decision] = {}
    by: dict[str, str] = {}
    for pattern, text in pins.decisions.items():
        decision = Decision(text)
        names = [r.name for r in _pinnable(residuals, pattern, decision, pins)]
        decided.update(dict.fromkeys(names, decision))
        by.update(dict.fromkeys(names, pattern))
    _check_order(residuals, pins, decided, by)
    for r in residuals:
        decision = decided.get(r.name)
        if decision and (refusal := _refusal(r, links, decision)):
            raise PlanMismatchError(f"pin: {r.label!r} cannot be {_DONE[decision]}: {refusal}")
    return decided


def _pinnable(
    residuals: Sequence[Residual], pattern: str, decision: Decision, pins: Pins
) -> list[Residual]:
    """The residuals that a pattern decides about."""
    fit = pins.fitting(residuals, pattern)
    if not fit and (residuals or pattern.strip("*")):  # "*" is all there is, if only none
        why = pins.unpinnable(pattern)
        raise PlanMismatchError(
            f"pin: {pattern!r} is no residual: {why}"
            if why
            else f"pin: no residual is called {pattern!r}; {meant(residuals, pattern)}"
        )
    if decision is Decision.RECOMPUTE:
        fit = [r for r in fit if not r.region_input]
    if not fit and residuals:
        raise PlanMismatchError(
            f"pin: {pattern!r} fits only what enters a region, which jax.checkpoint keeps: "
            "save or move it, or mark a larger region with jdelta.remat (where all else does not "
            "fit, a plan drops it by itself)"
        )
    return fit


def _check_order(
    residuals: Sequence[Residual],
    pins: Pins,
    decided: Mapping[str, Decision],
    by: Mapping[str, str],
) -> None:
    """Refuse a name that a later pattern decides about: it would be ignored."""
    names = {name for r in residuals for name in (r.name, r.label, r.entering, r.user_name)}
    for pattern, decision in pins.decisions.items():
        if pattern not in names | pins.users.keys():
            continue
        fit = [r.name for r in pins.fitting(residuals, pattern) if r.name in decided]
        if all(decided[name] is not Decision(decision) for name in fit):
            raise PlanMismatchError(
                f"pin: {pattern!r} decides nothing, since {by[fit[0]]!r} after it fits the same: "
                "the last one counts. Put the name behind the pattern."
            )


_DONE = {Decision.OFFLOAD: "offloaded", Decision.SPILL: "spilled"}


def _refusal(r: Residual, links: Sequence[Link], decision: Decision) -> str | None:
    """Why a decision must not be taken for a residual; None if it may."""
    if decision not in AWAY:
        return None
    link = next((link for link in links if link.decision is decision), None)
    return link.refusal(r) if link else "no directory is given with spill="
