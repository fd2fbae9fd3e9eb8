"""The run-time store of one planned step."""

from __future__ import annotations

import os
import weakref

from jdelta._spill.library import library
from jdelta._spill.options import Spill


class Store:
    """Holds what one planned step spills, from the forward pass to the backward pass.

    Attributes:
        spill: How it was asked for.
        id: Number by which compiled programs of this process know it.
    """

    def __init__(self, spill: Spill):
        """Opens a store; it makes no file before the first write."""
        native = library()
        self.spill = spill
        self.id: int = native.jdelta_spill_open(os.fsencode(spill.path))
        self._finalizer = weakref.finalize(self, native.jdelta_spill_close, self.id)

    def close(self) -> None:
        """Ends it and removes its files; programs that use it fail from now on."""
        self._finalizer()
