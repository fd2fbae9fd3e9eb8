"""The search for a plan, with a stand-in for the compiler that deviates from the simulation."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jdelta
from jdelta._src.regions.region import Grouping
from jdelta._src.search.summary import NEXT_IS_TOO_LARGE
from tests.compilers import needs_cuda
from tests.programs import PROGRAMS, unmarked
from tests.sines import layer, unrolled
from tests.stand_in import (
    EXACT,
    in_place_of_the_compiler,
    lowering_to_itself,
    saying_what_is_predicted,
)

LAYERS, ROWS, WIDTH = 28, 8192, 512
BUDGET = 500 << 20


step = unrolled(layer)


def more_below(part):
    """As for a U-Net on CUDA: what is tried after an error of 4 % is off by 7."""
    return 0.04 if part > 0.77 else 0.075


DEVIATIONS = {
    "none": lambda part: 0.0,
    "more": lambda part: 0.05,
    "less": lambda part: -0.05,
    "more below": more_below,
}
"""Part of the plain step's peak that a plan takes beyond the simulation, by the simulated part."""


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_the_budget_is_used_however_far_off_the_simulation_is(deviation, monkeypatch):
    uses_the_budget(DEVIATIONS[deviation], 0.8, "tpu:v5e:2x2", monkeypatch)


@pytest.mark.parametrize("share", [0.7, 0.8, 0.9])
def test_the_budget_is_used_on_cpus_too(share, monkeypatch):
    """What is kept takes a quarter more than simulated there."""
    uses_the_budget(lambda part: 0.25 * part, share, "cpu", monkeypatch)


def uses_the_budget(deviation, share, target, monkeypatch):
    plain = []

    def measured(emission, *args, **options):
        peak = emission.simulated
        if emission.policy is None:
            plain.append(peak)
        else:
            peak += int(deviation(peak / plain[0]) * plain[0])
        return None, dataclasses.replace(EXACT, peak=peak)

    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", measured)
    monkeypatch.setattr("jdelta._src.search.rules.WORTH_COMPILING", 0.0)  # however little it saves
    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(LAYERS)]
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    plan = jdelta.plan(step, share, ws, x, target=target)
    assert 0.93 * plan.budget <= plan.compiled_peak <= plan.budget
    assert plan.floor <= plan.compiled_peak
    assert plan.estimates in ((), ("floor",))  # compiled, or each program is foretold
    assert plan.compiles <= 5  # the plain step and the floor too


def test_a_step_whose_programs_are_long_is_compiled_a_few_times_only(monkeypatch):
    """The compiler of a TPU takes a minute for some steps of few operations, by their code."""

    def compiles(code):
        plain = []

        def measured(emission, *args, **options):
            peak = emission.simulated
            plain.append(peak)
            peak += 0.4 * plain[0] * (emission.policy is not None and peak > 0.6 * plain[0])
            return None, dataclasses.replace(EXACT, peak=int(peak), code=code)

        monkeypatch.setattr("jdelta._src.search.history.measure", measured)
        ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(12)]
        x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
        return jdelta.plan(step, 0.8, ws, x, target="tpu:v5e").compiles

    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    assert compiles(16 << 20) + 3 <= compiles(0)


def test_the_floor_of_a_large_step_for_a_tpu_is_predicted(monkeypatch):
    """To compile it takes minutes, as long as the plan itself."""
    in_place_of_the_compiler(monkeypatch)
    monkeypatch.setattr("jdelta._src.search.search.SMALL", 0)
    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(LAYERS)]
    x = jax.ShapeDtypeStruct((16 * ROWS, WIDTH), jnp.float32)
    plan = jdelta.plan(step, "10GiB", ws, x, target="tpu:v5e:2x2")
    assert plan.floor > 1 << 30
    assert plan.estimates == ("floor",)
    assert plan.compiles == 2  # the plain step, which may fit, and the plan


@pytest.mark.parametrize("budget", [0.5, "200MiB"])
def test_where_recompute_is_undone_nothing_else_is_compiled(budget, monkeypatch):
    """As XLA does on CPUs before jax 0.12: a plan takes nearly what the plain step does."""
    peaks = []

    def measured(emission, *args, **options):
        plain = emission.policy is None
        peaks.append(emission.simulated)
        peak = 500 << 20 if plain else 490 << 20
        return None, dataclasses.replace(EXACT, peak=peak, undone=() if plain else ("layer_1/sin",))

    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", measured)
    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(LAYERS)]
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    with pytest.raises(jdelta.BudgetError, match=r"needs 490\.0 MiB"):
        jdelta.plan(step, budget, ws, x, target="cpu")
    assert len(peaks) == 2  # the plain step and a plan


