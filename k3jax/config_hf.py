"""Reading ``config.json`` of Kimi K3 and K3.1 Pro.

Class defaults of the public engines differ from the published values, so no published key has a
default here: a missing key is an error. Keys nobody knows are reported in ``Config.unknown_keys``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3jax import config as c
from k3jax import config_rules as rules
from k3jax.config_rules import Section
from k3jax.errors import ConfigError


def load_json(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The content of ``config.json`` from a folder, a file or a dictionary."""
    if isinstance(source, dict):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a configuration: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}, not an object")
    return values


def read(source: str | Path | dict[str, Any]) -> c.Config:
    """See :meth:`k3jax.config.Config.from_hf`."""
    problems: list[str] = []
    top = Section(load_json(source), "", problems)
    architectures = top.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture not in rules.ARCHITECTURES or len(architectures) != 1:
        known = list(rules.ARCHITECTURES)
        raise ConfigError(f"architectures = {json.dumps(architectures)}: must be one of {known}")
    text = top.section("text_config")
    text.fixed(rules.TEXT_FIXED)
    unknown: list[str] = []
    hidden, eps = text.integer("hidden_size"), text.number("rms_norm_eps")
    layers, full_attention = _layers(text, unknown)
    quantization = _quantization(top, text, unknown)
    vision = None
    if top.get("vision_config", None) is not None:
        vision = _vision(top.section("vision_config"), hidden, unknown)
    for section in (top, text):
        if section.get("tie_word_embeddings", False) is not False:
            section.refuse("tie_word_embeddings", True, "only false is supported")
    vocabulary = text.integer("vocab_size")
    values = {
        "architecture": architecture,
        "model_type": str(top.get("model_type", "kimi_k3")),
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": text.integer("intermediate_size"),
        "layers": layers,
        "rms_norm_eps": eps,
        "attn_res_block_size": text.integer("attn_res_block_size"),
        "situ_beta": text.number("activation_situ_beta"),
        "situ_linear_beta": text.number("activation_situ_linear_beta", null=True),
        "max_position_embeddings": text.integer("max_position_embeddings"),
        "initializer_range": text.number("initializer_range"),
        "mla": _mla(text),
        "moe": _moe(text),
        "dsa": _dsa(text, rules.ARCHITECTURES[architecture], full_attention, unknown),
        "vision": vision,
        "mxfp4_experts": quantization is not None,
        "quantization": quantization,
        **_token_ids(top, text, vocabulary, vision is not None),
    }
    linear = text.section("linear_attn_config")
    linear.fixed({"use_full_rank_gate": True})
    linear.seen |= {"full_attn_layers", "kda_layers"}  # read by _layers
    values["kda"] = c.KDAConfig(
        num_heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_width=linear.integer("short_conv_kernel_size", minimum=2),
        gate_lower_bound=linear.number("gate_lower_bound", null=True, sign=-1),
    )
    _apply_knobs(top, values, unknown)
    _check_groups(text, values["moe"], quantization is not None)
    unknown += linear.unknown() + text.unknown() + top.unknown()
    if problems:
        raise ConfigError("\n  ".join(["the configuration is refused", *dict.fromkeys(problems)]))
    return c.Config(**values, unknown_keys=tuple(unknown))


def _layers(text: Section, unknown: list[str]) -> tuple[tuple[c.LayerSpec, ...], list[int]]:
    count = text.integer("num_hidden_layers")
    dense = text.integer("first_k_dense_replace", minimum=0)
    if dense > count:
        text.refuse("first_k_dense_replace", dense, f"more than the {count} layers")
    linear = Section(text.values.get("linear_attn_config") or {}, "", [])
    linear.name, linear.problems = text.path("linear_attn_config"), text.problems
    full = linear.layer_numbers("full_attn_layers", count)
    kda = linear.layer_numbers("kda_layers", count)
    both = sorted(set(full) & set(kda))
    if both:
        linear.refuse("kda_layers", both, "also listed in full_attn_layers")
    gap = sorted(set(range(1, count + 1)) - set(full) - set(kda))
    if gap and {"full_attn_layers", "kda_layers"} <= set(linear.values):
        shown = gap if len(gap) <= 12 else [*gap[:12], "..."]
        linear.refuse("kda_layers", shown, "layers in neither kda_layers nor full_attn_layers")
    kinds = ("global" if i + 1 in set(full) else "kda" for i in range(count))
    specs = (c.LayerSpec(kind, "dense" if i < dense else "moe") for i, kind in enumerate(kinds))
    return tuple(specs), full


