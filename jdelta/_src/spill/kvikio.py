"""The device by way of RAPIDS KvikIO: GPUDirect Storage where there is one, threads elsewhere."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from jdelta._src.errors import SpillError


class KvikIOAdapter:
    """Reads and writes a file with ``kvikio.CuFile``."""

    def __init__(self, file: Path):
        """Opens an existing file.

        Raises:
            SpillError: KvikIO is not installed.
        """
        try:
            kvikio: Any = importlib.import_module("kvikio")
        except ImportError as error:
            raise SpillError(
                "adapter='kvikio' needs KvikIO, which is not installed; install it for your CUDA "
                "version (for example 'kvikio-cu13'), or use adapter='disk'"
            ) from error
        self._file = kvikio.CuFile(file, "r+")

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of ``data``."""
        self._move_all(self._file.pwrite, offset, data)

    def read(self, offset: int, data: memoryview) -> None:
        """Fills ``data``."""
        self._move_all(self._file.pread, offset, data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _move_all(self, move: Any, offset: int, data: memoryview) -> None:
        moved = move(np.frombuffer(data, np.uint8), file_offset=offset).get()
        if moved != data.nbytes:
            raise OSError(f"KvikIO moved {moved} of {data.nbytes} bytes")
