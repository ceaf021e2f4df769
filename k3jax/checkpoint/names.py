"""The one table: name in the published checkpoint <-> parameter of the model.

Sizes are letters, resolved from the config: D hidden, V vocabulary, P KDA width, K KDA head, W
convolution, H KDA heads, A stored length of ``A_log``, N MLA heads, Q query rank, C latent, R raw
key part, F dense width, E experts, L latent MoE width, M expert width, S shared width, I index
heads times index head, J index heads, K2 index head. A name may be spelled in older ways, see
:func:`canonical`. Source: the published index of K3, which has exactly these 497,220 names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from k3jax.config import Config

Path = tuple[str | int, ...]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# kind -> how the published files store it. "model" follows the model dtype in memory.
STORED = {"model": BFLOAT16, "float32": np.dtype(np.float32), "uint8": np.dtype(np.uint8)}
PREFIX = "language_model."
GROUP = 32


class TensorSpec(NamedTuple):
    """One tensor of the checkpoint; a tuple, because half a million of them are made at once.

    Attributes:
      shape, dtype: as stored in the file.
      component: what it counts as in reports, for instance "kda" or "experts".
      kind: "model", "float32", "uint8" or "vision".
      target: path of the parameter; None for vision, see :func:`vision_tensors`.
      index: where in the parameter it goes: period number, expert, rows. The stored shape without
        its ones is the shape of that place, but for a padded ``A_log``.
      layer: 0-based layer, None outside the layers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    component: str
    kind: str
    target: Path | None
    index: tuple[int | slice, ...]  # type: ignore[assignment]  # hides tuple.index
    layer: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: full shape (periods first) and "model" | "float32" | "uint8"."""

    shape: tuple[int, ...]
    kind: str
    component: str


# stored name, parameter path, stored shape, kind, component
_TOP = """
model.embed_tokens.weight            embed               V,D   model    embedding
lm_head.weight                       lm_head             V,D   model    lm_head
model.norm.weight                    final_norm          D     model    norms
model.output_attn_res_norm.weight    output_res.norm     D     model    attention_residuals
model.output_attn_res_proj.weight    output_res.query    1,D   model    attention_residuals
"""
_ANY = """
input_layernorm.weight               input_norm          D     model    norms
post_attention_layernorm.weight      post_attention_norm D     model    norms
self_attention_res_norm.weight       attention_res.norm  D     model    attention_residuals
self_attention_res_proj.weight       attention_res.query 1,D   model    attention_residuals
mlp_res_norm.weight                  ffn_res.norm        D     model    attention_residuals
mlp_res_proj.weight                  ffn_res.query       1,D   model    attention_residuals
"""
_KDA = """
self_attn.q_proj.weight              attention.q_proj    P,D   model    kda
self_attn.k_proj.weight              attention.k_proj    P,D   model    kda
self_attn.v_proj.weight              attention.v_proj    P,D   model    kda
self_attn.g_proj.weight              attention.g_proj    P,D   model    kda
self_attn.q_conv1d.weight            attention.q_conv    P,1,W float32  kda
self_attn.k_conv1d.weight            attention.k_conv    P,1,W float32  kda
self_attn.v_conv1d.weight            attention.v_conv    P,1,W float32  kda
self_attn.f_a_proj.weight            attention.f_a_proj  K,D   model    kda
self_attn.f_b_proj.weight            attention.f_b_proj  P,K   model    kda
self_attn.b_proj.weight              attention.b_proj    H,D   model    kda
self_attn.A_log                      attention.A_log     A     float32  kda
self_attn.dt_bias                    attention.dt_bias   P     float32  kda
self_attn.o_norm.weight              attention.o_norm    K     float32  kda
self_attn.o_proj.weight              attention.o_proj    D,P   model    kda
"""
_MLA = """
self_attn.q_a_proj.weight            attention.q_a_proj  Q,D   model    mla
self_attn.q_a_layernorm.weight       attention.q_a_norm  Q     model    mla
self_attn.q_b_proj.weight            attention.q_b_proj  NQ,Q  model    mla
self_attn.kv_a_proj_with_mqa.weight  attention.kv_a_proj CR,D  model    mla
self_attn.kv_a_layernorm.weight      attention.kv_a_norm C     model    mla
self_attn.kv_b_proj.weight           attention.kv_b_proj NKV,C model    mla
self_attn.g_proj.weight              attention.g_proj    NV,D  model    mla
self_attn.o_proj.weight              attention.o_proj    D,NV  model    mla
"""
_INDEXER = """
self_attn.indexer.wq_b.weight         attention.indexer.wq_b         I,Q   model    indexer
self_attn.indexer.wk.weight           attention.indexer.wk           K2,D  model    indexer
self_attn.indexer.weights_proj.weight attention.indexer.weights_proj J,D   model    indexer
self_attn.indexer.k_norm.weight       attention.indexer.k_norm_scale K2    float32  indexer
self_attn.indexer.k_norm.bias         attention.indexer.k_norm_bias  K2    float32  indexer
"""
_DENSE = """
mlp.gate_proj.weight                 ffn.gate_proj       F,D   model    dense_ffn
mlp.up_proj.weight                   ffn.up_proj         F,D   model    dense_ffn
mlp.down_proj.weight                 ffn.down_proj       D,F   model    dense_ffn
"""
_MOE = """
block_sparse_moe.gate.weight                     ffn.router           E,D   model    router
block_sparse_moe.gate.e_score_correction_bias    ffn.router_bias      E     float32  router
block_sparse_moe.routed_expert_down_proj.weight  ffn.latent_down      L,D   model    latent
block_sparse_moe.routed_expert_up_proj.weight    ffn.latent_up        D,L   model    latent
block_sparse_moe.routed_expert_norm.weight       ffn.latent_norm      L     model    latent
block_sparse_moe.shared_experts.gate_proj.weight ffn.shared.gate_proj S,D   model    shared_experts
block_sparse_moe.shared_experts.up_proj.weight   ffn.shared.up_proj   S,D   model    shared_experts
block_sparse_moe.shared_experts.down_proj.weight ffn.shared.down_proj D,S   model    shared_experts
"""
# One expert: stored name, parameter under ffn.experts, stored shape, first row, rows in memory.
# w1 is the gate and w3 the up projection; in memory their rows follow each other.
_EXPERT = {
    "mxfp4": """