def shapes(layers=LAYERS):
    ws = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(layers)]
    return ws, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def test_near_the_floor_a_plan_that_keeps_some_is_tried(monkeypatch):
    """A compiler may take more for everything recomputed than where some is kept."""
    least = []

    def measured(emission, *args, **options):
        peak = emission.simulated
        least.append(peak)  # the floor is compiled first
        return None, dataclasses.replace(EXACT, peak=int(1.25 * peak) if peak == least[0] else peak)

    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", measured)
    with pytest.raises(jdelta.BudgetError) as refused:
        jdelta.plan(step, "1MiB", *shapes(), target="cpu", per_layer=False)
    floor = refused.value.floor
    assert floor == int(1.25 * least[0])
    plan = jdelta.plan(step, int(0.9 * floor), *shapes(), target="cpu", per_layer=False)
    assert plan.compiled_peak <= plan.budget < floor


def test_a_budget_that_arguments_alone_exceed_is_refused_at_once(monkeypatch):
    fixed = 400 << 20
    compiled = []

    def measured(emission, *args, **options):
        compiled.append(emission.policy)
        peak = fixed + (20 << 20)
        return None, dataclasses.replace(EXACT, peak=peak, arguments=fixed, outputs=0)

    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", measured)
    with pytest.raises(jdelta.BudgetError, match=r"results alone take 400\.0 MiB: no plan fits"):
        jdelta.plan(step, fixed - 1, *shapes(), target="tpu:v5e:2x2")
    assert len(compiled) == 2  # to say the floor, and the plain step
    assert None in compiled


@jdelta.remat
def normed(w, x):
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x + jnp.tanh(x * scale @ w)


def normed_step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(normed(w, normed(w, x)) ** 2))(w)


def test_the_floor_says_what_pins_keep(monkeypatch):
    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", saying_what_is_predicted)
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, WIDTH), (ROWS, WIDTH)))
    for pin, said in (({}, "recomputed the step"), ({"*rsqrt*": "save"}, "recomputed but [0-9]")):
        with pytest.raises(jdelta.BudgetError, match=f"every residual {said}"):
            jdelta.plan(normed_step, 1 << 20, w, x, target="tpu:v5e:2x2", host_budget=0, pin=pin)


def test_the_plain_step_is_the_plan_if_it_turns_out_to_fit(monkeypatch):
    """In a TPU's on-chip memory all plans of a small step take the same, far below what is said."""
    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    exact = dataclasses.replace(EXACT, peak=20 << 20)
    monkeypatch.setattr("jdelta._src.search.history.measure", lambda *_, **__: (None, exact))
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, WIDTH), (ROWS, WIDTH)))
    plan = jdelta.plan(normed_step, "21MiB", w, x, target="tpu:v5e:2x2")
    assert plan.overhead == 0.0
    pinned = jdelta.plan(normed_step, "21MiB", w, x, target="tpu:v5e:2x2", pin={"*": "recompute"})
    assert pinned.overhead > 0.0


def scanned(ws, x):
    def loss(ws):
        return jnp.mean(jax.lax.scan(lambda y, w: (normed(w, y), None), x, ws)[0] ** 2)

    return ws - 0.1 * jax.grad(loss)(ws)


STACKED = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((12, WIDTH, WIDTH), (ROWS, WIDTH)))


def test_a_search_that_goes_on_compiles_nothing_again(monkeypatch):
    """With layers alike it stops early, to see whether they are better decided apart."""
    compiled = []

    def measured(emission, *args, **options):
        compiled.append(emission.policy)
        return None, dataclasses.replace(EXACT, peak=emission.simulated)

    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", measured)
    monkeypatch.setattr("jdelta._src.search.search.Search.better_grouping", lambda *_: None)
    floor = jdelta.plan(scanned, None, *STACKED, target="tpu:v5e:2x2", pin={"*": "recompute"})
    compiled.clear()
    budget = int(1.08 * floor.compiled_peak)
    plan = jdelta.plan(scanned, budget, *STACKED, target="tpu:v5e:2x2", host_budget=0)
    assert plan.compiled_peak < 0.97 * budget
    assert plan.compiles == len(compiled) == len(set(compiled))


