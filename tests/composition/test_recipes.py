"""Recipes override the defaults, and the command line overrides recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain_cli.attention.kernel import IndexRequest, KernelRequest
from mtrain_cli.attention.kernel_registry import survey
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import SlidingWindow
from mtrain_cli.commands.train import require_labels
from mtrain_cli.composition.compose import compose, resume
from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.resolved_file import load, save
from mtrain_cli.config.schema import ConfigError

RECIPES = [name for name in open_groups().options["recipe"] if name != "none"]
PAPER, LLAMA = "mtraining_qwen3b_512k", "mtraining_llama8b_512k"
CLUSTER = ["topology.device=cuda", "topology.workers=32", "topology.gpus_per_node=8"]


def complaints(words: list[str], **options: bool) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(words, **options)
    return list(caught.value.problems)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes_for_a_plan_and_survives_saving(name: str, tmp_path: Path) -> None:
    config = compose([f"recipe={name}"], plan=True)
    assert config != compose()
    save(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == config


def test_the_papers_recipe_has_the_papers_numbers() -> None:
    config = compose([f"recipe={PAPER}"], plan=True)
    assert (config.model.name, config.seq, config.train.global_batch, config.train.dtype) == (
        "qwen3b",
        524288,
        64,
        "bfloat16",
    )
    assert (
        config.model.rope.scaling,
        config.model.rope.factor,
        config.model.rope.original_max_position,
    ) == ("yarn", 32, 32768)
    assert config.sparsity.pattern == "vertical_slash"
    # 1B tokens.
    assert config.train.steps * config.train.global_batch * config.seq == pytest.approx(
        1e9, rel=0.01
    )
    assert (config.optim.lr, config.optim.schedule, config.optim.warmup_steps) == (
        2e-5,
        "constant",
        0,
    )
    # From the official scripts: Adam's betas, and the pattern flex_0.90 with at most 4096 columns.
    assert config.optim.betas == (0.9, 0.95)
    sparsity = config.sparsity
    assert (sparsity.p_v, sparsity.p_s, sparsity.max_columns) == (0.9, 0.9, 4096)


@pytest.mark.parametrize("name", [PAPER, LLAMA])
def test_the_papers_recipes_use_the_papers_system(name: str) -> None:
    config = compose([f"recipe={name}", *CLUSTER], plan=True)
    topology = config.topology
    # Sections 4.1, 4.2 and B.1: stripes and index blocks of 64 tokens, inner and outer rings of KV.
    assert (config.layout, topology.block_size, config.sparsity.block) == ("striped", 64, 64)
    assert (topology.exchange, topology.circulates) == ("hierarchical_ring", "kv")
    # Appendix C: ZeRO-2 with offloading, bfloat16 gradients, recomputation, one group of all GPUs.
    assert (config.train.shard, config.optim.offload, config.train.reduce_dtype) == (
        "gradients",
        True,
        "bfloat16",
    )
    assert (config.train.activation_checkpoint, config.train.memory, config.train.global_batch) == (
        "full",
        "manual",
        64,
    )
    assert not config.data.document_mask
    for capability in ((8, 0), (9, 0)):
        index = IndexRequest(config.sparsity.block, bitmap=False)
        request = KernelRequest(
            "cuda",
            capability,
            "bfloat16",
            128,
            config.model.num_heads,
            config.model.num_kv_heads,
            index=index,
        )
        refused = dict(survey(request))
        assert refused["triton"] is None
        assert refused["flash4"] is not None
    assert refused["flash4"].endswith(
        "computes blocks of 128, not sparsity.block=64, which train.kernel=triton computes"
    )


def test_the_llama_recipe_is_2b_tokens_of_fixed_samples() -> None:
    config = compose([f"recipe={LLAMA}"], plan=True)
    assert (config.model.name, config.seq, config.data.kind) == ("llama8b", 524288, "mds")
    assert config.train.steps * config.train.global_batch * config.seq == pytest.approx(
        2e9, rel=0.01
    )
    assert all(name.endswith("-524288") for name in config.data.mix), "every sample is 512K tokens"
    assert (config.optim.lr, config.optim.schedule, config.optim.warmup_steps) == (
        2e-5,
        "constant",
        0,
    )


def test_the_prolong_recipe_has_prolongs_numbers() -> None:
    config = compose(["recipe=prolong_llama8b_512k"], plan=True)
    assert (config.model.name, config.seq, config.model.rope.theta, config.model.rope.scaling) == (
        "llama8b",
        524288,
        128e6,
        "none",
    )
    # 8M tokens a step, 20B tokens in all, a tenth of the steps to warm up.
    assert config.train.global_batch * config.seq == 8 << 20
    assert config.train.steps * config.train.global_batch * config.seq == pytest.approx(
        20e9, rel=0.05
    )
    optim = config.optim
    assert (optim.lr, optim.betas, optim.weight_decay, optim.schedule, optim.min_lr_ratio) == (
        5e-6,
        (0.9, 0.95),
        0.1,
        "cosine",
        0.1,
    )
    assert optim.warmup_steps == config.train.steps / 10
    assert config.data.document_mask


def test_the_sliding_window_recipe_has_a_full_layer_in_every_six() -> None:
    config, dense = (
        compose([f"recipe={name}"], plan=True)
        for name in ("sliding_window_qwen3b_512k", "qwen3b_512k")
    )
    assert (config.seq, config.mask) == (524288, SlidingWindow(4096, full_every=6))
    assert [layer for layer in range(36) if config.mask.is_full(layer)] == [5, 11, 17, 23, 29, 35]
    assert (config.topology.exchange, config.topology.layout) == ("group_cast", "zigzag")
    assert config.sparsity.pattern == "dense"
    assert (config.model, config.data, config.optim) == (dense.model, dense.data, dense.optim)
    assert config.train == dense.train


def test_every_label_of_the_video_recipe_counts() -> None:
    config = compose(["recipe=video"], plan=True)
    mask = MaskRule.of(config).undivided(config.seq, config.seq)
    assert not mask.shows_later_keys().any()
    assert mask.intervals == 4
    require_labels(config)
    # A query in the middle of a late frame sees 16 rows of three frames, and 8 rows and itself of
    # its own.
    query = (40 * 32 + 16) * 32 + 7
    assert (mask.high - mask.low)[:, query].tolist() == [512, 512, 512, 8 * 32 + 8]
    around = compose(["recipe=video", "mask.causal=false"], plan=True)
    with pytest.raises(
        ConfigError, match=r"shows every query its next token.*Give mask\.causal=true"
    ):
        require_labels(around)


def test_the_command_line_overrides_a_recipe() -> None:
    config = compose(
        [
            "optim.lr=1e-3",
            "recipe=stdlib_64k",
            "model=qwen0.5b",
            "sparsity=dense",
            "seq=4k",
            "data.eval_sequences=2",
        ],
        plan=True,
    )
    assert (config.optim.lr, config.model.name, config.sparsity.pattern) == (
        1e-3,
        "qwen0.5b",
        "dense",
    )
    assert (config.seq, config.data.eval_sequences) == (4096, 2)
    assert (config.train.eval_every, config.topology.device) == (100, "cuda"), (
        "the recipe sets what the command line does not"
    )
    assert config.model.hidden_size == 896, (
        "a group on the command line replaces all that the recipe says about it"
    )


def test_each_required_value_is_one_line(tmp_path: Path) -> None:
    data, weights = complaints([f"recipe={PAPER}"])
    assert data.startswith(
        f"data.path=REQUIRED: recipe={PAPER} leaves it to you: file or folder of the corpus"
    )
    assert weights.startswith(
        f"train.init_from=REQUIRED: recipe={PAPER} leaves it to you: Hugging Face folder"
    )
    assert weights.endswith("give train.init_from=..., or train.init_from=null to do without")
    config = compose([f"recipe={PAPER}", f"data.path={tmp_path}", "train.init_from=null"])
    assert (config.data.path, config.train.init_from) == (str(tmp_path), None)
    assert complaints([f"recipe={PAPER}", "data.path=/none", "train.init_from=null"])[0].startswith(
        "data.path=/none: no such file"
    )
    # A plan tolerates missing values, and no other mistake.
    assert complaints([f"recipe={PAPER}", "data.path=/none"], plan=True)[0].startswith(
        "data.path=/none: no such file"
    )
    assert complaints(["data=text"], plan=True)[0].startswith(
        "data.path is not set: data=text needs it"
    )


def test_a_resumed_run_keeps_its_recipe() -> None:
    config = compose(["recipe=stdlib_8k"])
    assert resume(config, ["train.steps=100"]).train.steps == 100
    with pytest.raises(ConfigError, match=r"^recipe=stdlib_64k: a resumed run keeps its recipe"):
        resume(config, ["recipe=stdlib_64k"])


def test_the_command_line_of_a_recipe_run_can_be_repeated(tmp_path: Path) -> None:
    words = ["recipe=stdlib_8k", "seq=512", "train.steps=2", "optim.lr=0.5", "run.name=r"]
    config = compose(words)
    assert resume(config, words) == config
    assert resume(config, [*words, "train.steps=5"]).train.steps == 5
    with pytest.raises(ConfigError) as caught:
        resume(config, ["recipe=stdlib_8k", "train.steps=5"])
    (line,) = caught.value.problems
    assert "this one sets seq=8192; start a new run" in line
    own = [
        f"recipe={PAPER}",
        f"data.path={tmp_path}",
        "train.init_from=null",
        "sparsity=moba",
        "topology.block_size=128",
    ]
    config = compose(own, plan=True)
    assert resume(config, own) == config
    again = [f"recipe={PAPER}", "sparsity=moba", "topology.block_size=128"]
    assert resume(config, again) == config, "values that a recipe requires come from the run"


def test_own_recipes_are_read_from_config_dir(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults:\n  - override /sparsity: moba\nseq: 2k\noptim:\n  "
        "lr: 0.5\n"
    )
    config = compose(["recipe=mine"], tmp_path)
    assert (config.seq, config.optim.lr, config.sparsity.pattern) == (2048, 0.5, "moba")
