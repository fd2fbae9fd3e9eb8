"""JAX's own settings, for a part of a test."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def flags(**values: Any) -> Iterator[None]:
    """Flags of jax, as long as the context lasts."""
    before = {name: jax.config.values[name] for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
