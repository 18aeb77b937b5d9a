"""An exported tokenizer gives the ids that the run was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import ByteTokenizer, open_tokenizer, train_bpe
from mtrain_cli.model.tokenizer_files import of_bytes, of_file, of_folder

# Decomposed and composed letters, foreign special tokens, spaces that a pre-tokenizer would split,
# and line ends.
TEXT = (
    "Hello wo\u0308rld \u00f6!  'tis <s> </s> <|endoftext|> <unk>\n\n\tdef f(x):\n    return x"
    "  # \u6f22\u5b57 \U0001f999\r\n , . end  "
)


def test_the_exported_byte_tokenizer_has_mtrains_ids(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    of_bytes().write(tmp_path)
    theirs, ours = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), ByteTokenizer()
    assert theirs.encode(TEXT).ids == ours.encode([TEXT])[0].tolist()
    every = bytes(range(256)).decode("latin-1")
    assert theirs.encode(every).ids == ours.encode([every])[0].tolist()
    assert theirs.decode(theirs.encode(TEXT).ids) == TEXT
    assert [
        theirs.token_to_id(token)
        for token in ("<|mtrain:begin|>", "<|mtrain:end|>", "<|mtrain:padding|>")
    ] == [256, 257, 258]
    assert theirs.decode([72, 105, 257, 258]) == "Hi" == ours.decode(np.array([72, 105, 257, 258]))
    assert open_tokenizer(str(tmp_path)).eos == ours.eos, (
        "a run that starts from the export must end documents with the same id"
    )
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("trusted", [False, True])
def test_transformers_gives_mtrains_ids_for_every_family(
    tmp_path: Path,
    family: str,
    trusted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For qwen2 it would otherwise normalise and split text like Qwen's own tokenizer."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )  # for trusted code
    train_bpe([TEXT * 5, "the quick brown fox\n" * 30], 400, tmp_path / "bpe.json")
    bpe = open_tokenizer(str(tmp_path / "bpe.json"))
    for name, files, ours in (
        ("bytes", of_bytes(), ByteTokenizer()),
        ("bpe", of_file(tmp_path / "bpe.json", bpe.eos), bpe),
    ):
        (tmp_path / name).mkdir()
        files.for_family(family).write(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": family}))
        theirs = transformers.AutoTokenizer.from_pretrained(
            tmp_path / name, trust_remote_code=trusted
        )
        ids = ours.encode([TEXT])[0].tolist()
        assert theirs(TEXT).input_ids == ids, name
        assert theirs.decode(ids) == TEXT
        assert theirs.eos_token_id == ours.eos


def test_the_folder_decides_the_end_token(tmp_path: Path) -> None:
    vocabulary = {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": vocabulary, "added_tokens": [{"id": 2, "content": "<end>"}]})
    )
    assert of_folder(tmp_path).ids["eos_token_id"] is None
    assert of_folder(tmp_path, 1).ids["eos_token_id"] == 1
    assert json.loads(of_folder(tmp_path, 1).files["tokenizer_config.json"])["eos_token"] == "</s>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert of_folder(tmp_path, 1).ids["eos_token_id"] == 2
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 2], "bos_token_id": 0}')
    assert of_folder(tmp_path, 1).ids == {
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "pad_token_id": None,
    }


def test_the_documents_end_token_takes_precedence_over_unknown_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": {"<|endoftext|>": 0}}})
    )
    (tmp_path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "top_p": 0.9}')
    (tmp_path / "out").mkdir()
    of_folder(tmp_path, 0).write(tmp_path / "out")
    assert of_folder(tmp_path, 0).ids["eos_token_id"] == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 0,
        "top_p": 0.9,
    }
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [5, 0], "bos_token_id": 1}\n'
    )
    of_folder(tmp_path, 0).write(tmp_path / "out")
    assert (
        tmp_path / "out" / "generation_config.json"
    ).read_text() == '{"eos_token_id": [5, 0], "bos_token_id": 1}\n', "as it was"


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no tokenizer files"):
        of_folder(tmp_path)
