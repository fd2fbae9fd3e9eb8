"""`jdelta.plan` from end to end on the CPU, where a scanned stack shows the saving."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdelta
from jdelta import BudgetError, Decision, PlanMismatchError, TargetError
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.measure import measure
from jdelta._src.regions.policy import Policy
from tests import small
from tests.planning import asking
from tests.stand_in import as_on_an_idle_machine
from tests.versions import fails_in_jax_0_10_with_remat3

LAYERS, WIDTH, ROWS = 8, 16, 2048


@jdelta.remat
def layer(w, x):
    h = jnp.tanh(x @ w)
    return x + jnp.exp(-(h**2)) * jax.nn.softmax(h @ w.T)


def loss_fn(layer, params, x):
    def body(x, w):
        return layer(w, x), None

    return (jax.lax.scan(body, x, params)[0] ** 2).mean()


def make_step(layer):
    def step(params, x):
        loss, grads = jax.value_and_grad(functools.partial(loss_fn, layer))(params, x)
        return params - 0.1 * grads, loss

    return step


step = make_step(layer)
plain_step = make_step(layer.__wrapped__)


def arguments(rows=ROWS):
    key = jax.random.key(0)
    params = 0.3 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH))
    return params, jax.random.normal(key, (rows, WIDTH))


@pytest.fixture(scope="module", autouse=True)
def rates():
    """Plans depend on rates, and those that are measured on what else the machine does."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_an_idle_machine(patch)
        yield


@pytest.fixture(scope="module")
def half():
    return jdelta.plan(step, 0.5, *arguments(), donate_argnums=0)


def test_plan_keeps_its_promises(half):
    assert half.compiled_peak <= half.budget < half.ceiling
    assert half.floor <= half.compiled_peak
    assert half.compiled_peak == pytest.approx(half.predicted_peak, rel=0.06)
    assert half.overhead > 0
    assert half.step_seconds > 0
    assert half.compiles <= 11  # a small step: the floor, and what uses the budget, are compiled
    kinds = set(half.decisions.values())
    assert kinds == {Decision.SAVE, Decision.RECOMPUTE}
    stats = half.compiled.memory_analysis()
    parts = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    assert half.compiled_peak == pytest.approx(parts, rel=1e-4)  # and XLA's few own bytes


def test_planned_step_equals_the_plain_step(half):
    params, loss = half.jit()(*arguments())
    expected = jax.jit(plain_step)(*arguments())
    np.testing.assert_allclose(loss, expected[1], rtol=1e-6)
    np.testing.assert_allclose(params, expected[0], rtol=1e-5, atol=1e-7)


def test_jit_does_not_compile_again(half):
    assert half.jit() is not half.jit()
    with jax.log_compiles(False), count_compiles() as compiled:
        half.jit()(*arguments())
    assert "jit(step)" not in compiled


class count_compiles:  # noqa: N801
    """Names of what XLA compiles inside the block."""

    def __enter__(self):
        self.names = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self.names

    def _listen(self, event, _, **what):
        if event.endswith("backend_compile_duration"):
            self.names.append(what.get("fun_name"))

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)


