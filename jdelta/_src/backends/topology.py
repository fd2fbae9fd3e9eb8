"""Devices that are not here, known to their compilers only.

The TPU's compiler is ``libtpu``, the GPU's is in JAX's CUDA plug-in. Neither needs a device, but
each expects one when it loads: what that takes its backend sets, and only on a machine without one.
"""

import functools

import jax

from jdelta._src.backends.platforms import backend_of
from jdelta._src.backends.rates import Device
from jdelta._src.errors import TargetError


@functools.cache
def topology_devices(platform: str, chip: str, topology: str) -> tuple[Device, ...]:
    """Devices of a topology; the first call of a platform loads its compiler.

    Args:
        platform: One with a compiler for devices that are not here: "tpu" or "cuda".
        chip: A name of the table.
        topology: Arrangement of chips: "2x2x1" for TPUs, "slices x hosts x devices" for GPUs.

    Raises:
        TargetError: The compiler is not installed or knows no such topology.
    """
    describe = backend_of(platform).devices.topology
    assert describe is not None
    try:
        return tuple(describe(chip, topology).devices)
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(
            f"the compiler knows no topology {topology!r} of {platform}:{chip}: {error}"
        ) from error
