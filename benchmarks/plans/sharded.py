"""Plans of Llama 3 steps cut over many devices: is every promise kept per device?

Weights, optimiser state and batch are cut over a mesh that the target's devices make: FSDP (every
weight over `data`), or FSDP and tensor parallel (`data` and `model`). For each step and share of
the plain step's peak (or of the device's memory, where that is less) it records what `budgets`
does, all of it per device. Everything is compiled ahead of time, without hardware; predicted
seconds are predictions.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdelta
from benchmarks import cases, study
from benchmarks.models import Case, build
from benchmarks.plans.budgets import HEADS, cells
from benchmarks.study import Job, Row, Study
from jdelta._src.backends.target import resolve


@dataclass(frozen=True)
class Cut:
    """A step and the mesh that it is cut over.

    Attributes:
        model: What is built.
        target: Devices for it.
        data: Devices that share batch and weights.
        tensor: Devices that share every layer.
        batch: Sequences in a batch.
    """

    model: dict[str, Any]
    target: str
    data: int
    tensor: int
    batch: int

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh; the target's devices take their places in it."""
        types = (AxisType.Auto, AxisType.Auto)
        return AbstractMesh((self.data, self.tensor), ("data", "model"), axis_types=types)

    def sharding(self, *axes: str | None) -> NamedSharding:
        """A value cut over these axes, dimension by dimension."""
        return NamedSharding(self.mesh, P(*axes))


STEPS = {
    "llama3-8b fsdp": Cut({"name": "llama3-8b"}, "tpu:v6e:4x4", 16, 1, 16),
    "llama3-8b fsdp+tp": Cut({"name": "llama3-8b"}, "tpu:v6e:4x4", 4, 4, 16),
    "llama3-70b fsdp+tp": Cut({"name": "llama3-70b"}, "tpu:v5p:4x4x4", 16, 4, 16),
    "llama3-8b fsdp, 8 GPUs": Cut({"name": "llama3-8b"}, "cuda:h100:1x1x8", 8, 1, 8),
}
SHARES = (0.9, 0.7, 0.5)

_INTO = {"q", "k", "v", "gate", "up", "head"}
"""Weights from the residual stream into a layer; the others lead back to it."""


def case(cut: Cut, **options: Any) -> Case:
    """The training step, its state and batch cut over the mesh."""
    rows = cut.sharding("data", None, None)
    made = build(**cut.model, scan=True, batch=cut.batch, rows=rows, **options)

    def weight(path: Any, leaf: Any) -> Any:
        sharding = cut.sharding(*_axes(path, leaf))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def row(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=cut.sharding("data"))

    state = jax.tree.map_with_path(weight, made.state)
    return dataclasses.replace(made, state=state, batch=jax.tree.map(row, made.batch))


def _axes(path: Any, leaf: Any) -> tuple[str | None, ...]:
    """How a leaf of the state is cut; the optimiser's are cut as the weights they are for."""
    names = [str(getattr(key, "key", "")) for key in path]
    if leaf.ndim < 2 or names[-1].startswith("norm"):
        return ()
    axes = ("data", "model") if names[-1] in _INTO else ("model", "data")
    return (*[None] * (leaf.ndim - 2), *axes)


def row(step: str, target: str, share: float) -> Row:
    """Plan one step to a share of the plain step's peak, or of the device if that has less."""
    plain = cases.traced(case(STEPS[step]), target).measured
    room = min(plain.peak, resolve(target).memory)
    start = time.perf_counter()
    marked = case(STEPS[step], remat=jdelta.remat)
    figures, _ = cases.plan(marked, int(share * room), target)
    seconds = time.perf_counter() - start
    return {"plain": plain.peak, "plain_refused": plain.refused, **figures, "seconds": seconds}


def tables(rows: list[Row]) -> str:
    """The rows as the docs show them."""
    return study.table(HEADS, map(cells, rows), rows)


def jobs(step: Sequence[str] = tuple(STEPS), share: Sequence[float] = SHARES) -> list[Job]:
    """Each step on the devices that it is cut over."""
    return [Job(s, {"target": STEPS[s].target, "share": part}) for s in step for part in share]


STUDY = Study(
    "sharded",
    "Is every promise kept per device, where a step is cut over many?",
    jobs,
    row,
    tables,
)
