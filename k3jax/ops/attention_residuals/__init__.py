"""Block Attention Residuals: the depth mix that replaces the residual stream.

Every sublayer reads a softmax mix of earlier results of the same token: the rows of a bank (the
embedding, then the sum of each finished block) and the running sum of the block being built.

    key_n   = v_n * rsqrt(mean(v_n^2) + eps)
    score_n = sum_d key_nd * norm_d * query_d      (float32, no scale, no bias)
    mix     = sum_n softmax(score)_n * v_n         (values are the raw rows; one cast)

Sources: the Attention Residuals paper, the Kimi K3 report, and Moonshot's published modelling code
for the precision (float32 scores and mix) and for the order of reading and appending.

`mix` is the plain form. `score_bank` and `merge_partial` are the two-phase form: the bank does not
change inside a block, so its part of the softmax is computed once for all queries of the block and
the running sum is merged in by online softmax. `mix_all` is the full, unblocked variant.
"""

from k3jax.ops.attention_residuals.xla import (
    BankPart,
    merge_partial,
    mix,
    mix_all,
    score_bank,
)

__all__ = ["BankPart", "merge_partial", "mix", "mix_all", "score_bank"]
