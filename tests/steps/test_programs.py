"""Every program of the table: the plain step's numbers under plans, or a named error.

Plans are chosen by the simulation: XLA compiles only what is run, and optimises little. Whether
peaks are as promised is for the tests of random steps and, with all of XLA's optimisations and for
other devices, for `python -m benchmarks run programs`.
"""

import jax
import numpy as np
import pytest

import jdelta
from jdelta._src.regions.trace import trace
from tests.flags import flags
from tests.programs import PROGRAMS, unmarked
from tests.stand_in import compiled_when_called, lowering_later

SHARE = 0.5
"""Of the bytes that are freed if everything is recomputed: what the budget leaves."""


@pytest.fixture
def program(request, monkeypatch):
    """One of the table; a plan is said to take what is simulated, and compiled when it is run.

    What is staged and emitted for one plan of a program serves its other plan.
    """
    staged, emissions = {}, {}

    def traced(fun, *args, grouping, **options):
        if grouping not in staged:
            staged[grouping] = trace(fun, *args, grouping=grouping, **options)
        return staged[grouping]

    def emitted(step, policy):
        key = step.grouping, step.automatic, step.outside, policy
        if key not in emissions:
            emissions[key] = lowering_later(step, policy)
        return emissions[key]

    monkeypatch.setattr("jdelta._src.api.planning.trace", traced)
    compiled_when_called(monkeypatch, emitted)
    # What is simulated only to use more of a budget would take much of the time.
    monkeypatch.setattr("jdelta._src.search.propose.MOST_TRACES", 2)
    entry = PROGRAMS[request.param]
    if jax.__version_info__ < entry.since:
        pytest.skip(f"needs jax {entry.since}")
    with entry.around(), flags(jax_disable_most_optimizations=True):
        yield entry


def plain(program):
    """What the plain step gives."""
    step, args = program.make(program.small, unmarked)
    return jax.tree.map(np.asarray, leaves(program.jit(step)(*args)))


def leaves(results):
    """Arrays of the results; random keys as the bits they are."""
    return [
        jax.random.key_data(x)
        if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)
        else x
        for x in jax.tree.leaves(results)
    ]


def assert_equal(got, right, tolerance):
    """To within what other orders of additions make of float32."""
    got = leaves(got)
    largest = max((np.abs(x).max(initial=0.0) for x in right if is_float(x)), default=0.0)
    for a, b in zip(got, right, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not is_float(b):
            np.testing.assert_array_equal(a, b)
            continue
        scale = max(np.abs(b).max(initial=0.0), 1e-2 * largest)
        kind = np.complex128 if np.iscomplexobj(b) else np.float64
        a, b = np.asarray(a).astype(kind), b.astype(kind)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(scale))


def is_float(x):
    return jax.numpy.issubdtype(x.dtype, np.inexact)


def planned(program, budget, **options):
    """A plan, and what the step gives under it."""
    step, args = program.make(program.small, unmarked)
    options = dict(program.options) | options
    plan = jdelta.plan(step, budget, *args, **options)
    return plan, plan.jit()(*args)


@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_numbers_are_those_of_the_plain_step(program):
    """With everything recomputed, and with a plan for half of what that frees."""
    everything = {"*": "recompute"}
    if program.right:
        with pytest.raises(program.right.error, match=program.right.why):
            planned(program, None, pin=everything)
        return
    right = plain(program)
    least, results = planned(program, None, pin=everything)
    assert_equal(results, right, program.rtol)
    budget = int(least.compiled_peak + SHARE * (least.ceiling - least.compiled_peak))
    plan, results = planned(program, budget)
    assert_equal(results, right, program.rtol)
    assert 0 < plan.floor <= plan.compiled_peak <= plan.budget
