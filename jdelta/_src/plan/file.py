"""Plans as files: versioned JSON, no pickle. ``plan.schema.json`` beside this file describes it.

A record is an object of its public fields, a tuple or a set is a list, a decision is its value. The
types of the fields say how they are read.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jdelta._src.errors import PlanMismatchError, SpillError
from jdelta._src.versions import __version__

VERSION = 20
"""Of the form of the files; any other is refused."""

P = TypeVar("P")


def save(plan: Any, path: str | os.PathLike[str]) -> None:
    """Write a plan, all its public fields.

    Raises:
        SpillError: It spills to an adapter that is an object.
    """
    spill = plan.question.spill
    if spill is not None and not isinstance(spill.adapter, str):
        raise SpillError(
            f"The plan spills by {spill.adapter!r}, an object, which no file can hold: plans "
            "to be saved name their adapter, as in jdelta.Spill(path, adapter='disk')."
        )
    record = {"jdelta_plan": VERSION, **_written(plan)}
    text = json.dumps(record, indent=1, default=_written)
    Path(path).write_text(text, encoding="utf-8")


def load(path: str | os.PathLike[str], cls: type[P]) -> P:
    """Read a plan.

    Raises:
        PlanMismatchError: The file is no plan, damaged, or of a version that is not understood.
    """
    try:
        record: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanMismatchError(f"{path} is damaged or no plan: {error}. Plan again.") from error
    version = record.pop("jdelta_plan", None) if isinstance(record, dict) else None
    if version != VERSION:
        raise PlanMismatchError(
            f"{path}: expected a jdelta plan of version {VERSION}, got version {version!r}. "
            f"Plan again with this version of jdelta ({__version__})."
        )
    try:
        return _read(cls, record, "")
    except (TypeError, ValueError, SpillError) as error:
        raise PlanMismatchError(
            f"{path}: the plan is damaged at {error}. Plan again and save it anew."
        ) from error


def _written(value: Any) -> Any:
    """What JSON has no form for, in one that it has."""
    if dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in _fields(type(value))}
    return value.value if isinstance(value, enum.Enum) else sorted(value)


@functools.cache
def _fields(record: Any) -> Mapping[str, Any]:
    """From the public fields of a record's class to their types: ``{"floor": int}``."""
    types_of = typing.get_type_hints(record)
    names = [f.name for f in dataclasses.fields(record) if not f.name.startswith("_")]
    return {name: types_of[name] for name in names}


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of a type, from its form in JSON.

    Args:
        kind: The type.
        value: The form.
        where: What it is in the file, for messages: ``"question.budget"``.

    Raises:
        ValueError: It has another form.
        SpillError: It is no place to spill to.
    """
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, value, where)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _read_one_of(typing.get_args(kind), value, where)
    collection = typing.get_origin(kind) or kind
    if issubclass(collection, (tuple, frozenset)):
        return _read_items(kind, value, where)
    if issubclass(kind, enum.Enum) and value in [member.value for member in kind]:
        return kind(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where}: expected {kind.__name__}, got {value!r}")
    return value


def _read_record(record: Any, value: Any, where: str) -> Any:
    fields = _fields(record)
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise ValueError(f"{where or 'the plan'}: expected the fields {', '.join(fields)}")
    entries: dict[str, Any] = value
    prefix = f"{where}." if where else ""
    return record(**{name: _read(fields[name], v, prefix + name) for name, v in entries.items()})


def _read_items(kind: Any, value: Any, where: str) -> Any:
    """A tuple or a set."""
    items: list[Any] = value if isinstance(value, list) else []
    kinds = _kinds_of_items(kind, len(items))
    if items != value or len(kinds) != len(items):
        raise ValueError(f"{where}: expected a list of {len(kinds) or 'items'}, got {value!r}")
    read = [
        _read(inner, item, f"{where}[{place}]")
        for place, (inner, item) in enumerate(zip(kinds, items, strict=True))
    ]
    return kind._make(read) if hasattr(kind, "_make") else typing.get_origin(kind)(read)


def _kinds_of_items(kind: Any, count: int) -> Sequence[Any]:
    """The types of so many items of a tuple or a set: ``[str, int]`` of ``tuple[str, int]``."""
    if hasattr(kind, "_make"):  # a NamedTuple
        return list(typing.get_type_hints(kind).values())
    first, *others = typing.get_args(kind)
    return [first] * count if others in ([], [...]) else [first, *others]


def _read_one_of(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """A value of one of several types: of JSON's own, or of one other if it is not null."""
    if type(value) in kinds:
        return value
    others = [kind for kind in kinds if kind is not types.NoneType]
    if len(others) == 1:
        return _read(others[0], value, where)
    names = " or ".join(kind.__name__ for kind in others)
    raise ValueError(f"{where}: expected {names}, got {value!r}")
