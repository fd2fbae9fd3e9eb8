"""Spilling on GPUs: their programs compiled ahead of time, their copies on stand-ins for GPUs."""

import concurrent.futures
import dataclasses
import errno
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jdelta
from jdelta import SpillError
from jdelta._src.backends.target import resolve
from jdelta._src.passes.spill_record import check_handlers
from jdelta._src.spill import Spill, SpillRates, _build, trial
from jdelta._src.spill.callbacks import SPOILED
from tests.compilers import needs_cuda
from tests.gpu import Gpu, step
from tests.spilling import Device, flow, network, open_store

MIB = 1 << 20
LARGE = 40 * MIB
"""Three buffers of pinned memory."""


def every_value_comes_back(driver):
    """In loops, in micro-batches, larger and smaller than a buffer, and of no bytes."""
    for adapter in ("memory", "disk"):
        store, gpu = open_store("/tmp", adapter=adapter, pool="16MiB"), Gpu(driver)
        for run in range(2):
            assert step(gpu, store, run, rows=4, sizes=[LARGE, 12345, 0], rounds=2) == 0
        counters = flow(store)
        assert counters.planned == 2 * 2 * 4 * (LARGE + 12345)
        assert counters.written > 0
        assert counters.forwarded > 0
        assert driver.gpu_pinned() <= 8
        gpu.wait()
        store.close()
        assert driver.gpu_pinned() == 0
        gpu.end()


def gpus_at_once_do_not_meet(driver):
    store, gpus = open_store(adapter="memory", pool="16MiB"), [Gpu(driver, i) for i in range(4)]

    def train(gpu):
        return [step(gpu, store, run, rows=4, sizes=[5 * MIB, MIB]) for run in range(3)]

    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        assert list(pool.map(train, gpus)) == [[0, 0, 0]] * 4
    assert flow(store).planned == 4 * 3 * 4 * 6 * MIB
    store.close()


def a_slow_directory_slows_the_step_and_no_more(driver):
    """The pool and the pinned memory are full most of the time."""
    store = open_store(adapter="memory", pool="2MiB", write_rate=4e8, read_rate=4e8)
    assert step(Gpu(driver), store, 1, rows=4, sizes=[LARGE]) == 0
    assert flow(store).waits > 0
    store.close()


def a_step_after_one_that_failed_is_right(driver):
    device = Device()
    store, gpu = open_store(adapter=device, pool="2MiB"), Gpu(driver)

    def fault(failing, kind, nth, offset):
        if kind == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    for run, failing in enumerate(("write", "read")):
        device.fault = functools.partial(fault, failing)
        with pytest.raises(SpillError, match="Input/output error"):
            step(gpu, store, 2 * run, rows=4, sizes=[LARGE])
        device.fault = None
        gpu.wait()
        assert step(gpu, store, 2 * run + 1, rows=4, sizes=[LARGE]) == 0
    assert store.counters().failures == 2
    for run, good in ((10, 1), (12, 13)):  # a copy to the host, and one to the GPU
        driver.gpu_fail_after(good)
        with pytest.raises(SpillError, match="CUDA error 719: launch failed"):
            step(gpu, store, run, rows=4, sizes=[LARGE])
        driver.gpu_fail_after(-1)
        gpu.wait()
        assert step(gpu, store, run + 1, rows=4, sizes=[LARGE]) == 0
    store.close()
    assert driver.gpu_pinned() == 0


