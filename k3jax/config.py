"""The model configuration: frozen dataclasses, the layer schedule, and every rule about a config."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (``linear_attn_config``)."""

    num_heads: int
    head_dim: int  # K = V
    conv_width: int  # short_conv_kernel_size
    gate_lower_bound: float | None  # None: softplus decay of Kimi Linear

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MLAConfig:
    """Gated multi-head latent attention, without rotation."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6  # open question 1 of the facts: q_a_layernorm and kv_a_layernorm

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class DSAConfig:
    """The sparse-attention indexer of K3.1 (``dsa_config``)."""

    num_heads: int
    head_dim: int
    topk: int
    key_norm_eps: float = 1e-6  # open question 2


@dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE."""

    num_experts: int
    num_experts_per_token: int
    latent_size: int  # routed_expert_hidden_size
    intermediate_size: int  # moe_intermediate_size, of one expert
    num_shared_experts: int
    routed_scaling_factor: float = 1.0
    renormalize: bool = True

    @property
    def shared_size(self) -> int:
        return self.num_shared_experts * self.intermediate_size


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-V2 and the projector (``vision_config``)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    qkv_size: int
    intermediate_size: int
    patch_size: int
    position_table: tuple[int, int]
    merge: tuple[int, int]
    text_hidden_size: int
    projector_eps: float


@dataclass(frozen=True)
class LayerSpec:
    """What one layer is: ``attention`` is "kda" or "global", ``ffn`` is "dense" or "moe"."""

    attention: str
    ffn: str


@dataclass(frozen=True)
class Schedule:
    """Layers as ``head`` (one by one), ``num_periods`` times ``period`` (scanned), ``tail`` (one by one)."""

    head: tuple[LayerSpec, ...]
    period: tuple[LayerSpec, ...]
    num_periods: int
    tail: tuple[LayerSpec, ...]

    def locate(self, layer: int) -> tuple[str, int, int | None]:
        """0-based layer -> (group "head" | "period" | "tail", index in the group, period number or None)."""
        if layer < len(self.head):
            return "head", layer, None
        layer -= len(self.head)
        if layer < len(self.period) * self.num_periods:
            return "period", layer % len(self.period), layer // len(self.period)
        return "tail", layer - len(self.period) * self.num_periods, None


@dataclass(frozen=True)
class Config:
    """A Kimi K3 or K3.1 Pro model. ``dsa`` is None for K3; ``vision`` is None for a text-only checkpoint."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense layers
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    attn_res_block_size: int
    situ_beta: float
    situ_linear_beta: float | None
    max_position_embeddings: int
    initializer_range: float
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    dsa: DSAConfig | None
    vision: VisionConfig | None
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    media_token_id: int
    mxfp4_experts: bool = True
    norm_weight_after_cast: bool = (
        True  # open question 3: HF order, cast to the model dtype before the weight
    )
    router_dtype: str = "float32"  # open question 6
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_blocks(self) -> int:
        """Rows of the Attention Residuals bank at the end: the embedding and the finished blocks."""
        return -(-self.num_layers // self.attn_res_block_size)

    @property
    def schedule(self) -> Schedule:
        raise NotImplementedError
