"""Files as a further memory: what a layer makes is written to an SSD and read ahead of its use.

python examples/ssd.py [DIRECTORY]
"""

import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import jdelta

LAYERS, WIDTH, ROWS, STEPS = 8, 128, 16384, 3


def train_step(weights, x):
    """One step; in each layer one value has a name, for the plan to speak of."""

    def layer(x, w):
        hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "hidden")
        return x + hidden @ w["down"], None

    def loss_fn(weights):
        y = jax.lax.scan(layer, x, weights)[0]
        return jnp.mean((y - jnp.roll(x, 1, axis=1)) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def peak() -> float:
    """The most memory that this process has taken so far, in MiB.

    Read from Linux itself: the figure of `getrusage` starts at that of the process which started
    this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


def train(step, weights, x):
    """The losses, and the peak of memory until then, in MiB."""
    losses = []
    for _ in range(STEPS):
        weights, loss = step(weights, x)
        losses.append(float(loss))
    return losses, peak()


def main(directory: str) -> None:
    x = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
    weights = {
        "up": 0.1 * jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, 4 * WIDTH)),
        "down": 0.1 * jax.random.normal(jax.random.key(2), (LAYERS, 4 * WIDTH, WIDTH)),
    }

    spill = jdelta.Spill(directory, pool="32MiB")
    plan = jdelta.plan(train_step, None, weights, x, spill=spill, pin={"*/hidden": "spill"})
    print(plan)
    spilled, less = train(plan.jit(), weights, x)  # first: a process's peak only grows
    kept, more = train(jax.jit(train_step), weights, x)
    for ours, plain in zip(spilled, kept, strict=True):
        print(f"loss {ours:.6f} with files, {plain:.6f} without")
    counters = plan.store.counters()
    written, forwarded = counters.written / 2**20, counters.forwarded / 2**20
    print(f"written to files: {written:.0f} MiB in {STEPS} steps")
    print(f"needed again before they were written: {forwarded:.0f} MiB")
    print(f"resident memory, peak: {less:.0f} MiB with files, {more:.0f} MiB without")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)
