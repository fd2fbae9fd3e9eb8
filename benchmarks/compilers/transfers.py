"""What the TPU and CUDA compilers make of offload: each mechanism on the same small programs.

The unrolled stack is 16 layers with two float32 residuals of 64 MiB each, all offloaded; the loop
is six iterations of a layer with one small residual after much compute. Each row is one way to say
when transfers happen. Temporaries and host bytes are the compiler's, ahead of time; what is hidden
is read off its schedule at the rates of `jdelta/_src/backends/chips.py`.

*told of less*: the MLP (8 unrolled layers, batch 32768) is planned to a budget below what recompute
alone reaches, so that what enters its layers is on the host, in slots of host arrays. The plan's
program is compiled for a TPU with other options than the plan's own:
`xla_tpu_user_reserved_hbm_bytes` leaves the scheduler so much memory, and XLA's own
rematerialisation is on or off. Compute is read off the schedule, where more of it is recompute that
nobody planned.

    python -m benchmarks run transfers --target tpu:v5e:2x2

Results (jax 0.12.0.1, libtpu 0.0.50.1, CUDA 13 plug-in 0.12.0.1) stand in
docs/results/transfers.md. What follows from them stands in `timed_transfers.py`, `host_slots.py`
and `emit.py` of
`jdelta/_src/passes`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import cases, steps, study
from benchmarks.study import Job, Row, Study, mib
from jdelta import remat
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.measure import measure

LAYERS, ROWS, WIDTH = 16, 16384, 1024
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
LIMIT = 2**30
"""Device memory that the soft limit leaves, bytes."""

MLP, TPU = "mlp", "tpu:v5e:2x2"
GIB_LEFT = (None, 6, 5, 4, 3, 2, 0)
NO_REMAT = {"xla_tpu_rematerialization_min_size_in_bytes": str(1 << 62)}
EXACTLY = {"xla_tpu_scheduler_percent_shared_memory_limit": "100"}
LEFT = {None: "all (16 GiB)", 0: "none"}
LIMIT_HEADS = (
    *("memory left to the scheduler", "peak / host, XLA's own recompute on", "compute"),
    *("peak / host, off", "compute"),
)


Arrays = Sequence[Any]
tie = lax.optimization_barrier


def forward(w: Arrays, x: Any) -> tuple[Any, Any]:
    """Both residuals of a layer; the second one is its result."""
    h = jnp.tanh(x @ w[0])
    return h, jnp.tanh(h @ w[1])


def backward(w: Arrays, x: Any, h: Any, y: Any, ct: Any) -> tuple[Any, Any, Any]:
    """Gradients of a layer's weights and of its input."""
    dz = ct * (1 - y * y)
    dy = (dz @ w[1].T) * (1 - h * h)
    return x.T @ dy, h.T @ dz, dy @ w[0].T


def unrolled(lag: int | None, ahead: int | None, gradients: bool) -> Callable[..., Any]:
    """The stack with its transfers written out.

    Args:
        lag: Layers after which a copy to the host is tied to a layer's result; None: not tied.
        ahead: Layers before its use at which a fetch is tied to a cotangent; None: not tied.
        gradients: Whether a layer's gradients end together.
    """

    def program(weights: Arrays, x: Any) -> Any:
        hosts: list[Any] = []
        first = x
        for i, w in enumerate(weights):
            h, x = forward(w, x)
            hosts.append(tuple(jax.device_put(v, HOST) for v in (h, x)))
            if lag is not None and i >= lag:
                x, hosts[i - lag] = tie((x, hosts[i - lag]))
        ct = x * (2.0 / x.size)
        device: dict[int, Any] = {}

        def fetch(i: int, ct: Any) -> Any:
            if i < 0 or i in device:
                return ct
            if ahead is not None:
                ct, hosts[i] = tie((ct, hosts[i]))
            device[i] = tuple(jax.device_put(v, DEVICE) for v in hosts[i])
            return ct

        grads: list[Any] = []
        for i in reversed(range(len(weights))):
            for j in range(i, i - (ahead or 0) - 2, -1):
                ct = fetch(j, ct)
            (h, y), below = device[i], device[i - 1][1] if i else first
            h, y, below, ct = tie((h, y, below, ct))
            *dw, ct = backward(weights[i], below, h, y, ct)
            if gradients:
                dw, ct = tie((dw, ct))
            grads.append(dw)
        return grads, ct

    return program


def in_slots(weights: Arrays, x: Any) -> Any:
    """Both residuals of a layer in slots of host arrays, read one layer ahead of their use.

    The index of a fetch is computed from a cotangent: zero, but the compiler cannot know.
    """
    empty = jnp.zeros((len(weights), *x.shape), x.dtype)
    stacks = [jax.device_put(empty, HOST) for _ in range(2)]
    first = x
    for i, w in enumerate(weights):
        h, x = forward(w, x)
        for k, v in enumerate((h, x)):
            away = jax.device_put(v, HOST)[None]
            stacks[k] = lax.dynamic_update_slice_in_dim(stacks[k], away, i, axis=0)
    ct = x * (2.0 / x.size)

    def fetch(i: int, ct: Any) -> Any:
        at = i + (ct[0, 0] > jnp.inf).astype(jnp.int32)
        slots = (lax.dynamic_index_in_dim(s, at, keepdims=False) for s in stacks)
        return tuple(jax.device_put(v, DEVICE) for v in slots)

    device = {len(weights) - 1: fetch(len(weights) - 1, ct)}
    grads: list[Any] = []
    for i in reversed(range(len(weights))):
        if i:
            device[i - 1] = fetch(i - 1, ct)
        h, y = device[i]
        *dw, ct = backward(weights[i], device[i - 1][1] if i else first, h, y, ct)
        dw, ct = tie((dw, ct))
        grads.append(dw)
    return grads, ct


