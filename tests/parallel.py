"""One stack of blocks under each kind of parallelism: its step, and its arguments on a mesh."""

import contextlib
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, ROWS, WIDTH, HIDDEN, EXPERTS = 3, 512, 64, 256, 4
RATE = 0.1


@dataclass(frozen=True)
class Parallel:
    """A way to cut a step over devices.

    Attributes:
        axes: The mesh: devices along each axis.
        weights: How each weight of a block is cut.
        rows: How the batch is cut.
        block: The unit, `(weights, x) -> x`.
        parts: From the last dimension of a value to how many parts it has.
        kind: Type of the axes.
        mapped: Whether the whole step is in a `shard_map`.
    """

    axes: dict
    weights: dict
    rows: P
    block: object
    parts: dict
    kind: AxisType = AxisType.Auto
    mapped: bool = False

    @property
    def mesh(self):
        sizes = tuple(self.axes.values())
        return AbstractMesh(sizes, tuple(self.axes), axis_types=(self.kind,) * len(sizes))

    def context(self, devices):
        """Explicit axes want a mesh around the code that uses them."""
        return jax.set_mesh(devices) if self.kind is AxisType.Explicit else contextlib.nullcontext()

    def local_mesh(self):
        devices = np.array(jax.devices("cpu")[: math.prod(self.axes.values())])
        shape = tuple(self.axes.values())
        return jax.sharding.Mesh(
            devices.reshape(shape), tuple(self.axes), axis_types=(self.kind,) * len(shape)
        )

    def step(self, unit=lambda block: block, *, scan=True):
        """The training step with `unit` around every block."""
        block = unit(self.block)

        def loss(ws, x):
            if scan:
                y, _ = lax.scan(lambda x, w: (block(w, x), None), x, ws)
            else:
                y = x
                for i in range(LAYERS):
                    y = block(jax.tree.map(lambda w, i=i: w[i], ws), y)
            return jnp.sum(y.astype(jnp.float32) ** 2) / ROWS

        def step(ws, x):
            value, grads = jax.value_and_grad(loss)(ws, x)
            if self.mapped:  # its weights are whole: their gradients are summed by JAX already
                value = lax.psum(value, tuple(self.axes))
            return jax.tree.map(lambda w, g: w - RATE * g, ws, grads), value

        if not self.mapped:
            return step
        specs = {name: P(None, *spec) for name, spec in self.weights.items()}
        cut = {"in_specs": (specs, self.rows), "out_specs": (specs, P())}
        return jax.shard_map(step, mesh=self.mesh, **cut)

    def shapes(self, mesh, rows=ROWS, width=WIDTH, hidden=HIDDEN):
        """Shapes of the arguments on a mesh, which may be an abstract one."""
        sizes = {"up": (width, hidden), "down": (hidden, width), "gate": (width, EXPERTS)}

        def shape(size, spec):
            return jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, spec))

        def weight(name, spec):
            size = sizes[name] if len(spec) < 3 else (EXPERTS, *sizes[name])
            return shape((LAYERS, *size), P(None, *spec))

        ws = {name: weight(name, spec) for name, spec in self.weights.items()}
        return ws, shape((rows, width), self.rows)

    def arguments(self):
        """Arguments on this machine's devices."""
        leaves, tree = jax.tree.flatten(self.shapes(self.local_mesh()))
        keys = jax.random.split(jax.random.key(0), len(leaves))
        scale = [0.1] * (len(leaves) - 1) + [1.0]
        arrays = (
            s * jax.random.normal(k, x.shape) for s, k, x in zip(scale, keys, leaves, strict=True)
        )
        placed = [jax.device_put(a, x.sharding) for a, x in zip(arrays, leaves, strict=True)]
        return jax.tree.unflatten(tree, placed)


def dense(w, x):
    return x + jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["down"])


def cut_by_rows(w, x):
    """As one writes it for FSDP: activations stay cut by rows."""
    by_rows = NamedSharding(PARALLEL["fsdp"].mesh, P("data"))
    h = lax.with_sharding_constraint(jax.nn.gelu(x @ w["up"]), by_rows)
    return lax.with_sharding_constraint(x + jnp.tanh(h @ w["down"]), by_rows)


def experts(w, x):
    """Every token through all experts, weighted by a router."""
    mesh = PARALLEL["expert"].mesh
    gates = jax.nn.softmax(x @ w["gate"])
    h = jax.nn.gelu(jnp.einsum("td,edh->eth", x, w["up"]))
    h = lax.with_sharding_constraint(h, NamedSharding(mesh, P("expert", "data")))
    return x + jnp.tanh(jnp.einsum("eth,ehd,te->td", h, w["down"], gates))


def explicit(w, x):
    """With explicit axes a contracted one asks for the sharding of the result."""
    h = jax.nn.gelu(x @ w["up"])
    return x + jnp.tanh(jnp.dot(h, w["down"], out_sharding=P("data", None)))


def mapped(w, x):
    """The same by hand, with the sum over devices in it."""

    def part(up, down, x):
        return x + jnp.tanh(lax.psum(jax.nn.gelu(x @ up) @ down, "model"))

    specs = P(None, "model"), P("model", None), P("data", None)
    mesh = PARALLEL["shard_map"].mesh
    run = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P("data", None))
    return run(w["up"], w["down"], x)


_DATA, _BOTH = {"data": 8}, {"data": 4, "model": 2}
_TENSOR = {"up": P(None, "model"), "down": P("model", None)}
_WHOLE = {"up": P(None, None), "down": P(None, None)}
_ROWS = P("data", None)

PARALLEL = {
    "data": Parallel(_DATA, _WHOLE, _ROWS, dense, {WIDTH: 8, HIDDEN: 8}),
    "tensor": Parallel(_BOTH, _TENSOR, _ROWS, dense, {WIDTH: 4, HIDDEN: 8}),
    "fsdp": Parallel(
        _DATA,
        {"up": P("data", None), "down": P(None, "data")},
        _ROWS,
        cut_by_rows,
        {WIDTH: 8, HIDDEN: 8},
    ),
    "expert": Parallel(
        {"data": 2, "expert": 4},
        {"gate": P(None, None), "up": P("expert", None, None), "down": P("expert", None, None)},
        _ROWS,
        experts,
        {HIDDEN: 8},
    ),
    "explicit data": Parallel(
        _DATA, _WHOLE, _ROWS, dense, {WIDTH: 8, HIDDEN: 8}, kind=AxisType.Explicit
    ),
    "explicit tensor": Parallel(
        _BOTH, _TENSOR, _ROWS, explicit, {WIDTH: 4, HIDDEN: 8}, kind=AxisType.Explicit
    ),
    "shard_map": Parallel(_BOTH, _TENSOR, _ROWS, mapped, {}),
    "shard_map step": Parallel(_DATA, _WHOLE, _ROWS, dense, {}, mapped=True),
}
