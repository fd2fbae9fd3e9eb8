"""What a plan says of its decisions, and of a step that does not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jdelta
from jdelta import Decision
from jdelta._src.solver import Solver
from jdelta._src.solver.solution import Outcome, Solution
from tests import small
from tests.planning import asking


@pytest.fixture(scope="module")
def plan():
    return jdelta.plan(small.step, 0.55, *small.make_args(), donate_argnums=0, per_layer=False)


def test_every_residual_is_explained(plan):
    for r in plan.residuals:
        (explanation,) = plan.explain(r.name)
        assert (explanation.name, explanation.decision) == (r.name, plan.decisions[r.name])
        assert (explanation.bytes, explanation.shape) == (r.bytes, r.shape)
        assert explanation.recompute >= r.seconds
        assert explanation.transfers is None
        assert "CPU" in explanation.refusal
        assert all(plan.decisions[name] is Decision.RECOMPUTE for name in explanation.chain)
        assert str(explanation).startswith(f"{r.name}: {explanation.decision.value}")


def test_why_nothing_is_offloaded_is_told_once(plan):
    explanations = plan.explain("*")
    texts = list(map(str, explanations))
    assert len({e.refusal for e in explanations}) == 1
    assert "\n  offload: XLA for CPUs has one memory" in texts[0]
    assert not any("offload:" in text for text in texts[1:])
    assert "offload: XLA for CPUs has one memory" in str(plan.explain(explanations[-1].name)[0])


def test_a_chain_is_what_has_to_be_computed_first(plan):
    sources = {r.name: r.sources for r in plan.residuals}
    for name, listed in sources.items():
        (explanation,) = plan.explain(name)
        dropped = {s for s in listed if plan.decisions[s] is Decision.RECOMPUTE}
        assert dropped <= set(explanation.chain)


def test_what_comes_first_lives_longest():
    plan = jdelta.plan(small.unrolled_step, None, *small.make_args())
    named = [r.name for r in plan.residuals if r.name.endswith("mlpwi")]
    lives = [plan.explain(name)[0].lifespan for name in named]
    assert len(lives) == small.LAYERS
    assert lives == sorted(lives, reverse=True)
    assert lives[-1] < lives[0]


def test_more_memory_changes_what_is_recomputed(plan):
    explanations = [e for e in plan.explain("*") if e.turning is not None]
    assert explanations
    assert all(e.turning > 0 for e in explanations if e.decision is Decision.RECOMPUTE)
    assert all(e.turning <= 0 for e in explanations if e.decision is Decision.SAVE)


def test_alike_residuals_are_explained_together(plan):
    together = plan.explain("*/mlpwi")
    assert sum(e.instances for e in together) == small.LAYERS


def test_an_unknown_name_is_refused(plan):
    with pytest.raises(jdelta.PlanMismatchError, match="no residual called 'other'"):
        plan.explain("other")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("region", "'region/*'"),
        ("sin", "'*/sin'"),
        ("mlp*", "'*/mlp*'"),
        ("region/mlpvi", "'region/mlpwi'"),
    ],
)
def test_what_may_be_meant_by_a_name_is_said(plan, name, meant):
    with pytest.raises(jdelta.PlanMismatchError, match="did you mean") as refused:
        plan.explain(name)
    assert f"; did you mean {meant}? plan.decisions has all names" in str(refused.value)
    assert plan.explain(meant.strip("'"))


def test_a_region_of_layers_is_found_without_what_is_around_it():
    plan = jdelta.plan(small.unrolled_step, "1GiB", *small.make_args())
    names = tuple(dataclasses.replace(r, region=f"LM/{r.region}") for r in plan.residuals)
    inner = tuple(dataclasses.replace(r, name=f"LM/{r.name}") for r in names)
    plan = dataclasses.replace(plan, answer=dataclasses.replace(plan.answer, residuals=inner))
    with pytest.raises(jdelta.PlanMismatchError, match=r"did you mean '\*/region_1\*'"):
        plan.explain("region_1*")
    with pytest.raises(jdelta.PlanMismatchError, match=r"did you mean '\*/region_1/\*'"):
        plan.explain("region_1")
    with pytest.raises(jdelta.PlanMismatchError, match=r"; there are LM/.* \(plan.decisions has"):
        plan.explain("other")


def test_no_compiler_is_needed_to_explain(tmp_path, plan, monkeypatch):
    record = tmp_path / "plan.json"
    plan.save(str(record))
    text = record.read_text().replace('"target": "cpu"', '"target": "cuda:h100:1x1x8"')
    record.write_text(text)
    monkeypatch.setattr("jdelta._src.backends.target.topology_devices", None)
    (explanation, *_) = jdelta.load(str(record)).explain("*/mlpwi")
    assert explanation.transfers is not None or explanation.refusal


# --- The question that was asked ----------------------------------------------------------------


def turnings(plan):
    """What would change each decision, by name."""
    return {e.name: e.turning for e in plan.explain("*")}


def loaded(plan, folder):
    plan.save(str(folder / "plan.json"))
    return jdelta.load(str(folder / "plan.json"))


@dataclasses.dataclass(frozen=True)
class KeepsNothing(Solver):
    """Has everything computed again."""

    because: str = "it is simple"

    def _search(self, problem):
        nothing = (Decision.RECOMPUTE,) * len(problem.items)
        return Solution.of(problem, nothing, Outcome.HEURISTIC)


def test_a_pinned_decision_is_explained_by_its_pin(tmp_path):
    shapes, pin = small.make_args(), {"*/mlpwi": "recompute", "*/cos": "save"}
    original = jdelta.plan(small.step, 0.8, *shapes, donate_argnums=0, pin=pin)
    for plan in (original, loaded(original, tmp_path)):
        assert {e.name for e in plan.explain("*") if e.pinned} == {"region/mlpwi", "region/cos"}
        (explanation,) = plan.explain("*/mlpwi")
        assert explanation.turning is None
        assert str(explanation).startswith("region/mlpwi: recompute (pinned)\n")
        says = "No amount of memory for residuals changes this decision: it was pinned."
        assert str(explanation).endswith(says)
    answer = dataclasses.replace(original.answer, pinned=())
    assert turnings(dataclasses.replace(original, answer=answer)) != turnings(original)
    total = sum(r.bytes for r in original.residuals)
    turning = [extra for extra in turnings(original).values() if extra is not None]
    assert turning
    assert all(abs(extra) <= total for extra in turning)


def test_alike_residuals_are_apart_where_some_are_pinned():
    shapes = small.make_args()
    first = jdelta.plan(small.unrolled_step, "1GiB", *shapes)
    name = next(r.name for r in first.residuals if r.name.endswith("mlpwi"))
    pin = {"*": "save", name: "recompute"}
    plan = jdelta.plan(small.unrolled_step, "1GiB", *shapes, pin=pin)
    explanations = plan.explain("*/mlpwi")
    assert sum(e.instances for e in explanations) == small.LAYERS
    assert all(e.pinned for e in explanations)
    answer = dataclasses.replace(plan.answer, pinned=((name, Decision.RECOMPUTE),))
    by_hand, *others = dataclasses.replace(plan, answer=answer).explain("*/mlpwi")
    assert (by_hand.name, by_hand.pinned, by_hand.instances) == (name, True, 1)
    assert [e.pinned for e in others] == [False] * len(others)


def test_the_solver_that_was_asked_for_explains(tmp_path, monkeypatch):
    shapes = small.make_args()
    original = jdelta.plan(
        small.step, 0.8, *shapes, donate_argnums=0, per_layer=False, solver="milp"
    )
    explained = turnings(original)
    assert any(explained.values())

    def solve(*_):
        raise AssertionError("the heuristic was asked")

    monkeypatch.setattr(jdelta.Knapsack, "solve", solve)
    assert turnings(loaded(original, tmp_path)) == explained


def test_a_solver_that_no_file_can_hold_is_named(tmp_path, plan):
    original = dataclasses.replace(
        asking(plan, solver=repr(KeepsNothing())), _solver=KeepsNothing()
    )
    assert not any(turnings(original).values())
    assert "So says" not in str(original.explain("*"))
    read = loaded(original, tmp_path)
    assert read == original
    assert read.solver is None
    assert turnings(read) == turnings(plan)
    for explanation in read.explain("*"):
        says = "So says knapsack: no file can hold the plan's KeepsNothing(because='it is simple')."
        assert says in " ".join(str(explanation).split())


def test_the_host_has_the_room_that_was_asked_for(tmp_path):
    shapes = small.make_args(1 << 16)
    original = jdelta.plan(small.step, 0.6, *shapes, donate_argnums=0, per_layer=False)
    room, none = (asking(original, target="tpu:v5e:2x2", host_budget=h) for h in (None, 0))
    assert turnings(none) != turnings(room)
    assert turnings(loaded(none, tmp_path)) == turnings(none)


def test_what_was_pinned_to_the_host_is_explained_where_jaxlib_refuses_that(monkeypatch):
    shapes = small.make_args(1 << 16)
    original = jdelta.plan(small.step, "1GiB", *shapes, donate_argnums=0, pin={"*": "recompute"})
    answer = dataclasses.replace(original.answer, pinned=(("region/mlpwi", Decision.OFFLOAD),))
    refused = "as an older jaxlib"
    monkeypatch.setattr("jdelta._src.backends.target._offload_refusal", lambda _: refused)
    plan = dataclasses.replace(asking(original, target="cuda:h100:1x1x8"), answer=answer)
    (explanation,) = plan.explain("region/mlpwi")
    assert explanation.pinned
    assert explanation.refusal == refused


# --- A step that does not fit -------------------------------------------------------------------


def test_oom_lists_what_is_alive_at_the_peak():
    args = small.make_args(1 << 20)
    oom = jdelta.explain_oom(small.step, *args, target="cpu")
    sizes = [alive.bytes for alive in oom.alive]
    assert sizes == sorted(sizes, reverse=True)
    assert oom.needed * 0.5 <= sum(sizes) <= oom.needed * 1.5
    argument_bytes = sum(alive.bytes for alive in oom.alive if alive.what == "argument")
    assert argument_bytes == sum(x.size * 4 for x in jax.tree.leaves(args))
    assert any(alive.name == "region/sin" for alive in oom.alive)


def test_what_an_operation_takes_for_itself_is_named():
    """But for a TPU's, compilers copy the rows of a ragged product for each of its groups."""
    rows, width, groups = 256, 64, 8

    def step(ws, x):
        sizes = jnp.full(groups, rows // groups)
        return jax.grad(lambda ws: jnp.sum(jnp.tanh(jax.lax.ragged_dot(x, ws, sizes))))(ws)

    args = jnp.ones((groups, width, width)), jnp.ones((rows, width))
    oom = jdelta.explain_oom(step, *args, target="cpu")
    own = [alive for alive in oom.alive if alive.shape == "workspace"]
    assert [(alive.name, alive.bytes) for alive in own] == [
        ("ragged_dot_general", 2 * groups * rows * width * 4)
    ]
    says = r"1.00 MiB that ragged_dot_general at test_explain.py:\d+ takes for itself, "
    with pytest.raises(jdelta.BudgetError, match=says):
        jdelta.plan(step, "200KiB", *args)


def test_oom_says_what_would_help():
    args = small.make_args(512)
    undonated = jdelta.explain_oom(small.step, *args, target="cpu")
    assert any("donate_argnums" in remedy for remedy in undonated.remedies)
    donated = jdelta.explain_oom(small.step, *args, target="cpu", donate_argnums=0)
    assert not any("donate_argnums" in remedy for remedy in donated.remedies)


def test_oom_where_no_plan_fits(monkeypatch):
    monkeypatch.setattr("jdelta._src.backends.target._memory", lambda _: 8 << 20)
    oom = jdelta.explain_oom(small.step, *small.make_args(1 << 16), target="cpu")
    assert oom.plan is None
    assert oom.floor is not None
    assert oom.floor > oom.memory
    assert any("No plan fits" in remedy for remedy in oom.remedies)
    assert "does not fit" in str(oom)


def test_oom_of_a_share_goes_by_the_compiled_peak_of_the_plain_step():
    args = small.make_args(4096)
    with pytest.raises(jdelta.BudgetError) as refused:
        jdelta.plan(small.step, 0.05, *args)
    oom = jdelta.explain_oom(small.step, *args, budget=0.05)
    assert not oom.estimated
    assert (oom.needed, oom.floor) == (refused.value.ceiling, refused.value.floor)
    assert oom.budget == refused.value.budget == pytest.approx(0.05 * oom.needed, abs=1)
    assert "(predicted)" not in str(oom).partition("\n\n")[0]


def test_oom_where_a_plan_fits(monkeypatch):
    monkeypatch.setattr("jdelta._src.backends.target._memory", lambda _: 56 << 20)
    oom = jdelta.explain_oom(small.step, *small.make_args(4096), target="cpu")
    assert oom.needed > oom.memory
    assert oom.plan is not None
    assert oom.plan.compiled_peak <= oom.memory
    assert any("jdelta.jit" in remedy for remedy in oom.remedies)


def test_nothing_is_logged_unless_asked(caplog, capfd):
    jdelta.plan(small.step, 0.5, *small.make_args(512))
    assert capfd.readouterr().err == ""
    with caplog.at_level("INFO", logger="jdelta"):
        jdelta.plan(small.step, 0.6, *small.make_args(512))
    assert any(message.startswith("compile ") for message in caplog.messages)


def test_a_step_with_no_named_values_is_explained():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    assert jdelta.explain_oom(step, shape, shape).alive
