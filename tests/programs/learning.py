"""What people train: reinforcement, adversaries, contrast, preferences, private data."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.programs.parts import (
    array,
    block,
    descend,
    integers,
    layer,
    mean_square,
    rows,
    scanned,
    trained,
    unrolled,
    weights,
)
from tests.programs.table import Size, program

ACTIONS = 4


def with_head(size, outputs=ACTIONS):
    return {"body": weights(size), "head": array(size.width, outputs, scale=0.3, seed=9)}


def scores(unit, ws, x):
    return unrolled(unit, ws["body"], x) @ ws["head"]


def picked(logits, choices):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), choices[..., None], -1)[..., 0]


@program(units=True)
def policy_gradient(size, remat):
    unit = remat(block)

    def loss(ws, states, actions, returns):
        logits = scores(unit, ws, states)
        entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1)
        return -jnp.mean(picked(logits, actions) * returns + 0.01 * entropy)

    args = rows(size), integers(ACTIONS, size.rows), array(size.rows)
    return trained(loss), (with_head(size), *args)


@program(units=True)
def proximal_policy(size, remat):
    """PPO: advantages by a reversed loop, then epochs of clipped steps over shuffled parts."""
    unit = remat(block)

    def advantages(rewards, values):
        def body(gae, rv):
            reward, value, following = rv
            gae = reward + 0.99 * following - value + 0.95 * gae
            return gae, gae

        following = jnp.append(values[1:], 0.0)
        return lax.scan(body, 0.0, (rewards, values, following), reverse=True)[1]

    def loss(ws, part):
        x, actions, old, gains = part
        out = scores(unit, ws, x)
        logits, values = out[:, :-1], out[:, -1]
        ratio = jnp.exp(picked(logits, actions) - old)
        surrogate = jnp.minimum(ratio * gains, jnp.clip(ratio, 0.8, 1.2) * gains)
        return -jnp.mean(surrogate) + 0.5 * jnp.mean((values - gains) ** 2)

    def step(ws, x, actions, rewards, key):
        out = scores(unit, ws, x)
        old = picked(out[:, :-1], actions)
        data = x, actions, old, advantages(rewards, out[:, -1])

        def epoch(ws, key):
            order = jax.random.permutation(key, size.rows).reshape(2, -1)
            return lax.scan(
                lambda ws, i: trained(loss)(ws, jax.tree.map(lambda d: d[i], data)), ws, order
            )

        return lax.scan(epoch, ws, jax.random.split(key, 2))

    args = rows(size), integers(ACTIONS, size.rows), array(size.rows)
    return step, (with_head(size, ACTIONS + 1), *args, jax.random.key(0))


@program(units=True)
def q_learning(size, remat):
    """A frozen copy of the weights gives the target."""
    unit = remat(block)

    def loss(ws, frozen, x, actions, rewards, following):
        best = scores(unit, frozen, following).max(-1)
        q = jnp.take_along_axis(scores(unit, ws, x), actions[:, None], -1)[:, 0]
        return jnp.mean(optax.huber_loss(q, lax.stop_gradient(rewards + 0.9 * best)))

    args = rows(size), integers(ACTIONS, size.rows), array(size.rows), rows(size, seed=5)
    return trained(loss), (with_head(size), with_head(size), *args)


@program(units=True)
def rollout_through_a_model(size, remat):
    """The gradient of a return through steps of a differentiable world."""
    unit = remat(block)

    def loss(ws, x):
        def body(x, _):
            action = jnp.tanh(unit(layer(ws, 0), x))
            x = 0.9 * x + 0.1 * jnp.sin(action)
            return x, -mean_square(x)

        return lax.scan(body, x, None, length=4)[1].sum()

    return trained(loss), (weights(size), rows(size))


@program(units=True)
def adversarial_networks(size, remat):
    """GAN: two networks, two gradients, in one step."""
    unit = remat(block)

    def critic(ws, x):
        return scores(unit, ws, x)

    def step(ws, x, key):
        z = jax.random.normal(key, x.shape)

        def of_critic(critic_ws):
            fake = unrolled(unit, ws["maker"], z)
            right, wrong = critic(critic_ws, x), critic(critic_ws, fake)
            return jnp.mean(jax.nn.softplus(-right) + jax.nn.softplus(wrong))

        def of_maker(maker_ws):
            fake = unrolled(unit, maker_ws, z)
            return jnp.mean(jax.nn.softplus(-critic(ws["critic"], fake)))

        grads = {
            "critic": jax.grad(of_critic)(ws["critic"]),
            "maker": jax.grad(of_maker)(ws["maker"]),
        }
        return descend(ws, grads)

    ws = {"critic": with_head(size, 1), "maker": weights(size)}
    return step, (ws, rows(size), jax.random.key(0))


@program(units=True)
def cycle_of_two_networks(size, remat):
    unit = remat(block)

    def loss(ws, x, y):
        forward, back = (lambda x, w=ws[name]: unrolled(unit, w, x) for name in ("there", "back"))
        return mean_square(back(forward(x)) - x) + mean_square(forward(back(y)) - y)

    ws = {"there": weights(size), "back": weights(size)}
    return trained(loss), (ws, rows(size), rows(size, seed=3))


@program(units=True)
def diffusion(size, remat):
    """Noise at a drawn time is predicted, the time embedded by sines."""
    unit = remat(block)

    def loss(ws, x, key):
        a, b = jax.random.split(key)
        time = jax.random.uniform(a, (len(x), 1))
        noise = jax.random.normal(b, x.shape)
        angles = time * jnp.arange(1.0, 1 + size.width // 2)
        embedded = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        noisy = jnp.cos(time) * x + jnp.sin(time) * noise
        return mean_square(unrolled(unit, ws, noisy + embedded) - noise)

    return trained(loss), (weights(size), rows(size), jax.random.key(0))


@program(units=True)
def flow_matching(size, remat):
    unit = remat(block)

    def loss(ws, x, key):
        a, b = jax.random.split(key)
        noise, time = jax.random.normal(a, x.shape), jax.random.uniform(b, (len(x), 1))
        return mean_square(scanned(unit, ws, (1 - time) * noise + time * x) - (x - noise))

    return trained(loss), (weights(size), rows(size), jax.random.key(0))


@program(units=True)
def contrastive(size, remat):
    """CLIP: two encoders, every row against every other."""
    unit = remat(block)

    def unit_length(y):
        return y / jnp.sqrt(jnp.sum(y**2, -1, keepdims=True) + 1e-6)

    def loss(ws, x, y):
        a = unit_length(unrolled(unit, ws["image"], x))
        b = unit_length(unrolled(unit, ws["text"], y))
        logits = jnp.exp(ws["scale"]) * a @ b.T
        labels = jnp.arange(len(x))
        return -jnp.mean(picked(logits, labels) + picked(logits.T, labels))

    ws = {"image": weights(size), "text": weights(size), "scale": jnp.float32(1.0)}
    return trained(loss), (ws, rows(size), rows(size, seed=3))


@program(units=True)
def bootstrapped_latents(size, remat):
    """BYOL: one network follows the other as a moving average, without a gradient."""
    unit = remat(block)

    def step(state, x, y):
        ws, target = state

        def loss(ws):
            guess = unrolled(unit, ws, x)
            wanted = lax.stop_gradient(unrolled(unit, target, y))
            return 2 - 2 * jnp.mean(optax.cosine_similarity(guess, wanted, epsilon=1e-3))

        value, grads = jax.value_and_grad(loss)(ws)
        ws = descend(ws, grads)
        return (ws, optax.incremental_update(ws, target, 0.05)), value

    return step, ((weights(size), weights(size)), rows(size), rows(size, seed=3))


@program(units=True)
def direct_preferences(size, remat):
    """DPO: a frozen reference beside the weights, wanted and unwanted answers."""
    unit, tokens = remat(block), 16

    def likelihood(ws, ids):
        y = scanned(unit, ws["body"], ws["table"][ids[:, :-1]])
        return picked(y @ ws["table"].T, ids[:, 1:]).sum(-1)

    def loss(ws, frozen, wanted, unwanted):
        gain = lambda ids: likelihood(ws, ids) - likelihood(frozen, ids)  # noqa: E731
        return -jnp.mean(jax.nn.log_sigmoid(0.1 * (gain(wanted) - gain(unwanted))))

    def params():
        return {"table": array(tokens, size.width, scale=0.3), "body": weights(size)}

    ids = [integers(tokens, size.rows // 8, 9, seed=i) for i in range(2)]
    return trained(loss), (params(), params(), *ids)


@program(units=True)
def low_rank_adapters(size, remat):
    """LoRA: only the adapters have a gradient, the weights are arguments without one."""

    def unit(frozen, adapter, x):
        h = jax.nn.gelu(x @ frozen["up"] + (x @ adapter["a"]) @ adapter["b"])
        return x + jnp.tanh(h @ frozen["down"])

    marked = remat(unit)

    def loss(adapters, frozen, x):
        for i in range(size.layers):
            x = marked(layer(frozen, i), layer(adapters, i), x)
        return mean_square(x)

    adapters = {
        "a": array(size.layers, size.width, 2, scale=0.3),
        "b": array(size.layers, 2, 2 * size.width, scale=0.3),
    }
    return trained(loss), (adapters, weights(size), rows(size))


@program(units=True)
def frozen_first_layers(size, remat):
    """Fine-tuning of the last block only."""
    unit = remat(block)

    def loss(last, frozen, x):
        return mean_square(unit(last, unrolled(unit, frozen, x)))

    return trained(loss), (layer(weights(size), 0), weights(size), rows(size))


@program(units=True)
def distillation(size, remat):
    """A teacher without a gradient, with layers of its own width."""
    unit = remat(block)

    def loss(ws, teacher, x):
        wanted = jax.nn.softmax(scores(unit, teacher, x) / 2)
        return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(scores(unit, ws, x) / 2), -1))

    teacher = with_head(Size(size.rows, size.width, size.layers + 1))
    return trained(loss), (with_head(size), teacher, rows(size))


@program(units=True, large=Size(2048, 256))
def private_gradients(size, remat):
    """DP-SGD: a gradient for each example, clipped, summed, with noise."""
    unit = remat(block)

    def step(ws, x, key):
        loss = lambda ws, row: mean_square(unrolled(unit, ws, row[None]))  # noqa: E731
        grads = jax.vmap(jax.grad(loss), (None, 0))(ws, x)
        flat, tree = jax.tree.flatten(grads)
        summed, _ = optax.per_example_global_norm_clip(flat, 0.1)
        noise = jax.random.split(key, len(summed))
        noisy = [
            g + 0.01 * jax.random.normal(k, g.shape) for g, k in zip(summed, noise, strict=True)
        ]
        return descend(ws, jax.tree.unflatten(tree, noisy))

    return step, (weights(size), rows(Size(8, size.width)), jax.random.key(0))


@program(units=True)
def triplets(size, remat):
    unit = remat(block)

    def loss(ws, x):
        a, b, c = (unrolled(unit, ws, x[i]) for i in range(3))
        positive, negative = jnp.sum((a - b) ** 2, -1), jnp.sum((a - c) ** 2, -1)
        return jnp.mean(jax.nn.relu(positive - negative + 1.0))

    return trained(loss), (weights(size), array(3, size.rows, size.width))


@program(units=True)
def energy_with_langevin_samples(size, remat):
    """Samples by noisy steps along the gradient of the energy, without a gradient themselves."""
    unit = remat(block)

    def energy(ws, x):
        return scores(unit, ws, x).sum()

    def step(ws, x, key):
        def body(x, key):
            g = jax.grad(energy, argnums=1)(ws, x)
            return x - 0.1 * g + 0.01 * jax.random.normal(key, x.shape), None

        fake, _ = lax.scan(body, x, jax.random.split(key, 2))
        return trained(lambda ws: energy(ws, x) - energy(ws, lax.stop_gradient(fake)))(ws)

    return step, (with_head(size, 1), rows(size), jax.random.key(0))
