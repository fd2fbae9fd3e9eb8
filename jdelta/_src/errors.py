"""What can go wrong, each with a message that says what was expected, what came and what to do."""


class JdeltaError(Exception):
    """Base class of every error that jdelta raises on purpose."""


class BudgetError(JdeltaError, ValueError):
    """The budget is malformed, or lies below the least peak the step can reach.

    Attributes:
        floor: Least compiled peak reached, bytes per device; ``None`` when nothing was compiled.
        budget: The budget in bytes, a share's too; ``None`` when nothing was compiled.
        ceiling: Compiled peak of the plain step, bytes per device; ``None`` where it was not
            compiled.
    """

    def __init__(
        self,
        message: str,
        floor: int | None = None,
        budget: int | None = None,
        ceiling: int | None = None,
    ):
        super().__init__(message)
        self.floor, self.budget, self.ceiling = floor, budget, ceiling


class PlanMismatchError(JdeltaError, ValueError):
    """A plan was used for a program, arguments or a file that it was not made for."""


class ArgumentError(JdeltaError, TypeError, ValueError):
    """An option, or an argument of the step, is not what ``jax.jit`` and jdelta take."""


class OffloadError(JdeltaError, RuntimeError):
    """The compiled program does not hold on the host what the plan puts there."""


class TargetError(JdeltaError, ValueError):
    """The target is unknown, or what it needs is not installed."""


class TraceError(JdeltaError, ValueError):
    """JAX traces the step, but not cut into regions, and as it is it does not do.

    Attributes:
        floor: Compiled peak of the step as it is, bytes per device; ``None`` when nothing was
            compiled.
    """

    def __init__(self, message: str, floor: int | None = None):
        super().__init__(message)
        self.floor = floor


class SpillError(JdeltaError, RuntimeError):
    """Files cannot be used as a memory, or failed during a step."""
