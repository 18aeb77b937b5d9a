import dataclasses
import json
from pathlib import Path

import pytest

from mtrain_cli.composition.compose import compose, resume
from mtrain_cli.config.cluster import shipped
from mtrain_cli.config.groups import open_groups, summary
from mtrain_cli.config.resolved_file import load, save
from mtrain_cli.config.schema import ConfigError

OPTIONS = [
    (group, option) for group, options in open_groups().options.items() for option in options
]


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
        [f"data.path={tmp_path}"] if option in ("text", "chat", "tokens", "mds") else []
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


def test_the_relative_file_of_a_cluster_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(shipped()["a100_4x8"].read_text())
    Path("h200_1x8").mkdir()
    for given, kept in (
        ("mine.yaml", f"{tmp_path}/mine.yaml"),
        ("./mine.yaml", f"{tmp_path}/mine.yaml"),
        ("h200_1x8", "h200_1x8"),
        ("auto", "auto"),
    ):
        assert compose([f"topology.cluster={given}"]).topology.cluster == kept


def test_an_invalid_config_dir_is_refused(tmp_path):
    assert complaints(compose, [], tmp_path / "no") == (
        f"--config-dir {tmp_path}/no: no such folder",
    )
    (line,) = complaints(compose, [], Path(__file__))
    assert line == f"--config-dir {__file__}: is a file; give a folder"
    assert "holds no group" in complaints(compose, [], tmp_path)[0]
    (tmp_path / "config.yaml").write_text("a: [")
    assert complaints(compose, [], tmp_path)[0].startswith(
        f"{tmp_path}/config.yaml: cannot be read"
    )


def test_block_size_is_checked_when_auto_chooses_stripes():
    (line,) = complaints(
        compose, ["sparsity=vertical_slash", "topology.block_size=64", "sparsity.block=128"]
    )
    assert line.startswith("topology.block_size=64: must be a multiple of sparsity.block=128")


@pytest.mark.parametrize("degree", ["context_parallel", "tensor_parallel", "pipeline_parallel"])
def test_a_word_instead_of_a_degree_says_nothing_about_blocks(degree):
    words = ["seq=512", "topology.workers=8", f"topology.{degree}=four"]
    (line,) = complaints(compose, words)
    assert line.startswith(f"topology.{degree}=four: expected a whole number")
    (line,) = complaints(compose, [*words[:2], f"topology.{degree}=0"])
    assert line.startswith(f"topology.{degree}=0: must be")
    assert len(complaints(compose, ["seq=512", "topology.workers=8"])) == 1


def test_a_wrong_number_of_experts_is_the_only_line_about_them():
    words = ["model=tiny_moe", "model.moe.experts=many", "topology.expert_parallel=2"]
    (line,) = complaints(compose, [*words, "train.balance_loss=0.1"])
    assert line.startswith("model.moe.experts=many: expected a whole number")


def test_block_size_is_not_checked_for_zigzag():
    words = ["seq=512", "topology.workers=8"]
    assert complaints(compose, words)[0].startswith(
        "topology.block_size=128: seq=512 has only 4 such blocks for 8 workers"
    )
    one = complaints(compose, ["seq=128", "topology.workers=8"])[0]
    assert "has only 1 such block for 8 workers" in one
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
        ("mask=sliding_window", "mask"),
        ("mask.window=1k", "mask.window"),
        ("train.lora.alpha=64", "train.lora.alpha"),
    ],
)
def test_a_change_of_model_data_or_mask_is_refused_in_one_line(saved, word, key):
    (line,) = complaints(resume, saved, [word])
    assert line.startswith(f"{key}=")
    assert "a resumed run keeps its" in line
    assert line.endswith("start a new run to change it")


@pytest.mark.parametrize(
    ("mask", "same", "other"),
    [
        ("sliding_window", "window=64", "window=128"),
        ("sliding_window", "full_every=2", "full_every=0"),
        ("video", "causal=true", "causal=false"),
    ],
)
def test_a_resumed_run_keeps_the_keys_of_its_mask(mask, same, other):
    sizes = ["mask.frames=8", "mask.height=16", "mask.width=16"] if mask == "video" else []
    run = compose([f"mask={mask}", f"mask.{same}", *sizes, "seq=2k", "data.document_mask=false"])
    assert resume(run, [f"mask.{same}"]) == run
    key = other.partition("=")[0]
    (line,) = complaints(resume, run, [f"mask.{other}"])
    assert line.startswith(f"mask.{other}: a resumed run keeps its mask.{key}=")


def test_mistakes_on_resuming_are_reported_like_any_other(saved):
    assert complaints(resume, saved, ["train.step=3"])[0].endswith("(did you mean train.steps=3?)")
    assert complaints(resume, saved, ["train.steps=0"]) == ("train.steps=0: must be at least 1",)


def test_a_resume_does_not_need_the_initial_weights(saved):
    moved = dataclasses.replace(
        saved, train=dataclasses.replace(saved.train, init_from="/no/longer/there")
    )
    assert resume(moved, ["train.steps=11"]).train.steps == 11


def complaints(function, *arguments, **named) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **named)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
