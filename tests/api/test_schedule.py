"""Schedules of real steps: what is counted, and how they compare with what XLA does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdelta
from jdelta._src.backends.platforms import backend_of
from jdelta._src.backends.target import resolve
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.estimate.memory import timeline
from jdelta._src.hlo.text import parse
from jdelta._src.order import arena, arrange, compiled_problem, places_taken, problem_of
from jdelta._src.program.graph import graph_of
from tests.order_validate import complaints

F32 = jnp.float32
MIB = 2**20


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, F32)


def checked(problem, schedule):
    """A schedule's order and layout, by the checker."""
    placed = iter(schedule.placements)
    offsets = [next(placed).offset if t.bytes else 0 for t in problem.tensors]
    return complaints(problem, schedule.order, schedule.peak, offsets, schedule.arena)


def mlp(layers, width, batch, optimizer):
    """A step of an unrolled stack, with the shapes of its arguments."""

    def step(state, data):
        params, opt = state

        def loss(params):
            x = data
            for p in params:
                x = x + jnp.tanh(x @ p["in"]) @ p["out"]
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    params = [{"in": shape(width, 4 * width), "out": shape(4 * width, width)}] * layers
    return step, (params, jax.eval_shape(optimizer.init, params)), shape(batch, width)


def test_operators_write_their_results_in_full_where_nothing_is_fused():
    def step(x):
        return jnp.sum(jnp.exp(jnp.sin(x).reshape(1024, 256).T) * 2)

    schedule = jdelta.schedule(step, shape(512, 512), target="tpu:v5e:2x2", fused=False)
    assert list(schedule.operators) == ["sin", "exp", "mul", "reduce_sum"]
    assert schedule.timeline == (MIB, 2 * MIB, 2 * MIB, MIB + 4)
    assert schedule.peak == schedule.bound == 2 * MIB
    assert schedule.arena == pytest.approx(2 * MIB, abs=4)
    assert schedule.resident == MIB


def test_fused_operators_write_nothing():
    def step(x):
        return jnp.sum(jnp.exp(jnp.sin(x)) * 2)

    schedule = jdelta.schedule(step, shape(512, 512), target="tpu:v5e:2x2")
    assert schedule.operators == ("reduce_sum",)
    assert schedule.peak == 4


def test_results_take_the_place_of_donated_arguments():
    step, state, data = mlp(2, 64, 8, optax.adam(1e-3))
    kept = jdelta.schedule(step, state, data, target="tpu:v5e:2x2")
    donated = jdelta.schedule(step, state, data, target="tpu:v5e:2x2", donate_argnums=0)
    results = sum(x.size * 4 for x in jax.tree.leaves(state))
    assert donated.peak < results < kept.peak
    assert kept.resident == donated.resident > results


def test_donated_argument_is_read_before_its_place_is_taken():
    def step(w, x):
        new = w + 1.0
        return new, jnp.sin(w @ x)

    closed = jax.make_jaxpr(step)(shape(256, 256), shape(256, 256))
    graph = graph_of(closed)
    taken = places_taken(graph, graph.inputs[:1])
    assert taken == {graph.outputs[0]: graph.inputs[0]}
    problem = problem_of(graph, None, taken)
    assert problem.names == ("add", "dot_general", "sin")
    assert problem.peak(problem.program) == 3 * 2**18, "read later: it has a buffer of its own"

    def other(w, x):
        y = jnp.sin(w @ x)
        return w + 1.0, y

    graph = graph_of(jax.make_jaxpr(other)(shape(256, 256), shape(256, 256)))
    problem = problem_of(graph, None, places_taken(graph, graph.inputs[:1]))
    assert problem.names == ("dot_general", "sin", "add")
    assert problem.predecessors[2] == (0,)
    assert problem.peak(problem.program) == 2 * 2**18


def test_updates_run_early_and_sets_of_gradients_are_never_there_at_once():
    step, state, data = mlp(12, 64, 4, optax.adam(1e-3))
    schedule = jdelta.schedule(
        step, state, data, target="tpu:v5e:2x2", donate_argnums=0, fused=False
    )
    gradients = sum(x.size * 4 for x in jax.tree.leaves(state[0]))
    assert schedule.program_peak > 2 * gradients
    assert schedule.bound <= schedule.peak < gradients / 4
    assert schedule.arena <= 1.01 * schedule.peak


def test_body_of_a_loop_is_taken_while_the_loop_runs():
    def step(ws, x):
        def body(x, w):
            return jnp.tanh(jnp.sin(x @ w) @ w.T), None

        return jax.lax.scan(body, x, ws)[0]

    schedule = jdelta.schedule(step, shape(4, 256, 256), shape(256, 256), target="cpu", fused=False)
    assert schedule.operators == ("scan",)
    assert {p.kind: p.bytes for p in schedule.placements} == {
        "float32[256,256]": 2**18,
        "inside": 2 * 2**18,
    }


