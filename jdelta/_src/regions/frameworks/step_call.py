"""What a framework needs to know of a call of a step, to take its own objects out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar


class StepCall(Protocol):
    """A record of one call of a step; ``jdelta._src.plan.call.Call`` is one."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def fun(self) -> Callable[..., Any]:
        """A pure function of ``args``."""
        ...

    @property
    def args(self) -> tuple[Any, ...]:
        """What is traced."""
        ...

    @property
    def static(self) -> Any:
        """Everything else that the program depends on, hashable."""
        ...

    @property
    def out_shardings(self) -> Any:
        """Where the results are to be: a sharding or a tree of them, None for where they are."""
        ...

    @property
    def finish(self) -> Callable[[Any], Any]:
        """From what ``fun`` returns to what the step does."""
        ...


C = TypeVar("C", bound=StepCall)
