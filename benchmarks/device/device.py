"""Seconds and bytes on an attached GPU: plain steps, hand policies, plans; copies and products.

Every row is measured in a process of its own, so that the peak that the device's allocator reports
is that row's. A step's times are those of each call, state donated, until its results are there;
the first calls are kept apart as warm-up. Predicted seconds stand beside the measured ones, those
of the operations as traced and those of the compiled instructions, and for each step how well the
latter agree on the order of the variants (Kendall's tau). *plan 60%* is a plan for that share of
the plain step's peak, *plan as POLICY* one for the peak that a hand policy compiles to, *to hand*
its median seconds over that policy's.

    python -m benchmarks run device --step "gpt2 scanned" --json FILE
    python -m benchmarks run device --step "gpt2 scanned" --ahead cuda:h200 --json FILE

FILE is benchmarks/results/device-KIND.json, one for each kind of device. Without a GPU it stops:
`--platform cpu` is for trying it out. `--ahead TARGET` needs no GPU: it adds to a file what the
plain step and the hand policies compile to ahead of time, which the table shows as *ahead*.
"""

import dataclasses
import importlib.metadata
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from scipy.stats import kendalltau

import jdelta
from benchmarks import cases, policies, steps, study
from benchmarks.study import Job, Row, Study, mib
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.measure import measure

WARMUP, REPEATS = 3, 20
LINK_BYTES = (2**20, 2**24, 2**28)
MATRIX, CHAIN = 4096, 16
DTYPES = ("bfloat16", "float32")
SHARES = {f"plan {share:.0%}": share for share in (0.8, 0.6, 0.5, 0.4)}
AS_BY_HAND = {f"plan as {policy}": policy for policy in policies.POLICIES}
VARIANTS = ("plain", *policies.POLICIES, *SHARES, *AS_BY_HAND)
RATES = "copies and products"
SIZES = ("compiled_peak", "allocator_peak", "allocator_peak_before", "host_bytes")
HEADS = (
    *"step variant ahead peak allocator before host median traced compiled ratio".split(),
    "to hand",
)


def attached(platform: str) -> Any:
    """The first device of a platform.

    Raises:
        TargetError: There is none.
    """
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        raise jdelta.TargetError(
            f"no {platform} is attached to this machine, so there is nothing to measure (JAX says: "
            f"{error}); the studies savings and hand_policies work ahead of time"
        ) from error


def alone(step: str, what: str, **job: Any) -> Row:
    """One measurement in a process of its own; what is compiled ahead of time needs none."""
    if what == "ahead":
        return ahead(step, **job)
    if what == "step":
        job["step"] = step
    one = {"max_workers": 1, "mp_context": multiprocessing.get_context("spawn")}
    with ProcessPoolExecutor(**one) as pool:
        return pool.submit(row, what=what, **job).result()


def row(platform: str, what: str, **job: Any) -> Row:
    """One measurement, with the device and the versions it was made with.

    Args:
        platform: "gpu"; "cpu" to try it out.
        what: "rates", or "step" for a training step.
        **job: What `of_rates` or `of_step` takes.
    """
    device = attached(platform)
    with jax.default_device(device):
        figures = {"rates": of_rates, "step": of_step}[what](device, **job)
    made_with = {
        "device": device.device_kind,
        "runtime": device.client.platform_version,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }
    return {**figures, **made_with}


def of_rates(
    device: Any, sizes: tuple[int, ...] = LINK_BYTES, matrix: int = MATRIX, repeats: int = REPEATS
) -> Row:
    """Raw times of copies in both directions for each size, and of matrix products.

    Args:
        device: What to measure.
        sizes: Bytes copied.
        matrix: Rows and columns of the matrices.
        repeats: Times taken of each.
    """
    return {
        "copies": [copies(device, size, repeats) for size in sizes],
        "products": [products(dtype, matrix, repeats) for dtype in DTYPES],
    }


