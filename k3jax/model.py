"""The model: embed -> head layers -> scanned periods -> tail layers -> output mix -> logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.cache.state import CacheArrays, KDACache, with_windows
from k3jax.config import Config
from k3jax.layers.decoder import DecoderLayer, Depth, DepthRead
from k3jax.layers.params import Maker, linear, whole
from k3jax.layers.tokens import Tokens
from sharding import collectives
from sharding.parallel import SINGLE, Parallel

COLLECTABLE = {
    "hidden": ("hidden",),
    "routing": ("expert_ids", "expert_weights", "router_scores"),
    "index": ("selected",),
    "indexer": ("index_scores", "attention_probs", "index_valid"),
}


class Transformer(nnx.Module):
    """Kimi K3 or K3.1 Pro, the text model. Every method can be traced: jit, grad, shard_map.

    Args:
      config: the model.
      rngs: where random parameters come from; None makes them abstract (`abstract`).
      dtype: of the parameters that are not float32 by definition.
      experts: "mxfp4" keeps routed experts packed; "dense" makes them ordinary arrays, to train.
      compute_dtype: of the activations; ``dtype`` if None.
      remat: recompute each layer in the backward pass instead of storing its activations.
      extra_experts: slots for copies of busy experts (`k3jax.experts`), in packed layers.
      indexer: "frozen", "dense" or "sparse": how the K3.1 indexer trains
        (`k3jax.layers.global_attention`); the last two allow ``collect=("indexer",)``.
    """

    def __init__(
        self,
        config: Config,
        rngs: nnx.Rngs | None,
        *,
        dtype=jnp.bfloat16,
        experts: str = "mxfp4",
        extra_experts: int = 0,
        compute_dtype=None,
        remat: bool = False,
        indexer: str = "frozen",
    ):
        if experts not in ("mxfp4", "dense"):
            raise ValueError(f"experts={experts!r}: one of 'mxfp4', 'dense'")
        if indexer not in ("frozen", "dense", "sparse"):
            raise ValueError(f"indexer={indexer!r}: one of 'frozen', 'dense', 'sparse'")
        self.config, self.remat = config, remat
        self.compute_dtype = jnp.dtype(compute_dtype or dtype)
        make = Maker(rngs, dtype, config.initializer_range)
        schedule = config.schedule
        V, D = config.vocab_size, config.hidden_size

        def layers(specs, make):
            options = (experts, indexer, extra_experts)
            return nnx.List([DecoderLayer(config, spec, make, *options) for spec in specs])

        self.embed = make((V, D), ("vocab", "embed"))
        self.head = layers(schedule.head, make)
        periods = schedule.num_periods
        self.period = layers(schedule.period if periods else (), make.stacked(periods))
        self.tail = layers(schedule.tail, make)
        self.output_res = DepthRead(config, make)
        self.final_norm = make((D,), ("embed",), "ones")
        self.lm_head = make((V, D), ("vocab", "embed"))

    @classmethod
    def abstract(cls, config: Config, dtype=jnp.bfloat16, **options) -> Transformer:
        """The model with `jax.ShapeDtypeStruct` leaves: shapes, dtypes and axes, no memory."""
        return cls(config, None, dtype=dtype, **options)

    def embed_tokens(
        self,
        tokens_BT: jax.Array,
        tokens: Tokens | None = None,
        features_BTD: jax.Array | None = None,
    ) -> jax.Array:
        """[B, T] ids -> [B, T, D], or the owned part of it when ``tokens`` says which.

        An id outside the vocabulary gives NaN, never a wrong row. Where an id is the image
        placeholder, the row of ``features_BTD`` stands in its place.
        """
        if tokens is None:
            tokens = Tokens.of(jnp.zeros(tokens_BT.shape, jnp.int32), SINGLE)
        table = self.embed[...]
        split = "vocab" in tokens.parallel.split
        legal = (tokens_BT >= 0) & (tokens_BT < self.config.vocab_size)
        if split:  # every token's row, where this device has it
            rows = tokens_BT - collectives.index(tokens.parallel.tensor) * table.shape[0]
        else:
            rows, legal = tokens.own(tokens_BT), tokens.own(legal)
        here = (rows >= 0) & (rows < table.shape[0])
        x = jnp.where(here[..., None], table[jnp.where(here, rows, 0)], 0)
        x = jnp.where(legal[..., None], x, jnp.nan).astype(self.compute_dtype)
        x = tokens.reduce(x) if split else x
        if features_BTD is None:
            return x
        image = tokens.own(tokens_BT == self.config.media_token_id)
        return jnp.where(image[..., None], tokens.own(features_BTD).astype(x.dtype), x)

    def backbone(
        self,
        embedding_BTD: jax.Array | Depth,
        positions_BT: jax.Array | Tokens,
        cache: CacheArrays | None = None,
        collect: tuple[str, ...] = (),
    ) -> tuple[Depth, CacheArrays | None, dict[str, jax.Array]]:
        """All layers, without the output mix.

        Args:
          embedding_BTD: what enters layer 0, source 0 of every depth mix, of owned tokens; or the
            depth that earlier layers left, where these are layers of a deeper model.
          positions_BT: -1 for padding, which must stand at the end of a row; or `Tokens`.
          cache: None attends within the call only.
          collect: names from `COLLECTABLE`.
        Returns:
          (depth, cache, aux: each collected array stacked over the layers that have it).
        """
        tokens = positions_BT
        if not isinstance(tokens, Tokens):
            tokens = Tokens.of(tokens, SINGLE)
        names = {n for kind in collect for n in COLLECTABLE[kind]}
        depth = embedding_BTD
        if not isinstance(depth, Depth):
            depth = Depth.start(depth, self.config.num_blocks)
        rows: list[dict] = []

        def run(layer, depth, cache, slot=None):
            call = jax.checkpoint(_call, static_argnums=(0,)) if self.remat else _call
            graphdef, state = nnx.split(layer)
            depth, cache, aux = call(graphdef, state, depth, cache, tokens, slot)
            return (
                depth,
                cache,
                {
                    n: a if n == "selected" else tokens.gather(a)[0]
                    for n, a in aux.items()
                    if n in names
                },
            )

        def run_all(layers, depth, caches, slot=None):
            new_caches, auxes = [], []
            for layer, one in zip(layers, caches, strict=True):
                depth, one, aux = run(layer, depth, one, slot)
                new_caches.append(one)
                auxes.append(aux)
            return depth, tuple(new_caches), auxes

        def caches_of(group, layers):
            return (None,) * len(layers) if cache is None else getattr(cache, group)

        depth, head, auxes = run_all(self.head, depth, caches_of("head", self.head))
        rows += auxes

        period = caches_of("period", self.period)
        if len(self.period):
            # Packed experts stay outside: a scan would copy each layer's out of their stack.
            graphdef, experts, state = nnx.split(self.period, _is_packed_expert, ...)

            def body(carry, x):
                depth, caches = carry
                layer_state, slot = x
                layers = nnx.merge(graphdef, experts, layer_state)
                depth, caches, auxes = run_all(layers, depth, caches, slot)
                return (depth, caches), auxes

            count = self.config.schedule.num_periods
            (depth, period), stacked = jax.lax.scan(
                body, (depth, period), (state, jnp.arange(count, dtype=jnp.int32))
            )
            rows += [{n: a[i] for n, a in aux.items()} for i in range(count) for aux in stacked]

        depth, tail, auxes = run_all(self.tail, depth, caches_of("tail", self.tail))
        rows += auxes
        aux = {
            n: jnp.stack([row[n] for row in rows if n in row])
            for n in sorted(names)
            if any(n in row for row in rows)
        }
        if cache is not None:
            used = jnp.sum(tokens.positions_BT >= 0, axis=1, dtype=jnp.int32)
            cache = CacheArrays(cache.lengths_B + used, head, period, tail)
        return depth, cache, aux

    def _gathered(self, parallel: Parallel) -> Transformer:
        """This model with what stands outside its layers complete along ``embed``."""
        if not parallel.embed:
            return self
        inside = lambda path, value: path[0] in ("head", "period", "tail")  # noqa: E731
        graphdef, layers, rest = nnx.split(self, inside, ...)
        return nnx.merge(graphdef, layers, whole(rest, parallel.embed))

    def final_hidden(self, depth: Depth) -> jax.Array:
        """Output mix and final norm, [B, T, D]."""
        return self.output_res(depth, self.final_norm)

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] float32, rounded to the compute dtype first."""
        return linear(hidden_BTD, self.lm_head).astype(jnp.float32)

    def __call__(
        self,
        tokens_BT: jax.Array | None = None,
        *,
        embeddings_BTD: jax.Array | None = None,
        lengths_B: jax.Array | None = None,
        collect: tuple[str, ...] | None = None,
        parallel: Parallel = SINGLE,
    ):
        """Logits of every position, without a cache.

        Args:
          tokens_BT: [B, T] int32; or ``embeddings_BTD`` in its place.
          lengths_B: real tokens of each row, which stand first; T if None. What stands after them
            may be anything, NaN included.
          collect: names from `COLLECTABLE`; adds a dict of arrays to the result.
          parallel: roles of the mesh axes, inside a `shard_map`; shapes are this device's then.
        Returns:
          [B, T, V] float32, or (logits, aux) when ``collect`` is given.
        """
        if (tokens_BT is None) == (embeddings_BTD is None):
            raise ValueError("give either tokens_BT or embeddings_BTD")
        self = self._gathered(parallel)
        given = tokens_BT if embeddings_BTD is None else embeddings_BTD
        assert given is not None
        B, T = given.shape[:2]
        tokens = Tokens.of(positions(jnp.zeros((B,), jnp.int32), T, lengths_B), parallel)
        with jax.named_scope("embedding"):
            if embeddings_BTD is None:
                x = self.embed_tokens(given, tokens)
            else:
                x = tokens.own(embeddings_BTD).astype(self.compute_dtype)
        depth, _, aux = self.backbone(x, tokens, None, collect or ())
        with jax.named_scope("head"):
            logits = self.logits(tokens.gather(self.final_hidden(depth))[0])
        return logits if collect is None else (logits, aux)

    def extend(
        self,
        tokens_BT: jax.Array,
        cache: CacheArrays,
        lengths_B: jax.Array | None = None,
        parallel: Parallel = SINGLE,
        features_BTD: jax.Array | None = None,
    ) -> tuple[jax.Array, CacheArrays]:
        """Append tokens to a cache; prefill and decode are this with T > 1 and T = 1.

        ``features_BTD`` holds the rows of images, see `embed_tokens`.

        Returns:
          (float32 logits [B, V] after each row's last real token, the cache). A row of length 0
          leaves its cache as it was; its logits mean nothing.
        """
        self = self._gathered(parallel)
        B, T = tokens_BT.shape
        tokens = Tokens.of(positions(cache.lengths_B, T, lengths_B), parallel)
        with jax.named_scope("embedding"):
            x = self.embed_tokens(tokens_BT, tokens, features_BTD)
        depth, after, _ = self.backbone(x, tokens, cache)
        assert after is not None
        last_B = jnp.full((B,), T - 1, jnp.int32) if lengths_B is None else lengths_B - 1
        last_B = jnp.maximum(last_B, 0)
        with jax.named_scope("head"):
            # One token a sequence: the output mix and the head run on [B, 1, D].
            bank = tokens.last(depth.bank_NBTD, last_B)[:, :, None]
            partial = tokens.last(depth.partial_BTD, last_B)[:, None]
            hidden = self.final_hidden(Depth(bank, partial, depth.count, depth.layer))[:, 0]
            return self.logits(tokens.complete(hidden, last_B)), after

    def verify(
        self,
        tokens_BT: jax.Array,
        cache: CacheArrays,
        accepted_B: jax.Array | None = None,
        lengths_B: jax.Array | None = None,
        parallel: Parallel = SINGLE,
    ) -> tuple[jax.Array, CacheArrays]:
        """Logits of every row of a window of drafts that does not become part of the state.

        Global layers write the rows behind the length of the cache, where nothing reads them until
        they are accepted; KDA layers keep them as `KDACache.window`.

        Args:
          cache: without windows, or with those of the verification before.
          accepted_B: rows of the windows of ``cache`` to commit first; None if it has none.
          lengths_B: real rows; T if None.
        Returns:
          (float32 logits [B, T, V], the cache with windows; its lengths count committed tokens).
        """
        self = self._gathered(parallel)
        B, T = tokens_BT.shape
        if accepted_B is None:
            accepted_B = jnp.zeros((B,), jnp.int32)
            cache = with_windows(cache, T, self.compute_dtype)
        start_B = cache.lengths_B + accepted_B
        tokens = Tokens.of(positions(start_B, T, lengths_B), parallel, accepted_B)
        with jax.named_scope("embedding"):
            x = self.embed_tokens(tokens_BT, tokens)
        depth, after, _ = self.backbone(x, tokens, cache)
        assert after is not None
        with jax.named_scope("head"):
            logits = self.logits(tokens.gather(self.final_hidden(depth))[0])
        return logits, dataclasses.replace(after, lengths_B=start_B)

    def commit(self, cache: CacheArrays, accepted_B: jax.Array) -> CacheArrays:
        """The cache after the first ``accepted_B`` rows of its windows.

        The windows stay in the result, so that a donated cache is reused whole.
        """

        def one(layer, cache, slot=None):
            if not isinstance(cache, KDACache):
                return cache
            return layer.attention.commit(cache, accepted_B, slot)

        def each(layers, caches, slot=None):
            pairs = zip(layers, caches, strict=True)
            return tuple(one(layer, cache, slot) for layer, cache in pairs)

        period = cache.period
        if len(self.period):
            graphdef, experts, state = nnx.split(self.period, _is_packed_expert, ...)

            def body(caches, x):
                layer_state, slot = x
                return each(nnx.merge(graphdef, experts, layer_state), caches, slot), None

            count = self.config.schedule.num_periods
            slots = jnp.arange(count, dtype=jnp.int32)
            period, _ = jax.lax.scan(body, period, (state, slots))
        lengths_B = cache.lengths_B + accepted_B
        head, tail = each(self.head, cache.head), each(self.tail, cache.tail)
        return CacheArrays(lengths_B, head, period, tail)


EXPERT_WEIGHTS = ("w13_codes", "w13_scales", "w2_codes", "w2_scales")


def _is_packed_expert(path, value) -> bool:
    return path[-1] in EXPERT_WEIGHTS


def _call(graphdef, state, depth, cache, tokens: Tokens, slot):
    state = whole(state, tokens.parallel.embed)
    return nnx.merge(graphdef, state)(depth, cache, tokens, slot)


def positions(start_B: jax.Array, length: int, lengths_B: jax.Array | None) -> jax.Array:
    """[B, T] positions from ``start_B`` on, -1 from each row's length on."""
    offset_T = jnp.arange(length, dtype=jnp.int32)
    positions_BT = start_B[:, None] + offset_T
    if lengths_B is None:
        return positions_BT
    return jnp.where(offset_T < lengths_B[:, None], positions_BT, -1)