def recompute(weights: Arrays, x: Any) -> Any:
    """The stack under `jax.checkpoint`, nothing offloaded."""

    def loss(weights: Arrays) -> Any:
        y = x
        for w in weights:
            y = jax.checkpoint(lambda w, y: forward(w, y)[1])(w, y)
        return jnp.mean(y**2)

    return jax.grad(loss)(weights)


def by_policy(weights: Arrays, x: Any) -> Any:
    """The stack under a policy that offloads everything, and nothing that says when."""
    name = jax.ad_checkpoint.checkpoint_name
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x", "h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(w: Arrays, x: Any) -> Any:
        h = name(jnp.tanh(name(x, "x") @ w[0]), "h")
        return jnp.tanh(h @ w[1])

    def loss(weights: Arrays) -> Any:
        y = x
        for w in weights:
            y = jax.checkpoint(layer, policy=policy)(w, y)
        return jnp.mean(y**2)

    return jax.grad(loss)(weights)


STEPS: dict[str, Callable[..., Any]] = {
    "recompute, nothing offloaded": recompute,
    "policy": by_policy,
    "copies in the program, no ties": unrolled(None, None, gradients=False),
    "fetch tied to its layer's cotangent": unrolled(None, 0, gradients=True),
    "copies out tied to their layer": unrolled(0, None, gradients=True),
    "both tied, gradients not": unrolled(0, 0, gradients=False),
    "both tied to their layer, gradients too": unrolled(0, 0, gradients=True),
    "out one layer late, in one layer ahead": unrolled(1, 1, gradients=True),
    "out two layers late, in two layers ahead": unrolled(2, 2, gradients=True),
    "slots of host arrays, read at a computed index": in_slots,
}


def row(step: str, **asked: Any) -> Row:
    """Compiles one way to offload for one target, or a plan's program for less memory."""
    return (told_of if step == MLP else said)(step, **asked)


def said(step: str, target: str, limited: bool) -> Row:
    """Compiles one way to say it for one target."""
    where = resolve(target)
    pair = (jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),) * 2
    args = where.abstract(([pair] * LAYERS, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)))
    room = {"xla_tpu_user_reserved_hbm_bytes": str(where.memory - LIMIT)}
    lowered = jax.jit(STEPS[step]).trace(*args).lower(lowering_platforms=(where.platform,))
    _, measured = measure(lowered, where, room if limited else {})
    return {
        "temporaries": measured.temporaries,
        "host": measured.host,
        "hidden": measured.overlap.hidden,
    }


@functools.cache
def planned(step: str) -> tuple[cases.Program, int]:
    """The program to compile, and its planned host bytes."""
    case = steps.build(step, remat=remat)
    _, plan = cases.plan(case, "3.5GiB", TPU)
    assert plan is not None
    return cases.planned(case, plan), plan.host_bytes


def told_of(step: str, left: int | None, recompute: bool) -> Row:
    """Compiles the plan's program once, with so many GiB left to the scheduler."""
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
    """The rows as the docs show them: by ways to say it, and by what the scheduler is told."""
    of_ways = [r for r in rows if r["step"] != MLP]
    of_limits = [r for r in rows if r["step"] == MLP]
    return study.page([ways(of_ways), limits(of_limits)])


def ways(rows: list[Row]) -> str:
    """One line for each way to say it: temporaries and host bytes in MiB."""
    columns = list(dict.fromkeys((r["target"], r["limited"]) for r in rows))
    heads = [f"{t}{', 1 GiB left' if limited else ''}" for t, limited in columns]
    by_job = {(r["step"], r["target"], r["limited"]): r for r in rows}
    lines = [
        [step, *(_cell(by_job[step, *c]) for c in columns if (step, *c) in by_job)]
        for step in study.values(rows, "step")
    ]
    return study.table(["way", *heads], lines, rows)


def _cell(r: Row) -> str:
    return f"{r['temporaries'] >> 20} / {r['host'] >> 20}"


def limits(rows: list[Row]) -> str:
    """One line for each memory that is left to the scheduler; sizes in MiB."""
    by_job = {(r["left"], r["recompute"]): r for r in rows}
    lines = [
        [
            LEFT.get(left, f"{left} GiB"),
            *(cell for on in (True, False) for cell in _at(by_job.get((left, on)))),
        ]
        for left in study.values(rows, "left")
    ]
    return study.table(LIMIT_HEADS, lines, rows)


def _at(r: Row | None) -> list[str]:
    return (
        [f"{mib(r['peak'])} / {mib(r['host'])}", f"{r['compute']:.3f} s"] if r else ["not run", ""]
    )


def jobs(
    step: Sequence[str] = (*STEPS, MLP), target: Sequence[str] = steps.TWO_TARGETS
) -> list[Job]:
    """On TPUs with all memory and with a limit; the plan's program with several limits."""
    job_list = [
        Job(s, {"target": t, "limited": limited})
        for s in step
        if s != MLP
        for t in target
        for limited in ((False, True) if t.startswith("tpu") else (False,))
    ]
    if MLP in step and TPU in target:
        job_list += [
            Job(MLP, {"left": n, "recompute": on}) for on in (True, False) for n in GIB_LEFT
        ]
    return job_list


STUDY = Study(
    "transfers",
    "What do the compilers make of offload, said in each way, and told of less and less memory?",
    jobs,
    row,
    tables,
)