def what_is_not_there_is_an_error(driver):
    store, gpu = open_store(adapter="memory"), Gpu(driver)
    data = gpu.memory(MIB)
    with pytest.raises(SpillError, match="slot 3 is read but not there"):
        gpu.read(store, 1, 3, data, MIB)
    gpu.write(store, 2, 3, data, MIB)
    with pytest.raises(SpillError, match="other bytes"):
        gpu.read(store, 2, 3, data, MIB // 2)
    store.close()
    with pytest.raises(SpillError, match="is closed"):
        gpu.write(store, 3, 3, data, MIB)


def an_error_waits_until_other_gpus_are_done(driver):
    """They may wait for this one, so its program goes on, with what nobody takes for a value."""
    store, gpu = open_store(adapter="memory"), Gpu(driver)
    data = gpu.memory(MIB)

    def use(run, close):
        with store.execution():
            if close:
                store.close()
            gpu.read(store, run, 3, data, MIB, others=True)
            gpu.count(data, MIB, SPOILED)
            gpu.write(store, run, 3, data, MIB, others=True)
            gpu.wait()

    with pytest.raises(SpillError, match="slot 3 is read but not there"):
        use(1, close=False)
    with store.execution():
        assert step(gpu, store, 2, rows=2, sizes=[MIB]) == 0
    with pytest.raises(SpillError, match="is closed"):
        use(3, close=True)
    assert gpu.wrong.value == 0


SCENARIOS = [
    every_value_comes_back,
    gpus_at_once_do_not_meet,
    a_slow_directory_slows_the_step_and_no_more,
    a_step_after_one_that_failed_is_right,
    what_is_not_there_is_an_error,
    an_error_waits_until_other_gpus_are_done,
]


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """The stand-in for NVIDIA's driver, built under its name."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).parent / "native" / "stand_in.cc"
    command = [*_build.compiler(), *_build.FLAGS, "-Wl,-soname,libcuda.so.1", str(source)]
    subprocess.run([*command, "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_a_stand_in(scenario, driver):
    """In a process of its own, where no other driver is."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu", str(driver), scenario.__name__],
        env={**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_handlers_are_tried_before_they_are_relied_on(monkeypatch):
    """On a device that is there; another one for each case, since each is tried once."""
    works, forgets, fails = jax.devices()[:3]
    trial.try_out(works)

    def zeros(store, token, aval, **place):
        return jnp.zeros(aval.shape, aval.dtype)

    monkeypatch.setattr(trial, "read", zeros)
    with pytest.raises(SpillError, match="do not come back as they were"):
        trial.try_out(forgets)
    monkeypatch.undo()
    monkeypatch.setattr(trial, "Spill", lambda *_, **options: Spill("/", limit=1, **options))
    with pytest.raises(SpillError, match="more than limit=1"):
        trial.try_out(fails)


@pytest.mark.parametrize(
    ("platform", "ahead", "tried"), [("cuda", False, 2), ("cuda", True, 0), ("cpu", False, 0)]
)
def test_gpus_that_are_there_are_tried(platform, ahead, tried, monkeypatch):
    seen = []
    monkeypatch.setattr("jdelta._src.passes.spill_record.try_out", seen.append)
    here = resolve("cpu", jax.device_put(0.0, jax.devices()[0]))
    where = dataclasses.replace(
        here, platform=platform, ahead_of_time=ahead, _devices=jax.devices()[:2]
    )
    check_handlers(where)
    assert len(seen) == tried


@pytest.mark.compiler
@needs_cuda
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_a_gpu_holds_less(scan, tmp_path, monkeypatch):
    """By the compiler's own figures; every value that is spilled is found in the program."""
    monkeypatch.setattr("jdelta._src.api.planning.rates_of", lambda _: SpillRates(1e11, 1e11))
    step, args = network(16384, 512, scan=scan)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    name = "block/dot_general" if scan else "block_[0-4]/dot_general"

    def planned(decision):
        pin = {"*": "recompute", "*/input*": "save", name: decision}
        options = {"target": "cuda:h100", "pin": pin, "spill": str(tmp_path)}
        return jdelta.plan(step, None, *shapes, **options)

    kept, spilled = planned("save"), planned("spill")
    assert spilled.spill_bytes > 0
    assert spilled.compiled_peak <= kept.compiled_peak - 0.7 * spilled.spill_bytes
