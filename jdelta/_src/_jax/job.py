"""What the processes of a job tell each other, through the service that JAX runs for the job."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed


def tell(key: str, text: str) -> None:
    """Tell all processes a text, under a key that nobody has used before."""
    _service().key_value_set(key, text)


def heard(key: str, seconds: float = 0.0) -> str | None:
    """What was told under a key.

    Args:
        key: The key.
        seconds: How long to wait for it.

    Returns:
        The text; None if nothing was told by then.

    Raises:
        JaxRuntimeError: The service is gone, as where another process ended.
    """
    try:
        if not seconds:
            return _service().key_value_try_get(key)
        return _service().blocking_key_value_get(key, round(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error) or "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def _service() -> Any:
    return distributed.global_state.client
