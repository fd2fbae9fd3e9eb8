"""Steps that spill by hand, and devices that do what a test tells them."""

import os
import resource
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jdelta
from jdelta._src.spill import Store, read, write
from jdelta._src.spill.library import Key
from tests.frameworks import STEPS

MIB = 1 << 20
ROWS = 6
X = np.linspace(-1, 1, 512 * 1024, dtype=np.float32).reshape(512, 1024)
"""Two MiB: two blocks."""


class Device:
    """Keeps in memory what it is given; `fault`, if set, is called first and may raise or wait."""

    def __init__(self):
        self.kept = {}
        self.calls = []
        self.fault = None
        self.lock = threading.Lock()

    def write(self, offset, data):
        self._begin("write", offset)
        self.kept[offset] = bytes(data)

    def read(self, offset, data):
        self._begin("read", offset)
        data[:] = self.kept[offset][: len(data)]

    def _begin(self, kind, offset):
        with self.lock:
            self.calls.append((kind, offset))
            nth = sum(k == kind for k, _ in self.calls)
        if self.fault is not None:
            self.fault(kind, nth, offset)


def make_step(store=None, between=None):
    """`x -> gradient` of a scanned layer; what the backward pass needs is spilled to `store`.

    `between` is called with the value between the passes, from inside the step.
    """

    def forward(x, row):
        kept = x if store is None else write(store, x, slot=0, row=row)
        return jnp.sin(x) + x, kept

    def backward(cotangent, row_kept):
        row, kept = row_kept
        x = kept if store is None else read(store, kept, jax.typeof(cotangent), slot=0, row=row)
        return cotangent * (jnp.cos(x) + 1), None

    def step(x):
        rows = jnp.arange(ROWS)
        y, kept = jax.lax.scan(forward, x, rows)
        if between is not None:
            y = between(y)
        return jax.lax.scan(backward, y, (rows, kept), reverse=True)[0]

    return jax.jit(step)


def expected(x=X):
    """What `make_step` gives without a store."""
    return np.asarray(make_step()(x))


def network(rows=2048, width=64, *, scan=True, remat=jdelta.remat):
    return STEPS["plain JAX"](rows, width, scan=scan, remat=remat)


def check(got, expected):
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def fill(store, many, size=MIB):
    """Writes `many` tensors of random bytes and returns them."""
    random = np.random.default_rng(0)
    tensors = [random.integers(0, 256, size, np.uint8) for _ in range(many)]
    for row, tensor in enumerate(tensors):
        store.put(Key(1, 0, 0, row), tensor)
    return tensors


def take(store, row, size=MIB):
    """Reads back one of what `fill` has written."""
    tensor = np.zeros(size, np.uint8)
    store.get(Key(1, 0, 0, row), tensor)
    return tensor


def wait_until(condition, seconds=10):
    """Waits until `condition` holds; whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def flow(store):
    """Counters once nothing goes on; what is written and what is not make up what was planned."""
    store.settle()
    counters = store.counters()
    assert counters.planned == counters.written + counters.forwarded
    assert counters.entries == counters.stored == 0
    return counters


def usage():
    """Open files, threads and resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return files, threads, pages * resource.getpagesize()


def open_store(path="", **options):
    """A store with a small pool."""
    from jdelta._src.spill import Spill

    return Store(Spill(str(path), **{"pool": "4MiB", **options}))
