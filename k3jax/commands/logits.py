"""``k3jax logits``: what a model computes for given ids, for comparison with another program."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from k3jax.commands import prepare_jax
from k3jax.errors import InputError

if TYPE_CHECKING:
    import numpy as np


INSIDE = {  # what is written of what is collected
    "hidden": ("hidden",),
    "routing": ("expert_ids", "expert_weights"),
    "index": ("selected",),
}


@dataclass(frozen=True)
class Logits:
    """Write logits, and where asked the inside of the layers, for an array of token ids.

    The file holds `logits` float32 [B,T,V], with --hidden `hidden` float32 [layers,B,T,D], with
    --routing `expert_ids` int32 and `expert_weights` float32 [moe layers,B,T,k], with --index
    `selected` int32 [global layers,B,T,topk], ascending, -1 where fewer keys exist.
    """

    directory: tyro.conf.Positional[str]
    """A checkpoint directory."""
    tokens: str
    """A .npy file of integers, [B,T] or [T]; every row is a whole sequence."""
    out: str
    """The .npz file to write, whole or not at all."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and the arithmetic."""
    incremental: int | None = None
    """Prefill this many tokens, then decode the rest one by one through the cache. Logits of the
    positions before the last prefilled one, which a prefill does not give, are those of a whole
    forward pass over the prefilled tokens."""
    hidden: bool = False
    """Also write the hidden state after each layer."""
    routing: bool = False
    """Also write the experts of each MoE layer and their weights."""
    index: bool = False
    """Also write the positions that each sparse-attention layer selected (K3.1)."""
    loads: str | None = None
    """Also print how evenly these tokens load the experts, and the devices of this layout (a
    shipped one, or a yaml file)."""

    def run(self) -> None:
        import jax.numpy as jnp
        import numpy as np

        from k3jax.config import Config

        collect = tuple(name for name in ("hidden", "routing", "index") if getattr(self, name))
        out = Path(self.out)
        if not out.parent.is_dir():
            raise InputError(f"--out {self.out}: no directory {out.parent}")
        if out.is_dir():
            raise InputError(f"--out {self.out} is a directory")
        tokens_BT = read_tokens(self.tokens)
        config = Config.from_hf(self.directory)
        check_tokens(tokens_BT, self.tokens, config)
        tokens_BT = tokens_BT.astype(np.int32)
        if self.incremental is not None:
            inside = (*collect, *(("loads",) if self.loads else ()))
            if inside:
                raise InputError(f"--{inside[0]} needs one whole pass: not with --incremental")
            if not 1 <= self.incremental <= tokens_BT.shape[1]:
                raise InputError(
                    f"--incremental {self.incremental} is outside 1..{tokens_BT.shape[1]}, the"
                    f" tokens of a row of {self.tokens}"
                )
        if self.index and config.dsa is None:
            raise InputError(f"--index: {self.directory} has no sparse-attention indexer (K3)")

        layout = None if self.loads is None else load_layout(self.loads)
        if layout is not None:
            slots = config.moe.num_experts + layout.extra_experts
            if slots % layout.size(layout.experts):
                raise InputError(
                    f"--loads {self.loads}: {slots} slots of experts do not divide over "
                    f"{layout.size(layout.experts)} devices"
                )

        import k3jax

        prepare_jax()
        model, _ = k3jax.load(
            self.directory, dtype=jnp.dtype(self.dtype), tokenizer=False, vision=False
        )
        if self.incremental is not None:
            arrays = {"logits": incremental_logits(model, tokens_BT, self.incremental)}
        else:
            names = dict.fromkeys((*collect, *(("routing",) if layout else ())))
            logits_BTV, inside = model.forward(tokens_BT, collect=tuple(names))
            if layout:
                print_loads(model, inside["router_scores"], layout)
            written = {name for kind in collect for name in INSIDE[kind]}
            arrays = {"logits": logits_BTV, **{name: inside[name] for name in sorted(written)}}
        save(
            out,
            {
                name: np.asarray(array if array.dtype == np.int32 else array.astype(np.float32))
                for name, array in arrays.items()
            },
        )


def load_layout(name: str):
    from sharding import Layout, LayoutError

    try:
        return Layout.load(name)
    except LayoutError as error:
        raise InputError(f"--loads: {error}") from None


def print_loads(model, scores_LBTE, layout) -> None:
    """The table of `k3jax.train.load_report` for the router scores of a forward pass."""
    from k3jax.train import balancing, load_report

    loads = load_report.expert_loads(
        scores_LBTE.reshape(scores_LBTE.shape[0], -1, scores_LBTE.shape[-1]),
        balancing.module_bias(model.module),
        model.config.moe.num_experts_per_token,
        shards=layout.size(layout.experts),
        extra=layout.extra_experts,
    )
    load_report.render(loads)


def read_tokens(path: str) -> np.ndarray:
    """Ids [B,T] of a .npy file of rank 1 or 2. Raises InputError, naming file and value."""
    import numpy as np

    try:
        tokens_BT = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        reason = "not written by numpy.save" if "pickle" in str(error) else error
        raise InputError(f"{path} is not a .npy file of integers: {reason}") from None
    if not isinstance(tokens_BT, np.ndarray):
        raise InputError(f"{path} is a .npz archive; a .npy file of one array is needed")
    if tokens_BT.dtype.kind not in "iu":
        raise InputError(f"{path}: dtype {tokens_BT.dtype}, integers are needed")
    if tokens_BT.ndim not in (1, 2):
        raise InputError(f"{path}: rank {tokens_BT.ndim}, [B,T] or [T] is needed")
    if not tokens_BT.size:
        raise InputError(f"{path}: shape {tokens_BT.shape} holds no token")
    return tokens_BT if tokens_BT.ndim == 2 else tokens_BT[None]


def check_tokens(tokens_BT: np.ndarray, path: str, config) -> None:
    """Raises InputError for an id outside the vocabulary or rows longer than the model allows."""
    bad = ((tokens_BT < 0) | (tokens_BT >= config.vocab_size)).nonzero()
    if len(bad[0]):
        row, place = int(bad[0][0]), int(bad[1][0])
        raise InputError(
            f"{path}: token id {tokens_BT[row, place]} at [{row},{place}] is outside"
            f" 0..{config.vocab_size - 1}"
        )
    if tokens_BT.shape[1] > config.max_position_embeddings:
        raise InputError(
            f"{path}: rows of {tokens_BT.shape[1]} tokens exceed max_position_embeddings"
            f" {config.max_position_embeddings}"
        )


def incremental_logits(model, tokens_BT: np.ndarray, prefilled: int) -> np.ndarray:
    """Logits float32 [B,T,V], from position ``prefilled`` - 1 on through the cache."""
    import numpy as np

    batch, length = tokens_BT.shape
    parts = []
    if prefilled > 1:
        before_BTV, _ = model.forward(tokens_BT[:, :prefilled], collect=())
        parts.append(np.asarray(before_BTV, np.float32)[:, :-1])
    cache = model.init_cache(batch, length)
    logits_BV, cache = model.prefill(tokens_BT[:, :prefilled], cache)
    parts.append(np.asarray(logits_BV, np.float32)[:, None])
    for place in range(prefilled, length):
        logits_BV, cache = model.decode(tokens_BT[:, place], cache)
        parts.append(np.asarray(logits_BV, np.float32)[:, None])
    return np.concatenate(parts, axis=1)


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an .npz beside ``path`` and renames it: no half-written file ever has its name."""
    import numpy as np

    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
