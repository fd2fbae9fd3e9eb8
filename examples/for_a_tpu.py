"""Plans for a TPU that is not here: shapes in, a plan, a page and a file out.

Needs `jax-delta[tpu]`.

python examples/for_a_tpu.py --target tpu:v5e:2x2 --report report.html
"""

import argparse

import jax
import jax.numpy as jnp

import jdelta

LAYERS, WIDTH, ROWS = 24, 2048, 16384


def train_step(weights, x):
    """One step in bfloat16 with float32 weights."""

    def loss_fn(weights):
        def layer(x, w):
            up, down = (m.astype(jnp.bfloat16) for m in w)
            return x + jnp.tanh(jax.nn.gelu(x @ up) @ down), None

        y = jax.lax.scan(layer, x.astype(jnp.bfloat16), weights)[0]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def make_args(rows: int = ROWS):
    """The arguments' shapes: nothing is allocated."""
    up = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    return (up, up), jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e:2x2")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--report", help="write a page with pictures")
    parser.add_argument("--output", help="write the plan")
    options = parser.parse_args()
    args = make_args()
    plan = jdelta.plan(train_step, options.budget, *args, target=options.target, donate_argnums=0)
    print(plan)
    if options.report:
        plan.report(options.report)
    if options.output:
        plan.save(options.output)


if __name__ == "__main__":
    main()
