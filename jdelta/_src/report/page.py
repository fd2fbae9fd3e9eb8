"""Fills the page's data in."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jdelta._src.hlo.overlap import Span
from jdelta._src.plan.record import PlanRecord
from jdelta._src.report.advice import advice
from jdelta._src.report.figures import summary_lines
from jdelta._src.report.pictures import Grid, Moment, Picture
from jdelta._src.report.rok import RokCurve, RokPoint, curves
from jdelta._src.report.rows import HEAD, cells, rows
from jdelta._src.sizes import format_bytes

_EXACT = 0.02
"""Up to this part of a peak, simulation and compiler are taken to agree."""


def page(
    plan: PlanRecord,
    picture: Picture | None,
    others: Mapping[str, PlanRecord],
    rok: Sequence[RokPoint] = (),
) -> str:
    """The page's HTML.

    Args:
        plan: The plan it is about.
        picture: What its pictures of the step show; None leaves them out.
        others: Further plans to compare it with, by what to call them.
        rok: Measured runs to draw.
    """
    record = {
        "advice": advice(plan),
        "figures": list(summary_lines(plan).items()),
        "budget": plan.question.budget,
        "memory": _memory(picture) if picture else None,
        "scale": _scale(plan, picture) if picture else "",
        "grid": _grid(picture.grid) if picture else None,
        "lanes": _lanes(picture.lanes) if picture else [],
        "plans": [_point(name, p) for name, p in {"this plan": plan, **others}.items()],
        "rok": [_curve(curve) for curve in curves(rok)],
        "head": HEAD,
        "rows": [cells(row) for row in rows(plan.answer.residuals, plan.decisions) if row.matters],
    }
    template = resources.files("jdelta._src.report").joinpath("page.html").read_text("utf-8")
    data = json.dumps(record, separators=(",", ":")).replace("<", "\\u003c")
    title, subtitle = map(html.escape, titles(plan))
    filled = template.replace("{title}", title).replace("{subtitle}", subtitle)
    return filled.replace('"{data}"', data)


def titles(plan: PlanRecord) -> tuple[str, str]:
    """Whose step it is, and what it was planned to: the page's title and the line below it."""
    module, _, name = plan.program.step.rpartition(":")
    question = plan.question
    title = f"{name} in {module}" if module else name
    subtitle = f"A jdelta plan to {format_bytes(question.budget)} per device on {question.target}"
    return title, subtitle


def _scale(plan: PlanRecord, picture: Picture) -> str:
    """How the curves were scaled, where simulation and compiler differ; else empty."""
    ceiling, peak = plan.search.ceiling, plan.figures.compiled_peak
    is_compiled = "ceiling" not in plan.search.estimates
    before, after = picture.simulated
    pairs = [("the step with the plan", after, peak)]
    pairs += [("the plain step", before, ceiling)] if is_compiled else []
    differing = [
        f"{which} comes to {format_bytes(simulated)} ({format_bytes(compiled)} compiled)"
        for which, simulated, compiled in pairs
        if abs(simulated - compiled) > _EXACT * compiled
    ]
    sentences = [
        "" if is_compiled else "The plain step was not compiled: its peak is predicted.",
        f"Simulated alone, {' and '.join(differing)}, for the simulation does not know all that a "
        "compiler fuses, pads or keeps on the chip: curves are scaled to what was compiled, single "
        "values keep their sizes."
        if differing
        else "",
    ]
    return " ".join(filter(None, sentences))


def _memory(picture: Picture) -> dict[str, Any]:
    """Both timelines, the names of buffers and operations by number: most occur often."""
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    def line(moments: Sequence[Moment]) -> dict[str, Any]:
        steps = [
            [m.start, m.bytes, number(m.what), [[number(n), size] for n, size in m.alive]]
            for m in moments
        ]
        end = moments[-1].start + moments[-1].seconds if moments else 0.0
        return {"steps": steps, "end": end}

    lines = {"plain": line(picture.plain), "planned": line(picture.planned)}
    return {**lines, "names": list(numbers)}


def _grid(grid: Grid) -> dict[str, Any]:
    cells = [[d and d.value for d in row] for row in grid.cells]
    return {"columns": grid.columns, "rows": grid.rows, "cells": cells}


def _lanes(spans: Sequence[Span]) -> list[list[Any]]:
    return [[s.lane, s.start, s.end, s.name, s.bytes] for s in spans]


def _curve(curve: RokCurve) -> list[Any]:
    name = f"{curve.step} {curve.way}".strip()
    return [name, curve.role, [[p.batch, p.activation, p.rate] for p in curve.points]]


def _point(name: str, plan: PlanRecord) -> list[Any]:
    figures = plan.figures
    return [name, figures.compiled_peak, figures.overhead_share, figures.host_bytes]
