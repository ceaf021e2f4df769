"""The optimiser: Per-Head Muon for the matrices, AdamW for everything else, one rate schedule.

Muon replaces a matrix's momentum by the nearest (semi-)orthogonal matrix. Per-Head Muon does so for
each attention head's block of the query, key and value projections on its own, so that one head's
large gradient does not set the direction of the others (Kimi K3 technical report, section 2.5). The
scale of a block's update is not published; ``0.2 sqrt(max(m, n))`` is used, which gives an update
the size of AdamW's and lets both share a rate and a decay ("Muon is scalable for LLM training").
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from k3jax.config import Config
from k3jax.train.settings import OptimizerSettings

# Quintic Newton-Schulz: small singular values grow fast, all end in about 0.7..1.2.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EMBEDDINGS = ("embed", "lm_head")
_FROZEN = ("router_bias",)  # set by balancing, not by a gradient


def path_name(path: tuple) -> str:
    """A jax key path as "head/0/attention/q_proj"."""
    return "/".join(str(getattr(p, "key", getattr(p, "idx", getattr(p, "name", p)))) for p in path)


def _ndim(name: str, leaf) -> int:
    """Rank of one layer's array: the scanned groups carry a leading period axis."""
    return leaf.ndim - (1 if name.startswith("period/") else 0)


def label(name: str, leaf) -> str:
    """ "frozen", "vector" (no decay), "embedding" (AdamW with decay) or "matrix".

    Vectors are norms, biases, A_log, dt_bias, the AttnRes queries, and the short convolutions,
    whose [P, W] rows are P separate filters of 4 taps and no matrix.
    """
    last = name.rsplit("/", 1)[-1]
    if last in _FROZEN:
        return "frozen"
    if _ndim(name, leaf) < 2 or last.endswith("_conv"):
        return "vector"
    return "embedding" if last in _EMBEDDINGS else "matrix"


def blocks(name: str, config: Config | None) -> int:
    """Into how many row blocks Muon cuts a matrix: one a head for q, k and v, gate and up apart."""
    last = name.rsplit("/", 1)[-1]
    if last == "w13":
        return 2
    if config is None or "/attention/" not in name:
        return 1
    if last in ("q_proj", "k_proj", "v_proj"):
        return config.kda.num_heads
    if last in ("q_b_proj", "kv_b_proj"):
        return config.mla.num_heads
    if last == "wq_b" and config.dsa is not None:
        return config.dsa.num_heads
    return 1


def orthogonalize(m_XMN: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Newton-Schulz: singular values to about 1, singular vectors kept; float32 [X, M, N].

    Needs M <= N for speed only. A zero matrix stays zero.
    """
    a, b, c = _NEWTON_SCHULZ
    norm = jnp.sqrt(jnp.sum(jnp.square(m_XMN), axis=(-2, -1), keepdims=True))
    x = (m_XMN / (norm + 1e-7)).astype(dtype)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.astype(jnp.float32)


class MuonState(NamedTuple):
    """Momentum of every matrix, in the matrices' tree."""

    momentum: optax.Updates


def per_head_muon(
    momentum: float, config: Config | None = None, dtype=jnp.float32
) -> optax.GradientTransformation:
    """Nesterov momentum, then ``0.2 sqrt(max(m, n))`` times the orthogonal factor of each block.

    Blocks of one shape are put through Newton-Schulz together: a model of a hundred matrices needs
    about ten batched iterations, not a hundred.

    Args:
      dtype: of the Newton-Schulz products.
    """

    def init(params):
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del params
        moments = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, updates)
        looked = jax.tree.map(lambda m, g: momentum * m + g, moments, updates)
        flat, treedef = jax.tree_util.tree_flatten_with_path(looked)
        groups: dict[tuple[int, int], list[tuple[int, jax.Array, bool]]] = {}
        for i, (path, leaf) in enumerate(flat):
            rows, width = leaf.shape[-2] // blocks(path_name(path), config), leaf.shape[-1]
            cut = leaf.reshape(-1, rows, width)
            turned = rows > width
            cut = cut.mT if turned else cut
            groups.setdefault(cut.shape[1:], []).append((i, cut, turned))
        done: list[jax.Array] = [leaf for _, leaf in flat]
        for shape, members in groups.items():
            whole = orthogonalize(jnp.concatenate([cut for _, cut, _ in members]), dtype)
            start = 0
            for i, cut, turned in members:
                piece = whole[start : start + cut.shape[0]]
                start += cut.shape[0]
                piece = (piece.mT if turned else piece).reshape(flat[i][1].shape)
                done[i] = piece * (0.2 * max(shape) ** 0.5)
        return jax.tree.unflatten(treedef, done), MuonState(moments)

    return optax.GradientTransformation(init, update)


def schedule(settings: OptimizerSettings, steps: int, peak: float | None = None) -> optax.Schedule:
    """Linear warm-up, plateau, half cosine over the last ``decay_fraction`` of ``steps``."""
    peak = settings.learning_rate if peak is None else peak
    decay_steps = max(1, round(settings.decay_fraction * steps))

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum(1.0, (step + 1.0) / max(1, settings.warmup_steps))
        through = jnp.clip((step - (steps - decay_steps)) / decay_steps, 0.0, 1.0)
        floor = settings.final_fraction
        return peak * warm * (floor + (1.0 - floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * through)))

    return rate


def make_optimizer(
    settings: OptimizerSettings, steps: int, config: Config | None = None, dtype=jnp.float32
) -> optax.GradientTransformation:
    """Clip by the global norm, then one optimiser a label (see ``label``).

    Matrices and embeddings decay, vectors do not, the router bias is left alone.
    """
    rate = schedule(settings, steps)
    adam_rate = schedule(settings, steps, settings.adam_learning_rate)

    def adam():
        return optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=1e-10)

    adamw = optax.chain(
        adam(),
        optax.add_decayed_weights(settings.weight_decay),
        optax.scale_by_learning_rate(adam_rate),
    )
    muon = optax.chain(
        per_head_muon(settings.momentum, config, dtype),
        optax.add_decayed_weights(settings.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    transforms: dict[Hashable, optax.GradientTransformation] = {
        "frozen": optax.set_to_zero(),
        "vector": optax.chain(adam(), optax.scale_by_learning_rate(adam_rate)),
        "embedding": adamw,
        "matrix": muon if settings.name == "muon" else adamw,
    }

    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda p, x: label(path_name(p), x), params)

    chained = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm), optax.partition(transforms, labels)
    )

    def update(updates, state, params=None):
        # optax raises a Python float to an int32 step, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chained.update(updates, state, params)

    return optax.GradientTransformation(chained.init, update)