w1.weight_packed  w13_codes   M,L/2   0  2M
w1.weight_scale   w13_scales  M,L/32  0  2M
w3.weight_packed  w13_codes   M,L/2   M  2M
w3.weight_scale   w13_scales  M,L/32  M  2M
w2.weight_packed  w2_codes    L,M/2   0  L
w2.weight_scale   w2_scales   L,M/32  0  L
""",
    "dense": """
w1.weight         w13         M,L     0  2M
w3.weight         w13         M,L     M  2M
w2.weight         w2          L,M     0  L
""",
}
_VISION_TOP = """
vision_tower.patch_embed.proj.weight         patch_embed    T,3,X,X    vision  vision
vision_tower.patch_embed.pos_emb.weight      positions      Y,Z,T      vision  vision
vision_tower.encoder.final_layernorm.weight  final_norm     T          vision  vision
mm_projector.proj.0.weight                   projector_in   G,G        vision  projector
mm_projector.proj.2.weight                   projector_out  D,G        vision  projector
mm_projector.post_norm.weight                projector_norm D          vision  projector
"""
_VISION_BLOCK = """
norm0.weight    blocks.norm0  T    vision  vision
norm1.weight    blocks.norm1  T    vision  vision
wqkv.weight     blocks.wqkv   3B,T vision  vision
wo.weight       blocks.wo     T,B  vision  vision
mlp.fc0.weight  blocks.fc0    U,T  vision  vision
mlp.fc1.weight  blocks.fc1    T,U  vision  vision
"""
# In memory a patch, and the cells of the position table, are one dimension.
_VISION_MEMORY = {"patch_embed": ("T", "3XX"), "positions": ("YZ", "T")}


def padded_heads(num_heads: int) -> int:
    """Stored length of ``A_log``: the next power of two (96 heads are stored as 128)."""
    return 1 << (num_heads - 1).bit_length()


def _sizes(config: Config) -> dict[str, int]:
    kda, mla, moe, dsa, vision = config.kda, config.mla, config.moe, config.dsa, config.vision
    sizes = {"1": 1, "3": 3, "D": config.hidden_size, "V": config.vocab_size}
    sizes |= {"P": kda.width, "K": kda.head_dim, "W": kda.conv_width, "H": kda.num_heads}
    sizes |= {"A": padded_heads(kda.num_heads), "Q": mla.q_lora_rank, "C": mla.kv_lora_rank}
    sizes |= {"NQ": mla.num_heads * mla.qk_head_dim, "CR": mla.cache_width}
    sizes |= {"NKV": mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)}
    sizes |= {"NV": mla.num_heads * mla.v_head_dim, "F": config.intermediate_size}
    sizes |= {"E": moe.num_experts, "L": moe.latent_size, "M": moe.intermediate_size}
    sizes |= {"L/2": moe.latent_size // 2, "L/32": moe.latent_size // GROUP}
    sizes |= {"M/2": moe.intermediate_size // 2, "M/32": moe.intermediate_size // GROUP}
    sizes |= {"2M": 2 * moe.intermediate_size, "S": moe.shared_size, "0": 0}
    if dsa is not None:
        sizes |= {"I": dsa.num_heads * dsa.head_dim, "J": dsa.num_heads, "K2": dsa.head_dim}
    if vision is not None:
        sizes |= {"T": vision.hidden_size, "X": vision.patch_size, "B": vision.qkv_size}
        sizes |= {"3B": 3 * vision.qkv_size, "U": vision.intermediate_size}
        sizes |= {"Y": vision.position_table[0], "Z": vision.position_table[1]}
        sizes |= {"YZ": math.prod(vision.position_table), "3XX": vision.patch_width}
        sizes |= {"G": vision.merged_size}
    return sizes


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    path: Path
    shape: tuple[int, ...]
    memory: tuple[int, ...]  # shape of the place in the parameter
    kind: str
    component: str


def _rows(table: str, sizes: dict[str, int]) -> list[_Row]:
    rows = []
    for line in filter(None, table.splitlines()):
        name, path, letters, kind, component = line.split()
        stored = letters.split(",")
        shape = tuple(sizes[letter] for letter in stored)
        memory = tuple(sizes["H" if s == "A" else s] for s in stored if s != "1")
        rows.append(_Row(name, tuple(path.split(".")), shape, memory, kind, component))
    return rows


def _layer_rows(config: Config, layer: int, sizes: dict[str, int]) -> list[_Row]:
    spec = config.layers[layer]
    table = _ANY + (_KDA if spec.attention == "kda" else _MLA)
    if spec.attention == "global" and config.dsa is not None:
        table += _INDEXER
    return _rows(table + (_DENSE if spec.ffn == "dense" else _MOE), sizes)


def _place(config: Config, layer: int) -> tuple[Path, tuple[int, ...]]:
    group, position, period = config.schedule.locate(layer)
    return (group, position), () if period is None else (period,)


def _expert_rows(form: str, sizes: dict[str, int]) -> Iterator[tuple[str, str, Any, slice, int]]:
    for line in _EXPERT[form].strip().splitlines():
        name, parameter, letters, first, rows = line.split()
        shape = tuple(sizes[letter] for letter in letters.split(","))
        start = sizes[first]
        yield name, parameter, shape, slice(start, start + shape[0]), sizes[rows]


def _vision_rows(config: Config, sizes: dict[str, int]) -> Iterator[tuple[str, _Row, tuple]]:
    """(published name, row, place in the stack of blocks)."""
    if config.vision is None:
        return
    for row in _rows(_VISION_TOP, sizes):
        memory = tuple(sizes[s] for s in _VISION_MEMORY.get(join(row.path), ())) or row.memory
        yield row.name, replace(row, memory=memory), ()
    for block in range(config.vision.num_layers):
        for row in _rows(_VISION_BLOCK, sizes):
            yield f"vision_tower.encoder.blocks.{block}.{row.name}", row, (block,)


def expert_form(config: Config) -> str:
    """ "mxfp4" for a quantised checkpoint, "dense" for plain expert weights."""
    return "mxfp4" if config.mxfp4_experts else "dense"


def tensors(config: Config, experts: str | None = None) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint of ``config``, by its published name.

    Args:
      experts: "mxfp4" (``weight_packed`` and ``weight_scale``) or "dense" (``weight``); default
        what the config says. K3 takes 1.5 seconds and 250 MB.
    """
    experts = experts or expert_form(config)
    sizes, table = _sizes(config), {}

    def add(name: str, row: _Row, target: Path | None, index: tuple, layer: int | None) -> None:
        dtype = STORED.get(row.kind, BFLOAT16)
        table[name] = TensorSpec(row.shape, dtype, row.component, row.kind, target, index, layer)

    for row in _rows(_TOP, sizes):
        add(PREFIX + row.name, row, row.path, (), None)
    for layer, spec in enumerate(config.layers):
        place, lead = _place(config, layer)
        head = f"{PREFIX}model.layers.{layer}."
        for row in _layer_rows(config, layer, sizes):
            add(head + row.name, row, place + row.path, lead, layer)
        if spec.ffn == "dense":
            continue
        kind = "uint8" if experts == "mxfp4" else "model"
        for name, parameter, shape, rows, _ in _expert_rows(experts, sizes):
            target = (*place, "ffn", parameter)
            for expert in range(config.moe.num_experts):
                table[f"{head}block_sparse_moe.experts.{expert}.{name}"] = TensorSpec(
                    shape, STORED[kind], "experts", kind, target, (*lead, expert, rows), layer
                )
    for name, spec in vision_tensors(config).items():
        table[name] = spec._replace(target=None, index=())
    return table


