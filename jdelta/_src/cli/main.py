"""Reads the command line, runs the command, says how it went."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from jdelta._src.cli.commands import COMMANDS
from jdelta._src.cli.quiet import hush
from jdelta._src.errors import BudgetError, JdeltaError
from jdelta._src.versions import DISTRIBUTION, __version__

_DESCRIPTION = "Plan a JAX training step to a memory budget, and look at plans."
VERSION = f"jdelta {__version__}, the memory planner for JAX (installed as {DISTRIBUTION})"
_EPILOG = """\
`jdelta COMMAND --help` lists the options of a command.

A step is named as MODULE:STEP; modules of the current directory count. --args names a function
that makes its arguments, best as jax.ShapeDtypeStruct: nothing is allocated then. With train_step
and make_args in mystep.py, for example:

  jdelta oom mystep:train_step --args mystep:make_args --target tpu:v5e
  jdelta plan mystep:train_step --args mystep:make_args --target tpu:v5e --budget 14GiB --donate 0

exit status: 0 done; 1 `check` or `diff` found a difference; 2 the command line is wrong;
3 nothing fits the budget; 4 any other error, said on standard error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after the program's name; default: those that it was called with.

    Returns:
        The exit status.
    """
    hush()
    options = _parser().parse_args(argv)
    from jdelta._src.api.progress import showing  # with JAX, which the help does not wait for
    from jdelta._src.cli import answers, output

    try:
        with showing():
            answer = answers.ANSWERS[options.command](options)
    except BudgetError as error:
        output.failed(str(error))
        return 3
    except (JdeltaError, ValueError, OSError) as error:
        output.failed(str(error))
        return 4
    try:
        output.show(answer, as_json=options.json)
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head`: enough was read
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    return answer.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdelta",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    added = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for command in COMMANDS:
        own = added.add_parser(command.name, help=command.help, description=command.help)
        own.add_argument("--json", action="store_true", help="print JSON")
        command.options(own)
    return parser
