"""Meshes of devices that a program runs over."""

from __future__ import annotations

from collections.abc import Iterator

from jax._src.mesh import thread_resources
from jax.sharding import Mesh, NamedSharding, get_mesh

from jdelta._src._jax.bodies import equations, values_in
from jdelta._src._jax.jaxprs import Jaxpr


def current_mesh() -> Mesh | None:
    """The mesh that is set: ``jax.set_mesh(mesh)``, or ``with mesh:`` of older programs."""
    mesh = get_mesh()
    mesh = thread_resources.env.physical_mesh if mesh.empty else mesh
    return None if mesh.empty else mesh


def meshes_in(program: Jaxpr) -> Iterator[Mesh]:
    """The meshes of sharding constraints, ``shard_map`` and ``device_put`` in a program."""
    for eqn in equations(program):
        for value in values_in(eqn.params):
            mesh = value.mesh if isinstance(value, NamedSharding) else value
            if isinstance(mesh, Mesh) and not mesh.empty:
                yield mesh
