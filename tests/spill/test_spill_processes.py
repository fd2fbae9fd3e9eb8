"""Plans that spill in a job of several processes: one plan, whatever each of them measures."""

import json

import pytest

from tests import jobs

JOB = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jdelta
from jdelta._src.api import planning
from jdelta._src.spill import SpillRates

address, process, *measured = sys.argv[1:]
jax.distributed.initialize(address, 2, int(process))
planning.rates_of = lambda _: SpillRates(*map(float, measured))

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
    ended = jobs.run(JOB, measured)
    assert [status for status, *_ in ended] == [0, 0], ended
    first, second = (json.loads(output.splitlines()[-1]) for _, output, _ in ended)
    assert first == second
    assert first["rates"] == pytest.approx([min(rates) for rates in zip(*measured, strict=True)])
    assert ("spill" in first["decisions"].values()) == is_spilled
    assert first["loss"] == pytest.approx(first["expected"])
