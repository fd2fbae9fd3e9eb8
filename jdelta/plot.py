"""Pictures of plans for files and papers, with matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, MultipleLocator, PercentFormatter

from jdelta._src.api.frontier import Frontier
from jdelta._src.api.plan import Plan
from jdelta._src.decision import Decision
from jdelta._src.errors import PlanMismatchError
from jdelta._src.report.pictures import Moment
from jdelta._src.report.rok import RokPoint, curves
from jdelta._src.sizes import format_bytes

COLOURS = {
    Decision.SAVE: "#2a8c6e",
    Decision.OFFLOAD: "#3f74c4",
    Decision.SPILL: "#8a5cb8",
    Decision.RECOMPUTE: "#d9902f",
}
"""Of decisions."""

_PLAIN, _PLANNED, _LIMIT = "#98a2ad", "#2563a8", "#b3261e"
_BYTES = FuncFormatter(lambda size, _: _short(int(size)))
_SECONDS = EngFormatter("s")
_FLOPS = EngFormatter("FLOP/s")
_ROLES = {"plain": _PLAIN, "planned": _PLANNED, "limit": _LIMIT}


def _short(size: int) -> str:
    """Bytes without zeros after the point, as axes need them."""
    number, unit = format_bytes(size).split()
    return f"{float(number):g} {unit}"


def memory(plan: Plan) -> Figure:
    """Live memory of the plain and of the planned step over predicted time.

    Raises:
        PlanMismatchError: The plan was loaded from a file, so it has no step.
    """
    picture = plan.picture()
    figure, axes = _figure(8, 3.2)
    _area(axes, picture.plain, _PLAIN, "plain step")
    _area(axes, picture.planned, _PLANNED, "with the plan")
    axes.axhline(plan.budget, color=_LIMIT, linestyle="--", label="budget")
    axes.xaxis.set_major_formatter(_SECONDS)
    axes.yaxis.set_major_formatter(_BYTES)
    axes.set(xlabel="predicted time", ylabel="live memory per device", ylim=(0, None))
    axes.yaxis.set_major_locator(_round(axes.get_ylim()[1]))
    axes.legend(frameon=False)
    return figure


def _area(axes: Axes, moments: Sequence[Moment], colour: str, label: str) -> None:
    times = [m.start for m in moments]
    sizes = [m.bytes for m in moments]
    if moments:
        times.append(moments[-1].start + moments[-1].seconds)
        sizes.append(sizes[-1])
    axes.fill_between(times, sizes, step="post", color=colour, alpha=0.3, linewidth=0)
    axes.step(times, sizes, where="post", color=colour, linewidth=1, label=label)


def decisions(plan: Plan) -> Figure:
    """Decisions by value and region; a region in a loop stands for all its iterations.

    Raises:
        PlanMismatchError: The plan was loaded from a file, so it has no step.
    """
    grid = plan.picture().grid
    figure, axes = _figure(3 + 0.25 * len(grid.columns), 0.6 + 0.2 * len(grid.rows))
    for y, row in enumerate(grid.cells):
        for x, decision in enumerate(row):
            if decision is not None:
                axes.barh(y, 0.92, left=x, height=0.85, color=COLOURS[decision])
    axes.set_yticks(range(len(grid.rows)), grid.rows, fontsize=7)
    axes.set_xticks([x + 0.46 for x in range(len(grid.columns))], grid.columns, rotation=90)
    axes.tick_params(axis="x", labelsize=7)
    axes.invert_yaxis()
    keys = [Patch(color=colour, label=decision.value) for decision, colour in COLOURS.items()]
    axes.legend(handles=keys, frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def lanes(plan: Plan) -> Figure:
    """Compute and transfers over time, as the compiled schedule has them.

    Raises:
        PlanMismatchError: The plan was loaded from a file, or transfers nothing.
    """
    spans = plan.picture().lanes
    if not spans:
        raise PlanMismatchError("The plan keeps nothing on the host: there are no transfers.")
    places = {"out": (2, "to host", COLOURS[Decision.OFFLOAD]), "compute": (1, "compute", _PLAIN)}
    places["in"] = (0, "to device", COLOURS[Decision.SAVE])
    figure, axes = _figure(8, 1.8)
    for lane, (y, _, colour) in places.items():
        bars = [(s.start, s.end - s.start) for s in spans if s.lane == lane]
        axes.broken_barh(bars, (y - 0.4, 0.8), color=colour)
    axes.set_yticks([y for y, *_ in places.values()], [text for _, text, _ in places.values()])
    axes.xaxis.set_major_formatter(_SECONDS)
    axes.set_xlabel("time in the schedule, at the target's rates")
    return figure


def frontier(found: Frontier, others: Mapping[str, Plan] | None = None) -> Figure:
    """Predicted overhead against compiled peak.

    Args:
        found: Plans of one step over several budgets.
        others: Further plans to compare with, such as those of hand policies, by name.
    """
    figure, axes = _figure(6, 3.6)
    peaks, added = zip(*found.points, strict=True) if found.points else ((), ())
    axes.plot(peaks, added, "o-", color=_PLANNED, label="jdelta")
    for name, plan in (others or {}).items():
        point = plan.compiled_peak, plan.overhead_share
        axes.plot(*point, "s", color=_PLAIN)
        axes.annotate(name, point, xytext=(6, 3), textcoords="offset points", fontsize=8)
    if found.floor:
        axes.axvline(found.floor, color=_LIMIT, linestyle="--", label="floor")
    axes.xaxis.set_major_formatter(_BYTES)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel="compiled peak per device", ylabel="predicted overhead", xlim=(0, None))
    axes.xaxis.set_major_locator(_round(axes.get_xlim()[1]))
    axes.legend(frameon=False)
    return figure


def rok(points: Sequence[RokPoint]) -> Figure:
    """Throughput over activation memory, one curve for each way, the batch sizes beside the points.

    Args:
        points: Measured runs; those of each step get axes of their own.

    Raises:
        ValueError: There are no points.
    """
    rok_curves = curves(points)
    if not rok_curves:
        raise ValueError("points: expected at least one jdelta.RokPoint; got none")
    steps = list(dict.fromkeys(curve.step for curve in rok_curves))
    figure = Figure(figsize=(1 + 5.5 * len(steps), 3.8), layout="constrained")
    for number, step in enumerate(steps):
        axes = _plain(figure.add_subplot(1, len(steps), number + 1))
        for index, curve in enumerate(c for c in rok_curves if c.step == step):
            side = (6, "bottom") if index % 2 == 0 else (-6, "top")  # ways may meet in a point
            colour = _ROLES.get(curve.role) or COLOURS[Decision(curve.role)]
            sizes, rates = zip(*((p.activation, p.rate) for p in curve.points), strict=True)
            axes.plot(sizes, rates, "o-", color=colour, label=curve.way)
            for p in curve.points:
                axes.annotate(
                    str(p.batch),
                    (p.activation, p.rate),
                    xytext=(0, side[0]),
                    textcoords="offset points",
                    ha="center",
                    va=side[1],
                    fontsize=8,
                    color=colour,
                )
        axes.xaxis.set_major_formatter(_BYTES)
        axes.yaxis.set_major_formatter(_FLOPS)
        axes.set(title=step, xlabel="activation memory", xlim=(0, None))
        most = max(p.rate for p in points if p.step == step)
        axes.set(ylabel="" if number else "throughput", ylim=(0, 1.12 * most))
        axes.xaxis.set_major_locator(_round(axes.get_xlim()[1]))
        axes.legend(frameon=False, loc="lower right", title="batch sizes at the points")
    return figure


def _round(most: float) -> MultipleLocator:
    """Ticks at sizes that are powers of two."""
    return MultipleLocator(2.0 ** math.floor(math.log2(max(most, 8.0) / 4)))


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, _plain(figure.add_subplot())


def _plain(axes: Any) -> Axes:
    """Axes without a frame."""
    axes.spines[["top", "right"]].set_visible(False)
    return axes
