"""Training steps of packages that nobody here wrote: their usual step, small, with random weights.

Each builder imports its package itself, so that those which are not installed stand in nobody's
way. Nothing is downloaded.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class PackageStep:
    """A training step.

    Attributes:
        fun: The step.
        args: Its arguments, arrays.
        jit: How its package compiles it.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    jit: Callable[..., Any] = jax.jit


@dataclass(frozen=True)
class Builder:
    """What makes a step.

    Attributes:
        distribution: The package's name where it is installed from.
        build: Makes the step.
    """

    distribution: str
    build: Callable[[], PackageStep]


BUILDERS: dict[str, Builder] = {}


def _step(name: str, distribution: str) -> Callable[..., Any]:
    def register(build: Callable[[], PackageStep]) -> Callable[[], PackageStep]:
        BUILDERS[name] = Builder(distribution, build)
        return build

    return register


def _trained(
    loss: Callable[..., Any], params: Any, *batch: Any, optimizer: Any = None
) -> PackageStep:
    """The step of `loss(params, *batch)` with an optimizer of Optax."""
    optimizer = optimizer or optax.adamw(1e-3)

    def step(state: Any, *batch: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return PackageStep(step, ((params, optimizer.init(params)), *batch))


def _tokens(batch: int, length: int, words: int) -> Any:
    return jnp.asarray(np.random.default_rng(0).integers(0, words, (batch, length)), jnp.int32)


def _normal(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def _next_token_loss(logits: Any, ids: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


@_step("transformers GPT-2 (Flax)", "transformers")
def _gpt2() -> PackageStep:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=512, n_positions=128, n_embd=128, n_layer=3, n_head=4)
    model = FlaxGPT2LMHeadModel(config, seed=0)

    def loss(params: Any, ids: Any, key: Any) -> Any:
        return _next_token_loss(model(ids, params=params, dropout_rng=key, train=True).logits, ids)

    return _trained(loss, model.params, _tokens(8, 128, 512), jax.random.key(0))


@_step("transformers ViT (Flax)", "transformers")
def _vit() -> PackageStep:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
        image_size=64, patch_size=8, num_labels=10,
    )  # fmt: skip
    model = FlaxViTForImageClassification(config, seed=0)

    def loss(params: Any, images: Any, labels: Any, key: Any) -> Any:
        logits = model(images, params=params, dropout_rng=key, train=True).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return _trained(
        loss, model.params, _normal(16, 3, 64, 64), jnp.arange(16) % 10, jax.random.key(0)
    )


@_step("KerasHub BERT", "keras-hub")
def _keras_bert() -> PackageStep:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=512, num_layers=3, num_heads=4, hidden_dim=128, intermediate_dim=512,
        max_sequence_length=128,
    )  # fmt: skip
    inputs = backbone.input
    outputs = keras.layers.Dense(2)(backbone(inputs)["pooled_output"])
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.AdamW(1e-4)
    optimizer.build(model.trainable_variables)
    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(weights: Any, others: Any, x: Any, y: Any) -> Any:
        logits, others = model.stateless_call(weights, others, x, training=True)
        return criterion(y, logits), others

    def step(state: Any, x: Any, y: Any) -> Any:
        """As in Keras's guide to writing a training loop in JAX."""
        weights, others, moments = state
        (value, others), grads = jax.value_and_grad(loss, has_aux=True)(weights, others, x, y)
        weights, moments = optimizer.stateless_apply(moments, grads, weights)
        return (weights, others, moments), value

    def values(variables: Any) -> Any:
        return [jnp.array(v.value) for v in variables]

    state = tuple(
        map(values, (model.trainable_variables, model.non_trainable_variables, optimizer.variables))
    )
    ids = _tokens(8, 128, 512)
    x = {"token_ids": ids, "segment_ids": ids * 0, "padding_mask": ids >= 0}
    return PackageStep(step, (state, x, jnp.arange(8) % 2))


@_step("equimo ViT (Equinox)", "equimo")
def _equimo() -> PackageStep:
    import equinox as eqx
    from equimo.vision.models import VisionTransformer

    model = VisionTransformer(
        img_size=64, in_channels=3, dim=128, patch_size=8, num_heads=4, depths=[3],
        num_classes=10, key=jax.random.key(0),
    )  # fmt: skip
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, images: Any, labels: Any, keys: Any) -> Any:
        logits = jax.vmap(eqx.combine(params, static))(images, keys)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    keys = jax.random.split(jax.random.key(1), 16)
    return _trained(loss, params, _normal(16, 3, 64, 64), jnp.arange(16) % 10, keys)


