"""The definition, in NumPy, one token at a time, in the dtype it is given."""

import numpy as np


def mix_token(sources_ND: np.ndarray, norm_D: np.ndarray, query_D: np.ndarray, eps: float):
    """Softmax mix [D] of the sources [N, D] of one token."""
    scores = []
    for v in sources_ND:
        key = v / np.sqrt(np.mean(v * v) + eps)
        scores.append(np.sum(key * norm_D * query_D))
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    return sum(w * v for w, v in zip(weights, sources_ND, strict=True))


def decoder_stack(embedding_D, sublayers, reads, block_size: int, eps: float):
    """Run 2·L sublayers over one token with Block Attention Residuals, from the written rules.

    Args:
      embedding_D: [D], source 0.
      sublayers: 2·L callables [D] -> [D]: attention and feed-forward of each layer in turn.
      reads: 2·L + 1 pairs (norm_D, query_D); the last is the output mix.
      block_size: layers in a block.
    Returns:
      (final mix [D], bank as a list of [D]).
    """
    bank, partial = [], embedding_D
    for layer in range(len(sublayers) // 2):
        norm, query = reads[2 * layer]
        x = mix_token(np.stack([*bank, partial]), norm, query, eps) if bank else partial
        if layer % block_size == 0:
            bank.append(partial)
            partial = None
        a = sublayers[2 * layer](x)
        partial = a if partial is None else partial + a
        norm, query = reads[2 * layer + 1]
        y = mix_token(np.stack([*bank, partial]), norm, query, eps)
        partial = partial + sublayers[2 * layer + 1](y)
    norm, query = reads[-1]
    return mix_token(np.stack([*bank, partial]), norm, query, eps), bank
