"""Configuration: presets, every refusal by field and value, the schedule."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.config import Config, LayerSpec, find_schedule, resolve
from k3jax.config_rules import IGNORED
from k3jax.errors import ConfigError

GOLDEN = Path(__file__).parent.parent / "golden"
K3, K31 = (json.loads((GOLDEN / n / "config.json").read_text()) for n in ("k3_tiny", "k31_tiny"))
FULL = [*range(4, 93, 4), 93]


def edited(values, edits):
    """A copy with dotted keys set; ``...`` removes."""
    values = copy.deepcopy(values)
    for key, value in edits.items():
        *path, last = key.split(".")
        node = values
        for part in path:
            node = node[part]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return values


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k3.1-pro"])
def test_presets_hold_the_published_values(name):
    config = Config.preset(name)
    kinds = [spec.attention for spec in config.layers]
    assert [i + 1 for i, kind in enumerate(kinds) if kind == "global"] == FULL
    assert (kinds.count("kda"), kinds.count("global")) == (69, 24)
    assert [spec.ffn for spec in config.layers] == ["dense"] + ["moe"] * 92
    assert config.unknown_keys == ()
    assert config.kda.width == config.mla.num_heads * config.mla.v_head_dim == 12288
    assert (config.mla.cache_width, config.moe.shared_size, config.num_blocks) == (576, 6144, 8)
    assert (config.dsa.topk if config.dsa else None) == (2048 if "3.1" in name else None)
    assert len(config.quantization.ignore) == 6
    assert (config.mla.latent_norm_eps, config.vision.norm_eps) == (1e-6, 2.0**-23)


def test_schedule_of_k3():
    config = Config.preset("kimi-k3")
    kda, glob = LayerSpec("kda", "moe"), LayerSpec("global", "moe")
    schedule = config.schedule
    assert schedule.head == (LayerSpec("kda", "dense"), kda, kda, glob)
    assert (schedule.period, schedule.num_periods) == ((kda, kda, kda, glob), 22)
    assert schedule.tail == (glob,)
    assert [schedule.locate(i) for i in (0, 3, 4, 91, 92)] == [
        ("head", 0, None), ("head", 3, None), ("period", 0, 0), ("period", 3, 21),
        ("tail", 0, None),
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(0, 3))
def test_schedule_expands_to_the_layers(kinds, dense):
    layers = tuple(
        LayerSpec("global" if kind else "kda", "dense" if i < dense else "moe")
        for i, kind in enumerate(kinds)
    )
    schedule = find_schedule(layers)
    assert schedule.expand() == layers
    assert all(spec.ffn == "moe" for spec in schedule.period + schedule.tail)
    covered = len(schedule.period) * schedule.num_periods
    assert schedule.num_periods != 1
    for i, spec in enumerate(layers):
        group, position, period = schedule.locate(i)
        assert getattr(schedule, group)[position] == spec
        assert (period is None) == (group != "period")
    # No split covers more: brute force over every head, period and count.
    for head in range(min(dense, len(layers)), len(layers)):
        for size in range(1, (len(layers) - head) // 2 + 1):
            unit = layers[head : head + size]
            repeats = 1
            while layers[head + repeats * size : head + (repeats + 1) * size] == unit:
                repeats += 1
            assert repeats == 1 or repeats * size <= covered


@pytest.mark.parametrize("source", [K3, K31])
def test_round_trip_and_knobs(source, tmp_path):
    config = Config.from_hf(source)
    assert config.unknown_keys == ()
    assert Config.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(source))
    assert Config.from_hf(tmp_path) == Config.from_hf(tmp_path / "config.json") == config
    knobs = {"mla_latent_norm_eps": 1e-5, "kda_state_dtype": "bfloat16", "router_dtype": "bfloat16"}
    changed = Config.from_hf(source | {"k3jax": knobs})
    assert changed.mla.latent_norm_eps == 1e-5
    assert (changed.kda.state_dtype, changed.router_dtype) == ("bfloat16", "bfloat16")
    assert changed.to_hf()["k3jax"] == knobs
    assert Config.from_hf(changed.to_hf()) == changed


def test_dtype_of_index_keys():
    plain = Config.from_hf(K31)
    assert (plain.dsa.index_key_dtype, plain.dsa.scaled_keys) == ("bfloat16", False)
    knobs = {"index_key_dtype": "float8_e4m3fn"}
    config = Config.from_hf(K31 | {"k3jax": knobs})
    assert config.dsa.scaled_keys
    assert config.to_hf()["k3jax"] == knobs
    assert Config.from_hf(config.to_hf()) == config


def test_activations_of_experts():
    assert Config.from_hf(K3).moe.expert_activations is None
    knobs = {"expert_activations": "mxfp8"}
    config = Config.from_hf(K3 | {"k3jax": knobs})
    assert config.moe.expert_activations == "mxfp8"
    assert config.to_hf()["k3jax"] == knobs
    assert Config.from_hf(config.to_hf()) == config
    assert Config.from_hf(K3 | {"k3jax": {"expert_activations": None}}) == Config.from_hf(K3)


@pytest.mark.parametrize("key", ["index_topk", "topk", "index_top_k"])
def test_topk_synonyms(key):
    values = edited(
        K31, {"text_config.dsa_config.index_topk": ..., f"text_config.dsa_config.{key}": 7}
    )
    config = Config.from_hf(values)
    assert config.dsa.topk == 7
    assert config.to_hf()["text_config"]["dsa_config"][key] == 7


def test_text_only_and_truncated():
    values = edited(K31, {"vision_config": ..., "media_placeholder_token_id": ...})
    config = Config.from_hf(values)
    assert config.vision is None
    assert Config.from_hf(config.to_hf()) == config
    short = config.truncated(2)
    assert short.layers == config.layers[:2]
    assert Config.from_hf(short.to_hf()) == short
    for wrong in (0, 10):
        with pytest.raises(ConfigError, match=f"layers = {wrong}"):
            config.truncated(wrong)


def test_unknown_keys_are_reported():
    edits = {"text_config.mystery": 1, "other": 2, "text_config.dsa_config.index_magic": 3}
    assert set(Config.from_hf(edited(K31, edits)).unknown_keys) == set(edits)


T, L = "text_config", "text_config.linear_attn_config"
D, Q = "text_config.dsa_config", "text_config.quantization_config"
REFUSED = [
    (K3, {"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM"]),
    (K3, {f"{L}.kda_layers": [1, 2, 3, 4, 5, 6, 7, 9, 10, 11]}, [f"{L}.kda_layers", "[4]"]),
    (K3, {f"{L}.kda_layers": [1, 2, 5, 6, 7, 9, 10, 11]}, [f"{L}.kda_layers", "[3]", "neither"]),
    (K3, {f"{L}.full_attn_layers": [4, 8, 12, 14]}, [f"{L}.full_attn_layers", "[14]", "1..13"]),
    (K3, {f"{L}.full_attn_layers": [0, 4, 8, 12, 13]}, [f"{L}.full_attn_layers", "[0]"]),
    (K3, {f"{L}.full_attn_layers": [4, 8, 8, 12, 13]}, [f"{L}.full_attn_layers", "[8]"]),
    (K3, {f"{L}.use_full_rank_gate": False}, [f"{L}.use_full_rank_gate", "false"]),
    (K3, {f"{L}.gate_lower_bound": 5.0}, [f"{L}.gate_lower_bound", "5.0"]),
    (K3, {f"{T}.mla_use_nope": False}, [f"{T}.mla_use_nope", "false"]),
    (K3, {f"{T}.moe_layer_freq": 2}, [f"{T}.moe_layer_freq", "2"]),
    (K3, {f"{T}.num_expert_group": 4}, [f"{T}.num_expert_group", "4"]),
    (K3, {f"{T}.topk_group": 2}, [f"{T}.topk_group", "2"]),
    (K3, {f"{T}.topk_method": "greedy"}, [f"{T}.topk_method", "greedy"]),
    (K3, {f"{T}.hidden_act": "silu"}, [f"{T}.hidden_act", "silu"]),
    (K3, {f"{T}.moe_router_activation_func": "softmax"}, ["moe_router_activation_func", "softmax"]),
    (K3, {f"{T}.num_nextn_predict_layers": 1}, [f"{T}.num_nextn_predict_layers", "1"]),
    (K3, {f"{T}.num_experts_per_token": 99}, [f"{T}.num_experts_per_token", "99"]),
    (K3, {f"{T}.routed_expert_hidden_size": 48}, [f"{T}.routed_expert_hidden_size", "48", "32"]),
    (K3, {f"{T}.moe_intermediate_size": 40}, [f"{T}.moe_intermediate_size", "40"]),
    (K3, {f"{T}.num_key_value_heads": 2}, [f"{T}.num_key_value_heads", "2"]),
    (K3, {f"{T}.vocab_size": -1}, [f"{T}.vocab_size", "-1"]),
    (K3, {f"{T}.hidden_size": 96.0}, [f"{T}.hidden_size", "96.0"]),
    (K3, {f"{T}.rms_norm_eps": "1e-5"}, [f"{T}.rms_norm_eps", '"1e-5"']),
    (K3, {f"{T}.q_lora_rank": ...}, [f"{T}.q_lora_rank is missing"]),
    (K3, {f"{T}.attn_res_block_size": 0}, [f"{T}.attn_res_block_size", "0"]),
    (K3, {f"{T}.tie_word_embeddings": True}, [f"{T}.tie_word_embeddings"]),
    (K3, {"eos_token_id": 512}, ["eos_token_id", "512"]),
    (K3, {f"{T}.dsa_config": K31[T]["dsa_config"]}, [f"{T}.dsa_config", "KimiK3For"]),
    (K31, {f"{T}.dsa_config": ...}, [f"{T}.dsa_config is missing", "KimiK31For"]),
    (K31, {f"{D}.dsa_layers": [4, 8]}, [f"{D}.dsa_layers", "[4, 8]", "full_attn_layers"]),
    (K31, {f"{D}.index_topk_freq": 2}, [f"{D}.index_topk_freq", "2"]),
    (K31, {f"{D}.index_rope_dim": 64}, [f"{D}.index_rope_dim", "64"]),
    (K31, {f"{D}.index_topk": ...}, [f"{D}.index_topk is missing"]),
    (K31, {f"{D}.topk": 9}, [f"{D}.topk", "9", "index_topk = 8"]),
    (K3, {f"{Q}.config_groups.group_0.weights.group_size": 16}, ["weights.group_size", "16"]),
    (K3, {f"{Q}.config_groups.group_0.weights.num_bits": 8}, ["weights.num_bits", "8"]),
    (K3, {f"{Q}.format": "nvfp4-pack-quantized"}, [f"{Q}.format", "nvfp4"]),
    (K3, {f"{Q}.kv_cache_scheme": {"num_bits": 8}}, [f"{Q}.kv_cache_scheme"]),
    (K3, {"vision_config.text_hidden_size": 5}, ["vision_config.text_hidden_size", "5"]),
    (K3, {"k3jax": {"router_dtype": "int8"}}, ["k3jax.router_dtype", "int8"]),
    (K3, {"k3jax": {"expert_activations": "fp8"}}, ["k3jax.expert_activations", '"fp8"', "mxfp8"]),
    (K3, {f"{T}.quantization_config": ..., f"{T}.moe_intermediate_size": 40,
          "k3jax": {"expert_activations": "mxfp8"}}, [f"{T}.moe_intermediate_size", "40", "MXFP8"]),
    (K31, {"k3jax": {"index_key_dtype": "fp8"}}, ["k3jax.index_key_dtype", '"fp8"', "float8_e4m3"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "edits", "words"), REFUSED, ids=[str(r[1])[:60] for r in REFUSED]
)
def test_refused_by_field_and_value(source, edits, words):
    with pytest.raises(ConfigError) as error:
        Config.from_hf(edited(source, edits))
    for word in words:
        assert word in str(error.value)


def test_every_published_key_is_required():
    names = ["text_config", "architectures", "bos_token_id", "eos_token_id", "pad_token_id"]
    for name in names[:2]:
        with pytest.raises(ConfigError, match=name):
            Config.from_hf(edited(K3, {name: ...}))
    optional = {"quantization_config", "tie_word_embeddings", *names[2:]}
    for key in set(K3[T]) - IGNORED - optional:
        with pytest.raises(ConfigError, match=key):
            Config.from_hf(edited(K3, {f"{T}.{key}": ...}))


def test_all_faults_in_one_report():
    edits = {f"{T}.moe_layer_freq": 2, f"{T}.mla_use_nope": False, f"{T}.v_head_dim": 0}
    with pytest.raises(ConfigError) as error:
        Config.from_hf(edited(K3, edits))
    assert all(key in str(error.value) for key in edits)


def test_resolve(tmp_path):
    assert (resolve("kimi-k3") / "config.json").is_file()
    with pytest.raises(ConfigError, match="no-such-model"):
        resolve("no-such-model")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert resolve(tmp_path) == resolve(tmp_path / "config.json") == tmp_path
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.from_hf(tmp_path)
    with pytest.raises(ConfigError, match="kimi-k9"):
        Config.preset("kimi-k9")