@_step("penzai Llama-like", "penzai")
def _penzai() -> PackageStep:
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common
    from penzai.toolshed import basic_training

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=128, projection_dim=32,
        mlp_hidden_dim=512, num_decoder_blocks=3, vocab_size=512, mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )  # fmt: skip
    model = llamalike_common.build_llamalike_transformer(config, jax.random.key(0))
    optimizer = optax.adamw(1e-3)

    def loss(model: Any, rng: Any, state: Any, ids: Any) -> Any:
        tokens = pz.nx.wrap(ids).tag("batch", "seq")
        positions = pz.nx.arange("seq", ids.shape[1])
        logits = model(tokens, token_positions=positions).unwrap("batch", "seq", "vocabulary")
        return _next_token_loss(logits, ids), state, {}

    trainer = basic_training.StatefulTrainer.build(
        jax.random.key(1), model, optimizer, loss, jit=False
    )
    stateless, variables = pz.unbind_variables(trainer.model)
    params = tuple(v for v in variables if isinstance(v, pz.Parameter))

    def step(state: Any, ids: Any) -> Any:
        inner, params = state
        _, params, _, inner = trainer.step_fn(
            root_rng=trainer.root_rng, state=inner, stateless_model=stateless,
            trainable_params=params, frozen_params=(), state_vars=(), loss_fn=loss,
            optimizer_def=optimizer, kwargs={"ids": ids},
        )  # fmt: skip
        return inner, params

    state = (trainer.state.value, pz.freeze_variables(params))
    return PackageStep(step, (state, _tokens(8, 64, 512)))


@_step("diffrax neural ODE", "diffrax")
def _diffrax() -> PackageStep:
    import diffrax
    import equinox as eqx

    field = eqx.nn.MLP(8, 8, 128, 3, activation=jax.nn.softplus, key=jax.random.key(0))
    params, static = eqx.partition(field, eqx.is_inexact_array)
    times = jnp.linspace(0.0, 1.0, 10)

    def loss(params: Any, starts: Any, paths: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, _: eqx.combine(params, static)(y))

        def path(start: Any) -> Any:
            return diffrax.diffeqsolve(
                term, diffrax.Tsit5(), 0.0, 1.0, 0.1, start,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
                saveat=diffrax.SaveAt(ts=times), max_steps=64,
            ).ys  # fmt: skip

        return jnp.mean((jax.vmap(path)(starts) - paths) ** 2)

    return _trained(loss, params, _normal(32, 8), _normal(32, 10, 8))


@_step("numpyro SVI", "numpyro")
def _numpyro() -> PackageStep:
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: Any, y: Any) -> None:
        """A regression with two hidden layers of random weights."""
        h, width = x, x.shape[1]
        for i, n in enumerate((64, 64, 1)):
            w = numpyro.sample(f"w{i}", dist.Normal(0, 1).expand([width, n]).to_event(2))
            h, width = h @ w / width**0.5, n
            h = jnp.tanh(h) if n > 1 else h
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(h[:, 0], 0.1), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-3), Trace_ELBO(num_particles=4))
    x, y = _normal(512, 16), _normal(512)
    state = svi.init(jax.random.key(0), x, y)
    return PackageStep(svi.update, (state, x, y))


