"""Graph, buffers, live bytes, cost and residuals of small programs whose answers are known."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.ode import odeint

import jdelta
from benchmarks.compilers import storage as facts
from jdelta._src.backends.chips import Rates
from jdelta._src.backends.cpu import CPU
from jdelta._src.backends.platforms import backend_of
from jdelta._src.backends.target import published, resolve
from jdelta._src.backends.tpu import TPU
from jdelta._src.decision import Decision
from jdelta._src.estimate.buffers import Compiler, storage
from jdelta._src.estimate.memory import stored_sizes, timeline
from jdelta._src.estimate.seconds import operation_seconds, program_seconds
from jdelta._src.program.graph import graph_of
from jdelta._src.regions.trace import trace
from jdelta._src.report.rows import rows
from jdelta._src.residuals.items import items_of
from jdelta._src.residuals.pins import NO_PINS, Pins
from jdelta._src.residuals.residual import residuals
from jdelta._src.solver import Knapsack

RATES = Rates(
    matmul=(("float32", 1e12),),
    vector=1e11,
    integer=1e10,
    bandwidth=1e9,
    device_to_host=1e8,
    host_to_device=2e8,
)
TARGET = dataclasses.replace(resolve("cpu"), rates=RATES)
PLAIN = Compiler(CPU)
KIB = 1024
X = jax.ShapeDtypeStruct((16, 16), jnp.float32)  # one KiB


def graph(fun, *args):
    return graph_of(jax.make_jaxpr(fun)(*args))


def live_peak(fun, *args):
    return timeline(graph(fun, *args), PLAIN).peak


def seconds(fun, *args):
    program = graph(fun, *args)
    roots = storage(program, PLAIN)
    return [operation_seconds(program, op, roots, RATES, CPU) for op in program.operations]


def test_calls_are_inlined_and_dead_code_left_out():
    @jax.jit
    def inner(x):
        jnp.cos(x)
        return jnp.sin(x)

    program = graph(lambda x: jax.checkpoint(inner)(x) * 2.0, X)
    assert [op.primitive for op in program.operations] == ["sin", "mul"]


def test_loops_are_nested_or_unfolded():
    def fun(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c) @ x, jnp.exp(c)), x, length=5)

    jaxpr = jax.make_jaxpr(fun)(X)
    (loop,) = graph_of(jaxpr).operations
    assert (loop.primitive, loop.trips) == ("scan", 5)
    assert loop.body is not None
    unfolded = graph_of(jaxpr, unfold_loops=True).operations
    assert {op.primitive: op.times for op in unfolded} == {"sin": 5, "dot_general": 5, "exp": 5}


def test_a_loop_of_one_iteration_is_none():
    def fun(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c) @ x, jnp.exp(c)), x, length=1)

    assert [op.primitive for op in graph(fun, X).operations] == ["sin", "dot_general", "exp"]


def test_backward_operations_are_told_apart():
    program = graph(jax.grad(lambda x: jnp.sin(x @ x).sum()), X)
    directions = {op.primitive: op.backward for op in program.operations}
    assert directions["cos"] is False
    assert directions["transpose"] is True


def test_element_wise_chains_are_not_written():
    assert live_peak(lambda x: jnp.sin(x + 1.0) * 2.0, X) == 0  # only the result, an output
    assert live_peak(lambda x: (jnp.sin(x) @ x) + 1.0, X) == 2 * KIB  # a product reads the sine
    assert live_peak(lambda x: (x @ x @ x).sum(), X) == 2 * KIB


def test_values_live_until_their_last_reader():
    def fun(x):
        early = x @ x
        for _ in range(3):
            x = x @ x
        return (early @ x).sum()

    # `early`, a product and the one it is made from
    assert live_peak(fun, X) == 3 * KIB


def test_loops_hold_their_stacked_results():
    def fun(x):
        return jax.lax.scan(lambda c, _: (c @ x, c @ c), x, length=7)[1].sum()

    assert live_peak(fun, X) >= 7 * KIB
    assert live_peak(fun, X) <= 11 * KIB


def tpu_and_cuda_peak(fun, *args):
    program = graph(fun, *args)
    return [timeline(program, Compiler(backend_of(platform))).peak for platform in ("tpu", "cuda")]


def test_a_tpu_converts_weights_that_loops_only_multiply_by_and_a_gpu_copies_their_rows():
    weights = jax.ShapeDtypeStruct((6, 128, 128), jnp.float32)
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    row = 128 * 128 * 4

    def loop(elementwise):
        def body(c, w):
            return c @ w + (w if elementwise else 0.0), None

        return lambda ws, x: jax.lax.scan(body, x, ws)[0]

    tpu, cuda = tpu_and_cuda_peak(loop(elementwise=False), weights, x)
    assert tpu - 6 * row // 2 == cuda - row
    tpu, cuda = tpu_and_cuda_peak(loop(elementwise=True), weights, x)
    assert tpu == cuda - row


def test_what_a_tpu_does_inside_matrix_products():
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    size = 128 * 128 * 4
    assert tpu_and_cuda_peak(lambda x: x.T @ (jnp.sin(x) @ x) + 1, x) == [3 * size // 2, 2 * size]
    assert tpu_and_cuda_peak(lambda x: (jnp.sin(x) @ x) + 1, x) == [size, 2 * size]


ROWS = {"reduce_max", "reduce_sum"}
"""What a softmax makes of each row."""


@pytest.mark.parametrize(
    ("program", "tpu", "cuda"),
    [
        (facts.sum_read_twice(kept=False), {"add"}, {"add", "max"}),
        (facts.sum_read_twice(kept=True), set(), {"max"}),
        (facts.activation(exact=False), set(), {"mul", "add_any"}),
        (facts.activation(exact=True), set(), {"erfc", "mul", "add_any"}),
        (facts.dropout(), set(), {"lt", "select_n", "mul"}),
        # select_n: of indices
        (facts.picked(), {"convert_element_type", "select_n", "gather", *ROWS}, {"gather", *ROWS}),
        (
            facts.attention(masked=False),
            {"convert_element_type", *ROWS},
            {"convert_element_type", *ROWS},
        ),
        (
            facts.attention(masked=True),
            {"exp", "convert_element_type", *ROWS},
            {"convert_element_type", *ROWS},
        ),
    ],
)
def test_which_element_wise_values_are_written(program, tpu, cuda):
    """What the compilers say of the same programs: ``python -m benchmarks run storage``."""
    for platform, expected in (("tpu", tpu), ("cuda", cuda)):
        assert set(written(program, platform)) - {"dot_general"} == expected


@pytest.mark.parametrize(
    ("options", "compiled"),
    [({"masked": False}, 576), ({"masked": True}, 576), ({"masked": False, "keys": 32768}, 384)],
)
def test_a_gpu_writes_nothing_over_rows_that_it_reads_for_a_softmax(options, compiled):
    """MiB of temporaries as compiled: ``python -m benchmarks run storage``."""
    fun, args = facts.attention(**options)
    peak = timeline(graph(fun, *args), Compiler(backend_of("cuda"))).peak
    assert peak / 2**20 == pytest.approx(compiled, rel=0.01)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_what_is_computed_again_is_so_just_before_it_is_read(platform):
    """As compiled, 128 MiB in each layer are there once: ``python -m benchmarks run storage``."""
    peaks = []
    for layers in (2, 4):
        fun, args = facts.recomputed(layers)
        line = timeline(graph(fun, *args), Compiler(backend_of(platform)))
        defined = set(line.graph.initial_values)
        for op in line.graph.operations:
            assert defined.issuperset(op.inputs)
            defined.update(op.outputs)
        peaks.append(line.peak)
    few, many = peaks
    assert many < few + 16 * 2**20 < 400 * 2**20


@pytest.mark.parametrize(("cast", "compiled"), [(False, 32), (True, 16)])
def test_a_gpu_copies_rows_that_its_products_read(cast, compiled):
    """MiB of temporaries as compiled: ``python -m benchmarks run storage``."""
    fun, args = facts.weights(elementwise=cast, cast=cast)
    peak = timeline(graph(fun, *args), Compiler(backend_of("cuda"))).peak
    assert peak / 2**20 == pytest.approx(compiled, rel=0.01)


@pytest.mark.parametrize(("product", "compiled"), [(False, 0), (True, 64)])
def test_a_gpu_copies_rows_that_its_products_make_into_their_stack(product, compiled):
    """MiB of temporaries as compiled: ``python -m benchmarks run storage``."""
    fun, args = facts.rows(product)
    peak = timeline(graph(fun, *args), Compiler(backend_of("cuda"))).peak
    assert peak / 2**20 == pytest.approx(compiled, rel=0.01, abs=1)


@pytest.mark.parametrize(("chained", "compiled"), [(False, 344), (True, 393)])
def test_a_gpu_copies_operands_of_a_split_product_one_after_the_other(chained, compiled):
    """MiB of temporaries as compiled, without partial sums, by the same study."""
    fun, args = facts.product(1024, 50257, chained=chained)
    peak = timeline(graph(fun, *args), Compiler(backend_of("cuda"))).peak
    assert peak / 2**20 == pytest.approx(compiled, rel=0.01)


@pytest.mark.parametrize(("tied", "compiled"), [(False, 448), (True, 512)])
def test_what_is_converted_twice_is_in_memory_once_and_all_the_time(tied, compiled):
    """MiB of temporaries as compiled: ``python -m benchmarks run storage``."""
    fun, args = facts.table(tied=tied)
    peak = timeline(graph(fun, *args), Compiler(backend_of("tpu"))).peak
    assert peak / 2**20 == pytest.approx(compiled, rel=0.01)


def test_scores_are_written_only_if_something_else_than_a_softmax_reads_them():
    def scores_and(more):
        def program(q, k):
            scores = (q @ k.T).astype(jnp.float32)
            masked = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -1e30)
            return jax.nn.softmax(masked).astype(q.dtype) @ k, more(scores, masked)

        return program, (jax.ShapeDtypeStruct((128, 128), jnp.bfloat16),) * 2

    def products(more):
        return written(scores_and(more), "tpu")["dot_general"]

    assert products(lambda scores, masked: 0) == 0
    assert products(lambda scores, masked: masked) == 1
    assert products(lambda scores, masked: jnp.sum(scores)) == 1
    assert products(lambda scores, masked: jnp.exp(scores).max()) == 1


def test_what_a_tpu_loop_fetches_for_the_next_iteration_is_copied_and_stays_as_wide_as_it_was():
    weights = jax.ShapeDtypeStruct((6, 128, 128), jnp.float32)
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    size = 128 * 128 * 4

    def loop(fetch):
        def program(weights, x):
            stack = jax.device_put(weights, jax.memory.Space.Host) if fetch else weights

            def body(state, row):
                ready, y = state
                coming = jax.lax.dynamic_index_in_dim(stack, row, keepdims=False)
                coming = jax.device_put(coming, jax.memory.Space.Device) if fetch else coming
                return (coming, y @ ready), None

            return jax.lax.scan(body, (x, x), jnp.arange(6))[0][1]

        return program

    on_device, away = (graph(loop(fetch), weights, x) for fetch in (False, True))
    (scan,) = (op for op in on_device.operations if op.primitive == "scan")
    assert Compiler(backend_of("tpu")).relaid_bytes(scan) == 0
    (scan,) = (op for op in away.operations if op.primitive == "scan")
    assert Compiler(backend_of("tpu")).relaid_bytes(scan) == size
    assert Compiler(backend_of("cuda")).relaid_bytes(scan) == 0
    assert stored_sizes(away, Compiler(backend_of("tpu")))[scan.outputs[0]] == size


@pytest.mark.parametrize(("platform", "sums"), [("tpu", 3), ("cuda", 7)])
def test_sums_of_sums_are_written(platform, sums):
    """Of the 7 between 8 residual layers whose products are kept too: a TPU writes every second."""
    assert written(facts.residual_layers(8), platform)["add"] == sums


def written(program, platform):
    fun, args = program
    step = graph(fun, *args)
    roots = storage(step, Compiler(backend_of(platform)))
    inside = (op for op in step.operations if not {*op.outputs} & {*step.outputs})
    return Counter(op.primitive for op in inside if any(v in roots[v] for v in op.outputs))


@pytest.mark.parametrize(
    ("shape", "dtype", "platform", "expected"),
    [
        ((100, 100), jnp.float32, "cuda", 40_000),
        ((100, 100), jnp.float32, "tpu", 104 * 128 * 4),
        ((1024, 64), jnp.float32, "tpu", 1024 * 64 * 4),  # the layout may swap the two
        ((8, 128, 1), jnp.bfloat16, "tpu", 16 * 128 * 2),
        ((5,), jnp.float32, "tpu", 20),
    ],
)
def test_padding(shape, dtype, platform, expected):
    program = graph(lambda x: x, jax.ShapeDtypeStruct(shape, dtype))
    assert Compiler(backend_of(platform)).bytes(program.values[0]) == expected


def test_padding_of_images():
    """A TPU keeps batch and features of an image minor, whatever that wastes: 64 of 128 lanes."""

    def program(x, k):
        y = jax.lax.conv_general_dilated(
            x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        pooled = jax.lax.reduce_window(
            jnp.maximum(y, 0), -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
        )
        return jnp.sum(pooled.reshape(16, -1), axis=1)

    shapes = ((16, 224, 224, 3), (7, 7, 3, 64))
    step = graph(program, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    outputs = {op.primitive: op.outputs[0] for op in step.operations}
    plain = {name: step.values[v].bytes for name, v in outputs.items()}
    tpu, cuda = (stored_sizes(step, Compiler(backend_of(platform))) for platform in ("tpu", "cuda"))
    for name in ("conv_general_dilated", "max", "reduce_window_max"):
        assert tpu[outputs[name]] == 2 * plain[name] == 2 * cuda[outputs[name]]
    assert tpu[outputs["reshape"]] == plain["reshape"]


def test_cost_of_products_convolutions_and_the_rest():
    a, b = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 4096), (4096, 512)))
    arithmetic, traffic = 2 * 512 * 512 * 4096 / 1e12, (2 * 512 * 4096 + 512**2) * 4 / 1e9
    assert seconds(jnp.matmul, a, b) == [max(arithmetic, traffic)]
    slow = Rates(**{**vars(RATES), "matmul": (("float32", 1e12), ("float32 highest", 1e10))})
    exact = graph(lambda a, b: jnp.matmul(a, b, precision="highest"), a, b)
    assert program_seconds(exact, slow, CPU) == pytest.approx(100 * arithmetic)
    image = jax.ShapeDtypeStruct((1, 8, 32, 32), jnp.float32)
    kernel = jax.ShapeDtypeStruct((64, 8, 3, 3), jnp.float32)
    fast_memory = Rates(**{**vars(RATES), "bandwidth": 1e15})
    program = graph(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), image, kernel)
    expected = 2 * 64 * 8 * (3 * 32 - 2) ** 2 / 1e12  # taps at the edges fall on padding
    assert program_seconds(program, fast_memory, CPU) == pytest.approx(expected)
    assert seconds(lambda x: jnp.reshape(x, (-1,)), X) == [0.0]


def test_of_a_stack_a_product_reads_its_own_slice():
    def step(ws, x):
        for i in range(4):
            x = x @ ws[i]
        return x

    only_moving = dataclasses.replace(RATES, vector=1e18, matmul=(("float32", 1e18),))
    side = 64 * 64 * 4
    args = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), "f4")
    moved = program_seconds(graph(step, *args), only_moving, TPU) * only_moving.bandwidth
    assert moved == pytest.approx(4 * 3 * side)


def test_a_fused_chain_is_priced_once():
    one = sum(seconds(lambda x: jnp.sin(x), X))
    chain = sum(seconds(lambda x: jnp.cos(jnp.sin(x) * 2.0) + 1.0, X))
    assert one == pytest.approx(2 * KIB / 1e9)
    assert chain == pytest.approx(one, rel=0.1)  # one read, one write, a little arithmetic


def twice_reduced(x):
    return jnp.sum(x, 0), jnp.sum(x * x, 0)


def reduced_again(x):
    return jnp.sum(jnp.square(x - jnp.sum(x, 0)), 0)


def made_and_reduced(x):
    y = x + 1.0
    return y, jnp.sum(y, 0), jnp.sum(y * y, 0)


def product_reduced(x):
    y = x @ x[:, :64]
    return y, jnp.sum(y, 0), jnp.sum(y * y, 0)


def softmaxed(x):
    return jax.nn.softmax(x * 2.0)


def softmaxed_columns(x):
    return jax.nn.softmax(x * 2.0, axis=0)


def taken_apart(x):
    return jnp.split(x + 1.0, 4, axis=1)


def stacked(x):
    return jax.lax.scan(lambda y, _: (y * 2.0 + 1.0, y * y), x, length=8)


def stacked_and_read(x):
    def body(y, _):
        z = jnp.sin(y * 2.0 + 1.0)
        return z @ z, z

    return jax.lax.scan(body, x, length=8)


MOVED = {
    ("cuda", twice_reduced): 1.0,
    ("cuda", reduced_again): 2.0,
    ("cuda", made_and_reduced): 2.0,
    ("cuda", product_reduced): 1.0 + 5 / 64,
    ("cuda", softmaxed): 2.0,
    ("cuda", softmaxed_columns): 4.0,
    ("cpu", softmaxed): 4.0,
    ("cuda", taken_apart): 2.0,
    ("cuda", stacked): 8 * (2 + 2 + 1),
    ("cuda", stacked_and_read): 8 * (2 + 2 + 3),
    ("cpu", twice_reduced): 2.0,
}
"""What programs move, in times their argument (4096 x 4096)."""


@pytest.mark.parametrize(("platform", "fun"), MOVED)
def test_what_runs_together_reads_once_and_stacks_are_filled_and_copied_to(platform, fun):
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    only_moving = Rates(**{**vars(RATES), "vector": 1e18, "matmul": (("float32", 1e18),)})
    moved = program_seconds(graph(fun, x), only_moving, backend_of(platform)) * RATES.bandwidth
    assert moved / (4 * 4096**2) == pytest.approx(MOVED[platform, fun], rel=0.02)


@pytest.mark.parametrize(
    ("generator", "platform", "each"),
    [
        ("threefry2x32", "cpu", 100),
        ("threefry2x32", "cuda", 80),
        ("threefry2x32", "tpu", 100),
        ("rbg", "cpu", 50),
        ("unsafe_rbg", "tpu", 50),
    ],
)
def test_random_bits_cost_by_their_generator(generator, platform, each):
    key = jax.random.key(0, impl=generator)
    program = graph(lambda key: jax.random.bits(key, (1024,)), key)
    taken = program_seconds(program, RATES, backend_of(platform))
    assert taken == pytest.approx(each * 1024 / RATES.integer)


def test_loops_cost_as_often_as_they_run_and_nothing_is_free():
    def fun(n, x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ x), None), x, length=n)[0]

    few, many = (sum(seconds(functools.partial(fun, n), X)) for n in (2, 10))
    assert many == pytest.approx(5 * few)
    for fun in (
        lambda x: jnp.sort(x),
        lambda x: jnp.fft.fft(x).real,
        lambda x: jnp.linalg.cholesky(x),
        lambda x: jax.random.uniform(jax.random.key(0), x.shape) + x,
        lambda x: jax.pure_callback(lambda x: x, X, x),
        lambda x: jax.nn.dot_product_attention(*[x.reshape(1, 16, 4, 4)] * 3),
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: c @ c, x),
        lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    ):
        assert sum(seconds(fun, X)) > 0


@jdelta.remat
def unit(w, x, key, index):
    h = checkpoint_name(x @ w, "projected")
    keep = jax.random.bernoulli(key, 0.9, h.shape)
    y = jnp.where(keep, jnp.tanh(h), 0.0)
    return jnp.exp(y)[index] @ w


def of_unit():
    args = jnp.ones((16, 16)), jnp.ones((16, 16)), jax.random.key(0), jnp.arange(16)[::-1]
    step_trace = trace(jax.grad(lambda w, *rest: unit(w, *rest).sum()), *args)
    return {r.name: r for r in residuals(step_trace.regions[0], TARGET)}


def test_residuals_know_where_they_come_from():
    by_name = of_unit()
    projected, tanh = by_name["unit/projected"], by_name["unit/tanh"]
    assert projected.producer == "dot_general"
    assert "unit/dot_general" not in by_name  # the same buffer, under the user's name
    assert (projected.shape, projected.dtype, projected.bytes) == ((16, 16), "float32", KIB)
    assert projected.sources == ("unit/input", "unit/input_1")
    assert not set(projected.sources) & set(by_name)  # weights and inputs are no residuals
    assert not projected.needed  # only through tanh
    assert by_name["unit/exp"].needed
    assert tanh.sources == ("unit/projected",)
    assert "unit/tanh" in projected.consumers
    assert tanh.seconds > 0
    assert {by_name[name].dtype for name in by_name if "bernoulli/lt" in name} == {"bool"}
    order = list(by_name)
    pairs = [(s, r.name) for r in by_name.values() for s in r.sources if s in by_name]
    assert all(order.index(source) < order.index(name) for source, name in pairs)


def test_residuals_in_a_loop_carry_their_count():
    def loss(w, x):
        def body(x, key):
            return unit(w, x, key, jnp.arange(16)), None

        return jax.lax.scan(body, x, jax.random.split(jax.random.key(0), 6))[0].sum()

    (region,) = trace(jax.grad(loss), jnp.ones((16, 16)), jnp.ones((16, 16))).regions
    by_name = {r.name: r for r in residuals(region, TARGET)}
    single = of_unit()["unit/tanh"]
    looped = by_name["unit/tanh"]
    assert (looped.count, looped.bytes, looped.loops) == (6, 6 * single.bytes, 1)
    assert looped.seconds == pytest.approx(6 * single.seconds)


def test_items_of_a_step():
    priced = tuple(of_unit().values())
    items = items_of(priced, resolve("cpu"), 1e9, Pins({"unit/tanh": "save"}))
    names = [item.name for item in items.problem.items]
    assert "unit/tanh" not in names
    assert not any(item.moves for item in items.problem.items)
    decisions = items.decisions([Decision.RECOMPUTE] * len(names))
    assert decisions["unit/tanh"] is Decision.SAVE
    assert set(decisions) == {r.name for r in priced}


def test_equal_layers_share_a_row():
    def loss(w, x):
        for i in range(12):
            x = unit(w, x, jax.random.key(i), jnp.arange(16))
        return x.sum()

    step_trace = trace(jax.grad(loss), jnp.ones((16, 16)), jnp.ones((16, 16)))
    every = [r for region in step_trace.regions for r in residuals(region, TARGET)]
    decisions = dict.fromkeys((r.name for r in every), Decision.RECOMPUTE)
    table = {row.name: row for row in rows(every, decisions)}
    row = table["unit_*/tanh"]
    assert (row.regions, row.bytes) == (12, 12 * KIB)
    decisions["unit_3/tanh"] = Decision.SAVE
    split = {(row.name, row.regions) for row in rows(every, decisions) if "tanh" in row.name}
    assert split == {("unit_3/tanh", 1), ("unit_*/tanh", 11)}


def test_branches_that_meet_again_are_priced_once():
    """Nothing inside a rule has a name but what it ends with: the rest is one chain."""

    def priced(rounds):
        @jax.custom_jvp
        def f(x):
            return jnp.exp(x)

        @f.defjvp
        def rule(primals, tangents):
            y = jnp.sin(primals[0])
            for _ in range(rounds):
                y = y * y - y
            return f(primals[0]), jnp.tanh(y) * tangents[0]

        unit = jdelta.remat(lambda w, x: f(x @ w))
        shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        step_trace = trace(jax.grad(lambda w, x: jnp.sum(unit(w, x))), shape, shape)
        (region,) = step_trace.regions
        return next(r.seconds for r in residuals(region, resolve("cpu")) if r.producer == "tanh")

    one, ten = priced(1), priced(11)
    assert one < ten < 11 * one


def test_parts_of_a_value_are_priced_apart():
    """Each reads and writes its own; all of them need what is taken apart."""

    @jdelta.remat
    def unit(w, x):
        q, k, v = jnp.split(x @ w, 3, axis=1)
        return (q @ k.T) @ v

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 192), (64, 64)))
    where = published("cuda:h100")
    (region,) = trace(jax.grad(lambda w, x: jnp.sum(unit(w, x))), w, x).regions
    priced = residuals(region, where)
    product, *parts = [r for r in priced if r.shape in ((64, 192), (64, 64))][:4]
    assert [r.sources for r in parts] == [(product.name,)] * 3
    times = [r.seconds * where.rates.bandwidth / r.bytes for r in parts]
    assert times == pytest.approx([2.0] * 3)


def test_constants_of_calls_in_a_loop_are_no_inputs_of_its_body():
    def solve(w, y):
        return odeint(lambda y, t: jnp.tanh(y @ w), y, jnp.array([0.0, 1.0]))[-1].sum()

    graph = graph_of(jax.make_jaxpr(jax.grad(solve))(jnp.eye(4), jnp.ones((2, 4))))

    def constants(graph):
        count = len(graph.constants)
        for op in graph.operations:
            for body in op.bodies:
                count += constants(body)
                if op.primitive == "scan":
                    assert len(body.inputs) == len(op.inputs)
        return count

    assert constants(graph)
    assert timeline(graph, Compiler(backend_of("tpu"))).peak > 0


def test_what_is_made_of_an_array_that_a_call_holds_has_a_name_too():
    table = jnp.linspace(-1.0, 1.0, 64 * 256).reshape(64, 256)

    @jdelta.remat
    def layer(w, x):
        return jnp.tanh(jax.jit(lambda x: x * jnp.exp(table))(x) @ w)

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(layer(w, layer(w, x)) ** 2))(w)

    args = 0.1 * jnp.eye(256), jnp.ones((64, 256))
    plan = jdelta.plan(step, None, *args, pin={"*/exp": "recompute"})
    decisions = [d for name, d in plan.decisions.items() if name.endswith("/exp")]
    assert decisions == [Decision.RECOMPUTE] * 2
    assert jnp.allclose(plan.jit()(*args), step(*args), rtol=1e-6)


def in_loop(target, width=16):
    """Residuals of a loop over layers, on a target."""

    @jdelta.remat
    def layer(w, x):
        return jnp.sin(x @ w) @ w

    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0].sum()

    shapes = (6, width, width), (4096, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    (region,) = trace(jax.grad(loss), *args).regions
    return residuals(region, target)


def passes(target):
    """How often the bytes of a loop's residuals are moved for keeping them, by what makes them."""
    by_producer = {r.producer: r for r in in_loop(target)}
    return {p: r.holding * target.rates.bandwidth / r.bytes for p, r in by_producer.items()}


