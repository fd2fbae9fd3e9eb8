"""The table: small training steps by kind, each with what is right of it.

A row is a function that makes a step and its arguments, put into the table by ``@program()``:

    @program(units=True)
    def mlp(size, remat):
        return step, (weights, x)

It is called anew for each run, so a step may change or donate its arguments.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Size:
    """How large a step is.

    Attributes:
        rows: Of the batch.
        width: Of what a unit takes and gives.
        layers: How many units follow each other.
    """

    rows: int
    width: int
    layers: int = 3


SMALL = Size(64, 8, 2)
DEEP = Size(64, 8)
FEW = Size(8, 8, 2)
LARGE = Size(8192, 512)
"""What a unit gives is 16 MiB of float32."""

Remat = Callable[[Callable[..., Any]], Callable[..., Any]]
Make = Callable[[Size, Remat], tuple[Callable[..., Any], tuple[Any, ...]]]


def unmarked(unit: Callable[..., Any]) -> Callable[..., Any]:
    """The unit as it is."""
    return unit


@dataclass(frozen=True)
class Refused:
    """What is right where a step cannot be planned: an error that says why.

    Attributes:
        error: Its class, a subclass of `jdelta.JdeltaError`.
        why: A pattern that is found in its message.
    """

    error: type[Exception]
    why: str


@dataclass(frozen=True)
class Program:
    """One row of the table.

    Attributes:
        name: Of the program, as in ``"mlp"``.
        kind: The file that it is in, as in ``"layers"``.
        make: From a size and what goes around units to the step and its arguments.
        units: Whether it has units that `jax.checkpoint` can go around by hand.
        small: Its size in the tests: of a large program one with fewer rows.
        large: Its size in the benchmark; nothing where it is not of a use there.
        right: What comes of a plan that recomputes everything: the numbers of the plain step
            (nothing), or an error.
        jit: What compiles the plain step.
        since: The oldest version of jax that runs it.
        around: Makes what is around all that is done with it, as flags of jax.
        rtol: How far numbers may be off, relative to the largest of an array.
        options: Further arguments of `jdelta.plan`.
    """

    name: str
    kind: str
    make: Make
    units: bool = False
    small: Size = SMALL
    large: Size | None = LARGE
    right: Refused | None = None
    jit: Callable[..., Any] = jax.jit
    since: tuple[int, ...] = (0, 10)
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    rtol: float = 1e-4
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        """Kind and name, as in ``"layers.mlp"``."""
        return f"{self.kind}.{self.name}"


PROGRAMS: dict[str, Program] = {}
"""By `id`; whole once `tests.programs` is imported."""


def program(**right: Any) -> Callable[[Make], Make]:
    """Puts what makes a step into the table; `right` are fields of `Program`."""

    def add(make: Make) -> Make:
        entry = Program(make.__name__, make.__module__.rpartition(".")[2], make, **right)
        assert entry.id not in PROGRAMS, entry.id
        PROGRAMS[entry.id] = entry
        return make

    return add
