"""What is advised: of donation only what was not done, of values only those that no plan keeps."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jdelta
from tests import small

ROWS, WORDS = 512, 4096


def with_logits(w, table, tokens):
    def loss(w, table):
        logits = small.scanned(w, table[tokens]) @ table.T
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    grads = jax.grad(loss, (0, 1))(w, table)
    return jax.tree.map(lambda w, g: w - 0.1 * g, (w, table), grads)


def with_logits_args():
    table = jax.ShapeDtypeStruct((WORDS, small.WIDTH), jnp.float32)
    return small.make_args()[0], table, jax.ShapeDtypeStruct((ROWS,), jnp.int32)


PIN = {"*/cos": "recompute"}


def test_a_value_that_takes_most_of_the_peak_is_named_with_its_line():
    plan = jdelta.plan(with_logits, None, *with_logits_args(), donate_argnums=(0, 1), pin=PIN)
    assert f"float32[{ROWS},{WORDS}]" in plan.search.hint
    assert "test_advice.py:" in plan.search.hint
    assert " % of the peak" in plan.search.hint
    assert "onate" not in plan.search.hint
    assert plan.search.hint in " ".join(str(plan).split())


def test_what_the_plan_keeps_is_not_named():
    """A budget is there to be filled."""
    plan = jdelta.plan(small.step, 0.5, *small.make_args(), donate_argnums=0)
    assert plan.policy is not None
    assert plan.search.hint == ""


def test_what_a_loop_stacks_is_not_named():
    def step(ws, x):
        def loss(ws):
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0] ** 2)

        return ws - 0.1 * jax.grad(loss)(ws)

    ws, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 64, 64), (4096, 64)))
    plan = jdelta.plan(step, 0.6, ws, x, donate_argnums=0)
    assert plan.policy is not None
    assert "takes" not in plan.search.hint


def test_donation_is_advised_by_name_as_long_as_it_was_not_done():
    args = small.make_args(64)
    plan = jdelta.plan(small.step, None, *args, pin=PIN)
    assert plan.search.hint.startswith("Donate w (donate_argnums; up to 512.0 KiB less).")
    args = small.make_args(16)  # nothing else takes much
    done = jdelta.plan(small.step, None, *args, pin=PIN, donate_argnums=0)
    assert "onate" not in done.search.hint
    assert "The argument w takes" in done.search.hint


def test_a_plan_that_costs_nothing_has_no_hint():
    assert jdelta.plan(small.step, 1.0, *small.make_args(64)).search.hint == ""


def test_a_hint_is_kept_in_the_file_and_makes_no_plans_unequal(tmp_path):
    plan = jdelta.plan(small.step, None, *small.make_args(64), pin=PIN)
    plan.save(tmp_path / "plan.json")
    loaded = jdelta.load(tmp_path / "plan.json")
    assert loaded.search.hint == plan.search.hint != ""
    other = dataclasses.replace(plan, search=dataclasses.replace(plan.search, hint=""))
    assert other == plan


def refused(step, budget, *args, **options):
    with pytest.raises(jdelta.BudgetError) as caught:
        jdelta.plan(step, budget, *args, **options)
    return str(caught.value)


def test_a_budget_below_the_floor_is_told_what_takes_it_and_what_to_do():
    args = with_logits_args()
    text = refused(with_logits, "1MiB", *args)
    assert "arguments " in text
    assert f"float32[{ROWS},{WORDS}] 8.00 MiB (test_advice.py:" in text
    assert "donate table" in text
    donated = refused(with_logits, "1MiB", *args, donate_argnums=(0, 1))
    assert "donate" not in donated
    assert "Raise the budget to " in donated
    assert "mark regions of your own with jdelta.remat" in donated


def test_a_part_that_is_donated_is_not_advised_again():
    args = small.make_args(64)
    text = refused(lambda v, w, x: (small.step(v, x), small.step(w, x)), 4096, args[0], *args)
    assert "donate v and w (donate_argnums; up to 1.00 MiB less)" in text
    text = refused(
        lambda v, w, x: (small.step(v, x), small.step(w, x)),
        4096,
        args[0],
        *args,
        donate_argnums=0,
    )
    assert "donate w (donate_argnums; up to 512.0 KiB less)" in text


def test_a_step_that_keeps_nothing_is_told_of_donation_where_it_helps():
    def evaluate(w, x):
        return small.scanned(w, x)

    args = small.make_args()
    assert "donate x (donate_argnums; up to 512.0 KiB less), or" in refused(evaluate, 4096, *args)
    assert "donate" not in refused(evaluate, 4096, *args, donate_argnums=1)


def test_out_of_memory_is_not_told_of_donation_that_was_done():
    args = small.make_args(64)
    assert "Donate w (donate_argnums; up to" in str(jdelta.explain_oom(small.step, *args))
    assert "Donate" not in str(jdelta.explain_oom(small.step, *args, donate_argnums=0))
