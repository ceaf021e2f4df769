"""MoonViT-V2 and the projector: pixels of one image or frame group -> rows of the text model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import VisionConfig
from k3jax.layers.norms import rms_norm
from k3jax.layers.params import Maker, linear
from k3jax.ops import vision_attention

STD = 0.02  # of random weights


class VisionBlock(nnx.Module):
    """x += attention(norm(x)); x += MLP(norm(x)). No bias anywhere."""

    def __init__(self, config: VisionConfig, make: Maker):
        self.config = config
        C, Q, F = config.hidden_size, config.qkv_size, config.intermediate_size
        self.norm0 = make((C,), ("vision_embed",), "ones")
        self.norm1 = make((C,), ("vision_embed",), "ones")
        self.wqkv = make((3 * Q, C), ("vision_heads", "vision_embed"))
        self.wo = make((C, Q), ("vision_embed", "vision_heads"))
        self.fc0 = make((F, C), ("vision_mlp", "vision_embed"))
        self.fc1 = make((C, F), ("vision_embed", "vision_mlp"))

    def __call__(self, x_NC: jax.Array, length, turns, implementation: str) -> jax.Array:
        c = self.config
        y = _norm(x_NC, self.norm0, c.norm_eps)
        qkv = linear(y, self.wqkv).reshape(len(y), 3, c.num_heads, -1)
        out = vision_attention.attend(
            rotate(qkv[:, 0], *turns),
            rotate(qkv[:, 1], *turns),
            qkv[:, 2],
            length,
            scale=qkv.shape[-1] ** -0.5,
            implementation=implementation,
        )
        x_NC = x_NC + linear(out.reshape(len(y), -1), self.wo)
        y = linear(_norm(x_NC, self.norm1, c.norm_eps), self.fc0)
        return x_NC + linear(_gelu(y, approximate=True), self.fc1)


class VisionTower(nnx.Module):
    """The tower with its projector. One call encodes one item; see `k3jax.vision` for many.

    Args:
      config: ``Config.vision``.
      rngs: where random parameters come from; None makes them abstract.
      dtype: of the parameters.
      compute_dtype: of the activations; ``dtype`` if None.
      implementation: of `k3jax.ops.vision_attention.attend`.
    """

    def __init__(
        self,
        config: VisionConfig,
        rngs: nnx.Rngs | None,
        *,
        dtype=jnp.bfloat16,
        compute_dtype=None,
        implementation: str = "auto",
    ):
        self.config, self.implementation = config, implementation
        self.compute_dtype = jnp.dtype(compute_dtype or dtype)
        make = Maker(rngs, dtype, STD)
        C, D, G = config.hidden_size, config.text_hidden_size, config.merged_size
        Y, Z = config.position_table
        normal = lambda key, shape: jax.random.normal(key, shape, jnp.float32)  # noqa: E731
        self.patch_embed = make((C, config.patch_width), ("vision_embed", "patch"))
        self.positions = make((Y * Z, C), ("patch", "vision_embed"), normal)
        self.blocks = VisionBlock(config, make.stacked(config.num_layers, "vision_layers"))
        self.final_norm = make((C,), ("vision_embed",), "ones")
        self.projector_in = make((G, G), ("vision_mlp", "vision_embed"))
        self.projector_out = make((D, G), ("embed", "vision_mlp"))
        self.projector_norm = make((D,), ("embed",), "ones")

    @classmethod
    def abstract(cls, config: VisionConfig, dtype=jnp.bfloat16, **options) -> VisionTower:
        """The tower with `jax.ShapeDtypeStruct` leaves."""
        return cls(config, None, dtype=dtype, **options)

    def __call__(self, patches_NP: jax.Array, grid_3: jax.Array) -> jax.Array:
        """Encodes one item.

        Args:
          patches_NP: patches in the order frame, row, column, each flattened (channel, row,
            column); uint8 pixels, or floats already brought to [-1, 1]. Rows past the t*h*w of the
            grid are padding: they may hold anything and change nothing.
          grid_3: int32 (t, h, w) in patches, may be traced; h and w multiples of the merge.
        Returns:
          [N / merge area, D]: row m is merged patch m, row-major; rows past h*w / merge area mean
          nothing.
        Source: Moonshot's published modelling code.
        """
        return self._encode(patches_NP, grid_3, False)[0]

    def inside(self, patches_NP: jax.Array, grid_3: jax.Array) -> tuple[jax.Array, dict]:
        """What a call returns, and "embedded" [N, C], "hidden" [L, N, C] after each block,
        "encoder" [N, C], "merged" [M, merge area, C]."""
        return self._encode(patches_NP, grid_3, True)

    def _encode(self, patches_NP, grid_3, collect: bool) -> tuple[jax.Array, dict]:
        c, dtype = self.config, self.compute_dtype
        t, h, w = grid_3[0], grid_3[1], grid_3[2]
        index_N = jnp.arange(len(patches_NP), dtype=jnp.int32)
        frame_N, cell_N = jnp.divmod(index_N, jnp.maximum(h * w, 1))
        row_N, column_N = jnp.divmod(cell_N, jnp.maximum(w, 1))
        length = t * h * w
        if patches_NP.dtype == jnp.uint8:
            unit = jnp.float32(0.5)
            patches_NP = (patches_NP.astype(jnp.float32) / jnp.float32(255) - unit) / unit
        patches_NP = jnp.where((index_N < length)[:, None], patches_NP, 0).astype(dtype)
        place_NC = self._place(row_N, column_N, h, w)
        time_NC = frame_table(c.position_time, c.hidden_size)[
            jnp.clip(frame_N, 0, c.position_time - 1)
        ]
        place_NC = place_NC + jnp.where(t > 1, time_NC, 0).astype(dtype)
        x_NC = embedded = linear(patches_NP, self.patch_embed) + place_NC
        turns = rotations(row_N, column_N, c.qkv_size // c.num_heads)
        graphdef, stack = nnx.split(self.blocks)

        def block(x_NC, state):
            x_NC = nnx.merge(graphdef, state)(x_NC, length, turns, self.implementation)
            return x_NC, x_NC if collect else None

        x_NC, hidden = jax.lax.scan(block, x_NC, stack)
        encoder = _norm(x_NC, self.final_norm, c.norm_eps)
        merged = merge_patches(encoder, t, h, w, c.merge, c.position_time)
        y = linear(merged.reshape(len(merged), -1), self.projector_in)
        y = linear(_gelu(y, approximate=False), self.projector_out)
        y = _norm(y, self.projector_norm, c.projector_eps)
        return y, {"embedded": embedded, "hidden": hidden, "encoder": encoder, "merged": merged}

    def _place(self, row_N, column_N, h, w) -> jax.Array:
        """The learned table resized to (h, w): bilinear, half-pixel centres, no antialias."""
        Y, Z = self.config.position_table
        table_EC = self.positions[...]
        y0, y1, wy = _between(row_N, h, Y)
        x0, x1, wx = _between(column_N, w, Z)

        def at(y, x):
            return table_EC[y * Z + x].astype(jnp.float32)

        top = at(y0, x0) * (1 - wx) + at(y0, x1) * wx
        bottom = at(y1, x0) * (1 - wx) + at(y1, x1) * wx
        return (top * (1 - wy) + bottom * wy).astype(self.compute_dtype)


def _norm(x, weight, eps: float):
    # torch's own RMSNorm: the weight is applied in float32, then one cast.
    return rms_norm(x, weight[...], eps, weight_after_cast=False)


def _gelu(x, *, approximate: bool):
    return jax.nn.gelu(x.astype(jnp.float32), approximate=approximate).astype(x.dtype)


def _between(index_N, size, table: int):
    """For each index of ``size`` cells: the two table entries around it and the second's weight."""
    at = (index_N.astype(jnp.float32) + jnp.float32(0.5)) * (
        jnp.float32(table) / jnp.maximum(size, 1).astype(jnp.float32)
    )
    at = jnp.maximum(at - jnp.float32(0.5), 0)
    low = jnp.minimum(at.astype(jnp.int32), table - 1)
    return low, jnp.minimum(low + 1, table - 1), (at - low.astype(jnp.float32))[:, None]


