"""What the TPU and CUDA compilers make of offload: each mechanism on the same small programs.

The unrolled stack is 16 layers with two float32 residuals of 64 MiB each, all offloaded; the loop
is six iterations of a layer with one small residual after much compute. Each row is one way to say
when transfers happen. Temporaries and host bytes are the compiler's, ahead of time; what is hidden
is read off its schedule at the rates of `jdelta/_src/backends/chips.py`.

    python -m benchmarks run transfers

Results (jax 0.12.0.1, libtpu 0.0.50.1, CUDA 13 plug-in 0.12.0.1) stand in docs/how-it-works.md.
What follows from them stands in `transfer_timing.py`, `host_slots.py` and `emit.py` of
`jdelta/_src/passes`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import steps, study
from benchmarks.study import Job, Row, Study
from jdelta._src.backends.target import resolve
from jdelta._src.hlo.measure import measure

LAYERS, ROWS, WIDTH = 16, 16384, 1024
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
LIMIT = 2**30
"""Device memory that the soft limit leaves, bytes."""

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


def row(step: str, target: str, limited: bool) -> Row:
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


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them: temporaries and host bytes in MiB."""
    columns = list(dict.fromkeys((r["target"], r["limited"]) for r in rows))
    heads = [f"{t}{', 1 GiB left' if limited else ''}" for t, limited in columns]
    found = {(r["step"], r["target"], r["limited"]): r for r in rows}
    lines = [
        [step, *(_cell(found[step, *c]) for c in columns if (step, *c) in found)]
        for step in study.values(rows, "step")
    ]
    return study.table(["way", *heads], lines, rows)


def _cell(r: Row) -> str:
    return f"{r['temporaries'] >> 20} / {r['host'] >> 20}"


def jobs(
    step: Sequence[str] = tuple(STEPS), target: Sequence[str] = steps.TWO_TARGETS
) -> list[Job]:
    """With all memory, and on TPUs with a limit too."""
    return [
        Job(s, {"target": t, "limited": limited})
        for s in step
        for t in target
        for limited in ((False, True) if t.startswith("tpu") else (False,))
    ]


STUDY = Study(
    "transfers",
    "What do the compilers make of offload, said in each way that there is?",
    jobs,
    row,
    tables,
)
