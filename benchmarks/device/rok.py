"""Recompute, offload or keep: throughput over activation memory, as TBA draws it (its ROK curve).

Three-layer (scanned) BERT, GPT and T5 at batch 4 to 32 on JAX's default device, one row a run: what
is kept, recomputed layer by layer, offloaded to host memory, written to files, or mixed by a plan
for half of the memory that keeping takes beside arguments and results (or for the least that a plan
can do with). On a GPU what leaves are the results of matrix products, and the rest is recomputed;
on a CPU all that can is written. Activation memory is what the compiled step has beside these on
the device; on a CPU, whose host memory is its device memory, the pool of spilled values is a part
of it, and offload has no row. Throughput is the floating-point work of the plain step (unrolled, by
XLA's own count) over the median time of a step. What else runs on the machine shows in the times.

    python -m benchmarks run rok --directory /nvme
    python -m benchmarks.pictures
"""

import dataclasses
import functools
import glob
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jdelta
from benchmarks import cases, policies, study
from benchmarks.models import Case, checkpoint, find, identity
from benchmarks.study import Job, Row, Study, mib
from jdelta._src.backends.target import resolve
from jdelta._src.residuals.file_link import to_files
from jdelta._src.residuals.residual import residuals as residuals_of
from jdelta._src.spill import rates_of

SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"width": 512, "hidden": 2048, "heads": 8, "length": 256, "dtype": jnp.float32},
    "gpu": {"width": 3072, "hidden": 12288, "heads": 24, "length": 1024, "dtype": jnp.bfloat16},
}
"""Sizes for the platform's devices; the paper's hidden size is 8192 and up, on two of them."""
POOLS = {"cpu": "64MiB", "gpu": "4GiB"}
STEPS = {"bert": "bert-base", "gpt": "gpt2", "t5": "t5-large"}
BATCHES = (4, 8, 16, 32)
WAYS = ("keep", "recompute", "offload", "spill", "mixed")
PRODUCTS = (*policies.QKV, "out_proj", *policies.MLP)
"""Names of what products give: they leave a GPU, whose link is slow beside it."""
WARMUP, REPEATS = 2, 5
HEADS = "step batch way activation GFLOP/s seconds written jax".split()


def case(step: str, batch: int, remat: Any = identity, **options: Any) -> Case:
    """A training step in a size for this machine."""
    config = find(STEPS[step])
    known = {field.name for field in dataclasses.fields(config)}
    common = {"layers": 3, "vocab": 4096, "scan": True, "batch": batch}
    shape = {**SHAPES[jax.default_backend()], **common, **options}
    changed = {key: value for key, value in shape.items() if key in known}
    return dataclasses.replace(config, **changed).case(step, remat)


def row(step: str, batch: int, way: str, directory: str, adapter: str = "disk") -> Row | list[Row]:
    """Runs one step in one way; no row where a CPU would offload to its own memory."""
    if way == "offload" and jax.default_backend() == "cpu":
        return []
    spill = jdelta.Spill(directory, adapter=adapter, pool=POOLS[jax.default_backend()])
    plain, kept = case(step, batch), _kept(step, batch)
    known = {"device": jax.devices()[0].device_kind, "flops": _work(step, batch)}
    if way in ("keep", "recompute"):
        run = kept if way == "keep" else _compiled(case(step, batch, checkpoint(STEPS[step])))
        return {**known, "activation": _activation(run), **_timed(run, plain)}
    plan = _plan(case(step, batch, jdelta.remat), way, spill, kept)
    run = plan.jit()
    pool = min(plan.spill_bytes, spill.pool_bytes)
    activation = _activation(plan.compiled) + (pool if jax.default_backend() == "cpu" else 0)
    figures = _timed(run, plain)
    written = plan.store.counters().written if plan.store else 0
    counts = {"written": written / (WARMUP + REPEATS), "planned": plan.spill_written}
    return {**known, "activation": activation, "host": plan.host_bytes, **figures, **counts}


@functools.cache
def _kept(step: str, batch: int) -> jax.stages.Compiled:
    """The plain step."""
    return _compiled(case(step, batch))


@functools.cache
def _work(step: str, batch: int) -> float:
    """Floating-point operations of the plain step."""
    unrolled = case(step, batch, scan=False)  # loops count once
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU's compiler does not count
        lowered = jax.jit(unrolled.step).lower(unrolled.state, unrolled.batch)
        return lowered.cost_analysis()["flops"]


def _compiled(workload: Case) -> jax.stages.Compiled:
    return jax.jit(workload.step, donate_argnums=0).lower(workload.state, workload.batch).compile()


def _activation(compiled: jax.stages.Compiled) -> int:
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes


def _plan(marked: Case, way: str, spill: jdelta.Spill, kept: jax.stages.Compiled) -> jdelta.Plan:
    args = marked.step, None, marked.state, marked.batch
    if way == "mixed":
        memory: Any = kept.memory_analysis()
        io_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes
        resident = io_bytes - memory.alias_size_in_bytes
        budget = resident + memory.temp_size_in_bytes // 2
        try:
            return jdelta.plan(marked.step, budget, *args[2:], donate_argnums=0, spill=spill)
        except jdelta.BudgetError as error:
            return jdelta.plan(marked.step, error.floor, *args[2:], donate_argnums=0, spill=spill)
    if jax.default_backend() == "gpu":
        _, trace = cases.staged(marked, resolve().name)
        known = (r.name for graph in trace.regions for r in residuals_of(graph, resolve()))
        rest, names = "recompute", [name for name in known if name.endswith(PRODUCTS)]
    else:
        residuals = jdelta.plan(*args, donate_argnums=0).residuals
        files = to_files(spill, rates_of(spill), residuals, resolve())
        rest = "save"
        names = [r.name for r in residuals if files.refusal(r) is None and r.needed]
    pin = {"*": rest, **dict.fromkeys(map(glob.escape, names), way)}
    files_for = spill if way == "spill" else None
    return jdelta.plan(*args, donate_argnums=0, spill=files_for, pin=pin)


def _timed(run: Any, plain: Case) -> Row:
    """Seconds of each step; the state is drawn anew, since it is donated."""
    state, batch = plain.init(0)
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
    sizes = [mib(r["activation"]), rate, f"{seconds:.3g}", written, r["jax"]]
    return [r["step"], str(r["batch"]), r["way"], *sizes]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: a table for each device."""
    of_device: dict[str, list[Row]] = {}
    for r in rows:
        of_device.setdefault(r.get("device", "cpu"), []).append(r)
    return study.page(study.table(HEADS, map(cells, group), group) for group in of_device.values())


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


def jobs(
    step: Sequence[str] = tuple(STEPS),
    batch: Sequence[int] = BATCHES,
    way: Sequence[str] = WAYS,
    directory: Sequence[str] = (".",),
    adapter: Sequence[str | None] = (None,),
) -> list[Job]:
    """Without an adapter values are spilled to files."""
    return [
        Job(s, {"batch": b, "way": w, "directory": d, **({"adapter": a} if a else {})})
        for s, b, w, d, a in itertools.product(step, batch, way, directory, adapter)
    ]


STUDY = Study(
    "rok",
    "What throughput at what activation memory: by recompute, offload, spilling, or keeping?",
    jobs,
    row,
    tables,
)
