import dataclasses
import json
import re
from pathlib import Path

import pytest

from mtrain_cli import resource_dir
from mtrain_cli.composition.compose import compose, resume
from mtrain_cli.config.groups import open_groups, summary
from mtrain_cli.config.resolved_file import load, save
from mtrain_cli.config.schema import ConfigError

OPTIONS = [
    (group, option) for group, options in open_groups().options.items() for option in options
]


def complaints(function, *arguments, **named) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **named)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


@pytest.fixture
def mine(tmp_path) -> Path:
    """A folder of the user's own groups."""
    folder = tmp_path / "conf"
    (folder / "model").mkdir(parents=True)
    (folder / "model/small.yaml").write_text(
        "# Two layers.\ndefaults: [tiny]\nname: small\nnum_layers: 2\nrope: "
        "{original_max_position: 8k}\n"
    )
    return folder


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def hf_config(folder: Path) -> Path:
    """A Hugging Face folder without weights: composing reads only config.json."""
    shape = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    write(folder, "hf/config.json", json.dumps({"model_type": "llama", **shape}))
    return folder / "hf"


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids="/".join)
def test_every_shipped_option_composes_and_survives_saving(group, option, tmp_path):
    words = [f"{group}={option}"] + (
        [f"data.path={tmp_path}"] if option in ("text", "tokens", "mds") else []
    )
    if (group, option) == ("model", "auto"):
        words.append(f"train.init_from={hf_config(tmp_path)}")
    if option == "prolong512k":
        words.append(f"data.mix={{{tmp_path}: 1}}")
    config = compose(words, plan=True)
    save(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == config
    assert summary(open_groups().options[group][option]), (
        "every option file must open with a comment that describes it"
    )


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    config = compose(["data=text", "data.path=a.txt", "run.dir=out"])
    assert (config.data.path, config.run.dir, config.data.tokenizer) == (
        f"{tmp_path}/a.txt",
        f"{tmp_path}/out",
        "bytes",
    )


# A user's own groups


def test_own_options_inherit_from_shipped_ones(mine):
    config = compose(["model=small"], mine)
    assert (config.model.name, config.model.num_layers, config.model.hidden_size) == (
        "small",
        2,
        compose().model.hidden_size,
    )
    assert config.model.rope.original_max_position == 8192
    assert config.model.rope.theta == compose().model.rope.theta


def test_own_options_are_searched_first(mine):
    shipped = (resource_dir("conf") / "sparsity/dense.yaml").read_text()
    write(mine, "sparsity/dense.yaml", "# Mine.\n" + shipped)
    shipped = (resource_dir("conf") / "optim/adamw.yaml").read_text()
    write(
        mine, "optim/adamw.yaml", re.sub(r"(?m)^warmup_steps: .*$", "warmup_steps: 7777", shipped)
    )
    assert compose([], mine).optim.warmup_steps == 7777
    assert compose([]).optim.warmup_steps != 7777, "the folder must not affect later calls"


@pytest.mark.parametrize("word", ["exp=long", "+exp=long"])
def test_an_own_group_may_set_keys_anywhere(mine, word):
    write(
        mine,
        "exp/long.yaml",
        "# @package _global_\n# Long.\ndefaults:\n  - override /model: small\nseq: 32k\noptim: "
        "{lr: 0.5}\n",
    )
    config = compose([word, "optim.lr=0.25"], mine)
    assert (config.seq, config.model.name, config.optim.lr) == (32768, "small", 0.25)
    assert summary(open_groups(mine).options["exp"]["long"]) == "Long."


def test_an_own_top_file_changes_the_defaults(mine):
    top = (resource_dir("conf") / "config.yaml").read_text()
    (mine / "config.yaml").write_text(
        top.replace("model: tiny", "model: small").replace("seq: 4k", "seq: 2k")
    )
    config = compose(["seed=3"], mine)
    assert (config.model.name, config.seq, config.seed) == ("small", 2048, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: [tiny]\nhiden_size: 3\n",
            "no key is called model.hiden_size (did you mean model.hidden_size?)",
        ),
        ("defaults: [tiny]\nnum_layers: two\n", "model.num_layers=two: expected a whole number"),
        ("defaults: [tiny]\nhead_dim: 3\n", "model.head_dim=3: must be even"),
        (
            "defaults: [nosuch]\n",
            "model=bad: cannot be composed: In 'model/bad': Could not load 'model/nosuch'.",
        ),
        (
            "name: [1\nb: {",
            "model=bad: cannot be composed: expected ',' or ']', but got ':' (bad.yaml, line 2)",
        ),
        (
            "name: ${nothing}\ndefaults: [tiny]\n",
            "model.name: cannot be resolved: Interpolation key 'nothing' not found",
        ),
        ("name: bad\nrope: 3\n", "model.rope=3: holds keys, not a value"),
    ],
)
def test_a_mistake_in_an_own_file_is_one_line(mine, text, message):
    write(mine, "model/bad.yaml", text)
    assert message in complaints(compose, ["model=bad"], mine)[0]