def test_gpus_pay_for_what_their_loops_keep():
    """Zeros first; what a product makes, or the iteration reads too, is copied there.

    What a product of the backward pass reads is copied from there too. Cosines, which nothing else
    would write, are written there at once.
    """
    where = published("cuda:h100")
    assert passes(where) == pytest.approx({"dot_general": 3.0, "sin": 5.0, "cos": 2.0})
    assert not any(r.holding for r in residuals_unrolled(where))


def test_loops_write_for_the_backward_pass_what_nothing_else_would():
    """A TPU's product computes the sine that it reads, as bfloat16; the cosine it does not."""
    where = published("tpu:v5e")
    assert passes(where) == pytest.approx({"dot_general": 0.0, "sin": 0.5, "cos": 1.0})
    assert not any(r.holding for r in residuals_unrolled(where))


def residuals_unrolled(target):
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    layer = jdelta.remat(lambda w, x: jnp.tanh(x @ w))
    step_trace = trace(jax.grad(lambda w, x: jnp.sum(layer(w, layer(w, x)))), shape, shape)
    return [r for region in step_trace.regions for r in residuals(region, target)]


def test_copies_in_loops_are_worth_it_for_wide_products_only():
    where = published("cuda:h100")
    for width, kept in ((64, False), (8192, True)):
        items = items_of(in_loop(where, width), where, 0.0, NO_PINS)
        problem = dataclasses.replace(items.problem, capacity=1e12)
        solution = Knapsack().solve(problem)
        nothing = problem.overhead([Decision.RECOMPUTE] * len(problem.items))
        assert (solution.kept_bytes > 0) == (solution.overhead < nothing) == kept
