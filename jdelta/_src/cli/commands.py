"""What can be asked: each command with its options. What answers it is loaded when it runs.

Nothing here imports JAX, or what does: ``jdelta --help`` waits for neither.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jdelta._src.cli import loading


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: Its name; `jdelta._src.cli.answers.ANSWERS` has what runs it by that name.
        help: What it does, in a line.
        options: Adds its options to a parser.
    """

    name: str
    help: str
    options: Callable[[argparse.ArgumentParser], None]


def _step_options(parser: argparse.ArgumentParser, args: str = "makes its arguments") -> None:
    parser.add_argument("step", type=loading.function, metavar="MODULE:STEP", help="training step")
    parser.add_argument(
        "--args", type=loading.function, required=True, metavar="MODULE:FUNCTION", help=args
    )
    parser.add_argument("--target", help="tpu:v5p:2x2x1, cuda:h100, …; default: this machine")
    for option, what in (
        ("donate", "donated argument, by number or name, as in jax.jit"),
        ("static", "static argument, by number or name, as in jax.jit"),
    ):
        parser.add_argument(
            f"--{option}",
            type=loading.argument,
            action="append",
            metavar="N|NAME",
            help=f"{what}; may be given often",
        )
    parser.add_argument(
        "--host-budget",
        type=loading.host_budget,
        metavar="SIZE",
        help="bound on what goes to the host",
    )
    parser.add_argument("--spill", metavar="DIR", help="directory for what fits nowhere else")
    parser.add_argument(
        "--solver",
        choices=("knapsack", "milp"),
        default="knapsack",
        help="what decides: knapsack is quick (default); milp takes longer, and proves how far the "
        "decisions are from the optimum",
    )
    parser.add_argument(
        "--pin",
        type=loading.pin,
        action="append",
        default=[],
        metavar="PATTERN=DECISION",
        help="decide by hand: 'h/mlp/*=save'; may be given often",
    )
    parser.add_argument(
        "--reorder",
        action="store_true",
        help="move weight updates into the backward loops where that takes less memory",
    )
    parser.add_argument(
        "--per-layer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether layers of a scan may be decided differently; a plan that is to be a "
        "jax.checkpoint policy needs --no-per-layer",
    )


def _budget_option(
    parser: argparse.ArgumentParser, default: str = "all memory of the target but 5%%"
) -> None:
    parser.add_argument(
        "--budget",
        type=loading.budget,
        help=f"14GiB, bytes, or a share of the plain step's peak (50%%); default: {default}",
    )


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _step_options(parser)
    _budget_option(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=loading.output_file,
        metavar="FILE",
        help="write the plan to this file",
    )
    parser.add_argument(
        "--report",
        type=loading.output_file,
        metavar="FILE",
        help="write a page with pictures of it",
    )


def _explain_options(parser: argparse.ArgumentParser) -> None:
    _plan_file(parser)
    parser.add_argument("name", nargs="?", help="a residual, or a pattern such as 'h/mlp/*'")


def _plan_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=loading.plan_file, metavar="PLAN", help="a plan's file")


def _diff_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=loading.plan_file, metavar="PLAN", help="a plan's file")
    parser.add_argument("second", type=loading.plan_file, metavar="OTHER", help="another plan's")


def _frontier_options(parser: argparse.ArgumentParser) -> None:
    _step_options(parser)
    parser.add_argument(
        "--budget",
        type=loading.budget,
        action="append",
        metavar="BUDGET",
        help="may be given often; default: 100%% to 30%% of the plain step's peak",
    )
    parser.add_argument(
        "--plot", type=loading.picture_file, metavar="FILE", help="draw it into this file"
    )


def _largest_options(parser: argparse.ArgumentParser) -> None:
    _step_options(parser, "makes its arguments, given the size")
    _budget_option(parser)
    parser.add_argument(
        "--overhead",
        type=loading.share,
        default=0.1,
        metavar="SHARE",
        help="largest predicted overhead (10%%)",
    )
    parser.add_argument(
        "--step",
        dest="stride",
        type=loading.positive,
        default=1,
        metavar="N",
        help="try multiples of it",
    )
    parser.add_argument(
        "--most",
        type=loading.positive,
        metavar="N",
        help="sizes that are tried at most (30); each is planned and compiled",
    )


def _no_options(_: argparse.ArgumentParser) -> None:
    pass


def _check_options(parser: argparse.ArgumentParser) -> None:
    _plan_file(parser)
    parser.add_argument("step", type=loading.function, metavar="MODULE:STEP", help="training step")
    parser.add_argument(
        "--args",
        type=loading.function,
        required=True,
        metavar="MODULE:FUNCTION",
        help="makes its arguments",
    )


def _oom_options(parser: argparse.ArgumentParser) -> None:
    _step_options(parser)
    _budget_option(parser)


def _export_options(parser: argparse.ArgumentParser) -> None:
    _plan_file(parser)
    parser.add_argument(
        "form",
        choices=FORMS,
        help="the library; it knows values by what jax.ad_checkpoint.checkpoint_name called them "
        "in the step, so others cannot be exported",
    )


FORMS = ("axlearn", "jax", "levanter", "maxtext")
"""What plans can be exported to, as in `jdelta._src.report.export.FORMS`."""

COMMANDS: Sequence[Command] = (
    Command("plan", "plan a step to a budget", _plan_options),
    Command("explain", "why a plan decides as it does", _explain_options),
    Command("diff", "how two plans differ", _diff_options),
    Command("frontier", "what memory costs: several budgets", _frontier_options),
    Command("max-batch", "the largest batch that fits at little cost", _largest_options),
    Command("max-length", "the longest sequence that fits at little cost", _largest_options),
    Command("targets", "devices that can be planned for from here", _no_options),
    Command("check", "compile a plan again and compare", _check_options),
    Command("oom", "what a step needs its memory for", _oom_options),
    Command("export", "a plan in the words of other libraries", _export_options),
)
