"""Prompts become ids as in transformers, and pieces of text add up to the whole text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from inference.small_models import source, write_hf, write_run

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import train_bpe
from mtrain_cli.inference.text import TextStream, open_codec
from mtrain_cli.model.tokenizer_files import of_bytes

TEXT = "naïve 漢字 🙂 café\n\tend"


@pytest.fixture
def bpe(tmp_path) -> Path:
    pytest.importorskip("tokenizers")
    folder = tmp_path / "bpe"
    folder.mkdir()
    train_bpe(["the end of the café"], 280, folder / "tokenizer.json")
    return folder


def pieces(codec, ids) -> list[str]:
    stream = TextStream(codec.decode)
    return [stream.add(one) for one in ids]


def test_a_run_has_the_tokenizer_of_its_training(tmp_path):
    write_run(tmp_path / "run")
    codec = open_codec(source(tmp_path / "run"))
    assert codec.encode("hé") == [104, 195, 169]
    assert codec.decode([104, 195, 169]) == "hé"
    assert codec.stop == {257}
    assert codec.first == 257  # documents follow the end of others
    assert codec.encode_plain("hé") == [104, 195, 169]
    assert codec.decode_plain([104, 257, 9999, 195, 169]) == "hé"


def test_a_folder_has_its_tokenizer_and_all_its_end_tokens(tmp_path):
    folder = write_hf(tmp_path / "hf")
    of_bytes().write(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [257, 5]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 258}))
    codec = open_codec(source(folder))
    assert codec.encode("hi") == [104, 105]
    assert codec.stop == {257, 258, 5}


def test_a_model_without_a_tokenizer_says_what_to_do(tmp_path, bpe):
    folder = write_hf(tmp_path / "hf")
    codec = open_codec(source(folder))
    with pytest.raises(ConfigError, match=r"hf: has no tokenizer. Give --tokenizer FOLDER, or"):
        codec.encode("hi")
    assert codec.decode([1, 2]) is None
    given = open_codec(source(folder), bpe)
    assert given.decode(given.encode(TEXT)) == TEXT


def test_a_broken_tokenizer_and_broken_text_are_refused(tmp_path):
    pytest.importorskip("tokenizers")
    folder = write_hf(tmp_path / "hf")
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(
        ConfigError, match=r"hf: tokenizer.json: not a Hugging Face tokenizer.json \(.* at line 1"
    ):
        open_codec(source(folder))
    write_run(tmp_path / "run")
    codec = open_codec(source(tmp_path / "run"))
    for text in ("ab\ud800", b"ab\xff".decode(errors="surrogateescape")):
        with pytest.raises(ConfigError, match="the prompt is not Unicode text: character 3"):
            codec.encode(text)


def test_special_tokens_of_the_file_begin_a_prompt(tmp_path, bpe):
    import tokenizers

    file = bpe / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(file))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    made.save(str(file))
    codec = open_codec(source(write_hf(tmp_path / "hf")), bpe)
    assert codec.encode("caf")[0] == 0
    assert codec.encode("caf") == made.encode("caf").ids
    assert codec.first == 0
    assert codec.encode_plain("caf") == codec.encode("caf")[1:]
    assert codec.decode_plain(codec.encode("caf")) == "caf"


def test_pieces_of_text_hold_whole_characters_and_add_up(tmp_path, bpe):
    write_run(tmp_path / "run")
    for codec in (
        open_codec(source(tmp_path / "run")),
        open_codec(source(tmp_path / "run"), bpe),
    ):
        ids = codec.encode(TEXT)
        found = pieces(codec, ids)
        assert "".join(found) == TEXT
        assert not any("\ufffd" in piece for piece in found)
        assert "" in found  # a character of several tokens


def test_pieces_keep_the_spaces_that_begin_tokens(tmp_path):
    """A decoder of SentencePiece drops the space before the first token of what it decodes."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "▁one": 1, "▁two": 2, "▁three": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    (tmp_path / "words").mkdir()
    made.save(str(tmp_path / "words/tokenizer.json"))
    codec = open_codec(source(write_hf(tmp_path / "hf")), tmp_path / "words")
    ids = codec.encode("one two three two")
    assert ids == [1, 2, 3, 2]
    assert pieces(codec, ids) == ["one", " two", " three", " two"]


def test_an_incomplete_character_stays_to_the_end(tmp_path):
    write_run(tmp_path / "run")
    codec = open_codec(source(tmp_path / "run"))
    stream = TextStream(codec.decode)
    assert [stream.add(one) for one in (104, 195)] == ["h", ""]
    assert stream.rest() == "\ufffd"
    assert TextStream(codec.decode).rest() == ""


def test_exported_bytes_need_no_tokenizers_package(tmp_path, monkeypatch):
    folder = write_hf(tmp_path / "hf")
    of_bytes().write(folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    codec = open_codec(source(folder))
    assert codec.encode(TEXT) == list(TEXT.encode())
    assert codec.decode([104, 257, 105]) == "hi"
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError, match="needs the tokenizers package"):
        open_codec(source(folder))
