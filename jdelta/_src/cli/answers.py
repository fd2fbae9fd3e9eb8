"""What each command does with the options it is given, and what it says then."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jdelta._src.api import frontier, largest, oom
from jdelta._src.api.plan import Plan
from jdelta._src.api.planning import plan
from jdelta._src.backends.chips import CHIPS
from jdelta._src.backends.target import Target, names, published
from jdelta._src.cli import loading
from jdelta._src.cli.output import Answer, Block, in_options
from jdelta._src.plan.planned_step import recompiled
from jdelta._src.report import explain, export
from jdelta._src.report.printed import printed
from jdelta._src.report.rows import HEAD, NUMBERED
from jdelta._src.sizes import format_bytes, format_seconds
from jdelta._src.versions import installed_with

Options = argparse.Namespace


def _planning(options: Options) -> dict[str, Any]:
    """The options of `jdelta.plan`."""
    return {
        "target": options.target,
        **_arguments("donate", options.donate),
        **_arguments("static", options.static),
        "host_budget": options.host_budget,
        "spill": options.spill,
        "solver": options.solver,
        "pin": dict(options.pin),
        "per_layer": options.per_layer,
        "reorder": options.reorder,
    }


def _arguments(option: str, chosen: Sequence[int | str] | None) -> dict[str, Any]:
    """Arguments as `jdelta.plan` takes them; where none is named, what ``jax.jit`` was told holds.

    For example ``{"donate_argnums": (0,), "donate_argnames": ("cache",)}``.
    """
    if not chosen:
        return {}
    return {
        f"{option}_argnums": tuple(a for a in chosen if isinstance(a, int)),
        f"{option}_argnames": tuple(a for a in chosen if isinstance(a, str)),
    }


def _plan(options: Options) -> Answer:
    step_plan = plan(
        options.step,
        options.budget,
        *loading.arguments(options.step, options.args),
        **_planning(options),
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
    table = Block(HEAD, parts.body, prose=[parts.rest] if parts.rest else [])
    return [
        Block(notes=in_options(parts.title).splitlines()),
        table if parts.body else Block(notes=parts.table.splitlines()),
        Block(figures=parts.figures),
    ]


def _explain(options: Options) -> Answer:
    if options.name is None:
        return Answer(figures(options.plan), _table(options.plan))
    explanations = explain.explain(options.plan, options.name)
    record = [{**dataclasses.asdict(e), "decision": e.decision.value} for e in explanations]
    return Answer(record, [Block(prose=str(e).splitlines()) for e in explanations])


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
    blocks: list[Block] = []
    if short := [(name.replace("_", " "), *both) for name, *both in changed if name != "result"]:
        blocks.append(Block(("figure", "first", "second"), short))
    if first.result != second.result:
        blocks.append(Block(figures={"first": first.result, "second": second.result}))
    if decided:
        blocks.append(Block(("residual", "count", "first", "second"), _alike(decided)))
    same = [Block(notes=["The plans are alike."])]
    return Answer(record, blocks or same, code=1 if blocks else 0)


def _alike(decided: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows of residuals that differ only in the numbers of their layers as one, and how many."""
    count = Counter((NUMBERED.sub("*", name), *both) for name, *both in decided)
    names = {(NUMBERED.sub("*", name), *both): name for name, *both in decided}
    return [
        (key[0] if n > 1 else names[key], f"×{n}" if n > 1 else "", *key[1:])
        for key, n in count.items()
    ]


def _figure(step_plan: Plan, name: str) -> str:
    value = getattr(step_plan, name)
    if name in ("overhead", "step_seconds"):
        return format_seconds(value)
    return format_bytes(value) if isinstance(value, int) else str(value)


def _frontier(options: Options) -> Answer:
    budgets = options.budget or frontier.SHARES
    args = loading.arguments(options.step, options.args)
    step_frontier = frontier.frontier(options.step, *args, budgets=budgets, **_planning(options))
    if options.plot:
        from jdelta import plot

        plot.frontier(step_frontier).savefig(options.plot)
    record = {"plans": [figures(p) for p in step_frontier.plans], "floor": step_frontier.floor}
    block = Block(frontier.HEAD, step_frontier.cells, notes=step_frontier.notes)
    return Answer(record, [block], code=0 if step_frontier.plans else 3)


