"""The largest size that fits."""

import pytest

import jdelta
from jdelta._src.api.largest import RESOLUTION, bisected
from tests import small


@pytest.mark.parametrize("step", [1, 8])
@pytest.mark.parametrize("most", [0, 1, 2, 3, 5, 8, 31, 100, 1000])
def test_the_largest_size_is_bracketed(most, step):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= most

    largest = bisected(fits, step=step)
    assert most - max(step, most // RESOLUTION + step - 1) < largest + 1 <= most + 1
    assert largest % step == 0
    assert len(set(tried)) == len(tried)
    assert bisected(fits, low=largest, step=step) == largest


@pytest.mark.parametrize("most", [1, 3, 6])
def test_so_many_sizes_are_tried_at_most(most):
    tried = []

    def fits(size):
        tried.append(size)
        return True

    assert bisected(fits, most=most) == 2 ** (most - 1) == tried[-1]
    assert len(tried) == most
    assert bisected(lambda size: size < 1000, most=12) < 1000


def test_the_plan_of_the_largest_batch():
    largest = jdelta.largest(small.step, small.make_args, "8MiB", overhead=None, step=64)
    assert largest.plan is not None
    assert largest.plan.compiled_peak <= 8 * 2**20
    plan = jdelta.plan(small.step, "8MiB", *small.make_args(largest.size))
    assert plan == largest.plan
    cheap = jdelta.largest(small.step, small.make_args, "8MiB", overhead=0.0, step=64)
    assert 0 < cheap.size < largest.size
    assert cheap.plan is not None
    assert cheap.plan.overhead == 0


def test_a_size_that_changes_nothing_is_an_error():
    with pytest.raises(jdelta.ArgumentError, match="same arguments for the sizes 64 and 128"):
        jdelta.largest(small.step, small.same_args, step=64)


def test_a_search_that_ends_early_has_no_size_that_is_too_large():
    largest = jdelta.largest(small.step, small.make_args, "1GiB", step=64, most=2)
    assert (largest.size, largest.too_large) == (128, None)
    assert [size for size, *_ in largest.tried] == [64, 128]


def test_other_errors_are_raised():
    with pytest.raises(jdelta.BudgetError, match="expected bytes"):
        jdelta.largest(small.step, small.make_args, "much")
