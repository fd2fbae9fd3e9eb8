"""Plans as files: versioned JSON, no pickle. ``plan.schema.json`` beside this file describes it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from jdelta._src.errors import PlanMismatchError, SpillError
from jdelta._src.hlo.overlap import Overlap
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.region import Grouping
from jdelta._src.residuals.residual import Residual
from jdelta._src.spill import Spill, SpillRates
from jdelta._src.versions import __version__

VERSION = 13
"""Of the form of the files; any other is refused."""

_SCALARS = {"int": int, "float": (int, float), "str": str}
_RECORDS = {"grouping": Grouping, "spill": Spill, "spill_rates": SpillRates}
P = TypeVar("P")


def save(plan: Any, path: str | os.PathLike[str]) -> None:
    """Write a plan, all its public fields.

    Raises:
        SpillError: It spills to an adapter that is an object.
    """
    if plan.spill is not None and not isinstance(plan.spill.adapter, str):
        raise SpillError(
            f"The plan spills by {plan.spill.adapter!r}, an object, which no file can hold: plans "
            "to be saved name their adapter, as in jdelta.Spill(path, adapter='disk')."
        )
    record: dict[str, Any] = {"jdelta_plan": VERSION}
    for field in _fields(plan):
        value = getattr(plan, field.name)
        if field.name == "residuals":
            value = [dataclasses.asdict(residual) for residual in value]
        elif field.name == "versions":
            value = dict(value)
        elif isinstance(value, (Overlap, Grouping, Spill, SpillRates)):
            value = dataclasses.asdict(value)
        elif isinstance(value, Policy):
            value = _policy_record(value)
        record[field.name] = value
    Path(path).write_text(json.dumps(record, indent=1), encoding="utf-8")


def load(path: str | os.PathLike[str], cls: type[P]) -> P:
    """Read a plan.

    Raises:
        PlanMismatchError: The file is no plan, damaged, or of a version that is not understood.
    """
    try:
        record: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanMismatchError(f"{path} is damaged or no plan: {error}. Plan again.") from error
    version = record.get("jdelta_plan") if isinstance(record, dict) else None
    if version != VERSION:
        raise PlanMismatchError(
            f"{path}: expected a jdelta plan of version {VERSION}, got version {version!r}. "
            f"Plan again with this version of jdelta ({__version__})."
        )
    try:
        return cls(**{f.name: _read(f, record[f.name]) for f in _fields(cls)})
    except (KeyError, TypeError, AttributeError, ValueError, SpillError) as error:
        raise PlanMismatchError(
            f"{path}: the plan is damaged at {error}. Plan again and save it anew."
        ) from error


def _fields(plan: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(plan) if not f.name.startswith("_")]


def _policy_record(policy: Policy) -> dict[str, Any]:
    return {
        "saved": sorted(policy.saved),
        "offloaded": sorted(policy.offloaded),
        "spilled": sorted(policy.spilled),
        "recomputed": sorted(policy.recomputed),
        "regions": policy.regions,
        "writes_bits": policy.writes_bits,
        "least": policy.least,
        "partly": sorted(policy.partly),
        "together": sorted(policy.together),
    }


def _read(field: dataclasses.Field[Any], value: Any) -> Any:
    if field.name == "residuals":
        return tuple(Residual(**{k: _tuples(v) for k, v in row.items()}) for row in value)
    if field.name == "versions":
        return tuple(value.items())
    if field.name == "overlap":
        return Overlap.of_record(value)
    if field.name in _RECORDS and value is not None:
        return _RECORDS[field.name](**value)
    if field.name == "policy" and value is not None:
        sets = ("saved", "offloaded", "spilled", "recomputed", "partly", "together")
        names = {k: frozenset[str](value[k]) for k in sets}
        written, least = bool(value["writes_bits"]), bool(value["least"])
        regions = _tuples(value["regions"])
        return Policy(**names, regions=regions, writes_bits=written, least=least)
    expected = _SCALARS.get(str(field.type))
    if expected and not isinstance(value, expected):
        raise ValueError(f"{field.name}: expected {field.type}, got {value!r}")
    return _tuples(value)


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