def test_a_prediction_is_what_was_said_before_compiling(monkeypatch):
    """However often the search comes by the plan again, with its error known by then."""
    compiled = []

    def measured(emission, *args, **options):
        compiled.append(emission.policy)
        return None, dataclasses.replace(EXACT, peak=int(1.005 * emission.simulated))

    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", measured)
    monkeypatch.setattr("jdelta._src.search.candidate.GOOD_USE", 2.0)  # so that it goes on
    monkeypatch.setattr("jdelta._src.search.search.Search.better_grouping", lambda *_: None)
    plan = jdelta.plan(scanned, BUDGET, *STACKED, target="tpu:v5e:2x2", host_budget=0)
    assert compiled[0] == plan.policy
    assert len(compiled) == 2  # and the floor
    assert plan.predicted_peak == pytest.approx(plan.compiled_peak / 1.005, rel=1e-4)


def test_layers_decided_apart_in_vain_are_counted(monkeypatch):
    compiled, apart = [], []

    def measured(emission, *args, **options):
        compiled.append(emission.policy)
        peak = emission.simulated if not apart else 2 * BUDGET
        return None, dataclasses.replace(EXACT, peak=peak)

    def grouping(*_):
        apart.append(len(compiled))
        return Grouping(2)

    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", measured)
    monkeypatch.setattr("jdelta._src.search.search.Search.better_grouping", grouping)
    plan = jdelta.plan(scanned, BUDGET, *STACKED, target="tpu:v5e:2x2", host_budget=0)
    assert apart[0] < len(compiled) == plan.compiles
    assert plan.compiled_peak <= BUDGET


def test_what_is_left_after_a_miss_is_used_with_layers_alike(monkeypatch):
    """As for Llama 3 8B on a v6e: after a plan that takes 20 % too much, the next ones are safe."""
    peaks = []

    def measured(emission, *args, **options):
        peaks.append(int((1.0 if peaks else 1.2) * emission.simulated))
        return None, dataclasses.replace(EXACT, peak=peaks[-1])

    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", measured)
    plan = jdelta.plan(scanned, BUDGET, *STACKED, target="tpu:v5e:2x2", host_budget=0)
    assert plan.grouping.layers == 1
    assert max(p for p in peaks[1:] if p <= BUDGET) == peaks[-1] == plan.compiled_peak
    assert plan.floor == min(peaks)
    assert plan.compiles == len(peaks) <= 6


@pytest.mark.parametrize(
    ("target", "share"),
    [pytest.param("cuda:h100", 0.9, marks=needs_cuda), ("tpu:v5e:2x2", 0.95)],
)
def test_what_takes_longer_to_keep_than_to_compute_is_not_kept(monkeypatch, target, share):
    """Narrow layers in a loop: some of the budget is left, and nothing is slower for it."""
    monkeypatch.setattr("jdelta._src.search.propose.emit", lowering_to_itself)
    monkeypatch.setattr("jdelta._src.search.history.measure", saying_what_is_predicted)
    options = {"target": target, "host_budget": 0, "history": jdelta.History()}
    plan = jdelta.plan(scanned, 0.9, *STACKED, **options)
    assert plan.compiled_peak < share * plan.budget
    assert plan.overhead == 0.0
    left = "Some of the budget is left: the plan is predicted to be quicker than the plain step"
    assert left in plan.result
    assert "saving takes" in str(plan)
    least = jdelta.plan(scanned, plan.compiled_peak, *STACKED, **options)
    assert least.decisions == plan.decisions


def blocks_of_scans(ws, x):
    """Four stacks of layers, each in a loop of its own."""

    def layer(y, w):
        return y + jnp.tanh(jax.nn.gelu(y @ w[0]) @ w[1]), None

    def loss(ws):
        y = x
        for w in ws:
            y, _ = jax.lax.scan(layer, y, w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(ws)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def sharpness_aware():
    program = PROGRAMS["autodiff.sharpness_aware"]
    return program.make(program.large, unmarked)


def four_blocks():
    shapes = (6, 512, 2048), (6, 2048, 512)
    weights = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)] * 4
    return blocks_of_scans, (weights, jax.ShapeDtypeStruct((4096, 512), jnp.float32))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("make", "share", "target"),
    [  # the first takes minutes to compile for a TPU
        pytest.param(sharpness_aware, 0.8, "cuda:h100", marks=needs_cuda),
        pytest.param(four_blocks, 0.6, "cuda:h100", marks=needs_cuda),
        (four_blocks, 0.6, "tpu:v5e:2x2"),
    ],
)
def test_a_plan_that_adds_time_uses_its_budget(make, share, target):
    """Or says what did not fit: they left 60 % to 80 % of it at a price of 36 to 40 %."""
    step, args = make()
    plan = jdelta.plan(step, share, *args, target=target)
    uses = plan.compiled_peak >= 0.85 * plan.budget
    assert uses or plan.overhead <= 1e-3 * plan.step_seconds or NEXT_IS_TOO_LARGE in plan.result
    assert plan.host_bytes == 0
