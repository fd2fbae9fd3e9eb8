"""Sizes as users write them, and how sizes, times and arrays are written in tables and messages.

A budget is bytes (``14_000_000_000``), a size (``"14GiB"``) or a share of the plain step's peak.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType

from jdelta._src.errors import BudgetError

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("i", 1024), ("b", 1000), ("", 1000))
}
"""Bytes of each unit, in small letters: ``{"gib": 2**30, "g": 10**9}``."""

_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([A-Za-z%]*)\s*")

_BITS = re.compile(r"([KMGTP])i?b")
"""Units that mean bits to some: ``Gb``."""

_FEW = 1024
"""Bytes that no step fits: a float from one up to here was meant otherwise."""

_GIBIBYTES = 256
"""Bytes that no step fits either: an integer below is a size in GiB that lacks its unit."""

_EXPECTED = (
    "expected bytes (an int), a size such as '14GiB' or '14GB', or a share of what the step takes "
    "without jdelta, such as 0.5 or '50%'"
)


@dataclass(frozen=True)
class Budget:
    """A bound on the peak of the whole compiled step, per device; one of the two is set.

    Attributes:
        bytes: The bound in bytes.
        share: The bound as a share of the plain step's compiled peak, in (0, 1].
    """

    bytes: int | None = None
    share: float | None = None


def parse_budget(budget: object) -> Budget:
    """Read a budget.

    Raises:
        BudgetError: It is zero, negative, not finite, not understood, or bytes that no step fits.
    """
    parsed = parse_size(budget)
    if parsed.bytes and parsed.bytes < _GIBIBYTES and str(budget).isdecimal():
        raise BudgetError(
            f"budget {budget!r} is {parsed.bytes} bytes, which no step fits; did you mean "
            f"'{parsed.bytes}GiB'? {_EXPECTED}"
        )
    return parsed


def parse_size(budget: object) -> Budget:
    """Read a size, or a share, in all forms that a budget has.

    Raises:
        BudgetError: It is zero, negative, not finite, or not understood.
    """
    if isinstance(budget, str):
        return _parse_text(budget)
    number = _number(budget)
    if not math.isfinite(number) or number <= 0:
        raise BudgetError(f"budget must be above zero; got {budget!r}; {_EXPECTED}")
    if isinstance(number, int):
        return Budget(bytes=number)
    if number <= 1:
        return Budget(share=number)
    if number < _FEW:
        raise BudgetError(f"budget {budget!r}: a share is at most 1.0; {_EXPECTED}")
    return Budget(bytes=int(number))


def _number(budget: object) -> int | float:
    """A budget that is a number of some kind, NumPy's and JAX's too; truth values are none."""
    item = getattr(budget, "item", None)
    if item is not None and getattr(budget, "ndim", None) == 0:
        budget = item()
    if isinstance(budget, float):
        return budget
    with contextlib.suppress(TypeError):
        if not isinstance(budget, bool):
            return operator.index(budget)  # pyright: ignore[reportArgumentType]
    raise BudgetError(
        f"budget, in jdelta.plan the second argument, before the step's own: {_EXPECTED}; "
        f"got {_shown(budget)}"
    )


def _shown(value: object) -> str:
    """What came, in short: numbers and texts as they are, of all else what it is.

    For example ``'14 parsecs'``, ``float32[8,128]`` or ``a dict``.
    """
    if isinstance(value, (str, int, float, complex, NoneType)):
        return reprlib.repr(value)
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    return f"a {type(value).__name__}" if dtype is None else format_array(dtype, shape)


def parse_host_budget(host_budget: object) -> int:
    """Read a bound on pinned host bytes; zero keeps everything off the host.

    Raises:
        BudgetError: It is negative, not finite, a share, or not understood.
    """
    if getattr(host_budget, "ndim", 0) == 0 and host_budget == 0:
        return 0
    try:
        size = parse_size(host_budget).bytes
    except BudgetError:
        size = None
    if size is None:
        raise BudgetError(
            "host_budget: expected bytes (0: nothing goes to the host) or a size such as "
            f"'40GiB'; got {_shown(host_budget)}"
        )
    return size


def _parse_text(text: str) -> Budget:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise BudgetError(f"budget {_shown(text)} is not understood; {_EXPECTED}")
    number, unit = float(match[1]), match[2].lower()
    if not unit and not match[1].isdecimal():
        return parse_size(number)
    if unit == "%":
        if not 0 < number <= 100:
            raise BudgetError(f"budget {text!r}: a share lies above 0% and at most at 100%")
        return Budget(share=number / 100)
    if unit not in _UNITS:
        raise BudgetError(
            f"budget {text!r}: unit {match[2]!r} is not known; use one of KiB, MiB, GiB, TiB, PiB, "
            "KB, MB, GB, TB, PB, B or %"
        )
    if bits := _BITS.fullmatch(match[2]):
        amount = match[1] + bits[1]
        raise BudgetError(
            f"budget {text!r}: {match[2]} may mean bits; for bytes write '{amount}iB' (in powers "
            f"of 1024) or '{amount}B' (in powers of 1000)"
        )
    size = int(number * _UNITS[unit])
    if size <= 0:
        raise BudgetError(f"budget must be above zero; got {text!r}; {_EXPECTED}")
    return Budget(bytes=size)


def format_bytes(size: float, *, up: bool = False) -> str:
    """Bytes with a binary unit and three or four digits: ``1.50 GiB``.

    Args:
        size: How many.
        up: Whether to round up, so that a budget that is read off the text is no less.
    """
    unit, scale = "B", 1
    for larger in ("KiB", "MiB", "GiB"):
        if abs(size) < 1000 * scale:
            break
        unit, scale = larger, 1024 * scale
    digits = 0 if unit == "B" else 2 if abs(size) < 100 * scale else 1
    if up:
        size = -(-size * 10**digits // scale) * scale / 10**digits
    return f"{size / scale:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds with a fitting unit: ``1.24 ms``; what is below a microsecond is ``<1 µs``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        rounded = f"{seconds * factor:.3g}"
        if float(rounded) >= 1:
            return f"{rounded} {unit}"
    return "<1 µs" if seconds else "0 µs"


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
