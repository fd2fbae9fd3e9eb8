"""Plans that spill in a job of several processes: one plan, whatever each of them measures."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jdelta import SpillError
from jdelta._src.spill import Spill, SpillRates, agreed_rates, rates

ROOT = Path(__file__).parents[2]
JOB = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jdelta
from jdelta._src.spill import SpillRates, rates

address, process, *measured = sys.argv[1:]
jax.distributed.initialize(address, 2, int(process))
rates.rates_of = lambda _: SpillRates(*map(float, measured))

mesh = Mesh(jax.devices(), "data")
cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))

@jdelta.remat
def block(w, x):
    h = x @ w
    return x + h * jnp.tanh(h)

def step(ws, x):
    def loss(ws):
        return jnp.mean(jax.lax.scan(lambda x, w: (block(w, x), None), x, ws)[0] ** 2)
    value, grads = jax.value_and_grad(loss)(ws)
    return jax.tree.map(lambda w, g: w - g, ws, grads), value

ws = jax.device_put(np.full((6, 64, 64), 0.01, np.float32), whole)
local = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
x = jax.make_array_from_process_local_data(cut, local)
spill = jdelta.Spill("", adapter="memory", pool="1MiB", least="1KiB")
plan = jdelta.plan(step, 0.8, ws, x, spill=spill)
_, loss = plan.jit()(ws, x)
_, expected = jax.jit(step)(ws, x)
print(json.dumps({
    "decisions": {name: d.value for name, d in plan.decisions.items()},
    "rates": [plan.spill_rates.write, plan.spill_rates.read],
    "loss": float(loss), "expected": float(expected),
}))
"""


FAST, LESS, SLOW = 1e11, 9e10, 1e5


@pytest.mark.parametrize(
    ("measured", "is_spilled"),
    [([(FAST, SLOW), (SLOW, FAST)], False), ([(FAST, LESS), (LESS, FAST)], True)],
    ids=["too slow to spill to", "quick"],
)
def test_two_processes_make_one_plan(measured, is_spilled):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        address = f"localhost:{taken.getsockname()[1]}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, address, str(number), *map(str, rates)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for number, rates in enumerate(measured)
    ]
    outputs = [process.communicate(timeout=500) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in outputs)
    assert first == second
    assert first["rates"] == pytest.approx([min(rates) for rates in zip(*measured, strict=True)])
    assert ("spill" in first["decisions"].values()) == is_spilled
    assert first["loss"] == pytest.approx(first["expected"])


def of_two(monkeypatch, here, there):
    """What a process of two gets, if it measures `here` and the other one `there`."""

    def measured(_):
        if isinstance(here, Exception):
            raise here
        return here

    def least(mine):
        asked.append(mine)
        return SpillRates(min(mine.write, there.write), min(mine.read, there.read))

    asked = []
    monkeypatch.setattr(rates.jax, "process_count", lambda: 2)
    monkeypatch.setattr(rates, "rates_of", measured)
    monkeypatch.setattr(rates, "_least", least)
    try:
        return agreed_rates(Spill("")), asked
    except SpillError as error:
        return str(error), asked


def test_the_slowest_process_counts(monkeypatch):
    found, _ = of_two(monkeypatch, SpillRates(5.0, 2.0), SpillRates(3.0, 4.0))
    assert found == SpillRates(3.0, 2.0)


def test_a_directory_that_one_process_cannot_use_fails_all_and_none_waits(monkeypatch):
    nothing = SpillRates(0.0, 0.0)
    here, asked = of_two(monkeypatch, SpillError("no such directory"), SpillRates(3.0, 4.0))
    assert (here, asked) == ("no such directory", [nothing])
    there, _ = of_two(monkeypatch, SpillRates(3.0, 4.0), nothing)
    assert "another process of the job cannot use its directory" in there
