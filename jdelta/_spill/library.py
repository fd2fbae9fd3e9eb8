"""Finds, or builds, the native part and makes its operations known to JAX."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import jax

from jdelta._cache import cache_dir
from jdelta._errors import SpillError
from jdelta._spill import _build

OPERATIONS = ("jdelta_spill_write", "jdelta_spill_read")


@functools.cache
def library() -> ctypes.CDLL:
    """The native part, its operations registered for XLA's CPU client.

    Raises:
        SpillError: It was not built at installation and cannot be built now.
    """
    native = ctypes.CDLL(str(_find()))
    native.jdelta_spill_open.restype = ctypes.c_int64
    native.jdelta_spill_open.argtypes = [ctypes.c_char_p]
    native.jdelta_spill_close.argtypes = [ctypes.c_int64]
    for name in OPERATIONS:
        target = jax.ffi.pycapsule(getattr(native, name))
        jax.ffi.register_ffi_target(name, target, platform="cpu")
    return native


def _find() -> Path:
    """The library that the installation built, or else one built now, once for these sources."""
    cached = cache_dir() / "native"
    for folder in (Path(__file__).parent, cached):
        if (library := folder / _build.library_name()).exists():
            return library
    try:
        return _build.build(cached)
    except _build.BuildError as error:
        raise SpillError(
            "spilling needs jdelta's native part, which the installation did not build and which "
            f"cannot be built now; install a C++17 compiler and try again ({error})"
        ) from error
