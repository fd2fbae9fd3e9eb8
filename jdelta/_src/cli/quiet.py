"""What libraries say of accelerators that a machine does not have is kept off the screen."""

from __future__ import annotations

import logging
import os

from jdelta._src.backends.device_files import present

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
"""What XLA's libraries write to standard error by themselves: 0 everything, 3 what ends them."""

_PLUGINS = "jax._src.xla_bridge"
"""The logger that JAX tells of plug-ins that do not start, with their whole stack."""

_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""Device files of TPUs."""

_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What libtpu looks for as soon as JAX starts, and complains of where it is not set."""


def hush() -> None:
    """Leave out what CUDA's and TPU's libraries say where there is no such device.

    What fails is raised as an error all the same. ``TF_CPP_MIN_LOG_LEVEL=0`` leaves everything.
    """
    if os.environ.setdefault(_LEVEL, "3") == "0":
        return
    if not present(*_TPU_FILES):
        for variable, value in _NO_TPU.items():
            os.environ.setdefault(variable, value)
    if not present("/dev/nvidia[0-9]*", *_TPU_FILES):
        logging.getLogger(_PLUGINS).addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a message is of more than a plug-in that finds no device."""
    return not str(record.msg).startswith("Jax plugin configuration error")