@_step("jraph graph network", "jraph")
def _jraph() -> PackageStep:
    import haiku as hk
    import jraph

    def network(graph: Any) -> Any:
        def mlp(width: int, name: str) -> Any:
            return jraph.concatenated_args(hk.nets.MLP([128, width], name=name))

        for i in range(3):
            graph = jraph.GraphNetwork(
                update_edge_fn=mlp(64, f"edges_{i}"),
                update_node_fn=mlp(64, f"nodes_{i}"),
                update_global_fn=mlp(64, f"globals_{i}"),
            )(graph)
        return hk.Linear(1)(graph.globals)

    rng = np.random.default_rng(0)
    nodes, edges = 256, 1024
    graph = jraph.GraphsTuple(
        nodes=_normal(nodes, 16),
        edges=_normal(edges, 8),
        senders=jnp.asarray(rng.integers(0, nodes, edges)),
        receivers=jnp.asarray(rng.integers(0, nodes, edges)),
        globals=_normal(4, 4),
        n_node=jnp.full(4, nodes // 4),
        n_edge=jnp.full(4, edges // 4),
    )
    model = hk.without_apply_rng(hk.transform(network))

    def loss(params: Any, graph: Any, targets: Any) -> Any:
        return jnp.mean((model.apply(params, graph) - targets) ** 2)

    return _trained(loss, model.init(jax.random.key(0), graph), graph, _normal(4, 1))


@_step("e3nn-jax message passing (Flax)", "e3nn-jax")
def _e3nn() -> PackageStep:
    import e3nn_jax as e3nn
    import flax.linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, vectors: Any, senders: Any, receivers: Any) -> Any:
            edges = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, normalize=True)
            messages = e3nn.tensor_product(x[senders], edges)
            messages = e3nn.flax.Linear("16x0e + 16x0o + 8x1o + 8x1e")(messages)
            x = e3nn.scatter_sum(messages, dst=receivers, output_size=x.shape[0])
            x = e3nn.flax.Linear("32x0e + 8x1o + 8x1e")(x)
            return e3nn.gate(
                e3nn.concatenate([x.filter("0e"), x.filter("1o")], axis=-1), even_act=jax.nn.silu
            )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, places: Any, senders: Any, receivers: Any) -> Any:
            vectors = e3nn.IrrepsArray("1o", places[receivers] - places[senders])
            x = e3nn.IrrepsArray("8x0e", jnp.ones((places.shape[0], 8)))
            for _ in range(3):
                x = Layer()(x, vectors, senders, receivers)
            return e3nn.flax.Linear("0e")(x).array.sum()

    rng = np.random.default_rng(0)
    places = _normal(64, 3)
    senders, receivers = (jnp.asarray(rng.integers(0, 64, 512)) for _ in range(2))
    model = Model()
    params = model.init(jax.random.key(0), places, senders, receivers)

    def loss(params: Any, places: Any, senders: Any, receivers: Any, energy: Any) -> Any:
        return (model.apply(params, places, senders, receivers) - energy) ** 2

    return _trained(loss, params, places, senders, receivers, jnp.float32(1.0))


@_step("distrax flow (Haiku)", "distrax")
def _distrax() -> PackageStep:
    import distrax
    import haiku as hk

    def log_density(x: Any) -> Any:
        layers: list[Any] = []
        for i in range(4):
            mask = jnp.arange(x.shape[-1]) % 2 == i % 2

            def conditioner(h: Any, i: int = i) -> Any:
                out = hk.nets.MLP([256, 256, 2 * x.shape[-1]], name=f"coupling_{i}")(h)
                return out.reshape(*h.shape, 2)

            def bijector(p: Any) -> Any:
                return distrax.ScalarAffine(shift=p[..., 0], log_scale=jnp.tanh(p[..., 1]))

            layers.append(distrax.MaskedCoupling(mask, conditioner=conditioner, bijector=bijector))
        base = distrax.MultivariateNormalDiag(jnp.zeros(x.shape[-1]), jnp.ones(x.shape[-1]))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x)

    model = hk.without_apply_rng(hk.transform(log_density))
    x = _normal(512, 32)

    def loss(params: Any, x: Any) -> Any:
        return -model.apply(params, x).mean()

    return _trained(loss, model.init(jax.random.key(0), x), x)


