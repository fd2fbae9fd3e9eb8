"""What a command line names: functions of the user's modules, plans, pins, shares."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jdelta._src.errors import PlanMismatchError

if TYPE_CHECKING:
    from jdelta._src.api.plan import Plan


def function(text: str) -> Callable[..., Any]:
    """The function that ``module:name`` stands for; modules of the current directory count.

    Raises:
        argparse.ArgumentTypeError: There is no such module or name, or it is no function. What the
            module itself raises is not caught.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"expected module:function, got {text!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise argparse.ArgumentTypeError(f"{text!r}: there is no module {error.name!r}") from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise argparse.ArgumentTypeError(f"{text!r}: {module} has no {name!r}")
        value = getattr(value, part)
    if not callable(value):
        raise argparse.ArgumentTypeError(f"{text!r} is a {type(value).__name__}, not a function")
    return value


def plan_file(path: str) -> Plan:
    """The plan in a file.

    Raises:
        argparse.ArgumentTypeError: There is none.
    """
    from jdelta._src.api.plan import load  # with JAX, which the help does not wait for

    try:
        return load(path)
    except (OSError, PlanMismatchError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def arguments(make: Callable[..., Any], *sizes: Any) -> tuple[Any, ...]:
    """The arguments of a step, as the user's function makes them: a tuple, or the only one."""
    step_args = make(*sizes)
    return tuple(step_args) if isinstance(step_args, (tuple, list)) else (step_args,)


def argument(text: str) -> int | str:
    """The number of an argument of a step, or its name."""
    return int(text) if text.lstrip("-").isdecimal() else text


def positive(text: str) -> int:
    """A whole number above zero.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, got {text!r}")
    return int(text)


def pin(text: str) -> tuple[str, str]:
    """``PATTERN=DECISION`` as a pair.

    Raises:
        argparse.ArgumentTypeError: There is no ``=``.
    """
    pattern, separator, decision = text.rpartition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected PATTERN=DECISION, got {text!r}")
    return pattern, decision


def share(text: str) -> float:
    """``10%`` or ``0.1``.

    Raises:
        argparse.ArgumentTypeError: It is no number.
    """
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a share such as 10%, got {text!r}") from None