def _mla(text: Section) -> c.MLAConfig:
    heads = text.integer("num_attention_heads")
    key_heads = text.integer("num_key_value_heads")
    if key_heads != heads:
        text.refuse("num_key_value_heads", key_heads, f"must equal num_attention_heads = {heads}")
    return c.MLAConfig(
        num_heads=heads,
        q_lora_rank=text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
    )


def _moe(text: Section) -> c.MoEConfig:
    grouped = text.boolean("use_grouped_topk")
    for key in ("num_expert_group", "topk_group"):
        groups = text.integer(key)
        if groups != 1:
            why = "only one group is supported"
            text.refuse(key, groups, f"{why} (use_grouped_topk = {str(grouped).lower()})")
    experts, topk = text.integer("num_experts"), text.integer("num_experts_per_token")
    if topk > experts:
        text.refuse("num_experts_per_token", topk, f"more than num_experts = {experts}")
    return c.MoEConfig(
        num_experts=experts,
        num_experts_per_token=topk,
        latent_size=text.integer("routed_expert_hidden_size"),
        intermediate_size=text.integer("moe_intermediate_size"),
        num_shared_experts=text.integer("num_shared_experts"),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        renormalize=text.boolean("moe_renormalize"),
    )


def _check_groups(text: Section, moe: c.MoEConfig, quantized: bool) -> None:
    formats = {"MXFP4": quantized, "MXFP8": moe.expert_activations == "mxfp8"}
    used = next((name for name, on in formats.items() if on), None)
    widths = {
        "routed_expert_hidden_size": moe.latent_size,
        "moe_intermediate_size": moe.intermediate_size,
    }
    for key, width in widths.items():
        if used and width % rules.GROUP:
            text.refuse(key, width, f"not a multiple of the {used} group of {rules.GROUP}")


def _dsa(
    text: Section, wanted: bool, full_attention: list[int], unknown: list[str]
) -> c.DSAConfig | None:
    text.fixed({"index_topk_freq": 1, "index_rope_dim": 0}, required=False)
    present = text.get("dsa_config", None)
    if present is None:
        if wanted:
            text.problems.append(
                "text_config.dsa_config is missing: KimiK31ForConditionalGeneration needs it"
            )
        return None
    if not wanted:
        text.refuse("dsa_config", present, "KimiK3ForConditionalGeneration has no indexer")
        return None
    dsa = text.section("dsa_config")
    dsa.fixed({"index_topk_freq": 1, "index_rope_dim": 0}, required=False)
    keys = [key for key in rules.TOPK_KEYS if key in dsa.values]
    topk = [dsa.integer(key) for key in keys or rules.TOPK_KEYS[:1]]
    if len(set(topk)) > 1:
        dsa.refuse(keys[1], topk[1], f"disagrees with {keys[0]} = {topk[0]}")
    listed = dsa.get("dsa_layers")
    if listed is not None and (not isinstance(listed, list) or listed != sorted(full_attention)):
        why = "disagrees with text_config.linear_attn_config.full_attn_layers"
        dsa.refuse("dsa_layers", listed, f"{why} = {json.dumps(sorted(full_attention))}")
    result = c.DSAConfig(
        num_heads=dsa.integer("index_num_heads"),
        head_dim=dsa.integer("index_head_dim"),
        topk=topk[0],
        topk_key=(keys or rules.TOPK_KEYS)[0],
    )
    unknown += dsa.unknown()
    return result


