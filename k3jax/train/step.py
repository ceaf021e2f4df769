"""The compiled parts of training: draw a batch, one optimiser step, the figure on held-out text.

Everything a step needs is on the device (the whole corpus is a few megabytes of uint16), so a step
is one call without a transfer, and what it does follows from the recipe and the step number alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from k3jax.config import Config
from k3jax.errors import ConfigError, InputError
from k3jax.train import balancing, bits
from k3jax.train.indexer_loss import indexer_loss
from k3jax.train.optimizer import make_optimizer, schedule
from k3jax.train.qat import forward_params
from k3jax.train.settings import TrainSettings

Build = Callable[..., nnx.Module]  # build(rngs or None, dtype=..., remat=..., indexer=...)


def build_transformer(config: Config) -> Build:
    """This repository's model with dense experts; abstract where ``rngs`` is None."""
    from k3jax.model import Transformer

    def build(rngs, *, dtype, remat=False, indexer="frozen"):
        return Transformer(config, rngs, dtype=dtype, experts="dense", remat=remat, indexer=indexer)

    return build


def data_mesh(devices=None) -> Mesh:
    """One axis "data" over the given devices, by default all local ones."""
    devices = jax.local_devices() if devices is None else devices
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def draw_windows(
    stream_N: jax.Array, step: jax.Array, seed: int, batch: int, length: int
) -> jax.Array:
    """The batch of a step: int32 [batch, length + 1].

    An epoch cuts the stream into adjoining windows at a random offset and goes through them in a
    random order, so every token is a target about once an epoch; the next epoch cuts elsewhere.

    Raises:
      InputError: the stream has fewer windows than a batch.
    """
    count = (stream_N.size - length) // length
    if count < batch:
        raise InputError(
            f"{stream_N.size} training tokens make {max(count, 0)} windows of {length}, fewer than "
            f"batch_size {batch}"
        )
    per_epoch = count // batch
    epoch, within = step // per_epoch, step % per_epoch
    order_key, offset_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), epoch))
    offset = jax.random.randint(offset_key, (), 0, length, jnp.int32)
    order = jax.random.permutation(order_key, count)
    chosen = jax.lax.dynamic_slice(order, (within * batch,), (batch,)).astype(jnp.int32)
    starts_B = offset + chosen * length
    places_BT = starts_B[:, None] + jnp.arange(length + 1, dtype=jnp.int32)
    return stream_N[places_BT].astype(jnp.int32)


