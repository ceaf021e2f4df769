"""The model configuration: frozen dataclasses and the layer schedule (rules: config_rules)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from k3jax.errors import ConfigError


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (``linear_attn_config``)."""

    num_heads: int
    head_dim: int  # K = V
    conv_width: int  # short_conv_kernel_size
    gate_lower_bound: float | None  # None: softplus decay of Kimi Linear
    state_dtype: str = (
        "float32"  # open question: serving engines default to float32, bfloat16 opt-in
    )
    dt_bias_init: str = "log_uniform"  # open question: or "zeros"

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
    latent_norm_eps: float = 1e-6  # open question: q_a_layernorm, kv_a_layernorm; engines use 1e-5

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
    key_norm_eps: float = 1e-6  # open question: DeepSeek V3.2's value; a port uses rms_norm_eps
    topk_key: str = "index_topk"  # open question: the name this checkpoint gives to ``topk``
    index_key_dtype: str = "bfloat16"  # in the cache: the model's dtype, or "float8_e4m3fn"

    @property
    def scaled_keys(self) -> bool:
        """Whether the cache holds index keys in eight bits, with a float32 factor a token."""
        return self.index_key_dtype == "float8_e4m3fn"


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
    expert_activations: str | None = None  # what experts read: the model's dtype, or "mxfp8"

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
    position_time: int = 4  # init_pos_emb_time: the most frames of one item
    norm_eps: float = (
        2.0**-23
    )  # eps left unset in Moonshot's code means the float32 machine epsilon

    @property
    def patch_width(self) -> int:
        """Values of one patch: 3 channels."""
        return 3 * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of a window of merged patches, what the projector reads."""
        return self.hidden_size * self.merge[0] * self.merge[1]


@dataclass(frozen=True)
class QuantizationConfig:
    """Which linears are MXFP4 (``quantization_config``). The format itself is fixed.

    ``ignore`` holds module names and ``re:`` patterns. Published lists are known to leave out
    unquantised linears (router, latent projections, Attention Residuals queries), so the loader
    decides by the presence of ``weight_packed`` and uses the list as a cross-check only.
    """

    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerSpec:
    """What one layer is: ``attention`` is "kda" or "global", ``ffn`` is "dense" or "moe"."""

    attention: str
    ffn: str


@dataclass(frozen=True)
class Schedule:
    """``head`` (one by one), ``num_periods`` times ``period`` (scanned), ``tail`` (one by one)."""

    head: tuple[LayerSpec, ...]
    period: tuple[LayerSpec, ...]
    num_periods: int
    tail: tuple[LayerSpec, ...]

    def expand(self) -> tuple[LayerSpec, ...]:
        """The layers in order."""
        return self.head + self.period * self.num_periods + self.tail

    def locate(self, layer: int) -> tuple[str, int, int | None]:
        """0-based layer -> ("head" | "period" | "tail", index in it, period number or None)."""
        if layer < len(self.head):
            return "head", layer, None
        layer -= len(self.head)
        if self.num_periods and layer < len(self.period) * self.num_periods:
            return "period", layer % len(self.period), layer // len(self.period)
        return "tail", layer - len(self.period) * self.num_periods, None


@lru_cache(maxsize=256)
def find_schedule(layers: tuple[LayerSpec, ...]) -> Schedule:
    """The split of ``layers`` that covers the most layers by at least two repeats of one period.

    Dense layers always go to the head. Among equal covers the shortest tail wins, then the shortest
    period; with no repeat at all every layer is in the head. K3: layers 0-3, then 22 times
    (3 KDA + 1 global), then the last global layer.
    """
    total = len(layers)
    first = max((i + 1 for i, spec in enumerate(layers) if spec.ffn == "dense"), default=0)
    best = (0, 0, 0, 0, 0)  # covered, -tail, -period, head, repeats
    for period in range(1, (total - first) // 2 + 1):
        run = 0  # layers after `head` that equal the layer one period later
        for head in range(total - period - 1, first - 1, -1):
            run = run + 1 if layers[head] == layers[head + period] else 0
            repeats = run // period + 1
            if repeats >= 2:
                covered = repeats * period
                tail = total - head - covered
                best = max(best, (covered, -tail, -period, head, repeats))
    covered, _, negative_period, head, repeats = best
    if not covered:
        return Schedule(layers, (), 0, ())
    period = -negative_period
    return Schedule(layers[:head], layers[head : head + period], repeats, layers[head + covered :])


@dataclass(frozen=True)
class Config:
    """A Kimi K3 or K3.1 Pro model. ``dsa`` is None for K3, ``vision`` is None for text only."""

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
    model_type: str = "kimi_k3"  # open question for K3.1: dispatch never depends on it
    mxfp4_experts: bool = True
    quantization: QuantizationConfig | None = None  # None with mxfp4_experts False: plain experts
    norm_weight_after_cast: bool = True  # open question: cast to the model dtype, then the weight
    router_dtype: str = "float32"  # open question: engines feed bfloat16 and accumulate in float32
    attn_res_dtype: str = "float32"  # open question: one engine keeps norm*query in bfloat16
    per_head_muon_scale: str = "spectral"  # open question: max(1, rows/columns)**0.5 per head block
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any]) -> Config:
        """Reads a published configuration.

        Args:
          source: a checkpoint folder, a ``config.json``, or its content.
        Raises:
          ConfigError: every rule that is broken, each with the field and its value.
        """
        from k3jax.config_hf import read

        return read(source)

    @classmethod
    def preset(cls, name: str) -> Config:
        """A configuration shipped with the package: "kimi-k3", "kimi-k3.1-pro" or "nano"."""
        if name not in presets():
            raise ConfigError(f"no preset is called {name!r}; there are {', '.join(presets())}")
        return cls.from_hf(resolve(name))

    def to_hf(self) -> dict[str, Any]:
        """The nested dictionary of ``config.json``; ``from_hf(c.to_hf()) == c``."""
        from k3jax.config_write import write

        return write(self)

    def truncated(self, num_layers: int) -> Config:
        """The same model with its first ``num_layers`` layers only."""
        if not 1 <= num_layers <= self.num_layers:
            raise ConfigError(f"layers = {num_layers} is outside 1..{self.num_layers}")
        return replace(self, layers=self.layers[:num_layers])

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_blocks(self) -> int:
        """Rows of the Attention Residuals bank at the end: the embedding, the finished blocks."""
        return -(-self.num_layers // self.attn_res_block_size)

    @property
    def schedule(self) -> Schedule:
        """Layers as head, scanned periods and tail; see :func:`find_schedule`."""
        return find_schedule(self.layers)


def _preset_roots() -> list[Path]:
    package = Path(__file__).resolve().parent
    return [package / "configs" / "models", package.parent / "configs" / "models"]  # wheel, clone


def presets() -> list[str]:
    """Names of the shipped models."""
    found = {path.parent.name for root in _preset_roots() for path in root.glob("*/config.json")}
    return sorted(found)


def resolve(path_or_preset: str | Path) -> Path:
    """The folder of a preset or of a checkpoint.

    A bare name that is a preset means the preset; write ``./name`` for a folder of that name.

    Raises:
      ConfigError: neither a preset nor a folder with a ``config.json``.
    """
    name = str(path_or_preset)
    for root in _preset_roots():
        if name in presets() and (root / name / "config.json").is_file():
            return root / name
    path = Path(path_or_preset).expanduser()
    folder = path.parent if path.name == "config.json" else path
    if (folder / "config.json").is_file():
        return folder
    what = "has no config.json" if folder.is_dir() else "is not a folder"
    raise ConfigError(f"{name!r} {what}, and no preset has that name ({', '.join(presets())})")
