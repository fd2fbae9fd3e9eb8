"""Reads the command line, runs the command, says how it went."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jdelta._src.errors import BudgetError, JdeltaError
from jdelta._src.versions import DISTRIBUTION, __version__

if TYPE_CHECKING:
    from jdelta._src.cli.commands import Command

_DESCRIPTION = "Plan a JAX training step to a memory budget, and look at plans."
VERSION = f"jdelta {__version__}, the memory planner for JAX (installed as {DISTRIBUTION})"
_EPILOG = """\
exit status: 0 done; 1 `check` or `diff` found a difference; 2 the command line is wrong;
3 nothing fits the budget; 4 any other error, said on standard error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after the program's name; default: those that it was called with.

    Returns:
        The exit status.
    """
    from jdelta._src.api.progress import showing
    from jdelta._src.cli import commands, output

    options = _parser(commands.COMMANDS).parse_args(argv)
    try:
        with showing():
            answer = options.run(options)
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


def _parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdelta",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    added = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        own = added.add_parser(command.name, help=command.help, description=command.help)
        own.add_argument("--json", action="store_true", help="print JSON")
        command.options(own)
        own.set_defaults(run=command.run)
    return parser
