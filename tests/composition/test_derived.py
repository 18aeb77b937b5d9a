"""Values that a configuration takes from the folder of the weights and from the data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mtrain_cli.attention.named_masks import SlidingWindow
from mtrain_cli.composition.compose import compose, resume
from mtrain_cli.composition.derived import folder_of
from mtrain_cli.config.resolved_file import load, save
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.model.tokenizer_files import exported_bytes

LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "initializer_range": 0.1,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder without weights: composing reads only config.json."""
    return write(tmp_path / "release", LLAMA)


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    (tmp_path / "text.md").write_text("words\n")
    return ["data=text", f"data.path={tmp_path / 'text.md'}"]


def complaints(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    return list(caught.value.problems)


@pytest.mark.parametrize("named", [[], ["model=auto"]])
def test_the_folder_gives_the_model_if_none_is_named(folder: Path, named: list[str]) -> None:
    model = compose([f"train.init_from={folder}", *named]).model
    assert (model.name, model.family, model.vocab_size, model.hidden_size) == (
        "release",
        "llama",
        512,
        64,
    )
    assert (model.num_layers, model.qkv_bias, model.tie_word_embeddings, model.rms_norm_eps) == (
        2,
        False,
        False,
        1e-5,
    )
    assert (model.rope.theta, model.rope.scaling, model.rope.original_max_position) == (
        500000.0,
        "none",
        2048,
    )


def test_a_given_rotary_setting_overrides_the_folder(folder: Path) -> None:
    rope = compose(
        [f"train.init_from={folder}", "model.rope.theta=2e6", "model.rope.scaling=yarn"]
    ).model.rope
    assert (rope.theta, rope.scaling, rope.original_max_position) == (2e6, "yarn", 2048)
    assert rope.factor == "auto", "the folder's factor belongs to its own scaling"


def test_the_folders_rope_scaling_is_kept(folder: Path) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    write(folder, LLAMA | {"rope_parameters": yarn})
    rope = compose([f"train.init_from={folder}", "model.rope.theta=2e6"]).model.rope
    assert (rope.theta, rope.scaling, rope.factor, rope.original_max_position) == (
        2e6,
        "yarn",
        4.0,
        512,
    )


def test_a_shape_mismatch_is_one_line_with_both_values(folder: Path) -> None:
    line = (
        f"model.num_layers=3 (not 2): the weights of train.init_from={folder} have another shape; "
        "leave out these keys"
    )
    assert complaints(f"train.init_from={folder}", "model.num_layers=3") == [line]
    (line,) = complaints(f"train.init_from={folder}", "model=qwen3b")
    assert line.startswith("model.family=qwen2 (not llama), model.vocab_size=151936 (not 512), ")
    assert line.endswith("leave out model=qwen3b")


def test_a_recipes_model_must_match_the_weights(folder: Path, text: list[str]) -> None:
    line = complaints("recipe=mtraining_qwen3b_512k", f"train.init_from={folder}", *text)[0]
    assert "model.family=qwen2 (not llama)" in line
    assert "leave out mtraining_qwen3b_512k's model=qwen3b" in line
    (line,) = complaints("recipe=stdlib_64k", f"train.init_from={folder}")
    assert "model.hidden_size=512 (not 64)" in line


def test_a_model_of_the_same_shape_is_accepted(folder: Path) -> None:
    shape = ["model.hidden_size=64", "model.num_layers=2", "model.vocab_size=auto"]
    assert compose([f"train.init_from={folder}", *shape]).model.vocab_size == 512


def test_auto_without_a_folder_is_one_line() -> None:
    assert complaints("model=auto") == [
        "model=auto: needs train.init_from=FOLDER; set it, or choose another model"
    ]
    (line,) = complaints("model=auto", "train.init_from=/no/such/folder")
    assert line.startswith("train.init_from=/no/such/folder: no such folder")


def test_an_unsupported_folder_is_reported_when_composing(folder: Path) -> None:
    write(folder, LLAMA | {"hidden_act": "gelu"})
    (line,) = complaints(f"train.init_from={folder}")
    assert 'hidden_act="gelu" is not supported' in line


def test_text_uses_the_folders_tokenizer_unless_another_is_given(
    folder: Path, text: list[str]
) -> None:
    words = [f"train.init_from={folder}", *text]
    assert compose(words).data.tokenizer == "bytes"
    (folder / "tokenizer.json").write_text("{}")
    assert compose(words).data.tokenizer == f"{folder}/tokenizer.json"
    assert compose([f"train.init_from={folder}"]).data.tokenizer == f"{folder}/tokenizer.json", (
        "Python's sources are text too"
    )
    assert compose([*words, "data.tokenizer=bytes"]).data.tokenizer == "bytes"
    assert (
        compose([f"train.init_from={folder}", "data=tokens", f"data.path={folder}"]).data.tokenizer
        == "bytes"
    )
    assert compose().data.tokenizer == "bytes"


def test_the_export_of_a_byte_model_needs_no_tokenizers_package(
    folder: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").write_bytes(exported_bytes())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    config = compose([f"train.init_from={folder}", *text, "model.vocab_size=auto"])
    assert config.data.tokenizer == "bytes"


def test_auto_vocabulary_is_the_tokenizers(tmp_path: Path, text: list[str]) -> None:
    pytest.importorskip("tokenizers")
    from mtrain_cli.data.tokenizers import train_bpe

    assert compose(["model.vocab_size=auto"]).model.vocab_size == 264
    train_bpe(["the quick brown fox " * 9], 270, tmp_path / "t.json")
    words = ["model.vocab_size=auto", *text, f"data.tokenizer={tmp_path / 't.json'}"]
    assert compose(words).model.vocab_size == 272
    assert compose(words[1:]).model.vocab_size == 264, "the default of model=tiny"


def test_auto_vocabulary_of_tokens_is_in_their_store(tmp_path: Path) -> None:
    for name, size in (("a", 1000), ("b", 1001)):
        (tmp_path / name).mkdir()
        meta = {
            "version": 1,
            "dtype": "uint16",
            "tokenizer": "x",
            "tokenizer_identity": "y",
            "eos": 0,
            "vocab_size": size,
        }
        rest = {"num_tokens": 9, "num_documents": 1, "sha256": "", "source": "", "recipe": {}}
        (tmp_path / name / "meta.json").write_text(json.dumps(meta | rest))
    words = ["model.vocab_size=auto", "data=tokens"]
    assert compose([*words, f"data.path={tmp_path / 'a'}"]).model.vocab_size == 1000
    assert (
        compose([*words, f"data.path={tmp_path}", "data.mix={a: 1, b: 2}"]).model.vocab_size == 1008
    )
    (tmp_path / "ids.npy").touch()
    (line,) = complaints(*words, f"data.path={tmp_path / 'ids.npy'}")
    assert line.startswith(
        f"model.vocab_size=auto: {tmp_path / 'ids.npy'} does not give the vocabulary size of its "
        "tokenizer; give a number"
    )
    (line,) = complaints(*words, "data.path=/no/such")
    assert line.startswith("data.path=/no/such: no such file")


def test_the_original_command_line_can_be_repeated_to_resume(
    folder: Path, text: list[str], tmp_path: Path
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    words = [
        f"train.init_from={folder}",
        "model=auto",
        "model.vocab_size=auto",
        *text,
        "run.name=again",
    ]
    config = compose(words)
    save(config, tmp_path / "resolved.yaml")
    (folder / "config.json").unlink()  # the checkpoint has the weights now
    assert resume(load(tmp_path / "resolved.yaml"), words) == config


def test_own_model_groups_count_as_chosen_by_the_user(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "conf"
    (own / "model").mkdir(parents=True)
    (own / "model" / "mine.yaml").write_text("defaults: [tiny]\nname: mine\n")
    with pytest.raises(ConfigError, match="leave out model=mine"):
        compose([f"train.init_from={folder}", "model=mine"], own)
    assert compose([f"train.init_from={folder}"], own).model.hidden_size == 64


def test_a_name_that_is_too_long_is_no_folder():
    assert folder_of("x" * 5000) is None


QWEN = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 96}


def test_the_folder_gives_the_window_of_its_layers(tmp_path: Path) -> None:
    folder = write(tmp_path / "windowed", QWEN | {"max_window_layers": 0})
    words = [f"train.init_from={folder}"]
    assert compose(words).mask == SlidingWindow(96)
    save(compose(words), tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml").mask == SlidingWindow(96)
    for own in (["mask=causal"], ["mask.kind=causal"]):
        assert compose([*words, *own]).mask.kind == "causal"
    assert compose([*words, "mask=prefix_lm"]).mask.prefix == 1024
    write(folder, QWEN | {"max_window_layers": 2})
    assert compose(words).mask.kind == "causal", "no layer has the window"


def test_the_folder_may_have_full_layers_first(tmp_path: Path) -> None:
    folder = write(tmp_path / "mixed", QWEN | {"max_window_layers": 1})
    assert compose([f"train.init_from={folder}"]).mask == SlidingWindow(96, full_first=1)


def test_a_window_other_than_the_folders_is_refused_with_both_values(tmp_path: Path) -> None:
    folder = write(tmp_path / "windowed", QWEN | {"max_window_layers": 0})
    words = [f"train.init_from={folder}", "mask.window=64"]
    assert complaints(*words) == [
        f"mask.window=64: the layers of train.init_from={folder} have mask.kind=sliding_window, "
        "mask.window=96; add mask=sliding_window to train with another window",
    ]
    assert compose([*words, "mask=sliding_window"]).mask == SlidingWindow(64)
    assert compose([words[0], "mask.window=96"]).mask == SlidingWindow(96)
    (line,) = complaints(words[0], "mask.window=wide")
    assert line.startswith("mask.window=wide: ")
    (line,) = complaints(*words, "mask.full_every=2")
    assert line.startswith("mask.window=64, mask.full_every=2: the layers of ")
    write(folder, LLAMA)
    (line,) = complaints(*words)
    assert line.startswith("mask.window=64: is not a key of mask.kind=causal; allowed with mask=sl")


def test_layers_with_different_windows_are_refused(tmp_path: Path) -> None:
    kinds = [f"{kind}_attention" for kind in ("full", "sliding", "full")]
    mixed = QWEN | {"num_hidden_layers": 3, "layer_types": kinds}
    folder = write(tmp_path / "mixed", mixed)
    (line,) = complaints(f"train.init_from={folder}")
    assert line.endswith(
        "config.json: sliding_window=96: is the window of 1 of 3 layers; mtrain gives the window "
        "to all layers, to all but every n-th (mask.full_every), or to all but the first n "
        "(mask.full_first)"
    )
