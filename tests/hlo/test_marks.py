"""What became of named values, read off compiled programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compilation_cache import compilation_cache

import jdelta
from jdelta._src.program.hlo_names import Computed
from jdelta._src.regions.policy import Policy
from tests.compilers import TARGETS
from tests.flags import flags

PROGRAM = """HloModule fates

%shared (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%a), metadata={op_name="jit(f)/jvp(h)/~h.shared~/exp"}
}

%fused (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %t = f32[8]{0} tanh(%b), metadata={op_name="jit(f)/jvp(h/~h.tanh~)/tanh"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %one = f32[8]{0} fusion(%x), kind=kLoop, calls=%shared, metadata={op_name="jit(f)/exp"}
  %two = f32[8]{0} fusion(%one), kind=kLoop, calls=%shared, metadata={op_name="jit(f)/exp"}
  %y = f32[8]{0} fusion(%two), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/tanh"}
  %s.remat = f32[8]{0} sine(%y), metadata={op_name="jit(f)/jvp(h)/~h.sin~/sin"}
  %s = f32[8]{0} sine(%y), metadata={op_name="jit(f)/jvp(h)/~h.sin~/sin"}
  ROOT %c = f32[8]{0} cosine(%s), metadata={op_name="f/rematted_computation/h/~h.cos~/cos"}
}
"""


@pytest.mark.parametrize(
    ("once", "recomputed", "undone"),
    [
        ({"h/tanh"}, {"h/cos"}, ()),
        ({"h/cos"}, {"h/tanh"}, ("h/cos", "h/tanh")),
        ({"h/sin"}, set(), ("h/sin",)),  # recomputed by XLA itself
        (set(), {"h/sin"}, ()),
        (set(), {"h/shared", "h/folded"}, ()),  # stands for several; is not there
    ],
)
def test_fates_of_names_in_a_program(once, recomputed, undone):
    assert Computed(frozenset(once), frozenset(recomputed)).undone(PROGRAM) == undone


def step(w, x, name="layer"):
    def loss(w):
        y = x
        for row in w:
            y = jdelta.remat(lambda y, row=row: y + jnp.tanh(y @ row), name=name)(y)
        return jnp.mean(y**2)

    return w - jax.grad(loss)(w)


def test_a_part_that_is_kept_is_not_taken_for_computed_again_with_the_others():
    """All parts come out of one equation, which runs again for those that are dropped."""

    @jdelta.remat
    def layer(x, w):
        q, k, v = map(checkpoint_name, jnp.split(x @ w, 3, axis=1), "qkv")
        return x + (q @ k.T) @ v

    def step(ws, x):
        def loss(ws):
            return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0])

        return jax.grad(loss)(ws)

    args = jnp.ones((4, 32, 96)), jnp.ones((512, 32))
    pin = {"*": "recompute", "layer/q": "save", "layer/input*": "save"}
    plan = jdelta.plan(step, None, *args, pin=pin)
    assert plan.decisions["layer/q"] is jdelta.Decision.SAVE
    assert plan.decisions["layer/k"] is jdelta.Decision.RECOMPUTE
    assert plan.undone == ()


SHAPES = (
    jax.ShapeDtypeStruct((3, 256, 256), "float32"),
    jax.ShapeDtypeStruct((8192, 256), "float32"),
)


def test_recompute_that_a_compiler_undoes_is_reported(monkeypatch):
    monkeypatch.setattr(Policy, "prevents_cse", lambda *_: False)
    plan = jdelta.plan(step, None, *SHAPES, pin={"*": "recompute"})
    assert "layer_1/dot_general" in plan.undone
    assert "undone        by the compiler" in str(plan)


@pytest.fixture
def executables(tmp_path):
    """JAX's cache of executables in a folder of its own, with all that is compiled."""
    compilation_cache.reset_cache()
    with flags(
        jax_compilation_cache_dir=str(tmp_path),
        jax_persistent_cache_min_compile_time_secs=0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    ):
        yield
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("executables")
def test_an_executable_from_jaxs_own_cache_is_read_by_the_names_of_this_program(monkeypatch):
    monkeypatch.setattr(Policy, "prevents_cse", lambda *_: False)
    undone = [
        jdelta.plan(functools.partial(step, name=name), None, *SHAPES, pin={"*": "recompute"})
        for name in ("layer", "block")
    ]
    assert [{name[:5] for name in plan.undone} for plan in undone] == [{"layer"}, {"block"}]


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
def test_an_error_names_the_recompute_that_a_compiler_undoes(target, monkeypatch):
    shapes = jax.ShapeDtypeStruct((3, 512, 512), "f4"), jax.ShapeDtypeStruct((32768, 512), "f4")
    options = {"target": target, "host_budget": 0}
    with pytest.raises(jdelta.BudgetError) as kept_apart:
        jdelta.plan(step, "1MiB", *shapes, **options)
    monkeypatch.setattr(Policy, "prevents_cse", lambda *_: False)
    with pytest.raises(jdelta.BudgetError, match=r"keeps .* all the same \(layer_\d/") as merged:
        jdelta.plan(step, "1MiB", *shapes, **options)
    assert "Run the layers under jax.lax.scan" in str(merged.value)
    assert "all the same" not in str(kept_apart.value)
    assert kept_apart.value.floor < merged.value.floor


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS)
def test_compilers_for_accelerators_undo_nothing(target):
    plan = jdelta.plan(step, None, *SHAPES, pin={"*": "recompute"}, target=target)
    assert plan.undone == ()
