"""Recompute, offload or keep: throughput over activation memory, as TBA draws it (its ROK curve).

Three-layer (scanned) BERT, GPT and T5 on this machine's CPU at batch 4 to 32, one row a run: what
is kept, recomputed layer by layer, written to files, or mixed by a plan for half of the memory that
keeping takes beside arguments and results (or for the least that a plan can do with). Activation
memory is what the compiled step has beside these, the pool of spilled values included. Throughput
is the floating-point work of the plain step (unrolled, by XLA's own count) over the median time of
a step. Offload to host memory has no row: a CPU's host memory is its device memory. What else runs
on the machine shows in the times.

    python -m benchmarks.rok --directory /nvme --json benchmarks/results/rok.json
    python -m benchmarks.rok --json benchmarks/results/rok.json --picture docs/rok.png
"""

import dataclasses
import glob
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import jdelta
from benchmarks import record
from benchmarks.models import Case, checkpoint, find, identity
from benchmarks.record import Row, mib
from jdelta import plot
from jdelta._files import to_files
from jdelta._spill import rates_of
from jdelta._target import resolve

SHAPE = {
    "layers": 3,
    "width": 512,
    "heads": 8,
    "vocab": 4096,
    "length": 256,
    "dtype": jnp.float32,
    "scan": True,
}
POOL = "64MiB"
STEPS = {"bert": "bert-base", "gpt": "gpt2", "t5": "t5-large"}
BATCHES = (4, 8, 16, 32)
WAYS = ("keep", "recompute", "spill", "mixed")
WARMUP, REPEATS = 2, 5
HEADS = "step batch way activation GFLOP/s seconds written jax".split()


def case(step: str, batch: int, remat: Any = identity, **options: Any) -> Case:
    """A training step in a size for this machine."""
    config = find(STEPS[step])
    known = {field.name for field in dataclasses.fields(config)}
    shape = {**SHAPE, "hidden": 2048, "batch": batch, **options}
    changed = {key: value for key, value in shape.items() if key in known}
    return dataclasses.replace(config, **changed).case(step, remat)


def row(step: str, batch: int, way: str, directory: str) -> Row:
    """Runs one step in one way."""
    plain = case(step, batch)
    kept = _compiled(plain)
    unrolled = case(step, batch, scan=False)  # loops count once
    lowered = jax.jit(unrolled.step).lower(unrolled.state, unrolled.batch)
    flops = lowered.cost_analysis()["flops"]
    if way in ("keep", "recompute"):
        run = kept if way == "keep" else _compiled(case(step, batch, checkpoint(STEPS[step])))
        return {"flops": flops, "activation": _activation(run), **_timed(run, plain)}
    made = _plan(case(step, batch, jdelta.remat), way, directory, kept)
    run = made.jit()
    pool = min(made.spill_bytes, jdelta.Spill(directory, pool=POOL).pool_bytes)
    activation = _activation(made.compiled) + pool
    figures = _timed(run, plain)
    written = made.store.counters().written if made.store else 0
    counts = {"written": written / (WARMUP + REPEATS), "planned": made.spill_written}
    return {"flops": flops, "activation": activation, **figures, **counts}


def _compiled(made: Case) -> jax.stages.Compiled:
    return jax.jit(made.step, donate_argnums=0).lower(made.state, made.batch).compile()


def _activation(compiled: jax.stages.Compiled) -> int:
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes


def _plan(made: Case, way: str, directory: str, kept: jax.stages.Compiled) -> jdelta.Plan:
    args = made.step, None, made.state, made.batch
    spill = jdelta.Spill(directory, pool=POOL)
    if way == "mixed":
        memory: Any = kept.memory_analysis()
        given = memory.argument_size_in_bytes + memory.output_size_in_bytes
        resident = given - memory.alias_size_in_bytes
        budget = resident + memory.temp_size_in_bytes // 2
        try:
            return jdelta.plan(made.step, budget, *args[2:], donate_argnums=0, spill=spill)
        except jdelta.BudgetError as error:
            return jdelta.plan(made.step, error.floor, *args[2:], donate_argnums=0, spill=spill)
    residuals = jdelta.plan(*args, donate_argnums=0).residuals
    files = to_files(spill, rates_of(spill), residuals, resolve("cpu"))
    pin = {
        glob.escape(r.name): "spill" if files.refusal(r) is None and r.needed else "save"
        for r in residuals
    }
    return jdelta.plan(*args, donate_argnums=0, spill=spill, pin=pin)


def _timed(run: Any, made: Case) -> Row:
    """Seconds of each step; the state is drawn anew, since it is donated."""
    state, batch = made.init(0)
    seconds: list[float] = []
    for _ in range(WARMUP + REPEATS):
        start = time.perf_counter()
        state, metrics = run(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
    return {"warmup": seconds[:WARMUP], "seconds": seconds[WARMUP:]}


def cells(r: Row) -> list[str]:
    """One line of the table; sizes in MiB."""
    seconds = statistics.median(r["seconds"])
    rate = f"{r['flops'] / seconds / 1e9:.1f}"
    written = mib(r["written"]) if r.get("planned") else ""
    sizes = [mib(r["activation"]), rate, f"{seconds:.2f}", written, r["jax"]]
    return [r["step"], str(r["batch"]), r["way"], *sizes]


def markdown(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return record.table(HEADS, map(cells, rows))


def points(rows: list[Row]) -> list[jdelta.RokPoint]:
    """The rows as the picture shows them."""
    return [
        jdelta.RokPoint(
            way=r["way"],
            batch=r["batch"],
            activation=r["activation"],
            rate=r["flops"] / statistics.median(r["seconds"]),
            step=r["step"],
        )
        for r in rows
    ]


def main() -> None:
    parser = record.parser(__doc__, STEPS)
    parser.add_argument("--directory", default=".", help="where to spill to")
    parser.add_argument("--batch", action="append", type=int, help="default: 4 8 16 32")
    parser.add_argument("--picture", help="draw what the file has; run none")
    options = record.options(parser, markdown)
    if options.picture:
        plot.rok(points(record.load(options.json))).savefig(options.picture, dpi=110)
        return
    jobs = [
        {"step": step, "batch": batch, "way": way, "directory": options.directory}
        for step in options.step or STEPS
        for batch in options.batch or BATCHES
        for way in WAYS
    ]
    rows = record.run(jobs, row, options.json)
    record.show("throughput over activation memory", HEADS, map(cells, rows))


if __name__ == "__main__":
    main()
