"""Steps of Llama 3 that are cut over many devices.

Weights, optimiser state and batch are cut over a mesh that the target's devices make: FSDP (every
weight over `data`), or FSDP and tensor parallel (`data` and `model`).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.models import Case, build


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

_INTO = {"q", "k", "v", "gate", "up", "head"}
"""Weights from the residual stream into a layer; the others lead back to it."""


def case(cut: Cut, **options: Any) -> Case:
    """The training step, its state and batch cut over the mesh."""
    rows = cut.sharding("data", None, None)
    uncut = build(**cut.model, scan=True, batch=cut.batch, rows=rows, **options)

    def weight(path: Any, leaf: Any) -> Any:
        sharding = cut.sharding(*_axes(path, leaf))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def row(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=cut.sharding("data"))

    state = jax.tree.map_with_path(weight, uncut.state)
    return dataclasses.replace(uncut, state=state, batch=jax.tree.map(row, uncut.batch))


def _axes(path: Any, leaf: Any) -> tuple[str | None, ...]:
    """How a leaf of the state is cut; the optimiser's are cut as the weights they are for."""
    names = [str(getattr(key, "key", "")) for key in path]
    if leaf.ndim < 2 or names[-1].startswith("norm"):
        return ()
    axes = ("data", "model") if names[-1] in _INTO else ("model", "data")
    return (*[None] * (leaf.ndim - 2), *axes)