def _largest(options: Options, what: str) -> Answer:
    most = options.most or largest.MOST
    outcome = largest.largest(
        options.step,
        functools.partial(loading.arguments, options.step, options.args),
        options.budget,
        overhead=options.overhead,
        step=options.stride,
        most=most,
        **_planning(options),
    )
    body = [
        (
            str(size),
            "" if peak is None else format_bytes(peak),
            "" if added is None else f"{added:.1%}",
            _verdict(added, options.overhead),
        )
        for size, peak, added in outcome.tried
    ]
    record = {
        what: outcome.size,
        "tried": outcome.tried,
        "too_large": outcome.too_large,
        "plan": figures(outcome.plan) if outcome.plan else None,
    }
    prose = [f"{what}: {outcome.size}; {_ended(outcome, options.overhead)}."]
    blocks = [Block((what, "compiled peak", "overhead", "verdict"), body, prose=prose)]
    return Answer(record, blocks, code=0 if outcome.size else 3)


def _verdict(added: float | None, overhead: float) -> str:
    """How the plan for one size came out."""
    if added is None:
        return "does not fit"
    return "fits" if added <= overhead else "too dear"


def _ended(outcome: largest.Largest, overhead: float) -> str:
    """How a search for the largest size ended."""
    count = len(outcome.tried)
    tried = f"{count} sizes were tried" if count > 1 else "one size was tried"
    if outcome.too_large is None:
        return f"{tried}, as many as --most says, and none was too large"
    peak = next(peak for size, peak, _ in outcome.tried if size == outcome.too_large)
    why = "does not fit" if peak is None else f"adds more than {overhead:.0%}"
    return f"{tried}, and {outcome.too_large} {why}"


def _targets(_: Options) -> Answer:
    targets = list(map(published, names()))
    body = [
        (
            t.name,
            t.kind,
            format_bytes(t.memory),
            format_bytes(_of_device(t)),
            f"{t.rates.flops('bfloat16') / 1e12:.0f}",
            f"{t.rates.bandwidth / 1e9:.0f}",
            f"{t.rates.device_to_host / 1e9:.0f}",
        )
        for t in targets
    ]
    head = ("target", "device", "memory", "of", "bf16 TFLOP/s", "memory GB/s", "host GB/s")
    record = [
        {
            "name": t.name,
            "kind": t.kind,
            "memory": t.memory,
            "device_memory": _of_device(t),
            "compiler": t.backend.devices.has_compiler(),
        }
        | dataclasses.asdict(t.rates)
        for t in targets
    ]
    reasons = dict.fromkeys(t.backend.devices.memory_reason() for t in targets)
    prose = [
        *_here(targets),
        "Memory is what a program can use of that of the device.",
        *filter(None, reasons),
        "Published rates; the host link is an estimate. Rates of attached devices are measured.",
    ]
    return Answer(record, [Block(head, body, prose=prose)])


def _here(targets: Sequence[Target]) -> list[str]:
    """Which devices are planned for without ``--target``, and what has to be installed."""
    missing = {t.platform: None for t in targets if not t.backend.devices.has_compiler()}
    return [
        "Without --target a step is planned for this machine's own devices: cpu where it has no "
        "accelerator.",
        *(f"Targets {name}:… need an install: {installed_with(name)}" for name in missing),
    ]


def _of_device(target: Target) -> int:
    """Bytes of memory that a device has."""
    platform, chip, _ = target.name.split(":")
    return CHIPS[platform][chip].memory


def _check(options: Options) -> Answer:
    step_plan: Plan = options.plan
    measured = recompiled(step_plan, options.step, loading.arguments(options.step, options.args))
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


def _oom(options: Options) -> Answer:
    report = oom.explain_oom(
        options.step,
        *loading.arguments(options.step, options.args),
        budget=options.budget,
        **_planning(options),
    )
    record = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    record["alive"] = [dataclasses.asdict(a) for a in report.alive]
    record["plan"] = figures(report.plan) if report.plan else None
    return Answer(record, [Block(prose=str(report).splitlines())])


def _export(options: Options) -> Answer:
    text = export.export(options.plan, options.form)
    return Answer({options.form: text}, [Block(notes=text.splitlines())])


ANSWERS: Mapping[str, Callable[[Options], Answer]] = MappingProxyType(
    {
        "plan": _plan,
        "explain": _explain,
        "diff": _diff,
        "frontier": _frontier,
        "max-batch": functools.partial(_largest, what="batch"),
        "max-length": functools.partial(_largest, what="length"),
        "targets": _targets,
        "check": _check,
        "oom": _oom,
        "export": _export,
    }
)
"""What runs each command of `jdelta._src.cli.commands.COMMANDS`."""