def test_an_own_file_with_missing_keys_is_reported_once(mine):
    write(mine, "optim/mine.yaml", "lr: 0.1\n")
    (line,) = complaints(compose, ["optim=mine"], mine)
    assert line.startswith(
        f"{mine}/optim/mine.yaml: does not give optim.betas, optim.eps, optim.weight_decay and 10 "
        "more"
    )
    assert complaints(compose, ["optim=mine", "seq=512q"], mine)[0].startswith("seq=512q")


def test_a_binary_own_file_is_one_line(mine):
    (mine / "model/bad.yaml").write_bytes(b"\xff\xfe\x00")
    assert complaints(compose, ["model=bad"], mine)[0].startswith("model=bad: cannot be composed: ")
    assert summary(mine / "model/bad.yaml") == ""


def test_an_invalid_config_dir_is_refused(tmp_path):
    assert complaints(compose, [], tmp_path / "no") == (
        f"--config-dir {tmp_path}/no: no such folder",
    )
    assert "holds no group" in complaints(compose, [], tmp_path)[0]
    (tmp_path / "config.yaml").write_text("a: [")
    assert complaints(compose, [], tmp_path)[0].startswith(
        f"{tmp_path}/config.yaml: cannot be read"
    )


# Hydra's global state


def test_composing_works_inside_another_hydra_application(mine):
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(mine), version_base=None):
        outer = GlobalHydra.instance().hydra
        assert compose(["model=small"], mine).model.name == "small"
        assert complaints(compose, ["model=nosuch"])
        assert GlobalHydra.instance().hydra is outer
    assert not GlobalHydra.instance().is_initialized()


def test_composing_leaves_the_working_folder_and_logging_alone():
    import logging

    before = (Path.cwd(), logging.root.level, list(logging.root.handlers))
    compose(["model=qwen3b"])
    assert (Path.cwd(), logging.root.level, list(logging.root.handlers)) == before


def test_time_interpolation_is_resolved_once(tmp_path):
    config = compose(["run.name=run-${now:%H%M%S%f}"])
    save(config, tmp_path / "resolved.yaml")
    assert "$" not in config.run.name
    assert load(tmp_path / "resolved.yaml").run.name == config.run.name


def test_block_size_is_checked_when_auto_chooses_stripes():
    (line,) = complaints(
        compose, ["sparsity=vertical_slash", "topology.block_size=64", "sparsity.block=128"]
    )
    assert line.startswith("topology.block_size=64: must be a multiple of sparsity.block=128")


def test_block_size_is_not_checked_for_zigzag():
    words = ["seq=512", "topology.workers=8"]
    assert complaints(compose, words)[0].startswith(
        "topology.block_size=128: seq=512 has only 4 such blocks for 8 workers"
    )
    assert compose([*words, "data.document_mask=false"]).layout == "zigzag"


# Resuming


def test_resuming_with_a_sparse_pattern_changes_to_stripes():
    dense = compose(["data.document_mask=false"])
    assert (dense.layout, resume(dense, ["sparsity=vertical_slash"]).layout) == (
        "zigzag",
        "striped",
    )
    given = compose(["data.document_mask=false", "topology.layout=zigzag"])
    assert resume(given, ["sparsity=vertical_slash"]).layout == "zigzag"


@pytest.fixture(scope="module")
def saved():
    return compose(
        ["model=tiny", "seq=2k", "train.steps=10", "optim.betas=[0.8,0.9]", "topology.workers=2"]
    )


def test_a_resumed_run_keeps_everything_that_is_not_overridden(saved):
    assert resume(saved) == saved
    longer = resume(saved, ["train.steps=20", "topology.workers=4", "topology.layout=zigzag"])
    assert (longer.train.steps, longer.topology.workers, longer.topology.layout) == (
        20,
        4,
        "zigzag",
    )
    assert (longer.seq, longer.optim.betas) == (2048, (0.8, 0.9)), (
        "group defaults must not replace saved values"
    )
    assert resume(saved, ["topology=local"]).topology.workers == "auto", (
        "naming a group again replaces all its keys"
    )


def test_repeating_the_original_overrides_changes_nothing(saved):
    assert resume(saved, ["model=tiny", "seq=2k", "data=stdlib", "seed=0"]) == saved


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("seq=4k", "seq"),
        ("seed=1", "seed"),
        ("data.shuffle=false", "data.shuffle"),
        ("model.num_layers=2", "model.num_layers"),
    ],
)
def test_a_change_of_model_or_data_is_refused_in_one_line(saved, word, key):
    (line,) = complaints(resume, saved, [word])
    assert line.startswith(f"{key}=")
    assert "a resumed run keeps its" in line
    assert line.endswith("start a new run to change it")


def test_mistakes_on_resuming_are_reported_like_any_other(saved):
    assert complaints(resume, saved, ["train.step=3"])[0].endswith("(did you mean train.steps=3?)")
    assert complaints(resume, saved, ["train.steps=0"]) == ("train.steps=0: must be at least 1",)


def test_a_resume_does_not_need_the_initial_weights(saved):
    moved = dataclasses.replace(
        saved, train=dataclasses.replace(saved.train, init_from="/no/longer/there")
    )
    assert resume(moved, ["train.steps=11"]).train.steps == 11
