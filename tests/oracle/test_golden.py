"""Outputs of Moonshot's own modelling code on tiny checkpoints in the real format.

`tests/golden/` holds three checkpoints and what the published PyTorch code computed on them (fp32,
eager attention, CPU). The K3.1 cases add an indexer written from the articles on DSA. Decisions
closer than the margins below could flip by rounding alone and are not compared.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances as tol
from dsa_kernels import KERNELS_OF

import k3jax
from k3jax import runtime
from k3jax.model import positions

GOLDEN = Path(__file__).parent.parent / "golden"
FOLDERS = ["k3_tiny", "k31_tiny"]
PREFILLS = ["prefill_L1", "prefill_L5", "prefill_L67", "prefill_L130", "batch_B2_T33", "leftpad"]

# All lengths up to this go through one compiled program: a bucket costs 20 s to compile, and the
# padding is under test with every case.
BUCKET = 256


@pytest.fixture(autouse=True)
def one_bucket(monkeypatch):
    monkeypatch.setattr(runtime, "MIN_TOKENS", BUCKET)
    monkeypatch.setattr(runtime, "MIN_CACHE", BUCKET)


_models: dict = {}


def load(folder: str, dtype=jnp.float32):
    """(model, golden arrays); each pair loaded once."""
    if (folder, dtype) not in _models:
        model, _ = k3jax.load(GOLDEN / folder, dtype=dtype, tokenizer=False)
        _models[folder, dtype] = model
    return _models[folder, dtype], np.load(GOLDEN / folder / "golden.npz")


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())


def to_the_front(ids: np.ndarray, mask: np.ndarray):
    """Left-padded rows moved to the front: (ids, lengths)."""
    lengths = mask.sum(1).astype(np.int32)
    return np.stack(
        [np.roll(row, n - len(row)) for row, n in zip(ids, lengths, strict=True)]
    ), lengths


def inputs(z, case):
    """(ids, lengths, fields(name) with left padding moved to the end, valid [B, T])."""
    ids = z[f"{case}/input_ids"]
    if f"{case}/attention_mask" not in z.files:
        return ids, None, lambda name: z[f"{case}/{name}"], np.ones(ids.shape, bool)
    ids, lengths = to_the_front(ids, z[f"{case}/attention_mask"])
    T = ids.shape[1]

    def field(name):
        """[B, T, ...] logits or [L, B, T, ...] per-layer arrays."""
        a = z[f"{case}/{name}"]
        if name.startswith("logits"):
            return np.stack([np.roll(r, n - T, 0) for r, n in zip(a, lengths, strict=True)])
        rows = [np.roll(a[:, b], n - T, 1) for b, n in enumerate(lengths)]
        a = np.stack(rows, 1)
        if name == "dsa_selected":  # positions of the padded sequence
            a = np.where(a < 0, -1, a - (T - lengths)[None, :, None, None])
        return a

    return ids, lengths, field, np.arange(T) < lengths[:, None]


def collected(model):
    return ("hidden", "routing") + (("index",) if model.config.dsa else ())


@pytest.mark.parametrize("case", PREFILLS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_forward_fp32(folder, case):
    model, z = load(folder)
    ids, lengths, field, valid = inputs(z, case)
    logits, aux = model.forward(ids, lengths_B=lengths, collect=collected(model))
    assert relative(logits[valid], field("logits_float32")[valid]) <= tol.GOLDEN_FP32
    if f"{case}/prefix_sum" in z.files:
        assert relative(aux["hidden"][:, 0], field("prefix_sum")) <= tol.GOLDEN_FP32

    clear = (field("router_margin") > tol.ROUTER_MARGIN) & valid
    same = np.sort(aux["expert_ids"], -1) == np.sort(field("router_topk_idx"), -1)
    assert clear.any()
    assert same[clear].all()
    got, want = np.sort(aux["expert_weights"], -1), np.sort(field("router_topk_weight"), -1)
    assert relative(got[clear], want[clear]) <= tol.GOLDEN_FP32

    if model.config.dsa:
        clear = (field("dsa_margin") > tol.DSA_MARGIN) & valid
        same = np.asarray(aux["selected"]) == field("dsa_selected")
        assert same[clear].all()


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_prefill_leaves_in_the_cache(folder):
    model, z = load(folder)
    case = "prefill_L67"
    ids = z[f"{case}/input_ids"]
    T = ids.shape[1]
    _, cache = model.prefill(ids, model.init_cache(1, T))
    config, arrays = model.config, cache.arrays
    kda, latent = [], []
    for layer, spec in enumerate(config.layers):
        group, i, period = config.schedule.locate(layer)
        one = getattr(arrays, group)[i]
        one = one if period is None else jax.tree.map(lambda a, p=period: a[p], one)
        (kda if spec.attention == "kda" else latent).append(one)
    got = np.stack([c.state_BHVK[0] for c in kda]).swapaxes(-1, -2)  # there [.., K, V]
    assert relative(got, z[f"{case}/kda_state"]) <= tol.GOLDEN_STATE_FP32
    # The published cache keeps one input more than the convolution of the next token reads.
    got = np.stack([c.tails_3BWP[:, 0] for c in kda]).swapaxes(-1, -2)
    assert relative(got, z[f"{case}/kda_conv_state"][..., 1:]) <= tol.GOLDEN_FP32
    rank = config.mla.kv_lora_rank
    rows = np.stack([c.latent_BSC[0, :T] for c in latent])
    assert relative(rows[..., :rank], z[f"{case}/mla_latent"]) <= tol.GOLDEN_FP32
    assert relative(rows[..., rank:], z[f"{case}/mla_k_rope"]) <= tol.GOLDEN_FP32
    if config.dsa:
        keys = np.stack([c.index_key_BSK[0, :T] for c in latent])
        assert relative(keys, z[f"{case}/dsa_index_key"]) <= tol.GOLDEN_FP32


@pytest.mark.parametrize("folder", FOLDERS)
def test_depth_mix(folder):
    """Bank rows and the final hidden state, from the module itself."""
    model, z = load(folder)
    module = model.module

    @jax.jit
    def run(ids, lengths):
        where = positions(jnp.zeros((1,), jnp.int32), ids.shape[1], lengths)
        depth, _, _ = module.backbone(module.embed_tokens(ids), where)
        return depth.bank_NBTD, depth.count, module.final_hidden(depth)

    ids = z["prefill_L67/input_ids"]
    _, _, hidden = run(ids, jnp.array([ids.shape[1]]))
    assert relative(hidden[0], z["prefill_L67/final_hidden"]) <= tol.GOLDEN_FP32
    short = z["prefill_L5/input_ids"]
    n = short.shape[1]
    bank, count, _ = run(np.pad(short, ((0, 0), (0, ids.shape[1] - n))), jnp.array([n]))
    want = z["prefill_L5/block_residual_final"].swapaxes(0, 1)
    assert int(count) == len(want) == model.config.num_blocks
    assert relative(bank[:, 0, :n], want) <= tol.GOLDEN_FP32


def decoded(model, z):
    """Logits of the decode case, token by token behind a prefill."""
    ids, start = z["decode/input_ids"], int(z["decode/prefill_len"])
    _, cache = model.prefill(ids[:, :start], model.init_cache(1, ids.shape[1]))
    rows = []
    for t in range(start, ids.shape[1]):
        last, cache = model.decode(ids[:, t], cache)
        rows.append(last)
    return np.stack(rows, 1)


@pytest.mark.parametrize("folder", FOLDERS)
def test_decode_equals_prefill(folder):
    model, z = load(folder)
    got = decoded(model, z)
    assert relative(got, z["decode/logits_float32"]) <= tol.GOLDEN_FP32
    whole = model(z["decode/input_ids"])[:, int(z["decode/prefill_len"]) :]
    assert relative(got, whole) <= tol.GOLDEN_FP32


@pytest.mark.parametrize("folder", FOLDERS)
def test_greedy(folder):
    model, z = load(folder)
    prompt, want = z["greedy/prompt"], z["greedy/tokens"]
    logits, cache = model.prefill(prompt, model.init_cache(1, prompt.shape[1] + len(want)))
    got = []
    for _ in want:
        token = np.asarray(jnp.argmax(logits, -1), np.int32)
        got.append(int(token[0]))
        logits, cache = model.decode(token, cache)
    assert got == want.tolist()


def test_an_unpadded_program():
    """One length in the bucket users get."""
    model, z = load("k31_tiny")
    runtime.MIN_TOKENS = 16  # the fixture puts it back
    logits = model(z["prefill_L5/input_ids"])
    assert relative(logits, z["prefill_L5/logits_float32"]) <= tol.GOLDEN_FP32


@pytest.mark.parametrize("folder", FOLDERS)
def test_chunked_prefill(folder):
    """A first piece of 1 to 16 tokens, then the rest, ends where the whole prompt ends."""
    model, z = load(folder)
    ids = z["prefill_L67/input_ids"]
    want = z["prefill_L67/logits_float32"][:, -1]
    for first in range(1, 17):
        cache = model.init_cache(1, ids.shape[1])
        _, cache = model.prefill(ids[:, :first], cache)
        got, cache = model.prefill(ids[:, first:], cache)
        assert relative(got, want) <= tol.GOLDEN_FP32, first


@pytest.mark.parametrize("case", ["prefill_L67", "prefill_L130"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_forward_bf16(folder, case):
    """Gross errors only: the published bf16 model is itself up to 0.28 from its fp32 form."""
    model, z = load(folder, jnp.bfloat16)
    got = np.asarray(model(z[f"{case}/input_ids"]))
    want = z[f"{case}/logits_bfloat16"]
    rms = np.sqrt(np.mean((got - want) ** 2)) / want.std()
    assert rms <= tol.GOLDEN_BF16_RMS
    top = np.sort(want, -1)
    clear = top[..., -1] - top[..., -2] > 0.05 * want.std()
    agree = (got.argmax(-1) == want.argmax(-1))[clear].mean()
    assert agree >= tol.GOLDEN_BF16_TOP1


@pytest.mark.parametrize("case", ["mm_one_image", "mm_two_images"])
def test_text_model_on_merged_image_features(case):
    """The text half of the vision checkpoint, fed the embeddings the published code merged."""
    model, z = load("vision_tiny")
    logits, _ = model.forward(embeddings_BTD=z[f"{case}/merged_embeds"])
    assert relative(logits, z[f"{case}/logits_float32"]) <= tol.GOLDEN_FP32


@pytest.mark.parametrize("device", KERNELS_OF)
@pytest.mark.parametrize("folder", FOLDERS)
def test_through_kernels(folder, device):
    """Prefill and decode with the kernels of a device, interpreted, in which the small heads of
    these models are embedded by zeros. In bfloat16 where a kernel takes nothing else."""
    kernels = [kernel.embedded() for kernel in KERNELS_OF[device]]
    dtype = jnp.float32
    if any(kernel.dtype != jnp.float32 for kernel in kernels):
        dtype = jnp.bfloat16
    z = np.load(GOLDEN / folder / "golden.npz")
    with contextlib.ExitStack() as stack:
        used = [stack.enter_context(kernel.counted()) for kernel in kernels]
        model, _ = k3jax.load(GOLDEN / folder, dtype=dtype, tokenizer=False)
        results = []
        for case in ("prefill_L67", "batch_B2_T33") if model.config.dsa else ():
            logits, aux = model.forward(z[f"{case}/input_ids"], collect=("index",))
            results.append((logits, z[f"{case}/logits_float32"]))
            clear = z[f"{case}/dsa_margin"] > tol.DSA_MARGIN
            same = np.asarray(aux["selected"]) == z[f"{case}/dsa_selected"]
            assert dtype != jnp.float32 or same[clear].all()
        results.append((decoded(model, z), z["decode/logits_float32"]))
        selection, latent = (len(calls) for calls in used)
    assert latent > 0
    assert (selection > 0) == (model.config.dsa is not None)
    for got, want in results:
        if dtype == jnp.float32:
            assert relative(got, want) <= tol.GOLDEN_FP32
        else:
            rms = np.sqrt(np.mean((np.float64(got) - want) ** 2)) / want.std()
            assert rms <= tol.GOLDEN_BF16_RMS
