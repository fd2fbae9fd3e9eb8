import jax.numpy as jnp
import pytest

from jdelta._src.format import format_array, format_bytes, format_seconds, format_some


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


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (2.0, "2 s"),
        (0.0123, "12.3 ms"),
        (999.7e-6, "1 ms"),
        (0.9997, "1 s"),
        (4.5e-6, "4.5 µs"),
        (0.0, "0 µs"),
    ],
)
def test_seconds(given, text):
    assert format_seconds(given) == text


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
