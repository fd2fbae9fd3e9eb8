"""One plan on all processes of a job."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import jdelta
from jdelta import BudgetError, JdeltaError, PlanMismatchError
from jdelta._src import _jax
from jdelta._src.api import job as jobs_of
from jdelta._src.api.job import Job, Terms
from jdelta._src.backends.chips import Rates
from jdelta._src.sizes import Budget
from jdelta._src.spill import SpillRates
from tests import jobs

RATES = Rates((("float32", 5.0),), 4.0, 3.0, 2.0, 1.0, 1.0)
SLOW = Rates((("float32", 4.0),), 4.0, 3.0, 2.0, 1.0, 1.0)


@pytest.fixture
def service(monkeypatch):
    """In the place of JAX's: what was told, for threads that stand for processes."""
    told, changed = {}, threading.Condition()

    def tell(key, text):
        with changed:
            assert key not in told
            told[key] = text
            changed.notify_all()

    def heard(key, seconds=0.0):
        with changed:
            changed.wait_for(lambda: key in told, min(seconds, 0.05))
            return told.get(key)

    monkeypatch.setattr(_jax, "tell", tell)
    monkeypatch.setattr(_jax, "heard", heard)
    monkeypatch.setattr(jobs_of, "_ROUNDS", {(0, 1): iter([7, 7]), (0, 1, 2): iter([3, 3, 3])})
    return told


def together(*each):
    """What becomes of functions of a job, each in a process of its own."""

    def run(pair):
        job, fun = pair
        try:
            with job.failing_together():
                return fun(job)
        except Exception as error:
            return error

    members = [Job(range(len(each)), here) for here in range(len(each))]
    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(run, zip(members, each, strict=True)))


def fails(error):
    def run(job):
        raise error

    return run


def agrees(terms):
    return lambda job: job.common(terms)


def test_all_plan_with_the_least_and_with_the_rates_of_the_first(service):
    inf = float("inf")
    first = Terms(Budget(bytes=100), inf, RATES, SpillRates(5.0, 2.0))
    second = Terms(Budget(bytes=80), 60.0, SLOW, SpillRates(3.0, 4.0))
    terms = together(agrees(first), agrees(second))
    assert terms == [Terms(Budget(bytes=80), 60.0, RATES, SpillRates(3.0, 2.0))] * 2
    assert all("/7/terms/" in key for key in service)


@pytest.mark.usefixtures("service")
def test_terms_of_two_kinds_are_refused_by_all():
    share, size = (Terms(b, 1.0, RATES) for b in (Budget(share=0.5), Budget(bytes=80)))
    for error in together(agrees(share), agrees(size)):
        assert isinstance(error, PlanMismatchError)
        assert "different plans" in str(error)


@pytest.mark.usefixtures("service")
def test_the_error_of_one_process_reaches_all():
    terms = Terms(Budget(bytes=100), 1.0, RATES)
    first, second, own = together(agrees(terms), agrees(terms), fails(BudgetError("below it")))
    assert str(own) == "below it"
    for error in (first, second):
        assert isinstance(error, BudgetError)
        assert str(error) in (
            "Planning failed on process 2 of the job. below it",
            # of what the other has learnt
            "Planning failed on process 0 of the job. Planning failed on process 2 of the job. "
            "below it",
            "Planning failed on process 1 of the job. Planning failed on process 2 of the job. "
            "below it",
        )


@pytest.mark.usefixtures("service")
def test_an_error_that_is_not_of_jdelta_is_named():
    terms = Terms(Budget(bytes=100), 1.0, RATES)
    error, own = together(agrees(terms), fails(ZeroDivisionError("in the step")))
    assert isinstance(own, ZeroDivisionError)
    assert type(error) is JdeltaError
    said = "Planning failed on process 1 of the job. ZeroDivisionError: in the step"
    assert str(error) == said


