"""Plans that spill: what is spilled and what it is worth, equal steps, exact bytes."""

import dataclasses
import errno
import functools
import math
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jdelta
from benchmarks.device import rok
from benchmarks.models import identity
from jdelta import Decision, SpillError
from jdelta._src import _jax
from jdelta._src.backends.platforms import backend_of
from jdelta._src.backends.target import resolve
from jdelta._src.passes import spill as spill_pass
from jdelta._src.passes.program import Context, Program
from jdelta._src.passes.timed_transfers import timed
from jdelta._src.plan.spill_watch import Drift
from jdelta._src.program.hlo_names import RECOMPUTE
from jdelta._src.program.names import RegionName
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.file_link import Scope, hidden_scopes, to_files
from jdelta._src.residuals.items import items_of
from jdelta._src.residuals.pins import NO_PINS, Pins
from jdelta._src.residuals.region_inputs import with_region_inputs
from jdelta._src.sizes import format_bytes
from jdelta._src.spill import SpillRates, rates_of, write
from tests.crossed import crossed
from tests.frameworks import FORMS, LAYERS, STEPS
from tests.parallel import PARALLEL
from tests.planning import decided, under
from tests.spilling import MIB, Device, check, flow, network, open_store, usage
from tests.trainers import MICRO, TRAINERS
from tests.trainers import STEPS as MANY
from tests.versions import READ_OF_TANH

RATES = SpillRates(2e9, 2e9)
DROP = {"block/_where/select_n": "recompute"}


@pytest.fixture
def spill(tmp_path, monkeypatch):
    """Quick and the same for all: what a plan spills is then no matter of the machine."""
    monkeypatch.setattr("jdelta._src.api.planning.rates_of", lambda _: SpillRates(1e11, 1e11))
    return jdelta.Spill(str(tmp_path), pool="1MiB", least="1KiB", adapter="memory")


def analysed(step, args):
    target = resolve("cpu")
    return with_region_inputs(trace(step, *args), target), target


# --- What may be spilled, and what is hidden -------------------------------------------------


def rule(scopes, bandwidth):
    """TBA's rule, word by word, for every scope."""
    forward = sum(s.seconds for s in scopes)
    for n, scope in enumerate(scopes):
        volume = sum(s.bytes for s in scopes[:n]) + 2 * scope.bytes
        left = 3 * forward - 2 * sum(s.seconds for s in scopes[:n])
        if volume / left > bandwidth:
            return n
    return len(scopes)


@pytest.mark.parametrize("bandwidth", [0.1e9, 0.5e9, 1e9, 2e9, 4e9, 9e9])
def test_hidden_scopes_are_those_of_the_paper(bandwidth):
    even = [Scope(f"{i}", 64e6, 0.02) for i in range(24)]
    uneven = [Scope(f"{i}", 1e6 * (i % 7) ** 2, 0.005 * (1 + i % 3)) for i in range(24)]
    for scopes in (even, uneven):
        assert hidden_scopes(scopes, bandwidth, math.inf) == rule(scopes, bandwidth)


def test_hidden_scopes_by_hand():
    scopes = [Scope(f"{i}", 100.0, 1.0) for i in range(4)]
    # 100 n + 200 bytes within 12 - 2 n seconds: 200 / 12, 300 / 10, 400 / 8, 500 / 6.
    counts = [hidden_scopes(scopes, rate, math.inf) for rate in (16, 17, 29, 31, 49, 51, 83, 84)]
    assert counts == [0, 1, 1, 2, 2, 3, 3, 4]


def test_hidden_scopes_leave_room_in_the_pool():
    scopes = [Scope(f"{i}", 100.0, 1.0) for i in range(4)]
    # At 84 bytes a second 16 are left of each scope, and the pool has to hold a whole one.
    assert [hidden_scopes(scopes, 84, pool) for pool in (99, 100)] == [0, 4]
    # At 51 bytes a second 49, 98 and 147 are left of the three that the rule allows.
    counts = [hidden_scopes(scopes, 51, pool) for pool in (99, 100, 146, 147, 1000)]
    assert counts == [0, 2, 2, 3, 3]


