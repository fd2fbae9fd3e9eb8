"""What primitives are priced at: all of JAX's by some rule, and as XLA counts where it does."""

import importlib
import pkgutil

import jax
import jax.extend.core.primitives
import jax.lax.linalg
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from jdelta._src.backends.chips import CHIPS, Rates
from jdelta._src.backends.cpu import CPU
from jdelta._src.backends.cuda import CUDA
from jdelta._src.backends.platforms import backend_of
from jdelta._src.backends.target import resolve
from jdelta._src.backends.tpu import TPU
from jdelta._src.estimate.buffers import Compiler
from jdelta._src.estimate.flops import how_priced, is_free, work
from jdelta._src.estimate.seconds import program_seconds
from jdelta._src.hlo.seconds import products
from jdelta._src.hlo.text import parse
from jdelta._src.program.graph import graph_of
from tests.compilers import needs_cuda

FOREIGN = frozenset({"buffer_callback", "ffi_call", "io_callback", "pure_callback"})
"""Call what JAX does not know: ten operations an element."""


def primitives():
    """All of `jax.lax`'s, public or not, by name."""
    package = importlib.import_module("jax._src.lax")
    inner = [
        f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)
    ]
    public = [lax, jax.lax.linalg, jax.extend.core.primitives]
    modules = [*public, *map(importlib.import_module, inner)]
    names = {
        v.name for module in modules for v in vars(module).values() if isinstance(v, Primitive)
    }
    return sorted(names - FOREIGN)


@pytest.mark.parametrize("name", primitives())
def test_every_primitive_is_priced(name):
    assert how_priced(name), (
        f"jax {jax.__version__} has the primitive {name!r}, which nothing prices: "
        "add it to its class in jdelta/_src/program/primitives.py, or to a set or a rule in "
        "jdelta/_src/estimate/flops.py"
    )


def test_a_primitive_of_nobody_is_priced_by_its_elements():
    assert how_priced("somebody_elses_kernel") is None
    x = shape(8, 8)
    program = graph(lambda x: jax.pure_callback(lambda x: x, x, x), x)
    (call,) = program.operations
    assert work(program, call).operations == 10 * 2 * 64


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def graph(fun, *args):
    return graph_of(jax.make_jaxpr(fun)(*args))


def operations(fun, *args):
    program = graph(fun, *args)
    return sum(work(program, op).operations for op in program.operations if not is_free(op))


def convolve(stride, **options):
    def fun(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, k, (stride, stride), "SAME", dimension_numbers=numbers, **options
        )

    return fun


def input_gradient(x, k):
    return jax.grad(lambda x, k: convolve(2)(x, k).sum())(x, k)


def kernel_gradient(x, k):
    return jax.grad(lambda k, x: convolve(2)(x, k).sum())(k, x)


IMAGE, KERNEL = shape(2, 32, 32, 16), shape(3, 3, 16, 24)
SQUARE = shape(64, 64)
GROUPS = shape(4, dtype=jnp.int32)

COUNTED = {
    "product": (jnp.dot, (shape(64, 32), shape(32, 16))),
    "batched product": (jnp.matmul, (shape(3, 64, 32), shape(3, 32, 16))),
    "product to a wider type": (
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32),
        (shape(64, 32, dtype=jnp.bfloat16), shape(32, 16, dtype=jnp.bfloat16)),
    ),
    "convolution": (convolve(1), (IMAGE, KERNEL)),
    "strided convolution": (convolve(2), (IMAGE, KERNEL)),
    "dilated convolution": (convolve(1, rhs_dilation=(2, 2)), (IMAGE, KERNEL)),
    "transposed convolution": (
        lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"),
        (IMAGE, KERNEL),
    ),
    "grouped convolution": (convolve(1, feature_group_count=4), (IMAGE, shape(3, 3, 4, 24))),
    "gradient of an image": (input_gradient, (IMAGE, KERNEL)),
    "gradient of a kernel": (kernel_gradient, (IMAGE, KERNEL)),
    "pooling": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "VALID"),
        (IMAGE,),
    ),
    "sum": (lambda x: jnp.sum(x, 1), (SQUARE,)),
    "scatter": (lambda x, y: x.at[jnp.arange(8)].add(y), (SQUARE, shape(8, 64))),
}


