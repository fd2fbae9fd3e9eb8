"""Which compilers are installed."""

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

cpus_keep_recompute = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="XLA for CPUs undoes recompute outside of loops"
)

TARGETS = ["tpu:v5e:2x2", pytest.param("cuda:h100", marks=needs_cuda)]
"""Targets to compile for; the TPU's compiler comes with the tests' own requirements."""