def test_what_is_not_spilled(tmp_path):
    step, args = network(scan=False)
    priced, target = analysed(step, args)
    size = {r.name: r.bytes for r in priced}["block_0/tanh"]
    link = to_files(jdelta.Spill(str(tmp_path), least=size), RATES, priced, target)
    refusals = {r.name: link.refusal(r) for r in priced}
    assert refusals["block_0/tanh"] is None
    assert refusals["block_0/_bernoulli/lt"] == "too small to be worth a file"
    last = {name for name, why in refusals.items() if "last region" in (why or "")}
    assert last == {r.name for r in priced if r.region == f"block_{LAYERS - 1}" and r.bytes >= size}
    weights = {tuple(w.shape[1:]) for w in args[0]}
    assert not [r for r in priced if r.shape in weights]  # no residuals, so never spilled
    one = next(r for r in priced if r.name == "block_0/tanh")
    odd = [dataclasses.replace(one, dtype=dtype) for dtype in ("int4", "key<fry>")]
    assert all("whole bytes" in link.refusal(r) for r in odd)
    into = dataclasses.replace(one, entering=f"block_{LAYERS - 1}/input", region_input=True)
    assert "last region" in link.refusal(into)
    branch = dataclasses.replace(one, conditional=True)
    assert "cond" in link.refusal(branch)


@pytest.mark.parametrize("rate", [1e9, 2e9, 4e9])
def test_what_is_beyond_the_rule_costs_its_transfers(tmp_path, rate):
    step, args = network(scan=False)
    priced, target = analysed(step, args)
    slow = [dataclasses.replace(r, seconds=r.bytes / 8e9 if r.needed else 0.0) for r in priced]
    spill = jdelta.Spill(str(tmp_path), least=1024)
    link = to_files(spill, SpillRates(rate, rate), slow, target)
    regions = [f"block_{i}" for i in range(LAYERS)]
    open_ = [r.needed and link.refusal(r) is None for r in slow]
    scopes = [
        Scope(
            region,
            sum(r.bytes for r, may in zip(slow, open_, strict=True) if may and r.region == region),
            sum(r.seconds for r in slow if r.region == region),
        )
        for region in regions
    ]
    hidden = rule(scopes, rate)
    assert 0 < hidden < LAYERS - 1
    for r, may in zip(slow, open_, strict=True):
        if may:
            move = link.move(r)
            exposed = regions.index(r.region) >= hidden
            assert (move.seconds_out == 0.0) == exposed
            if exposed:
                assert move.seconds_exposed == pytest.approx(2 * r.bytes / rate)
    memory = link.memory(slow, link.room)
    assert memory.hidden_out >= sum(s.bytes for s in scopes[:hidden]) / rate


def test_items_may_go_to_files(tmp_path):
    step, args = network()
    priced, target = analysed(step, args)
    spill = jdelta.Spill(str(tmp_path), limit="5MiB", least=1024)
    files = to_files(spill, RATES, priced, target)
    items = items_of(priced, target, math.inf, NO_PINS, files)
    moves = {item.name: item.move(Decision.SPILL) for item in items.problem.items}
    tanh = next(r for r in priced if r.name == "block/tanh")
    assert moves["block/tanh"].seconds_out == tanh.bytes / RATES.write
    assert moves["block/tanh"].bytes == tanh.bytes
    assert [memory.capacity for memory in items.problem.memories] == [math.inf, 5 * 2**20]
    assert not any(item.move(Decision.OFFLOAD) for item in items.problem.items)
    assert items.leaving == {"block/input_2": Decision.SPILL}
    with pytest.raises(jdelta.BudgetError, match=r"puts .* in files, more than the"):
        items_of(priced, target, 0.0, Pins({"*dot*": "spill", "*tanh*": "spill"}), files)
    with pytest.raises(jdelta.PlanMismatchError, match="no directory is given with spill="):
        items_of(priced, target, 0.0, Pins({"block/tanh": "spill"}))


# --- Steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scan"),
    [
        pytest.param(*form, marks=() if form[1] or form[0] == "plain JAX" else pytest.mark.full)
        for form in FORMS
    ],
)
def test_frameworks(name, scan, spill):
    step, args = STEPS[name](1024, 32, scan=scan)
    priced, target = analysed(step, args)
    link = to_files(spill, RATES, priced, target)
    open_ = [r for r in priced if r.needed and not r.region_input and link.refusal(r) is None]
    names = [r.name for r in sorted(open_, key=lambda r: -r.bytes)[:3]]
    pin = {"*": "save", **dict.fromkeys(names, "spill")}  # nothing is left to search for
    plan = jdelta.plan(step, None, *args, spill=spill, pin=pin)
    check(plan.jit()(*args), jax.jit(step)(*args))
    assert plan.store.counters().planned == plan.spill_bytes > 0


