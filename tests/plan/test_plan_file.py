"""Plans as files: their schema, the same decisions elsewhere without solving, what is refused."""

import copy
import dataclasses
import json
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jsonschema import Draft202012Validator

import jdelta
from jdelta import Decision, PlanMismatchError, SpillError, TargetError
from jdelta._src.backends.chips import Chip
from jdelta._src.backends.target import resolve
from jdelta._src.plan.call import call_of, described
from jdelta._src.plan.file import VERSION
from jdelta._src.plan.planned_step import recompiled
from jdelta._src.plan.user_step import jitted
from jdelta._src.versions import versions
from tests import small
from tests.api.test_plan import arguments, layer, make_step, step
from tests.compilers import TARGETS
from tests.parallel import PARALLEL
from tests.passes.test_updates import GAINS
from tests.passes.test_updates import make as make_adam
from tests.planning import asking
from tests.spilling import Device

SCHEMA = json.loads(
    resources.files("jdelta._src.plan").joinpath("plan.schema.json").read_text("utf-8")
)
VALIDATOR = Draft202012Validator(SCHEMA)


def same(got, expected):
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def automatic(_):
    return jdelta.plan(small.step, 0.5, *small.make_args(), donate_argnums=0)


def nothing_planned(_):
    return jdelta.plan(small.step, 1.0, *small.make_args())


def recompute(_):
    return jdelta.plan(step, 0.5, *arguments(), donate_argnums=0)


def spill(folder):
    where = jdelta.Spill(str(folder), pool="1MiB", least="1KiB", adapter="memory")
    pin = {"*": "recompute", "*/mlpwi": "spill"}  # else nothing may read it
    return jdelta.plan(small.step, 1.0, *small.make_args(), spill=where, pin=pin)


def sharded(_):
    parallel = PARALLEL["tensor"]
    return jdelta.plan(parallel.step(jdelta.remat), 0.8, *parallel.shapes(parallel.local_mesh()))


def updates_moved(_):
    train, state, data = make_adam(optax.adam(1e-2))
    plan = jdelta.plan(train, None, state, data, donate_argnums=0, reorder=True)
    assert (plan.updates_moved > 0) == GAINS
    return plan


def static(_):
    def scaled(scale, w, x):
        return small.step(w, scale * x)

    return jdelta.plan(scaled, 0.7, 2.0, *small.make_args(), static_argnums=0)


def asked_much(_):
    pin = {"*/mlpwi": "recompute", "*/cos": Decision.SAVE}
    bounds = {"host_budget": "1GiB", "per_layer": False, "reorder": True}
    shapes = small.make_args()
    return jdelta.plan(small.step, 0.8, *shapes, donate_argnums=0, solver="milp", pin=pin, **bounds)


KINDS = [automatic, nothing_planned, recompute, spill, sharded, updates_moved, static, asked_much]


@pytest.fixture(scope="module")
def half():
    return recompute(None)


@pytest.fixture
def path(half, tmp_path):
    half.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


# --- The schema -------------------------------------------------------------------------------


def test_the_schema_is_one_and_of_this_version():
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["jdelta_plan"]["const"] == VERSION
    assert SCHEMA["$id"] == f"urn:jdelta:plan:{VERSION}"


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_every_kind_of_plan_is_of_the_schema_and_comes_back(make, tmp_path):
    plan = make(tmp_path)
    plan.save(tmp_path / "plan.json")
    VALIDATOR.validate(json.loads((tmp_path / "plan.json").read_text()))
    loaded = jdelta.load(tmp_path / "plan.json")
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert dataclasses.asdict(loaded.question) == dataclasses.asdict(plan.question)
    assert loaded.answer.pinned == plan.answer.pinned
    assert loaded.decisions == plan.decisions
    assert str(loaded) == str(plan)


def test_the_question_comes_back(tmp_path):
    asked_much(None).save(tmp_path / "plan.json")
    question = jdelta.load(tmp_path / "plan.json").question
    assert (question.solver, question.host_budget) == ("milp", 1 << 30)
    assert question.pins == (("*/mlpwi", Decision.RECOMPUTE), ("*/cos", Decision.SAVE))
    assert (question.per_layer, question.reorder) == (False, True)


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_that_offloads_is_of_the_schema(target, tmp_path):
    if refusal := resolve(target).offload_refusal:
        pytest.skip(refusal)
    shapes = small.make_args(8192)
    pin = {"*": "recompute", "*/mlpwi": "offload"}
    plan = jdelta.plan(small.step, "1GiB", *shapes, target=target, pin=pin)
    assert plan.overlap.transfers
    plan.save(tmp_path / "plan.json")
    VALIDATOR.validate(json.loads((tmp_path / "plan.json").read_text()))
    assert jdelta.load(tmp_path / "plan.json") == plan


