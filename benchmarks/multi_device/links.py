"""Rates of the collectives, and the forms of expert dispatch against a dense oracle."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.multi_device.common import Bench, Side, measure, rms
from sharding import collectives
from sharding.experts import FORMS, dispatch
from sharding.report import ring_bytes

WIDTH = 1024
AXES = ("model",)


def links(bench: Bench):
    """Bytes a second that a device sends in each kind of collective, by size of the whole buffer.

    The whole is the result of an all-gather and the operand of the others. A rate counts the bytes
    that have to move, so it can be set beside a data sheet's rate of one direction.
    """
    devices = bench.all.devices
    if devices == 1:
        print("links: one device, nothing to measure", flush=True)
        return
    for size in bench.sizes.buffers:
        rows = max(devices, size // (4 * WIDTH) // devices * devices)
        for kind in ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
            whole = 4 * WIDTH * rows
            local = rows // devices if kind == "all-gather" else rows
            result = measure(_exchange(bench.all, kind), [_ones(bench.all, local)])
            operand = 4 * WIDTH * local
            sent = ring_bytes(kind, operand, whole, devices)
            if kind == "ragged-all-to-all":  # here a device keeps as much as it sends to another
                sent = ring_bytes("all-to-all", operand, whole, devices)
            rate = sent / result.seconds
            bench.rates[kind] = max(rate, bench.rates.get(kind, 0.0))
            bench.add(
                "links",
                f"{kind} {whole / 2**20:g} MiB",
                ms=1e3 * result.seconds,
                gb_s=rate / 1e9,
                spread=(result.high - result.low) / result.seconds,
                compile_s=result.compile,
            )


def _ones(side: Side, local: int) -> jax.Array:
    make = functools.partial(jnp.ones, (local, WIDTH), jnp.float32)
    return jax.jit(
        jax.shard_map(make, mesh=side.mesh, in_specs=(), out_specs=P("model"), check_vma=False)
    )()


def _exchange(side: Side, kind: str):
    devices = side.devices

    def one(x):
        if kind == "all-gather":
            return collectives.all_gather(x, AXES, 0)
        if kind == "reduce-scatter":
            return collectives.reduce_scatter(x, AXES, 0)
        if kind == "all-to-all":
            return collectives.all_to_all(x, AXES, 0, 0)
        part = x.shape[0] // devices
        begin_P = jnp.arange(devices, dtype=jnp.int32) * part
        size_P = jnp.full((devices,), part, jnp.int32)
        mine_P = jnp.full((devices,), collectives.index(AXES) * part, jnp.int32)
        buffer = jnp.zeros_like(x)
        return collectives.ragged_all_to_all(x, buffer, begin_P, size_P, mine_P, size_P, AXES)

    def exchange(x):
        # A small result, so that what is timed and kept is the exchange alone.
        moved = jax.lax.optimization_barrier(one(x))
        return moved[:1, :1]

    return jax.shard_map(
        exchange, mesh=side.mesh, in_specs=P("model"), out_specs=P("model"), check_vma=False
    )


L, K = 64, 4  # of the check below
ROUTINGS = ("uniform", "one shard", "one empty", "padding")


def dispatch_check(bench: Bench):
    """Every form against one device in float64, and the gradients of "ragged", in float32.

    Half of the tokens are padding with NaN in one case; all go to one device, or none to the first,
    in others.
    """
    devices = bench.all.devices
    for tokens, local in ((1, 7), (63, 112)):
        forward = jax.jit(_spread(bench.all, *FORMS))
        rng = np.random.default_rng(tokens)
        for routing in ROUTINGS:
            arrays = _draw(rng, devices * tokens, devices, local, routing)
            want_NL = _oracle(*arrays)
            got_FNL = np.asarray(forward(*_put(bench.all, *arrays)))
            error = max(rms(got_NL, want_NL) for got_NL in got_FNL)
            name = f"{routing}, {tokens} x {local}"
            bench.add("dispatch", name, ok=bool(error <= 1e-5), rms=error, forms=list(FORMS))
    z_NL, ids_Nk, weights_Nk, w_ELL = _draw(rng, devices * 8, devices, 7, "one empty")
    pull_NL = rng.normal(size=z_NL.shape).astype(np.float32)

    def gradients(side: Side):
        step = _spread(side, "ragged")
        z, ids, weights, w, pull = _put(side, z_NL, ids_Nk, weights_Nk, w_ELL, pull_NL)

        def loss(z, weights, w):
            return (step(z, ids, weights, w) * pull).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(z, weights, w)

    pairs = zip(gradients(bench.all), gradients(bench.one), strict=True)
    error = max(rms(got, want) for got, want in pairs)
    bench.add("dispatch", "gradient of ragged", ok=bool(error <= 1e-5), rms=error)


def _spread(side: Side, *forms: str):
    """(z, ids, weights, w) -> [N, L], or [forms, N, L] of several forms."""
    axes, own = side.layout.experts, P("model")

    def step(z_NL, ids_Nk, weights_Nk, w_ELL):
        count = w_ELL.shape[0] * collectives.size(axes)

        def compute(z_ML, ids_Mk, weights_Mk):
            held_MkE = ids_Mk[:, :, None] == jnp.arange(w_ELL.shape[0], dtype=jnp.int32)
            scale_ME = jnp.where(held_MkE, weights_Mk[:, :, None], 0.0).sum(1)
            # A row without a local id may hold anything, and must not use it.
            z_ML = jnp.where(held_MkE.any((1, 2))[:, None], z_ML, 0.0)
            return jnp.einsum("me,ml,elo->mo", scale_ME, z_ML, w_ELL, precision="highest")

        rows = (z_NL, ids_Nk, weights_Nk)
        found = [dispatch(form, axes, *rows, count, compute) for form in forms]
        return found[0] if len(forms) == 1 else jnp.stack(found)

    out = own if len(forms) == 1 else P(None, "model")
    return jax.shard_map(step, mesh=side.mesh, in_specs=own, out_specs=out, check_vma=False)


def _put(side: Side, *arrays: np.ndarray) -> list[jax.Array]:
    return [jax.device_put(a, NamedSharding(side.mesh, P("model"))) for a in arrays]


def _draw(rng, count, shards, local, routing):
    experts = shards * local
    z_NL = rng.normal(size=(count, L)).astype(np.float32)
    weights_Nk = rng.uniform(0.1, 1.0, size=(count, K)).astype(np.float32)
    w_ELL = rng.normal(size=(experts, L, L)).astype(np.float32)
    allowed = {
        "one shard": np.arange(local) + local * (shards // 2),
        "one empty": np.arange(local, experts),
    }.get(routing, np.arange(experts))
    if not len(allowed):
        allowed = np.arange(experts)
    ids_Nk = allowed[np.argsort(rng.uniform(size=(count, len(allowed))), axis=1)]
    ids_Nk = ids_Nk[:, :K].astype(np.int32)
    if routing == "padding":
        padding_N = rng.uniform(size=count) < 0.5
        ids_Nk[padding_N], z_NL[padding_N], weights_Nk[padding_N] = -1, np.nan, np.nan
        ids_Nk[-1, 0] = experts  # outside on the other side
    return z_NL, ids_Nk, weights_Nk, w_ELL


def _oracle(z_NL, ids_Nk, weights_Nk, w_ELL):
    r_NL = np.zeros(z_NL.shape)
    for n, j in np.argwhere((ids_Nk >= 0) & (ids_Nk < len(w_ELL))):
        expert_LL = w_ELL[ids_Nk[n, j]].astype(np.float64)
        r_NL[n] += weights_Nk[n, j] * (z_NL[n].astype(np.float64) @ expert_LL)
    return r_NL
