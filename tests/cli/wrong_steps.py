"""Steps and functions for their arguments with the mistakes that users make."""

import jax
import jax.numpy as jnp


def train_step(p, s, x, y, key):
    """A step of five arguments."""
    return p


def open_step(x, *others, scale=1.0):
    """A step of one argument or more."""
    return x


def other_step(params, batch):
    """A step whose arguments have other names than those of `tests.small`."""
    return params, batch


def inner(x):
    """What cannot be traced, for the shapes do not fit."""
    return x @ x


def failing_step(p, s, x, y, key):
    """A step that fails below what JAX runs of it."""
    return jax.grad(lambda p: inner(p).sum())(p)


def make_args():
    """Right ones."""
    return (jax.ShapeDtypeStruct((3, 4), jnp.float32),) * 5


def too_few():
    """Three values in place of five."""
    return 1.0, 2.0, 3.0


def too_many():
    """Six values in place of five."""
    return (1.0,) * 6


def a_dict():
    """A dict of what should be a tuple."""
    return {"p": 1.0}


def one_value():
    """A value by itself."""
    return 1.0


def nothing():
    """An empty tuple."""
    return ()


def of_a_size(batch):
    """A function that only ``max-batch`` can call."""
    return make_args()


def no_file():
    """A function that misses its file."""
    raise FileNotFoundError(2, "no such data")


def interrupted():
    """A function that Ctrl-C ends."""
    raise KeyboardInterrupt


def too_early():
    """A function that must not be called: something was to be refused before."""
    raise AssertionError("the arguments were made")
