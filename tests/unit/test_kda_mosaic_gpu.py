"""The KDA kernels for Hopper GPUs on a CPU: interpreted, and lowered for a GPU that is not here.

Interpret mode takes 0.2 s a chunk and head, so cases are few; the contract of the other
implementations runs on the hardware, in tests/gpu.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import kda_cases
import numpy as np
import pytest
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, race_detection_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from kda_contract import REGIMES, check, check_steps, float64, padded, runner
from kda_kernels import EPS, D, Implementation, decode_inputs, raw, wide

from k3jax.ops import kda as kda_op
from k3jax.ops.kda import decode, gated, mosaic_gpu_chunked, mosaic_gpu_decode

bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
BOUND = -5.0


def interpreted():
    prefill = functools.partial(mosaic_gpu_chunked.gated_kda, interpret=True)
    step = functools.partial(mosaic_gpu_decode.kda_decode, interpret=True)
    return [
        (gated.IMPLEMENTATIONS, gated.with_xla_gradient(prefill)),
        (decode.IMPLEMENTATIONS, step),
    ]


# Measured, with jax 0.11.2 too: outputs 8.2e-3 (one token, zero state) and 3.3e-2 where keys are
# nearly alike, states 6.3e-3 (two directions). A step of the decode kernel rounds where the
# reference does: states are within 1.7e-7, but a last bit that falls the other way costs 3.9e-3 in
# bfloat16.
MOSAIC_GPU = Implementation(
    "mosaic_gpu", bf16, (), output=9e-3, state=7e-3, alike=3.6e-2, step=4e-3,
    device="NVIDIA H200", patches=interpreted,
)  # fmt: skip


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_regimes_and_padding():
    """Padding holds NaN; a row without a real token keeps its state bit for bit."""
    rows, length = len(REGIMES) + 1, 130
    inputs = raw(kda_cases.batch(0, rows, length, 1, D, D, REGIMES), bf16)
    lengths = np.full(rows, length)
    lengths[:3], lengths[-1] = (65, 128, 100), 0
    inputs[-1][-1, 0, 0, :2] = -0.0, 1e-42
    o, state = runner(MOSAIC_GPU)(padded(inputs, lengths, np.nan), lengths)
    expected = float64(inputs, lengths)
    check(MOSAIC_GPU, (o, state), expected, REGIMES)
    assert not o[np.arange(length) >= lengths[:, None]].any()
    assert same_bits(state[-1], inputs[-1][-1])


@pytest.mark.parametrize("length", [1, 17])
def test_short(length):
    inputs = raw(kda_cases.batch(1, len(REGIMES), length, 1, D, D, REGIMES), bf16)
    check(MOSAIC_GPU, runner(MOSAIC_GPU)(inputs), float64(inputs), REGIMES)


def test_later_tokens_change_no_earlier_bit():
    """Cuts stand in both halves of tiles of 16 rows and at borders of tiles and chunks."""
    length, cuts = 90, np.array([90, 1, 3, 16, 35, 47, 64, 69, 80])
    one, other = (
        raw(kda_cases.batch(seed, 1, length, 1, D, D, ["random"]), bf16) for seed in (2, 3)
    )
    later = np.arange(length) >= cuts[:, None]
    tokens = [
        np.where(later.reshape(*later.shape, *[1] * (x.ndim - 2)), y, x)
        for x, y in zip(one[:5], other[:5], strict=True)
    ]
    state = np.repeat(one[7], len(cuts), 0)
    o, _ = runner(MOSAIC_GPU)([*tokens, *one[5:7], state])
    for row, cut in enumerate(cuts[1:], 1):
        assert same_bits(o[row, :cut], o[0, :cut])
        assert (o[row, cut:] != o[0, cut:]).any()


def test_splits():
    """The first tokens, then the others from the carried state, against the whole."""
    length, splits = 90, np.array([1, 15, 64, 65])
    inputs = raw(kda_cases.batch(4, 1, length, 1, D, D, ["slow_decay"]), bf16)
    state = np.repeat(inputs[7], len(splits), 0)
    outputs = []
    for starts, stops in ((0 * splits, splits), (splits, 0 * splits + length)):
        rows = np.minimum(starts[:, None] + np.arange(length), length - 1)
        tokens = [x[0][rows] for x in inputs[:5]]
        o, state = runner(MOSAIC_GPU)([*tokens, *inputs[5:7], state], stops - starts)
        outputs.append(o)
    whole = [
        np.concatenate([a[:split], b[: length - split]])
        for a, b, split in zip(*outputs, splits, strict=True)
    ]
    expected = [np.repeat(x, len(splits), 0) for x in float64(inputs)]
    check(MOSAIC_GPU, (np.stack(whole), state), expected, ["slow_decay"])


def gated_kda(inputs, lengths=None, **how):
    run = functools.partial(mosaic_gpu_chunked.gated_kda, interpret=True, **how)
    got = jax.jit(lambda *x: run(*x, lengths, BOUND))(*inputs)
    return [np.asarray(x) for x in got]


def test_stretches():
    """A sequence cut for the second kernel, its last stretch shorter than the others."""
    lengths = np.int32([300])
    inputs = raw(kda_cases.batch(5, 1, 310, 1, D, D, ["slow_decay"]), bf16)
    inputs = padded(inputs, lengths, np.nan)
    expected = float64(padded(inputs, lengths, 0), lengths)
    whole, cut = (gated_kda(inputs, lengths, stretches=n) for n in (1, 3))
    check(MOSAIC_GPU, whole, expected, ["slow_decay"])
    check(MOSAIC_GPU, cut, expected, ["slow_decay"])
    assert not cut[0][:, 300:].any()
    check(MOSAIC_GPU, cut, [wide(x) for x in whole], ["slow_decay"])
    assert same_bits(cut[0][:, :128], whole[0][:, :128])  # the first of three


def test_passes(monkeypatch):
    """Long inputs take several passes of both kernels: the same bits."""
    lengths = np.int32([200, 70])
    inputs = raw(kda_cases.batch(6, 2, 200, 1, D, D, ["random", "slow_decay"]), bf16)
    whole = gated_kda(inputs, lengths)
    monkeypatch.setattr(mosaic_gpu_chunked, "PASS", 4)  # of 8 chunks
    solved = []
    solve = mosaic_gpu_chunked._solve
    monkeypatch.setattr(mosaic_gpu_chunked, "_solve", lambda *x: solved.append(0) or solve(*x))
    for a, b in zip(gated_kda(inputs, lengths), whole, strict=True):
        assert same_bits(a, b)
    assert len(solved) == 2


def test_packed_sequences_are_those_run_alone():
    """Bit for bit, wherever a sequence stands; one of no tokens keeps its state."""
    lengths = np.array([15, 70, 0, 1])
    inputs = raw(kda_cases.batch(7, 1, lengths.sum(), 1, D, D, ["random"]), bf16)
    states = np.random.default_rng(0).standard_normal((len(lengths), 1, D, D), np.float32)
    states[2, 0, 0, :2] = -0.0, 1e-42
    call = jax.jit(
        functools.partial(kda_op.gated_kda, lower_bound=BOUND, implementation="mosaic_gpu")
    )
    with MOSAIC_GPU.running():
        o, after = call(*inputs[:7], states, packed_lengths_N=i32(lengths))
        for n, end in enumerate(np.cumsum(lengths)):
            if not lengths[n]:
                assert same_bits(after[n], states[n])
                continue
            rows = slice(end - lengths[n], end)
            tokens = [x[:, rows] for x in inputs[:5]]
            alone = call(*tokens, *inputs[5:7], states[n : n + 1])
            assert same_bits(o[0, rows], alone[0][0])
            assert same_bits(after[n], alone[1][0])


@pytest.mark.parametrize(("dtype", "limit"), [(bf16, 4e-3), (f32, 3e-6)])
def test_decode_steps_in_a_stack(dtype, limit):
    check_steps(replace(MOSAIC_GPU, dtype=dtype, step=limit), steps=5, batch=3, heads=2)


# What the detector reports and is none: (function that accesses, the other one, same warpgroup).
# Both warpgroups write the same masks, each for itself, and read what either has written.
WRITE = "_solve_kernel"
MASKS = {(WRITE, WRITE, False), (WRITE, "_value", False), ("_value", WRITE, False)}
# Loads of decays and of b stand before a copy over what they read, with a barrier between them but
# no fence, which orders stores: a load has happened when its value is used.
LOADS = {("copy", "step", False), ("_", "beta", True)}


@pytest.fixture
def races(monkeypatch, caplog, capsys):
    """f(function) -> races found, as in `MASKS`.

    Warpgroup products read shared memory as bulk copies do: they see what a thread wrote before a
    `commit_smem`. Interpret mode reads for them as a thread; here such a read, in `_value`, counts
    as what it stands for. A thread is a whole warpgroup: what its warps do to each other stays
    unseen.
    """
    detector = race_detection_state.GPURaceDetectionState
    as_thread = detector.check_read

    def check_read(self, thread, clock, buffer, access, source_info=None):
        if source_info and source_info_util.summarize(source_info).endswith("(_value)"):
            memory = gpu_callbacks._get_shared_memory()
            unit = memory.get_next_tma_thread_id()
            with memory.lock:
                memory.clocks[thread].inc(unit)
                clock = memory.clocks[thread].async_smem_clock.copy()
        as_thread(self, thread, clock, buffer, access, source_info)

    monkeypatch.setattr(detector, "check_read", check_read)
    warn = {"on_race": "warn"} if hasattr(plgpu.InterpretGPUParams, "on_race") else {}  # jax 0.12
    mode = plgpu.InterpretGPUParams(detect_races=True, **warn)
    side = r"warpgroup_id=(\d).*\((?:\w+\.|<locals>\.)*(\w+)\)$"

    def found(function):
        caplog.clear()
        jax.block_until_ready(function(interpret=mode))
        reports = caplog.text + capsys.readouterr().out  # jax 0.11 prints them
        pairs = set()
        for report in reports.split("RACE DETECTED")[1:]:
            (one, at), (other, where) = re.findall(side, report, re.MULTILINE)
            pairs.add((at, where, one == other))
        return pairs

    return found


@pytest.fixture
def prefill_of_two_stretches():
    """Three chunks each, the last with 10 rows: every place in shared memory is used again."""
    inputs = raw(kda_cases.batch(8, 1, 330, 1, D, D, ["random"]), bf16)
    inputs = [jnp.asarray(x) for x in inputs]
    return functools.partial(mosaic_gpu_chunked.gated_kda, *inputs, None, BOUND, stretches=2)


@pytest.fixture
def decode_step():
    tokens = jax.tree.map(jnp.asarray, decode_inputs(np.random.default_rng(9), bf16, 2, 2, 2))
    valid = jnp.array([True, False])
    return functools.partial(mosaic_gpu_decode.kda_decode, *tokens, valid, i32(1), BOUND, EPS)


def test_no_races(races, prefill_of_two_stretches, decode_step):
    assert races(prefill_of_two_stretches) <= MASKS | LOADS
    assert not races(decode_step)


def test_missing_fences_are_found(races, prefill_of_two_stretches, decode_step, monkeypatch):
    """Missing waits need no test: interpret mode itself refuses a kernel without them."""
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    assert races(prefill_of_two_stretches) - MASKS - LOADS
    assert races(decode_step)


def lowered(function, *arguments, donated=()):
    """StableHLO of a function for an H200, kernels compiled as far as that goes without one."""
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(function, donate_argnums=donated).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    return [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]


def array(*shape, dtype=bf16):
    return jax.ShapeDtypeStruct(shape, dtype)


def prefill(length, heads, sequences=1):
    parameters = [array(heads, dtype=f32), array(heads, D, dtype=f32)]
    state = array(sequences, heads, D, D, dtype=f32)
    return [*[array(1, length, heads, D)] * 4, array(1, length, heads), *parameters, state]


# (heads, tokens, kernels): a device's part of K3. Those of 12 heads cut sequences into stretches,
# two kernels more, and a million of tokens take two passes.
@pytest.mark.parametrize(
    ("heads", "length", "count"), [(96, 8192, 2), (12, 65536, 4), (12, 1_048_576, 8)]
)
def test_prefill_lowers(heads, length, count):
    call = functools.partial(kda_op.gated_kda, lower_bound=BOUND)
    assert len(kernels(lowered(call, *prefill(length, heads)))) == count


def test_packed_prefill_lowers():
    def call(*arguments):
        *inputs, lengths = arguments
        return kda_op.gated_kda(*inputs, lower_bound=BOUND, packed_lengths_N=lengths)

    text = lowered(call, *prefill(8192, 12, 12), array(12, dtype=i32))
    assert len(kernels(text)) == 2


@pytest.mark.parametrize("batch", [1, 256])
def test_decode_lowers_in_place(batch):
    """State and tails of a stack of layers are operands that the kernel writes."""
    heads, layers = 96, 4
    P, rows = heads * D, array(batch, heads, D)
    state = array(layers, batch, heads, D, D, dtype=f32)
    tails = array(layers, 3, batch, 3, P)
    arguments = [
        [array(batch, P)] * 3, rows, array(batch, heads), rows, [array(P, 4, dtype=f32)] * 3,
        array(heads, dtype=f32), array(heads, D, dtype=f32), array(D, dtype=f32), state, tails,
        array(batch, dtype=jnp.bool_), array(dtype=i32),
    ]  # fmt: skip

    def call(qkv, z, b, gate, conv, A_log, dt_bias, norm, state, tails, valid, slot):
        return kda_op.kda_decode(
            tuple(qkv), z, b, gate, tuple(conv), A_log, dt_bias, norm, state, tails,
            lower_bound=BOUND, eps=EPS, valid_B=valid, slot=slot,
        )  # fmt: skip

    text = lowered(call, *arguments, donated=(8, 9))
    (kernel,) = kernels(text)
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d+)", kernel)
    assert aliases == [("1", "14"), ("2", "15")]
    assert text.count("tf.aliasing_output") == 2
    stacks = [line for line in text.splitlines() if f"{layers}x{batch}x{heads}x{D}x{D}xf32" in line]
    assert len(stacks) == 3  # arguments, the kernel, results
