"""The benchmark models have the published sizes, train, and are the same under any decorator."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import models

COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "densenet121": 7_978_856,
    "inception-v4": 42_679_816,
    "vit-b": 86_567_656,
    "vit-l": 304_326_632,
    "llama": 1_100_048_384,
    "llama3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "t5-large": 737_668_096,
    "unet": 31_030_593,
}

# Scanned where they can be, for speed; nano is the unrolled one. In full one of every family.
TRAINED = [
    ("nano", False),
    ("mlp", False),
    ("llama", True),
    ("t5-large", True),
    ("unet", False),
    pytest.param("bert-base", True, marks=pytest.mark.full),
    pytest.param("resnet50", False, marks=pytest.mark.full),
    pytest.param("vit-b", True, marks=pytest.mark.full),
    pytest.param("mixtral", False, marks=pytest.mark.full),
]
RECOMPUTED = [
    ("nano", False),
    ("gpt2", True),
    ("mlp", False),
    ("llama", True),
    ("t5-large", True),
    pytest.param("resnet50", False, marks=pytest.mark.full),
    pytest.param("mixtral", True, marks=pytest.mark.full),
]
SCANNED = ["nano", "bert-base", "vit-b", "llama", "mixtral", "t5-large"]


FEWER = {"nano": 2, "mlp": 3}
"""Layers of unrolled models, for speed: they have four and eight."""


def build(name, scan, **options):
    """A small case."""
    return models.build(name, small=True, scan=scan, layers=FEWER.get(name), **options)


@functools.cache
def draw(name, scan):
    """State and batch of a small case."""
    return jax.jit(build(name, scan).init)(0)


def shapes(name, **options):
    """Shapes of a case's state, with its layers in a loop where it can have them so, for speed."""
    return models.build(name, scan=hasattr(models.find(name), "scan"), **options).state


def count(params):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def assert_close(actual, expected):
    """Compares trees within 1e-5 of the largest value: some gradients are zero but for rounding."""
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * scale),
        actual,
        expected,
    )


@pytest.mark.parametrize("name", COUNTS)
def test_published_size(name):
    assert count(shapes(name).params) == COUNTS[name]


@pytest.mark.parametrize("name", SCANNED)
def test_scan_has_same_size(name):
    scanned, unrolled = (models.build(name, small=True, scan=scan).state for scan in (True, False))
    assert count(scanned.params) == count(unrolled.params)


@pytest.mark.parametrize("name", models.MODELS)
def test_small_keeps_structure(name):
    small, full = shapes(name, small=True), shapes(name)
    assert jax.tree.structure(small) == jax.tree.structure(full)
    assert count(small.params) < count(full.params) / 4


@pytest.mark.parametrize(("name", "scan"), TRAINED)
def test_loss_falls(name, scan):
    case = build(name, scan, **quiet(name))
    state, batch = draw(name, scan)
    step = jax.jit(case.step)
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]


def quiet(name):
    """Options that turn dropout off where there is any, so that few steps show progress."""
    return {} if name in {"resnet50", "mlp", "llama", "mixtral", "unet"} else {"dropout": 0.0}


def checkpoints(fun, *args):
    """How many `jax.checkpoint` its program has, made with `jax_remat3` or without."""
    return len(re.findall(r"remat2|RematTraced", str(jax.make_jaxpr(fun)(*args))))


@pytest.mark.parametrize(("name", "scan"), RECOMPUTED)
def test_recompute_changes_nothing(name, scan):
    plain = build(name, scan)
    recomputed = build(name, scan, remat=models.checkpoint(name))
    assert jax.tree.structure(recomputed.state) == jax.tree.structure(plain.state)
    state, batch = draw(name, scan)
    assert_close(jax.jit(recomputed.grads)(state, batch), jax.jit(plain.grads)(state, batch))
    assert checkpoints(recomputed.loss, state, batch) > 0


