"""How long planning takes beside the compiler, and how that grows with the layers.

The compiler is a stand-in that says of each program what jdelta predicts, so what is measured is
jdelta's own work and JAX's tracing: processor seconds of this machine, one plan in a fresh process.
Each step has a budget of 60 % of its plain peak.

    python -m benchmarks run planning
    python -m benchmarks table planning
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax

import jdelta
from benchmarks import study
from benchmarks.models import build, identity
from benchmarks.study import Job, Row, Study
from tests.stand_in import lowering_to_itself, saying_what_is_predicted

SHARE = 0.6
"""Of the plain step's peak: the budget of each plan."""

STEPS: dict[str, dict[str, Any]] = {
    f"gpt2 {layers} layers length 512{' scanned' if scan else ''}": {
        "layers": layers,
        "scan": scan,
        "length": 512,
        "batch": 8,
    }
    for scan in (False, True)
    for layers in (6, 12, 24, 48, 96)
}
REMATS = {"marked": jdelta.remat, "found": identity}
HEADS = ("step", "target", "regions", "seconds", "seconds a layer", "programs", "compiles")


def planned(step: str, target: str, regions: str) -> Row:
    """Plans one step in this process."""
    case = build("gpt2", remat=REMATS[regions], **STEPS[step])
    args = case.state, case.batch
    jax.eval_shape(case.step, *args)  # what is imported and made once
    programs = mock.Mock(side_effect=lowering_to_itself)
    compiled = mock.Mock(wraps=saying_what_is_predicted)
    gc.collect()
    with (
        mock.patch("jdelta._src.search.propose.emit", programs),
        mock.patch("jdelta._src.search.history.measure", compiled),
    ):
        begin = time.process_time()
        jdelta.plan(case.step, SHARE, *args, target=target)
        seconds = time.process_time() - begin
    return {
        "seconds": seconds,
        "programs": programs.call_count,
        "compiles": compiled.call_count,
    }


def row(step: str, target: str, regions: str) -> Row:
    """Plans one step in a process of its own."""
    call = f"planned(*{[step, target, regions]!r})"
    run = f"import json; from {__name__} import planned; print(json.dumps({call}))"
    process = subprocess.run(
        [sys.executable, "-c", run], check=True, capture_output=True, text=True
    )
    return json.loads(process.stdout.splitlines()[-1])


def cells(r: Row) -> list[str]:
    """One line of the table."""
    layers = STEPS[r["step"]]["layers"]
    each = f"{r['seconds'] / layers:.2f}"
    counts = str(r["programs"]), str(r["compiles"])
    return [r["step"], r["target"], r["regions"], f"{r['seconds']:.1f}", each, *counts]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(
    step: Sequence[str] = tuple(STEPS),
    target: Sequence[str] = ("cuda:h100",),
    regions: Sequence[str] = tuple(REMATS),
) -> list[Job]:
    """Every step with its layers marked, and with nothing marked."""
    return [Job(s, {"target": t, "regions": r}) for t in target for r in regions for s in step]


STUDY = Study(
    "planning",
    "How long does planning take beside the compiler, as layers grow?",
    jobs,
    row,
    tables,
)
