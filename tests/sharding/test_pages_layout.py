"""Caches in pages on a layout: a page is striped as a cache is, tables go with the sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spread
import tiny
from jax.sharding import NamedSharding

from k3jax.cache import state
from k3jax.programs import Programs, array_specs

BATCH, LENGTH, PAGE = 4, 64, 16


def dealt(groups: int):
    """A table of random pages; sequences of one group share a pool and count in that."""
    rng, pages = np.random.default_rng(0), BATCH // groups * (LENGTH // PAGE)
    tables = [rng.permutation(pages).reshape(-1, LENGTH // PAGE) for _ in range(groups)]
    return jnp.asarray(np.concatenate(tables), jnp.int32)


# The cache over the tensor axis: each half of the batch has its pool. Over both axes: one pool.
@pytest.mark.parametrize(
    ("name", "groups", "keys"),
    [("striped-heads", 2, "bfloat16"), ("striped-all", 1, "float8_e4m3fn")],
)
def test_pages_of_stripes_have_the_bits_of_stripes(name, groups, keys):
    layout, config = spread.layout(name), spread.module().config
    index = dataclasses.replace(config.dsa, index_key_dtype=keys)
    config = dataclasses.replace(config, layers=tiny.layer_list(3, (2, 3)), dsa=index)
    model = spread.spread(tiny.module(config), layout)
    prefill = jax.jit(Programs.of(model.module, layout, model.mesh).prefill)
    results = []
    for page in (None, PAGE):
        cache = state.empty(config, BATCH, LENGTH, jnp.float32, page)
        if page is not None:
            cache = state.with_table(cache, dealt(groups))
            stack = cache.period[0].latent_BSC
            assert stack.shape == (2, BATCH * LENGTH // PAGE, PAGE, 40)
        specs = array_specs(layout, cache)
        cache = jax.tree.map(
            lambda a, spec: jax.device_put(a, NamedSharding(model.mesh, spec)), cache, specs
        )
        logits = []
        for step, lengths in enumerate(([16, 9, 1, 16], [16, 16, 0, 3], [9, 1, 16, 2])):
            ids, lengths = tiny.tokens(BATCH, 16, seed=step), np.asarray(lengths, np.int32)
            inputs = map(model._place, (ids, lengths))
            got, cache = prefill(model._leaves, cache, *inputs)
            logits.append(np.asarray(got)[lengths > 0])
        results.append(np.concatenate(logits))
        assert np.isfinite(results[-1]).all()
    np.testing.assert_array_equal(*results)
