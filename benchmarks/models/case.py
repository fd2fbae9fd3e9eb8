"""What every benchmark model is handed over as: one training step and its shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class State(NamedTuple):
    """What one training step hands to the next.

    Attributes:
        step: Steps done so far, int32 scalar; the dropout key derives from it.
        params: Trained parameters.
        stats: Variables that the forward pass updates (batch statistics), `{}` if there are none.
        opt: State of the optimiser.
    """

    step: jax.Array
    params: Any
    stats: Any
    opt: optax.OptState


@dataclass(frozen=True)
class Case:
    """A model's training step with everything needed to trace, run or check it.

    Attributes:
        name: The name it was built under.
        step: `(state, batch) -> (state, metrics)`, gradient and optimiser update included;
            jittable, the state may be donated.
        loss: `(state, batch) -> scalar`, as the step computes it, dropout included.
        grads: `(state, batch) -> (loss, gradients)`, the gradients shaped like `state.params`.
        init: `seed -> (state, batch)`, concrete random arrays.
        state: Shapes of the state.
        batch: Shapes of the batch.
    """

    name: str
    step: Callable[[State, Any], tuple[State, dict[str, jax.Array]]]
    loss: Callable[[State, Any], jax.Array]
    grads: Callable[[State, Any], tuple[jax.Array, Any]]
    init: Callable[[int], tuple[State, Any]]
    state: State
    batch: Any


def identity(fun: Any) -> Any:
    """The recompute decorator of the plain step: nothing is recomputed."""
    return fun


def make_case(
    name: str,
    *,
    variables: Callable[[jax.Array], tuple[Any, Any]],
    batch: Callable[[jax.Array], Any],
    forward: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, Any]],
    optimizer: optax.GradientTransformation,
) -> Case:
    """Puts a training step around a model's forward pass.

    Args:
        name: Name of the case.
        variables: Draws `(params, stats)` from a key.
        batch: Draws a batch from a key.
        forward: `(params, stats, batch, dropout key) -> (loss, new stats)`.
        optimizer: Turns gradients into updates.

    Returns:
        The case.
    """

    def objective(params: Any, state: State, data: Any) -> tuple[jax.Array, Any]:
        key = jax.random.fold_in(jax.random.key(0), state.step)
        return forward(params, state.stats, data, key)

    def value_and_grad(state: State, data: Any) -> tuple[tuple[jax.Array, Any], Any]:
        return jax.value_and_grad(objective, has_aux=True)(state.params, state, data)

    def step(state: State, data: Any) -> tuple[State, dict[str, jax.Array]]:
        (loss, stats), grads = value_and_grad(state, data)
        updates, opt = optimizer.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, stats, opt), {"loss": loss}

    def loss(state: State, data: Any) -> jax.Array:
        return objective(state.params, state, data)[0]

    def grads(state: State, data: Any) -> tuple[jax.Array, Any]:
        (value, _), gradients = value_and_grad(state, data)
        return value, gradients

    @jax.jit
    def init(seed: int) -> tuple[State, Any]:
        # The default generator takes twice as long to compile, and every weight has its own draw.
        model_key, data_key = jax.random.split(jax.random.key(seed, impl="rbg"))
        params, stats = variables(model_key)
        state = State(jnp.zeros((), jnp.int32), params, stats, optimizer.init(params))
        return state, batch(data_key)

    state_shapes, batch_shapes = jax.eval_shape(init, 0)
    return Case(name, step, loss, grads, init, state_shapes, batch_shapes)


def labelled_images(key: jax.Array, config: Any) -> dict[str, jax.Array]:
    """Draws a batch of images and their classes.

    Args:
        key: Random key.
        config: Says `batch`, `length` (the side of an image) and `classes`.
    """
    image_key, label_key = jax.random.split(key)
    shape = config.batch, config.length, config.length, 3
    return {
        "images": jax.random.normal(image_key, shape),
        "labels": jax.random.randint(label_key, (config.batch,), 0, config.classes),
    }


def adamw(
    peak: float, warmup: int, *, b2: float = 0.95, decay: float = 0.1
) -> optax.GradientTransformation:
    """The usual optimiser of transformers: clipped AdamW under warm-up and cosine decay.

    Args:
        peak: Learning rate at the end of the warm-up.
        warmup: Steps of linear warm-up; the cosine ends after a hundred times as many.
        b2: Decay rate of the second moment.
        decay: Weight decay, applied to matrices only.

    Returns:
        The optimiser.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, 100 * warmup)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=b2, weight_decay=decay, mask=matrices),
    )


def matrices(params: Any) -> Any:
    """Marks the parameters that weight decay applies to: no biases, no scales.

    It goes by the name, because a scan stacks vectors to matrices.
    """
    vectors = ("bias", "scale", "norm")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path[-1].key.startswith(vectors), params
    )
