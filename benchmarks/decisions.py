"""Whether a change of the code changes what is decided: plans of about forty steps, to be compared.

Half of the plans are made with a stand-in for the compiler, which says of each program what jdelta
predicts; the others with the compilers of the targets. Nothing is run. Of a plan all is kept that a
user could see: decisions, peaks, bytes on the host, predicted overhead; of a refusal its words.

    python -m benchmarks.decisions --json before.json      before the change
    python -m benchmarks.decisions --json after.json       after it
    python -m benchmarks.decisions --json after.json --compare before.json
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jdelta
from benchmarks import record
from benchmarks.record import Row
from tests.programs import PROGRAMS, unmarked
from tests.stand_in import lowering_to_itself, saying_what_is_predicted

TARGETS = ("tpu:v5e:2x2", "cuda:h100", "cpu")
SHARE = 0.6
"""Of the plain step's peak: the budget of each plan."""

STAND_IN, REAL = "stand-in", "real"

STEPS = [name for name, found in PROGRAMS.items() if found.large][::9]
"""Some of every kind of the zoo."""

COMPILED = {
    "tpu:v5e:2x2": ["control_flow.scan_reversed", "layers.scanned_mlp", "modules.linen_scanned"],
    "cuda:h100": STEPS[::4],
    "cpu": STEPS[2::4],
}
"""By target what its own compiler judges: on a TPU what it compiles in seconds, not in minutes."""


@contextlib.contextmanager
def judged_by(compiler: str) -> Iterator[None]:
    """What says of programs how much they take."""
    if compiler == REAL:
        yield
        return
    with (
        mock.patch("jdelta._src.search.propose.emit", lowering_to_itself),
        mock.patch("jdelta._src.search.history.measure", saying_what_is_predicted),
    ):
        yield


def row(step: str, target: str, compiler: str) -> Row:
    """What is decided about one program."""
    program = PROGRAMS[step]
    assert program.large
    with program.around(), judged_by(compiler):
        made, args = program.make(program.large, unmarked)
        options: dict[str, Any] = dict(program.options) | {"history": jdelta.History()}
        if compiler == STAND_IN:  # it has no program in which copies to the host could be found
            options["host_budget"] = 0
        try:
            plan = jdelta.plan(made, SHARE, *args, target=target, **options)
        except jdelta.JdeltaError as error:
            return {"error": type(error).__name__, "says": str(error)}
    return {
        "decisions": {name: str(d) for name, d in plan.decisions.items()},
        "predicted_peak": plan.predicted_peak,
        "compiled_peak": plan.compiled_peak,
        "host_bytes": plan.host_bytes,
        "floor": plan.floor,
        "ceiling": plan.ceiling,
        "overhead": plan.overhead,
        "step_seconds": plan.step_seconds,
        "compiles": plan.compiles,
        "result": plan.result,
    }


def jobs() -> list[dict[str, str]]:
    """With the stand-in the targets take turns."""
    turns = zip(STEPS, itertools.cycle(TARGETS), strict=False)
    simulated = [{"step": s, "target": target, "compiler": STAND_IN} for s, target in turns]
    compiled = [
        {"step": step, "target": target, "compiler": REAL}
        for target, steps in COMPILED.items()
        for step in steps
    ]
    return simulated + compiled


def differences(before: list[Row], after: list[Row]) -> list[list[str]]:
    """One line for each figure of a row that is not what it was."""
    apart = {"jax", "commit"}
    key = ("step", "target", "compiler")
    old = {tuple(r[k] for k in key): r for r in before}
    lines: list[list[str]] = []
    for r in after:
        was = old.get(tuple(r[k] for k in key), {})
        for field in sorted((r.keys() | was.keys()) - apart):
            if r.get(field) != was.get(field):
                values = (str(x.get(field))[:40] for x in (was, r))
                lines.append([*(r[k] for k in key), field, *values])
    return lines


def main() -> None:
    parser = record.parser(__doc__, {job["step"]: None for job in jobs()})
    parser.add_argument("--compare", type=Path, help="rows of an earlier revision")
    options = parser.parse_args()
    chosen = [job for job in jobs() if job["step"] in (options.step or [job["step"]])]
    rows = record.run(chosen, row, options.json)
    if options.compare:
        found = differences(record.load(options.compare), rows)
        heads = ("step", "target", "compiler", "what", "before", "after")
        record.show(f"what is decided differently: {len(found)} figures", heads, found)
        raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
