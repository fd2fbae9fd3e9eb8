"""On an NVIDIA GPU, where one is: planned steps run, and compute what plain ones do.

Nearly all of their minutes XLA times kernels; XLA_FLAGS=--xla_gpu_autotune_level=0 leaves that out.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
from benchmarks.models import build, identity
from jdelta._src.spill import Spill, Store
from tests.spilling import ROWS, X, check, expected, flow, make_step, network

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="no GPU is attached to this machine"
)

SHAPE = {"rows": 16384, "width": 512}
"""Values of 32 MiB."""
STEPS = 3


@pytest.fixture(autouse=True)
def exact():
    """Products of float32 in full, so that another order of operations shows as rounding only."""
    with jax.default_matmul_precision("highest"):
        yield


def trained(step, args):
    """What some steps return, the last one's weights with each step's loss."""
    state, losses = args[0], []
    for _ in range(STEPS):
        state, loss = step(state, *args[1:])
        losses.append(loss)
    return state, losses


def planned(scan, budget=None, **options):
    """A plan for the residual network, what it trains to and what the plain step does."""
    step, args = network(**SHAPE, scan=scan)
    plain, _ = network(**SHAPE, scan=scan, remat=identity)
    plan = jdelta.plan(step, budget, *args, **options)
    check(trained(plan.jit(), args), trained(jax.jit(plain), args))
    return plan


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("budget", [0.75, 0.5])
def test_budgets_are_kept(scan, budget):
    plan = planned(scan, budget=budget)
    assert plan.compiled_peak <= plan.budget


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_offloaded_values_come_back(scan):
    plan = planned(scan, pin={"*": "recompute", "*/tanh": "offload"})
    assert plan.host_bytes > 0
    assert plan.overlap.bytes_out == plan.overlap.bytes_in > 0


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("adapter", ["disk", "memory"])
def test_spilled_values_come_back(scan, adapter, tmp_path):
    spill = jdelta.Spill(str(tmp_path), adapter=adapter, pool="64MiB")
    values = "*/tanh" if scan else "block_[0-4]/tanh"  # the last unit's are read at once
    plan = planned(scan, spill=spill, pin={"*": "recompute", values: "spill"})
    assert flow(plan.store).planned == STEPS * plan.spill_written > 0


def test_a_pool_smaller_than_a_value(tmp_path):
    store = Store(Spill(str(tmp_path), pool="1MiB"))
    for _ in range(STEPS):
        np.testing.assert_array_equal(make_step(store)(X), expected())
    assert flow(store).planned == STEPS * ROWS * X.nbytes
    store.close()


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_a_transformer_trains_alike(scan):
    shape = {"batch": 8, "length": 512, "dtype": jnp.float32, "scan": scan}
    case, plain = (build("gpt2", **shape, remat=remat) for remat in (jdelta.remat, identity))
    plan = jdelta.plan(case.step, 0.6, case.state, case.batch, donate_argnums=0)
    assert plan.compiled_peak <= plan.budget
    losses = []
    for step in (plan.jit(), jax.jit(plain.step, donate_argnums=0)):
        state, batch = case.init(0)
        metrics = []
        for _ in range(STEPS):
            state, outputs = step(state, batch)
            metrics.append(float(outputs["loss"]))
        losses.append(metrics)
    np.testing.assert_allclose(*losses, rtol=1e-5)
