"""Spilling to devices of known rates: where TBA's rule stops, and what the spilled scopes cost.

An unrolled GPT on this machine's CPU keeps everything, and in the next step spills the scopes that
the rule allows (arXiv 2408.10013, section 3.4), in turns, so that what else runs on the machine
slows both. The devices keep in memory what they are given and sleep as long as one of 1, 2 or 4
GB/s would take; *memory* does not sleep, *disk* is a directory. TBA has memory for what a device
has not taken yet; the pool has it here, and the rule stops, too, where a *small pool* has not.

*rule* is how many scopes the plan spills by the rate that it measures, *formula* the paper's once
more with the nominal rate, *timed* the same with forward times measured here, not predicted;
*ratio* the median over pairs of steps, *work* the processor time that a spilled GiB takes, which
other programs hardly change, *load* the system's load average before the row.

    python -m benchmarks run throttled --with directory=/nvme
"""

import dataclasses
import glob
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jdelta
from benchmarks import study
from benchmarks.models import Case, find, identity
from benchmarks.study import Job, Row, Study, mib
from jdelta._src.backends.target import resolve
from jdelta._src.residuals.file_link import Way, to_files
from jdelta._src.residuals.residual import Residual
from jdelta._src.spill import rates_of

SHAPE = {"vocab": 1024, "length": 256, "dtype": jnp.float32, "scan": False}
STEPS = {
    "wide": {"layers": 4, "width": 1024, "heads": 8, "batch": 4},
    "narrow": {"layers": 6, "width": 256, "heads": 4, "batch": 8},
}
DEVICES = {
    **{f"{rate} GB/s": {"adapter": "memory", "rate": rate * 1e9} for rate in (1, 2, 4)},
    "1 GB/s, small pool": {"adapter": "memory", "rate": 1e9, "pool": "128MiB"},
    "memory": {"adapter": "memory"},
    "disk": {},
}
POOL = "256MiB"
WARMUP, REPEATS = 2, 30
HEADS = "step device measured formula timed rule written keep spill ratio work load jax".split()


def case(step: str, remat: Any = identity, **options: Any) -> Case:
    """A training step in a size for this machine."""
    shape = {**SHAPE, **STEPS[step], **options}
    return dataclasses.replace(find("gpt2"), **shape).case(step, remat)


def row(step: str, device: str, directory: str = ".", repeats: int = REPEATS) -> Row:
    """Plans one step for one device, and runs both in turns."""
    spill, rate = _spill(device, directory)
    rates = rates_of(spill)
    marked = case(step, jdelta.remat)
    args = marked.step, None, marked.state, marked.batch
    residuals = jdelta.plan(*args, donate_argnums=0).residuals
    way = to_files(spill, rates, residuals, resolve("cpu"))
    groups = [list(group) for _, group in itertools.groupby(residuals, key=lambda r: r.region)]
    scopes = [sum(r.bytes for r in group if _may(r, way)) for group in groups]
    late = {r.region for r in residuals if r.name in way.bare}
    figures = {
        "rates": [rates.write, rates.read],
        "scopes": scopes,
        "modelled": [sum(r.seconds for r in group) for group in groups],
        "forward": [_forward_seconds(step)] * len(scopes),
        "rate": rate,
        "rule": len(scopes) - len(late),
        "load": os.getloadavg()[0],
    }
    pin = {
        glob.escape(r.name): "spill" if r.name not in way.bare and _may(r, way) else "save"
        for r in residuals
    }
    if "spill" not in pin.values():
        return figures
    planned = jdelta.plan(*args, donate_argnums=0, spill=spill, pin=pin)
    assert planned.store
    plain = case(step)
    kept = jax.jit(plain.step, donate_argnums=0).lower(plain.state, plain.batch).compile()
    return {
        **figures,
        "written": planned.spill_written,
        **_in_turns(plain, {"keep": kept, "spill": planned.jit()}, repeats),
        "counters": dataclasses.asdict(planned.store.counters()),
    }


