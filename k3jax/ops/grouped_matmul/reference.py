"""The experts as a loop over tokens and their experts, in float64 NumPy."""

from __future__ import annotations

import numpy as np

from k3jax.ops.situ.reference import situ
from k3jax.quantization.mxfp4 import MXFP4, unpack_numpy
from k3jax.quantization.mxfp8 import round_trip_numpy


def _weight(w) -> np.ndarray:
    if isinstance(w, MXFP4):
        return unpack_numpy(np.asarray(w.codes), np.asarray(w.scales), np.float64)
    return np.asarray(w).astype(np.float64)


def experts(
    z_NL, ids_Nk, weights_Nk, w13, w2, *, situ_beta, situ_linear_beta, activations=None
) -> np.ndarray:
    """See :func:`k3jax.ops.grouped_matmul.experts`; float64 out, not rounded at the end.

    The roundings in between are those of the dtype of z; pass float64 to have none.
    """
    z_NL = np.asarray(z_NL)
    w13, w2 = _weight(w13), _weight(w2)

    def rounded(a):
        return a.astype(z_NL.dtype).astype(np.float64)

    narrow = rounded if activations is None else round_trip_numpy
    r_NL = np.zeros(z_NL.shape, np.float64)
    for n, z in enumerate(narrow(z_NL)):
        for e, weight in zip(np.asarray(ids_Nk)[n], np.asarray(weights_Nk)[n], strict=True):
            if not 0 <= e < len(w13):
                continue
            gate, up = np.split(rounded(w13[e] @ z), 2)
            h = narrow(situ(gate, up, situ_beta, situ_linear_beta))
            r_NL[n] += float(weight) * rounded(w2[e] @ h)
    return r_NL