@pytest.mark.parametrize("name", COUNTED)
def test_operations_are_those_that_xla_counts(name):
    fun, args = COUNTED[name]
    said = jax.jit(fun).lower(*args).cost_analysis()["flops"]
    assert operations(fun, *args) == pytest.approx(said, rel=0.15)


SPECIAL = (
    "asin acosh sinh erf_inv lgamma digamma bessel_i0e bessel_i1e zeta polygamma igamma igammac"
    " igamma_grad_a regularized_incomplete_beta"
)


@pytest.mark.parametrize("name", SPECIAL.split())
def test_special_functions_take_what_xla_makes_of_them(name):
    """Each transcendental function in it counted as ten; versions of JAX differ by up to five."""
    x = shape(4096)
    primitive = getattr(lax, f"{name}_p")
    operands = {"zeta": 2, "polygamma": 2, "regularized_incomplete_beta": 3}
    args = [x] * operands.get(name, 2 if name.startswith("igamma") else 1)
    counts = jax.jit(primitive.bind).lower(*args).compile().cost_analysis()
    said = counts.get("flops", 0.0) + 10.0 * counts.get("transcendentals", 0.0)
    assert said / 3 < operations(primitive.bind, *args) < 3 * said


def ragged(x, w, sizes):
    return lax.ragged_dot(x, w, sizes)


def ragged_gradients(x, w, sizes):
    return jax.grad(lambda x, w: ragged(x, w, sizes).sum(), (0, 1))(x, w)


ROWS = shape(64, 32), shape(4, 32, 16), GROUPS


def test_a_ragged_product_multiplies_each_row_once_on_a_tpu_and_once_for_each_group_elsewhere():
    once = 2 * 64 * 32 * 16
    assert operations(ragged, *ROWS) == once
    only = Rates((("float32", 1.0),), *[1e30] * 5)
    forward, backward = graph(ragged, *ROWS), graph(ragged_gradients, *ROWS)
    assert program_seconds(forward, only, TPU) == pytest.approx(once)
    assert program_seconds(forward, only, CUDA) == pytest.approx(4 * once)
    assert program_seconds(backward, only, TPU) == pytest.approx(2 * once)
    counted = jax.jit(ragged).lower(*ROWS).compile().cost_analysis()["flops"]
    assert program_seconds(forward, only, CPU) == pytest.approx(counted, rel=0.15)


@needs_cuda
@pytest.mark.compiler
@pytest.mark.parametrize("fun", [ragged, lambda *args: ragged_gradients(*args)[1]])
def test_a_gpu_copies_the_rows_of_a_ragged_product_for_each_group(fun):
    args = shape(4096, 512), shape(8, 512, 256), shape(8, dtype=jnp.int32)
    program, target = graph(fun, *args), resolve("cuda:h100")
    (op,) = (op for op in program.operations if op.primitive == "ragged_dot_general")
    lowered = jax.jit(fun).trace(*target.abstract(args)).lower(lowering_platforms=("cuda",))
    temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
    copies = Compiler(backend_of("cuda")).workspace(program, op, frees=False)
    assert copies == pytest.approx(temporaries, rel=0.15)
    assert Compiler(backend_of("tpu")).workspace(program, op, frees=False) == 0


@pytest.mark.compiler
def test_a_kernel_of_a_tpu_is_priced_as_its_text_estimates():
    args = shape(1024, 512), shape(8, 512, 256), shape(8, dtype=jnp.int32)
    target = resolve("tpu:v5e:2x2")
    lowered = jax.jit(ragged).trace(*target.abstract(args)).lower(lowering_platforms=("tpu",))
    module = parse(lowered.compile().as_text() or "")
    each = [
        work
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        for work in products(module, computation, instruction)
    ]
    assert each == [("float32", 2.0 * 1024 * 512 * 256)]


def n_cubed(fun):
    """How many operations a square matrix takes, in cubes of its side."""
    return operations(fun, shape(1024, 1024)) / 1024**3


def test_factorizations_take_the_cube_of_a_side():
    solve = lax.linalg.triangular_solve
    assert n_cubed(lax.linalg.cholesky) == pytest.approx(1 / 3, rel=0.1)
    assert n_cubed(lax.linalg.lu) == pytest.approx(2 / 3, rel=0.1)
    assert n_cubed(lambda x: lax.linalg.qr(x)) == pytest.approx(8 / 3, rel=0.1)
    assert n_cubed(lambda x: solve(x, x)) == pytest.approx(2, rel=0.1)
    assert n_cubed(lax.linalg.eigh) == pytest.approx(9, rel=0.1)
    assert n_cubed(lax.linalg.svd) == pytest.approx(22, rel=0.1)


