"""The small K3.1 Pro that ships: every mechanism of the large one, and it has learned Python."""

import json
from pathlib import Path

import numpy as np

import k3jax
from k3jax.checkpoint import names
from k3jax.config import resolve
from k3jax.train import bits

SNIPPET = '''
def greatest_common_divisor(a, b):
    """Return the greatest common divisor of two integers."""
    while b:
        a, b = b, a % b
    return a


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
'''


def test_it_has_every_mechanism_and_the_stated_size():
    directory = Path(resolve("nano"))
    config = k3jax.Config.preset("nano")
    kinds = [spec.attention for spec in config.layers]
    assert config.architecture == "KimiK31ForConditionalGeneration"
    assert kinds[:8] == ["kda", "kda", "kda", "global"] * 2
    assert kinds[-2:] == ["global", "global"]
    assert config.num_layers % config.attn_res_block_size != 0
    assert config.dsa is not None
    assert config.dsa.topk < 1024
    assert config.moe.num_experts >= 32
    assert config.moe.num_experts_per_token == 4
    assert config.moe.num_shared_experts > 0
    assert config.quantization is not None
    assert 5e6 < names.count_parameters(config).total < 15e6
    assert len(list(directory.glob("*.safetensors"))) >= 2
    assert sum(f.stat().st_size for f in directory.iterdir()) <= 20e6
    figures = json.loads((directory / "training.json").read_text())
    heldout = figures["data"]["sets"]["heldout"]
    xz = 8 * heldout["xz_bytes"]["xz -9"] / heldout["bytes"]
    assert figures["heldout_bits_per_byte"] < 0.75 * xz


def test_it_has_learned_python():
    """Code it never saw costs few bits; the same characters in another order cost many."""
    model, tokenizer = k3jax.load("nano")

    def cost(text: str) -> float:
        ids = [model.config.bos_token_id, *tokenizer.encode(text)]
        rows = np.array([ids[:-1]], np.int32)
        nats = bits.token_nats(model(rows), np.array([ids[1:]], np.int32))
        return float(np.sum(np.asarray(nats, np.float64)) / np.log(2) / len(text.encode()))

    shuffled = "".join(np.random.default_rng(0).permutation(list(SNIPPET)))
    assert cost(SNIPPET) < 1.2
    assert cost(shuffled) > 4
