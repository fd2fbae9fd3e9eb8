"""The commands: each takes the options given and returns what is to be said."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jdelta._src.api import frontier, largest, oom
from jdelta._src.api.plan import Plan
from jdelta._src.api.planning import plan
from jdelta._src.backends.target import names, published
from jdelta._src.cli import loading
from jdelta._src.cli.output import Answer, Block
from jdelta._src.plan.planned_step import recompiled
from jdelta._src.report import explain, export
from jdelta._src.report.table import HEAD, printed
from jdelta._src.sizes import format_bytes, format_seconds

Options = argparse.Namespace


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: Its name.
        help: What it does, in a line.
        options: Adds its options to a parser.
        run: Runs it.
    """

    name: str
    help: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Options], Answer]


def _step_options(parser: argparse.ArgumentParser, args: str = "makes its arguments") -> None:
    parser.add_argument("step", type=loading.function, metavar="MODULE:STEP", help="training step")
    parser.add_argument(
        "--args", type=loading.function, required=True, metavar="MODULE:FUNCTION", help=args
    )
    parser.add_argument("--target", help="tpu:v5p:2x2x1, cuda:h100, …; default: this machine")
    parser.add_argument(
        "--donate", type=int, action="append", default=[], metavar="N", help="donated argument"
    )
    parser.add_argument("--host-budget", metavar="SIZE", help="bound on what goes to the host")
    parser.add_argument("--spill", metavar="DIR", help="directory for what fits nowhere else")
    parser.add_argument("--solver", choices=("knapsack", "milp"), default="knapsack")
    parser.add_argument(
        "--pin",
        type=loading.pin,
        action="append",
        default=[],
        metavar="PATTERN=DECISION",
        help="decide by hand: 'h/mlp/*=save'",
    )


def _planning(options: Options) -> dict[str, Any]:
    """The options of `jdelta.plan`."""
    host = options.host_budget
    return {
        "target": options.target,
        "donate_argnums": tuple(options.donate),
        "host_budget": int(host) if host and host.isdecimal() else host,
        "spill": options.spill,
        "solver": options.solver,
        "pin": dict(options.pin),
    }


def _budget_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget",
        help="14GiB, bytes, or a share of the plain peak (50%%); default: all memory but 5%%",
    )


# plan


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _step_options(parser)
    _budget_option(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan to this file")
    parser.add_argument("--report", metavar="FILE", help="write a page with pictures of it")


def _plan(options: Options) -> Answer:
    step_plan = plan(
        options.step, options.budget, *loading.arguments(options.args), **_planning(options)
    )
    notes: list[str] = []
    if options.output:
        step_plan.save(options.output)
        notes.append(f"written to {options.output}")
    if options.report:
        step_plan.report(options.report)
        notes.append(f"written to {options.report}")
    return Answer(
        figures(step_plan), [*_table(step_plan), Block(notes=notes)] if notes else _table(step_plan)
    )


def figures(step_plan: Plan) -> dict[str, Any]:
    """A plan's figures and decisions, for programs."""
    records = (
        step_plan.question,
        step_plan.program,
        step_plan.answer,
        step_plan.figures,
        step_plan.search,
    )
    numbers = {
        f.name: getattr(record, f.name)
        for record in records
        for f in dataclasses.fields(record)
        if str(f.type) in ("int", "float", "str")
    }
    return {**numbers, "decisions": {name: d.value for name, d in step_plan.decisions.items()}}


def _table(step_plan: Plan) -> list[Block]:
    parts = printed(step_plan)
    table = Block(HEAD, parts.body, notes=[parts.rest] if parts.rest else [])
    return [
        Block(notes=parts.title.splitlines()),
        table if parts.body else Block(notes=parts.table.splitlines()),
        Block(figures=parts.figures),
    ]


# explain


def _explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=loading.plan_file, metavar="PLAN", help="a plan's file")
    parser.add_argument("name", nargs="?", help="a residual, or a pattern such as 'h/mlp/*'")