def _vision(vision: Section, hidden: int, unknown: list[str]) -> c.VisionConfig:
    vision.fixed(rules.VISION_FIXED)
    result = c.VisionConfig(
        hidden_size=vision.integer("vt_hidden_size"),
        num_layers=vision.integer("vt_num_hidden_layers"),
        num_heads=vision.integer("vt_num_attention_heads"),
        qkv_size=vision.integer("qkv_hidden_size"),
        intermediate_size=vision.integer("vt_intermediate_size"),
        patch_size=vision.integer("patch_size"),
        position_table=(
            vision.integer("init_pos_emb_height"),
            vision.integer("init_pos_emb_width"),
        ),
        position_time=vision.integer("init_pos_emb_time"),
        merge=vision.pair("merge_kernel_size"),
        text_hidden_size=vision.integer("text_hidden_size"),
        projector_eps=vision.number("projector_ln_eps"),
    )
    if vision.integer("mm_hidden_size") != result.hidden_size:
        vision.refuse("mm_hidden_size", vision.get("mm_hidden_size"), "differs from vt_hidden_size")
    if result.text_hidden_size != hidden:
        why = f"differs from text_config.hidden_size = {hidden}"
        vision.refuse("text_hidden_size", result.text_hidden_size, why)
    if result.qkv_size % (4 * result.num_heads):
        why = f"a head of {result.num_heads} must be a multiple of 4 (2-D rotary pairs)"
        vision.refuse("qkv_hidden_size", result.qkv_size, why)
    unknown += vision.unknown()
    return result


def _quantization(top: Section, text: Section, unknown: list[str]) -> c.QuantizationConfig | None:
    outer, inner = top.get("quantization_config", None), text.get("quantization_config", None)
    if outer is not None and inner is not None and outer != inner:
        top.refuse("quantization_config", outer, "differs from text_config.quantization_config")
    owner = text if inner is not None else top
    if inner is None and outer is None:
        return None
    section = owner.section("quantization_config")
    published = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    section.fixed(published)
    section.fixed({"kv_cache_scheme": None}, required=False)
    groups = section.section("config_groups")
    if len(groups.values) != 1:
        groups.refuse("", sorted(groups.values), "exactly one group is supported")
        return c.QuantizationConfig()
    group = groups.section(next(iter(groups.values)))
    group.fixed({"format": published["format"]}, required=False)
    group.fixed({"input_activations": None, "output_activations": None}, required=False)
    weights = group.section("weights")
    weights.fixed(rules.WEIGHTS_FIXED)
    weights.fixed({"actorder": None, "zp_dtype": None}, required=False)
    result = c.QuantizationConfig(_strings(group, "targets"), _strings(section, "ignore"))
    unknown += section.unknown(rules.QUANTIZATION_IGNORED) + group.unknown(frozenset())
    unknown += weights.unknown(rules.WEIGHTS_IGNORED)
    return result


def _strings(section: Section, key: str) -> tuple[str, ...]:
    value = section.get(key)
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if value is not None:
        section.refuse(key, value, "must be a list of strings")
    return ()


def _token_ids(top: Section, text: Section, vocabulary: int, vision: bool) -> dict[str, int]:
    ids = {}
    names = {"media_placeholder_token_id": "media_token_id"}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"):
        inner = text.get(key, None)
        optional = inner is not None or (key in names and not vision)
        value = top.get(key, inner if optional else ...)
        if value is None:
            value = -1
        elif type(value) is not int or not 0 <= value < vocabulary:
            top.refuse(key, value, f"not a token id below vocab_size = {vocabulary}")
        ids[names.get(key, key)] = value
    return ids


def _apply_knobs(top: Section, values: dict[str, Any], unknown: list[str]) -> None:
    own = Section(top.get("k3jax", {}), "k3jax", top.problems)
    for key, part, name in rules.KNOBS:
        if key not in own.values:
            continue
        if key in rules.CHOICES:
            value = own.get(key)
            if value not in rules.CHOICES[key]:
                own.refuse(key, value, f"must be one of {json.dumps(rules.CHOICES[key])}")
        else:
            value = own.boolean(key) if key == "norm_weight_after_cast" else own.number(key)
        if part is None:
            values[name] = value
        elif values[part] is not None:
            values[part] = replace(values[part], **{name: value})
    unknown += own.unknown(frozenset())
