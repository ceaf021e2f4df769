"""Sampling of the next token: temperature, then top-k, then top-p, in one compiled program."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.errors import InputError

BAD_ROW = -1  # the id of a row whose logits hold NaN or +inf, or nothing above -inf
MIN_TEMPERATURE = (
    1e-20  # below it, float32 division would overflow; the distribution is greedy anyway
)


def check_options(temperature: float, top_k: int, top_p: float) -> None:
    """Raises InputError, naming the value, for options outside what ``sample`` defines."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InputError(f"temperature {temperature} is not a finite number >= 0")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p {top_p} is outside (0, 1]")
    if not 0 <= top_k < 2**31:
        raise InputError(f"top_k {top_k} is outside 0..2147483647 (0: no limit)")


def sample(logits_BV, key, temperature=0.0, top_k=0, top_p=1.0) -> jax.Array:
    """Draws one token a row.

    The options apply in this order: logits are divided by the temperature; the ``top_k`` largest
    are kept (ties: lowest id); of their softmax, the shortest run of the most likely whose mass
    reaches ``top_p`` is kept; one of these is drawn by its renormalised probability. Temperature 0
    is the largest logit (ties: lowest id). The draw of a row depends on its own logits, options
    and key alone. Options are arrays inside, so another value is no new compilation.

    Args:
      logits_BV: [B, V], any float dtype; -inf forbids a token.
      key: a PRNG key, split by row, or [B] keys.
      temperature, top_k, top_p: scalars or [B]; top_k 0 and top_p 1 switch off.

    Returns:
      int32 [B]; BAD_ROW where the logits are not usable.
    """
    return _sample(
        logits_BV,
        key,
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(top_k, jnp.int32),
        jnp.asarray(top_p, jnp.float32),
    )


@jax.jit
def support(logits_BV, temperature=1.0, top_k=0, top_p=1.0) -> jax.Array:
    """bool [B, V]: the tokens that ``sample`` can draw at a temperature above 0."""
    logits_BV = jnp.asarray(logits_BV, jnp.float32)
    batch = logits_BV.shape[0]
    options = (_rows(temperature, batch), _rows(top_k, batch, jnp.int32), _rows(top_p, batch))
    order_BV, kept_BV, _ = _kept(logits_BV, *options)
    rows_B1 = jnp.arange(batch)[:, None]
    return jnp.zeros(logits_BV.shape, bool).at[rows_B1, order_BV].set(kept_BV)


@jax.jit
def sample_step(logits_BV, key, step, temperature, top_k, top_p):
    """``sample`` with the key of one decode step, folded in on the device."""
    return _sample(logits_BV, jax.random.fold_in(key, step), temperature, top_k, top_p)


@jax.jit
def _sample(logits_BV, key, temperature, top_k, top_p):
    logits_BV = logits_BV.astype(jnp.float32)
    batch, vocab = logits_BV.shape
    temperature_B = _rows(temperature, batch)
    top_k_B, top_p_B = _rows(top_k, batch, jnp.int32), _rows(top_p, batch)
    greedy_B = jnp.argmax(logits_BV, -1).astype(jnp.int32)

    warm_B = temperature_B > 0
    limited = jnp.any(warm_B & ((top_k_B > 0) | (top_p_B < 1)))

    def draw():
        keys_B = key
        if key.ndim == 0:
            keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))
        noise_BV = jax.vmap(lambda row: jax.random.gumbel(row, (vocab,), jnp.float32))(keys_B)

        def plain():
            return jnp.argmax(_tempered(logits_BV, temperature_B) + noise_BV, -1).astype(jnp.int32)

        def filtered():
            # The noise belongs to the token, not to its place in the order: a row draws the same
            # token whether or not another row of the batch needs the sort.
            order_BV, kept_BV, sorted_BV = _kept(logits_BV, temperature_B, top_k_B, top_p_B)
            drawn_BV = sorted_BV + jnp.take_along_axis(noise_BV, order_BV, -1)
            place_B = jnp.argmax(jnp.where(kept_BV, drawn_BV, -jnp.inf), -1)
            return jnp.take_along_axis(order_BV, place_B[:, None], -1)[:, 0]

        # A sort of K3's 163,840 logits costs more than the rest of sampling (94 ms of 96 on a CPU).
        return lax.cond(limited, filtered, plain)

    drawn_B = lax.cond(jnp.any(warm_B), draw, lambda: greedy_B)
    highest_B = jnp.max(logits_BV, -1)  # NaN if any is
    ids_B = jnp.where(warm_B, drawn_B, greedy_B)
    return jnp.where(jnp.isfinite(highest_B), ids_B, BAD_ROW)


def _rows(value, batch, dtype=jnp.float32):
    return jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))


def _tempered(logits_BV, temperature_B):
    """Logits over temperature with the largest moved to 0, so that nothing overflows upwards."""
    highest_B1 = jnp.max(logits_BV, -1, keepdims=True)
    return (logits_BV - highest_B1) / jnp.maximum(temperature_B, MIN_TEMPERATURE)[:, None]


def _kept(logits_BV, temperature_B, top_k_B, top_p_B):
    """(token ids from most to least likely, which of them stay, their tempered logits)."""
    batch, vocab = logits_BV.shape
    ids_BV = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), (batch, vocab))
    negative_BV, order_BV = lax.sort(
        (-_tempered(logits_BV, temperature_B), ids_BV), dimension=1, is_stable=True, num_keys=1
    )
    sorted_BV = -negative_BV
    limit_B = jnp.where(top_k_B > 0, top_k_B, vocab)
    in_k_BV = jnp.arange(vocab) < limit_B[:, None]
    p_BV = jax.nn.softmax(jnp.where(in_k_BV, sorted_BV, -jnp.inf), -1)
    before_BV = jnp.cumsum(p_BV, -1) - p_BV
    first_BV = jnp.arange(vocab)[None, :] == 0  # 1 - 1 ulp of rounding must not empty the set
    in_p_BV = (before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1) | first_BV
    return order_BV, in_k_BV & in_p_BV, sorted_BV
