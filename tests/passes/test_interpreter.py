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
