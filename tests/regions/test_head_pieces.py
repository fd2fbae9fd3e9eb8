"""The head of a model and its loss in pieces of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdelta
from jdelta._src import _jax
from jdelta._src.regions.find import tracing
from jdelta._src.regions.head_axes import head_of
from jdelta._src.regions.head_pieces import in_pieces, is_in_pieces
from jdelta._src.regions.region import Grouping, Session
from jdelta._src.regions.trace import trace
from jdelta._src.search.rules import head_pieces
from tests.compilers import TARGETS

BATCH, LENGTH, WIDTH, WORDS = 2, 8, 4, 32
PIECES = 4

integer_loss = optax.softmax_cross_entropy_with_integer_labels


def logsumexp(logits):
    return jax.nn.logsumexp(logits, -1)


def chosen(logits, y):
    return jnp.take_along_axis(logits, y[..., None], -1)[..., 0]


def by_optax(w, x, y):
    return integer_loss((x @ w).astype(jnp.float32), y).mean()


def by_one_hot(w, x, y):
    logits = jnp.einsum("btd,dv->btv", x, w)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(y, WORDS), -1))


def of_flat_tokens(w, x, y):
    logits = (x @ w).reshape(-1, WORDS)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y.reshape(-1, 1), 1).mean()


def with_cap_and_mask(w, x, y):
    logits, mask = 30 * jnp.tanh((x @ w) / 30), y > 0
    return jnp.sum((logsumexp(logits) - chosen(logits, y)) * mask) / jnp.maximum(mask.sum(), 1)


def with_smooth_labels(w, x, y):
    labels = optax.smooth_labels(jax.nn.one_hot(y, WORDS), 0.1)
    return optax.softmax_cross_entropy(x @ w, labels).mean()


def with_z_loss(w, x, y):
    """Two sums over tokens, of which the loss is a sum."""
    logits = x @ w
    return integer_loss(logits, y).mean() + 1e-3 * jnp.mean(logsumexp(logits) ** 2)


def shifted_with_a_bias(w, x, y):
    logits = x[:, :-1] @ w + 0.1 * jnp.arange(WORDS)
    return integer_loss(logits, y[:, 1:]).mean()


def of_transposed_weights(w, x, y):
    return integer_loss(jnp.einsum("btd,vd->btv", x, w.T), y).mean()


def of_shifted_logits(w, x, y):
    """All tokens have logits, and the last of each sequence no loss."""
    return integer_loss((x @ w)[:, :-1], y[:, 1:]).mean()


def by_weights_first(w, x, y):
    """As ``jnp.einsum("vd,btd->btv", ...)`` comes out: the product's first operand is no token."""
    logits = jnp.moveaxis(jnp.tensordot(w.T, x, (1, 2)), 0, -1)
    return integer_loss(logits, y).mean()


def over_tokens(w, x, y):
    """A softmax over the tokens of each word, as contrastive losses have it: words fall apart."""
    return -jnp.mean(jax.nn.log_softmax((x @ w).reshape(-1, WORDS), 0) * jnp.arange(WORDS))


def with_metrics(w, x, y):
    """Accuracy, and the loss of each token, beside the loss."""
    logits = x @ w
    losses = integer_loss(logits, y)
    return losses.mean(), (losses, jnp.mean(jnp.argmax(logits, -1) == y))


def in_bfloat16(w, x, y):
    logits = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return integer_loss(logits.astype(jnp.float32), y).mean()


def summed_in_bfloat16(w, x, y):
    """A sum that is rounded at its end, not after each piece."""
    return jnp.sum(integer_loss(x @ w, y).astype(jnp.bfloat16)).astype(jnp.float32)


def plus_another_loss(w, x, y):
    return by_optax(w, x, y) + 0.1 * jnp.sum(x**2)


def with_another_product(w, x, y):
    """What is summed is a product of the logits."""
    return jnp.sum((jax.nn.softmax(x @ w) @ w.T) ** 2)


LOSSES = [
    *(by_optax, by_one_hot, of_flat_tokens, with_cap_and_mask, with_smooth_labels, with_z_loss),
    *(shifted_with_a_bias, of_shifted_logits, of_transposed_weights, by_weights_first),
    *(over_tokens, with_metrics, in_bfloat16, summed_in_bfloat16),
    plus_another_loss,
    with_another_product,
]


def normalised_by_its_sum(w, x, y):
    """What each token counts depends on all others."""
    losses = integer_loss(x @ w, y)
    return jnp.sum(losses**2) / jnp.sum(losses) + jnp.sum(losses / jnp.sum(losses) * losses)


def over_tokens_and_words(w, x, y):
    """A softmax over all there is."""
    return -jnp.mean(jax.nn.log_softmax((x @ w).reshape(-1))[::7])


def root_of_a_product(w, x, y):
    """Two sums with derivatives, multiplied."""
    logits = x @ w
    return jnp.sum(logits**2) * jnp.sum(jnp.cos(logits))


def giving_logits(w, x, y):
    logits = x @ w
    return integer_loss(logits, y).mean(), logits


