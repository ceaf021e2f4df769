"""The vocabulary of logical axes: every dimension of a parameter, a cache or an activation."""

from __future__ import annotations

AXES: dict[str, str] = {
    # parameters
    "vocab": "rows of the embedding and of the output projection",
    "embed": "width of the residual stream",
    "heads": "attention heads times their width, flattened",
    "head_count": "attention heads, one entry each",
    "head_dim": "width of one head",
    "conv": "taps of the short convolution, or the inputs it carries",
    "gate_rank": "rank of the decay projection of KDA",
    "q_latent": "compressed queries of a global layer",
    "kv_latent": "compressed keys and values, without the rope part",
    "kv_cache": "one row of the latent cache: compressed keys and values, rope part",
    "index_heads": "heads of the indexer times their width, flattened",
    "index_head_count": "heads of the indexer, one entry each",
    "index_dim": "width of an index key",
    "mlp": "hidden width of a dense feed-forward layer",
    "shared_mlp": "hidden width of the shared experts",
    "router_experts": "experts as the router scores them",
    "experts": "experts as their weights are stored",
    "latent": "the experts' latent in the projections around them",
    "latent_norm": "the combined latent, which its norm needs whole",
    "expert_latent": "the latent inside an expert",
    "expert_mlp": "hidden width of one expert",
    "expert_mlp2": "gate and up rows of one expert, stacked",
    "layers": "layers of one kind, stacked for a scan",
    # vision
    "vision_embed": "width of the vision tower",
    "vision_heads": "heads of the vision tower times their width",
    "vision_mlp": "hidden width of a vision layer",
    "vision_layers": "vision layers, stacked",
    "patch": "values of one image patch, or entries of the position table",
    # caches and activations
    "batch": "sequences",
    "cache_sequence": "rows of a latent or index-key cache, one a token",
    "qkv": "queries, keys and values, stacked",
    "token": "tokens of a sequence",
}


def split(axis: str) -> tuple[str, int]:
    """The logical axis and divisor of a packed dimension: "mlp/32" -> ("mlp", 32).

    MXFP4 stores two codes a byte ("/2") and one scale for 32 values ("/32").

    Raises:
      ValueError: the divisor is not a whole number of at least 1.
    """
    name, slash, divisor = axis.partition("/")
    if not slash:
        return name, 1
    if not divisor.isdecimal() or int(divisor) < 1:
        raise ValueError(f"logical axis {axis!r}: {divisor!r} is not a divisor")
    return name, int(divisor)