def test_a_second_process_makes_the_same_plan_of_what_the_first_one_measured(tmp_path):
    script = """
        import jax
        from tests.api.test_plan import arguments, count_compiles, step
        import jdelta
        with count_compiles() as compiled:
            plan = jdelta.plan(step, 0.5, *arguments(), donate_argnums=0)
            figures = plan.compiled_peak, plan.compiles, sorted(plan.decisions.items())
            count = compiled.count("jit(step)")
            run = plan.jit()
            run_count = compiled.count("jit(step)")
        jax.block_until_ready(run(*arguments()))
        assert plan.compiled is plan.compiled
        print(figures, f"{count},{run_count - count}")
    """
    variables = {"JDELTA_CACHE_DIR": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    before, after = (
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env={**os.environ, **variables},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.rpartition(" ")
        for _ in range(2)
    )
    assert after[0] == before[0]
    (searched, to_run), second = (map(int, part[2].split(",")) for part in (before, after))
    assert searched >= 2
    assert to_run == 0
    assert tuple(second) == (0, 1)  # the plan, once it is to run


def test_a_plan_that_takes_more_than_was_measured_is_refused(half, monkeypatch):
    def compiled_otherwise(*asked, executable=False, **options):
        program, measurement = measure(*asked, executable=executable, **options)
        peak = (half.budget + 1) if executable else measurement.peak
        return program, dataclasses.replace(measurement, peak=peak)

    monkeypatch.setattr("jdelta._src.search.history.measure", compiled_otherwise)
    with pytest.raises(BudgetError, match=r"Compiled once more, the plan takes .* Plan again"):
        jdelta.plan(step, 0.5, *arguments(), donate_argnums=0).jit()


def test_other_donation_compiles_again_and_is_checked(half):
    kept = half.jit(donate_argnums=())
    params, x = arguments()
    kept(params, x)
    assert not params.is_deleted()
    tight = asking(half, budget=half.compiled_peak // 2)
    with pytest.raises(BudgetError, match=r"donate_argnums=\(\) the step needs .*, it took "):
        tight.jit(donate_argnums=())(*arguments())


def test_a_larger_budget_is_never_slower():
    plans = [jdelta.plan(step, share, *arguments()) for share in (0.95, 0.45, 0.6, 0.8)]
    plans.sort(key=lambda plan: plan.budget)
    assert all(plan.compiled_peak <= plan.budget for plan in plans)
    overheads = [plan.overhead for plan in plans]
    assert overheads == sorted(overheads, reverse=True)


def test_solvers_agree(half):
    exact = jdelta.plan(step, 0.5, *arguments(), donate_argnums=0, solver="milp")
    assert exact.compiled_peak <= exact.budget
    assert exact.overhead == pytest.approx(half.overhead, rel=0.05)
    with pytest.raises(jdelta.ArgumentError, match=r"solver must be one of \['knapsack', 'milp'\]"):
        jdelta.plan(step, 0.5, *arguments(), solver="guess")


def test_a_budget_with_room_changes_nothing():
    plan = jdelta.plan(step, 1.0, *arguments())
    assert plan.policy is None
    assert plan.overhead == 0.0
    assert plan.compiled_peak == plan.ceiling
    assert set(plan.decisions.values()) == {Decision.SAVE}
    assert "plain step fits" in str(plan)
    np.testing.assert_allclose(plan.jit()(*arguments())[1], plain_step(*arguments())[1], rtol=1e-6)
    by_policy = make_step(jdelta.remat(layer.__wrapped__, policy=plan, name="layer"))
    np.testing.assert_allclose(by_policy(*arguments())[1], plain_step(*arguments())[1], rtol=1e-6)


def test_bytes_as_budget_and_shapes_as_arguments(half):
    shapes = jax.eval_shape(lambda: arguments())
    plan = jdelta.plan(step, half.budget, *shapes, donate_argnums=(0,))
    assert plan.decisions == half.decisions
    assert plan.jit()(*arguments())[1] == half.jit()(*arguments())[1]


def test_default_budget_is_the_memory_of_the_target():
    plan = jdelta.plan(step, None, *arguments())
    assert plan.policy is None
    assert plan.budget > 2**30


def test_plans_are_values(half):
    second = jdelta.plan(step, 0.5, *arguments(), donate_argnums=0)
    assert second.policy == half.policy
    assert hash(second.policy) == hash(half.policy)
    assert {half: 1}[half] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        half.budget = 3
    assert half != jdelta.plan(step, 0.8, *arguments(), donate_argnums=0)


def test_table(half):
    text = str(half)
    saved = [n for n, d in half.decisions.items() if d is Decision.SAVE]
    assert any(name in text for name in saved)
    assert f"{LAYERS} in loop" in text
    for label in ("compiled peak", "bounds", "overhead", "result"):
        assert f"\n{label}" in text


def test_jit_plans_at_the_first_call_and_for_new_shapes():
    run = jdelta.jit(step, budget=0.6)
    assert run.plans == []
    for rows in (ROWS, ROWS, 2 * ROWS):
        np.testing.assert_allclose(
            run(*arguments(rows))[1], plain_step(*arguments(rows))[1], rtol=1e-6
        )
    assert len(run.plans) == 2
    assert all(plan.compiled_peak <= plan.budget for plan in run.plans)


def test_deferred_plan():
    deferred = jdelta.plan(step, 0.6, donate_argnums=0)
    run = deferred.jit(donate_argnums=())
    params, x = arguments()
    run(params, x)
    assert not params.is_deleted()


@fails_in_jax_0_10_with_remat3
def test_a_deferred_plan_is_no_policy_yet():
    deferred = jdelta.plan(step, 0.6)
    with pytest.raises(PlanMismatchError, match="has no arguments yet"):
        jax.grad(lambda p, x: jax.checkpoint(step, policy=deferred)(p, x)[1])(*arguments())


def test_a_plan_called_with_arrays_says_how_to_run_the_step():
    plan = jdelta.plan(step, 1.0, *arguments())
    with pytest.raises(
        jdelta.ArgumentError, match=r"got \w+\. A plan is a policy.* plan\.jit\(\) returns"
    ):
        plan(*arguments())


def test_a_step_with_checkpoints_of_its_own_is_told_what_becomes_of_them():
    checkpointed = make_step(jax.checkpoint(layer.__wrapped__))
    fits = jdelta.plan(checkpointed, 1.0, *arguments())
    assert "own jax.checkpoint stays" in fits.result
    planned = jdelta.plan(checkpointed, 3 * fits.ceiling, *arguments(), pin={"*exp": "save"})
    assert "own jax.checkpoint is planned too" in planned.result
    assert "jax.checkpoint" not in jdelta.plan(plain_step, 1.0, *arguments(256)).result


def test_pins_hold_where_the_plain_step_would_fit():
    plan = jdelta.plan(step, 1.0, *arguments(), pin={"*/exp": "recompute"})
    recomputed = {name for name, d in plan.decisions.items() if d is Decision.RECOMPUTE}
    assert "layer/exp" in recomputed
    assert plan.compiled_peak < plan.ceiling
    kept = jdelta.plan(step, 1.0, *arguments(), pin={"*/exp": "save"})
    assert kept.compiled_peak == kept.ceiling


def test_pinned_decisions():
    plan = jdelta.plan(step, 0.6, *arguments(), pin={"layer/tanh": "save", "*/exp": "recompute"})
    assert plan.decisions["layer/tanh"] is Decision.SAVE
    assert {d for n, d in plan.decisions.items() if n.endswith("/exp")} == {Decision.RECOMPUTE}
    with pytest.raises(PlanMismatchError, match="no residual is called 'nothing'"):
        jdelta.plan(step, 0.6, *arguments(), pin={"nothing": "save"})
    with pytest.raises(PlanMismatchError, match="cannot be offloaded"):
        jdelta.plan(step, 0.6, *arguments(), pin={"layer/tanh": Decision.OFFLOAD})
    later = jdelta.plan(step, 1.0, *arguments(), pin={"*": "offload", "layer/*": "save"})
    assert set(later.decisions.values()) == {Decision.SAVE}
    with pytest.raises(jdelta.ArgumentError, match="'away' is no decision; expected save, offload"):
        jdelta.plan(step, 0.6, *arguments(), pin={"layer/tanh": "away"})


def test_below_the_floor():
    with pytest.raises(BudgetError, match="below the floor: with every residual") as caught:
        jdelta.plan(step, 2048, *arguments(), donate_argnums=0)
    floor = caught.value.floor
    with pytest.raises(BudgetError, match="below the floor: with every residual"):
        jdelta.plan(step, floor - 1, *arguments(), donate_argnums=0)
    by_hand = make_step(jax.checkpoint(layer.__wrapped__, prevent_cse=False))
    lowered = jax.jit(by_hand, donate_argnums=0).lower(*arguments())
    assert measure(lowered, resolve("cpu"))[1].peak > floor - 1
    least = jdelta.plan(step, floor, *arguments(), donate_argnums=0)
    assert (least.compiled_peak, least.floor) == (floor, floor)
    assert least.estimates == ()


def test_below_the_floor_of_an_unrolled_step_on_a_cpu_says_why(monkeypatch):
    # XLA of jax 0.12 keeps recompute apart that is shielded, that of 0.10 merges all of it.
    monkeypatch.setattr(Policy, "prevents_cse", lambda *_: False)
    with pytest.raises(BudgetError, match="XLA for CPUs undoes recompute"):
        jdelta.plan(small.unrolled_step, 0.1, *small.make_args(), donate_argnums=0)
    with pytest.raises(BudgetError) as scanned:
        jdelta.plan(small.step, 0.1, *small.make_args(), donate_argnums=0)
    assert "undoes" not in str(scanned.value)


def test_the_floor_of_half_the_peak_is_not_compiled(half):
    assert half.estimates == ("floor",)


@pytest.mark.parametrize("estimates", [(), ("floor",), ("ceiling",), ("floor", "ceiling")])
def test_what_was_not_compiled_is_called_predicted(half, estimates):
    search = dataclasses.replace(half.search, estimates=estimates)
    plan = dataclasses.replace(half, search=search)
    floor, ceiling = (", predicted" if name in estimates else "" for name in ("floor", "ceiling"))
    text = " ".join(str(plan).split())
    assert re.search(rf"floor \S+ \S+ \(the least that a plan needs{floor}\)", text)
    assert re.search(rf"plain step \S+ \S+ \(without jdelta{ceiling}\)", text)


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (0, "above zero"),
        (-5, "above zero"),
        ("14 parsecs", "unit 'parsecs'"),
        ("999PiB", "is above the"),
    ],
)
def test_bad_budgets(budget, says):
    with pytest.raises(BudgetError, match=says):
        jdelta.plan(step, budget, *arguments())


