"""Spilling by callbacks: as TPUs do it, run on the CPU, and compiled for a TPU."""

import concurrent.futures
import dataclasses
import errno
import os

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdelta
from jdelta import Decision, SpillError
from jdelta._src.backends.backend import Spilling
from jdelta._src.backends.cpu import CPU
from jdelta._src.backends.platforms import BACKENDS
from jdelta._src.backends.target import published
from jdelta._src.passes import spill as spill_pass
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.file_link import to_files
from jdelta._src.residuals.residual import residuals
from jdelta._src.spill import SpillRates
from tests.compilers import TARGETS
from tests.spilling import Device, check, flow, network

DEVICES = 2
PIN = {"*": "save", "block/dot_general": "spill"}
UNROLLED = {"*": "save", "block_[01]/dot_general": "spill"}


def curve(x):
    return x * jnp.sin(x)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def spill(device, tmp_path, monkeypatch):
    """Directories are quick; where the CPU is asked for, it is one that has no handlers."""
    monkeypatch.setattr("jdelta._src.api.planning.rates_of", lambda _: SpillRates(1e11, 1e11))
    habits = Spilling(by_callback=True, tries_handlers=False)
    monkeypatch.setitem(BACKENDS, "cpu", dataclasses.replace(CPU, spilling=habits))
    return jdelta.Spill(str(tmp_path), pool="1MiB", least="1KiB", adapter=device)


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_results_are_the_plain_steps(scan, spill, device):
    step, args = network(scan=scan)
    plan = jdelta.plan(step, None, *args, spill=spill, pin=PIN if scan else UNROLLED)
    planned = plan.jit()
    for _ in range(3):
        check(planned(*args), jax.jit(step)(*args))
    assert Decision.SPILL in plan.decisions.values()
    assert flow(plan.store).planned == 3 * plan.spill_bytes > 0
    assert {kind for kind, _ in device.calls} == {"write", "read"}


@pytest.mark.parametrize("mapped", [False, True], ids=["sharded", "shard_map"])
def test_every_device_gets_back_its_own(mapped, spill, device):
    """Without collectives: callbacks of virtual devices have too few threads to wait in them."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))

    def stack(unit):
        def run(x):
            return lax.scan(lambda x, _: (unit(x), None), x, length=3)[0]

        if mapped:
            run = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return jax.grad(lambda x: jnp.sum(run(x) ** 2))

    x = jax.device_put(jax.random.normal(jax.random.key(0), (512, 64)), rows)
    plan = jdelta.plan(stack(jdelta.remat(curve)), None, x, spill=spill, pin={"*/sin": "spill"})
    planned = plan.jit()
    for _ in range(3):
        check(planned(x), jax.jit(stack(curve))(x))
    assert flow(plan.store).planned == 3 * DEVICES * plan.spill_bytes > 0

    def fail(kind, *_):
        device.fault = None
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    device.fault = fail
    with pytest.raises(SpillError, match="output error"):
        planned(x)
    check(planned(x), jax.jit(stack(curve))(x))
    assert plan.store.counters().failures == 1


def test_steps_at_once_take_turns(spill):
    step, (ws, x, key) = network()
    plan = jdelta.plan(step, None, ws, x, key, spill=spill, pin=PIN)
    planned, inputs = plan.jit(), [x * scale for scale in (1.0, 2.0, 3.0, 4.0)]
    with concurrent.futures.ThreadPoolExecutor(len(inputs)) as pool:
        results = list(pool.map(lambda x: planned(ws, x, key), inputs))
    for x, got in zip(inputs, results, strict=True):
        check(got, jax.jit(step)(ws, x, key))
    assert plan.store.executions == len(inputs)
    assert flow(plan.store).planned == len(inputs) * plan.spill_bytes


@pytest.mark.parametrize("fails", ["write", "read"])
def test_a_step_after_one_that_failed_is_right(fails, spill, device):
    step, args = network()
    plan = jdelta.plan(step, None, *args, spill=spill, pin=PIN)
    planned = plan.jit()

    def fault(kind, nth, offset):
        if kind == fails:
            raise OSError(5, os.strerror(5))

    device.fault = fault
    with pytest.raises(SpillError, match="Input/output error"):
        planned(*args)
    device.fault = None
    check(planned(*args), jax.jit(step)(*args))
    assert plan.store.counters().failures == 1


@pytest.mark.parametrize("name", ["tpu:v5e:2x2", "cuda:h100"])
def test_the_device_waits_for_the_link(name, tmp_path):
    """As long as all bytes take there and back, however quick the files are."""
    step, args = network()
    target = published(name)
    priced = [r for region in trace(step, *args).regions for r in residuals(region, target)]
    rates, spill = target.rates, jdelta.Spill(str(tmp_path), least="1KiB")
    way = to_files(spill, SpillRates(1e15, 1e15), priced, target)
    r = next(r for r in priced if way.refusal(r) is None)
    link = 1 / rates.device_to_host + 1 / rates.host_to_device
    assert way.move(r).seconds == pytest.approx(r.bytes * r.repeats * link, rel=0.01)


def forgets_to_read(store, token, aval, **place):
    return jnp.zeros(aval.shape, aval.dtype)


@pytest.mark.compiler
def test_a_tpu_holds_less(tmp_path, monkeypatch):
    monkeypatch.setattr("jdelta._src.api.planning.rates_of", lambda _: SpillRates(1e11, 1e11))
    step, args = network(65536, 512)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)

    def planned(decision):
        options = {"target": TARGETS[0], "pin": {"*": "save", "block/dot_general": decision}}
        return jdelta.plan(step, None, *shapes, spill=str(tmp_path), **options)

    kept, spilled = planned("save"), planned("spill")
    assert spilled.spill_bytes > 0
    assert spilled.compiled_peak <= kept.compiled_peak - 0.9 * spilled.spill_bytes
    monkeypatch.setattr(spill_pass, "read", forgets_to_read)
    with pytest.raises(SpillError, match="does not write and read back all bytes"):
        planned("spill")
