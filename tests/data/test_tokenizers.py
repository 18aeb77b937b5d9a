"""Convert text to ids and back."""

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from data.framed_tokenizers import write_framed
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import split_text
from mtrain_cli.data.tokenizers import (
    NO_BEGIN,
    Begin,
    ByteTokenizer,
    FileTokenizer,
    choose_begin,
    documents_identity,
    open_tokenizer,
)

_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts=st.lists(_TEXT, max_size=5))
def test_bytes_round_trip_and_are_the_utf8_of_the_text(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode(texts)
    assert [ids.tolist() for ids in encoded] == [list(text.encode()) for text in texts]
    assert [tokenizer.decode(ids) for ids in encoded] == texts


@given(text=_TEXT)
def test_a_trained_bpe_encodes_any_text_without_loss(bpe_file: Path, text: str) -> None:
    tokenizer = open_tokenizer(str(bpe_file))
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert ids.size == 0 or ids.max() < tokenizer.vocab_size


@pytest.fixture(scope="session")
def qwen_like_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE that splits words like Qwen2 and Llama 3, by the expression in their tokenizer.json."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    library.train_from_iterator(["a b .\n\n\nab (a).\r\n  \n\tb\n(\n\n" * 30], trainer)
    path = tmp_path_factory.mktemp("qwen") / "tokenizer.json"
    library.save(str(path))
    return path


_LINES = st.lists(st.text(st.sampled_from("ab .\n\r\t(é世\u0301"), max_size=12), max_size=30)


@pytest.mark.parametrize("file", ["bpe_file", "qwen_like_file"])
@given(lines=_LINES, size=st.integers(1, 40))
def test_encoding_in_pieces_equals_encoding_the_whole(
    request: pytest.FixtureRequest, file: str, lines: list[str], size: int
) -> None:
    tokenizer = open_tokenizer(str(request.getfixturevalue(file)))
    assert tokenizer.exact_pieces
    text = "\n".join(lines)
    pieces = list(split_text([text], size))
    assert "".join(pieces) == text
    cut_by_force = any(len(piece) >= 16 * size for piece in pieces)
    if not cut_by_force:
        in_pieces = [number for ids in tokenizer.encode(pieces) for number in ids.tolist()]
        assert in_pieces == tokenizer.encode([text])[0].tolist()


def test_a_tokenizer_that_marks_the_start_of_every_text_is_not_cut(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(
        models.WordLevel(
            {"▁one": 0, "▁two": 1, "three": 2, "▁three": 3, "[UNK]": 4}, unk_token="[UNK]"
        )
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.save(str(tmp_path / "t.json"))
    assert not open_tokenizer(str(tmp_path / "t.json")).exact_pieces


def test_truncation_and_padding_saved_in_the_file_are_ignored(
    bpe_file: Path, tmp_path: Path
) -> None:
    library = tokenizers.Tokenizer.from_file(str(bpe_file))
    library.enable_truncation(4)
    library.enable_padding(length=16)
    library.save(str(tmp_path / "t.json"))
    tokenizer = open_tokenizer(str(tmp_path / "t.json"))
    long, short = tokenizer.encode(["x y z " * 50, "x"])
    assert len(long) > 16
    assert len(short) == 1


def test_end_token_is_the_one_that_tokenizer_config_names(bpe_file: Path, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(bpe_file))
    library.add_special_tokens(["<end>"])
    library.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path)).eos == 0  # <|endoftext|>, found by name
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert open_tokenizer(str(tmp_path)).eos == library.token_to_id("<end>")


def test_a_tokenizer_without_any_end_token_has_none(tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")).save(
        str(tmp_path / "t.json")
    )
    tokenizer = open_tokenizer(str(tmp_path / "t.json"))
    assert tokenizer.eos is None
    assert tokenizer.vocab_size == 8  # ids may have gaps


def test_identity_follows_content_not_path(bpe_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(bpe_file.read_bytes())
    first, second = open_tokenizer(str(bpe_file)), open_tokenizer(str(copy))
    assert isinstance(second, FileTokenizer)
    assert first.identity == second.identity
    copy.write_bytes(bpe_file.read_bytes() + b" ")
    assert open_tokenizer(str(copy)).identity != first.identity


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{}", "not a Hugging Face"),
        (
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "its vocabulary is empty",
        ),
        (b"\xff\x00", "it is not text: byte 1 is not UTF-8"),
    ],
)
def test_missing_and_broken_files_are_one_clear_line(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        open_tokenizer(str(path))
    assert str(caught.value).startswith(f"data.tokenizer={path}: ")
    assert "\n" not in str(caught.value)


def test_without_the_package_the_line_says_what_to_install(
    bpe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == "tokenizers":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=re.escape(install_command("data"))):
        open_tokenizer(str(bpe_file))
    assert open_tokenizer("bytes").vocab_size == 264


_SINGLE = ["<begin> $A", "", "<begin> $A <end>", "$A <end>", "<end> <begin> $A"]


@pytest.mark.parametrize("single", _SINGLE)
def test_documents_start_as_the_library_and_transformers_start_a_text(
    tmp_path: Path, single: str
) -> None:
    path = write_framed(tmp_path / "t", single)
    tokenizer, library = open_tokenizer(str(path)), tokenizers.Tokenizer.from_file(str(path))
    ends = single.partition("$A")[2].split()
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in ("The grass is green.", "x", "café\n\n 漢字"):
        own = tokenizer.begin.before(tokenizer.encode([text])[0]).tolist()
        ended = own + [library.token_to_id(name) for name in ends]
        assert ended == library.encode(text, add_special_tokens=True).ids == fast(text).input_ids
    assert tokenizer.begin.name == "".join(single.partition("$A")[0].split())


def _with_vocabulary(path: Path, vocabulary: dict[str, int], begin: int) -> Path:
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", begin), ("[SEP]", 1)]
    )
    library.save(str(path))
    return path


def test_a_begin_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = _with_vocabulary(tmp_path / "t.json", {"a": 0, "[SEP]": 1, "b": 2}, 99999)
    with pytest.raises(ConfigError, match=r"puts id 99999 before .* the 3 ids") as caught:
        open_tokenizer(str(path))
    assert str(caught.value).startswith(f"data.tokenizer={path}: ")


def test_a_text_that_brings_its_begin_token_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_framed(tmp_path / "t")))
    plain, framed = tokenizer.encode(["Here we go", "<begin>Here we go"])
    assert tokenizer.begin.before(framed).tolist() == tokenizer.begin.before(plain).tolist()
    assert tokenizer.begin.before(plain).tolist() == framed.tolist() != plain.tolist()