@pytest.mark.parametrize(
    "refused",
    [
        lambda: jdelta.plan(step, "1%", *arguments()),
        lambda: jdelta.jit(step, "1%")(*arguments()),
    ],
)
def test_a_refused_budget_shows_no_frames_of_the_search(refused):
    with pytest.raises(BudgetError, match="below the floor") as error:
        refused()
    files = [frame.filename for frame in traceback.extract_tb(error.value.__traceback__)]
    assert not any("search" in Path(file).parts for file in files)
    assert len(files) <= 8


@pytest.mark.parametrize("host_budget", ["50%", -1, "0 B", "14 parsecs"])
def test_bad_host_budget(host_budget):
    with pytest.raises(BudgetError, match="host_budget: expected bytes"):
        jdelta.plan(step, 0.5, *arguments(), host_budget=host_budget)


@pytest.mark.parametrize("fun", [layer, layer.__wrapped__], ids=["marked", "bare"])
def test_a_step_without_a_gradient(fun, tmp_path):
    loss, args = functools.partial(loss_fn, fun), arguments()
    plan = jdelta.plan(loss, "1GiB", *args)
    assert plan.policy is None
    assert plan.compiled_peak <= plan.budget
    assert "nothing to decide" in str(plan)
    np.testing.assert_allclose(plan.jit()(*args), loss(*args), rtol=1e-5)
    assert jdelta.plan(loss, None, *args, pin={"*": "recompute"}) == jdelta.plan(loss, None, *args)
    plan.report(tmp_path / "page.html")
    with pytest.raises(PlanMismatchError, match="called 'anything'; the step keeps nothing"):
        plan.explain("anything")
    with pytest.raises(PlanMismatchError, match="called 'mlp'; the step keeps nothing"):
        jdelta.plan(loss, "1GiB", *args, pin={"mlp": "save"})