def test_a_linear_solve_takes_what_its_way_of_solving_does():
    only = Rates((("float32", 1e30),), 1.0, *[1e30] * 4)
    program = graph(lambda a, b: jnp.linalg.solve(a, b), SQUARE, SQUARE)
    (solve,) = (op for op in program.operations if op.primitive == "custom_linear_solve")
    assert how_priced(solve.primitive)
    # One factorization and two triangles, a little of other things.
    assert program_seconds(program, only, CPU) == pytest.approx((2 / 3 + 4) * 64**3, rel=0.15)


def test_a_tridiagonal_system_takes_no_more_than_its_length():
    ones = shape(4096)
    taken = operations(lax.linalg.tridiagonal_solve, ones, ones, ones, shape(4096, 8))
    assert taken == 8 * 4096 * 8


ONLY_MOVING = Rates((("float32", 1e30),), 1e30, 1e30, 1.0, 1e30, 1e30)


def test_what_a_loop_updates_in_place_is_not_moved_whole():
    def filled(rows):
        def fun(x):
            def body(buffer, i):
                return lax.dynamic_update_index_in_dim(buffer, x, i, 0), None

            return lax.scan(body, jnp.zeros((rows, *x.shape)), jnp.arange(rows))[0]

        return fun

    row = shape(1024)
    few, many = (program_seconds(graph(filled(n), row), ONLY_MOVING, TPU) for n in (16, 64))
    assert many == pytest.approx(4 * few)
    assert few == pytest.approx(16 * 2 * 4096, rel=0.1)


def test_what_is_read_afterwards_is_copied_to_be_updated():
    def once(x, y):
        return jnp.sin(x @ x).at[3].set(y)

    def read_again(x, y):
        z = jnp.sin(x @ x)
        return z.at[3].set(y) @ z

    def updates(fun):
        x, y = shape(256, 256), shape(256)
        product = program_seconds(graph(lambda x, y: x @ x, x, y), ONLY_MOVING, CUDA)
        return program_seconds(graph(fun, x, y), ONLY_MOVING, CUDA) - product

    size = 4 * 256**2
    assert updates(once) == pytest.approx(2 * size, rel=0.02)  # of the sine alone
    assert updates(read_again) == pytest.approx(2 * size + 2 * size + 3 * size, rel=0.02)


def seconds_of_product(chip, dtype, **options):
    x = shape(1024, 1024, dtype=dtype)
    program = graph(lambda x: lax.dot(x, x, **options), x)
    rates = CHIPS["cuda"][chip].rates
    return program_seconds(program, rates, CUDA)


def test_products_cost_by_the_type_they_are_made_in():
    exact, fast = (
        seconds_of_product("h100", jnp.float32, precision=p)
        for p in (lax.DotAlgorithmPreset.F32_F32_F32, lax.DotAlgorithmPreset.BF16_BF16_F32)
    )
    assert exact == seconds_of_product("h100", jnp.float32, precision="highest")
    assert exact > 3 * fast
    narrow = {"preferred_element_type": jnp.float32}
    rates = CHIPS["cuda"]["h100"].rates
    assert rates.flops("float8_e4m3fn") == rates.flops("int8") == rates.flops("uint8")
    assert CHIPS["cuda"]["a100"].rates.flops("float8_e5m2") == CHIPS["cuda"]["a100"].rates.flops(
        "bfloat16"
    )
    eight = seconds_of_product("h100", jnp.float8_e4m3fn, **narrow)
    assert eight < seconds_of_product("h100", jnp.bfloat16, **narrow)
    real, complex_ = (seconds_of_product("h100", t) for t in (jnp.float32, jnp.complex64))
    assert complex_ == pytest.approx(4 * real, rel=0.3)


@pytest.mark.parametrize(("algorithm", "each"), [("RNG_DEFAULT", 50), ("RNG_THREE_FRY", 100)])
def test_bits_of_xlas_own_generators_are_priced(algorithm, each):
    def fun(key):
        return lax.rng_bit_generator(key, (1024,), algorithm=lax.RandomAlgorithm[algorithm])[1]

    only = Rates((("float32", 1e30),), 1e30, 1.0, *[1e30] * 3)
    assert program_seconds(graph(fun, shape(4, dtype=jnp.uint32)), only, TPU) == each * 1024
