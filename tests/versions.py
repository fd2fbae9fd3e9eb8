"""What versions of JAX fall short of, for tests that compare with JAX's own `jax.checkpoint`."""

import jax
import pytest

fails_in_jax_0_10_with_remat3 = pytest.mark.xfail(
    jax.config.jax_remat3 and jax.__version_info__ < (0, 11),
    reason="with jax_remat3 on, jax.checkpoint of jax 0.10 drops policies that offload, needs more "
    "memory, and cannot differentiate a step with a scan",
    strict=True,
)