def test_scan_changes_nothing():
    scanned, unrolled = (build("nano", scan, dropout=0.0) for scan in (True, False))
    state, batch = draw("nano", scan=False)
    expected = jax.jit(unrolled.loss)(state, batch)
    stacked = state._replace(params=stack(state.params))
    np.testing.assert_allclose(jax.jit(scanned.loss)(stacked, batch), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_span_changes_nothing(name):
    plain = build(name, True, **quiet(name))
    nested = build(name, True, **quiet(name), span=2, remat=models.checkpoint(name))
    assert checkpoints(nested.loss, nested.state, nested.batch) == 2
    state, batch = draw(name, True)
    loss, grads = jax.jit(plain.grads)(state, batch)
    grouped = state._replace(params=shaped_like(nested.state.params, state.params))
    expected = loss, shaped_like(nested.state.params, grads)
    assert_close(jax.jit(nested.grads)(grouped, batch), expected)


def shaped_like(shapes, params):
    """The same values with the leading axis of stacked parameters split in two."""
    return jax.tree.map(lambda like, x: x.reshape(like.shape), shapes, params)


def stack(params):
    """Parameters of unrolled blocks as those of the scanned one."""
    names = sorted((name for name in params if name.startswith("h_")), key=lambda n: int(n[2:]))
    blocks = [params[name] for name in names]
    rest = {name: value for name, value in params.items() if name not in names}
    return {**rest, "h": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def test_dropout_depends_on_step():
    case = build("nano", scan=False)
    state, batch = draw("nano", scan=False)
    loss = jax.jit(case.loss)
    later = state._replace(step=state.step + 1)
    assert loss(state, batch) == loss(state, batch)
    assert loss(state, batch) != loss(later, batch)


def test_relative_positions_share_buckets_far_away():
    ahead = jnp.array([-200, -128, -127, -16, -8, -7, -1, 0, 1, 7, 8, 200])
    both = [15, 15, 15, 10, 8, 7, 1, 0, 17, 23, 24, 31]
    causal = [31, 31, 31, 16, 8, 7, 1, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(models.t5.bucket(ahead, 32, causal=False), both)
    np.testing.assert_array_equal(models.t5.bucket(ahead, 32, causal=True), causal)


def test_routing_sends_every_token_to_its_experts_while_there_is_room():
    config = dataclasses.replace(models.MODELS["mixtral"].small(), room=4.0)
    logits = jax.random.normal(jax.random.key(0), (3, 16, 8))
    weights = models.mixtral.route(config, logits)
    top, chosen = jax.lax.top_k(logits, 2)
    expected = jnp.sum(jax.nn.one_hot(chosen, 8) * jax.nn.softmax(top)[..., None], axis=2)
    np.testing.assert_allclose(weights.sum(-1), expected, rtol=1e-6)
    assert jnp.all((weights > 0).sum(1) <= 1), "two tokens at one place"


def test_routing_passes_over_who_finds_no_place():
    config = dataclasses.replace(models.MODELS["mixtral"].small(), room=1.0)
    logits = jnp.tile(jnp.arange(8.0), (1, 16, 1))
    weights = models.mixtral.route(config, logits)
    assert config.places == 4
    assert int((weights > 0).sum()) == 2 * 4
    assert jnp.all(weights[0, 4:] == 0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-base"])
def test_weight_decay_ignores_stacking(name):
    scanned, unrolled = (
        {str(path[-1]) for path, marked in flat(name, scan) if marked} for scan in (True, False)
    )
    assert scanned == unrolled
    assert not any("bias" in key or "norm" in key or "scale" in key for key in scanned)


def flat(name, scan):
    marks = models.case.matrices(models.build(name, scan=scan).state.params)
    return jax.tree_util.tree_leaves_with_path(marks)


def test_options_reach_the_model():
    case = models.build("gpt2", batch=3, length=64, dtype=jnp.bfloat16)
    assert case.batch["tokens"].shape == (3, 65)
    text = str(jax.make_jaxpr(case.loss)(case.state, case.batch))
    assert "bf16[3,64,768]" in text
    assert {leaf.dtype for leaf in jax.tree.leaves(case.state.params)} == {jnp.dtype("float32")}


def test_region_names_follow_modules():
    case = models.build("nano", small=True)
    text = jax.jit(case.loss).lower(case.state, case.batch).as_text(debug_info=True)
    assert "h_3/attn" in text
    assert "h_2/mlp/ff1" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gpt5"}, "unknown model 'gpt5'; known: gpt2"),
        ({"name": "resnet50", "scan": True}, "model 'resnet50' has no option scan"),
        ({"name": "resnet50", "dropout": 0.5}, "model 'resnet50' has no option dropout"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.build(**arguments)


def test_attention_matches_dense_attention():
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (2, 32, n, 8)) for key, n in zip(keys, (4, 2, 2), strict=False)
    )
    weights = jax.random.normal(keys[3], q.shape)

    def blockwise(q, k, v):
        return jnp.sum(weights * models.flash.attention(q, k, v, 8))

    def dense(q, k, v):
        return jnp.sum(weights * jax.nn.dot_product_attention(q, k, v, is_causal=True))

    assert_close(
        jax.value_and_grad(blockwise, (0, 1, 2))(q, k, v),
        jax.value_and_grad(dense, (0, 1, 2))(q, k, v),
    )
