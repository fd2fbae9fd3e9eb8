import jax.numpy as jnp
import numpy as np
import pytest

from jdelta import BudgetError
from jdelta._src.sizes import (
    Budget,
    format_array,
    format_bytes,
    format_seconds,
    format_some,
    parse_budget,
    parse_host_budget,
)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (4096, Budget(bytes=4096)),
        ("14gib", Budget(bytes=14 * 2**30)),
        ("14gb", Budget(bytes=14 * 10**9)),
        ("14 GIB", Budget(bytes=14 * 2**30)),
        ("14 Gi", Budget(bytes=14 * 2**30)),
        ("14G", Budget(bytes=14 * 10**9)),
        (np.float32(0.5), Budget(share=0.5)),
        (np.array(10**10), Budget(bytes=10**10)),
        (jnp.float32(1.0), Budget(share=1.0)),
        (10**10, Budget(bytes=10**10)),
        ("14GiB", Budget(bytes=14 * 2**30)),
        ("14GB", Budget(bytes=14 * 10**9)),
        ("1.5 MiB", Budget(bytes=3 * 2**19)),
        ("512 B", Budget(bytes=512)),
        ("512", Budget(bytes=512)),
        (np.int64(10**10), Budget(bytes=10**10)),
        (2e9, Budget(bytes=2 * 10**9)),
        (0.5, Budget(share=0.5)),
        (1.0, Budget(share=1.0)),
        ("50%", Budget(share=0.5)),
        ("0.5", Budget(share=0.5)),
        ("2e9", Budget(bytes=2 * 10**9)),
    ],
)
def test_what_is_understood(budget, expected):
    assert parse_budget(budget) == expected


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (0, "above zero"),
        (16, "did you mean '16GiB'"),
        (np.True_, "got"),
        (-1, "above zero"),
        (-0.5, "above zero"),
        (float("nan"), "above zero"),
        (float("inf"), "above zero"),
        ("0GiB", "above zero"),
        ("14 parsecs", "unit 'parsecs' is not known; use one of KiB"),
        ("a lot", "not understood"),
        ("-3GiB", "not understood"),
        ("120%", "at most at 100%"),
        (1.2, "at most 1.0"),
        ("1.2", "at most 1.0"),
        ("0%", "above 0%"),
        (True, "expected bytes"),
        (np.True_, "expected bytes"),
        ([1], "expected bytes"),
        ("14Gb", r"Gb may mean bits; for bytes write '14GiB' \(.*1024\) or '14GB'"),
        ("1.5 Mib", "Mib may mean bits; for bytes write '1.5MiB'"),
    ],
)
def test_what_is_refused_says_why(budget, says):
    with pytest.raises(BudgetError, match=says):
        parse_budget(budget)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ({"w": np.ones((64, 64))}, "a dict"),
        ([1], "a list"),
        (jnp.ones((8, 128)), r"float32\[8,128\]"),
        ("a lot, " * 100, "'a lot"),
    ],
)
def test_an_argument_of_the_step_in_its_place_is_named_in_a_line(argument, shown):
    with pytest.raises(BudgetError, match=shown) as refused:
        parse_budget(argument)
    assert len(str(refused.value)) < 250
    if not isinstance(argument, str):
        assert "the second argument, before the step's own" in str(refused.value)
    with pytest.raises(BudgetError, match=shown) as refused:
        parse_host_budget(argument)
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize("nothing", [0, 0.0, np.int32(0), jnp.int32(0)])
def test_no_bytes_on_the_host(nothing):
    assert parse_host_budget(nothing) == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.50 KiB"),
        (2**30, "1.00 GiB"),
        (200 * 2**30, "200.0 GiB"),
    ],
)
def test_bytes(size, text):
    assert format_bytes(size) == text
    assert format_bytes(size, up=True) == text  # nothing is rounded


@pytest.mark.parametrize("size", [1001, 312065188, 18612224, 97.6085 * 2**20, 5 * 2**30 + 1])
def test_bytes_rounded_up_are_enough_as_a_budget(size):
    enough = parse_budget(format_bytes(size, up=True)).bytes
    assert size <= enough <= 1.01 * size + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.0, "2 s"),
        (0.0123, "12.3 ms"),
        (999.7e-6, "1 ms"),
        (0.9997, "1 s"),
        (4.5e-6, "4.5 µs"),
        (0.9997e-6, "1 µs"),
        (0.693e-9, "<1 µs"),
        (0.0, "0 µs"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_arrays():
    array = jnp.ones((8, 128))
    assert format_array(array.dtype, array.shape) == "float32[8,128]"
    assert format_array("bf16", ()) == "bf16[]"


@pytest.mark.parametrize(
    ("names", "text"),
    [(["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")],
)
def test_some_of_many(names, text):
    assert format_some(names, 2) == text
