"""Whether a change of the code changes what is decided: plans of about forty steps, to be compared.

Half of the plans are made with a stand-in for the compiler, which says of each program what jdelta
predicts; the others with the compilers of the targets. Nothing is run. Of a plan all is kept that a
user could see: decisions, peaks, bytes on the host, predicted overhead; of a refusal its words.

    python -m benchmarks run decisions --json before.json      before the change
    python -m benchmarks run decisions --json after.json       after it
    python -m benchmarks table decisions --json before.json --json after.json
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jdelta
from benchmarks import study
from benchmarks.study import Job, Row, Study
from tests.programs import PROGRAMS, unmarked
from tests.stand_in import lowering_to_itself, saying_what_is_predicted

TARGETS = ("tpu:v5e:2x2", "cuda:h100", "cpu")
SHARE = 0.6
"""Of the plain step's peak: the budget of each plan."""

STAND_IN, REAL = "stand-in", "real"

STEPS = [name for name, program in PROGRAMS.items() if program.large][::9]
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
        step_fn, args = program.make(program.large, unmarked)
        options: dict[str, Any] = dict(program.options) | {"history": jdelta.History()}
        if compiler == STAND_IN:  # it has no program in which copies to the host could be found
            options["host_budget"] = 0
        try:
            plan = jdelta.plan(step_fn, SHARE, *args, target=target, **options)
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


HEADS = ("step", "target", "compiler", "what", "before", "after")


def differences(rows: list[Row]) -> list[list[str]]:
    """One line for each figure of a job's last row that is not what it was in its first."""
    lines: list[list[str]] = []
    for job, (was, *later) in study.grouped(rows, "compiler").items():
        now = later[-1] if later else was
        for figure in sorted((now.keys() | was.keys()) - {"jax", "commit"}):
            if now.get(figure) != was.get(figure):
                values = (str(r.get(figure))[:40] for r in (was, now))
                lines.append([*job, figure, *values])
    return lines


def tables(rows: list[Row]) -> str:
    """What is decided differently by the last rows than by the first, and how much that is."""
    changes = differences(rows)
    plans = len(study.grouped(rows, "compiler"))
    shown = study.table(HEADS, changes, rows)
    return f"{shown}\n\nDecided differently: {len(changes)} figures of {plans} plans."


def jobs(step: Sequence[str] = STEPS, compiler: Sequence[str] = (STAND_IN, REAL)) -> list[Job]:
    """With the stand-in the targets take turns."""
    turns = dict(zip(STEPS, itertools.cycle(TARGETS), strict=False))
    simulated = [Job(s, {"target": t, "compiler": STAND_IN}) for s, t in turns.items()]
    compiled = [
        Job(s, {"target": target, "compiler": REAL})
        for target, some in COMPILED.items()
        for s in some
    ]
    chosen = set(step) if step != STEPS else {job.label for job in simulated + compiled}
    every = simulated + compiled
    return [j for j in every if j.label in chosen and j.arguments["compiler"] in compiler]


STUDY = Study(
    "decisions",
    "Does a change of the code change what is decided about forty steps?",
    jobs,
    row,
    tables,
)