@pytest.mark.usefixtures("service")
def test_unlike_plans_are_refused_by_all():
    plans = together(*[lambda job, p=p: job.check_alike(p) for p in ("a", "a")])
    assert plans == [None, None]


@pytest.mark.usefixtures("service")
def test_another_plan_is_refused_by_all():
    for here, error in enumerate(together(*[lambda job, p=p: job.check_alike(p) for p in "ab"])):
        assert isinstance(error, PlanMismatchError)
        assert f"Process {here} of the job has another plan than process {1 - here}" in str(error)


@pytest.mark.usefixtures("service")
def test_who_waits_in_vain_is_told_for_whom(monkeypatch, caplog):
    monkeypatch.setattr(jobs_of, "SOON", 0.1)
    monkeypatch.setattr(jobs_of, "LATEST", 0.3)
    error, _ = together(agrees(Terms(Budget(bytes=1), 1.0, RATES)), lambda job: None)
    assert "Process 1 of the job did not plan the step" in str(error)
    assert [r.getMessage() for r in caplog.records] == [
        "waiting for process 1 of the job to plan the same step"
    ]


JOB = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jdelta

address, process, directory = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, int(process))
process = int(process)
mesh = Mesh(jax.devices(), "data")
assert mesh.size == 4
cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
adam = optax.adam(1e-2)

def step(state, x):
    def loss(ws):
        layer = lambda x, w: (x + jnp.sin(jnp.tanh(x @ w)), None)
        return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)
    value, grads = jax.value_and_grad(loss)(state["ws"])
    updates, opt = adam.update(grads, state["opt"])
    return {"ws": optax.apply_updates(state["ws"], updates), "opt": opt}, value

def begin():
    ws = jax.device_put(np.full((6, 32, 32), 0.01, np.float32), whole)
    return {"ws": ws, "opt": jax.jit(adam.init)(ws)}

local = np.random.default_rng(process).standard_normal((256, 32)).astype(np.float32)
x = jax.make_array_from_process_local_data(cut, local)

def trained(run, state, steps):
    losses = []
    for _ in range(steps):
        state, value = run(state, x)
        losses.append(float(value))
    return state, losses

_, plain = trained(jax.jit(step), begin(), 8)
first = jdelta.plan(step, 0.95 if process else 0.9, begin(), x)
state, losses = trained(first.jit(), begin(), 5)
with ocp.StandardCheckpointer() as saver:
    saver.save(directory, state)
    saver.wait_until_finished()
    state = saver.restore(directory, jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
second = jdelta.plan(step, 0.7, state, x)
assert second.decisions != first.decisions
_, more = trained(second.jit(), state, 3)

def failing(state, x):
    if process:
        raise ValueError("only here")
    return step(state, x)

try:
    jdelta.plan(failing, 0.8, begin(), x)
except Exception as error:
    failure = [type(error).__name__, str(error)]
print(json.dumps({
    "plans": [sorted((n, d.value) for n, d in p.decisions.items()) for p in (first, second)],
    "budgets": [p.budget for p in (first, second)],
    "losses": losses + more, "plain": plain, "failure": failure,
}))
"""


def test_two_processes_plan_train_save_and_go_on_under_another_plan(tmp_path):
    ended = jobs.run(JOB, [[tmp_path / "state"]] * 2)
    assert [status for status, *_ in ended] == [0, 0], ended
    first, second = (json.loads(output.splitlines()[-1]) for _, output, _ in ended)
    failures = [result.pop("failure") for result in (first, second)]
    assert first == second
    assert first["losses"] == pytest.approx(first["plain"], rel=1e-5)
    assert first["budgets"][0] > first["budgets"][1]
    assert failures[1] == ["ValueError", "only here"]
    said = "Planning failed on process 1 of the job. ValueError: only here"
    assert failures[0] == ["JdeltaError", said]


def test_devices_that_are_not_here_are_planned_for_by_each_process_alone():
    assert not Job.of((), ahead_of_time=True).is_shared
    assert issubclass(jdelta.PlanMismatchError, JdeltaError)
