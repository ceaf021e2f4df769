"""Small models in which every boundary is reached in under 200 tokens and none coincide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.config import Config, DSAConfig, KDAConfig, LayerSpec, MLAConfig, MoEConfig
from k3jax.layers.params import draw
from k3jax.model import Transformer


def layer_list(num_layers: int, global_layers, dense: int = 1) -> tuple[LayerSpec, ...]:
    """Layers from one-based numbers of the global ones."""
    return tuple(
        LayerSpec("global" if n in global_layers else "kda", "dense" if n <= dense else "moe")
        for n in range(1, num_layers + 1)
    )


def config(num_layers=5, global_layers=(3, 5), *, dsa=True, block=2, **changes) -> Config:
    """By default the fewest layers with everything: a dense head, two scanned periods of KDA and
    global, a partial last block. Three layer bodies to compile."""
    fields = {
        "architecture": f"KimiK3{'1' if dsa else ''}ForConditionalGeneration",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers": layer_list(num_layers, global_layers),
        "rms_norm_eps": 1e-5,
        "attn_res_block_size": block,
        "situ_beta": 4.0,
        "situ_linear_beta": 25.0,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "kda": KDAConfig(num_heads=8, head_dim=16, conv_width=4, gate_lower_bound=-5.0),
        "mla": MLAConfig(
            num_heads=6,
            q_lora_rank=40,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
        ),
        "moe": MoEConfig(
            num_experts=28,
            num_experts_per_token=4,
            latent_size=96,
            intermediate_size=64,
            num_shared_experts=2,
        ),
        "dsa": DSAConfig(num_heads=3, head_dim=8, topk=16) if dsa else None,
        "vision": None,
        "bos_token_id": 90,
        "eos_token_id": 91,
        "pad_token_id": 95,
        "media_token_id": 92,
    }
    return Config(**(fields | changes))


def module(config: Config, seed: int = 0, **options) -> Transformer:
    """Random float32 weights; depth-mix queries are drawn too, so that mixes are uneven."""
    options = {"dtype": jnp.float32} | options
    model = Transformer(config, nnx.Rngs(seed), **options)
    key = jax.random.key(seed + 1)
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable) and path[-1] == "query":
            key, one = jax.random.split(key)
            value = 0.3 * draw(jax.random.normal, one, variable.get_value().shape)
            variable.set_value(jnp.asarray(value))
        if isinstance(variable, nnx.Variable) and path[-1] == "router_bias":
            key, one = jax.random.split(key)
            value = 0.05 * draw(jax.random.normal, one, variable.get_value().shape)
            variable.set_value(jnp.asarray(value))
    return model


def tokens(batch: int, length: int, seed: int = 0, vocab: int = 96) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)


def layer_module(model: Transformer, layer: int):
    """One layer of the model as a module of its own, cut out of the scanned stack if need be."""
    group, i, period = model.config.schedule.locate(layer)
    one = getattr(model, group)[i]
    if period is None:
        return one
    graphdef, state = nnx.split(one)
    return nnx.merge(graphdef, jax.tree.map(lambda a: a[period], state))