@pytest.mark.parametrize(
    ("remat", "scan"),
    [
        pytest.param(jdelta.remat, True, id="marked-scanned"),
        pytest.param(identity, True, id="found-scanned"),
        pytest.param(jdelta.remat, False, id="marked-unrolled"),
        pytest.param(identity, False, id="found-unrolled", marks=pytest.mark.full),
    ],
)
def test_memory_is_freed(scan, remat, spill):
    step, args = network(scan=scan, remat=remat)
    plain, _ = network(scan=scan, remat=identity)
    plan = jdelta.plan(step, 0.55 if scan else 0.75, *args, spill=spill)
    planned = plan.jit()
    expected = jax.jit(plain)(*args)
    for _ in range(3):
        check(planned(*args), expected)
    assert plan.compiled_peak <= plan.budget < plan.ceiling
    assert Decision.SPILL in plan.decisions.values()
    assert flow(plan.store).planned == 3 * plan.spill_bytes


@pytest.mark.filterwarnings("ignore::jdelta.SpillDriftWarning")  # the rates are made up
def test_two_hundred_planned_steps_grow_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jdelta._src.api.planning.rates_of", lambda _: SpillRates(1e11, 1e11))
    step, args = network(512)
    spill = jdelta.Spill(str(tmp_path), pool="1MiB", least="1KiB")
    plan = jdelta.plan(step, 0.6, *args, spill=spill)
    planned = plan.jit()
    assert plan.spill_bytes > 0
    for _ in range(20):
        jax.block_until_ready(planned(*args))
    files, threads, memory = usage()
    for _ in range(200):
        result = jax.block_until_ready(planned(*args))
    check(result, jax.jit(step)(*args))
    later_files, later_threads, later_memory = usage()
    assert later_files <= files
    assert later_threads <= threads + 8  # threads that complete operations come and go
    assert later_memory < memory + 16 * MIB
    assert flow(plan.store).planned == 220 * plan.spill_written


