"""Whether a machine has an accelerator, by what its kernel says; JAX is not loaded for that."""

import glob
import os

GPUS = ("/dev/nvidia[0-9]*",)
"""Device files of NVIDIA's GPUs."""

TPUS = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""Device files of TPUs."""

_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What libtpu looks for on a TPU machine. Elsewhere it asks the network and complains on stderr."""


def present(*patterns: str) -> bool:
    """Whether the kernel has a device file of one of these names, as in ``"/dev/nvidia[0-9]*"``."""
    return any(glob.glob(pattern) for pattern in patterns)


def spare_libtpu_its_search() -> None:
    """Tell libtpu what it looks for, where there is no TPU; what the user has set stays."""
    if not present(*TPUS):
        for variable, value in _NO_TPU.items():
            os.environ.setdefault(variable, value)
