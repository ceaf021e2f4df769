"""Every shipped TPU layout compiles the whole 93-layer model for its topology, and fits."""

import importlib.util
import json
import logging
import os
import subprocess
import sys

import pytest

from k3jax import plan
from k3jax.config import Config
from sharding import Layout
from sharding.compile import ENVIRONMENT
from sharding.report import HloCollective

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs the extra aot (libtpu, Linux)"
    ),
]

MODEL = "kimi-k3.1-pro"
BY_COMMAND = "v5p-64-ep64"  # a compilation takes 40 s of a CPU core: no layout is compiled twice
LAYOUTS = [n for n in Layout.shipped() if Layout.load(n).topology and n != BY_COMMAND]
MILLION = {"v5p-64-long"}  # planned for eight sequences of 1,048,576 tokens
TEMPORARIES, HOST_BYTES = 1e9, 4e9
ONE_EXPERT = 3 * 3584 * 3072 * 2  # bytes in bfloat16: 66 MB


def compiled(name: str, **step) -> plan.Plan:
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    made = plan.plan(MODEL, Config.preset(MODEL), Layout.load(name), compile=True, **step)
    c = made.compiled
    assert c is not None
    print(f"\n{name} {step}: {c.seconds:.0f} s, temporaries {c.temporary_bytes / 1e9:.3f} GB, "
          f"total {c.total_bytes / 1e9:.2f} GB, host {c.host_peak_bytes / 1e9:.2f} GB")  # fmt: skip
    assert made.fits, made.verdict()
    assert made.agreement == pytest.approx(1, abs=plan.AGREEMENT)
    assert plan.unlisted_collectives(made) == []
    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_decode(name, caplog):
    step = {"batch": 8, "context": 1_048_576} if name in MILLION else {"batch": 64}
    with caplog.at_level(logging.DEBUG, "k3jax.ops"):
        made = compiled(name, **step)
    c = made.compiled
    for op in ("experts ", "attention_residuals "):
        choices = [r.args[-2:] for r in caplog.records if r.msg.startswith(op)]
        # The plan's own list of collectives is traced on the host.
        chosen = [name for name, reason in choices if reason != "no kernel for cpu"]
        assert len(chosen) >= 6  # bodies of layers
        assert set(chosen) == {"mosaic_tpu"}
    check_decode(made.layout, made.step.context, c.temporary_bytes, c.collectives)


def check_decode(layout, context, temporary_bytes, collectives):
    """Neither experts nor caches are copied, and no cache is gathered: what is gathered is smaller
    than one layer's index keys of a device, but for weights that the layout stores in parts."""
    assert temporary_bytes <= TEMPORARIES
    if not layout.over("embed"):
        rows = context // layout.size(layout.cache_sequence)
        assert max(c.bytes for c in collectives if c.kind == "all-gather") < rows * 128 * 2


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_the_command_in_a_process_of_its_own(step):
    """Also the host memory of a compilation, which a process that ran other tests cannot tell."""
    batch = {"decode": "64", "prefill": "8"}[step]
    command = [sys.executable, "-m", "k3jax.cli", "plan", "--model", MODEL, "--layout"]
    options = [BY_COMMAND, "--step", step, "--batch", batch, "--compile", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout)
    assert made["fits"]
    compiled = made["compiled"]
    print(f"\n{step}: {compiled['seconds']:.0f} s, {compiled['host_peak_bytes'] / 1e9:.2f} GB")
    assert compiled["host_peak_bytes"] <= HOST_BYTES
    assert compiled["unlisted"] == []
    assert compiled["argument_agreement"] == pytest.approx(1, abs=plan.AGREEMENT)
    assert "by the compiler" in made["verdict"]
    if step == "decode":
        collectives = [HloCollective(**c) for c in compiled["collectives"]]
        context, temporary_bytes = made["step"]["context"], compiled["temporary_bytes"]
        check_decode(Layout.load(BY_COMMAND), context, temporary_bytes, collectives)
        assert temporary_bytes < ONE_EXPERT  # in bfloat16; measured 28 MB
        gathered = max(c.bytes for c in collectives if c.kind == "all-gather")
        one_layer_of_keys = 8 * 131072 * 128 * 2
        assert gathered < one_layer_of_keys / 100  # measured 150,528
        caches = ("latents", "index keys", "KDA state", "conv tails")
        held = sum(made["memory_bytes"][name] for name in caches)
        assert compiled["alias_bytes"] == pytest.approx(held, rel=1e-3)  # all in place