def test_effects_stay_in_their_order():
    def step(x):
        jax.debug.print("{}", jnp.sum(x))
        y = jnp.sin(x)
        jax.debug.print("{}", jnp.max(y))
        return y

    problem = problem_of(graph_of(jax.make_jaxpr(step)(shape(8))), None)
    prints = [i for i, name in enumerate(problem.names) if "debug" in name]
    assert len(prints) == 2
    assert prints[0] in problem.predecessors[prints[1]]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_program_order_needs_what_the_simulation_says(platform):
    step, state, data = mlp(3, 64, 64, optax.sgd(0.1))
    graph = graph_of(jax.make_jaxpr(step)(state, data))
    compiler = Compiler(backend_of(platform))
    problem = problem_of(graph, compiler)
    results = sum(t.bytes for t in problem.tensors if t.kept)
    simulated = timeline(graph, compiler).peak
    assert simulated <= problem.peak(problem.program) <= simulated + results


def test_table_says_what_sets_the_peak():
    step, state, data = mlp(2, 64, 8, optax.adam(1e-3))
    schedule = jdelta.schedule(step, state, data, target="tpu:v5e:2x2", donate_argnums=0)
    text = str(schedule)
    assert "no order needs less than" in text
    assert schedule.at_peak[0].operator in text
    assert sum(p.bytes for p in schedule.at_peak) == schedule.peak


def test_same_step_same_schedule():
    step, state, data = mlp(3, 64, 8, optax.adam(1e-3))
    one, two = (jdelta.schedule(step, state, data, target="cpu") for _ in range(2))
    assert one == two


# --- Compiled programs ------------------------------------------------------------------------


def compiled_step(layers, width, batch):
    step, state, data = mlp(layers, width, batch, optax.adam(1e-3))
    return jax.jit(step, donate_argnums=0).lower(state, data).compile()


def test_compiled_program_is_compared_with_what_the_compiler_allocates():
    compiled = compiled_step(4, 128, 512)
    schedule = jdelta.schedule(compiled)
    assert schedule.bound <= schedule.peak <= schedule.program_peak
    assert schedule.resident == compiled.memory_analysis().argument_size_in_bytes
    assert schedule.allocated == pytest.approx(schedule.program_peak, rel=0.1)
    assert "over what the compiler's order needs" in str(schedule)
    problem, argument_bytes = compiled_problem(parse(compiled.as_text()))
    arena = dataclasses.replace(
        schedule, peak=schedule.peak + argument_bytes, arena=schedule.arena + argument_bytes
    )
    assert checked(problem, arena) == []


def test_compiled_step_has_its_arguments():
    with pytest.raises(TypeError, match="a compiled step has its arguments"):
        jdelta.schedule(compiled_step(1, 8, 8), shape(8))


LOOP = """HloModule loop, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%body (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1024]{0} get-tuple-element(%p), index=1
  %a = f32[1024]{0} custom-call(%x), custom_call_target="a"
  %b = f32[1024]{0} custom-call(%a), custom_call_target="b"
  ROOT %t = (s32[], f32[1024]{0}) tuple(%i, %b)
}

%condition (p: (s32[], f32[1024])) -> pred[] {
  %p = (s32[], f32[1024]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (w: f32[1024], v: f32[4,1024]) -> (f32[1024], f32[4,1024]) {
  %w = f32[1024]{0} parameter(0)
  %v = f32[4,1024]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %copy = f32[1024]{0} copy(%w)
  %host = f32[1024]{0:S(5)} copy(%copy)
  %start = (s32[], f32[1024]{0}) tuple(%zero, %copy)
  %loop = (s32[], f32[1024]{0}) while(%start), condition=%condition, body=%body
  %out = f32[1024]{0} get-tuple-element(%loop), index=1
  %new = f32[1024]{0} add(%w, %out)
  %rows = f32[4,1024]{1,0} copy(%v)
  %row = f32[1,1024]{1,0} bitcast(%out)
  %put = f32[4,1024]{1,0} dynamic-update-slice(%rows, %row, %zero, %zero)
  ROOT %both = (f32[1024]{0}, f32[4,1024]{1,0}) tuple(%new, %put)
}
"""


def test_buffers_of_a_compiled_program():
    """A loop works in place; host memory, bodies' results and aliased results take nothing."""
    problem, argument_bytes = compiled_problem(parse(LOOP))
    assert argument_bytes == 0
    row = 4096
    sizes = {problem.names[t.maker]: t.bytes for t in problem.tensors}
    assert sizes == {"copy": row, "loop": row, "rows": 4 * row}
    order = dict(zip(problem.names, problem.timeline(problem.program).tolist(), strict=True))
    assert order == {
        "arguments": 0,
        "copy": row,
        "host": row,
        "loop": 2 * row,
        "new": row,
        "rows": 5 * row,
        "put": 5 * row,
    }
    assert arrange(problem).peak == 5 * row


def problem_in(text, **changes):
    """The problem of a compiled program, with lines changed; sizes by operator; bytes given."""
    for line, changed in changes.values():
        assert line in text
        text = text.replace(line, changed)
    problem, argument_bytes = compiled_problem(parse(text))
    sizes = {problem.names[t.maker]: t.bytes for t in problem.tensors}
    return problem, sizes, argument_bytes