def _explain_command(options: Options) -> Answer:
    if options.name is None:
        return Answer(figures(options.plan), _table(options.plan))
    explanations = explain.explain(options.plan, options.name)
    record = [{**dataclasses.asdict(e), "decision": e.decision.value} for e in explanations]
    return Answer(record, [Block(notes=str(e).splitlines()) for e in explanations])


# diff


def _diff_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=loading.plan_file, metavar="PLAN")
    parser.add_argument("second", type=loading.plan_file, metavar="OTHER")


_FIGURES = ("target", "budget", "compiled_peak", "host_bytes", "overhead", "step_seconds", "result")


def _diff(options: Options) -> Answer:
    first, second = options.first, options.second
    changed = [
        (name, _figure(first, name), _figure(second, name))
        for name in _FIGURES
        if getattr(first, name) != getattr(second, name)
    ]
    known = dict.fromkeys([*first.decisions, *second.decisions])
    decided = [
        (name, *(p.decisions[name].value if name in p.decisions else "-" for p in (first, second)))
        for name in known
        if first.decisions.get(name) is not second.decisions.get(name)
    ]
    record = {
        "figures": {name: [getattr(first, name), getattr(second, name)] for name, *_ in changed},
        "decisions": {name: list(both) for name, *both in decided},
    }
    named = [(name.replace("_", " "), *both) for name, *both in changed]
    parts = {"figure": named, "residual": decided}
    blocks = [Block((what, "first", "second"), part) for what, part in parts.items() if part]
    same = [Block(notes=["The plans are alike."])]
    return Answer(record, blocks or same, code=1 if blocks else 0)


def _figure(step_plan: Plan, name: str) -> str:
    value = getattr(step_plan, name)
    if name in ("overhead", "step_seconds"):
        return format_seconds(value)
    return format_bytes(value) if isinstance(value, int) else str(value)


# frontier


def _frontier_options(parser: argparse.ArgumentParser) -> None:
    _step_options(parser)
    parser.add_argument(
        "--budget",
        action="append",
        metavar="BUDGET",
        help="may be given often; default: 100%% to 30%% of the plain step's peak",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw it into this file")


def _frontier_command(options: Options) -> Answer:
    budgets = options.budget or frontier.SHARES
    args = loading.arguments(options.args)
    step_frontier = frontier.frontier(options.step, *args, budgets=budgets, **_planning(options))
    if options.plot:
        from jdelta import plot

        plot.frontier(step_frontier).savefig(options.plot)
    body = [
        (
            format_bytes(p.budget),
            format_bytes(p.compiled_peak),
            format_bytes(p.host_bytes),
            f"{added:.1%}",
        )
        for p, (_, added) in zip(step_frontier.plans, step_frontier.points, strict=True)
    ]
    floor = [f"floor {format_bytes(step_frontier.floor)}"] if step_frontier.floor else []
    head = ("budget", "compiled peak", "on the host", "overhead")
    record = {"plans": [figures(p) for p in step_frontier.plans], "floor": step_frontier.floor}
    return Answer(record, [Block(head, body, notes=floor)], code=0 if step_frontier.plans else 3)


# max-batch, max-length


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
    parser.add_argument("--step", dest="stride", type=int, default=1, help="try multiples of it")


def _largest_command(options: Options, what: str) -> Answer:
    outcome = largest.largest(
        options.step,
        functools.partial(loading.arguments, options.args),
        options.budget,
        overhead=options.overhead,
        step=options.stride,
        **_planning(options),
    )
    body = [
        (
            str(size),
            "below floor" if peak is None else format_bytes(peak),
            "" if added is None else f"{added:.1%}",
        )
        for size, peak, added in outcome.tried
    ]
    record = {
        what: outcome.size,
        "tried": outcome.tried,
        "plan": figures(outcome.plan) if outcome.plan else None,
    }
    blocks = [Block((what, "compiled peak", "overhead"), body, notes=[f"{what}: {outcome.size}"])]
    return Answer(record, blocks, code=0 if outcome.size else 3)


# targets


def _no_options(_: argparse.ArgumentParser) -> None:
    pass


def _targets(_: Options) -> Answer:
    targets = list(map(published, names()))
    body = [
        (
            t.name,
            t.kind,
            format_bytes(t.memory),
            f"{t.rates.flops('bfloat16') / 1e12:.0f}",
            f"{t.rates.bandwidth / 1e9:.0f}",
            f"{t.rates.device_to_host / 1e9:.0f}",
        )
        for t in targets
    ]
    head = ("target", "device", "memory", "bf16 TFLOP/s", "memory GB/s", "host GB/s")
    record = [
        {"name": t.name, "kind": t.kind, "memory": t.memory, **dataclasses.asdict(t.rates)}
        for t in targets
    ]
    note = "Published rates; the host link is an estimate. Rates of attached devices are measured."
    return Answer(record, [Block(head, body, notes=[note])])


# check


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=loading.plan_file, metavar="PLAN", help="a plan's file")
    parser.add_argument("step", type=loading.function, metavar="MODULE:STEP")
    parser.add_argument("--args", type=loading.function, required=True, metavar="MODULE:FUNCTION")


