"""The MXFP4 format: every value, the packing rule, the published form of a checkpoint."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from k3jax.errors import CheckpointError, InputError
from k3jax.quantization.mxfp4 import (
    MXFP4,
    check_scales,
    fake_quantize,
    pack,
    root_mean_square,
    unpack_numpy,
)

packed = jax.jit(pack)  # the eager form compiles op by op
unpacked = jax.jit(MXFP4.unpack, static_argnums=1)
GOLDEN = Path(__file__).parents[1] / "golden"
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def assert_same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    nan = np.isnan(a.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(b.astype(np.float32)))
    kind = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    np.testing.assert_array_equal(a.view(kind)[~nan], b.view(kind)[~nan])


def every_value() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes [256, 16], scales [256, 1] and the values by ml_dtypes, from float64."""
    nibbles = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    scales = np.arange(256, dtype=np.uint8)[:, None]
    fp4 = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    values = fp4 * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    values = np.where(np.abs(values) < 2.0**-126, np.copysign(0.0, values), values)
    with np.errstate(over="ignore"):
        return codes, scales, values.astype(np.float32)


class TestUnpack:
    def test_golden_bytes(self):
        codes = np.zeros((1, 16), np.uint8)
        codes[0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
        scales = np.full((1, 1), 127, np.uint8)
        want = np.array([VALUES + [0.0] * 16], np.float32)
        assert_same_bits(unpacked(MXFP4(jnp.asarray(codes), jnp.asarray(scales))), want)
        assert_same_bits(unpack_numpy(codes, scales), want)

    @pytest.mark.parametrize("jit", [True, False])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_all_4096_values(self, dtype, jit):
        codes, scales, want = every_value()
        unpack = jax.jit(lambda w: w.unpack(dtype)) if jit else lambda w: w.unpack(dtype)
        got = unpack(MXFP4(jnp.asarray(codes), jnp.asarray(scales)))
        finite = np.isfinite(want)
        assert (want.astype(dtype).astype(np.float32) == want)[finite].all()  # exact in bfloat16
        assert_same_bits(got, want.astype(dtype))
        assert_same_bits(unpack_numpy(codes, scales, dtype), want.astype(dtype))

    def test_ends_of_the_scale(self):
        codes, scales, _ = every_value()
        got = np.asarray(unpacked(MXFP4(jnp.asarray(codes), jnp.asarray(scales))))[:, :16]
        positive = [0, 0, 0, 0, *(v * 2.0**-127 for v in (2, 3, 4, 6))]
        assert got[0].tolist() == [*positive, *(-v for v in positive)]
        assert np.signbit(got[0, 8:]).all()
        assert got[1, 1] == 0
        assert got[1, 2] == 2.0**-126
        assert np.isfinite(got[2:253]).all()
        assert got[254, 1:4].tolist() == [2.0**126, 2.0**127, 1.5 * 2.0**127]
        assert np.isinf(got[254, 4:8]).all()
        assert np.isnan(got[255]).all()

    def test_scale_type_of_the_file_does_not_matter(self):
        codes, scales, want = every_value()
        declared = scales.view(ml_dtypes.float8_e8m0fnu)
        assert_same_bits(unpack_numpy(codes, declared.view(np.uint8)), want)

    def test_tree(self):
        w = MXFP4(jnp.zeros((3, 4, 2, 32), jnp.uint8), jnp.zeros((3, 4, 2, 2), jnp.uint8))
        assert w.shape == (3, 4, 2, 64)
        assert w.ndim == 4
        assert len(jax.tree.leaves(w)) == 2
        abstract = jax.eval_shape(lambda w: w, w)
        assert abstract.shape == w.shape
        shapes = []
        jax.lax.scan(lambda c, w: (shapes.append(w.shape), (c, None))[1], 0, w)
        assert shapes[0] == (4, 2, 64)

    def test_root_mean_square(self):
        rng = np.random.default_rng(0)
        codes = rng.integers(0, 256, (48, 48), dtype=np.uint8)
        scales = rng.integers(115, 123, (48, 3), dtype=np.uint8)
        w = unpack_numpy(codes, scales, np.float64)
        assert root_mean_square(codes, scales) == pytest.approx(np.sqrt((w**2).mean()), rel=1e-12)

    def test_byte_255_is_refused_by_name_and_position(self):
        scales = np.full((4, 6), 120, np.uint8)
        check_scales("experts.3.w1.weight_scale", scales)
        scales[2, 5] = scales[3, 0] = 255
        with pytest.raises(CheckpointError, match=r"experts\.3\.w1.*\(2, 5\), \(3, 0\)") as error:
            check_scales("experts.3.w1.weight_scale", scales)
        assert len(error.value.problems) == 1
        with pytest.raises(CheckpointError, match=r"and 20 more"):
            check_scales("w", np.full((4, 6), 255, np.uint8))


def pack_oracle(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group by group in float64: (nibbles, scale bytes)."""
    groups = w.astype(np.float64).reshape(-1, 32)
    nibbles, scales = np.zeros(groups.shape, np.uint8), np.zeros(len(groups), np.uint8)
    magnitudes = np.array(VALUES[:8])
    for i, group in enumerate(groups):
        m, e = np.frexp(np.abs(group).max())  # m in [0.5, 1)
        E = e - 1 + (2 * m >= 1.75)
        scales[i] = E - 2 + 127
        x = np.minimum(np.abs(group) / 2.0 ** (E - 2), 6)
        distance = np.abs(x[:, None] - magnitudes)
        tied = distance == distance.min(axis=1, keepdims=True)
        even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7])
        nibbles[i] = even_first[tied[:, even_first].argmax(axis=1)]
        nibbles[i] |= np.signbit(group).astype(np.uint8) << 3
    return nibbles.reshape(w.shape), scales.reshape(*w.shape[:-1], -1)


def nibbles_of(w: MXFP4) -> np.ndarray:
    codes = np.asarray(w.codes)
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(w.shape)


class TestPack:
    def test_rounding_table(self):
        x = np.zeros((1, 32), np.float32)
        ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
        x[0, :8] = [*ties, 6.0]
        x[0, 8:16] = -x[0, :8]
        x[0, 16] = -0.0
        w = packed(jnp.asarray(x))
        assert w.scales.tolist() == [[127]]
        assert np.asarray(unpacked(w))[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
        positive = [0, 2, 2, 4, 4, 6, 6, 7]
        assert nibbles_of(w)[0, :17].tolist() == [*positive, *(8 + c for c in positive), 8]

    @pytest.mark.parametrize(
        ("largest", "scale", "value"),
        [(7.0, 2.0, 8.0), (6.9, 1.0, 6.0), (6.0, 1.0, 6.0), (4.0, 1.0, 4.0), (3.49, 0.5, 3.0)],
    )
    def test_scale_rule(self, largest, scale, value):
        w = packed(jnp.zeros((1, 32)).at[0, 3].set(largest))
        assert 2.0 ** (int(w.scales[0, 0]) - 127) == scale
        assert float(unpacked(w)[0, 3]) == value

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
    def test_against_the_oracle(self, dtype):
        rng = np.random.default_rng(1)
        w = rng.standard_normal((64, 320)) * 2.0 ** rng.integers(-40, 40, (64, 1))
        w[:32] = np.round(w[:32] / 2.0 ** np.floor(np.log2(np.abs(w[:32]).max())) * 8) / 8  # ties
        w = w.astype(dtype)
        w[:, ::32] += (np.abs(w.astype(np.float32)).max() * 2.0**-60).astype(dtype)  # no zero group
        got = packed(jnp.asarray(w))
        nibbles, scales = pack_oracle(w)
        np.testing.assert_array_equal(got.scales, scales)
        np.testing.assert_array_equal(nibbles_of(got), nibbles)

    def test_unpack_then_pack_gives_the_bytes_back(self):
        rng = np.random.default_rng(2)
        nibbles = rng.integers(0, 16, (251, 4, 32), dtype=np.uint8)
        nibbles[:, :, 7] = rng.choice([6, 7, 14, 15], (251, 4))  # a 4 or a 6 in every group
        nibbles = nibbles.reshape(251, 128)
        codes = jnp.asarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4)
        scales = jnp.tile(jnp.arange(2, 253, dtype=jnp.uint8)[:, None], (1, 4))
        for dtype in (jnp.float32, jnp.bfloat16):
            again = packed(unpacked(MXFP4(codes, scales), dtype))
            np.testing.assert_array_equal(again.codes, codes)
            np.testing.assert_array_equal(again.scales, scales)

    def test_outside_the_usual_range(self):
        x = np.zeros((6, 32), np.float32)
        x[1, 0] = 2.0**-130
        x[2, :2] = [3e38, -1]
        x[3, 5] = np.nan
        x[4, 5] = -np.inf
        x[5, :2] = [2.0**-126, -(2.0**-125)]
        w = packed(jnp.asarray(x))
        assert w.scales[:, 0].tolist() == [0, 0, 252, 255, 255, 0]
        values = np.asarray(unpacked(w))
        assert not values[:2].any()
        assert values[2, 0] == 6 * 2.0**125
        assert np.isnan(values[3:5]).all()
        assert values[5, :2].tolist() == [2.0**-126, -(2.0**-125)]

    def test_width_is_refused(self):
        with pytest.raises(InputError, match=r"\(3, 48\)"):
            packed(jnp.zeros((3, 48)))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_fake_quantize(self, dtype):
        w = jax.random.normal(jax.random.key(0), (2, 8, 64), dtype)
        quantize = jax.jit(fake_quantize)
        q = quantize(w)
        assert_same_bits(q, unpacked(packed(w), dtype))
        assert_same_bits(quantize(q), q)
        assert float(jnp.abs(q - w).max()) > 0
        weight = jnp.arange(w.size, dtype=jnp.float32).reshape(w.shape).astype(dtype)
        gradient = jax.jit(jax.grad(lambda w: (fake_quantize(w) * weight).sum()))(w)
        assert_same_bits(gradient, weight)


class TestColumns:
    @pytest.mark.parametrize(("width", "refused_at"), [(3072, [64]), (3584, [32, 64])])
    def test_only_whole_groups(self, width, refused_at):
        rng = np.random.default_rng(3)
        w = MXFP4(
            rng.integers(0, 256, (2, width // 2), dtype=np.uint8),
            rng.integers(100, 140, (2, width // 32), dtype=np.uint8),
        )
        whole = unpack_numpy(w.codes, w.scales)
        accepted = [n for n in range(1, 65) if (width // 32) % n == 0]
        assert not set(refused_at) & set(accepted)
        for parts in range(1, 65):
            if parts not in accepted:
                with pytest.raises(InputError, match=f"{parts} parts do not divide"):
                    w.columns(0, parts)
                continue
            cut = [w.columns(i, parts) for i in range(parts)]
            joined = np.concatenate([unpack_numpy(c.codes, c.scales) for c in cut], axis=-1)
            np.testing.assert_array_equal(joined, whole)


@pytest.mark.parametrize("folder", ["k3_tiny", "k31_tiny"])
def test_golden_checkpoint(folder):
    golden = np.load(GOLDEN / folder / "golden.npz")
    names = [n.removeprefix("weights/") for n in golden.files if n.startswith("weights/")]
    assert names
    found = 0
    for file in sorted((GOLDEN / folder).glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            here = [k.removesuffix(".weight_packed") for k in tensors.keys()]  # noqa: SIM118
            for name in set(names).intersection(here):
                codes = tensors.get_tensor(f"{name}.weight_packed")
                scales = tensors.get_tensor(f"{name}.weight_scale")
                check_scales(name, scales)
                assert 1e-4 < root_mean_square(codes, scales) < 10
                want = golden[f"weights/{name}"]
                weight = MXFP4(jnp.asarray(codes), jnp.asarray(scales))
                assert_same_bits(unpack_numpy(codes, scales), want)
                assert_same_bits(unpacked(weight), want)
                assert_same_bits(unpacked(weight, jnp.bfloat16), want.astype(jnp.bfloat16))
                found += 1
    assert found == len(names)