def test_spilling_alone_frees_as_many_bytes(spill):
    step, args = network()
    kept = {"*": "save"}
    names = ["block/dot_general"]  # read by the backward pass of every version of JAX
    saved = jdelta.plan(
        step, None, *args, spill=spill, pin=kept | dict.fromkeys(names, "save") | DROP
    )
    spilled = jdelta.plan(
        step, None, *args, spill=spill, pin=kept | dict.fromkeys(names, "spill") | DROP
    )
    away = [r for r in spilled.residuals if spilled.decisions[r.name] is Decision.SPILL]
    assert [r.name for r in away] == names
    assert spilled.spill_bytes == sum(r.bytes for r in away)
    freed = saved.compiled_peak - (spilled.compiled_peak - spill.pool_bytes)
    assert freed >= spilled.spill_bytes - 2 * sum(r.bytes // r.count for r in away)


def test_region_inputs_are_spilled_below_the_floor(spill):
    step, args = network(4096, 64)
    floor = jdelta.plan(step, 1.0, *args, pin={"*": "recompute"}).floor
    budget = int(0.82 * floor)  # just below the floor some plans that keep some values fit
    with pytest.raises(jdelta.BudgetError):
        jdelta.plan(step, budget, *args)
    plan = jdelta.plan(step, budget, *args, spill=spill)
    assert plan.decisions["block/input_2"] is Decision.SPILL
    check(plan.jit()(*args), jax.jit(step)(*args))
    with pytest.raises(jdelta.BudgetError, match=r"residual recomputed or in files \(\d") as least:
        jdelta.plan(step, 2048, *args, spill=spill)
    assert least.value.floor <= budget


def test_where_recompute_needs_more_than_simulated_files_are_tried(spill):
    """XLA for CPUs needs half more than the simulated peak to recompute these layers."""
    small = {"width": 64, "hidden": 256, "heads": 2, "vocab": 128, "length": 192}
    case, plain = (rok.case("gpt", 4, remat, **small) for remat in (jdelta.remat, identity))
    floor = jdelta.plan(case.step, None, case.state, case.batch, pin={"*": "recompute"})
    assert floor.compiled_peak > 1.3 * floor.predicted_peak
    budget = int(1.02 * floor.compiled_peak)
    plan = jdelta.plan(case.step, budget, case.state, case.batch, spill=spill)
    assert plan.compiled_peak <= budget
    assert plan.overhead < floor.overhead / 10
    args = case.init(0)
    check(plan.jit()(*args), jax.jit(plain.step)(*args))
    assert flow(plan.store).planned == plan.spill_written > 0


def test_without_its_directory_nothing_is_spilled(tmp_path):
    step, args = network()
    plan = jdelta.plan(step, 0.6, *args)
    assert (plan.spill, plan.spill_rates, plan.spill_bytes, plan.store) == (None, None, 0, None)
    assert "in files" not in str(plan)
    everything = jdelta.plan(step, 1.0, *args, spill=str(tmp_path))
    assert (everything.policy, everything.spill_bytes) == (None, 0)


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param(jdelta.remat, id="marked"),
        pytest.param(identity, id="found", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("habit", TRAINERS)
def test_what_trainers_do(habit, remat, spill):
    step, args = TRAINERS[habit](1024, 64, remat)
    plain, _ = TRAINERS[habit](1024, 64, identity)
    pin = {"*": "save", f"*{READ_OF_TANH[0]}*": "spill"}
    plan = jdelta.plan(step, None, *args, spill=spill, pin=pin)
    planned = plan.jit()
    state, expected = args[0], args[0]
    plain_step = jax.jit(plain)
    for _ in range(2):
        state, got = planned(state, args[1])
        expected, aux = plain_step(expected, args[1])
        check((state, got), (expected, aux))
    repeats = {"accumulation": MICRO, "many steps": MANY}.get(habit, 1)
    assert flow(plan.store).planned == 2 * plan.spill_written > 0
    assert plan.spill_written == repeats * plan.spill_bytes


@crossed(kind=list(PARALLEL), scan={"scanned": True, "unrolled": False})
def test_devices(kind, scan, spill):
    parallel = PARALLEL[kind]
    args = parallel.arguments()
    unit = "*" if scan else "*_[01]"
    pin = {"*": "recompute", "*dot_general": "save", f"{unit}/{READ_OF_TANH[0]}": "spill"}
    step = parallel.step(jdelta.remat, scan=scan)
    with parallel.context(parallel.local_mesh()):
        plan = jdelta.plan(step, None, *args, spill=spill, pin=pin)
        if kind == "shard_map":  # what is computed again is known as such; others have little of it
            assert RECOMPUTE in plan.compiled.as_text()
        # comparing waits for one of each part only, and others spill their own
        got = jax.block_until_ready(plan.jit()(*args))
        expected = jax.jit(parallel.step(scan=scan))(*args)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    away = [r for r in plan.residuals if plan.decisions[r.name] is Decision.SPILL]
    parts = {r.name: r.bytes for r in away}
    devices = math.prod(parallel.axes.values())
    assert flow(plan.store).planned == devices * plan.spill_bytes
    assert plan.spill_bytes <= sum(parts.values())


@pytest.mark.parametrize("kind", ["shard_map", "shard_map step"])
def test_an_error_on_one_of_several_devices(kind, spill):
    """The others wait for it in sums, where XLA would end the process after a minute."""
    parallel, device = PARALLEL[kind], Device()
    step, args = parallel.step(jdelta.remat), parallel.arguments()
    pin = {"*": "recompute", "*dot_general": "save", f"*/{READ_OF_TANH[0]}": "spill"}
    spill = dataclasses.replace(spill, adapter=device)
    planned = jdelta.plan(step, None, *args, spill=spill, pin=pin).jit()
    store, expected = planned.plan.store, jax.jit(parallel.step())(*args)

    def fail_with(fault, this, nth, _):
        if fault == "closed" and nth == 2:
            store.close()
        elif (this, nth) == (fault, 3):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    for failures, fault in enumerate(("write", "read", "closed")):
        device.fault = None
        check(planned(*args), expected)
        store.settle()
        assert store.counters().failures == failures
        device.calls.clear()
        device.fault = functools.partial(fail_with, fault)
        says = "is closed" if fault == "closed" else "output error"
        with pytest.raises(SpillError, match=says):
            planned(*args)


def test_donated_state(spill):
    step, args = network()

    def train(ws, x, key):
        ws, loss = step(ws, x, key)
        return ws, loss

    plan = jdelta.plan(train, 0.6, *args, donate_argnums=0, spill=spill)
    assert Decision.SPILL in plan.decisions.values()
    planned, ws, expected = plan.jit(), jax.tree.map(jnp.copy, args[0]), args[0]
    for _ in range(3):
        ws, loss = planned(ws, *args[1:])
        expected, other = jax.jit(step)(expected, *args[1:])
        check((ws, loss), (expected, other))


# --- Plans as files, as policies, as text ----------------------------------------------------


def test_a_plan_that_spills_as_a_file(spill, tmp_path):
    step, args = network()
    plan = jdelta.plan(step, 0.55, *args, spill=spill)
    plan.save(tmp_path / "plan.json")
    loaded = jdelta.load(tmp_path / "plan.json")
    assert loaded == plan
    assert (loaded.spill, loaded.spill_rates) == (spill, plan.spill_rates)
    check(loaded.jit(step)(*args), jax.jit(step)(*args))
    assert loaded.store.counters().planned == plan.spill_bytes > 0
    assert plan.store.counters().planned == 0


def test_a_plan_that_spills_is_no_policy(spill):
    step, args = network()
    plan = jdelta.plan(step, 0.55, *args, spill=spill)

    @jdelta.remat
    def block(x):  # with jax_remat3 on, jax 0.10 asks policies about marked units only
        return jnp.sum(jnp.exp(jnp.sin(x)))

    with pytest.raises(SpillError, match=r"which a jax.checkpoint policy cannot do. Use plan.jit"):
        jax.grad(jax.checkpoint(block, policy=plan))(jnp.ones(3))


def test_the_table_tells(spill):
    step, args = network()
    plan = jdelta.plan(step, 0.55, *args, spill=spill)
    text = str(plan)
    assert any(" spill " in line and " spares " in line for line in text.splitlines())
    files = text[text.index("\nin files") :]
    assert spill.path in files
    assert format_bytes(plan.spill_bytes) in files.splitlines()[1]


def test_the_one_line_form(spill):
    step, args = network()
    planned = jdelta.jit(step, budget=0.55, spill=spill)
    check(planned(*args), jax.jit(step)(*args))
    assert planned.plans[0].spill_bytes > 0


# --- What the compiled program does -----------------------------------------------------------


def no_write(monkeypatch):
    """The rewrite forgets a value: it stays where `jax.checkpoint` has put it."""
    real = spill_pass._Run._write

    def forgets(run, name, x):
        return x if name == "block/dot_general" else real(run, name, x)

    monkeypatch.setattr(spill_pass._Run, "_write", forgets)


def no_read(monkeypatch):
    """The backward pass makes up the values of a shape instead of reading them."""

    def zeros(store, token, aval, **place):
        return jnp.zeros(aval.shape, aval.dtype)

    monkeypatch.setattr(spill_pass, "read", zeros)


def half_of_it(monkeypatch):
    """Half of the bytes are written."""

    def half(store, x, **place):
        return write(store, x[: len(x) // 2], **place)

    monkeypatch.setattr(spill_pass, "write", half)


@pytest.mark.parametrize("breaks", [no_write, no_read, half_of_it])
def test_what_the_program_does_not_write_and_read_is_an_error(breaks, spill, monkeypatch):
    step, args = network()
    pin = {"*": "save", "block/dot_general": "spill"}
    good = jdelta.plan(step, None, *args, spill=spill, pin=pin)
    breaks(monkeypatch)
    says = r"does not write and read back all bytes of block/dot_general \("
    with pytest.raises(SpillError, match=says):
        jdelta.plan(step, None, *args, spill=spill, pin=pin | DROP)
    with pytest.raises(SpillError, match=says):  # a plan from elsewhere, compiled here
        dataclasses.replace(good, _compiled=None, _call=None).jit(step)(*args)


def test_what_nobody_reads_is_not_missed(spill):
    step, args = network()
    priced, _ = analysed(step, args)
    unread = [r.name for r in priced if not r.needed and r.bytes > MIB]
    assert unread
    one = "block/dot_general"
    pin = {"*": "save", one: "spill", **dict.fromkeys(unread, "spill")}
    said = f"pin: '{unread[0]}' moves nothing: nothing reads {unread[0]} in the backward pass"
    with pytest.raises(SpillError, match=said):
        jdelta.plan(step, None, *args, spill=spill, pin=pin)
    plan = jdelta.plan(step, None, *args, spill=spill, pin={"*": "spill"})
    away = {r.name: r.bytes for r in plan.residuals if plan.decisions[r.name] is Decision.SPILL}
    assert one in away
    assert away.keys().isdisjoint(unread)
    assert plan.spill_bytes == sum(away.values())
    check(plan.jit()(*args), jax.jit(step)(*args))


def test_what_enters_a_unit_that_does_not_read_it_is_not_spilled(spill):
    """The derivative of a sine is the cosine: only to compute that again it takes what enters."""
    unit = jdelta.remat(jnp.sin)

    def loss(x):
        for _ in range(4):
            x = unit(x)
        return jnp.mean(x**2)

    step, x = jax.value_and_grad(loss), jnp.linspace(-1, 1, 1 << 20).reshape(512, 2048)
    into = "sin_1/sin"  # of the second unit, which enters the third
    pin = {"*": "save", into: "spill"}
    with pytest.raises(SpillError, match=f"pin: '{into}' moves nothing: nothing reads {into} in"):
        jdelta.plan(step, None, x, spill=spill, pin=pin)
    plan = jdelta.plan(step, None, x, spill=spill, pin=pin | {"sin_2/cos": "recompute"})
    assert plan.decisions[into] is Decision.SPILL
    assert plan.spill_bytes == x.nbytes
    check(plan.jit()(x), jax.jit(step)(x))
    plan = jdelta.plan(
        step, None, x, spill=spill, pin={"*": "spill", "sin_2/sin": "save", "sin_3/*": "save"}
    )
    away = {name for name, decision in plan.decisions.items() if decision is Decision.SPILL}
    assert away == {f"sin_{i}/cos" for i in range(3)}
    assert plan.spill_bytes == 3 * x.nbytes
    assert all(plan.decisions[f"sin_{i}/sin"] is Decision.RECOMPUTE for i in range(2))
    assert "sin_0/sin" not in str(plan)  # it takes no memory
    check(plan.jit()(x), jax.jit(step)(x))


def test_what_is_handed_on_but_not_read_is_not_counted(tmp_path):
    """JAX leaves out its write. The values of units that a step shares may be like that."""

    x = jnp.ones((8, 8))

    def step(reads, x):
        kept = checkpoint_name(jnp.sin(x), RegionName("unit", "sin"))
        away = jax.device_put(kept, jax.memory.Space.Host)
        doubled = jax.jit(lambda away, x: 2 * x)(away, x)
        return doubled, jax.device_put(away, jax.memory.Space.Device) if reads else x

    for reads in (True, False):
        store, target = open_store(tmp_path), resolve("cpu")
        spilling = {"store": store, "is_spilled": lambda name: True}
        staged = Program(jax.make_jaxpr(functools.partial(step, reads))(x))
        program = spill_pass.spilled(staged, Context(target.backend, target.rates, **spilling))
        jax.jit(functools.partial(_jax.evaluate, program.jaxpr))(x)
        assert program.spilled.bytes == (x.nbytes if reads else 0)
        assert flow(store).planned == program.spilled.written


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_unit_reads_from_host_memory_and_from_files(tmp_path, platform):
    """What is emitted, run where all memory is one: the same numbers, all bytes through files."""
    step, args = network(512, scan=False)
    away = {"tanh": Decision.OFFLOAD, "dot_general": Decision.SPILL}
    step_trace, priced, kept = decided(step, lambda *_: "save", *args)
    decisions = {r.name: away.get(r.name.split("/")[-1], kept[r.name]) for r in priced}
    assert set(away.values()) < set(decisions.values())
    store = open_store(tmp_path)
    spills = {"store": store, "is_spilled": lambda name: decisions[name] is Decision.SPILL}
    context = Context(backend_of(platform), resolve("cpu").rates, offloads=True, **spills)
    staged = Program(jax.make_jaxpr(under(step_trace, decisions, step))(*args))
    program = timed(spill_pass.spilled(staged, context), context)
    got = jax.jit(functools.partial(_jax.evaluate, program.jaxpr))(*jax.tree.leaves(args))
    check(got, jax.tree.leaves(jax.jit(step)(*args)))
    spilled = sum(r.bytes for r in priced if decisions[r.name] is Decision.SPILL)
    assert flow(store).planned == program.spilled.written == spilled


def test_a_plan_does_without_files_that_the_program_does_not_use(spill, monkeypatch):
    step, args = network()
    no_read(monkeypatch)
    plan = jdelta.plan(step, 0.6, *args, spill=spill)
    assert Decision.SPILL not in plan.decisions.values()
    check(plan.jit()(*args), jax.jit(step)(*args))


# --- What a drive has to take ----------------------------------------------------------------


def test_endurance(spill):
    step, args = TRAINERS["accumulation"](1024, 64, jdelta.remat)
    pin = {"*": "save", f"*/{READ_OF_TANH[0]}": "spill"}
    plan = jdelta.plan(step, None, *args, spill=spill, pin=pin)
    life = jdelta.endurance(plan, "600TB", 0.5)
    assert life.seconds == 600e12 * 0.5 / (MICRO * plan.spill_bytes)
    assert life.years == life.seconds / (365 * 86400)
    assert life.bandwidth == MICRO * plan.spill_bytes / 0.25
    assert jdelta.endurance(plan, "600TB", 0.5, devices=4).seconds == life.seconds / 4
    predicted = jdelta.endurance(plan, 10**15)
    assert predicted.seconds == 1e15 * (plan.step_seconds + plan.overhead) / plan.spill_written
    figures = dataclasses.replace(plan.figures, spill_written=0)
    nothing = dataclasses.replace(plan, figures=figures)
    assert jdelta.endurance(nothing, "1TB").seconds == math.inf
    for rated, seconds in (("half", 1.0), ("50%", 1.0), ("1TB", 0.0)):
        with pytest.raises(SpillError, match="expected the bytes that the drive is rated for"):
            jdelta.endurance(plan, rated, seconds)


def drifting(monkeypatch, spill, rates, durations):
    """Warnings of a directory that is measured at these rates when steps take so long."""
    drift = Drift(spill, RATES)
    monkeypatch.setattr("jdelta._src.spill.rates._measure", lambda _: rates)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for seconds in durations:
            drift.add(seconds)
    return [str(w.message) for w in records if w.category is jdelta.SpillDriftWarning]


def test_a_directory_that_becomes_slow(monkeypatch, spill):
    slow, steps = SpillRates(RATES.write / 4, RATES.read), [0.1] * 20 + [0.3] * 60
    (message,) = drifting(monkeypatch, spill, slow, steps)
    assert f"{spill.path} takes 476.8 MiB/s and gives 1.86 GiB/s by now" in message
    assert "plan again" in message
    assert rates_of(spill) is slow  # what the next plan goes by
    assert drifting(monkeypatch, spill, RATES, steps) == []  # something else is slow
    assert drifting(monkeypatch, spill, slow, [0.1] * 80) == []


def test_errors_of_a_step_have_their_name(spill):
    step, args = network()
    pin = {"*": "save", f"block/{READ_OF_TANH[0]}": "spill"}
    plan = jdelta.plan(step, None, *args, spill=spill, pin=pin)
    planned = plan.jit()
    planned(*args)
    plan.store.close()
    with pytest.raises(SpillError, match="closed"):
        planned(*args)


# --- What cannot be --------------------------------------------------------------------------


def test_no_directory(tmp_path):
    step, args = network()
    with pytest.raises(SpillError, match="nowhere"):
        jdelta.plan(step, 0.6, *args, spill=str(tmp_path / "nowhere"))
    with pytest.raises(jdelta.ArgumentError, match=r"a directory or a jdelta\.Spill, got int"):
        jdelta.plan(step, 0.6, *args, spill=7)
    with pytest.raises(SpillError, match="expected a directory, got ''"):
        jdelta.plan(step, 0.6, *args, spill="")
