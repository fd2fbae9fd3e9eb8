"""Every program of the table: the plain step's numbers within the budget, or a named error."""

import functools

import jax
import numpy as np
import pytest

import jdelta
from tests.programs import PROGRAMS, unmarked
from tests.programs.table import flags

SHARE = 0.5
"""Of the plain step's peak: the budget."""

SLACK = 64
"""Bytes by which two compiles of one program may differ: what buffers are aligned to."""


@pytest.fixture
def program(request, monkeypatch):
    """One of the table. What is compiled only to use more of a budget, or to find that the plain
    step is over it, would take half of the time."""
    monkeypatch.setattr("jdelta._search.FILLING", 0)
    monkeypatch.setattr("jdelta._search.MAY_FIT", 0)
    found = PROGRAMS[request.param]
    if jax.__version_info__ < found.since:
        pytest.skip(f"needs jax {found.since}")
    with found.around(), flags(jax_disable_most_optimizations=True):
        yield found


@functools.cache
def plain(name):
    """What the plain step gives, and the peak that it is compiled to, bytes."""
    program = PROGRAMS[name]
    step, args = program.make(program.small, unmarked)
    step = program.jit(step)
    compiled = step.lower(*args).compile()
    compiled = getattr(compiled, "compiled", compiled)  # Equinox's has JAX's in it
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total = held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    peak = getattr(memory, "total_allocation_bytes", 0) or total  # newer ones count constants
    return jax.tree.map(np.asarray, leaves(step(*args))), peak


def leaves(results):
    """Arrays of the results; random keys as the bits they are."""
    return [
        jax.random.key_data(x)
        if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)
        else x
        for x in jax.tree.leaves(results)
    ]


def assert_equal(got, name):
    """To within what other orders of additions make of float32."""
    got, right = leaves(got), plain(name)[0]
    largest = max((np.abs(x).max(initial=0.0) for x in right if is_float(x)), default=0.0)
    for a, b in zip(got, right, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not is_float(b):
            np.testing.assert_array_equal(a, b)
            continue
        tolerance = PROGRAMS[name].rtol
        scale = max(np.abs(b).max(initial=0.0), 1e-2 * largest)
        kind = np.complex128 if np.iscomplexobj(b) else np.float64
        a, b = np.asarray(a).astype(kind), b.astype(kind)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(scale))


def is_float(x):
    return jax.numpy.issubdtype(x.dtype, np.inexact)


def planned(program, budget, **options):
    """A plan, and the arguments that it was made for."""
    step, args = program.make(program.small, unmarked)
    return jdelta.plan(step, budget, *args, **dict(program.options), **options), args


def tried(program, budget):
    """A plan, its arguments and floor, bytes; where there is none, the floor the error names."""
    try:
        plan, args = planned(program, budget)
    except jdelta.BudgetError as error:
        return None, (), error.floor
    return plan, args, plan.floor


def run(program, budget, **options):
    """What the step gives under a plan."""
    plan, args = planned(program, budget, **options)
    return plan.jit()(*args)


@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_everything_recomputed(program):
    pin = {"*": "recompute"}
    if program.right:
        with pytest.raises(program.right.error, match=program.right.why):
            run(program, None, pin=pin)
        return
    assert_equal(run(program, None, pin=pin), program.id)


@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_half_of_the_plain_peak(program):
    """A plan that fits, with the plain step's numbers, or a floor that says why there is none."""
    if program.right:
        pytest.skip("refused")
    _, peak = plain(program.id)
    plan, args, floor = tried(program, int(SHARE * peak))
    assert floor is not None
    assert 0 < floor <= peak + SLACK
    if plan is None:
        assert floor > SHARE * peak
        return
    assert floor <= plan.compiled_peak <= plan.budget
    assert_equal(plan.jit()(*args), program.id)
