"""The user's text, intact and broken."""

import errno
import gzip
import inspect
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mtrain_cli import resource_dir
from mtrain_cli.commands.data import prepare
from mtrain_cli.config.data_kinds import KINDS
from mtrain_cli.config.groups import summary
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import text_files
from mtrain_cli.data.corpora import Corpus, describe_left_out
from mtrain_cli.data.text_files import READERS, refuse_unread_key, text_corpus, unpacked

PACK = {"gz": gzip.compress, "zstd": zstandard.compress}


def _texts(corpus: Corpus, skip: int = 0) -> list[str]:
    return ["".join(document.pieces) for unit in corpus.units for document in unit.documents(skip)]


def _error(path: Path, key: str = "text") -> str:
    with pytest.raises(ConfigError) as caught:
        _texts(text_corpus(str(path), key))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _parquet(
    path: Path, texts: list[Any], column: str = "text", row_group_size: int = 2, kind: Any = None
) -> Path:
    table = pyarrow.table({"id": list(range(len(texts))), column: pyarrow.array(texts, kind)})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".TXT"])
def test_a_plain_file_is_one_document_unchanged(tmp_path: Path, suffix: str) -> None:
    text = "first\r\n\n  second é 世\n\x00"
    (tmp_path / f"a{suffix}").write_bytes(text.encode())
    assert _texts(text_corpus(str(tmp_path / f"a{suffix}"), "text")) == [text]


def test_a_plain_file_longer_than_a_block_keeps_characters_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtrain_cli.data.text_files._BLOCK", 5)
    text = "é世界\n" * 40
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert _texts(text_corpus(str(tmp_path / "a.txt"), "text")) == [text]


def test_jsonl_is_one_document_per_line(jsonl: Callable[..., Path]) -> None:
    path = jsonl(["one\ntwo", "", "é"], key="body")
    with path.open("a") as file:
        file.write('\n{"body": null}\n{"body": "last"}')
    assert _texts(text_corpus(str(path), "body")) == ["one\ntwo", "", "é", "", "last"]


def test_half_a_surrogate_pair_in_json_becomes_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert _texts(text_corpus(str(tmp_path / "a.jsonl"), "text")) == ["a?b"]


