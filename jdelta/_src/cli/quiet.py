"""What libraries say of accelerators that a machine does not have is kept off the screen."""

from __future__ import annotations

import logging
import os

from jdelta._src.backends.device_files import GPUS, TPUS, present, spare_libtpu_its_search

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
"""What XLA's libraries write to standard error by themselves: 0 everything, 3 what ends them."""

_PLUGINS = "jax._src.xla_bridge"
"""The logger that JAX tells of plug-ins that do not start, with their whole stack."""


def hush() -> None:
    """Leave out what CUDA's and TPU's libraries say where there is no such device.

    What fails is raised as an error all the same. ``TF_CPP_MIN_LOG_LEVEL=0`` leaves everything.
    """
    if os.environ.setdefault(_LEVEL, "3") == "0":
        return
    spare_libtpu_its_search()
    if not present(*GPUS, *TPUS):
        logging.getLogger(_PLUGINS).addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a message is of more than a plug-in that finds no device."""
    return not str(record.msg).startswith("Jax plugin configuration error")
