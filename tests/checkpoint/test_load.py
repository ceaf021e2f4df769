"""Loading: values, other spellings, and every refusal with the name and the value."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import (
    GOLDEN,
    INDEX,
    abstract,
    assert_equal,
    copy,
    edit_config,
    edit_tensor,
    read_all,
    write_all,
)

from k3jax.checkpoint import load, loading, names, safetensors, tree
from k3jax.config import Config
from k3jax.errors import CheckpointError

P = "language_model.model.layers."
EXPERT = P + "1.block_sparse_moe.experts.3.w1."
SHARDS = [f"model-0000{i}-of-000003.safetensors" for i in (1, 2, 3)]


@pytest.fixture
def k3(tmp_path):
    return copy("k3_tiny", tmp_path)


@pytest.fixture
def k31(tmp_path):
    return copy("k31_tiny", tmp_path)


def load_it(directory, config=None, form=None, layers=None, dtype=np.float32, **options):
    config = config or Config.from_hf(directory)
    shown = config if layers is None else config.truncated(layers)
    return load(directory, abstract(shown, dtype, form), config, layers=layers, **options)


def refusal(directory, *words, **options):
    """The load is refused in one report, nothing reached a device, every word is in it."""
    puts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_put", lambda *a, **k: puts.append(a))
        with pytest.raises(CheckpointError) as error:
            load_it(directory, **options)
    assert not puts
    for word in words:
        assert str(word) in str(error.value), error.value
    return error.value


def to_float(dtype, shape, raw):
    kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}
    return np.frombuffer(raw, kinds[dtype]).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("name", ["k3_tiny", "k31_tiny", "vision_tiny"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_value_is_where_the_table_says(name, dtype):
    config = Config.from_hf(GOLDEN / name)
    params = tree.flatten(load_it(GOLDEN / name, dtype=dtype))
    stored = {k: v for tensors in read_all(GOLDEN / name).values() for k, v in tensors.items()}
    assert params.keys() == names.parameters(config).keys()
    for tensor, spec in names.tensors(config).items():
        if spec.target is None:
            continue
        kind, shape, raw = stored[tensor]
        place = np.asarray(params[spec.target])[spec.index]
        if kind == "U8":
            assert place.tobytes() == raw
            continue
        value = to_float(kind, shape, raw).reshape(-1)[: place.size].reshape(place.shape)
        wanted = value.astype(np.float32 if spec.kind == "float32" else dtype)
        assert place.dtype == wanted.dtype
        assert place.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["k3_tiny", "k31_tiny"])
def test_unpacked_experts_match_the_reference_samples(name):
    params = load_it(GOLDEN / name, form="dense")
    golden = np.load(GOLDEN / name / "golden.npz")
    experts = params["head"][1]["ffn"]
    rows = Config.from_hf(GOLDEN / name).moe.intermediate_size
    prefix = "weights/" + P + "1.block_sparse_moe.experts.0."
    assert np.array_equal(experts["w13"][0, :rows], golden[prefix + "w1"])
    assert np.array_equal(experts["w13"][0, rows:], golden[prefix + "w3"])
    assert np.array_equal(experts["w2"][0], golden[prefix + "w2"])


def test_keys_of_the_tree_are_kept(k31):
    config = Config.from_hf(k31)
    as_text = {tuple(map(str, path)): leaf for path, leaf in tree.flatten(abstract(config)).items()}
    loaded = load(k31, tree.unflatten(as_text), config)
    assert np.array_equal(loaded["head"]["0"]["input_norm"], load_it(k31)["head"][0]["input_norm"])


# -------------------------------------------------------------------- other spellings


def test_names_without_prefix_and_older_names(k3):
    want = load_it(GOLDEN / "k3_tiny")
    files = read_all(k3)
    older = {}
    for file, tensors in files.items():
        renamed = {}
        for name, value in tensors.items():
            name = re.sub(
                r"(self_attention_res|mlp_res)_(norm|proj)\.weight", r"\1.\2_weight", name
            )
            renamed[name.removeprefix("language_model.")] = value
        older[file] = renamed
    write_all(k3, older)
    assert_equal(load_it(k3), want)
    shorter = {
        file: {n.replace("language_model.model.layers", "language_model.layers"): v
               for n, v in tensors.items()}
        for file, tensors in files.items()
    }  # fmt: skip
    write_all(k3, shorter)
    assert_equal(load_it(k3), want)


@pytest.mark.parametrize("shape", [[4], [1, 1, 4, 1], [128]])
def test_shapes_of_a_log(k3, shape):
    want = load_it(k3)["head"][0]["attention"]["A_log"]

    def reshape(dtype, old, raw):
        size = int(np.prod(shape))
        junk = b"\x00\x00\x80\x3f" * max(0, size - 4)  # padding need not be zero
        return {P + "0.self_attn.A_log": (dtype, shape, raw[:16] + junk)}

    edit_tensor(k3, P + "0.self_attn.A_log", reshape)
    assert np.array_equal(load_it(k3)["head"][0]["attention"]["A_log"], want)


def test_scales_as_e8m0_and_four_dimensional(k3):
    want = load_it(k3)
    files = read_all(k3)
    for tensors in files.values():
        for name, (dtype, shape, raw) in tensors.items():
            if name.endswith("weight_scale"):
                shape = [shape[0], 1, shape[1], 1] if ".experts.0." in name else shape
                tensors[name] = ("F8_E8M0", shape, raw)
            assert dtype
    write_all(k3, files)
    assert_equal(load_it(k3), want)
    assert_equal(load_it(k3, form="dense"), load_it(GOLDEN / "k3_tiny", form="dense"))


def test_plain_experts(k3):
    dense = load_it(k3, form="dense", dtype=ml_dtypes.bfloat16)
    config = Config.from_hf(k3)
    files = read_all(k3)
    flat = tree.flatten(dense)
    table = names.tensors(config, "dense")
    for tensors in files.values():
        for name in [n for n in tensors if n.endswith("weight_packed")]:
            plain = name.removesuffix("_packed")
            del tensors[name], tensors[plain + "_scale"]
            spec = table[plain]
            value = np.asarray(flat[spec.target])[spec.index]
            tensors[plain] = ("BF16", list(spec.shape), value.tobytes())
    write_all(k3, files)
    refusal(
        k3, "no entry of the ignore list names it", P + "1.block_sparse_moe.experts.0.w1.weight"
    )
    config = edit_config(k3, lambda c: c["text_config"].pop("quantization_config"))
    assert not config.mxfp4_experts
    assert_equal(load_it(k3, dtype=ml_dtypes.bfloat16), dense)
    refusal(k3, "experts='dense'", form="mxfp4")


def test_first_layers_need_their_shards_only(k3):
    config = Config.from_hf(k3)
    shards = json.loads((k3 / INDEX).read_text())["weight_map"]
    used = {f for n, f in shards.items() if (names.layer_of(n) or 0) < 2 and not names.is_vision(n)}
    unused = set(SHARDS) - used
    assert unused
    for file in unused:
        (k3 / file).unlink()
    short = load_it(k3, layers=2)
    assert short.keys() == {"embed", "lm_head", "final_norm", "output_res", "head"}
    full = load_it(GOLDEN / "k3_tiny")
    assert_equal(short["head"], {i: full["head"][i] for i in (0, 1)})
    refusal(k3, unused.pop(), "the shard is missing")
    assert config.num_layers == 13


def test_text_only_copy(k3):
    want = load_it(k3)
    files = read_all(k3)
    for tensors in files.values():
        for name in [n for n in tensors if names.is_vision(n)]:
            del tensors[name]
    write_all(k3, files)
    assert_equal(load_it(k3), want)
    edit_config(k3, lambda c: c.pop("vision_config"))
    assert_equal(load_it(k3), want)


def test_a_single_file_without_index(k3):
    want = load_it(k3)
    merged = {n: v for tensors in read_all(k3).values() for n, v in tensors.items()}
    for file in [*SHARDS, INDEX]:
        (k3 / file).unlink()
    write_all(k3, {"model.safetensors": merged}, index=False)
    assert_equal(load_it(k3), want)


# -------------------------------------------------------------------- files and index


@pytest.mark.parametrize("shard", SHARDS)
def test_missing_and_renamed_shard(k3, shard):
    (k3 / shard).rename(k3 / "renamed.safetensors")
    refusal(k3, f"{shard}: the shard is missing", "renamed.safetensors: the index does not name")
    (k3 / "renamed.safetensors").unlink()
    error = refusal(k3, f"{shard}: the shard is missing", "the first is language_model.")
    assert len(error.problems) == 1


def test_unlisted_shard(k3):
    write_all(k3, {"extra.safetensors": {"x": ("U8", [1], b"1")}}, index=False)
    refusal(k3, "extra.safetensors: the index does not name this shard")


def test_two_tensors_at_the_wrong_file(k3):
    index = json.loads((k3 / INDEX).read_text())
    moved = list(index["weight_map"])[5:7]
    for name in moved:
        index["weight_map"][name] = SHARDS[2]
    (k3 / INDEX).write_text(json.dumps(index))
    refusal(k3, *moved, SHARDS[0], SHARDS[2])


@pytest.mark.parametrize("shard", SHARDS)
def test_cut_shards(k3, shard):
    path = k3 / shard
    whole = path.read_bytes()
    random = np.random.default_rng(3)
    header = 8 + int.from_bytes(whole[:8], "little")
    cuts = [0, 7, 8, header // 2, header, header + 1, len(whole) - 1]
    cuts += random.integers(0, len(whole), 20).tolist()
    config = Config.from_hf(k3)
    leaves = abstract(config)
    for length in cuts:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=rf"{shard}: (the file is cut|.*ends)"):
            load(k3, leaves, config)


def test_file_cut_after_its_header_was_read(k3, monkeypatch):
    examine = loading.examine

    def cut(*args, **kwargs):
        plan = examine(*args, **kwargs)
        path = k3 / SHARDS[1]
        path.write_bytes(path.read_bytes()[:200_000])
        return plan

    monkeypatch.setattr(loading, "examine", cut)
    with pytest.raises(CheckpointError, match="the file ends at byte"):
        load_it(k3)


def test_a_failing_read_is_not_swallowed(k3, monkeypatch):
    calls = []

    def fail(self, buffer, offset):
        calls.append(offset)
        if len(calls) == 40:
            raise OSError("injected")

    monkeypatch.setattr(safetensors.Reader, "read_into", fail)
    with pytest.raises(CheckpointError, match="injected"):
        load_it(k3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i: i.pop("weight_map"), ["has no weight_map"]),
        (lambda i: i["metadata"].update(total_size=5), ["total_size = 5", "bytes"]),
        (lambda i: i["weight_map"].update({"ghost": SHARDS[0]}), ["ghost", "does not hold"]),
        (lambda i: i["weight_map"].pop(EXPERT + "weight_scale"), [EXPERT, "does not name"]),
        (lambda i: i["weight_map"].update({EXPERT + "weight_scale": "../x"}), ["not a file name"]),
    ],
)
def test_index_that_disagrees(k3, change, words):
    index = json.loads((k3 / INDEX).read_text())
    change(index)
    (k3 / INDEX).write_text(json.dumps(index))
    refusal(k3, *words)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_broken_index(k3, text):
    (k3 / INDEX).write_text(text)
    refusal(k3, INDEX)


def test_duplicate_key_in_the_index(k3):
    text = (k3 / INDEX).read_text()
    name = EXPERT + "weight_packed"
    (k3 / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{name}": "x",', 1))
    refusal(k3, "appears twice", name)


def test_no_index(k3):
    (k3 / INDEX).unlink()
    refusal(k3, f"{INDEX} is missing")


# -------------------------------------------------------------------- tensors


def test_missing_renamed_and_duplicate_tensor(k3):
    name = P + "2.mlp_res_norm.weight"
    edit_tensor(k3, name, lambda *v: {"language_model.model.layers.2.nonsense": v})
    error = refusal(
        k3, f"{name}: is missing", "nonsense: is not a tensor of this config", SHARDS[0]
    )
    assert len(error.problems) == 2
    edit_tensor(k3, "language_model.model.layers.2.nonsense", lambda *v: {
        name: v, P + "2.mlp_res.norm_weight": v})  # fmt: skip
    refusal(k3, f"{name} is stored twice", "mlp_res.norm_weight")


def test_duplicate_tensor_in_two_shards(k3):
    files = read_all(k3)
    name = P + "2.mlp_res_norm.weight"
    files[SHARDS[2]][name] = files[SHARDS[0]][name]
    write_all(k3, files)
    refusal(k3, f"{name} is stored twice", SHARDS[0], SHARDS[2])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (P + "1.self_attn.q_proj.weight", [96, 128]),
        (P + "1.mlp_res_proj.weight", [96, 1]),
        (P + "1.self_attn.q_conv1d.weight", [4, 1, 128]),
        (P + "1.self_attn.A_log", [2, 4]),
        (EXPERT + "weight_packed", [64, 16]),
        (EXPERT + "weight_scale", [2, 32]),
        ("mm_projector.post_norm.weight", [1, 96]),
    ],
)
def test_wrong_shape(k3, name, shape):
    edit_tensor(k3, name, lambda dtype, old, raw: {name: (dtype, shape, raw)})
    refusal(k3, f"{name}: shape is {shape}, the config needs")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (P + "1.input_layernorm.weight", "I16"),
        (P + "1.self_attn.dt_bias", "I32"),
        (EXPERT + "weight_packed", "I8"),
        (EXPERT + "weight_packed", "F8_E8M0"),
        (EXPERT + "weight_scale", "F8_E4M3"),
    ],
)
def test_wrong_dtype(k3, name, dtype):
    edit_tensor(k3, name, lambda old, shape, raw: {name: (dtype, shape, raw)})
    refusal(k3, f"{name}: dtype is {dtype}, must be")


def test_all_faults_in_one_report(k3):
    edit_tensor(
        k3, EXPERT + "weight_scale", lambda d, s, raw: {EXPERT + "weight_scale": (d, [64], raw)}
    )
    edit_tensor(k3, P + "1.input_layernorm.weight", lambda *v: {})
    edit_tensor(k3, P + "2.input_layernorm.weight", lambda *v: {"odd": v})
    (k3 / SHARDS[2]).unlink()
    error = refusal(k3, EXPERT, "1.input_layernorm", "2.input_layernorm", "odd", SHARDS[2])
    assert len(error.problems) == 5


def test_indexer_missing_or_unexpected(k3, k31, tmp_path_factory):
    name = P + "8.self_attn.indexer.k_norm.bias"
    k31 = copy("k31_tiny", tmp_path_factory.mktemp("k31"))
    edit_tensor(k31, name, lambda *v: {})
    refusal(k31, f"{name}: this indexer tensor of K3.1 is missing")
    k31 = copy("k31_tiny", tmp_path_factory.mktemp("k31"))

    def as_k3(values):
        values["architectures"] = ["KimiK3ForConditionalGeneration"]
        del values["text_config"]["dsa_config"]

    edit_config(k31, as_k3)
    refusal(k31, name, "indexer tensor of K3.1", "KimiK3ForConditionalGeneration")


def test_layers_beyond_the_config(k3):
    edit_config(k3, lambda c: c["text_config"].update(num_hidden_layers=12) or
                c["text_config"]["linear_attn_config"]["full_attn_layers"].pop())  # fmt: skip
    refusal(k3, "layers.12.", "the config has layers 0..11")


# -------------------------------------------------------------------- scales


def poke(name, position, value):
    def change(dtype, shape, raw):
        data = bytearray(raw)
        data[position] = value
        return {name: (dtype, shape, bytes(data))}

    return change


@pytest.mark.parametrize("form", ["mxfp4", "dense"])
def test_scale_byte_255_by_tensor_and_position(k3, form):
    name, other = EXPERT + "weight_scale", P + "9.block_sparse_moe.experts.15.w2.weight_scale"
    edit_tensor(k3, name, poke(name, 7, 255))
    edit_tensor(k3, other, poke(other, 63, 255))
    leaves, config = abstract(Config.from_hf(k3), form=form), Config.from_hf(k3)
    seen = []

    def progress(done, total, parameter):
        seen.append(parameter)

    with pytest.raises(CheckpointError) as error:
        load(k3, leaves, config, progress=progress)
    assert len(error.value.problems) == 2
    assert f"{name}: scale byte 255 (not a number) at [3, 1]" in str(error.value)
    assert f"{other}: scale byte 255 (not a number) at [63, 0]" in str(error.value)
    last = "scales" if form == "mxfp4" else ("w13", "w2")
    assert all(parameter.endswith(last) for parameter in seen), "another weight was read before"


@pytest.mark.parametrize("value", [0, 1, 254])
def test_extreme_scale_bytes_are_kept(k3, value):
    name = EXPERT + "weight_scale"
    edit_tensor(k3, name, poke(name, 0, value))
    experts = load_it(k3)["head"][1]["ffn"]
    assert int(experts["w13_scales"][3, 0, 0]) == value
    plain = np.asarray(load_it(k3, form="dense")["head"][1]["ffn"]["w13"][3, 0, :32])
    codes = np.asarray(experts["w13_codes"][3, 0, :16])
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    wanted = table[np.stack([codes & 15, codes >> 4], -1).reshape(-1)] * 2.0 ** (value - 127)
    wanted[np.abs(wanted) > np.finfo(np.float32).max] *= np.inf
    assert np.array_equal(plain.astype(np.float64), wanted)


@pytest.mark.parametrize(("value", "what"), [(0, "vanish"), (140, "explode")])
def test_implausible_scales(k3, value, what):
    name = EXPERT + "weight_scale"
    edit_tensor(
        k3, name, lambda dtype, shape, raw: {name: (dtype, shape, bytes([value]) * len(raw))}
    )
    with pytest.raises(CheckpointError, match=rf"{name}: median scale byte is {value}.*{what}"):
        load_it(k3)


# -------------------------------------------------------------------- the model's tree


def test_tree_that_does_not_fit(k3):
    config = Config.from_hf(k3)
    leaves = tree.flatten(abstract(config))
    leaves["embed",] = jax.ShapeDtypeStruct((5, 5), np.float32)
    leaves["extra",] = jax.ShapeDtypeStruct((5,), np.float32)
    del leaves["lm_head",]
    leaves["final_norm",] = jax.ShapeDtypeStruct((96,), ml_dtypes.bfloat16)
    with pytest.raises(CheckpointError) as error:
        load(k3, tree.unflatten(leaves), config, dtype=np.float32)
    for word in (
        "embed: shape is [5, 5]",
        "extra: no tensor",
        "lm_head: the model lacks",
        "bfloat16",
    ):
        assert word in str(error.value)


def test_progress_counts_every_byte(k31):
    calls = []
    params = load_it(k31, progress=lambda *call: calls.append(call))
    total = sum(leaf.nbytes for leaf in tree.flatten(params).values())
    assert {call[1] for call in calls} == {total}
    assert max(call[0] for call in calls) == sum(
        leaf.nbytes for leaf in tree.flatten(params).values()
    )