def test_data_bos_adds_or_omits_the_begin_token(tmp_path: Path) -> None:
    path = write_framed(tmp_path / "t", "")
    tokenizer = open_tokenizer(str(path))
    with pytest.raises(ConfigError, match=r"data.bos=true: the tokenizer t has no begin token"):
        choose_begin(tokenizer, True)
    config = json.loads((path.parent / "tokenizer_config.json").read_text())
    config["bos_token"] = "<begin>"
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(str(path))
    assert tokenizer.begin == NO_BEGIN, "no transformers tokenizer adds it without a post-processor"
    before = documents_identity(tokenizer)
    choose_begin(tokenizer, True)
    assert tokenizer.begin == Begin(tuple(tokenizer.encode(["<begin>"])[0].tolist()), "<begin>")
    assert documents_identity(tokenizer) != before
    framed = open_tokenizer(str(write_framed(tmp_path / "u")))
    choose_begin(framed, False)
    assert framed.begin == NO_BEGIN != framed.prescribed
    raw = ByteTokenizer()
    choose_begin(raw, True)
    assert raw.begin.before(raw.encode(["a"])[0]).tolist() == [256, 97]
    assert ByteTokenizer().begin == NO_BEGIN


def test_an_error_of_the_package_is_one_line(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"z": 0}, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(ConfigError, match=r"failed on a text \(WordLevel error: Missing"):
        open_tokenizer(str(tmp_path))


def test_a_panic_of_the_package_is_one_line(monkeypatch: pytest.MonkeyPatch, bpe_file) -> None:
    class PanicException(BaseException):
        pass

    def panic(*_: object, **_options: object) -> None:
        raise PanicException("retry-limit\nover")

    tokenizer = open_tokenizer(str(bpe_file))
    monkeypatch.setattr(tokenizer, "_tokenizer", type("T", (), {"decode": staticmethod(panic)})())
    with pytest.raises(ConfigError, match=r"failed on a text \(retry-limit over\); use another"):
        tokenizer.decode([0, 0])