def copies(device: Any, size: int, repeats: int) -> Row:
    """Seconds of copies of `size` bytes to pinned host memory and back."""
    here = SingleDeviceSharding(device)
    host_sharding = here.with_memory_kind("pinned_host")
    x = jax.device_put(jnp.ones(size // 4, jnp.float32), here)
    away = jax.device_put(x, host_sharding)
    return {
        "bytes": size,
        "to_host_seconds": timed(lambda: jax.device_put(x, host_sharding), repeats),
        "to_device_seconds": timed(lambda: jax.device_put(away, here), repeats),
    }


def products(dtype: str, n: int, repeats: int) -> Row:
    """Seconds of a chain of square matrix products."""
    x = jax.random.normal(jax.random.key(0), (n, n), dtype) / n**0.5

    @jax.jit
    def chain(x):
        return jax.lax.fori_loop(0, CHAIN, lambda _, y: y @ x, x)

    return {"dtype": dtype, "flops": 2 * n**3 * CHAIN, "seconds": timed(lambda: chain(x), repeats)}


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call, after some that do not count."""
    return [seconds(call)[0] for _ in range(WARMUP + repeats)][WARMUP:]


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the results of a call are there, and the results."""
    start = time.perf_counter()
    results = jax.block_until_ready(call())
    return time.perf_counter() - start, results


def of_step(device: Any, step: str, variant: str, repeats: int = REPEATS, **options: Any) -> Row:
    """Times and peak of one variant of a step.

    Args:
        device: What to measure.
        step: A key of `steps.STEPS`.
        variant: One of `VARIANTS`.
        repeats: Calls that are timed after the warm-up.
        **options: Arguments of `models.build` in place of the step's own.
    """
    target = resolve(args=jnp.zeros(())).name
    ready = unplanned if variant in ("plain", *policies.POLICIES) else planned
    figures, call = ready(step, variant, target, **options)
    if call is None:
        return figures
    try:
        return {**figures, **ran(device, call, *steps.build(step, **options).init(0), repeats)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {**figures, "error": str(error).splitlines()[0]}


def unplanned(
    step: str, variant: str, target: str, **options: Any
) -> tuple[Row, Callable[..., Any] | None]:
    """What is known of the plain step or of a hand policy before it runs, and the compiled step."""
    program = policies.variant(variant, step, target, **options)
    if isinstance(program, str):
        return {"skipped": program}, None
    compiled, measured = measure(program.lower(), program.target, executable=True)
    figures = {
        "compiled_peak": measured.peak,
        "host_bytes": measured.host,
        "scheduled": measured.overlap.seconds,
        "price": dataclasses.asdict(program.priced(measured.overlap)),
    }
    return figures, compiled


def planned(
    step: str, variant: str, target: str, **options: Any
) -> tuple[Row, Callable[..., Any] | None]:
    """What is known of a plan before it runs, and the compiled step."""
    budget = SHARES.get(variant)
    if budget is None:
        hand = policies.program(AS_BY_HAND[variant], step, target, **options)
        if isinstance(hand, str):
            return {"skipped": hand}, None
        budget = policies.same_peak(hand)
    figures, plan = cases.plan(steps.build(step, remat=jdelta.remat, **options), budget, target)
    if plan is None:
        return figures, None
    return {**figures, "scheduled": plan.overlap.seconds}, plan.jit()


def ran(device: Any, call: Callable[..., Any], state: Any, batch: Any, repeats: int) -> Row:
    """Raw times of a step, and the allocator's peak before and after."""
    jax.block_until_ready((state, batch))
    before = peak(device)
    times: list[float] = []
    for _ in range(WARMUP + repeats):
        taken, (state, metrics) = seconds(lambda state=state: call(state, batch))
        times.append(taken)
    return {
        "allocator_peak_before": before,
        "allocator_peak": peak(device),
        "warmup_seconds": times[:WARMUP],
        "seconds": times[WARMUP:],
        "loss": float(metrics["loss"]),
    }


def peak(device: Any) -> int | None:
    """Most bytes that the device's allocator has handed out so far; None if it does not say."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def cells(r: Row, rows: list[Row]) -> list[str]:
    """One line of the table: MiB and milliseconds."""
    if "seconds" not in r:
        return [r["step"], r["variant"], r.get("skipped") or "did not fit"]
    median, predicted = statistics.median(r["seconds"]), expected(r)
    ahead = [h["compiled_peak"] for h in same(r, rows, r["variant"]) if h["what"] == "ahead"]
    sizes = [next(iter(ahead), None), *(r[size] for size in SIZES)]
    times = [f"{1e3 * t:.2f}" for t in (median, r["price"]["seconds"], r["scheduled"])]
    times.append(f"{median / predicted:.2f}")
    hand = [h for h in same(r, rows, AS_BY_HAND.get(r["variant"])) if "seconds" in h]
    beside = [f"{median / statistics.median(h['seconds']):.3f}" for h in hand]
    return [r["step"], r["variant"], *map(mib, sizes), *times, *beside]


def same(r: Row, rows: list[Row], variant: str | None) -> list[Row]:
    """The rows of a variant of the row's step."""
    return [h for h in rows if (h.get("step"), h.get("variant")) == (r["step"], variant)]


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: steps that ran, and rates."""
    ran = [r for r in rows if "seconds" in r]
    lines = ([*cells(r, rows), ""][: len(HEADS)] for r in ran)
    parts = [study.table(HEADS, lines, [r for r in rows if r["what"] != "rates"])]
    parts += predicted_orders(ran)
    for r in rows:
        if r["what"] == "rates":
            parts.append(study.table(RATE_HEADS, rates(r), [r]))
    return study.page(parts)


def predicted_orders(ran: list[Row]) -> Iterator[str]:
    """One line a step: how well the order of its variants was predicted."""
    for step in study.values(ran, "step"):
        tau = agreement([r for r in ran if r["step"] == step])
        if tau is not None:
            yield f"{step}: order of the variants predicted with Kendall's tau {tau:.2f}."


def ahead(step: str, variant: str, target: str) -> Row:
    """What the plain step or a hand policy compiles to without the device."""
    program = policies.variant(variant, step, target)
    if isinstance(program, str):
        return {"skipped": program}
    return {"compiled_peak": program.measured.peak, "scheduled": program.measured.overlap.seconds}


def agreement(rows: list[Row]) -> float | None:
    """Kendall's tau of measured and predicted seconds of one step's variants; None for one."""
    ran = [r for r in rows if "seconds" in r]
    if len(ran) < 2:
        return None
    measured = [statistics.median(r["seconds"]) for r in ran]
    return float(kendalltau(measured, list(map(expected, ran))).statistic)


def expected(r: Row) -> float:
    """Predicted seconds, by the compiled instructions where they are read (not on CPUs)."""
    return r["scheduled"] or r["price"]["seconds"]


RATE_HEADS = ("what", "rate")


def rates(r: Row) -> list[list[str]]:
    """What the median of copies and products makes of their raw times, a line each."""
    both = ("to_host_seconds", "to_device_seconds")
    copies = [
        [
            f"{mib(c['bytes'])} MiB",
            "{:.1f} GB/s to the host, {:.1f} back".format(
                *(c["bytes"] / statistics.median(c[way]) / 1e9 for way in both)
            ),
        ]
        for c in r["copies"]
    ]
    products = [
        [
            f"products in {p['dtype']}",
            f"{p['flops'] / statistics.median(p['seconds']) / 1e12:.0f} TFLOP/s",
        ]
        for p in r["products"]
    ]
    return copies + products


def jobs(
    step: Sequence[str] = (RATES, *steps.PUBLISHED),
    variant: Sequence[str] = VARIANTS,
    platform: Sequence[str] = ("gpu",),
    ahead: Sequence[str | None] = (None,),
) -> list[Job]:
    """Rates and steps on the device; or with `ahead`, what can be compiled for it without one."""
    job_list: list[Job] = []
    for label, target in itertools.product(step, ahead):
        if label == RATES:
            job_list += [
                Job(RATES, {"platform": p, "what": "rates"}) for p in platform if not target
            ]
        elif target:
            arguments = {"what": "ahead", "target": target}
            early = [v for v in variant if v in ("plain", *policies.POLICIES)]
            job_list += [Job(label, {**arguments, "variant": v}) for v in early]
        else:
            arguments = {"what": "step"}
            job_list += [
                Job(label, {"platform": p, **arguments, "variant": v})
                for p in platform
                for v in variant
            ]
    return job_list


STUDY = Study(
    "device",
    "What do plain steps, hand policies and plans take on an attached GPU: seconds and bytes?",
    jobs,
    alone,
    tables,
)
