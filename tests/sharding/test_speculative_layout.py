"""Verification and commit of drafts on a layout equal one device."""

import numpy as np
import spread
import tiny
import tolerances as tol

from k3jax.runtime import Model


def run(model):
    """Logits of two windows of drafts, the second one behind the accepted rows of the first; tokens
    held and KDA states after a commit. The batch does not divide over the devices."""
    ids = tiny.tokens(spread.BATCH, 18)
    cache = model.init_cache(spread.BATCH, 64)
    _, cache = model.prefill(ids[:, :10], cache, (10, 7, 9))
    first, cache = model.verify(ids[:, 10:14], cache, None, (4, 2, 4))
    second, cache = model.verify(ids[:, 14:18], cache, (3, 2, 0))
    cache = model.commit(cache, (1, 4, 2))
    states = [c.state_BHVK for c in (*cache.arrays.head, *cache.arrays.period)
              if hasattr(c, "state_BHVK")]  # fmt: skip
    first = [np.asarray(first[b, :n]) for b, n in enumerate((4, 2, 4))]
    states = [np.asarray(s)[..., : spread.BATCH, :, :, :] for s in states]
    return cache.lengths_B, [*first, np.asarray(second), *states]


def test_layout_equals_one_device():
    """Heads over 4 devices, sequences over 2, caches of global layers over all."""
    module = spread.module()
    want_lengths, want = run(Model(module))
    lengths, got = run(spread.spread(module, spread.layout("striped-all")))
    np.testing.assert_array_equal(lengths, want_lengths)
    np.testing.assert_array_equal(lengths, [14, 13, 11])
    assert len(want) == 6
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= tol.LAYOUT_FP32 * np.abs(b).max()
