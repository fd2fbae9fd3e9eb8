"""From the name of a platform to its backend: the only place where such names are told apart."""

from __future__ import annotations

from typing import Any

from jdelta._src.backends.backend import Backend
from jdelta._src.backends.cpu import CPU
from jdelta._src.backends.cuda import CUDA
from jdelta._src.backends.tpu import TPU
from jdelta._src.errors import TargetError

BACKENDS = {backend.platform: backend for backend in (TPU, CUDA, CPU)}
"""By JAX's name of the platform: ``{"tpu": TPU}``."""


def backend_of(platform: str) -> Backend:
    """The backend of a platform.

    Raises:
        TargetError: jdelta knows nothing of that platform's compiler.
    """
    if platform not in BACKENDS:
        raise TargetError(
            f"jdelta does not know the compiler for {platform!r}, only those for "
            f"{', '.join(BACKENDS)}: it could not say what a program would take there. Plan for "
            "one of these (target='cuda:h100'), or train without a plan."
        )
    return BACKENDS[platform]


def platform_of(device: Any) -> str:
    """JAX's name of a device's backend, where ``device.platform`` says "gpu" for several."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
