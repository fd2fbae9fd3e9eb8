"""The interpreter: each equation is handed to a hook."""

import jax
import jax.numpy as jnp

from jdelta._src import _jax


def program():
    return jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)) + 1.0)(0.0)


def test_equations_that_run_as_they_stand_give_what_the_program_gives():
    closed = program()
    assert _jax.interpret(closed, [2.0], lambda _, eqn, env: _jax.run(eqn, env)) == _jax.evaluate(
        closed, 2.0
    )


def test_a_hook_evaluates_an_equation_in_its_own_way():
    def hook(index, eqn, env):
        if eqn.primitive.name == "cos":
            _jax.write(env, eqn, [index + _jax.read(env, eqn.invars)[0]])
        else:
            _jax.run(eqn, env)

    assert _jax.interpret(program(), [0.0], hook) == [2.0]


def test_what_stands_for_a_value_is_asked_for_it():
    def hook(_, eqn, env):
        _jax.run(eqn, env, lambda x: float(x.removeprefix("at ")) if isinstance(x, str) else x)

    assert _jax.interpret(program(), ["at 0"], hook) == [2.0]


def test_a_program_is_traced_with_the_arguments_of_another():
    closed = _jax.retraced(program(), lambda x: [2 * x])
    assert [eqn.primitive.name for eqn in _jax.open_jaxpr(closed).eqns] == ["mul"]
    assert closed.in_avals == program().in_avals


def of_every_kind(x, y, ref):
    """Custom rules, a loop, a branch, an inner jit, a callback, a mutable ref, constants."""

    @jax.custom_jvp
    def ruled(x):
        return jnp.sin(x)

    ruled.defjvp(lambda primals, tangents: (ruled(*primals), 2.0 * tangents[0]))

    def layer(x, y):
        return jnp.tanh(x) + y, jnp.cos(x)

    with jax.named_scope("loop"):
        x, rows = jax.lax.scan(layer, ruled(x), y)
    x = jax.lax.cond(x > 0, jnp.exp, jax.jit(jnp.log1p), x)
    jax.debug.print("{x}", x=x)
    ref[...] += x
    return x + rows.sum(), ref[...], jnp.asarray([1.0, 2.0]) * x


ARGUMENTS = 0.5, jnp.arange(3.0)


def test_what_is_traced_again_is_the_same_program_from_the_same_lines():
    def loss(x, y):
        ref = jax.new_ref(jnp.float32(0.0))
        total, read, more = of_every_kind(x, y, ref)
        return total + read + more.sum()

    closed = jax.make_jaxpr(jax.value_and_grad(loss))(*ARGUMENTS)
    retraced = _jax.retraced(closed, lambda *args: _jax.evaluate(closed, *args))
    before, after = (_jax.open_jaxpr(program).eqns for program in (closed, retraced))
    assert [str(e.primitive) for e in after] == [str(e.primitive) for e in before]
    assert [_jax.name_stack(e) for e in after] == [_jax.name_stack(e) for e in before]
    for a, b in zip(after, before, strict=True):
        assert a.source_info.traceback is b.source_info.traceback
        assert [v.aval for v in a.outvars] == [v.aval for v in b.outvars]
    assert jax.jit(_jax.evaluate, static_argnums=0)(closed, *ARGUMENTS) == _jax.evaluate(
        closed, *ARGUMENTS
    )


def test_rules_are_not_traced_again():
    calls = []

    @jax.custom_jvp
    def ruled(x):
        calls.append(x)
        return jnp.sin(x)

    ruled.defjvp(lambda primals, tangents: (ruled(*primals), 2.0 * tangents[0]))
    closed = jax.make_jaxpr(ruled)(1.0)
    retraced = _jax.retraced(closed, lambda x: _jax.evaluate(closed, x))
    assert len(calls) == 1
    assert jax.grad(lambda x: _jax.evaluate(retraced, x)[0])(0.5) == 2.0


def test_an_operand_of_another_type_is_computed_with_as_it_is():
    closed = jax.make_jaxpr(lambda x: x * x)(jnp.float32(0.0))
    wider = jax.make_jaxpr(lambda x: _jax.evaluate(closed, x))(jax.ShapeDtypeStruct((), "bfloat16"))
    assert [aval.dtype for aval in wider.out_avals] == [jnp.bfloat16]
    assert jax.vmap(lambda x: _jax.evaluate(closed, x)[0])(jnp.arange(3.0)).tolist() == [0, 1, 4]


def test_the_scopes_around_are_those_of_the_equations():
    closed = jax.make_jaxpr(lambda x: jax.named_scope("inner")(jnp.sin)(x))(0.0)
    retraced = jax.make_jaxpr(lambda x: jax.named_scope("outer")(_jax.evaluate)(closed, x))(0.0)
    (eqn,) = _jax.open_jaxpr(retraced).eqns
    assert _jax.name_stack(eqn) == "outer/inner"


def test_what_jax_makes_other_equations_of_is_left_to_it():
    """With JAX 0.12 a root is a primitive that no compiler knows before JAX has lowered it."""

    def root(x):
        return jax.lax.custom_root(
            lambda s: s**3 - x, 1.0, lambda f, s: s + f(s) * 0.1, lambda g, t: t / g(1.0)
        )

    closed = jax.make_jaxpr(root)(1.0)
    assert jax.jit(lambda x: _jax.evaluate(closed, x)[0])(0.5) == root(0.5)