FUSION = """HloModule fusion, is_scheduled=true

%inner (p: f32[64,16], q: f32[1024]) -> f32[16,64] {
  %p = f32[64,16]{1,0} parameter(0)
  %q = f32[1024]{0} parameter(1)
  %flat = f32[1024]{0} bitcast(%p)
  %sum = f32[1024]{0} add(%flat, %q)
  ROOT %r = f32[16,64]{1,0} bitcast(%sum)
}

ENTRY %main (w: f32[64,16], v: f32[1024]) -> f32[] {
  %w = f32[64,16]{1,0} parameter(0)
  %v = f32[1024]{0} parameter(1)
  %a = f32[64,16]{1,0} copy(%w)
  %b = f32[16,64]{1,0} fusion(%a, %v), kind=kLoop, calls=%inner
  ROOT %c = f32[] custom-call(%b), custom_call_target="c"
}
"""


def test_a_fusion_writes_over_an_operand_that_it_reads_in_step():
    assert problem_in(FUSION)[1] == {"a": 4096, "c": 4}
    turned = ("%flat = f32[1024]{0} bitcast(%p)", "%flat = f32[1024]{0} transpose(%p)")
    assert problem_in(FUSION, turned=turned)[1] == {"a": 4096, "b": 4096, "c": 4}
    later = ("custom-call(%b), custom", "custom-call(%b, %a), custom")
    assert problem_in(FUSION, later=later)[1] == {"a": 4096, "b": 4096, "c": 4}


DONATED = """HloModule donated, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }

ENTRY %main (w: f32[1024], v: f32[1024]) -> f32[1024] {
  %w = f32[1024]{0} parameter(0)
  %v = f32[1024]{0} parameter(1)
  %a = f32[2048]{0} custom-call(%w), custom_call_target="a"
  %b = f32[1024]{0} custom-call(%a), custom_call_target="b"
  ROOT %c = f32[1024]{0} custom-call(%b), custom_call_target="c"
}
"""


def test_a_result_is_written_over_a_temporary_in_its_place():
    done = ('custom-call(%b), custom_call_target="c"', "add(%b, %v)")
    problem, sizes, argument_bytes = problem_in(DONATED, done=done)
    assert argument_bytes == 4096
    assert sizes == {"arguments": 4096, "a": 2 * 4096, "b": 4096}
    assert [t.kept for t in problem.tensors if t.maker == 2] == [True]


def test_a_donated_argument_leaves_room_until_its_result_comes():
    problem, _, argument_bytes = problem_in(DONATED)
    assert argument_bytes == 4096
    allocated = (problem.timeline(problem.program) - argument_bytes).tolist()
    assert allocated == [0, 2 * 4096, 2 * 4096, 4096]
    read = ("custom-call(%b), custom", "custom-call(%b, %w), custom")
    problem, sizes, argument_bytes = problem_in(DONATED, read=read)
    assert argument_bytes == 0, "the result is written over it by its last reader"
    assert sizes == {"a": 2 * 4096, "b": 4096}


MOVED = """HloModule moved, is_scheduled=true

ENTRY %main (w: f32[1024], v: f32[1024]) -> f32[1024] {
  %w = f32[1024]{0:T(1024)} parameter(0)
  %a = f32[1024]{0:T(1024)} custom-call(%w), custom_call_target="a"
  %start = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) copy-start(%a)
  %done = f32[1024]{0:T(1024)S(1)} copy-done(%start)
  %b = f32[1024]{0:T(1024)S(1)} custom-call(%done), custom_call_target="b"
  ROOT %c = f32[1024]{0:T(1024)} custom-call(%b), custom_call_target="c"
}
"""


def test_what_moves_to_the_chip_is_counted_once():
    _, sizes, _ = problem_in(MOVED)
    assert sizes == {"a": 4096, "start": 4, "b": 4096, "c": 4096}


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("target", "layers", "batch"),
    [("cuda:h100", 4, 16384), ("cuda:h100", 12, 64), ("tpu:v5e:2x2", 4, 16384)],
)
def test_xla_allocates_what_its_own_order_needs(target, layers, batch):
    """With few rows temporaries lie in the places of weights, and weights on their gradients."""
    pytest.importorskip("jax_plugins.xla_cuda13" if "cuda" in target else "libtpu")
    step, state, data = mlp(layers, 512, batch, optax.adam(1e-3))
    where = resolve(target)
    args = where.abstract((state, data))
    lowered = jax.jit(step, donate_argnums=0).trace(*args)
    schedule = jdelta.schedule(lowered.lower(lowering_platforms=(where.platform,)).compile())
    assert schedule.allocated == pytest.approx(schedule.program_peak, rel=0.1)
    assert schedule.peak <= schedule.program_peak


def test_arena_of_nothing():
    assert arena(np.zeros(0, np.int64), np.zeros(0, np.int64)) == 0
