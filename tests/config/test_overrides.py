"""Each mistake on the command line gives one line."""

from pathlib import Path

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError


def complaints(*overrides: str, config_dir: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_dir)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seq=512k", "seq", 524288),
        ("seq=0.5M", "seq", 524288),
        ("seq=1m", "seq", 1 << 20),
        ("seq=524288", "seq", 524288),
        ("seq=524_288", "seq", 524288),
        (" seq = 8k ", "seq", 8192),
        ("+seq=8k", "seq", 8192),
        ("++seq=8k", "seq", 8192),
        ("train.steps=1e3", "train.steps", 1000),
        ("optim.lr=1", "optim.lr", 1.0),
        ("optim.lr=1e-5", "optim.lr", 1e-5),
        ("optim.lr=${optim.min_lr_ratio}", "optim.lr", compose().optim.min_lr_ratio),
        ("optim.betas=[0.8, 0.9]", "optim.betas", (0.8, 0.9)),
        ("optim/lr=0.5", "optim.lr", 0.5),
        ("topology.workers=3", "topology.workers", 3),
        ("topology.workers=auto", "topology.workers", "auto"),
        ("model.rope.factor=4", "model.rope.factor", 4.0),
        ("model.rope.original_max_position=32k", "model.rope.original_max_position", 32768),
        ("train.compile=TRUE", "train.compile", True),
        ("train.init_from=none", "train.init_from", None),
        ("train.init_from=null", "train.init_from", None),
        ("train.activation_checkpoint=none", "train.activation_checkpoint", "none"),
        ("run.name=007", "run.name", "007"),
        ("run.name='x'", "run.name", "x"),
        ("run.name=1_000", "run.name", "1_000"),
    ],
)
def test_a_value_is_converted_to_the_type_of_its_key(override, key, value):
    from mtrain_cli.config import keys

    found = keys.values(compose([override]))[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "name", ["it's", "a b", "a#b", "a;b", "a,b", "(1)", "[x", "{y}", "k=v", "10%", "ünï", "q?x=1"]
)
def test_paths_with_special_characters_need_no_extra_quotes(tmp_path, name):
    (tmp_path / name).write_text("text")
    assert compose(["data=text", f"data.path={tmp_path}/{name}"]).data.path == f"{tmp_path}/{name}"


def test_a_home_path_and_an_environment_variable_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    assert compose(["data=text", "data.path=~/x"]).data.path == f"{tmp_path}/x"
    assert compose(["data=text", "data.path=${oc.env:HOME}/x"]).data.path == f"{tmp_path}/x"


def test_the_last_override_of_a_key_and_of_a_group_wins_in_any_order():
    config = compose(["model.num_layers=3", "seq=4k", "model=tiny", "seq=8k", "model=qwen0.5b"])
    assert (config.model.name, config.model.num_layers, config.seq) == ("qwen0.5b", 3, 8192)


def test_all_mistakes_are_reported_together_without_their_consequences():
    found = complaints(
        "seq=512q",
        "optim.lr=-1",
        "modle=tiny",
        "data=text",
        "data.pth=x",
        "topology.workers=3",
        "topology.context_parallel=2",
    )
    # data=text also lacks data.path, but data.pth is a typo for it.
    assert [line.partition(":")[0] for line in found] == [
        "modle=tiny",
        "data.pth=x",
        "seq=512q",
        "optim.lr=-1",
        "topology.context_parallel=2",
    ]


def test_a_file_with_a_former_name_gets_the_current_one(tmp_path):
    (tmp_path / "sparsity").mkdir()
    file = tmp_path / "sparsity/mine.yaml"
    file.write_text("defaults: [vertical_slash]\nmin_bars: 4\n")
    (found,) = complaints("sparsity=mine", config_dir=tmp_path)
    hint = "(did you mean sparsity.min_columns?)"
    assert found == f"{file}: no key is called sparsity.min_bars {hint}"


def test_a_secret_on_the_command_line_is_refused_and_not_repeated():
    assert complaints("MTRAIN_SECRET=abc") == (
        "MTRAIN_SECRET: belongs in the environment; others can read command lines",
    )