def _check(options: Options) -> Answer:
    step_plan: Plan = options.plan
    measured = recompiled(step_plan, options.step, loading.arguments(options.args))
    pairs = {
        "compiled peak": (step_plan.compiled_peak, measured.peak),
        "on the host": (step_plan.host_bytes, measured.all_host),
    }
    body = [(what, *map(format_bytes, both)) for what, both in pairs.items()]
    over = measured.peak > step_plan.budget
    same = all(planned == now for planned, now in pairs.values())
    note = "over the budget" if over else "as planned" if same else "within the budget"
    record = {what: list(both) for what, both in pairs.items()} | {"within": not over}
    blocks = [Block(("figure", "planned", "now"), body, notes=[note])]
    return Answer(record, blocks, code=0 if same and not over else 1)


# oom


def _oom_options(parser: argparse.ArgumentParser) -> None:
    _step_options(parser)


def _oom_command(options: Options) -> Answer:
    report = oom.explain_oom(options.step, *loading.arguments(options.args), **_planning(options))
    record = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    record["alive"] = [dataclasses.asdict(a) for a in report.alive]
    record["plan"] = figures(report.plan) if report.plan else None
    return Answer(record, [Block(notes=str(report).splitlines())])


# export


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=loading.plan_file, metavar="PLAN", help="a plan's file")
    parser.add_argument("form", choices=sorted(export.FORMS))


def _export_command(options: Options) -> Answer:
    text = export.export(options.plan, options.form)
    return Answer({options.form: text}, [Block(notes=text.splitlines())])


COMMANDS: Sequence[Command] = (
    Command("plan", "plan a step to a budget", _plan_options, _plan),
    Command("explain", "why a plan decides as it does", _explain_options, _explain_command),
    Command("diff", "how two plans differ", _diff_options, _diff),
    Command("frontier", "what memory costs: several budgets", _frontier_options, _frontier_command),
    Command(
        "max-batch",
        "the largest batch that fits at little cost",
        _largest_options,
        functools.partial(_largest_command, what="batch"),
    ),
    Command(
        "max-length",
        "the longest sequence that fits at little cost",
        _largest_options,
        functools.partial(_largest_command, what="length"),
    ),
    Command("targets", "devices that can be planned for from here", _no_options, _targets),
    Command("check", "compile a plan again and compare", _check_options, _check),
    Command("oom", "what a step needs its memory for", _oom_options, _oom_command),
    Command("export", "a plan in the words of other libraries", _export_options, _export_command),
)
