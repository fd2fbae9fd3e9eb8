"""What spilling to files costs, and what it spares, on this machine's CPU.

*devices* of known rates: an unrolled GPT keeps everything, and in the next step spills the scopes
that TBA's rule allows (arXiv 2408.10013, section 3.4), in turns, so that what else runs on the
machine slows both. The devices keep in memory what they are given and sleep as long as one of 1, 2
or 4 GB/s would take; *memory* does not sleep, *disk* is a directory. TBA has memory for what a
device has not taken yet; the pool has it here, and the rule stops, too, where a *small pool* has
not. *rule* is how many scopes the plan spills by the rate that it measures, *formula* the paper's
once more with the nominal rate, *timed* the same with forward times measured here, not predicted;
*ratio* the median over pairs of steps, *work* the processor time that a spilled GiB takes, which
other programs hardly change, *load* the system's load average before the row.

*processes*: resident memory of the GPT-2 example that keeps everything, and of one that spills,
each under `/usr/bin/time -v`. *arguments* is one that loads the framework, makes state and batch,
and ends: what the other two take beyond that is for the step (its compiler too). Both train on the
same batches, so that their losses are equal.

*copies* to the pool of the spill store and back, by one core. A processor compares the addresses of
loads and stores within a page only. A copy whose source and target begin at nearly the same place
of their pages may so let each load wait for a store that it has nothing to do with; XLA's tensors
begin at a multiple of 64 bytes, the pool's blocks at a page. *in* is the copy to the pool, *out*
the copy back, both with their sums, and *numpy* NumPy's copy, in GB/s.

    python -m benchmarks run spill --what devices --with directory=/nvme
"""

import ctypes
import dataclasses
import glob
import itertools
import mmap
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdelta
from benchmarks import study
from benchmarks.models import Case, find, identity
from benchmarks.study import Job, Row, Study, mib
from jdelta._src.backends.target import resolve
from jdelta._src.residuals.file_link import to_files
from jdelta._src.residuals.links import Link
from jdelta._src.residuals.residual import Residual
from jdelta._src.spill import rates_of
from jdelta._src.spill.library import library

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

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt2.py"
EXAMPLES = {"nano": ("--batch", "128", "--steps", "6")}
BUDGET = "40%"
WAYS = ("arguments", "plain", "planned")
TIME = "/usr/bin/time"
PROCESS_HEADS = "step process resident beyond below loss files jax".split()
_PEAK = re.compile(r"Maximum resident set size \(kbytes\): (\d+)")

PAGE, BLOCK = 4096, 1 << 20
SIZE = 64 * BLOCK
OFFSETS = (0, 16, 64, 128, 1024, 2048, PAGE - 64)
ROUNDS = 7
COPY_HEADS = ["offset", "in", "out", "numpy"]


def row(step: str, what: str, directory: str = ".", **asked: Any) -> Row:
    """Steps on a device, a process, or copies."""
    if what == "copies":
        return copy_row(**asked)
    return (device_row if what == "devices" else process_row)(step, directory=directory, **asked)


def case(step: str, remat: Any = identity, **options: Any) -> Case:
    """A training step in a size for this machine."""
    shape = {**SHAPE, **STEPS[step], **options}
    return dataclasses.replace(find("gpt2"), **shape).case(step, remat)


