"""Which compilers are installed, and the CPU's where only numbers count."""

import importlib.metadata

import jax
import pytest

needs_cuda = pytest.mark.skipif(
    not any(
        plugin.name.startswith("xla_cuda")
        for plugin in importlib.metadata.entry_points(group="jax_plugins")
    ),
    reason="JAX's CUDA plug-in is not installed",
)

TARGETS = ["tpu:v5e:2x2", pytest.param("cuda:h100", marks=needs_cuda)]
"""Targets to compile for; the TPU's compiler comes with the tests' own requirements."""


def fast(fun):
    """Jitted for the CPU, not optimised: that is of no use to programs that run a few times."""
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})
