"""Steps cut over eight devices: results, shardings, bytes per device, exchanges, the same plan."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdelta
from benchmarks.plans.sharded import Cut, case
from jdelta import Decision
from jdelta._src import _jax
from jdelta._src._jax.sharding import Axis, local_shape, shardings_of
from jdelta._src.backends.cpu import CPU
from jdelta._src.backends.target import resolve
from jdelta._src.estimate.collectives import Collective, collectives
from jdelta._src.hlo.measure import measure
from jdelta._src.passes.emit import Step, emit
from jdelta._src.passes.host_slots import _Kind, _kind
from jdelta._src.program.graph import graph_of
from jdelta._src.program.loop_nest import walk
from jdelta._src.regions.policy import Policy
from jdelta._src.regions.trace import trace
from jdelta._src.residuals.residual import residuals
from tests.compilers import needs_cuda
from tests.crossed import crossed
from tests.flags import flags
from tests.frameworks import mean_square
from tests.parallel import HIDDEN, LAYERS, PARALLEL, ROWS, WIDTH
from tests.passes.test_timing import offloading, running
from tests.planning import planned, under
from tests.steps.test_steps import loops_of

KINDS = list(PARALLEL)
MAPPED = [kind for kind in KINDS if "shard_map" in kind]


def identity(block):
    return block


def assert_same(got, expected):
    """Equal values, cut over the devices alike."""
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@functools.cache
def of_plain_step(kind, scan):
    """What the step of a kind gives without marks."""
    parallel = PARALLEL[kind]
    with parallel.context(parallel.local_mesh()):
        return jax.jit(parallel.step(scan=scan))(*parallel.arguments())


def found_residuals(kind):
    """The residuals of the marked, scanned step, by the last parts of their names."""
    parallel = PARALLEL[kind]
    mesh = parallel.local_mesh()
    with parallel.context(mesh):
        step_trace = trace(parallel.step(jdelta.remat), *parallel.shapes(mesh))
    (region,) = step_trace.regions
    return {r.name.split("/", 1)[1]: r for r in residuals(region, resolve("cpu"))}


FORMS = {"marked, scanned": (jdelta.remat, True), "found, unrolled": (identity, False)}


@crossed(kind=list(KINDS), form=FORMS)
def test_results_and_their_shardings_equal_the_plain_step(kind, form):
    unit, scan = form
    parallel = PARALLEL[kind]
    args = parallel.arguments()
    step = parallel.step(unit, scan=scan)
    with parallel.context(parallel.local_mesh()):
        step_trace, decisions = planned(step, 0.4, *args)
        got = jax.jit(under(step_trace, decisions, step))(*args)
    assert step_trace.automatic == (unit is identity)
    assert {Decision.SAVE, Decision.RECOMPUTE} <= set(decisions.values())
    assert_same(got, of_plain_step(kind, scan))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_fits_and_its_step_runs(kind):
    parallel = PARALLEL[kind]
    args = parallel.arguments()
    with parallel.context(parallel.local_mesh()):
        plan = jdelta.plan(parallel.step(jdelta.remat), 0.8, *args)
        got = plan.jit()(*args)
    assert plan.floor < plan.compiled_peak <= plan.budget < plan.ceiling
    assert plan.predicted_peak == pytest.approx(plan.compiled_peak, rel=0.15)
    assert {Decision.SAVE, Decision.RECOMPUTE} <= set(plan.decisions.values())
    assert_same(got, of_plain_step(kind, True))


def test_a_step_that_prints_has_shardings():
    """An equation may have no results."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data")))

    @jdelta.remat
    def unit(w, x):
        jax.debug.print("{}", x.mean())
        return jnp.tanh(x @ w)

    step_trace = trace(jax.grad(lambda w, x: mean_square(unit(w, x))), jnp.ones((8, 8)), x)
    (region,) = step_trace.regions
    activations = [r for r in residuals(region, resolve("cpu")) if r.shape == (16, 8)]
    assert activations
    assert {r.bytes for r in activations} == {x.nbytes // 8}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("examples", [P("data"), P(None, "data")])
def test_gradients_of_examples(examples, axis):
    """``jax.vmap`` gives the values of the step a dimension that those of a region do not have."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    xs = np.linspace(-1, 1, 2**12, dtype=np.float32).reshape(16, 16, 16)
    args = jnp.ones((16, 16)) / 16, jax.device_put(xs, NamedSharding(mesh, examples))

    def step(unit, w, xs):
        gradient = jax.grad(lambda w, x: mean_square(unit(w, x)))
        return jax.vmap(gradient, (None, axis))(w, xs)

    def unit(w, x):
        return jnp.sin(jnp.tanh(x @ w)) @ w

    planned_step = functools.partial(step, jdelta.remat(unit))
    (region,) = trace(planned_step, *args).regions
    assert {r.bytes for r in residuals(region, resolve("cpu"))} == {xs.nbytes // 8}
    plan = jdelta.plan(planned_step, "1GiB", *args, pin={"*": "recompute"})
    np.testing.assert_allclose(plan.jit()(*args), step(unit, *args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MAPPED])
def test_bytes_are_those_of_one_device(kind):
    parts = PARALLEL[kind].parts
    checked = Counter()
    for r in found_residuals(kind).values():
        if r.shape[-1] in parts:
            full_bytes = LAYERS * int(np.prod(r.shape)) * 4
            assert (r.count, r.bytes) == (LAYERS, full_bytes // parts[r.shape[-1]]), r.name
            assert np.prod(local_shape(r.shape, r.spec)) * 4 * LAYERS == r.bytes
            checked[r.shape[-1]] += 1
    assert set(checked) == set(parts)


@pytest.mark.parametrize(
    ("kind", "inside", "after"),
    [
        ("shard_map", (ROWS // 4, HIDDEN // 2), (ROWS // 4, WIDTH)),
        ("shard_map step", (ROWS // 8, HIDDEN), (ROWS // 8, WIDTH)),
    ],
)
def test_in_a_shard_map_shapes_are_those_of_one_device(kind, inside, after):
    by_name = found_residuals(kind)
    for name, shape in {"dot_general": inside, "dot_general_1": after}.items():
        assert by_name[name].shape == shape
        assert by_name[name].bytes == LAYERS * shape[0] * shape[1] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_program_takes_these_bytes_for_what_is_kept(kind):
    parallel = PARALLEL[kind]
    mesh, target = parallel.local_mesh(), resolve("cpu")
    args = parallel.shapes(mesh)
    fun = parallel.step(jdelta.remat)
    peaks = {}
    with parallel.context(mesh):
        step_trace = trace(fun, *args)
        step = Step(fun, args, (0,), target, step_trace.aliases)
        kept = [r for region in step_trace.regions for r in residuals(region, target) if r.needed]
        for decision in (Decision.SAVE, Decision.RECOMPUTE):
            policy = Policy.of({r.name: decision for r in kept}, step_trace.loops, CPU)
            peaks[decision] = measure(emit(step, policy).lower(), target)[1].temporaries
    more = peaks[Decision.SAVE] - peaks[Decision.RECOMPUTE]
    assert more == pytest.approx(sum(r.bytes for r in kept), rel=0.25)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MAPPED])
def test_exactly_the_planned_residuals_are_stacked_by_a_loop(kind):
    parallel = PARALLEL[kind]
    mesh = parallel.local_mesh()
    args = parallel.shapes(mesh)
    step = parallel.step(jdelta.remat)
    stacks = {}
    with parallel.context(mesh):
        for share in (0.0, 0.4):
            step_trace, decisions = planned(step, share, *args)
            jaxpr = jax.make_jaxpr(under(step_trace, decisions, step))(*args)
            forward = next(loops_of(jaxpr, LAYERS))
            carry = _jax.scan_counts(forward.params)[1]
            stacks[share] = Counter(v.aval.size // LAYERS for v in forward.outvars[carry:])
        (region,) = step_trace.regions
        sizes = {r.name: int(np.prod(r.shape)) for r in residuals(region, resolve("cpu"))}
    expected = Counter(sizes[n] for n, d in decisions.items() if d is Decision.SAVE and n in sizes)
    assert expected
    assert stacks[0.4] - stacks[0.0] == expected


TIMED = {"unrolled, for a TPU": ("tpu", False), "scanned, for a GPU": ("cuda", True)}


@crossed(kind=list(KINDS), timed=TIMED)
def test_results_are_the_same_with_everything_offloaded(kind, timed):
    platform, scan = timed
    parallel = PARALLEL[kind]
    args = parallel.arguments()
    with parallel.context(parallel.local_mesh()):
        staged, gone = offloading(parallel.step(jdelta.remat, scan=scan), args, ("*",))
        rates = resolve("tpu:v5e:2x2").rates
        run = running(
            staged, platform, rates, offloads=True, arguments=tuple(jax.tree.leaves(args))
        )
        results = jax.jit(run)(*jax.tree.leaves(args))
    expected = jax.tree.leaves(of_plain_step(kind, scan))
    assert gone >= 6
    for value, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


def test_slots_of_host_arrays_do_not_split_what_is_cut():
    unsplit, split = {"alone": False, "parts": 1}, {"alone": False, "parts": 2}
    alone = {"alone": True, "parts": 1}
    by_rows = ((Axis("data", 4),), (), ())
    assert _kind((4, 64, 96), by_rows, **alone) == _Kind(2, 1, 1, (4, 32, 96), (4, 32, 96))
    assert _kind((4, 64, 96), (), **alone) == _Kind(2, 0, 1, (2, 64, 96), (2, 64, 96))
    assert _kind((4, 64, 96), (), **split) == _Kind(2, 0, 2, (2, 64, 96), (2, 64, 96))
    assert _kind((96, 64), (), alone=False, parts=99) == _Kind(8, 0, 2, *[(12, 64)] * 2)
    assert _kind((12, 64), (), alone=False, parts=99) == _Kind(4, 0, 2, *[(3, 64)] * 2)
    assert _kind((4, 64, 96), by_rows, **split) == _Kind(1, 0, 1, *[(4, 64, 96)] * 2)
    heads = ((), (), (Axis("model", 4),), ())
    assert _kind((8, 32, 8, 16), heads, **unsplit) == _Kind(1, 0, 1, (8, 32, 8, 16), (8, 32, 128))
    inside = ((), (), (), (Axis("model", 4),))
    assert _kind((8, 32, 8, 16), inside, **unsplit) == _Kind(1, 0, 1, *[(8, 32, 8, 16)] * 2)
    assert _kind((4,), ((Axis("data", 4),),), **alone) is None


# What devices send each other


def exchanges(fun, mesh, *shapes_and_specs):
    """Primitive and exchange of each operation that takes one."""
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes_and_specs
    ]
    placed = resolve("tpu:v5e:2x2").abstract(args)
    jaxpr = jax.make_jaxpr(fun)(*placed)
    graph = graph_of(jaxpr, shardings_of(jaxpr, placed, "tpu"))
    return [(op.primitive, one) for op, _ in walk(graph) for one in collectives(graph, op)]


GRID = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LINE = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))


def test_a_contracted_dimension_that_is_cut_is_summed():
    assert exchanges(jnp.dot, GRID, ((8, 4), P("data", "model")), ((4, 6), P("model"))) == [
        ("dot_general", Collective("all-reduce", 4 * 6 * 4, 2))
    ]


def test_a_weight_that_is_cut_is_gathered():
    assert exchanges(jnp.dot, LINE, ((8, 4), P("data")), ((4, 8), P("data"))) == [
        ("dot_general", Collective("all-gather", 4 * 8 * 4, 4))
    ]


def test_a_gradient_that_is_cut_is_scattered():
    def gradient(x, y):
        dw = jnp.einsum("bi,bo->io", x, y)
        return jax.lax.with_sharding_constraint(dw, NamedSharding(LINE, P("data")))

    pairs = exchanges(gradient, LINE, ((8, 4), P("data")), ((8, 8), P("data")))
    assert [one for _, one in pairs] == [Collective("reduce-scatter", 4 * 8 * 4, 4)]


def test_a_constraint_moves_a_value():
    def to(spec):
        return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(LINE, spec)) * 2

    by_rows = (8, 4), P("data")
    gathered = ("reshard", Collective("all-gather", 8 * 4 * 4, 4))
    crossed = ("reshard", Collective("all-to-all", 8 * 4, 4))
    assert exchanges(to(P(None, None)), LINE, by_rows) == [gathered]
    assert exchanges(to(P(None, "data")), LINE, by_rows) == [crossed]
    assert exchanges(to(P("data")), LINE, by_rows) == []


def test_the_collectives_of_a_shard_map_are_found():
    def part(x):
        return jax.lax.psum(x, "data") + jax.lax.all_gather(x, "data", tiled=True)[:2]

    run = jax.shard_map(part, mesh=LINE, in_specs=P("data"), out_specs=P(), check_vma=False)
    assert exchanges(run, LINE, ((8, 4), P("data"))) == [
        ("psum", Collective("all-reduce", 2 * 4 * 4, 4)),
        ("all_gather", Collective("all-gather", 8 * 4 * 4, 4)),
    ]


def test_rings_send_each_byte_to_all_but_one():
    rates = dataclasses.replace(resolve("tpu:v5e:2x2").rates, interconnect=10.0)
    seconds = [Collective(kind, 100, 4).seconds(rates) for kind in ("all-gather", "all-reduce")]
    assert seconds == [7.5, 15.0]


@jdelta.remat
def pair(ws, x, z):
    """Two values of one size: one summed over devices, one that takes more arithmetic."""
    return jnp.sin(x @ ws[0]) * jnp.sin(z @ ws[1])


@pytest.mark.parametrize(("speed", "kept"), [(1e6, "dot_general"), (1e18, "dot_general_1")])
def test_what_was_exchanged_is_kept_unless_that_is_cheap(speed, kept, monkeypatch):
    real = resolve("tpu:v5e:2x2")
    rates = dataclasses.replace(real.rates, interconnect=speed)
    monkeypatch.setattr("tests.planning.resolve", lambda _: dataclasses.replace(real, rates=rates))
    specs = (P("model"), P()), P("data", "model"), P("data")
    shapes = ((256, 256), (2048, 256)), (4096, 256), (4096, 2048)
    args = jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(GRID, spec)
        ),
        *(shapes, specs),
        is_leaf=lambda node: isinstance(node, tuple) and isinstance(node[0], int),
    )
    step = jax.grad(lambda ws, x, z: jnp.sum(pair(ws, x, z)))
    _, decisions = planned(step, 0.25, *real.abstract(args))
    assert {n for n, d in decisions.items() if d is Decision.SAVE} == {f"pair/{kept}"}


def test_another_partitioner_is_an_error():
    parallel = PARALLEL["data"]
    args = parallel.shapes(parallel.local_mesh())
    off = "jax_use_shardy_partitioner is off"
    with flags(jax_use_shardy_partitioner=False), pytest.raises(jdelta.TargetError, match=off):
        trace(parallel.step(jdelta.remat), *args)


# One plan on every process

PLAN = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jdelta
from tests.parallel import PARALLEL
parallel = PARALLEL["tensor"]
mesh = parallel.local_mesh()
jdelta.plan(parallel.step(jdelta.remat), 0.8, *parallel.shapes(mesh)).save({path!r})
"""


def test_every_process_makes_the_same_plan(tmp_path):
    plans = []
    for seed in ("1", "2"):
        path = str(tmp_path / f"{seed}.json")
        subprocess.run(
            [sys.executable, "-c", PLAN.format(path=path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            check=True,
        )
        plans.append(Path(path).read_text())
    assert json.loads(plans[0])["answer"]["policy"]["saved"]
    assert plans[0] == plans[1]


def test_specifications_are_read_part_by_part():
    half = (Axis("data", 4), Axis("model:1", 2))
    assert local_shape((16, 10), (half, ())) == (2, 10)
    assert local_shape((9,), ((Axis("data", 4),),)) == (3,)


# Devices that are not here

SMALL = {"name": "llama-160m", "length": 512}
AHEAD = [
    pytest.param(Cut(SMALL, "tpu:v6e:4x4", 4, 4, 16), marks=pytest.mark.full),
    pytest.param(Cut(SMALL, "tpu:v5p:4x4x4", 16, 4, 64), marks=pytest.mark.full),
    pytest.param(Cut(SMALL, "cuda:h100:1x1x8", 8, 1, 32), marks=needs_cuda),
]


@pytest.mark.compiler
@pytest.mark.parametrize("cut", AHEAD, ids=lambda cut: cut.target)
def test_ahead_of_time_the_peak_of_a_device_is_within_the_budget(cut):
    sharded = case(cut, remat=jdelta.remat)
    pin = {"block/mlp/mlpwi_0": "offload"} if "v5p" not in cut.target else {}
    options = {"donate_argnums": 0, "pin": pin, "per_layer": False}
    share = 0.7 if "v6e" in cut.target else 0.4  # on a GPU more is not worth its copies
    plan = jdelta.plan(
        sharded.step, share, sharded.state, sharded.batch, target=cut.target, **options
    )
    assert plan.floor <= plan.compiled_peak <= plan.budget < plan.ceiling
    assert plan.predicted_peak == pytest.approx(plan.compiled_peak, rel=0.05)
    size = 12 * (cut.batch // cut.data) * SMALL["length"] * (3072 // cut.tensor) * 4
    assert {r.name: r.bytes for r in plan.residuals}["block/mlp/mlpwi_0"] == size
    assert plan.host_bytes == (size if pin else 0)
    if pin:  # what is on the host is cut as on the device
        shapes = re.findall(r"f32\[([\d,]+)\]{[^}]*S\(5\)", plan.compiled.as_text())
        host_sizes = {math.prod(map(int, shape.split(","))) * 4 for shape in shapes}
        assert size in host_sizes
        assert host_sizes <= {size, size // 12}


@pytest.mark.compiler
def test_ahead_of_time_what_is_offloaded_is_cut_as_on_the_device():
    """The same of one small stack, for every run of the tests."""
    parallel = PARALLEL["tensor"]
    rows, width, hidden = 65536, 512, 2048
    args = parallel.shapes(parallel.mesh, rows=rows, width=width, hidden=hidden)
    options = {"target": "tpu:v5e:2x4", "pin": {"dense/dot_general": "offload"}}
    plan = jdelta.plan(parallel.step(jdelta.remat), 0.7, *args, **options)
    assert plan.floor <= plan.compiled_peak <= plan.budget < plan.ceiling
    data, model = parallel.axes.values()
    size = LAYERS * (rows // data) * (hidden // model) * 4
    assert {r.name: r.bytes for r in plan.residuals}["dense/dot_general"] == size
    assert plan.host_bytes == size
    shapes = re.findall(r"f32\[([\d,]+)\]{[^}]*S\(5\)", plan.compiled.as_text())
    host_sizes = {math.prod(map(int, shape.split(","))) * 4 for shape in shapes}
    assert size in host_sizes <= {size, size // LAYERS}


def mean_of_layers(w, x):
    for i in range(3):
        x = x + jnp.tanh(jnp.sin(x @ w[i]))
    return jnp.mean(x**2)


def in_a_shard_map(mesh):
    def local(w, x):
        return jax.lax.pmean(mean_of_layers(w, x), "d")

    specs = {"in_specs": (P(), P("d")), "out_specs": P()}
    return jax.grad(jax.shard_map(local, mesh=mesh, **specs))


def with_a_constraint(mesh):
    cut = NamedSharding(mesh, P("d"))
    return jax.grad(lambda w, x: mean_of_layers(w, jax.lax.with_sharding_constraint(x, cut)))


@pytest.mark.parametrize("way", ["shard_map", "constraint", "set mesh", "results", "committed"])
def test_arguments_without_a_place_go_where_the_program_runs(way, tmp_path):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    step = {"shard_map": in_a_shard_map, "constraint": with_a_constraint}.get(
        way, lambda _: jax.grad(mean_of_layers)
    )(mesh)
    args = np.ones((3, 16, 16), np.float32) / 16, jnp.ones((32, 16))
    if way == "committed":
        args = jax.device_put(args[0], jax.devices()[1]), args[1]
    options = {"out_shardings": NamedSharding(mesh, P(None, "d"))} if way == "results" else {}
    with jax.set_mesh(mesh) if way == "set mesh" else contextlib.nullcontext():
        expected = jax.jit(step, **options)(*args)
        plan = jdelta.plan(step, None, *args, pin={"*": "recompute"}, **options)
        assert_same(plan.jit()(*args), expected)
        assert_same(jdelta.jit(step, budget="1GiB", **options)(*args), expected)
        plan.save(tmp_path / "plan.json")
        loaded = jdelta.load(tmp_path / "plan.json")
        assert_same(loaded.jit(jax.jit(step, **options))(*args), expected)
    assert plan.arguments[0].endswith("P() over d=4") == (way != "committed")


def test_a_step_that_names_no_mesh_is_not_traced_once_more_for_all_devices():
    calls = []

    def step(w, x):
        calls.append(jax.device_count())
        return jax.grad(mean_of_layers)(w, x)

    args = jnp.ones((3, 16, 16)) / 16, jnp.ones((32, 16))
    counts = []
    for placed in args, jax.device_put(args, jax.devices()[0]):
        calls.clear()
        jdelta.plan(step, None, *placed)
        counts.append(len(calls))
    assert jax.device_count() > 1
    assert counts[0] == counts[1]