def test_a_step_without_a_gradient_over_its_budget():
    loss, args = functools.partial(loss_fn, layer), arguments()
    with pytest.raises(BudgetError, match=r"arguments .*, results .*largest temporaries.*float32"):
        jdelta.plan(loss, 0.5, *args)
    frontier = jdelta.frontier(loss, *args)
    assert len(frontier.plans) == 1
    assert frontier.floor == frontier.plans[0].ceiling
    assert "fits" in str(jdelta.explain_oom(loss, *args))
    assert jdelta.schedule(loss, *args).peak


def test_a_refusal_asks_for_the_gradient_where_there_is_none():
    def loss(w, x):
        return jnp.mean((x + jnp.tanh(x @ w) - x) ** 2)

    args = jnp.ones((64, 64)), jnp.ones((512, 64))
    with pytest.raises(BudgetError, match=r"is differentiated in it.* jax\.grad") as refused:
        jdelta.plan(loss, "9KiB", *args)
    assert "temporaries 0 B." in str(refused.value)  # and no largest ones
    with pytest.raises(BudgetError, match="keeps nothing for a backward pass"):
        jdelta.plan(jax.grad(lambda w, x: jnp.sum(x @ w)), "9KiB", *args)


def test_a_gradient_beside_marked_units_is_planned():
    """Those are frozen: the units of what is differentiated are found."""

    def step(w, head, x):
        h = layer(w, x)
        return jax.grad(lambda head: jnp.mean(jnp.sin(jnp.tanh(h @ head)) @ head))(head), h

    params, x = arguments()
    args = params[0], params[1], x
    plan = jdelta.plan(step, None, *args, pin={"*": "recompute"})
    assert plan.policy is not None
    for got, expected in zip(*map(jax.tree.leaves, (plan.jit()(*args), step(*args))), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_unknown_target_and_missing_device():
    with pytest.raises(TargetError, match="unknown target 'abacus'"):
        jdelta.plan(step, 0.5, *arguments(), target="abacus")
    far = asking(jdelta.plan(step, 1.0, *arguments()), target="tpu:v5e:2x2")
    with pytest.raises(TargetError, match="tpu:v5e:2x2, which is not attached"):
        far.jit()


def test_arguments_of_other_shapes(half):
    with pytest.raises(PlanMismatchError, match="other shapes, dtypes or shardings"):
        half.jit()(*arguments(rows=64))


def test_a_planned_step_under_a_transformation(half):
    for planned in (half.jit(), jdelta.jit(step, budget=0.5)):
        with pytest.raises(PlanMismatchError, match="cannot take it apart"):
            jax.jit(planned)(*arguments())
