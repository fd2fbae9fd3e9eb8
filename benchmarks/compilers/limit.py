"""What does the TPU compiler do with offload outside of loops, told of less and less memory?

The MLP (8 unrolled layers, batch 32768) is planned to a budget below what recompute alone reaches,
so that what enters its layers is on the host, in slots of host arrays. The plan's program is
compiled with other options than the plan's own: `xla_tpu_user_reserved_hbm_bytes` leaves the
scheduler so much memory, and XLA's own rematerialisation is on or off. Compute is read off the
schedule, where more of it is recompute that nobody planned, and so is what part of the transfers
hides behind it.

    python -m benchmarks run limit

Results (jax 0.12.0.1, libtpu 0.0.50.1) stand in docs/how-it-works.md. What follows from them stands
in `jdelta/_src/passes/emit.py`.
"""

import functools
from collections.abc import Sequence

from benchmarks import cases, steps, study
from benchmarks.study import Job, Row, Study, mib
from jdelta import remat
from jdelta._src.hlo.measure import measure

STEP, TARGET = "mlp", "tpu:v5e:2x2"
GIB_LEFT = (None, 6, 5, 4, 3, 2, 0)
NO_REMAT = {"xla_tpu_rematerialization_min_size_in_bytes": str(1 << 62)}
EXACTLY = {"xla_tpu_scheduler_percent_shared_memory_limit": "100"}
LEFT = {None: "all (16 GiB)", 0: "none"}
HEADS = (
    *("memory left to the scheduler", "peak / host, XLA's own recompute on", "compute"),
    *("peak / host, off", "compute"),
)


@functools.cache
def planned(step: str) -> tuple[cases.Program, int]:
    """The program to compile, and its planned host bytes."""
    case = steps.build(step, remat=remat)
    _, plan = cases.plan(case, "3.5GiB", TARGET)
    assert plan is not None
    return cases.planned(case, plan), plan.host_bytes


def row(step: str, left: int | None, recompute: bool) -> Row:
    """Compile the program once."""
    program, host_bytes = planned(step)
    reserved = {} if left is None else {"xla_tpu_user_reserved_hbm_bytes": _all_but(left, program)}
    options = {**reserved, **EXACTLY, **({} if recompute else NO_REMAT)}
    _, measured = measure(program.lower(), program.target, options)
    return {
        "peak": measured.peak,
        "host": measured.host,
        "planned": host_bytes,
        "compute": measured.overlap.compute,
        "hidden": measured.overlap.hidden,
    }


def _all_but(left: int, program: cases.Program) -> str:
    return str(program.target.memory - left * 2**30)


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them, what is left to the scheduler line by line; sizes in MiB."""
    found = {(r["left"], r["recompute"]): r for r in rows}
    lines = [
        [
            LEFT.get(left, f"{left} GiB"),
            *(cell for on in (True, False) for cell in _cells(found.get((left, on)))),
        ]
        for left in study.values(rows, "left")
    ]
    return study.table(HEADS, lines, rows)


def _cells(r: Row | None) -> list[str]:
    return (
        [f"{mib(r['peak'])} / {mib(r['host'])}", f"{r['compute']:.3f} s"] if r else ["not run", ""]
    )


def jobs(left: Sequence[int | None] = GIB_LEFT) -> list[Job]:
    """XLA's own recompute on, then off."""
    return [Job(STEP, {"left": n, "recompute": on}) for on in (True, False) for n in left]


STUDY = Study(
    "limit",
    "What does the TPU compiler do with offload outside of loops, told of less and less memory?",
    jobs,
    row,
    tables,
)
