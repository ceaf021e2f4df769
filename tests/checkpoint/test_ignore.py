"""The ignore and target lists against the tensors that are there."""

import json

import pytest
from checkpoint_files import GOLDEN, abstract, copy, edit_config

from k3jax.checkpoint import ignore, load, names
from k3jax.checkpoint.inspect import inspect
from k3jax.config import Config
from k3jax.errors import CheckpointError

Q = "language_model.model.layers.1."
PUBLISHED = json.loads((GOLDEN / "k3_tiny" / "config.json").read_text())["text_config"][
    "quantization_config"
]["ignore"]


def with_lists(directory, ignored=None, targets=None):
    def change(values):
        section = values["text_config"]["quantization_config"]
        if ignored is not None:
            section["ignore"] = ignored
        if targets is not None:
            section["config_groups"]["group_0"]["targets"] = targets

    return edit_config(directory, change)


@pytest.mark.parametrize("name", ["k3_tiny", "k31_tiny"])
def test_published_list_on_every_linear(name):
    config = Config.from_hf(GOLDEN / name)
    found = ignore.decisions(config, names.tensors(config))
    unlisted = {"block_sparse_moe.gate", "routed_expert_down_proj", "routed_expert_up_proj"}
    unlisted |= {"self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj"}
    assert len(found) > 450
    for module, decision in found.items():
        assert decision.quantised == (".experts." in module), module
        trap = any(module.endswith(end) for end in unlisted)
        assert (decision.ignored_by is None) == (decision.quantised or trap), module
    indexer = [module for module in found if ".indexer." in module]
    assert len(indexer) == (9 if name == "k31_tiny" else 0)
    assert all(found[module].ignored_by == PUBLISHED[0] for module in indexer)
    assert ignore.check(config, names.tensors(config)) == ([], [])


@pytest.mark.parametrize(
    ("entry", "module", "hit"),
    [
        ("re:.*self_attn.*", Q + "self_attn.q_proj", True),
        ("re:self_attn.*", Q + "self_attn.q_proj", False),
        (".*self_attn.*", Q + "self_attn.q_proj", False),
        (Q + "self_attn.q_proj", Q + "self_attn.q_proj", True),
        (Q + "self_attn", Q + "self_attn.q_proj", False),
        ("lm_head", "language_model.lm_head", True),
        (PUBLISHED[2], "language_model.model.layers.0.mlp.up_proj", True),
        (PUBLISHED[2], Q + "block_sparse_moe.shared_experts.up_proj", False),
    ],
)  # fmt: skip
def test_matching(entry, module, hit):
    assert bool(ignore.matcher(entry)(module)) == hit


def test_over_broad_pattern(tmp_path):
    config = with_lists(copy("k3_tiny", tmp_path), ["re:.*"])
    name = Q + "block_sparse_moe.experts.0.w1.weight_packed"
    with pytest.raises(CheckpointError, match=r"is quantised, yet the ignore list names it") as e:
        load(tmp_path, abstract(config), config)
    assert name in str(e.value)
    assert "'re:.*'" in str(e.value)


def test_one_half_of_a_fused_projection(tmp_path):
    config = with_lists(copy("k3_tiny", tmp_path), [*PUBLISHED, "re:.*experts\\.5\\.w1$"])
    with pytest.raises(CheckpointError, match=r"experts\.5\.w1\.weight_packed is quantised"):
        load(tmp_path, abstract(config), config)
    table = set(names.tensors(config)) - {Q + "block_sparse_moe.experts.5.w1.weight_packed"}
    table |= {Q + "block_sparse_moe.experts.5.w1.weight"}
    problems, _ = ignore.check(config, table)
    assert any("experts.5.w3 is quantised and" in line and "one array" in line for line in problems)


def test_entries_that_match_nothing(tmp_path):
    copy("k3_tiny", tmp_path)
    config = with_lists(
        tmp_path, [*PUBLISHED, "re:.*ghost.*", "lm_heed"], ["Linear", "re:.*phantom"]
    )
    _, unmatched = ignore.check(config, names.tensors(config))
    assert unmatched == ["ignore entry 're:.*ghost.*'", "ignore entry 'lm_heed'",
                         "target 're:.*phantom'"]  # fmt: skip
    assert sum("matches nothing" in note for note in inspect(tmp_path).notes) == 3
    load(tmp_path, abstract(config), config)
    with pytest.raises(CheckpointError, match="3 problems") as error:
        load(tmp_path, abstract(config), config, strict_ignore=True)
    assert "lm_heed" in str(error.value)


def test_a_pattern_that_is_none(tmp_path):
    config = with_lists(copy("k3_tiny", tmp_path), ["re:(", *PUBLISHED])
    with pytest.raises(CheckpointError, match="not a regular expression"):
        load(tmp_path, abstract(config), config)
