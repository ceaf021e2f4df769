"""Writing ``config.json`` in the published nesting."""

from __future__ import annotations

from typing import Any

from k3jax import config as c
from k3jax import config_rules as rules


def write(config: c.Config) -> dict[str, Any]:
    """See :meth:`k3jax.config.Config.to_hf`."""
    kda, mla, moe = config.kda, config.mla, config.moe
    full = [i + 1 for i, spec in enumerate(config.layers) if spec.attention == "global"]
    text: dict[str, Any] = {
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": config.attn_res_block_size,
        "bos_token_id": config.bos_token_id,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_id,
        "first_k_dense_replace": sum(spec.ffn == "dense" for spec in config.layers),
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "kv_lora_rank": mla.kv_lora_rank,
        "linear_attn_config": {
            "full_attn_layers": full,
            "gate_lower_bound": kda.gate_lower_bound,
            "head_dim": kda.head_dim,
            "kda_layers": [i + 1 for i in range(config.num_layers) if i + 1 not in full],
            "num_heads": kda.num_heads,
            "short_conv_kernel_size": kda.conv_width,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "kimi_linear",
        "moe_intermediate_size": moe.intermediate_size,
        "moe_renormalize": moe.renormalize,
        "num_attention_heads": mla.num_heads,
        "num_expert_group": 1,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": mla.num_heads,
        "num_shared_experts": moe.num_shared_experts,
        "pad_token_id": config.pad_token_id,
        "q_lora_rank": mla.q_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "routed_expert_hidden_size": moe.latent_size,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": mla.v_head_dim,
        "vocab_size": config.vocab_size,
        **rules.TEXT_FIXED,
    }
    if config.dsa is not None:
        text["dsa_config"] = {
            "dsa_layers": full,
            "index_head_dim": config.dsa.head_dim,
            "index_num_heads": config.dsa.num_heads,
            config.dsa.topk_key: config.dsa.topk,
        }
    if config.mxfp4_experts:
        text["quantization_config"] = _write_quantization(config)
    result: dict[str, Any] = {
        "architectures": [config.architecture],
        "bos_token_id": config.bos_token_id,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_id,
        "model_type": config.model_type,
        "pad_token_id": config.pad_token_id,
        "text_config": dict(sorted(text.items())),
        "tie_word_embeddings": False,
    }
    if config.media_token_id >= 0:
        result["media_placeholder_token_id"] = config.media_token_id
    if config.vision is not None:
        result["vision_config"] = _write_vision(config.vision)
    own = _changed_knobs(config)
    return {**result, "k3jax": own} if own else result


def _changed_knobs(config: c.Config) -> dict[str, Any]:
    own = {}
    for key, part, name in rules.KNOBS:
        holder = getattr(config, part) if part else config
        if holder is not None and getattr(holder, name) != getattr(type(holder), name):
            own[key] = getattr(holder, name)
    return own


def _write_quantization(config: c.Config) -> dict[str, Any]:
    listed = config.quantization or c.QuantizationConfig()
    weights = {**rules.WEIGHTS_FIXED, "observer": "minmax", "scale_dtype": "torch.uint8"}
    group = {"targets": list(listed.targets), "input_activations": None, "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "ignore": list(listed.ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _write_vision(vision: c.VisionConfig) -> dict[str, Any]:
    values = {
        **rules.VISION_FIXED,
        "init_pos_emb_height": vision.position_table[0],
        "init_pos_emb_time": vision.position_time,
        "init_pos_emb_width": vision.position_table[1],
        "merge_kernel_size": list(vision.merge),
        "mm_hidden_size": vision.hidden_size,
        "patch_size": vision.patch_size,
        "projector_ln_eps": vision.projector_eps,
        "qkv_hidden_size": vision.qkv_size,
        "text_hidden_size": vision.text_hidden_size,
        "vt_hidden_size": vision.hidden_size,
        "vt_intermediate_size": vision.intermediate_size,
        "vt_num_attention_heads": vision.num_heads,
        "vt_num_hidden_layers": vision.num_layers,
    }
    return dict(sorted(values.items()))
