"""Names that users know: modules, by scopes or by the tree of weights, alike in all layers."""

import importlib.util
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jdelta
from jdelta import Decision
from jdelta._src.program.names import inner_path
from jdelta._src.regions.modules import module_paths
from jdelta._src.report.rows import rows
from jdelta._src.report.terminal import WIDTH, aligned
from tests.frameworks import LAYERS, STEPS, keras, penzai
from tests.planning import decided

DEPTH = 4


def names(step, *args):
    """The names of the step's residuals by region, without the region's."""
    step_trace, priced, _ = decided(step, lambda *_: "save", *args)
    by_region = {region.name: set() for region in step_trace.regions}
    for r in priced:
        by_region[r.region].add(r.name.removeprefix(f"{r.region}/"))
    return by_region


def norm(p, x):
    return p["scale"] * (x - jnp.mean(x, -1, keepdims=True)) + p["bias"]


def layer(p, x):
    h = norm(p["ln_1"], x)
    q, k, v = jnp.split(h @ p["attn"]["qkv"]["kernel"], 3, -1)
    x = x + (jax.nn.softmax(q @ k.T) @ v) @ p["attn"]["proj"]["kernel"]
    h = jnp.tanh(norm(p["ln_2"], x) @ p["mlp"]["up"]["kernel"])
    return x + h @ p["mlp"]["down"]["kernel"]


def loss(params, tokens):
    x = params["wte"]["embedding"][tokens] * 3.0 + params["wpe"]["embedding"]
    for p in params["h"]:
        x = layer(p, x)
    logits = norm(params["ln_f"], x) @ params["wte"]["embedding"].T
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])


def ones(*shape):
    return 0.1 * jnp.ones(shape)


def transformer(width=32, length=64, vocabulary=48):
    """Parameters and tokens; the values between layers are the smallest ones."""

    def normed():
        return {"scale": ones(width), "bias": ones(width)}

    def one():
        attn = {"qkv": {"kernel": ones(width, 3 * width)}, "proj": {"kernel": ones(width, width)}}
        mlp = {"up": {"kernel": ones(width, 4 * width)}, "down": {"kernel": ones(4 * width, width)}}
        return {"ln_1": normed(), "attn": attn, "ln_2": normed(), "mlp": mlp}

    sizes = {"wte": vocabulary, "wpe": length}
    embeddings = {name: {"embedding": ones(n, width)} for name, n in sizes.items()}
    tokens = jnp.arange(length) % vocabulary
    return {**embeddings, "h": [one() for _ in range(DEPTH)], "ln_f": normed()}, tokens


def by_layer(by_region):
    """The names of each layer's values, without its number."""
    layers = [set() for _ in range(DEPTH)]
    for region, inner in by_region.items():
        head, *rest = region.split("/")
        if head == "h":
            number, *rest = rest
            layers[int(number)] |= {"/".join([*rest, name]) for name in inner}
    return layers


def test_layers_are_called_like_their_modules():
    layers = by_layer(names(jax.grad(loss), *transformer()))
    expected = {"attn/qkv/dot_general", "attn/exp", "mlp/up/dot_general", "mlp/tanh"}
    assert all(expected <= layer for layer in layers)


def test_the_first_and_the_last_layer_have_the_names_of_the_others():
    first, *others, last = by_layer(names(jax.grad(loss), *transformer()))
    assert all(layer == others[0] for layer in others)
    assert others[0] <= first
    assert others[0] <= last
    assert not any(name.startswith("h/") for name in first | others[0] | last)


def test_weights_that_are_not_trained_have_modules_too():
    """As under LoRA: the differentiated function closes over what is frozen."""

    def adapted(adapters, frozen, x):
        for a, p in zip(adapters, frozen["h"], strict=True):
            x = x + jnp.cos(jnp.tanh(x @ p["up"]["kernel"] + a["down"] * 2.0))
        return jnp.sum(x**2)

    adapters = [{"down": ones(32)} for _ in range(DEPTH)]
    frozen = {"h": [{"up": {"kernel": ones(32, 32)}} for _ in range(DEPTH)]}
    by_region = names(jax.grad(adapted), adapters, frozen, ones(64, 32))
    assert set(by_region) == {f"h/{i}/up" for i in range(DEPTH)}


def test_scopes_of_the_user_stand_before_the_places_of_weights():
    def scoped(params, x):
        for p in params["h"]:
            with jax.named_scope("mine"):
                x = jnp.tanh(x @ p["kernel"])
        return jnp.sum(x)

    params = {"h": [{"kernel": ones(32, 32)} for _ in range(DEPTH)]}
    by_region = names(jax.grad(scoped), params, ones(64, 32))
    assert all(region.startswith("mine") for region in by_region)


def test_the_users_checkpoints_are_not_compared_with_what_is_between_them():
    def blk(x, w):
        return x + jnp.tanh(jnp.sin(x @ w) @ w)

    def loss(ws, x):
        for i in range(3):
            x = jax.checkpoint(blk)(x, ws[i])
        return jnp.mean(x**2)

    args = jnp.ones((3, 8, 8)), jnp.ones((4, 8))
    plan = jdelta.plan(jax.grad(loss), None, *args, pin={"*": "recompute"})
    assert {"blk_0/sin", "blk_1/sin", "blk_2/tanh"} <= {r.name for r in plan.residuals}


def test_a_formula_names_no_region():
    def of_sums(params, x):
        for p in params:
            x = x + jnp.tanh(jnp.einsum("bi,ij->bj", x, p))
        return jnp.sum(x)

    params = [ones(32, 32) for _ in range(DEPTH)]
    by_region = names(jax.grad(of_sums), params, ones(64, 32))
    assert len(by_region) == DEPTH
    assert not any("->" in region for region in by_region)
    assert all(any("bi,ij->bj" in name for name in names) for names in by_region.values())


