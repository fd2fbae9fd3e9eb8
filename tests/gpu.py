"""Stand-ins for GPUs: threads of this process, reached by a stand-in for NVIDIA's driver.

The driver is found by its name as the real one is, so this is imported by processes of tests only.
"""

import ctypes
import itertools
import sys

from jdelta import SpillError
from jdelta._src.spill.library import Key, library

_MESSAGE = 1000


class Gpu:
    """One stream of one GPU, and its memory.

    Attributes:
        driver: The loaded stand-in.
    """

    def __init__(self, driver, number=0):
        self.driver = driver
        self.number = number
        self.stream = ctypes.c_void_p(driver.gpu_stream(number))
        self.wrong = ctypes.c_int64(0)

    def memory(self, size):
        return ctypes.c_uint64(self.driver.gpu_memory(size))

    def compute(self, to, size, seed):
        self.driver.gpu_compute(self.stream, to, ctypes.c_int64(size), ctypes.c_int64(seed))

    def compare(self, data, size, seed):
        number = ctypes.c_int64(seed), ctypes.byref(self.wrong)
        self.driver.gpu_compare(self.stream, data, ctypes.c_int64(size), *number)

    def count(self, data, size, byte):
        number = ctypes.c_int64(byte), ctypes.byref(self.wrong)
        self.driver.gpu_count(self.stream, data, ctypes.c_int64(size), *number)

    def write(self, store, run, slot, data, size, others=False):
        self._move(library().jdelta_spill_send, store, run, slot, data, size, others)

    def read(self, store, run, slot, data, size, others=False):
        self._move(library().jdelta_spill_fetch, store, run, slot, data, size, others)

    def wait(self):
        self.driver.gpu_wait(self.stream)

    def end(self):
        self.driver.gpu_end(self.stream)

    def _move(self, call, store, run, slot, data, size, others):
        message = ctypes.create_string_buffer(_MESSAGE)
        place, count = Key(run, self.number, slot, 0), ctypes.c_int64(size)
        where = ctypes.c_int64(store.id), ctypes.byref(place), data, count, self.stream
        if call(*where, ctypes.c_bool(others), message, ctypes.c_int64(_MESSAGE)):
            raise SpillError(message.value.decode())


def load(path):
    """The stand-in, in the place of NVIDIA's driver."""
    driver = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    for name in ("gpu_stream", "gpu_memory"):
        getattr(driver, name).restype = ctypes.c_uint64
    driver.gpu_pinned.restype = ctypes.c_int64
    for name in ("gpu_memory", "gpu_stream", "gpu_fail_after"):
        getattr(driver, name).argtypes = [ctypes.c_int64]
    return driver


def step(gpu, store, run, *, rows, sizes, rounds=1):
    """A training step: layers whose values leave in the forward pass and return in the backward.

    All layers have their values in the same memory, as XLA's programs do, so a copy at the wrong
    time moves something else.
    """
    data = [gpu.memory(size) for size in sizes]
    for batch in range(rounds):  # micro-batches
        for row in range(rows):
            for slot, (at, size) in enumerate(zip(data, sizes, strict=True)):
                gpu.compute(at, size, seed(run, batch, row, slot))
                gpu.write(store, run, slot, at, size)
        for at, size in zip(data, sizes, strict=True):
            gpu.compute(at, size, 0)
        for row, slot in itertools.product(reversed(range(rows)), range(len(sizes))):
            gpu.read(store, run, slot, data[slot], sizes[slot])
            gpu.compare(data[slot], sizes[slot], seed(run, batch, row, slot))
            gpu.compute(data[slot], sizes[slot], 1)
    gpu.wait()
    return gpu.wrong.value


def seed(*numbers):
    """A number for each of what a step computes."""
    return hash(numbers) % 2**30


if __name__ == "__main__":
    from tests.spill import test_spill_gpu

    getattr(test_spill_gpu, sys.argv[2])(load(sys.argv[1]))
