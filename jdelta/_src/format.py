"""How sizes, times, arrays and lists of names are written in tables and messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def format_bytes(size: float) -> str:
    """Bytes with a binary unit and three or four digits: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000 or unit == "GiB":
            break
        size /= 1024
    digits = 0 if unit == "B" else 2 if abs(size) < 100 else 1
    return f"{size:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds with a fitting unit: ``1.24 ms``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        rounded = f"{seconds * factor:.3g}"
        if float(rounded) >= 1 or unit == "µs":
            return f"{rounded} {unit}"
    raise AssertionError("unreachable")


def format_array(dtype: object, shape: Iterable[int]) -> str:
    """The kind of an array: ``float32[8,128]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def format_short(dtype: object, shape: Iterable[int]) -> str:
    """The kind of an array where there is little room: ``f32[8,128]``."""
    short = re.sub(r"^(u?)(bf|f|i|c)(?:loat|nt|omplex)(?=\d)", r"\1\2", str(dtype))
    return format_array(short, shape)


def format_some(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """The first of some texts, and how many more there are: ``a, b, c and 4 more``."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more