def wrong(record, *where, value):
    """The record with another value somewhere, or without one."""
    changed = copy.deepcopy(record)
    inner = changed
    for part in where[:-1]:
        inner = inner[part]
    if value is None:
        del inner[where[-1]]
    else:
        inner[where[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (["jdelta_plan"], VERSION - 1),
        (["question", "budget"], "14GiB"),
        (["question", "budget"], None),
        (["question", "pins"], [["layer/tanh", "melt"]]),
        (["question", "host_budget"], "4GiB"),
        (["question"], None),
        (["figures", "compiled_peak"], -1),
        (["question", "target"], "abacus"),
        (["search", "estimates"], ["budget"]),
        (["program", "arguments", 0], "float32[3]"),
        (["program", "fingerprint"], "short"),
        (["program", "versions", 1], None),
        (["answer", "policy", "saved"], "all"),
        (["answer", "policy", "melted"], []),
        (["answer", "residuals", 0, "shape"], ["wide"]),
        (["answer", "residuals", 0, "name"], None),
        (["answer", "grouping", "layers"], 0),
        (["answer", "aliases", 0], ["one"]),
        (["of_my_own"], 1),
        (["figures", "of_my_own"], 1),
    ],
)
def test_the_schema_refuses_what_is_wrong(path, where, value):
    record = json.loads(path.read_text())
    assert VALIDATOR.is_valid(record)
    assert not VALIDATOR.is_valid(wrong(record, *where, value=value))


def test_an_adapter_that_is_an_object_cannot_be_saved(half, tmp_path):
    plan = asking(half, spill=jdelta.Spill(str(tmp_path), adapter=Device()))
    with pytest.raises(SpillError, match="name their adapter"):
        plan.save(tmp_path / "plan.json")


# --- Loading ----------------------------------------------------------------------------------


def test_a_loaded_plan_runs_without_solving(half, path, monkeypatch):
    def solve(*_):
        raise AssertionError("a loaded plan was solved")

    for solver in (jdelta.Knapsack, jdelta.Milp):
        monkeypatch.setattr(solver, "solve", solve)
    with pytest.raises(jdelta.TraceError, match="was solved"):
        recompute(None)
    loaded = jdelta.load(path)
    run = loaded.jit(step)
    assert run(*arguments())[1] == half.jit()(*arguments())[1]
    assert run.plan.decisions == half.decisions
    assert recompiled(loaded, step, arguments()).peak == half.compiled_peak


def test_a_loaded_plan_is_a_policy_and_has_no_step(half, path):
    loaded = jdelta.load(path)
    by_policy = jax.jit(make_step(jdelta.remat(layer.__wrapped__, policy=loaded, name="layer")))
    expected = half.jit()(*arguments())[1]
    np.testing.assert_allclose(by_policy(*arguments())[1], expected, rtol=1e-6)
    with pytest.raises(PlanMismatchError, match=r"call plan\.jit\(step_fn\)"):
        loaded.jit()
    with pytest.raises(PlanMismatchError, match=r"no compiled step"):
        _ = loaded.compiled


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[: len(text) // 2], "damaged or no plan"),
        (lambda text: "[1, 2]", f"expected a jdelta plan of version {VERSION}, got version None"),
        (
            lambda text: text.replace(f'"jdelta_plan": {VERSION}', f'"jdelta_plan": {VERSION - 1}'),
            rf"got version {VERSION - 1}\. Plan again with this version",
        ),
        (lambda text: json.dumps({"jdelta_plan": VERSION}), "damaged at the plan: expected the"),
    ],
)
def test_damaged_files_are_refused(path, damage, says):
    path.write_text(damage(path.read_text()))
    with pytest.raises(PlanMismatchError, match=says):
        jdelta.load(path)


PLACE = {"path": "/tmp", "limit": None, "pool": "256MiB", "adapter": "disk", "checksum": True}
PLACE |= {"write_rate": None, "read_rate": None, "least": "1MiB", "timeout": 40.0}


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (["answer", "residuals"], [{"name": 1}], r"answer\.residuals\[0\]: expected the fields"),
        (["answer", "residuals", 0, "bytes"], 1.5, r"answer\.residuals\[0\]\.bytes: expected int"),
        (["answer", "policy", "saved"], "all", r"answer\.policy\.saved: expected a list"),
        (["answer", "policy", "least"], 1, r"answer\.policy\.least: expected bool"),
        (["answer", "aliases"], [["one"]], r"answer\.aliases\[0\]: expected a list of 2"),
        (["question", "budget"], "a lot", r"question\.budget: expected int, got 'a lot'"),
        (["question", "budget"], True, r"question\.budget: expected int, got True"),
        (["question", "pins"], [["h/*", "melt"]], r"question\.pins\[0\]\[1\]: expected Decision"),
        (["question", "reorder"], None, r"question: expected the fields budget, target"),
        (["question", "spill"], {"path": 3}, r"question\.spill: expected the fields path"),
        (["question", "spill"], {**PLACE, "path": 3}, r"question\.spill\.path: expected str"),
        (["question", "spill"], {**PLACE, "timeout": -1.0}, "timeout: expected a number above"),
        (["question", "spill"], {**PLACE, "adapter": 3}, r"spill\.adapter: expected str or Adapt"),
        (["program", "versions"], ["jax"], r"program\.versions\[0\]: expected a list of 2"),
        (["figures", "overhead"], "none", r"figures\.overhead: expected float"),
        (["search", "estimates"], {}, r"search\.estimates: expected a list"),
    ],
)
def test_a_damaged_field_is_named(path, where, value, says):
    path.write_text(json.dumps(wrong(json.loads(path.read_text()), *where, value=value)))
    with pytest.raises(PlanMismatchError, match=f"damaged at .*{says}"):
        jdelta.load(path)