def in_float16(w, x, y):
    logits = x.astype(jnp.float16) @ w.astype(jnp.float16)
    return integer_loss(logits.astype(jnp.float32), y).mean()


WHOLE = [
    *(normalised_by_its_sum, over_tokens_and_words, root_of_a_product, giving_logits, in_float16),
]


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    return (
        jax.random.normal(keys[0], (WIDTH, WIDTH)),
        jax.random.normal(keys[1], (WIDTH, WORDS)),
        jax.random.normal(keys[2], (WORDS, WIDTH)),
        jax.random.randint(keys[3], (BATCH, LENGTH), 0, WORDS),
    )


def training_step(loss, *, marked=False):
    """A block between an embedding and the head."""
    block = lambda k, x: x + jnp.tanh(x @ k)  # noqa: E731
    block = jdelta.remat(block) if marked else block

    def step(k, w, table, y):
        def of(k, w, table):
            result = loss(w, block(k, table[y]), y)
            return result if isinstance(result, tuple) else (result, ())

        return jax.value_and_grad(of, (0, 1, 2), has_aux=True)(k, w, table)

    return step


def pieced(step, *, automatic=True):
    """The step with its head in pieces."""

    def run(*args):
        session = Session(automatic=automatic, grouping=Grouping(1, pieces=PIECES))
        with tracing(session, *args):
            return step(*args)

    return run


def assert_equal(got, expected, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(np.abs(b).max()))


def staged(loss):
    _, w, table, y = arguments()
    return _jax.inline(jax.make_jaxpr(lambda w, x: loss(w, x, y))(w, table[y]))


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_equal_the_plain_step(loss):
    args, tolerance = arguments(), 2e-2 if "bfloat16" in loss.__name__ else 2e-6
    for marked in (False, True):
        step = training_step(loss, marked=marked)
        run = pieced(step, automatic=not marked)
        assert_equal(jax.jit(run)(*args), jax.jit(step)(*args), tolerance)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_array_of_all_logits_is_made(loss):
    program = in_pieces(staged(loss), PIECES)
    assert sum(map(is_in_pieces, program.eqns)) == 1
    largest = max(_jax.bytes_of(v) for eqn in _jax.equations(program) for v in eqn.outvars)
    assert largest <= BATCH * LENGTH * WORDS * 4 // 2
    assert head_of(staged(loss), PIECES).pieces > 1


@pytest.mark.parametrize("loss", WHOLE)
def test_heads_that_stay_whole(loss):
    assert head_of(staged(loss), PIECES) is None
    args, step = arguments(), training_step(loss)
    assert_equal(jax.jit(pieced(step))(*args), jax.jit(step)(*args), 1e-3)


def test_a_loss_of_single_tokens_that_is_differentiated_stays_whole():
    """The derivative of one token's loss is asked for, not that of the sum."""

    def step(k, w, table, y):
        def of(w):
            losses = integer_loss(table[y] @ w, y)
            return jnp.mean(losses) + jnp.max(losses)

        return jax.grad(of)(w)

    step_trace = trace(step, *arguments(), grouping=Grouping(1, pieces=PIECES))
    assert step_trace.fingerprint
    assert_equal(jax.jit(step)(*arguments()), step(*arguments()))


def test_two_heads_are_both_in_pieces():
    """As models that foretell two tokens have them, or an auxiliary loss."""

    def loss(w, x, y):
        return by_optax(w, x, y) + 0.5 * with_z_loss(w[:, ::-1], jnp.cos(x), y)

    program = in_pieces(staged(loss), PIECES)
    assert sum(map(is_in_pieces, program.eqns)) == 2
    args, step = arguments(), training_step(loss)
    assert_equal(jax.jit(pieced(step))(*args), jax.jit(step)(*args))


def test_under_vmap_and_scaled():
    """Each example's gradient, and a loss that is scaled behind the sum."""

    def step(w, x, y):
        def of(w, x, y):
            return 1024.0 * by_optax(w, x[None], y[None])

        return jax.vmap(jax.grad(of), (None, 0, 0))(w, x, y)

    _, w, table, y = arguments()
    args = w, table[y], y
    assert_equal(jax.jit(pieced(step))(*args), jax.jit(step)(*args))


def test_how_many_pieces():
    args = arguments()
    small = trace(training_step(by_optax), *args).head
    assert (small.bytes, small.tokens) == (BATCH * LENGTH * WORDS * 4, BATCH * LENGTH)
    assert head_pieces(small, 1 << 10) == [], "too few tokens"
    turned = trace(training_step(by_weights_first), *args).head
    assert (turned.bytes, turned.tokens) == (small.bytes, small.tokens)
    assert head_pieces(None, 1 << 10) == []
    large = type(small)(bytes=1 << 30, tokens=8192)
    assert head_pieces(large, 4 << 30) == [6, 16]
    assert head_pieces(large, 1 << 30) == [16]
    assert head_pieces(large, 40 << 30) == [], "no large part of the budget"


# Plans