def test_rows_of_a_scan_have_the_modules_of_their_stacks():
    def scanned(params, x):
        def body(x, p):
            return x + jnp.tanh(x @ p["mlp"]["kernel"]), None

        return jnp.sum(lax.scan(body, x, params["h"])[0])

    params = {"h": {"mlp": {"kernel": ones(DEPTH, 32, 32)}}}
    assert list(names(jax.grad(scanned), params, ones(64, 32))) == ["h/mlp"]


@pytest.mark.parametrize(
    ("tree", "module"),
    [
        ({"params": {"h": [{"mlp": {"kernel": 1}}]}}, ("h", "0", "mlp")),
        ({"h": {"kernel": 1}}, ("h",)),
        ([{"kernel": 1}], ("layer", "0")),
        ({"gpt/~/h_0/linear": {"w": 1}}, ("gpt", "h_0", "linear")),
        ({"kernel": 1}, ()),
        (1, ()),
    ],
)
def test_the_module_of_a_leaf(tree, module):
    assert module_paths((tree,), depth=1) == [module]


@pytest.mark.parametrize(
    ("path", "base", "inner"),
    [
        ("h/0/mlp", "h/0", "mlp"),
        ("h_0/mlp", "model/h_0", "mlp"),
        ("h/0/ln", "h/0/attn", "ln"),
        ("h/1/mlp", "h/0/attn", "1/mlp"),
        ("wte", "h/0", "wte"),
    ],
)
def test_no_root_twice(path, base, inner):
    split = (tuple(text.split("/")) for text in (path, base))
    assert "/".join(inner_path(*split)) == inner


UNROLLED = {
    "plain JAX": ("region_{}", {"dot_general", "tanh", "dot_general_1", "tanh_1"}),
    "Flax Linen": ("LinenStack/LinenBlock_{}", {"Dense_0/dot_general", "Dense_1/dot_general"}),
    "Flax NNX": ("blocks/{}", {"up/dot_general", "tanh", "down/dot_general", "tanh_1"}),
    "Equinox": ("layer/{}", {"up/dot_general", "tanh", "down/dot_general", "tanh_1"}),
    "Haiku": ("region_{}", {"tanh", "tanh_1"}),
}


@pytest.mark.parametrize("framework", UNROLLED)
def test_every_framework_has_its_own_names(framework):
    region, inner = UNROLLED[framework]
    step, args = STEPS[framework](64, 32, scan=False)
    by_region = names(step, *args)
    assert list(by_region) == [region.format(i) for i in range(LAYERS)]
    assert all(inner <= layer for layer in by_region.values())


MORE = [
    (keras, "region_3", "dense_6/dot_general", "dense_7/tanh"),
    (penzai, "block_3", "up/Linear/dot_general", "tanh_1"),
]
"""Frameworks that are not in the matrix, with two names of the fourth layer's."""


@pytest.mark.parametrize(("framework", "region", "product", "last"), MORE)
def test_frameworks_that_are_not_in_the_matrix_have_names_too(framework, region, product, last):
    if importlib.util.find_spec(framework.__name__) is None:
        pytest.skip("not installed")
    step, args = framework(64, 32)
    step_trace, priced, _ = decided(step, lambda *_: "save", *args)
    assert len(step_trace.regions) == LAYERS
    assert {f"{region}/{product}", f"{region}/{last}"} <= {r.name for r in priced}
    assert all(r.line.startswith("frameworks.py:") for r in priced)


@pytest.fixture(scope="module")
def plan():
    params, tokens = transformer(64, 512)
    return jdelta.plan(jax.grad(loss), None, params, tokens)


def test_every_row_has_its_line(plan):
    assert all(r.line.startswith("test_names.py:") for r in plan.residuals)
    text = str(plan.explain("h/1/mlp/tanh")[0])
    source, first = inspect.getsourcelines(layer)
    number = next(i for i, line in enumerate(source) if "tanh" in line)
    assert f"computed at test_names.py:{first + number}" in text


def test_what_jax_has_traced_before_is_where_it_is_called_now():
    def two(ws, x):
        y = jax.nn.gelu(x @ ws[0])
        z = jax.nn.gelu(y @ ws[1])
        return jnp.sum(z @ ws[2])

    priced = decided(jax.grad(two), lambda *_: "save", [ones(32, 32)] * 3, ones(64, 32))[1]
    lines = {r.line for r in priced if r.name.endswith(("tanh", "tanh_1"))}
    assert len(lines) == 2


def test_the_table_fits_a_hundred_columns(plan):
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any(line.startswith("h/*/mlp/tanh ") for line in lines)


def test_a_long_name_has_a_line_of_its_own():
    name = "encoder/block_*/attention/inner/very/long/query/projection/dot_general"
    head, _, first, second = aligned(("residual", "shape"), [(name, "f32[64,64]" * 4)])
    assert head.split() == ["residual", "shape"]
    assert first == name
    assert second.startswith("  ")


def test_columns_without_a_cell_are_left_out():
    head, *_ = aligned(("residual", "count", "why"), [("a", "", "b")])
    assert head.split() == ["residual", "why"]


def test_layers_that_are_numbered_through_the_model_are_one_row():
    step, args = STEPS["Haiku"](64, 32, scan=False)
    _, priced, _ = decided(step, lambda *_: "save", *args)
    counts = {
        row.name: row.regions for row in rows(priced, {r.name: Decision.SAVE for r in priced})
    }
    assert counts["region_*/tanh"] == LAYERS
    assert counts["region_*/linear_*/add"] == LAYERS - 1  # the first one has no number
