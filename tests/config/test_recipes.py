"""Recipes: they go before the defaults and behind the command line, and say what they need."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import mtrain

from mtrain_cli.config.compose import compose, load, resume, save
from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.schema import ConfigError

RECIPES = [name for name in open_groups().options["recipe"] if name != "none"]
PAPER = "mtraining_qwen3b_512k"


def complaints(words: list[str], **options: bool) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(words, **options)
    return list(caught.value.problems)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes_for_a_plan_and_survives_a_file(name: str, tmp_path: Path) -> None:
    config = compose([f"recipe={name}"], plan=True)
    assert config != compose()
    save(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == config


def test_the_papers_run_has_the_papers_numbers() -> None:
    config = compose([f"recipe={PAPER}"], plan=True)
    assert (config.model.name, config.seq, config.train.global_batch, config.train.dtype) == ("qwen3b", 524288, 64, "bfloat16")
    assert (config.model.rope.scaling, config.model.rope.factor, config.model.rope.original_max_position) == ("yarn", 32, 32768)
    assert config.sparsity.pattern == "vertical_slash"
    # 1B tokens.
    assert config.train.steps * config.train.global_batch * config.seq == pytest.approx(1e9, rel=0.01)
    assert (config.optim.lr, config.optim.schedule, config.optim.warmup_steps) == (2e-5, "constant", 0)
    # Of the scripts: Adam's rates, and the pattern flex_0.90 with at most 4096 columns by the last 64 queries.
    assert config.optim.betas == (0.9, 0.95)
    sparsity = config.sparsity
    assert (sparsity.p_v, sparsity.p_s, sparsity.last_q, sparsity.max_bars, sparsity.block) == (0.9, 0.9, 64, 4096, 128)


def test_prolongs_run_has_prolongs_numbers() -> None:
    config = compose(["recipe=prolong_llama8b_512k"], plan=True)
    assert (config.model.name, config.seq, config.model.rope.theta, config.model.rope.scaling) == ("llama8b", 524288, 128e6, "none")
    # 8M tokens a step, 20B tokens in all, a tenth of the steps to warm up.
    assert config.train.global_batch * config.seq == 8 << 20
    assert config.train.steps * config.train.global_batch * config.seq == pytest.approx(20e9, rel=0.05)
    optim = config.optim
    assert (optim.lr, optim.betas, optim.weight_decay, optim.schedule, optim.min_lr_ratio) == (5e-6, (0.9, 0.95), 0.1, "cosine", 0.1)
    assert optim.warmup_steps == config.train.steps / 10
    assert config.data.document_mask


def test_the_command_line_goes_before_a_recipe_in_keys_and_groups() -> None:
    config = compose(
        ["optim.lr=1e-3", "recipe=stdlib_64k", "model=qwen0.5b", "sparsity=dense", "seq=4k", "data.eval_sequences=2"], plan=True
    )
    assert (config.optim.lr, config.model.name, config.sparsity.pattern, config.seq, config.data.eval_sequences) == (
        1e-3, "qwen0.5b", "dense", 4096, 2,
    )  # fmt: skip
    assert (config.train.eval_every, config.topology.device) == (100, "cuda"), "what was not given is the recipe's"
    assert config.model.hidden_size == 896, "a group from the command line takes the place of all that the recipe says of it"


def test_what_only_the_user_has_is_asked_for_in_one_line_each(tmp_path: Path) -> None:
    data, weights = complaints([f"recipe={PAPER}"])
    assert data.startswith(f"data.path=REQUIRED: recipe={PAPER} leaves it to you: file or folder of the corpus")
    assert weights.startswith(f"train.init_from=REQUIRED: recipe={PAPER} leaves it to you: Hugging Face folder")
    assert weights.endswith("give train.init_from=..., or train.init_from=null to do without")
    config = compose([f"recipe={PAPER}", f"data.path={tmp_path}", "train.init_from=null"])
    assert (config.data.path, config.train.init_from) == (str(tmp_path), None)
    assert complaints([f"recipe={PAPER}", "data.path=/none", "train.init_from=null"])[0].startswith("data.path=/none: no such file")
    # A plan forgives what is missing, and nothing else.
    assert complaints([f"recipe={PAPER}", "data.path=/none"], plan=True)[0].startswith("data.path=/none: no such file")
    assert complaints(["data=text"], plan=True)[0].startswith("data.path=null: data=text needs it")


def test_an_unknown_recipe_names_them_all() -> None:
    (line,) = complaints(["recipe=mtraining"])
    assert line.startswith("recipe=mtraining: no such recipe; options: ")
    assert all(name in line for name in RECIPES)


def test_a_resumed_run_keeps_its_recipe() -> None:
    config = compose(["recipe=stdlib_8k"])
    assert resume(config, ["train.steps=100"]).train.steps == 100
    with pytest.raises(ConfigError, match=r"^recipe=stdlib_64k: a resumed run keeps its recipe"):
        resume(config, ["recipe=stdlib_64k"])


def test_the_line_of_a_run_with_a_recipe_may_be_repeated(tmp_path: Path) -> None:
    words = ["recipe=stdlib_8k", "seq=512", "train.steps=2", "optim.lr=0.5", "run.name=r"]
    config = compose(words)
    assert resume(config, words) == config
    assert resume(config, [*words, "train.steps=5"]).train.steps == 5
    with pytest.raises(ConfigError) as caught:
        resume(config, ["recipe=stdlib_8k", "train.steps=5"])
    (line,) = caught.value.problems
    assert "this one sets seq=8192 (the run: 512); start a new run" in line
    own = [f"recipe={PAPER}", f"data.path={tmp_path}", "train.init_from=null", "sparsity=moba"]
    config = compose(own, plan=True)
    assert resume(config, own) == config
    assert resume(config, [f"recipe={PAPER}", "sparsity=moba"]) == config, "what a recipe leaves open is the run's"


def test_own_recipes_are_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults:\n  - override /sparsity: moba\nseq: 2k\noptim:\n  lr: 0.5\n"
    )
    config = compose(["recipe=mine"], tmp_path)
    assert (config.seq, config.optim.lr, config.sparsity.pattern) == (2048, 0.5, "moba")


def test_recipes_are_listed_shown_and_planned(tmp_path: Path) -> None:
    shown = mtrain(tmp_path, "config", "show", f"recipe/{PAPER}")
    assert shown.returncode == 0, shown.stderr
    assert "model.rope.factor" in shown.stdout
    assert "train.init_from" in shown.stdout
    assert "model.num_layers" in shown.stdout
    assert "optim.eps" not in shown.stdout, "only what the recipe changes"
    planned = mtrain(tmp_path, "train", f"recipe={PAPER}", "topology.workers=8", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "yarn by 32 from 32k tokens" in planned.stdout
    refused = mtrain(tmp_path, "train", f"recipe={PAPER}")
    assert refused.returncode == 2
    assert [line.split("=")[0] for line in refused.stderr.splitlines()] == ["mtrain: data.path", "mtrain: train.init_from"]
    assert not list(tmp_path.iterdir())