def device_row(step: str, device: str, directory: str = ".", repeats: int = REPEATS) -> Row:
    """Plans one step for one device, and runs both in turns."""
    spill, rate = _spill(device, directory)
    rates = rates_of(spill)
    marked = case(step, jdelta.remat)
    args = marked.step, None, marked.state, marked.batch
    residuals = jdelta.plan(*args, donate_argnums=0).residuals
    link = to_files(spill, rates, residuals, resolve("cpu"))
    groups = [list(group) for _, group in itertools.groupby(residuals, key=lambda r: r.region)]
    scopes = [sum(r.bytes for r in group if _may(r, link)) for group in groups]
    bare_scopes = {r.region for r in residuals if r.name in link.bare}
    figures = {
        "rates": [rates.write, rates.read],
        "scopes": scopes,
        "modelled": [sum(r.seconds for r in group) for group in groups],
        "forward": [_forward_seconds(step)] * len(scopes),
        "rate": rate,
        "rule": len(scopes) - len(bare_scopes),
        "load": os.getloadavg()[0],
    }
    pin = {
        glob.escape(r.name): "spill" if r.name not in link.bare and _may(r, link) else "save"
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


def _may(r: Residual, link: Link) -> bool:
    return r.needed and link.refusal(r) is None


def _forward_seconds(step: str) -> float:
    """Measured seconds of one block's forward pass: what more blocks take, over their number."""
    layers = STEPS[step]["layers"]
    runs = {}
    for count in (1, layers):
        workload = case(step, layers=count)
        runs[count] = jax.jit(workload.loss), workload.init(0)
    seconds: dict[int, list[float]] = {count: [] for count in runs}
    for _ in range(WARMUP + REPEATS):
        for count, (loss, args) in runs.items():
            start = time.perf_counter()
            loss(*args).block_until_ready()
            seconds[count].append(time.perf_counter() - start)
    one, all_ = (statistics.median(seconds[count][WARMUP:]) for count in (1, layers))
    return (all_ - one) / (layers - 1)


def _in_turns(plain: Case, runs: dict[str, Any], repeats: int) -> Row:
    """Seconds, and seconds of the processors, of each step of each run."""
    states = {way: plain.init(0) for way in runs}
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


def device_cells(r: Row) -> list[str]:
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


def process_row(step: str, way: str, directory: str = ".") -> Row:
    """Runs one process."""
    command = [sys.executable, str(EXAMPLE), "--model", step, *EXAMPLES[step], "--only", way]
    budget = ["--budget", BUDGET] if way == "planned" else []
    spill = ["--spill", directory] if way == "planned" else []
    done = subprocess.run([TIME, "-v", *command, *budget, *spill], capture_output=True, text=True)
    peak = _PEAK.search(done.stderr)
    if done.returncode or not peak:
        raise SystemExit(f"{way}: expected GNU time's report of a run; got\n{done.stderr[-3000:]}")
    loss = re.search(r"loss after \d+ steps: (\S+)", done.stdout)
    files = re.search(r"in files +(\S+ \S+) in", done.stdout)
    return {
        "resident": int(peak[1]) * 1024,
        "loss": loss and float(loss[1]),
        "files": files and files[1],
        "options": [*EXAMPLES[step], *budget],
    }


def process_cells(r: Row, rows: list[Row]) -> list[str]:
    """One line of the table; sizes in MiB."""
    peaks = {other["way"]: other["resident"] for other in rows if other["step"] == r["step"]}
    beyond = {way: peak - peaks["arguments"] for way, peak in peaks.items()}
    has_both = r["way"] == "planned" and "plain" in beyond
    below = study.share(beyond["plain"] - beyond["planned"], beyond["plain"]) if has_both else ""
    loss = "" if r["loss"] is None else f"{r['loss']:.6f}"
    sizes = [mib(r["resident"]), mib(beyond[r["way"]]), below]
    return [r["step"], r["way"], *sizes, loss, r["files"] or "", r["jax"]]


def memory() -> np.ndarray[Any, Any]:
    """Memory that begins with a page, larger than caches are, its pages in place."""
    room = np.frombuffer(mmap.mmap(-1, SIZE + PAGE), np.uint8)
    room[:] = 1
    return room


def rate(copy: Callable[[int], Any]) -> float:
    """Bytes a second of the quickest round over all blocks."""
    seconds: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for at in range(0, SIZE, BLOCK):
            copy(at)
        seconds.append(time.perf_counter() - start)
    return SIZE / min(seconds)


def copy_row(offset: int) -> Row:
    """The rates for tensors that begin so many bytes after a page does."""
    pool, tensors = memory(), memory()[offset:]
    block, tensor = pool.ctypes.data, tensors.ctypes.data
    move, sums = library().jdelta_spill_copy, (ctypes.c_uint64 * 16)()

    def numpy_copy(at: int) -> None:
        pool[at : at + BLOCK] = tensors[at : at + BLOCK]

    return {
        "in": rate(lambda at: move(block + at, tensor + at, BLOCK, sums)),
        "out": rate(lambda at: move(tensor + at, block + at, BLOCK, sums)),
        "numpy": rate(numpy_copy),
    }


def copy_cells(r: Row) -> list[str]:
    """One line of the table."""
    return [str(r["offset"]), *(f"{r[head] / 1e9:.1f}" for head in COPY_HEADS[1:])]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them, a table for each kind that there is."""
    of = {what: [r for r in rows if r["what"] == what] for what in WHAT}
    processes = of["processes"]
    lines = {
        "devices": (HEADS, map(device_cells, of["devices"])),
        "processes": (PROCESS_HEADS, (process_cells(r, processes) for r in processes)),
        "copies": (COPY_HEADS, map(copy_cells, of["copies"])),
    }
    return study.page(study.table(*lines[what], of[what]) for what in WHAT)


WHAT = ("devices", "processes", "copies")


def jobs(
    what: Sequence[str] = WHAT,
    device: Sequence[str] = tuple(DEVICES),
    step: Sequence[str] = tuple(STEPS),
    way: Sequence[str] = WAYS,
    offset: Sequence[int] = OFFSETS,
) -> list[Job]:
    """Steps on devices, ways of a process, and places where a tensor begins."""
    job_lists = {
        "devices": [Job(s, {"what": "devices", "device": d}) for s in step for d in device],
        "processes": [Job(e, {"what": "processes", "way": w}) for e in EXAMPLES for w in way],
        "copies": [Job("copies", {"what": "copies", "offset": at}) for at in offset],
    }
    return [job for w in what for job in job_lists[w]]


STUDY = Study(
    "spill",
    "What does spilling to files cost on devices of known rates, and what does it spare?",
    jobs,
    row,
    tables,
)
