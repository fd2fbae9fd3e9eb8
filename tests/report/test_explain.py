"""What a plan says of its decisions, and of a step that does not fit."""

import jax
import jax.numpy as jnp
import pytest

import jdelta
from jdelta import Decision
from tests import small


@pytest.fixture(scope="module")
def plan():
    return jdelta.plan(small.step, 0.55, *small.make_args(), donate_argnums=0, per_layer=False)


def test_every_residual_is_explained(plan):
    for r in plan.residuals:
        (found,) = plan.explain(r.name)
        assert (found.name, found.decision) == (r.name, plan.decisions[r.name])
        assert (found.bytes, found.shape) == (r.bytes, r.shape)
        assert found.recompute >= r.seconds
        assert found.transfers is None
        assert "CPU" in found.refusal
        assert all(plan.decisions[name] is Decision.RECOMPUTE for name in found.chain)
        assert str(found).startswith(f"{r.name}: {found.decision.value}")


def test_a_chain_is_what_has_to_be_computed_first(plan):
    sources = {r.name: r.sources for r in plan.residuals}
    for name, listed in sources.items():
        (found,) = plan.explain(name)
        dropped = {s for s in listed if plan.decisions[s] is Decision.RECOMPUTE}
        assert dropped <= set(found.chain)


def test_what_comes_first_lives_longest():
    plan = jdelta.plan(small.unrolled_step, None, *small.make_args())
    named = [r.name for r in plan.residuals if r.name.endswith("mlpwi")]
    lives = [plan.explain(name)[0].lifespan for name in named]
    assert len(lives) == small.LAYERS
    assert lives == sorted(lives, reverse=True)
    assert lives[-1] < lives[0]


def test_more_memory_changes_what_is_recomputed(plan):
    found = [e for e in plan.explain("*") if e.turning is not None]
    assert found
    assert all(e.turning > 0 for e in found if e.decision is Decision.RECOMPUTE)
    assert all(e.turning <= 0 for e in found if e.decision is Decision.SAVE)


def test_alike_residuals_are_explained_together(plan):
    together = plan.explain("*/mlpwi")
    assert sum(e.instances for e in together) == small.LAYERS


def test_an_unknown_name_is_refused(plan):
    with pytest.raises(jdelta.PlanMismatchError, match="no residual called 'other'"):
        plan.explain("other")


def test_no_compiler_is_needed_to_explain(tmp_path, plan, monkeypatch):
    record = tmp_path / "plan.json"
    plan.save(str(record))
    text = record.read_text().replace('"target": "cpu"', '"target": "cuda:h100:1x1x8"')
    record.write_text(text)
    monkeypatch.setattr("jdelta._src.backends.target.topology_devices", None)
    (found, *_) = jdelta.load(str(record)).explain("*/mlpwi")
    assert found.transfers is not None or found.refusal


def test_oom_lists_what_is_alive_at_the_peak():
    args = small.make_args(1 << 20)
    found = jdelta.explain_oom(small.step, *args, target="cpu")
    sizes = [alive.bytes for alive in found.alive]
    assert sizes == sorted(sizes, reverse=True)
    assert found.needed * 0.5 <= sum(sizes) <= found.needed * 1.5
    given = sum(alive.bytes for alive in found.alive if alive.what == "argument")
    assert given == sum(x.size * 4 for x in jax.tree.leaves(args))
    assert any(alive.name == "unit/sin" for alive in found.alive)


def test_what_an_operation_takes_for_itself_is_named():
    """But for a TPU's, compilers copy the rows of a ragged product for each of its groups."""
    rows, width, groups = 256, 64, 8

    def step(ws, x):
        sizes = jnp.full(groups, rows // groups)
        return jax.grad(lambda ws: jnp.sum(jnp.tanh(jax.lax.ragged_dot(x, ws, sizes))))(ws)

    args = jnp.ones((groups, width, width)), jnp.ones((rows, width))
    found = jdelta.explain_oom(step, *args, target="cpu")
    own = [alive for alive in found.alive if alive.shape == "workspace"]
    assert [(alive.name, alive.bytes) for alive in own] == [
        ("ragged_dot_general", 2 * groups * rows * width * 4)
    ]
    says = r"1.00 MiB that ragged_dot_general at test_explain.py:\d+ takes for itself, "
    with pytest.raises(jdelta.BudgetError, match=says):
        jdelta.plan(step, "200KiB", *args)


def test_oom_says_what_would_help():
    args = small.make_args(1 << 20)
    given = jdelta.explain_oom(small.step, *args, target="cpu")
    assert any("donate_argnums" in remedy for remedy in given.remedies)
    donated = jdelta.explain_oom(small.step, *args, target="cpu", donate_argnums=0)
    assert not any("donate_argnums" in remedy for remedy in donated.remedies)


def test_oom_where_no_plan_fits(monkeypatch):
    monkeypatch.setattr("jdelta._src.backends.target._memory", lambda _: 8 << 20)
    found = jdelta.explain_oom(small.step, *small.make_args(1 << 16), target="cpu")
    assert found.plan is None
    assert found.floor is not None
    assert found.floor > found.memory
    assert any("No plan fits" in remedy for remedy in found.remedies)
    assert "does not fit" in str(found)


def test_oom_where_a_plan_fits(monkeypatch):
    monkeypatch.setattr("jdelta._src.backends.target._memory", lambda _: 56 << 20)
    found = jdelta.explain_oom(small.step, *small.make_args(4096), target="cpu")
    assert found.needed > found.memory
    assert found.plan is not None
    assert found.plan.compiled_peak <= found.memory
    assert any("jdelta.jit" in remedy for remedy in found.remedies)


def test_nothing_is_logged_unless_asked(caplog, capfd):
    jdelta.plan(small.step, 0.5, *small.make_args(512))
    assert capfd.readouterr().err == ""
    with caplog.at_level("INFO", logger="jdelta"):
        jdelta.plan(small.step, 0.6, *small.make_args(512))
    assert any("compiling" in message for message in caplog.messages)


def test_a_step_with_no_named_values_is_explained():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    assert jdelta.explain_oom(step, shape, shape).alive