def language_model(rows, width, words):
    """Two layers and a head; nothing is marked."""

    def step(params, y):
        def loss(params):
            x = params["table"][y]
            for k in params["layers"]:
                x = x + jnp.tanh(x @ k)
            return integer_loss(x @ params["head"], y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {
        "table": jnp.full((words, width), 0.1),
        "layers": [jnp.eye(width) * 0.1] * 2,
        "head": jnp.full((width, words), 0.01),
    }
    return step, (params, jnp.arange(rows * 256).reshape(rows, 256) % words)


@pytest.fixture(scope="module")
def planned():
    """Logits are 32 MiB of float32; a budget of half of what the plain step takes."""
    step, args = language_model(16, 16, 2048)
    return step, args, jdelta.plan(step, 0.5, *args)


def test_a_plan_makes_the_head_in_pieces(planned, tmp_path):
    step, args, plan = planned
    assert plan.compiled_peak <= plan.budget
    assert plan.grouping.pieces == 8
    assert "pieces of tokens" in " ".join(str(plan).split())
    assert_equal(plan.jit()(*args), jax.jit(step)(*args))
    plan.save(str(tmp_path / "plan.json"))
    loaded = jdelta.load(str(tmp_path / "plan.json"))
    assert loaded == plan
    assert_equal(loaded.jit(step)(*args), plan.jit()(*args))
    assert "in pieces of tokens" in plan.answer.nesting, "no policy can"


def test_in_a_loop_over_micro_batches(planned):
    step, (params, y), _ = planned

    def accumulated(params, y):
        def add(total, part):
            changed, value = step(params, part)
            return jax.tree.map(jnp.add, total, changed), value

        return jax.lax.scan(add, params, y.reshape(2, -1, y.shape[1]))

    plan = jdelta.plan(accumulated, 0.6, params, y)
    assert plan.grouping.pieces
    assert plan.compiled_peak <= plan.budget
    assert_equal(plan.jit()(params, y), jax.jit(accumulated)(params, y))


def test_pieces_are_tried_where_a_compiler_undoes_other_plans():
    """A larger budget was refused, and a smaller one met: recompute was predicted to be enough."""

    def step(params, y):
        def loss(params):
            logits = jnp.tanh(params["table"][y]) @ params["head"]
            return -jnp.mean(jnp.sum(jax.nn.one_hot(y, 2048) * jax.nn.log_softmax(logits), -1))

        return jax.value_and_grad(loss)(params)

    keys = jax.random.split(jax.random.key(0))
    shapes = {"table": (2048, 16), "head": (16, 2048)}
    params = {n: jax.random.normal(k, s) for (n, s), k in zip(shapes.items(), keys, strict=True)}
    y = jnp.arange(16 * 256).reshape(16, 256) % 2048
    for budget in (0.7, 0.5):
        plan = jdelta.plan(step, budget, params, y)
        assert plan.compiled_peak <= plan.budget
        assert_equal(plan.jit()(params, y), jax.jit(step)(params, y))


def test_the_head_stays_whole_where_it_fits_or_is_asked_for(planned):
    step, args, _ = planned
    assert jdelta.plan(step, 1.0, *args).grouping.pieces == 0
    with pytest.raises(jdelta.BudgetError):
        jdelta.plan(step, 0.3, *args, per_layer=False)
    assert jdelta.plan(step, 0.3, *args).grouping.pieces == 8


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
def test_four_fifths_of_the_logits_go(target):
    """By the compilers for accelerators: logits are 256 MiB."""
    step, args = language_model(16, 256, 16384)
    shapes = jax.eval_shape(lambda: args)
    options = {"target": target, "host_budget": 0, "donate_argnums": 0}
    plain = jdelta.plan(step, "4GiB", *shapes, **options)
    budget = plain.compiled_peak - (205 << 20)
    tight = jdelta.plan(step, budget, *shapes, **options)
    assert tight.grouping.pieces
    assert tight.compiled_peak <= budget


def test_tokens_that_are_cut_over_devices():
    """A piece of them would have to be gathered; a vocabulary may be cut."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    step, (params, y) = language_model(16, 16, 2048)
    cut = jax.device_put(y, jax.NamedSharding(mesh, jax.P("x")))
    assert trace(step, params, cut).head is None

    def weights_first(params, y):
        x = jnp.tanh(params["table"][y])
        return jax.grad(lambda w: by_weights_first(w, x, y))(params["head"])

    assert trace(weights_first, params, cut).head is None
    places = {"table": jax.P(), "layers": [jax.P()] * 2, "head": jax.P(None, "x")}
    placed = jax.tree.map(
        lambda p, place: jax.device_put(p, jax.NamedSharding(mesh, place)), params, places
    )
    on_all = jax.device_put(y, jax.NamedSharding(mesh, jax.P()))
    plan = jdelta.plan(step, 0.5, placed, on_all)
    assert plan.grouping.pieces
    assert plan.compiled_peak <= plan.budget
    assert_equal(plan.jit()(placed, on_all), jax.jit(step)(placed, on_all))