def frame_table(frames: int, width: int) -> jax.Array:
    """[frames, width] float32: [sin(f * w_i) | cos(f * w_i)], w_i = 10000 ** (-2i / width)."""
    half = width // 2
    omega = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(frames, dtype=jnp.float32)[:, None] * omega
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], 1)


def rotations(row_N, column_N, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) [N, head_dim / 2] of the 2-D rotary embedding.

    Complex lane 2i turns by column * 10000 ** (-4i / head_dim), lane 2i + 1 by the row.
    """
    lane = jnp.arange(head_dim // 4, dtype=jnp.float32)
    frequency = 10000.0 ** (-4.0 * lane / head_dim)
    both = jnp.stack([column_N, row_N], -1).astype(jnp.float32)  # [N, 2]
    angle = (frequency[None, :, None] * both[:, None, :]).reshape(len(row_N), -1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_NHD: jax.Array, cos_NL: jax.Array, sin_NL: jax.Array) -> jax.Array:
    """Adjacent pairs of the last axis as complex numbers, turned in float32, cast back."""
    pairs = x_NHD.astype(jnp.float32).reshape(*x_NHD.shape[:-1], -1, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    cos, sin = cos_NL[:, None], sin_NL[:, None]
    turned = jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
    return turned.reshape(x_NHD.shape).astype(x_NHD.dtype)


def merge_patches(x_NC, t, h, w, merge: tuple[int, int], frames: int) -> jax.Array:
    """[N, C] -> [N / area, area, C]: windows of patches, row-major, mean over the t frames."""
    down, right = merge
    index_M = jnp.arange(len(x_NC) // (down * right), dtype=jnp.int32)
    row_M, column_M = jnp.divmod(index_M, jnp.maximum(w // right, 1))
    inside_Y, inside_X = jnp.arange(down), jnp.arange(right)
    source = (row_M[:, None, None] * down + inside_Y[:, None]) * w
    source = (source + column_M[:, None, None] * right + inside_X).reshape(len(index_M), -1)

    def add(total, frame):
        rows = x_NC[jnp.minimum(source + frame * h * w, len(x_NC) - 1)].astype(jnp.float32)
        return total + jnp.where(frame < t, rows, 0)

    total = jnp.zeros((*source.shape, x_NC.shape[1]), jnp.float32)
    for frame in range(frames):
        total = add(total, frame)
    return (total / jnp.maximum(t, 1).astype(jnp.float32)).astype(x_NC.dtype)
