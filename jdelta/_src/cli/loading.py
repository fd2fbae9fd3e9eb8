"""What a command line names: functions of the user's modules, plans, files, budgets, shares."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from jdelta._src.errors import ArgumentError, BudgetError, PlanMismatchError
from jdelta._src.sizes import parse_budget, parse_host_budget
from jdelta._src.versions import installed_with

if TYPE_CHECKING:
    from jdelta._src.api.plan import Plan


_Size = TypeVar("_Size", int, str, int | str)


class ImportFailedError(Exception):
    """The user's own module raised the cause; argparse would take some causes for its own."""


def meant(word: str, known: Iterable[str]) -> str:
    """A question for the known word that is most like another; empty where none is."""
    alike = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {alike[0]}?" if alike else ""


def function(text: str) -> Callable[..., Any]:
    """The function that ``module:name`` stands for; modules of the current directory count.

    Raises:
        argparse.ArgumentTypeError: There is no such module or name, or it is no function.
        ImportFailedError: The module itself raises something.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"expected module:function, got {text!r}")
    if module.endswith(".py"):
        dotted = os.path.normpath(module).removesuffix(".py").replace(os.sep, ".")
        raise argparse.ArgumentTypeError(
            f"expected module:function, got {text!r}; did you mean {dotted}:{name}?"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise ImportFailedError(module) from error
        raise argparse.ArgumentTypeError(f"{text!r}: there is no module {error.name!r}") from error
    except Exception as error:
        raise ImportFailedError(module) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise argparse.ArgumentTypeError(
                f"{text!r}: {module} has no {name!r}{meant(part, dir(value))}"
            )
        value = getattr(value, part)
    if not callable(value):
        raise argparse.ArgumentTypeError(
            f"expected a function, but {text!r} is of type {type(value).__name__}"
        )
    return value


def plan_file(path: str) -> Plan:
    """The plan in a file.

    Raises:
        argparse.ArgumentTypeError: There is none.
    """
    from jdelta._src.api.plan import load  # with JAX, which the help does not wait for

    try:
        return load(path)
    except FileNotFoundError as error:
        module, _, step = path.partition(":")
        is_step = module.replace(".", "").isidentifier() and step
        raise argparse.ArgumentTypeError(
            f"there is no file {path!r}: expected a plan's file, which `jdelta plan -o FILE` writes"
            + ("; this looks like a step (MODULE:STEP), which comes after PLAN" if is_step else "")
        ) from error
    except (OSError, PlanMismatchError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def output_file(path: str) -> str:
    """The path of a file that can be written, seen before there is something to write.

    Raises:
        argparse.ArgumentTypeError: It cannot.
    """
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(
            f"{path!r} cannot be written: there is no folder {folder!r}; make it, or name another"
        )
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"expected a file, but {path!r} is a folder")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{path!r} cannot be written: permission denied; name a file elsewhere"
        )
    return path


def picture_file(path: str) -> str:
    """The path of a file that can be drawn into, seen before there is something to draw.

    Raises:
        argparse.ArgumentTypeError: It cannot, or matplotlib is not installed or knows no such file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"drawing needs matplotlib: {installed_with('plot')}")
    from matplotlib.backend_bases import FigureCanvasBase  # only where something is drawn

    ending = os.path.splitext(path)[1].removeprefix(".").lower()
    if ending and ending not in FigureCanvasBase.filetypes:
        raise argparse.ArgumentTypeError(
            f"expected a picture's file, ending in one of "
            f"{', '.join(sorted(FigureCanvasBase.filetypes))}; got {path!r}"
        )
    return output_file(path)


def budget(text: str) -> str:
    """A budget that is understood.

    Raises:
        argparse.ArgumentTypeError: It is not.
    """
    return _understood(parse_budget, text)


def host_budget(text: str) -> int | str:
    """A bound on what goes to the host, as `jdelta.plan` takes it.

    Raises:
        argparse.ArgumentTypeError: It is not understood.
    """
    return _understood(parse_host_budget, int(text) if text.isdecimal() else text)


def _understood(parse: Callable[[Any], object], size: _Size) -> _Size:
    try:
        parse(size)
    except BudgetError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return size


def arguments(step: Callable[..., Any], make: Callable[..., Any], *sizes: Any) -> tuple[Any, ...]:
    """The arguments of a step, as the user's function makes them: a tuple, or the only one.

    Raises:
        ArgumentError: The function takes other values than it is given, or the step does.
    """
    if taken := _refused(make, sizes):
        value = "the size" if sizes else "no value (max-batch and max-length give the size)"
        raise ArgumentError(f"{_name(make)} is given {value}, but takes {taken}.")
    values = make(*sizes)
    step_args = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    if taken := _refused(step, step_args):
        count = f"{len(step_args)} value{'' if len(step_args) == 1 else 's'}"
        is_one = not isinstance(values, (tuple, list))
        what = f"one value, a {type(values).__name__}" if is_one else count
        raise ArgumentError(f"{_name(make)} returned {what}, {_name(step)} takes {taken}.")
    return step_args


def _refused(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """What a function takes, if it does not take these arguments: ``2: state, batch``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables have none
        return ""
    try:
        signature.bind(*args)
    except TypeError:
        return _taken(signature.parameters)
    return ""


def _taken(parameters: Mapping[str, inspect.Parameter]) -> str:
    """The parameters of a function, and how many values it takes for them."""
    many = [p for p in parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    one = [p for p in parameters.values() if p not in many]
    least = sum(p.default is p.empty for p in one)
    count = f"{least} or more" if many else f"{least} to {len(one)}" if least < len(one) else least
    return f"{count}: {', '.join(parameters)}" if parameters else "none"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


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
