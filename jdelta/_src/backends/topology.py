"""Devices that are not here, known to their compilers only.

The TPU compiler is ``libtpu``, the GPU's is in JAX's CUDA plug-in. Neither needs a device, but each
expects one when it loads: what that takes is set here, and only on a machine that has none.
"""

import functools
import glob
import importlib.metadata
import importlib.util
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import jax
from jax.experimental import topologies

from jdelta._src.backends.chips import CHIPS
from jdelta._src.backends.rates import Device
from jdelta._src.errors import TargetError

# What libtpu looks for on a TPU machine. Elsewhere it asks the network and complains on stderr.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# The CUDA plug-in refuses to register without a driver; its compiler reports every program larger
# than the device as an error on stderr.
_NO_GPU_HERE = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@functools.cache
def topology_devices(platform: str, chip: str, topology: str) -> tuple[Device, ...]:
    """Devices of a topology; the first call of a platform loads its compiler.

    Args:
        platform: "tpu" or "cuda".
        chip: A name of the table.
        topology: Arrangement of chips: "2x2x1" for TPUs, "slices x hosts x devices" for GPUs.

    Raises:
        TargetError: The compiler is not installed or knows no such topology.
    """
    load = _tpu_topology if platform == "tpu" else _cuda_topology
    try:
        return tuple(load(chip, topology).devices)
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(
            f"the compiler knows no topology {topology!r} of {platform}:{chip}: {error}"
        ) from error


def _tpu_topology(chip: str, topology: str) -> topologies.TopologyDescription:
    if importlib.util.find_spec("libtpu") is None:
        raise TargetError("TPU targets need libtpu: pip install 'jdelta[tpu]'")
    if not _present("/dev/accel*", "/dev/vfio/[0-9]*"):
        for variable, value in _NO_TPU_HERE.items():
            os.environ.setdefault(variable, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:{topology}")


def _cuda_topology(chip: str, topology: str) -> topologies.TopologyDescription:
    plugins = [
        plugin
        for plugin in importlib.metadata.entry_points(group="jax_plugins")
        if plugin.name.startswith("xla_cuda")
    ]
    if not plugins:
        raise TargetError("CUDA targets need JAX's CUDA plug-in: pip install 'jdelta[cuda]'")
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=CHIPS["cuda"][chip].description,
        topology=topology,
    )
    with _environment({} if _present("/dev/nvidia[0-9]*") else _NO_GPU_HERE):
        try:
            return describe()
        except NotImplementedError:
            # JAX looked for plug-ins before, when this one still asked for a driver.
            plugins[0].load().initialize()
            return describe()


def _present(*patterns: str) -> bool:
    """Whether the kernel has a device file of one of these names."""
    return any(glob.glob(pattern) for pattern in patterns)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None, None, None]:
    """Sets environment variables for as long as a library loads."""
    before = {variable: os.environ.get(variable) for variable in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