def predicted_scopes(bytes_: Sequence[float], seconds: Sequence[float], bandwidth: float) -> int:
    """Scopes that are spilled by the formula of the paper, which is written out here once more.

    Args:
        bytes_: Bytes of each scope that could be spilled.
        seconds: Seconds of each scope's forward pass.
        bandwidth: Bytes per second.
    """
    for n, size in enumerate(bytes_):
        volume = sum(bytes_[:n]) + 2 * size
        if volume / (3 * sum(seconds) - 2 * sum(seconds[:n])) > bandwidth:
            return n
    return len(bytes_)


def _spill(device: str, directory: str) -> tuple[jdelta.Spill, float | None]:
    """A device, and its rate if it sleeps."""
    options: dict[str, Any] = {"pool": POOL, **DEVICES[device]}
    rate = options.pop("rate", None)
    return jdelta.Spill(directory, write_rate=rate, read_rate=rate, **options), rate


def _may(r: Residual, way: Way) -> bool:
    return r.needed and way.refusal(r) is None


def _forward_seconds(step: str) -> float:
    """Measured seconds of one block's forward pass: what more blocks take, over their number."""
    layers = STEPS[step]["layers"]
    runs = {}
    for count in (1, layers):
        made = case(step, layers=count)
        runs[count] = jax.jit(made.loss), made.init(0)
    seconds: dict[int, list[float]] = {count: [] for count in runs}
    for _ in range(WARMUP + REPEATS):
        for count, (loss, args) in runs.items():
            start = time.perf_counter()
            loss(*args).block_until_ready()
            seconds[count].append(time.perf_counter() - start)
    one, all_ = (statistics.median(seconds[count][WARMUP:]) for count in (1, layers))
    return (all_ - one) / (layers - 1)


def _in_turns(made: Case, runs: dict[str, Any], repeats: int) -> Row:
    """Seconds, and seconds of the processors, of each step of each run."""
    states = {way: made.init(0) for way in runs}
    times: dict[str, list[list[float]]] = {way: [] for way in runs}
    for _ in range(WARMUP + repeats):
        for way, run in runs.items():
            state, batch = states[way]
            start, work = time.perf_counter(), time.process_time()
            state, metrics = run(state, batch)
            jax.block_until_ready((state, metrics))
            now = [time.perf_counter() - start, time.process_time() - work]
            times[way].append(now)
            states[way] = state, batch
    return {way: {"seconds": list(s), "work": list(w)} for way, (s, w) in _columns(times)}


def _columns(times: dict[str, list[list[float]]]) -> Any:
    return ((way, zip(*rows[WARMUP:], strict=True)) for way, rows in times.items())


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    measured = f"{min(r['rates']) / 1e9:.2f} GB/s"
    formula = [
        predicted_scopes(r["scopes"], r[times], r["rate"]) if r["rate"] else ""
        for times in ("modelled", "forward")
    ]
    rule = f"{r['rule']} of {len(r['scopes'])}"
    head = [r["step"], r["device"], measured, *map(str, formula), rule]
    if "spill" not in r:
        return [*head, "0", "", "", "", "", f"{r['load']:.1f}", r["jax"]]
    keep, spill = r["keep"], r["spill"]
    pairs = zip(spill["seconds"], keep["seconds"], strict=True)
    ratio = statistics.median(s / k for s, k in pairs)
    work = statistics.median(spill["work"]) - statistics.median(keep["work"])
    seconds = [f"{statistics.median(way['seconds']):.2f}" for way in (keep, spill)]
    per_gib = f"{work / (r['written'] / 2**30):.2f}"
    return [
        *head,
        mib(r["written"]),
        *seconds,
        f"{ratio:.2f}x",
        per_gib,
        f"{r['load']:.1f}",
        r["jax"],
    ]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(
    step: Sequence[str] = tuple(STEPS),
    device: Sequence[str] = tuple(DEVICES),
) -> list[Job]:
    return [Job(s, {"device": d}) for s in step for d in device]


STUDY = Study(
    "throttled",
    "Where does TBA's rule stop on devices of known rates, and what do the spilled scopes cost?",
    jobs,
    row,
    tables,
)
