"""The compiled model people hold: jitted entry points, bucketed shapes, donated caches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax import programs
from k3jax.cache import state as cache_state
from k3jax.config import Config
from k3jax.errors import InputError
from k3jax.model import Transformer
from sharding import Layout, make_mesh
from sharding.compile import compiler_options

MIN_TOKENS = 16  # smallest prefill bucket
MIN_CACHE = 64  # smallest cache bucket
PREFILL_CHUNK = 4096  # longest prefill bucket; longer prompts go through it in pieces


def bucket(length: int, minimum: int) -> int:
    """The power of two, at least ``minimum``, that ``length`` is padded to."""
    return max(minimum, 1 << max(length - 1, 0).bit_length())


class Cache:
    """The decode state of a batch. Each call that extends it consumes it and returns the next one.

    Attributes:
      max_length: tokens a row can hold.
      lengths_B: [B] int32 NumPy, tokens each row holds.
    """

    def __init__(self, arrays: cache_state.CacheArrays, lengths_B: np.ndarray, max_length: int):
        self._arrays: cache_state.CacheArrays | None = arrays
        self.lengths_B, self.max_length = lengths_B, max_length

    @property
    def batch(self) -> int:
        return len(self.lengths_B)

    @property
    def arrays(self) -> cache_state.CacheArrays:
        """The device arrays (`k3jax.cache.state.CacheArrays`)."""
        if self._arrays is None:
            raise InputError(
                "this cache was consumed by an earlier call; use the one that the call returned"
            )
        return self._arrays

    def consume(self) -> cache_state.CacheArrays:
        arrays, self._arrays = self.arrays, None
        return arrays


class Pending(Cache):
    """A cache and, behind its ``lengths_B``, a window of drafts that is not part of it yet.

    Attributes:
      drafts_B: [B] int32 NumPy, rows of the window.
      window: its width, drafts of the longest row and what pads the others.
    """

    def __init__(self, arrays, lengths_B, max_length, drafts_B: np.ndarray, window: int):
        super().__init__(arrays, lengths_B, max_length)
        self.drafts_B, self.window = drafts_B, window


class Model:
    """A loaded model. Parameters are split from the module once; calls take plain arrays.

    Args:
      module: a `Transformer` whose leaves are arrays.
      donate: let a call reuse the memory of the cache it is given.
      layout: how the model is spread; the module's arrays must lie as it says. None: one device.
      mesh: the layout's mesh (`sharding.make_mesh`).
    Raises:
      LayoutError: the model does not divide over the layout.

    Attributes:
      vision: a `k3jax.vision.Encoder`, or None for text only.
    """

    vision: Any = None

    def __init__(
        self,
        module: Transformer,
        *,
        donate: bool = True,
        layout: Layout | None = None,
        mesh: Mesh | None = None,
    ):
        graphdef, state = nnx.split(module)
        leaves, treedef = jax.tree.flatten(state)
        self._leaves = tuple(leaves)
        self.config: Config = module.config
        self.dtype = module.compute_dtype
        self.layout, self.mesh = layout, mesh
        self._formats, windows, options = None, None, {}
        if layout is not None:
            programs.check(self.config, module, layout)
            self.mesh = mesh = mesh or make_mesh(layout)
            # Caches keep one format from call to call (`sharding.compile.row_major`).
            self._formats = programs.cache_formats(self.config, layout, mesh)
            windows = programs.cache_formats(self.config, layout, mesh, window=1)
            options["compiler_options"] = compiler_options(mesh)
        steps = programs.Programs.of(module, layout, mesh)
        if donate:
            options["donate_argnums"] = (1,)

        def compiled(step, results):
            shardings = {} if layout is None else {"out_shardings": results}
            return jax.jit(step, **options, **shardings)

        self._batch = steps.batch
        self._forward = jax.jit(steps.forward, static_argnames=("collect",))
        self._prefill = compiled(steps.prefill, (None, self._formats))
        self._decode = compiled(steps.decode, (None, self._formats))
        self._verify = compiled(steps.verify, (None, windows))
        self._commit = compiled(steps.commit, windows)
        self._bind = lambda: nnx.merge(graphdef, jax.tree.unflatten(treedef, self._leaves))

    @property
    def module(self) -> Transformer:
        """The Flax module, for surgery, gradients and research."""
        return self._bind()

    @property
    def compilations(self) -> int:
        """Programs compiled so far by the entry points of this model."""
        programs = (self._forward, self._prefill, self._decode, self._verify, self._commit)
        return sum(f._cache_size() for f in programs)  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, tokens_BT) -> jax.Array:
        """[B, T] ids -> float32 logits [B, T, V]."""
        return self.forward(tokens_BT)[0]

    def forward(
        self, tokens_BT=None, *, lengths_B=None, collect: tuple[str, ...] = (), embeddings_BTD=None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Logits of every position and what is asked for besides, without a cache.

        Args:
          tokens_BT: [B, T] ids, or ``embeddings_BTD`` [B, T, D] in their place.
          lengths_B: real tokens of each row (they stand first); all if None.
          collect: "hidden": `hidden` [L, B, T, D], the running sum after each layer. "routing":
            `expert_ids`, `expert_weights` [Lmoe, B, T, k], `router_scores` [Lmoe, B, T, E].
            "index": `selected` [Lglobal, B, T, topk], positions ascending, -1 for none.
        Raises:
          InputError: an id, a length or a name out of range.
        """
        if unknown := sorted(set(collect) - {"hidden", "routing", "index"}):
            raise InputError(f"collect={unknown}: each must be one of hidden, routing, index")
        if embeddings_BTD is None:
            tokens_BT = self._tokens(tokens_BT, 2)
            B, T = tokens_BT.shape
            tokens_BT = _pad(tokens_BT, bucket(T, MIN_TOKENS))
        else:
            embeddings_BTD = np.asarray(embeddings_BTD)
            B, T, _ = embeddings_BTD.shape
            embeddings_BTD = _pad(embeddings_BTD, bucket(T, MIN_TOKENS))
        lengths = self._lengths(lengths_B, B, T)
        logits, aux = self._forward(
            self._leaves,
            *map(self._place, (tokens_BT, embeddings_BTD, lengths)),
            collect=tuple(sorted(collect)),
        )
        logits, aux = self._everywhere((logits, aux))
        return logits[:B, :T], {name: a[:, :B, :T] for name, a in aux.items()}

    def init_cache(self, batch: int, max_length: int, page_size: int | None = None) -> Cache:
        """An empty cache for ``batch`` rows of ``max_length`` tokens, rounded up to a bucket; with
        a ``page_size`` latents and index keys lie in pages of that many tokens."""
        limit = self.config.max_position_embeddings
        if batch < 1:
            raise InputError(f"batch={batch}: at least 1")
        if not 1 <= max_length <= limit:
            raise InputError(f"max_length={max_length}: 1 to {limit} (max_position_embeddings)")
        if page_size is not None and (page_size < 1 or self.layout is not None):
            why = "at least 1" if page_size < 1 else "caches on a layout have no pages"
            raise InputError(f"page_size={page_size}: {why}")
        size = min(bucket(max_length, MIN_CACHE), max(limit, MIN_CACHE))
        rows, size = programs.padded(self.layout, batch, size)
        shape = (rows, size, self.dtype, page_size)
        empty = functools.partial(cache_state.empty, self.config, *shape)
        if self.layout is not None:
            empty = jax.jit(empty, out_shardings=self._formats)
        return Cache(empty(), np.zeros((batch,), np.int32), size)

    def encode_images(self, images) -> list[np.ndarray]:
        """[tokens, D] features of each image, in the model dtype; rows for `prefill`.

        Args:
          images: what `k3jax.vision.read` takes: paths, bytes, PIL images, arrays, lists of frames
            (a video gives one array a frame group), or what it returned.
        Raises:
          InputError: an image that cannot be read, or a model without a vision tower.
        """
        if self.vision is None:
            why = "was not loaded" if self.config.vision else "is not in this checkpoint"
            raise InputError(f"no image can be encoded: the vision tower {why}")
        return self.vision.encode(images)

    def prefill(
        self, tokens_BT, cache: Cache, lengths_B=None, features_BTD=None
    ) -> tuple[jax.Array, Cache]:
        """Append a prompt, or the next piece of one, to every row.

        Args:
          tokens_BT: [B, T] ids; row b counts up to ``lengths_B[b]``, the rest is ignored.
          cache: consumed.
          lengths_B: [B]; T if None; 0 leaves a row as it is.
          features_BTD: [B, T, D], rows of images where the id is config.media_token_id
            (`k3jax.vision.aligned`); the other rows are not read.
        Returns:
          (float32 logits [B, V] after each row's last new token, the cache).
        Raises:
          InputError: ids or lengths out of range, or a row that would not fit the cache.
        """
        tokens_BT = self._tokens(tokens_BT, 2)
        B, T = tokens_BT.shape
        lengths = self._lengths(lengths_B, B, T)
        self._check_room(cache, B, lengths)
        wanted = (B, T, self.config.hidden_size)
        if features_BTD is not None and features_BTD.shape != wanted:
            raise InputError(f"image features {features_BTD.shape}: expected {wanted}")
        after = cache.lengths_B + lengths
        arrays, logits = cache.consume(), None
        for start in range(0, T, PREFILL_CHUNK):
            piece = tokens_BT[:, start : start + PREFILL_CHUNK]
            size = bucket(piece.shape[1], MIN_TOKENS)
            here = np.clip(lengths - start, 0, piece.shape[1]).astype(np.int32)
            rows = None
            if features_BTD is not None:
                rows = _pad(features_BTD[:, start : start + PREFILL_CHUNK], size)
            inputs = map(self._place, (_pad(piece, size), here, rows))
            new, arrays = self._prefill(self._leaves, arrays, *inputs)
            new = self._everywhere(new)[:B]
            logits = new if logits is None else jnp.where((here > 0)[:, None], new, logits)
        assert logits is not None  # T is at least 1
        return logits, Cache(arrays, after, cache.max_length)

    def decode(self, tokens_B, cache: Cache) -> tuple[jax.Array, Cache]:
        """Append one token to every row: float32 logits [B, V] and the next cache.

        Ids that are device arrays are not read back to be checked; one outside the vocabulary
        gives NaN logits.
        """
        if not isinstance(tokens_B, jax.Array):
            tokens_B = self._tokens(tokens_B, 1)
        B = tokens_B.shape[0]
        self._check_room(cache, B, np.ones((B,), np.int32))
        after = cache.lengths_B + 1
        lengths = None if self.layout is None else self._place(np.ones((B,), np.int32))
        tokens_B = self._place(tokens_B)
        logits, arrays = self._decode(self._leaves, cache.consume(), tokens_B, lengths)
        return self._everywhere(logits)[:B], Cache(arrays, after, cache.max_length)

    def verify(
        self, tokens_BT, cache: Cache, accepted_B=None, lengths_B=None
    ) -> tuple[jax.Array, Pending]:
        """Logits of a window of drafts behind every row, which the cache does not hold yet.

        A window is usually the last token that was chosen and guesses of what follows it. Rows of
        it that prove right are committed by the next call, which can be another `verify`: that is
        one program for both. The logits are those of `decode` up to rounding, since a product of
        other size adds up in another order. State, convolution tails and greedy tokens are, bit
        for bit, those of the same program called with one real row at a time (``lengths_B`` 1).

        Args:
          tokens_BT: [B, T] ids, not appended.
          cache: consumed; where it is `Pending`, its window has T rows too.
          accepted_B: [B], how many rows of the pending window to commit first; 0 drops it. None
            for a cache without one.
          lengths_B: [B], real rows; T if None.
        Returns:
          (float32 logits [B, T, V], the cache with the window pending).
        Raises:
          InputError: ids, lengths or counts out of range, or a row that would not fit the cache.
        """
        tokens_BT = self._tokens(tokens_BT, 2)
        B, T = tokens_BT.shape
        lengths = self._lengths(lengths_B, B, T)
        held, accepted = cache.lengths_B, None
        if isinstance(cache, Pending):
            accepted = self._accepted(cache, accepted_B)
            held = held + accepted
            if cache.window != T:
                raise InputError(f"a window of {T} rows where one of {cache.window} is pending")
        elif accepted_B is not None:
            raise InputError("accepted counts for a cache without pending drafts")
        self._check_room(cache, B, lengths, held)
        inputs = map(self._place, (tokens_BT, lengths, accepted))
        logits, arrays = self._verify(self._leaves, cache.consume(), *inputs)
        pending = Pending(arrays, held, cache.max_length, lengths, T)
        return self._everywhere(logits)[:B], pending

    def commit(self, cache: Pending, accepted_B) -> Cache:
        """The cache with the first ``accepted_B`` [B] rows of its window; the others are dropped.

        Raises:
          InputError: a cache without drafts, or counts out of range.
        """
        if not isinstance(cache, Pending):
            raise InputError("this cache has no pending drafts to commit")
        accepted = self._accepted(cache, accepted_B)
        arrays = self._commit(self._leaves, cache.consume(), self._place(accepted))
        arrays = cache_state.with_windows(arrays, None)
        return Cache(arrays, cache.lengths_B + accepted, cache.max_length)

    @staticmethod
    def _accepted(cache: Pending, accepted_B) -> np.ndarray:
        accepted = np.asarray(accepted_B)
        if accepted.shape != cache.drafts_B.shape or not np.issubdtype(accepted.dtype, np.integer):
            raise InputError(f"accepted counts {accepted}: expected {cache.batch} integers")
        if (accepted < 0).any() or (accepted > cache.drafts_B).any():
            raise InputError(
                f"accepted counts {accepted.tolist()}: from 0 to {cache.drafts_B.tolist()}"
            )
        return accepted.astype(np.int32)

    def _place(self, array):
        """An input with a leading batch on the layout's devices, with rows of zeros to divide."""
        if self.layout is None or array is None:
            return array
        rows, _ = programs.padded(self.layout, array.shape[0], 1)
        widths = [(0, rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, self._batch)
        if isinstance(array, jax.Array):  # a sampled token stays on the devices
            return jax.device_put(jnp.pad(array, widths), sharding)
        array = np.pad(array, widths)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def _everywhere(self, results):
        """Results complete on every device, so that each process can read and sample them."""
        if self.layout is None:
            return results
        assert self.mesh is not None
        return jax.device_put(results, NamedSharding(self.mesh, PartitionSpec()))

    def _tokens(self, tokens, rank: int) -> np.ndarray:
        tokens = np.asarray(tokens)
        if tokens.ndim != rank or tokens.size == 0:
            shape = "[B, T]" if rank == 2 else "[B]"
            raise InputError(f"token ids of shape {tokens.shape}: expected a non-empty {shape}")
        if not np.issubdtype(tokens.dtype, np.integer):
            raise InputError(f"token ids of dtype {tokens.dtype}: expected integers")
        bad = (tokens < 0) | (tokens >= self.config.vocab_size)
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            raise InputError(
                f"token id {tokens[where]} at {where}: outside 0..{self.config.vocab_size - 1}"
            )
        return tokens.astype(np.int32)

    @staticmethod
    def _lengths(lengths_B, B: int, T: int) -> np.ndarray:
        if lengths_B is None:
            return np.full((B,), T, np.int32)
        lengths = np.asarray(lengths_B)
        if lengths.shape != (B,) or (lengths < 0).any() or (lengths > T).any():
            raise InputError(f"lengths {lengths.tolist()}: expected {B} values from 0 to {T}")
        return lengths.astype(np.int32)

    @staticmethod
    def _check_room(cache: Cache, B: int, new_B: np.ndarray, held_B: np.ndarray | None = None):
        if cache.batch != B:
            raise InputError(f"{B} rows of tokens for a cache of {cache.batch} rows")
        if held_B is None:
            if isinstance(cache, Pending):
                raise InputError("drafts are pending: commit them first")
            held_B = cache.lengths_B
        over = held_B + new_B > cache.max_length
        if over.any():
            b = int(np.argmax(over))
            raise InputError(
                f"row {b}: {held_B[b]} tokens in the cache and {new_B[b]} more exceed its "
                f"length {cache.max_length}"
            )


def _pad(a: np.ndarray, length: int) -> np.ndarray:
    """Pad axis 1 with zeros up to ``length``."""
    width = [(0, 0)] * a.ndim
    width[1] = (0, length - a.shape[1])
    return np.pad(a, width)
