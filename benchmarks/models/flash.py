"""Causal attention block by block, whose backward pass needs only the output and its statistics.

The memory shape of FlashAttention-2 (Dao 2023, algorithms 1 and 2) in plain JAX: no array of length
squared is ever whole, and the residuals are the inputs, the output and the log-sum-exp.
Axes: b batch, q query position, s key position, k key-value head, g query head of it, d feature.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> jax.Array:
    """Causal attention with grouped key-value heads.

    Args:
        q: Queries `[batch, length, heads, features]`.
        k: Keys `[batch, length, key-value heads, features]`.
        v: Values, shaped like the keys.
        block: Keys visited at a time; divides the length, or exceeds it.

    Returns:
        The attended values, shaped like the queries.
    """
    return _forward(q, k, v, block)[0]


def _forward(q, k, v, block):
    """Attends block by block and returns the residuals of the backward pass too."""
    grouped = _group(q, k)

    def visit(carry, chunk):
        out, total, top = carry
        keys, values, start = chunk
        scores = _scores(grouped, keys, start)
        peak = jnp.maximum(top, scores.max(-1))
        weights, shrink = jnp.exp(scores - peak[..., None]), jnp.exp(top - peak)
        out = out * shrink[..., None] + jnp.einsum("bkgqs,bskd->bkgqd", weights, values)
        return (out, total * shrink + weights.sum(-1), peak), None

    shape = *grouped.shape[:1], *grouped.shape[2:4], grouped.shape[1]
    start = jnp.zeros((*shape, q.shape[-1])), jnp.zeros(shape), jnp.full(shape, -1e30)
    (out, total, top), _ = jax.lax.scan(visit, start, _chunks(k, v, block))
    out = jnp.moveaxis(out / total[..., None], 3, 1).reshape(q.shape).astype(q.dtype)
    return out, (q, k, v, out, top + jnp.log(total))


def _backward(block, residuals, cotangent):
    """Recomputes each block's weights from the log-sum-exp and differentiates it."""
    q, k, v, out, log_sum_exp = residuals
    grouped, d_out = _group(q, k), jnp.moveaxis(_group(cotangent, k), 1, 3)
    delta = jnp.sum(d_out * jnp.moveaxis(_group(out, k), 1, 3), axis=-1)

    def visit(d_q, chunk):
        keys, values, start = chunk
        weights = jnp.exp(_scores(grouped, keys, start) - log_sum_exp[..., None])
        d_weights = jnp.einsum("bkgqd,bskd->bkgqs", d_out, values)
        d_scores = weights * (d_weights - delta[..., None]) * q.shape[-1] ** -0.5
        d_q += jnp.einsum("bkgqs,bskd->bqkgd", d_scores, keys)
        d_k = jnp.einsum("bkgqs,bqkgd->bskd", d_scores, grouped)
        return d_q, (d_k, jnp.einsum("bkgqs,bkgqd->bskd", weights, d_out))

    d_q, (d_k, d_v) = jax.lax.scan(visit, jnp.zeros(grouped.shape), _chunks(k, v, block))
    d_k, d_v = (jnp.moveaxis(d, 0, 1).reshape(k.shape).astype(k.dtype) for d in (d_k, d_v))
    return d_q.reshape(q.shape).astype(q.dtype), d_k, d_v


def _group(q, k):
    """Queries by key-value head, in float32: `[b, q, k, g, d]`."""
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]).astype(jnp.float32)


def _chunks(k, v, block):
    """Keys and values by block, in float32, and the position where each block starts."""
    batch, length, *rest = k.shape
    count = max(length // block, 1)
    split = (batch, count, length // count, *rest)
    keys, values = (jnp.moveaxis(x.reshape(split), 1, 0).astype(jnp.float32) for x in (k, v))
    return keys, values, jnp.arange(count) * (length // count)


def _scores(q, keys, start):
    """Scaled scores `[b, k, g, q, s]` of one block of keys, minus infinity for later keys."""
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, keys) * q.shape[-1] ** -0.5
    seen = jnp.arange(q.shape[1])[:, None] >= start + jnp.arange(keys.shape[1])
    return jnp.where(seen, scores, -jnp.inf)


attention.defvjp(_forward, _backward)