@dataclass
class Trainer:
    """The compiled functions of one run.

    The state is {"params": nested float32, "opt": optax state, "step": int32}, the same on every
    device; a batch is split over the mesh's "data" axis.

    Args:
      config: of the model; None for a module without routers or an indexer.
      build: makes the module (`build_transformer`).
      train_N: uint16 training stream.
      quantize: see ``forward_params``.
      compiler_options: for XLA; tests use a lower effort.

    Raises:
      ConfigError: batch_size is no multiple of the number of devices.
    """

    settings: TrainSettings
    config: Config | None
    build: Build
    train_N: np.ndarray
    mesh: Mesh
    quantize: Callable[[jax.Array], jax.Array] | None = None
    compiler_options: dict[str, Any] | None = None

    def __post_init__(self):
        s, devices = self.settings, self.mesh.size
        if s.batch_size % devices or s.eval_batch % devices:
            raise ConfigError(
                f"batch_size {s.batch_size} and eval_batch {s.eval_batch} must be multiples of "
                f"the {devices} devices"
            )
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec("data"))
        self.optimizer = make_optimizer(s.optimizer, s.steps, self.config)
        self.rate = schedule(s.optimizer, s.steps)
        self.stream_N = jax.device_put(jnp.asarray(self.train_N), self.replicated)
        _, state = self._module("frozen")
        # Float32 where the model keeps float32, the recipe's dtype elsewhere.
        self.dtypes = jax.tree.map(lambda x: x.dtype, nnx.to_pure_dict(state))
        self._programs: dict[str, Any] = {}

    def _module(self, indexer: str):
        module = self.build(
            None,
            dtype=jnp.dtype(self.settings.dtype),
            remat=self.settings.remat and indexer != "frozen",
            indexer=indexer,
        )
        return nnx.split(module)

    def initial_state(self) -> dict[str, Any]:
        """Random float32 weights from the recipe's seed, step 0."""

        return jax.device_put(self._make_state(), self.replicated)

    def _make_state(self) -> dict[str, Any]:
        # Not jitted: one program of all draws takes half a minute to compile.
        module = self.build(nnx.Rngs(self.settings.seed), dtype=jnp.float32)
        return self.with_optimizer(nnx.to_pure_dict(nnx.split(module)[1]), 0)

    def with_optimizer(self, params, step: int) -> dict[str, Any]:
        """A state around given weights, its optimiser fresh but its schedule at ``step``."""
        opt = self.optimizer.init(params)
        counts = ("count",)

        def at(path, leaf):
            name = getattr(path[-1], "name", None)
            return jnp.full_like(leaf, step) if name in counts and step else leaf

        return {
            "params": params,
            "opt": jax.tree_util.tree_map_with_path(at, opt),
            "step": jnp.int32(step),
        }

    def abstract_state(self) -> dict[str, Any]:
        """Shapes and dtypes of the state, to read a checkpoint into."""
        return jax.eval_shape(self._make_state)

    def apply(self, params, tokens_BT, indexer: str, collect: tuple[str, ...]):
        """Forward pass of the master weights: (logits float32, aux)."""
        graphdef, abstract = self._module(indexer)
        weights = forward_params(params, self.dtypes, self.quantize)
        state = jax.tree.map(lambda x: x, abstract)
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(graphdef, state)(tokens_BT, collect=collect)

    @property
    def learns_index(self) -> bool:
        return self.config is not None and self.config.dsa is not None

    def indexer_mode(self, step: int) -> str:
        """ "dense", then "sparse"; "frozen" where nothing is selected or its loss is off."""
        if not self.learns_index or self.settings.index_loss_weight == 0:
            return "frozen"
        dense_steps = round(self.settings.dense_attention_fraction * self.settings.steps)
        return "dense" if step < dense_steps else "sparse"

    def _loss(self, params, tokens_BS, indexer: str):
        s, config = self.settings, self.config
        collect = ("routing",) if config is not None else ()
        if indexer != "frozen":
            collect += ("indexer",)
        logits, aux = self.apply(params, tokens_BS[:, :-1], indexer, collect)
        nats = bits.token_nats(logits, tokens_BS[:, 1:])
        loss = jnp.mean(nats)
        metrics = {"loss": loss}
        total = loss
        if indexer != "frozen":
            per_layer = jax.vmap(indexer_loss)(
                aux["index_scores"], aux["attention_probs"], aux["index_valid"]
            )
            metrics["index_loss"] = jnp.mean(per_layer)
            total = total + s.index_loss_weight * jnp.sum(per_layer)
        routing = {}
        if config is not None:
            routing = {name: aux[name] for name in ("router_scores", "expert_ids")}
        return total, (metrics, routing)

    def _step(self, state, stream_N, indexer: str):
        s, config = self.settings, self.config
        tokens = draw_windows(stream_N, state["step"], s.seed, s.batch_size, s.sequence_length)
        tokens = jax.lax.with_sharding_constraint(tokens, self.split)
        grad = jax.grad(lambda p: self._loss(p, tokens, indexer), has_aux=True)
        grads, (metrics, routing) = grad(state["params"])
        updates, opt = self.optimizer.update(grads, state["opt"], state["params"])
        params: Any = optax.apply_updates(state["params"], updates)
        metrics |= {"grad_norm": optax.tree.norm(grads)}
        if config is not None:
            scores = routing["router_scores"]
            flat = scores.reshape(scores.shape[0], -1, scores.shape[-1])
            bias = balancing.balance(
                flat,
                balancing.get_bias(params, config),
                config.moe.num_experts_per_token,
                tokens=s.balance_tokens,
                momentum=s.balance_momentum,
                form=s.balance_form,
            )
            params = balancing.set_bias(params, config, bias)
            ids = routing["expert_ids"]
            shares = balancing.loads(ids.reshape(ids.shape[0], -1, ids.shape[-1]), bias.shape[-1])
            metrics["max_load"] = jnp.max(shares) * bias.shape[-1]
        return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics

    def train_step(self, state, step: int):
        """One step; ``state`` is donated. Returns (state, metrics on the device).

        ``step`` is the host's copy of the state's step: it picks the program.
        """
        mode = self.indexer_mode(step)
        if mode not in self._programs:
            self._programs[mode] = jax.jit(
                lambda state, stream_N: self._step(state, stream_N, mode),
                donate_argnums=(0,),
                out_shardings=(self.replicated, self.replicated),
                compiler_options=self.compiler_options,
            )
        return self._programs[mode](state, self.stream_N)

    def make_evaluation(self, stream_N: np.ndarray, bos: int, num_bytes: int) -> Callable:
        """``f(params) -> bits per byte`` of a held-out stream, by the model as it is used."""
        s = self.settings
        tokens, counted = bits.windows(stream_N, bos, s.eval_context, s.eval_stride)
        batches = [
            jax.device_put(pair, self.split)
            for pair in zip(
                bits.batched(tokens, s.eval_batch), bits.batched(counted, s.eval_batch), strict=True
            )
        ]

        def evaluate(params) -> float:
            sums = [self._total_nats(params, rows, mask) for rows, mask in batches]
            total = np.asarray(jax.device_get(sums), np.float64).sum()
            return float(total / np.log(2) / num_bytes)

        return evaluate

    @cached_property
    def _total_nats(self):
        """One batch at a time, so that sets of any size share one program."""

        def total(params, rows, mask):
            logits, _ = self.apply(params, rows[:, :-1], "frozen", ())
            return jnp.sum(jnp.where(mask, bits.token_nats(logits, rows[:, 1:]), 0.0))

        return jax.jit(total, compiler_options=self.compiler_options)