def vision_tensors(config: Config) -> dict[str, TensorSpec]:
    """The tensors of tower and projector by published name; targets are paths of VisionTower."""
    return {
        name: TensorSpec(row.shape, BFLOAT16, row.component, row.kind, row.path, index, None)
        for name, row, index in _vision_rows(config, _sizes(config))
    }


def vision_parameters(config: Config) -> dict[Path, ParameterSpec]:
    """Every parameter of the VisionTower of ``config``, blocks first; empty without vision."""
    result: dict[Path, ParameterSpec] = {}
    for _, row, index in _vision_rows(config, _sizes(config)):
        assert config.vision is not None
        stack = (config.vision.num_layers,) if index else ()
        result[row.path] = ParameterSpec(stack + row.memory, "model", row.component)
    return result


def parameters(config: Config, experts: str | None = None) -> dict[Path, ParameterSpec]:
    """Every parameter of the text model with its full shape, periods first."""
    experts = experts or expert_form(config)
    sizes, result = _sizes(config), {}
    for row in _rows(_TOP, sizes):
        result[row.path] = ParameterSpec(row.memory, row.kind, row.component)
    for layer, spec in enumerate(config.layers):
        place, lead = _place(config, layer)
        if lead and lead[0]:
            continue
        stack = (config.schedule.num_periods,) if lead else ()
        for row in _layer_rows(config, layer, sizes):
            result[place + row.path] = ParameterSpec(stack + row.memory, row.kind, row.component)
        if spec.ffn == "moe":
            kind = "uint8" if experts == "mxfp4" else "model"
            for _, parameter, shape, _, rows in _expert_rows(experts, sizes):
                full = (*stack, config.moe.num_experts, rows, shape[1])
                path = (*place, "ffn", parameter)
                result[path] = ParameterSpec(full, kind, "experts")
    return result


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of weights; a packed expert counts its logical weights.

    Attributes:
      total: the text model.
      active: what one token uses: chosen experts only, the head but not the embedding table.
      by_component: the text components and, beyond the total, "vision" and "projector".
    """

    total: int
    active: int
    by_component: dict[str, int]


def count_parameters(config: Config) -> ParameterCount:
    """Counts the weights of a config; K3: 2.7795e12 in total, 104.19e9 active."""
    counts: dict[str, int] = {}
    for spec in parameters(config, "dense").values():
        counts[spec.component] = counts.get(spec.component, 0) + math.prod(spec.shape)
    text = sum(counts.values())
    idle = counts.get("embedding", 0)
    moe = config.moe
    routed = counts.get("experts", 0)
    idle += routed - routed * moe.num_experts_per_token // moe.num_experts
    for spec in vision_tensors(config).values():
        counts[spec.component] = counts.get(spec.component, 0) + spec.size
    return ParameterCount(text, text - idle, counts)


_ALIASES = (
    (re.compile(r"^(?=model\.|lm_head\.)"), PREFIX),
    (re.compile(r"^language_model\.layers\."), "language_model.model.layers."),
    (re.compile(r"\b(self_attention_res|mlp_res|output_attn_res)\.(norm|proj)_weight$"),
     r"\1_\2.weight"),
)  # fmt: skip


def canonical(name: str) -> str:
    """The published spelling of a tensor name.

    Accepts names without ``language_model.``, ``language_model.layers.`` and the older
    ``self_attention_res.proj_weight`` / ``.norm_weight`` of the Attention Residuals.
    """
    if name.startswith("language_model.model.layers.") and "_res." not in name:
        return name  # nearly all of half a million
    for pattern, replacement in _ALIASES:
        name = pattern.sub(replacement, name)
    return name


def layer_of(name: str) -> int | None:
    """0-based layer in a published name, None outside the layers."""
    found = re.match(r"language_model\.model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def is_vision(name: str) -> bool:
    return name.startswith(("vision_tower.", "mm_projector."))


def join(path: Path) -> str:
    """A parameter path as text: ``period.3.ffn.router``."""
    return ".".join(str(part) for part in path)
