"""What a ``config.json`` of K3 or K3.1 Pro must, may and may not say; a reader of one section."""

from __future__ import annotations

import json
from typing import Any

ARCHITECTURES = {"KimiK3ForConditionalGeneration": False, "KimiK31ForConditionalGeneration": True}
TOPK_KEYS = ("index_topk", "topk", "index_top_k")  # open question: K3.1's own spelling
GROUP = 32  # MXFP4 or MXFP8 values under one scale

# What the configuration dump of the transformers library adds, and settings without effect here.
IGNORED = frozenset(
    """_attn_implementation _name_or_path add_cross_attention architectures auto_map bad_words_ids
    attention_dropout begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id head_dim id2label ignore_index image_placeholder
    is_decoder is_encoder_decoder label2id length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate rope_scaling rope_theta sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16
    use_cache video_attn_type""".split()  # noqa: SIM905
)

# Knobs of this project for what is not published: (key under "k3jax", part of Config, field).
KNOBS = (
    ("mla_latent_norm_eps", "mla", "latent_norm_eps"),
    ("index_key_norm_eps", "dsa", "key_norm_eps"),
    ("index_key_dtype", "dsa", "index_key_dtype"),
    ("expert_activations", "moe", "expert_activations"),
    ("kda_state_dtype", "kda", "state_dtype"),
    ("dt_bias_init", "kda", "dt_bias_init"),
    ("vision_norm_eps", "vision", "norm_eps"),
    ("norm_weight_after_cast", None, "norm_weight_after_cast"),
    ("router_dtype", None, "router_dtype"),
    ("attn_res_dtype", None, "attn_res_dtype"),
    ("per_head_muon_scale", None, "per_head_muon_scale"),
)
CHOICES = {
    "index_key_dtype": ("bfloat16", "float8_e4m3fn"),
    "expert_activations": (None, "mxfp8"),
    "kda_state_dtype": ("float32", "bfloat16"),
    "dt_bias_init": ("log_uniform", "zeros"),
    "router_dtype": ("float32", "bfloat16"),
    "attn_res_dtype": ("float32", "bfloat16"),
    "per_head_muon_scale": ("spectral", "moonlight"),
}
TEXT_FIXED = {
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
}
VISION_FIXED = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}
WEIGHTS_FIXED = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": GROUP,
    "symmetric": True,
    "dynamic": False,
}
QUANTIZATION_IGNORED = frozenset({"global_compression_ratio", "quantization_status", "version"})
WEIGHTS_IGNORED = frozenset({"block_structure", "observer", "observer_kwargs", "scale_dtype"})


class Section:
    """One dictionary of the file; remembers what was read and collects the faults."""

    def __init__(self, values: Any, name: str, problems: list[str]):
        self.name, self.problems, self.seen = name, problems, set()
        if not isinstance(values, dict):
            self.refuse("", values, "must be an object")
            values = {}
        self.values: dict[str, Any] = values

    def path(self, key: str) -> str:
        return ".".join(part for part in (self.name, key) if part)

    def refuse(self, key: str, value: Any, why: str) -> None:
        self.problems.append(f"{self.path(key)} = {json.dumps(value, default=str)}: {why}")

    def get(self, key: str, default: Any = ...) -> Any:
        self.seen.add(key)
        if key not in self.values:
            if default is ...:
                self.problems.append(f"{self.path(key)} is missing")
                return None
            return default
        return self.values[key]

    def section(self, key: str) -> Section:
        value = self.get(key)
        return Section({} if value is None else value, self.path(key), self.problems)

    def integer(self, key: str, *, minimum: int = 1, default: Any = ...) -> int:
        value = self.get(key, default)
        if value is None:
            return minimum
        if type(value) is not int or value < minimum:
            self.refuse(key, value, f"must be an integer of at least {minimum}")
            return minimum
        return value

    def number(self, key: str, *, null: bool = False, sign: int = 1) -> Any:
        value = self.get(key)
        if value is None:
            if key in self.values and not null:
                self.refuse(key, value, "must be a number")
            return None if null else 1.0
        if type(value) not in (int, float) or not 0 < value * sign < float("inf"):
            self.refuse(key, value, f"must be a {'positive' if sign > 0 else 'negative'} number")
            return None if null else 1.0
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            self.refuse(key, value, "must be true or false")
        return bool(value)

    def fixed(self, wanted: dict[str, Any], required: bool = True) -> None:
        for key, value in wanted.items():
            found = self.get(key, ... if required else value)
            if key in self.values and (found != value or type(found) is not type(value)):
                self.refuse(key, found, f"only {json.dumps(value)} is supported")

    def pair(self, key: str) -> tuple[int, int]:
        value = self.get(key)
        pair = isinstance(value, list) and len(value) == 2
        if pair and all(type(v) is int and v > 0 for v in value):
            return value[0], value[1]
        if value is not None:
            self.refuse(key, value, "must be two positive integers")
        return 1, 1

    def layer_numbers(self, key: str, num_layers: int) -> list[int]:
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or any(type(v) is not int for v in value):
            self.refuse(key, value, "must be a list of one-based layer numbers")
            return []
        outside = [v for v in value if not 1 <= v <= num_layers]
        if outside:
            self.refuse(key, outside, f"outside the layers 1..{num_layers}")
        twice = sorted({v for v in value if value.count(v) > 1})
        if twice:
            self.refuse(key, twice, "listed more than once")
        return value

    def unknown(self, ignored: frozenset[str] = IGNORED) -> list[str]:
        return [self.path(key) for key in self.values if key not in self.seen | ignored]
