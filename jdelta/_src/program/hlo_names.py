"""The names of values in the text of a compiled program.

Every equation that makes a named value carries a mark in its name stack, which compilers keep as
the ``op_name`` of an instruction, inside of fusions too: ``…/mlp/~h_0.mlp.tanh~/tanh``. So what
became of a name can be read in the program, and found in its dump or profile by a person.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jdelta._src import _jax
from jdelta._src._jax import Eqn
from jdelta._src.program.primitives import VIEWS

RECOMPUTE = "rematted_computation"
"""The scope that ``jax.checkpoint`` puts what it computes again under."""

_SIGN = "~"
"""Before and after a name."""

_CLONE = ".remat"
"""In the name of what XLA's own rematerialisation computes again."""

_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
_HEADER = re.compile(r"%?([\w.\-]+) ")
_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?(\S+) = .*?op_name="([^"]*)"')
_MARK = re.compile(f"{_SIGN}([^{_SIGN}]*){_SIGN}")


def is_mark(scope: str) -> bool:
    """Whether a scope was put there by ``marked``."""
    return scope.startswith(_SIGN)


def mark(name: str) -> str:
    """The scope that says which named value an equation makes, or which region it is of."""
    return f"{_SIGN}{_spelled(name)}{_SIGN}"


class RegionMarks:
    """What reads the marks of regions."""

    def __init__(self, regions: Iterable[str]):
        """Know some regions by their names."""
        self._regions = {_spelled(region): region for region in regions}

    def region(self, eqn: Eqn) -> str | None:
        """The region that an equation is of by its mark; None if it has none."""
        marks = _MARK.findall(_jax.name_stack(eqn))
        return next((self._regions[mark] for mark in marks if mark in self._regions), None)


def marked(eqns: Sequence[Eqn]) -> list[Eqn]:
    """Equations with a mark on each that makes a value which one of them names.

    One that makes several such values (``unstack``) runs for any of them, so it has no mark.
    """
    named = {eqn.invars[0] for eqn in eqns if _jax.named_value(eqn)}
    makers = {
        v: i
        for i, eqn in enumerate(eqns)
        for v in eqn.outvars
        if len(named.intersection(eqn.outvars)) == 1
    }
    result = list(eqns)
    for eqn in eqns:
        name = _jax.named_value(eqn)
        maker = makers.get(eqn.invars[0]) if name else None
        if name and maker is not None and result[maker].primitive.name not in VIEWS:
            result[maker] = _jax.in_scopes(result[maker], mark(name))
    return result


@dataclass(frozen=True)
class Computed:
    """The named values of a program, by how often it computes them.

    Attributes:
        once: Names of values that are kept.
        recomputed: Names of values that are computed again.
    """

    once: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()

    def undone(self, text: str) -> tuple[str, ...]:
        """Names that a compiled program keeps or computes again against what it was given.

        A name that is nowhere in it was simplified away, or is in a computation that stands for
        several equal ones (XLA:GPU has these once): nothing is said of it.

        Args:
            text: The compiled program, with metadata.
        """
        first: set[str] = set()
        recomputed: set[str] = set()
        for instruction, op_name in _told_apart(text):
            is_again = RECOMPUTE in op_name or _CLONE in instruction
            (recomputed if is_again else first).update(_MARK.findall(op_name))
        kept = (name for name in self.recomputed if _spelled(name) in first - recomputed)
        remade = (name for name in self.once if _spelled(name) in recomputed)
        return tuple(sorted((*kept, *remade)))


NOTHING = Computed()
"""What the plain step has: no names."""


def _spelled(name: str) -> str:
    """A name as one scope."""
    return name.replace("/", ".")


def _told_apart(text: str) -> Iterator[tuple[str, str]]:
    """Marked instructions and their ``op_name``, but for those of computations called repeatedly.

    Line by line, since reading a large program as a ``Module`` takes longer than compiling it.
    """
    calls = Counter(_CALLED.findall(text))
    is_shared = False
    for line in text.splitlines():
        if line.endswith("{") and (header := _HEADER.match(line)):
            is_shared = calls[header[1]] > 1
        elif _SIGN in line and not is_shared and (instruction := _INSTRUCTION.match(line)):
            yield instruction[1], instruction[2]
