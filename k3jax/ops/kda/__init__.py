"""Kimi Delta Attention (KDA): a delta-rule linear attention with one decay per key channel.

`kda` is the recurrence, `gated_kda` adds norms and gates, `kda_decode` is one token of the mixer.
"""

from k3jax.ops.kda.core import IMPLEMENTATIONS, decay, kda, l2norm
from k3jax.ops.kda.decode import gated_norm, kda_decode
from k3jax.ops.kda.gated import gated_kda
from k3jax.ops.kda.sequence_parallel import sequence_parallel_conv, sequence_parallel_kda
from k3jax.ops.kda.speculative import Window, commit, replay_and_verify, verify_window
from k3jax.ops.kda.xla import chunk_maps, compose

__all__ = [
    "IMPLEMENTATIONS",
    "Window",
    "chunk_maps",
    "commit",
    "compose",
    "decay",
    "gated_kda",
    "gated_norm",
    "kda",
    "kda_decode",
    "l2norm",
    "replay_and_verify",
    "sequence_parallel_conv",
    "sequence_parallel_kda",
    "verify_window",
]