# --- What a plan is for -----------------------------------------------------------------------


def test_other_shapes_are_refused_by_name(path):
    says = r"x: expected float32\[2048,16\], came float32\[64,16\]"
    with pytest.raises(PlanMismatchError, match=says):
        jdelta.load(path).jit(step)(*arguments(rows=64))


def aged(path, **old):
    """The plan in a file as if it had been made with other versions."""
    record = json.loads(path.read_text())
    versions = record["program"]["versions"]
    record["program"]["versions"] = [[name, old.get(name, version)] for name, version in versions]
    path.write_text(json.dumps(record))
    return jdelta.load(path)


def test_another_program_is_refused_with_the_versions_that_differ(path):
    other = make_step(jdelta.remat(lambda w, x: x @ w))
    with pytest.raises(PlanMismatchError, match=r"made for program.*jax and jaxlib are the same"):
        jdelta.load(path).jit(other)(*arguments())
    says = rf"made with jax 0\.9\.1 \(here {jax.__version__}\)\)"
    with pytest.raises(PlanMismatchError, match=says):
        aged(path, jax="0.9.1").jit(other)(*arguments())


def test_another_version_alone_is_no_reason_but_the_peak_is_checked(half, path):
    old = aged(path, jax="0.9.1")
    assert dict(old.versions) == {**dict(versions()), "jax": "0.9.1"}
    assert old.jit(step)(*arguments())[1] == half.jit()(*arguments())[1]
    tight = asking(old, budget=half.compiled_peak - 1)
    with pytest.raises(jdelta.BudgetError, match=r"and with jax 0\.9\.1 \(here"):
        tight.jit(step)(*arguments())


def test_other_shardings_are_refused_by_name(tmp_path):
    parallel = PARALLEL["data"]
    plan = jdelta.plan(parallel.step(jdelta.remat), 0.8, *parallel.arguments())
    plan.save(tmp_path / "plan.json")
    train, (ws, x) = parallel.step(jdelta.remat), parallel.arguments()
    loaded = jdelta.load(tmp_path / "plan.json")
    same(loaded.jit(train)(ws, x), jax.jit(train)(ws, x))
    replicated = jax.device_put(x, NamedSharding(x.sharding.mesh, P()))
    says = r"x: expected float32\[512,64\] P\(data\) over data=8, came .* P\(\) over data=8"
    with pytest.raises(PlanMismatchError, match=says):
        loaded.jit(train)(ws, replicated)
    alone = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), (ws, x))
    with pytest.raises(PlanMismatchError, match=r"over data=8, came float32\[512,64\]\."):
        loaded.jit(train)(*alone)


def test_a_sharding_is_described_alike_however_it_is_said():
    def line(shape, names, spec, kind=None):
        mesh = jax.make_mesh(shape, names, axis_types=(kind or auto,) * len(shape))
        sharding = NamedSharding(mesh, P(*spec))
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
        return described(call_of(jitted(lambda x: x), (x,), {}))

    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    rows = ("x: float32[8,8] P(data) over data=4",)
    assert line((4,), ("data",), ["data"]) == line((4,), ("data",), ["data", None]) == rows
    assert line((4, 1), ("data", "model"), [("data", "model"), "model"][:1]) == rows
    assert line((1,), ("data",), ["data"]) == ("x: float32[8,8]",)
    assert line((2, 4), ("a", "b"), [None, ("a", "b")]) == (
        "x: float32[8,8] P(None, (a, b)) over a=2, b=4",
    )
    assert line((4,), ("data",), [], explicit) == ("x: float32[8,8] P() over data=4 Explicit",)


def test_a_plan_made_ahead_of_time_runs_once_the_devices_are_there(half, path, monkeypatch):
    kind = jax.devices()[0].device_kind
    chip = Chip(kind, 2**34, resolve("cpu").rates, "1x1", "")
    ahead = asking(jdelta.load(path), target="cpu:here:1x1")
    other = dataclasses.replace(chip, kind="another")
    monkeypatch.setattr("jdelta._src.backends.target.CHIPS", {"cpu": {"here": other}})
    with pytest.raises(TargetError, match="cpu:here:1x1, which is not attached"):
        ahead.jit(step)
    monkeypatch.setattr("jdelta._src.backends.target.CHIPS", {"cpu": {"here": chip}})
    assert ahead.jit(step)(*arguments())[1] == half.jit()(*arguments())[1]
    assert Decision.RECOMPUTE in ahead.decisions.values()
