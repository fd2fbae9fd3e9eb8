"""Reads the command line, runs the command, says how it went."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Generator, Sequence
from typing import NoReturn

from jdelta._src.cli.commands import COMMANDS
from jdelta._src.cli.loading import ImportFailedError, meant
from jdelta._src.cli.quiet import hush
from jdelta._src.errors import BudgetError, JdeltaError
from jdelta._src.versions import DISTRIBUTION, __version__

_DESCRIPTION = "Plan a JAX training step to a memory budget, and look at plans."
VERSION = f"jdelta {__version__}, the memory planner for JAX (installed as {DISTRIBUTION})"
_EPILOG = """\
`jdelta COMMAND --help` lists the options of a command.

A step is named as MODULE:STEP; modules of the current directory count. --args names a function
that makes its arguments, best as jax.ShapeDtypeStruct: nothing is allocated then. A first plan
takes as long as a few compiles (for TPUs minutes; in a pipe -v says what goes on), the next ones
are quick: what compilers said is kept in ~/.cache/jdelta. With both functions in mystep.py:

  jdelta oom mystep:train_step --args mystep:make_args --target tpu:v5e
  jdelta plan mystep:train_step --args mystep:make_args --target tpu:v5e --budget 14GiB --donate 0

exit status: 0 done; 1 `check` or `diff` found a difference; 2 the command line is wrong;
3 nothing fits the budget; 4 any other error, said on standard error; 130 interrupted."""


class _Parser(argparse.ArgumentParser):
    """A parser that says in a line what is wrong, in place of all options that there are."""

    def error(self, message: str) -> NoReturn:
        """Say it and end the program."""
        self.exit(2, f"error: {message}\nRun `{self.prog} --help` for what there is.\n")

    def check(self, words: Sequence[str]) -> None:
        """Refuse options that there are not, before any is missed that was meant by them."""
        for word in words:
            option = word.partition("=")[0]
            if word == "--":
                return
            if option.startswith("--") and not any(
                known.startswith(option) for known in self._option_string_actions
            ):
                question = meant(option, self._option_string_actions)
                self.error(f"there is no option {option}{question}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after the program's name; default: those that it was called with.

    Returns:
        The exit status.
    """
    try:
        try:
            return _answered(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `| head`: enough was read
        _write_nowhere()
        return 0
    except OSError as error:  # such as a full disk
        _write_nowhere()
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
        return 4


def _answered(words: Sequence[str]) -> int:
    """Run a command and print what it says, but for errors of standard output itself."""
    hush()
    parser, parsers = _parsers()
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in parsers:
        parser.error(f"there is no command {command!r}{meant(command, parsers)}")
    if command is not None:
        parsers[command].check(words)
    try:
        options = parser.parse_args(words)
    except ImportFailedError as failed:
        return _failed(failed.__cause__ or failed)
    from jdelta._src.api.progress import showing  # with JAX, which the help does not wait for
    from jdelta._src.cli import answers, output

    try:
        with _told() if options.verbose else contextlib.nullcontext(), showing():
            answer = answers.ANSWERS[options.command](options)
    except Exception as error:
        return _failed(error)
    output.show(answer, as_json=options.json)
    return answer.code


@contextlib.contextmanager
def _told() -> Generator[None]:
    """Write what goes on to standard error, a line each."""
    logger, handler = logging.getLogger("jdelta"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _failed(error: BaseException) -> int:
    """Say what went wrong; the exit status."""
    from jdelta._src.cli import output  # with libraries that the help does not wait for

    if isinstance(error, JdeltaError):
        output.failed(str(error))
    else:
        output.raised(error)
    return 3 if isinstance(error, BudgetError) else 4


def _write_nowhere() -> None:
    """Let nothing more go to standard output, which fails: the interpreter flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser of the whole command line, and that of each command by its name."""
    parser = _Parser(
        prog="jdelta",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    added = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    parsers: dict[str, _Parser] = {}
    for command in COMMANDS:
        own = added.add_parser(command.name, help=command.help, description=command.help)
        own.add_argument("--json", action="store_true", help="print JSON")
        own.add_argument(
            "-v", "--verbose", action="store_true", help="write what goes on to standard error"
        )
        command.options(own)
        parsers[command.name] = own
    return parser, parsers
