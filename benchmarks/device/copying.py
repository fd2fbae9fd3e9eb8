"""How fast one core copies to the pool of the spill store and back, by where a tensor begins.

A processor compares the addresses of loads and stores within a page only. A copy whose source and
target begin at nearly the same place of their pages may so let each load wait for a store that it
has nothing to do with; XLA's tensors begin at a multiple of 64 bytes, the pool's blocks at a page.
*in* is the copy to the pool, *out* the copy back, both with their sums, and *numpy* NumPy's copy.

    python -m benchmarks run copying
"""

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import study
from benchmarks.study import Job, Row, Study
from jdelta._src.spill.library import library

PAGE, BLOCK = 4096, 1 << 20
SIZE = 64 * BLOCK
OFFSETS = (0, 16, 64, 128, 1024, 2048, PAGE - 64)
REPEATS = 7
HEADS = ["offset", "in", "out", "numpy"]


def memory() -> np.ndarray[Any, Any]:
    """Memory that begins with a page, larger than caches are, its pages in place."""
    room = np.frombuffer(mmap.mmap(-1, SIZE + PAGE), np.uint8)
    room[:] = 1
    return room


def rate(copy: Callable[[int], Any]) -> float:
    """Bytes a second of the quickest round over all blocks."""
    seconds: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for at in range(0, SIZE, BLOCK):
            copy(at)
        seconds.append(time.perf_counter() - start)
    return SIZE / min(seconds)


def row(step: str, offset: int) -> Row:
    """The rates for tensors that begin so many bytes after a page does."""
    pool, tensors = memory(), memory()[offset:]
    block, tensor = pool.ctypes.data, tensors.ctypes.data
    move, sums = library().jdelta_spill_copy, (ctypes.c_uint64 * 16)()

    def numpy_copy(at: int) -> None:
        pool[at : at + BLOCK] = tensors[at : at + BLOCK]

    return {
        "in": rate(lambda at: move(block + at, tensor + at, BLOCK, sums)),
        "out": rate(lambda at: move(tensor + at, block + at, BLOCK, sums)),
        "numpy": rate(numpy_copy),
    }


def cells(r: Row) -> list[str]:
    """One line of the table."""
    return [str(r["offset"]), *(f"{r[head] / 1e9:.1f}" for head in HEADS[1:])]


def tables(rows: list[Row]) -> str:
    """The table of the docs."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(
    offset: Sequence[int] = OFFSETS,
) -> list[Job]:
    return [Job("copies", {"offset": at}) for at in offset]


STUDY = Study(
    "copying",
    "How fast does one core copy to the pool of the spill store and back?",
    jobs,
    row,
    tables,
)
