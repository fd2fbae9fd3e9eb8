"""Finds, or builds, the native part and makes its operations known to JAX."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import jax

from jdelta._src.cache import cache_dir
from jdelta._src.errors import SpillError
from jdelta._src.spill import _build
from jdelta._src.spill.adapter import TRANSFER
from jdelta._src.versions import DISTRIBUTION

WRITE, READ = "jdelta_spill_write", "jdelta_spill_read"
"""The custom calls of traced operations."""


class OpenOptions(ctypes.Structure):
    """As ``OpenOptions`` in c_api.cc."""

    _fields_ = [
        ("place", ctypes.c_char_p),
        ("limit", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("checksum", ctypes.c_int64),
        ("timeout", ctypes.c_double),
        ("write_rate", ctypes.c_double),
        ("read_rate", ctypes.c_double),
        ("file", ctypes.c_int64),
        ("write", TRANSFER),
        ("read", TRANSFER),
    ]


class Key(ctypes.Structure):
    """As ``Key`` in entry.h: what a tensor is known by."""

    _fields_ = [(name, ctypes.c_int64) for name in ("run", "device", "slot", "row")]


@functools.cache
def library() -> ctypes.CDLL:
    """The native part, its operations registered for CPUs and NVIDIA's GPUs.

    Raises:
        SpillError: It was not built at installation and cannot be built now.
    """
    native = ctypes.CDLL(str(find_library()))
    number, text = ctypes.c_int64, ctypes.c_char_p
    native.jdelta_spill_open.restype = number
    native.jdelta_spill_open.argtypes = [ctypes.POINTER(OpenOptions)]
    native.jdelta_spill_close.argtypes = [number]
    native.jdelta_spill_settle.argtypes = [number]
    native.jdelta_spill_counters.argtypes = [number, ctypes.c_void_p]
    native.jdelta_spill_defer.argtypes = [number, number, text]
    native.jdelta_spill_deferred.restype = number
    native.jdelta_spill_deferred.argtypes = [number, text, number]
    for name in ("jdelta_spill_put", "jdelta_spill_get"):
        move = getattr(native, name)
        move.argtypes = [number, ctypes.POINTER(Key), ctypes.c_void_p, number, text, number]
    native.jdelta_spill_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, number, ctypes.c_void_p]
    for name in (WRITE, READ):
        for platform, suffix in (("cpu", ""), ("CUDA", "_cuda")):
            target = jax.ffi.pycapsule(getattr(native, name + suffix))
            jax.ffi.register_ffi_target(name, target, platform=platform)
    return native


def find_library() -> Path:
    """The library that the installation built, or else one built now, once for these sources.

    A wheel has no sources: its library was built with it, or there is none.

    Raises:
        SpillError: There is none.
    """
    here, cached = Path(__file__).parent, cache_dir() / "native"
    if not _build.has_sources():
        if library := next(here.glob(_build.ANY_LIBRARY), None):
            return library
        raise SpillError(
            "spilling needs jdelta's native part, and this wheel was built without a C++ compiler. "
            f"Install from the sources with one: pip install --no-binary {DISTRIBUTION} "
            f"--force-reinstall --no-deps {DISTRIBUTION}"
        )
    for folder in (here, cached):
        if (library := folder / _build.library_name()).exists():
            return library
    try:
        return _build.build(cached)
    except _build.BuildError as error:
        raise SpillError(
            "spilling needs jdelta's native part, which the installation did not build and which "
            f"cannot be built now; install a C++17 compiler and try again ({error})"
        ) from error
