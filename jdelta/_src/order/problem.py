"""What is to be ordered and laid out: operators and the tensors they make, as plain records."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Order = Sequence[int]

CORE = -1
"""The branch of operators that lead to several ends."""


@dataclass(frozen=True)
class Tensor:
    """A buffer, from the operator that allocates it to the last one that reads or writes it.

    Without users it is what an operator takes while it runs.

    Attributes:
        bytes: Its size.
        maker: Index of the operator that allocates it.
        users: Indices of the others that touch it, each of them dependent on the maker.
        kept: Whether it stays to the end: it is a result.
        name: What to call it.
    """

    bytes: int
    maker: int
    users: tuple[int, ...] = ()
    kept: bool = False
    name: str = ""


class Groups:
    """For each operator, or tensor, a few indices, all of them in one row of 32-bit integers.

    A list each would be as many more objects for Python's garbage collector to look through, again
    and again, and lists hold an object for each number: with 160,000 operators what is read then
    no longer fits next to the processor.
    """

    def __init__(self, members: Ints, indices: Ints, count: int):
        """Indices in the order given, each under its operator, of which there are ``count``."""
        self._starts = integers(np.cumsum(np.bincount(members + 1, minlength=count + 1)))
        self._indices = integers(indices[members.argsort(kind="stable")])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, member: int) -> array[int]:
        return self._indices[self._starts[member] : self._starts[member + 1]]

    def counts(self) -> Ints:
        """For each operator how many there are."""
        return np.diff(self._starts)


def integers(values: npt.ArrayLike) -> array[int]:
    """Numbers below 2³¹ in little memory, each quick to read and change on its own."""
    return array("i", np.asarray(values, dtype=np.int32).tobytes())


@dataclass(frozen=True)
class Problem:
    """A program as a directed acyclic graph of operators on tensors.

    Operators are numbered in program order, which is topological. What is given from outside is no
    tensor here: no order can free it.

    Attributes:
        predecessors: For each operator those that have to run before it.
        tensors: What is allocated.
        names: For each operator what to call it; empty when nobody asks.
    """

    predecessors: tuple[tuple[int, ...], ...]
    tensors: tuple[Tensor, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for index, before in enumerate(self.predecessors):
            if any(not 0 <= p < index for p in before):
                raise ValueError(f"operator {index} does not come after what it needs: {before}")
        for tensor in self.tensors:
            if tensor.bytes < 0 or any(u <= tensor.maker for u in tensor.users):
                raise ValueError(f"{tensor} is negative, or used before it is made")

    def __len__(self) -> int:
        return len(self.predecessors)

    @property
    def program(self) -> range:
        """Program order."""
        return range(len(self))

    @cached_property
    def successors(self) -> Groups:
        """For each operator those that wait for it."""
        after, before = _pairs(self.predecessors)
        return Groups(before, after, len(self))

    @cached_property
    def allocated(self) -> Groups:
        """For each operator the tensors that it allocates."""
        return Groups(self.makers, np.arange(len(self.tensors)), len(self))

    @cached_property
    def used(self) -> Groups:
        """For each operator the tensors that it uses, but for those it allocates."""
        tensors, users = self.uses
        return Groups(users, tensors, len(self))

    @cached_property
    def users(self) -> Groups:
        """For each tensor the operators that use it, but for the one that allocates it."""
        tensors, users = self.uses
        return Groups(tensors, users, len(self.tensors))

    @cached_property
    def bytes(self) -> Ints:
        """For each tensor its size."""
        return np.array([t.bytes for t in self.tensors], dtype=np.int64)

    @cached_property
    def kept(self) -> npt.NDArray[np.bool_]:
        """For each tensor whether it stays to the end."""
        return np.array([t.kept for t in self.tensors], dtype=bool)

    @cached_property
    def makers(self) -> Ints:
        """For each tensor its maker."""
        return np.array([t.maker for t in self.tensors], dtype=np.int64)

    @cached_property
    def uses(self) -> tuple[Ints, Ints]:
        """All pairs of a tensor and a user of it, tensor by tensor."""
        return _pairs([t.users for t in self.tensors])

    @cached_property
    def branches(self) -> list[int]:
        """For each operator the end that all its dependents lead to: a last operator, or CORE."""
        branch = list(self.program)
        for index in reversed(self.program):
            after = self.successors[index]
            if after:
                end = branch[after[0]]
                branch[index] = end if all(branch[other] == end for other in after) else CORE
        return branch

    def lives(self, order: Order) -> tuple[Ints, Ints]:
        """For each tensor the first and the last place in an order at which it is alive."""
        place = np.empty(len(self), dtype=np.int64)
        place[np.asarray(order, dtype=np.int64)] = np.arange(len(self))
        tensors, users = self.uses
        first = place[self.makers]
        last = first.copy()
        np.maximum.at(last, tensors, place[users])
        return first, np.where(self.kept, len(self) - 1, last)

    def timeline(self, order: Order) -> Ints:
        """Bytes alive while each operator runs, in the order given."""
        return bytes_alive(self.bytes, *self.lives(order), len(self))

    def peak(self, order: Order) -> int:
        """Most bytes alive at once."""
        return int(self.timeline(order).max(initial=0))


def bytes_alive(sizes: Ints, first: Ints, last: Ints, places: int) -> Ints:
    """What is alive at each of so many places: the sizes of the lives that span it."""
    changes = np.zeros(places + 1, dtype=np.int64)
    np.add.at(changes, first, sizes)
    np.subtract.at(changes, last + 1, sizes)
    return np.cumsum(changes)[:-1]


def _pairs(members: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """All pairs of an index and one of the members there, index by index."""
    indices = np.repeat(np.arange(len(members)), [len(some) for some in members])
    every = itertools.chain.from_iterable(members)
    return indices, np.fromiter(every, dtype=np.int64, count=len(indices))