@_step("PPO (after PureJaxRL)", "distrax")
def _ppo() -> PackageStep:
    """Rollout, advantages, and epochs over minibatches in scans, in a world of points to reach."""
    import distrax
    import flax.linen as nn

    class ActorCritic(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            def body(name: str) -> Any:
                h = x
                for i in range(2):
                    h = nn.tanh(nn.Dense(64, name=f"{name}_{i}")(h))
                return h

            mean = nn.Dense(2, name="actor")(body("actor"))
            deviation = self.param("log_std", nn.initializers.zeros, (2,))
            value = nn.Dense(1, name="critic")(body("critic"))[..., 0]
            return distrax.MultivariateNormalDiag(mean, jnp.exp(deviation) + 0 * mean), value

    worlds, length, minibatches, epochs = 32, 64, 4, 2
    model, optimizer = ActorCritic(), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))

    def move(place: Any, action: Any, key: Any) -> Any:
        place = place + 0.1 * jnp.tanh(action)
        done = jnp.sum(place**2, -1) < 0.01
        new = jax.random.uniform(key, place.shape, minval=-1.0)
        return jnp.where(done[:, None], new, place), -jnp.sum(place**2, -1), done

    def loss(params: Any, batch: Any) -> Any:
        policy, value = model.apply(params, batch["place"])
        ratio = jnp.exp(policy.log_prob(batch["action"]) - batch["log_prob"])
        gain = batch["advantage"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        actor = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        critic = 0.5 * jnp.square(value - batch["target"]).mean()
        return actor + 0.5 * critic - 0.01 * policy.entropy().mean()

    def step(state: Any) -> Any:
        params, moments, place, key = state

        def act(carry: Any, _: Any) -> Any:
            place, key = carry
            key, of_action, of_world = jax.random.split(key, 3)
            policy, value = model.apply(params, place)
            action = policy.sample(seed=of_action)
            after, reward, done = move(place, action, of_world)
            seen = {"place": place, "action": action, "log_prob": policy.log_prob(action)}
            return (after, key), {**seen, "value": value, "reward": reward, "done": done}

        (place, key), seen = jax.lax.scan(act, (place, key), None, length)
        last = model.apply(params, place)[1]

        def advantage(carry: Any, now: Any) -> Any:
            gain, following = carry
            going = 1.0 - now["done"]
            delta = now["reward"] + 0.99 * following * going - now["value"]
            gain = delta + 0.99 * 0.95 * going * gain
            return (gain, now["value"]), gain

        _, gains = jax.lax.scan(advantage, (jnp.zeros_like(last), last), seen, reverse=True)
        batch = {**seen, "advantage": gains, "target": gains + seen["value"]}
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)

        def update(carry: Any, minibatch: Any) -> Any:
            params, moments = carry
            value, grads = jax.value_and_grad(loss)(params, minibatch)
            updates, moments = optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        def epoch(carry: Any, key: Any) -> Any:
            order = jax.random.permutation(key, worlds * length)
            shuffled = jax.tree.map(
                lambda x: x[order].reshape(minibatches, -1, *x.shape[1:]), batch
            )
            return jax.lax.scan(update, carry, shuffled)

        key, of_epochs = jax.random.split(key)
        keys = jax.random.split(of_epochs, epochs)
        (params, moments), losses = jax.lax.scan(epoch, (params, moments), keys)
        return (params, moments, place, key), losses

    place = _normal(worlds, 2)
    params = model.init(jax.random.key(0), place)
    return PackageStep(step, ((params, optimizer.init(params), place, jax.random.key(1)),))


@_step("blackjax HMC", "blackjax")
def _blackjax() -> PackageStep:
    import blackjax

    x, y = _normal(512, 16), _normal(512)

    def log_density(w: Any) -> Any:
        h = jnp.tanh(x @ w["hidden"])
        return -0.5 * jnp.sum((h @ w["out"] - y) ** 2) - 0.5 * optax.tree.norm(w, squared=True)

    chain = blackjax.hmc(log_density, 1e-3, jnp.ones(16 * 64 + 64), 8)
    state = chain.init({"hidden": _normal(16, 64), "out": _normal(64)})
    return PackageStep(lambda state, key: chain.step(key, state), (state, jax.random.key(0)))


@_step("tunix Qwen3, PEFT trainer (NNX)", "google-tunix")
def _tunix() -> PackageStep:
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer

    config = qwen3.ModelConfig(
        num_layers=3, vocab_size=512, embed_dim=128, hidden_dim=512, num_heads=4, head_dim=32,
        num_kv_heads=2, rope_theta=10_000, norm_eps=1e-6,
    )  # fmt: skip
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    trainer = peft_trainer.PeftTrainer(
        model, optax.adamw(1e-3), peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=1)
    )
    ids = _tokens(8, 64, 512)
    batch = {
        "input_tokens": ids,
        "input_mask": ids >= 0,
        "positions": jnp.broadcast_to(jnp.arange(64), ids.shape),
        "attention_mask": jnp.broadcast_to(jnp.tril(jnp.ones((64, 64), bool)), (8, 64, 64)),
    }
    return PackageStep(
        trainer.create_train_step_fn(), (trainer.model, trainer.optimizer, batch), nnx.jit
    )