@pytest.mark.parametrize(
    "kind", [None, pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
)
def test_parquet_is_one_document_per_row(tmp_path: Path, kind: Any) -> None:
    path = _parquet(tmp_path / "a.parquet", ["one", None, "three", "four", "five"], kind=kind)
    assert _texts(text_corpus(str(path), "text")) == ["one", "", "three", "four", "five"]


@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet", "a.txt"])
def test_reading_can_start_after_any_record(
    tmp_path: Path, jsonl: Callable[..., Path], kind: str
) -> None:
    texts = [f"text {number}" for number in range(7)] if kind != "a.txt" else ["only one"]
    if kind == "a.parquet":
        path = _parquet(tmp_path / kind, texts)
    elif kind == "a.jsonl":
        path = jsonl(texts, kind)
    else:
        path = tmp_path / kind
        path.write_text(texts[0])
    (unit,) = text_corpus(str(path), "text").units
    records = [(document.record, document.end) for document in unit.documents(0)]
    assert records[-1] == (len(texts), path.stat().st_size)
    for skip in range(len(texts) + 1):
        assert [(document.record, document.end) for document in unit.documents(skip)] == records[
            skip:
        ]
        assert _texts(text_corpus(str(path), "text"), skip) == texts[skip:]


def test_a_folder_is_read_recursively_in_sorted_order_without_hidden_files(
    tmp_path: Path, jsonl: Callable[..., Path]
) -> None:
    jsonl(["2", "3"], "b/c.jsonl")
    for name, text in {
        "a.txt": "0",
        "b/a.md": "1",
        "z.py": "5",
        "b/d/x.txt": "4",
        ".git/x.txt": "no",
        "b/.x.txt": "no",
        "x.bin": "no",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert _texts(text_corpus(str(tmp_path), "text")) == ["0", "1", "2", "3", "4", "5"]


def test_signature_changes_with_files_and_key_but_not_with_the_location(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "x.txt").write_text("one")
    before = text_corpus(str(folder), "text").signature
    moved = folder.rename(tmp_path / "b")
    assert text_corpus(str(moved), "text").signature == before
    assert text_corpus(str(moved), "body").signature != before
    (moved / "x.txt").write_text("two")
    assert text_corpus(str(moved), "text").signature != before


def test_missing_file_names_what_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "none.txt"
    assert (
        _error(path)
        == f"data.path={path}: no such file. Give a .txt, .md, .py, .jsonl, .json or .parquet "
        "file, or a folder of them."
    )


def test_a_key_of_records_is_refused_for_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "more").mkdir()
    plain = text_corpus(str(tmp_path), "body", path_option="--text")
    refuse_unread_key(plain, "text")
    with pytest.raises(ConfigError) as raised:
        refuse_unread_key(plain, "body")
    assert raised.value.problems == (
        f"--text-key body: --text {tmp_path} has no .jsonl, .json or .parquet file, and other "
        "files have no keys; leave it out",
    )
    (tmp_path / "more/B.JSONL").write_text("{}")
    refuse_unread_key(text_corpus(str(tmp_path), "body"), "body")


def test_text_in_another_encoding_is_reported_with_its_offset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"plain " + "é".encode("latin-1") + b" text")
    assert "a.txt: not UTF-8 text (byte 0xe9 near offset 6)" in _error(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes("né".encode()[:-1])
    assert "not UTF-8 text" in _error(tmp_path / "a.txt")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xe9"}\n')
    assert "b.jsonl line 2: not UTF-8 text" in _error(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ('["x"]', "line 2: is a list, not a JSON object with the key text"),
        ('{"id": 1, "body": "x"}', "line 2 has no such key. Its keys: id, body"),
        ('{"text": 5}', "line 2 holds a number, not text"),
    ],
)
def test_a_broken_line_is_reported_with_file_and_number(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    error = _error(path)
    assert message in error
    assert str(path) in error


@pytest.mark.parametrize("keep", [0, 4, 200])
def test_corrupt_parquet_is_one_clear_line(tmp_path: Path, keep: int) -> None:
    path = _parquet(tmp_path / "a.parquet", ["some text"] * 50)
    path.write_bytes(path.read_bytes()[:keep])
    assert f"data.path={path}: not a readable parquet file" in _error(path)


def test_only_columns_that_are_read_count_in_the_size_of_a_row_group(tmp_path, monkeypatch):
    large = [bytes([n]) * 10_000 for n in range(9)]
    table = pyarrow.table({"text": ["a"] * 9, "image": large, "other": [x.hex() for x in large]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    monkeypatch.setattr(text_files, "host_memory", lambda: 20_000)
    assert _texts(text_corpus(str(tmp_path / "a.parquet"), "text")) == ["a"] * 9
    assert "row group 0 unpacks to 0.0 GiB, more than half" in _error(
        tmp_path / "a.parquet", "other"
    )


def test_parquet_text_that_is_not_utf8_is_one_clear_line(tmp_path: Path) -> None:
    strings = pyarrow.array([b"fine", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), tmp_path / "a.parquet")
    assert "a.parquet: not UTF-8 text in the 1024 rows after row 0 (byte 0xff)" in _error(
        tmp_path / "a.parquet"
    )


def test_a_file_that_cannot_be_opened_is_one_clear_line(tmp_path: Path) -> None:
    corpus_file = tmp_path / "a.jsonl"
    corpus_file.write_text(json.dumps({"text": "x"}))
    corpus = text_corpus(str(corpus_file), "text")
    corpus_file.unlink()
    with pytest.raises(ConfigError, match=r"a\.jsonl: cannot be read \(No such file"):
        _texts(corpus)
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    assert "no such file" in _error(tmp_path / "loop.txt") or "cannot be read" in _error(
        tmp_path / "loop.txt"
    )


def test_help_and_messages_name_every_kind_of_file_that_is_read():
    *first, last = READERS
    kinds = f"a {', '.join(first)} or {last} file, or a folder of them"
    assert f"source: {kinds.capitalize()}" in " ".join((inspect.getdoc(prepare) or "").split())
    assert kinds in summary(resource_dir("conf") / "data/text.yaml")
    assert kinds == KINDS["text"].expected
    assert f"`data=text` takes {kinds}." in " ".join(
        (Path(__file__).parents[2] / "docs/data.md").read_text().split()
    )


def test_an_absurdly_long_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST_LINE", 100)
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b" * 200}) + "\n")
    reading = text_corpus(str(path), "text").units[0].documents(0)
    assert "".join(next(reading).pieces) == "a"
    with pytest.raises(
        ConfigError,
        match=r"t\.jsonl line 2: is longer than 100 bytes\. Put one document on each line\.$",
    ):
        next(reading)


def _packed(path: Path, content: bytes) -> Path:
    """Write a file that gzip or zstd compressed, as its suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACK["gz" if path.suffix == ".gz" else "zstd"](content))
    return path


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_compressed_files_give_the_same_documents(tmp_path: Path, packing: str) -> None:
    lines = b"".join(json.dumps({"text": f"text {n}"}).encode() + b"\n" for n in range(7))
    expected = [f"text {n}" for n in range(7)]
    path = _packed(tmp_path / f"a.JSONL.{packing}", lines)
    corpus = text_corpus(str(path), "text")
    for skip in (0, 3, 7):
        assert _texts(corpus, skip) == expected[skip:]
    assert [d.record for d in corpus.units[0].documents(0)] == [*range(1, 8)]
    assert list(corpus.units[0].documents(0))[-1].end == path.stat().st_size
    refuse_unread_key(corpus, "body")
    book = _packed(tmp_path / f"b.txt.{packing}", "füße\n".encode() * 9)
    assert _texts(text_corpus(str(book), "text")) == ["füße\n" * 9]
    book.write_bytes(book.read_bytes() * 2)  # two members, as pigz and pzstd write them
    assert _texts(text_corpus(str(book), "text")) == ["füße\n" * 18]


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize(
    "form",
    [
        json.dumps,
        lambda rows: "\ufeff" + json.dumps(rows, indent=1),
        lambda rows: "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
    ],
)
def test_json_is_one_document_per_record(tmp_path, form, skip):
    texts = ["[a\u2028\x85b", "", None, "ü]"]  # `str.splitlines` would cut the first one
    (tmp_path / "a.json").write_text(form([{"text": text} for text in texts]))
    corpus = text_corpus(str(tmp_path / "a.json"), "text")
    assert _texts(corpus, skip) == [text or "" for text in texts][skip:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b"}', "line 1: not JSON"),
        ('[{"text": "a"}, {"text": "b', "line 1: not JSON (Unterminated string"),
        ('[{"text": "a"}, {text: "b"}]', "line 1: not JSON (Expecting property name"),
        ('[{"text": "a"}, 7]', "record 2: is a number, not a JSON object with the key text"),
        ('[{"text": "a"}, {"body": "b"}]', "record 2 has no such key. Its keys: body"),
        ('[{"text": "a"}, {"text": 4}]', "record 2 holds a number, not text"),
        ('{"text": "a"} {"text": ' + "9" * 5000 + "}", "not JSON (E"),
        ('{"text": "a"}' + "[" * 10**6, "not JSON ("),
        ('{"a":' * 10**6, "not JSON (maximum recursion depth"),
        ('["a"]', "record 1: is a string, not a JSON object"),
    ],
)
def test_a_broken_json_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        _texts(text_corpus(str(path), "text"))
    assert message in str(caught.value)
    assert "a.json" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_files_that_are_not_read_are_counted_by_kind_and_reason(tmp_path):
    for name in ("a.txt", "b.pdf", "c.html", "d.html", "LICENSE", ".git/x.txt", "__pycache__/p.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    _packed(tmp_path / "a.txt.gz", b"x")
    _packed(tmp_path / "e.parquet.gz", b"x")
    _packed(tmp_path / "c.jsonl.zst", b'{"text": "z"}')
    _packed(tmp_path / "c.jsonl.gz", b'{"text": "z"}')
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "nothing.json").write_text("[]")
    _packed(tmp_path / "packed.json.gz", b'{"indent": 2}')
    _packed(tmp_path / "f.tar.zst", b"x")
    (tmp_path / "settings.json").write_text('{"indent": 2}')
    (tmp_path / "lines.json").write_text('{"text": "y"}')
    (tmp_path / "link").symlink_to(tmp_path / ".git")
    corpus = text_corpus(str(tmp_path), "text")
    assert describe_left_out(corpus.left_out) == (
        "left out: 1 hidden, 1 linked (links to folders are not followed), 6 of other kinds, "
        "1 .txt.gz (another copy is read), 1 .jsonl.zst (another copy is read)"
    )
    documents = [document for unit in corpus.units for document in unit.documents(0)]
    assert [(d.name, d.left_out) for d in documents] == [
        ("a.txt", ""),
        ("c.jsonl.gz:1", ""),
        ("empty.json", "empty or null"),
        ("lines.json:1", ""),
        ("nothing.json", "empty or null"),
        ("packed.json.gz", ".json (without the key text)"),
        ("settings.json", ".json (without the key text)"),
    ]
    settings = corpus.units[-1]
    assert not list(settings.documents(1)), "a resumed preparation counts it once"
    with pytest.raises(ConfigError, match=r"settings\.json record 1 has no such key"):
        _texts(text_corpus(str(tmp_path / "settings.json"), "text"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"text": oops}', "line 1: not JSON"),
        ("a.json", b'{"text": "\xe9t\xe9"}', "not UTF-8 text"),
        ("a.json.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:-9], "it ends early"),
        ("a.json.gz", b"\x1f\x8b\xff" + b"x" * 50, "cannot be unpacked"),
        ("a.json", b'[{"body": "a"}, {"body": ', "line 1: not JSON"),
    ],
)
def test_a_damaged_json_file_of_a_folder_is_no_file_of_settings(tmp_path, name, content, message):
    (tmp_path / "b.txt").write_text("x")
    (tmp_path / name).write_bytes(content)
    assert message in _error(tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    os.mkfifo(tmp_path / "b.txt")
    assert "b.txt is not a regular file. Remove it." in _error(tmp_path)
    assert "b.txt is not a regular file. Remove it." in _error(tmp_path / "b.txt")


def test_a_folder_that_fails_while_it_is_listed_is_one_line(tmp_path, monkeypatch):
    def walk(_root, onerror):
        onerror(OSError(errno.EACCES, "Permission denied"))

    monkeypatch.setattr(os, "walk", walk)
    assert "cannot be read (Permission denied)" in _error(tmp_path)


def _read(content: bytes, kind: str) -> bytes:
    with unpacked(io.BytesIO(content), kind, "file") as stream:
        return stream.read()


@pytest.mark.parametrize("kind", PACK)
def test_frames_one_after_another_give_the_whole_content(kind: str) -> None:
    parts = [b"", b"one", bytes(range(256)) * 5000, b"last"]
    assert _read(b"".join(map(PACK[kind], parts)), kind) == b"".join(parts)


def test_padding_after_a_gzip_file_is_ignored() -> None:
    assert _read(gzip.compress(b"x") + bytes(5000), "gz") == b"x"


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.9999])
def test_a_truncated_file_is_refused(kind: str, keep: float) -> None:
    whole = PACK[kind](b"".join(str(number).encode() for number in range(20_000)))
    with pytest.raises(ConfigError, match=r"^file cannot be unpacked \(it ends early\)"):
        _read(whole[: int(len(whole) * keep)], kind)


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("where", ["start", "after"])
def test_garbage_is_refused(kind: str, where: str) -> None:
    content = b"garbage" if where == "start" else PACK[kind](b"x" * 99) + b"garbage"
    with pytest.raises(ConfigError, match=r"^file cannot be unpacked") as caught:
        _read(content, kind)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_compression_is_named() -> None:
    with pytest.raises(ConfigError, match=r"is compressed with br\. Only zstd and gz"):
        _read(b"", "br:11")
