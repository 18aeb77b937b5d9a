"""Make a token store, and continue after an interruption."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from slow_cases import mostly_slow

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import prepare
from mtrain_cli.data.corpora import split_text
from mtrain_cli.data.prepare import PreparationProgress, prepare_store
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.text_files import text_corpus
from mtrain_cli.data.tokenizers import ByteTokenizer
from mtrain_cli.launch.failures import RunError

_STORE_FILES = {"tokens.bin", "documents.bin", "meta.json"}


def _silent(_: PreparationProgress) -> None:
    pass


def _prepare(
    source: Path,
    out: Path,
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    key: str = "text",
) -> TokenStore:
    return prepare_store(
        text_corpus(str(source), key, "SOURCE", "--text-key"), out, tokenizer, vocab_size, _silent
    )


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def source(jsonl: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder with several kinds of files, with empty documents and one longer than a batch."""
    jsonl(
        [f"text number {number}\nwith two lines" * (number % 5) for number in range(40)],
        "source/a.jsonl",
    )
    jsonl(["x", "", "y"], "source/c.jsonl")
    (tmp_path / "source" / "b.txt").write_text("a line of a long book\n" * 60)
    (tmp_path / "source" / "d.txt").write_text("")
    (tmp_path / "source" / "settings.json").write_text('{"indent": 2}')
    (tmp_path / "source" / "e.pdf").write_text("")
    return tmp_path / "source"


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, and a commit after each."""
    monkeypatch.setattr(prepare, "_BATCH_PIECES", 7)
    monkeypatch.setattr(prepare, "_COMMIT_TOKENS", 1)
    monkeypatch.setattr("mtrain_cli.data.text_files.split_text", partial(split_text, size=40))


def _tokens_done(journal: Path) -> int:
    return json.loads(journal.read_text())["tokens"]


def test_documents_and_boundaries_match_the_source(source: Path, tmp_path: Path) -> None:
    store = _prepare(source, tmp_path / "out")
    store.verify()
    texts = [
        ByteTokenizer().decode(store.document(number)) for number in range(store.meta.num_documents)
    ]
    assert texts == [
        *(
            f"text number {number}\nwith two lines" * (number % 5)
            for number in range(40)
            if number % 5
        ),
        "a line of a long book\n" * 60,
        "x",
        "y",
    ]
    assert store.meta.left_out == {
        "of other kinds": 1,
        "empty or null": 10,
        ".json (without the key text)": 1,
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == _STORE_FILES
    assert not (tmp_path / "out.partial").exists()


@mostly_slow("tokenizer", ["bytes", "bpe", "file"], keep=(0,))
@pytest.mark.usefixtures("small_batches")
def test_the_result_does_not_depend_on_where_it_was_interrupted(
    source: Path, tmp_path: Path, bpe_file: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "e.jsonl").write_text(
        "".join(json.dumps({"text": f"late {number}"}) + "\n" for number in range(40))
    )
    real = prepare.StoreWriter.append
    choice, size = (
        (str(bpe_file), None)
        if tokenizer == "file"
        else (tokenizer, 300 if tokenizer == "bpe" else None)
    )
    expected = _contents(_prepare(source, tmp_path / "whole", choice, size).folder)
    assert set(expected) == _STORE_FILES | ({"tokenizer.json"} if tokenizer != "bytes" else set())
    appended, limit = 0, 10**9

    def limited(writer, ids):
        nonlocal appended
        if appended == limit:
            raise KeyboardInterrupt
        appended += 1
        real(writer, ids)

    monkeypatch.setattr(prepare.StoreWriter, "append", limited)
    _prepare(source, tmp_path / "again", choice, size)
    total = appended
    assert total > 80
    for stops in ((0, 1), (1, 1), (total // 5, total // 3), (total - 50, 20, 2), (total - 1,)):
        out = tmp_path / f"out{stops[0]}"
        for stop in stops:
            appended, limit = 0, stop
            with pytest.raises(KeyboardInterrupt):
                _prepare(source, out, choice, size)
            assert not out.exists()
        limit = 10**9
        assert _contents(_prepare(source, out, choice, size).folder) == expected


@pytest.mark.usefixtures("small_batches")
def test_a_rerun_does_not_repeat_finished_documents(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = prepare._content

    def noting(document, tokenizer, writer):
        read.append(document.name)
        return real(document, tokenizer, writer)

    monkeypatch.setattr(prepare, "_content", noting)

    def stop_late(progress: PreparationProgress) -> None:
        if progress.documents >= 25:
            raise KeyboardInterrupt

    corpus = text_corpus(str(source), "text")
    with pytest.raises(KeyboardInterrupt):
        prepare_store(corpus, tmp_path / "out", "bytes", None, stop_late)
    first, read[:] = list(read), []
    prepare_store(corpus, tmp_path / "out", "bytes", None, _silent)
    assert len(first) > 25
    assert len(first) + len(read) < 60  # 45 documents; about two batches are read twice
    assert read[-3:] == ["c.jsonl:3", "d.txt", "settings.json"]


@pytest.mark.slow
def test_a_rerun_after_sigkill_gives_the_same_store(
    jsonl: Callable[..., Path], tmp_path: Path, bpe_file: Path
) -> None:
    source = jsonl(
        [
            f"the quick brown fox number {number} jumps\nover the lazy dog\n" * 20
            for number in range(4000)
        ]
    )
    expected = _contents(_prepare(source, tmp_path / "whole", str(bpe_file)).folder)
    script = (
        "import sys\nfrom mtrain_cli.data import prepare\nprepare._BATCH_PIECES, "
        "prepare._COMMIT_TOKENS = 50, 1\n"
        "from mtrain_cli.__main__ import main\nmain()"
    )
    command = [
        sys.executable,
        "-c",
        script,
        "data",
        "prepare",
        str(source),
        str(tmp_path / "out"),
        "--tokenizer",
        str(bpe_file),
    ]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    journal = tmp_path / "out.partial" / "journal.json"
    try:
        deadline = time.monotonic() + 60
        while not (journal.exists() and _tokens_done(journal) > 100_000):
            assert worker.poll() is None, worker.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker.send_signal(signal.SIGKILL)
        assert worker.wait(10) == -signal.SIGKILL
    finally:
        worker.kill()
    assert not (tmp_path / "out").exists()
    assert 0 < _tokens_done(journal) < len(expected["tokens.bin"]) // 2
    (journal.parent / "journal.json.tmp").write_text("{")  # the kill may come while it is written
    assert _contents(_prepare(source, tmp_path / "out", str(bpe_file)).folder) == expected


def _refused(*arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        _prepare(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_store_a_foreign_folder_and_a_file_are_not_overwritten(
    source: Path, tmp_path: Path, bpe_file: Path
) -> None:
    out = tmp_path / "out"
    before = _contents(_prepare(source, out).folder)
    assert "holds another token store" in _refused(source, out, str(bpe_file))
    (source / "b.txt").write_text("changed")
    assert "which differs in corpus. Give another folder" in _refused(source, out)
    assert _contents(out) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert "exists and is not a token store" in _refused(source, tmp_path / "mine")
    assert "exists and is not a token store" in _refused(source, source / "b.txt")
    (tmp_path / "mine").rename(tmp_path / "new.partial")
    assert "is not an unfinished token store" in _refused(source, tmp_path / "new")
    assert (tmp_path / "new.partial" / "thesis.tex").read_text() == "x"


@pytest.mark.usefixtures("small_batches")
def test_an_unfinished_store_of_another_corpus_is_not_continued(
    source: Path, tmp_path: Path
) -> None:
    def stop(progress: PreparationProgress) -> None:
        if progress.documents > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(text_corpus(str(source), "text"), tmp_path / "out", "bytes", None, stop)
    (source / "b.txt").write_text("changed")
    assert "holds an unfinished store, which differs in corpus. Delete it" in _refused(
        source, tmp_path / "out"
    )


def test_an_unfinished_store_without_documents_is_replaced_by_another_recipe(
    source: Path, tmp_path: Path
) -> None:
    def stop(progress: PreparationProgress) -> None:
        if progress.stage == "tokenizing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(text_corpus(str(source), "text"), tmp_path / "out", "bpe", 300, stop)
    assert _contents(_prepare(source, tmp_path / "out").folder) == _contents(
        _prepare(source, tmp_path / "whole").folder
    )


def test_two_writers_of_one_folder_are_refused(source: Path, tmp_path: Path) -> None:
    def second(_: PreparationProgress) -> None:
        raise ConfigError(_refused(source, tmp_path / "out"))

    with pytest.raises(ConfigError, match="another `mtrain data prepare` is writing this store"):
        prepare_store(text_corpus(str(source), "text"), tmp_path / "out", "bytes", None, second)


@pytest.mark.usefixtures("small_batches")
def test_a_full_disk_keeps_finished_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = prepare.StoreWriter.append, 0

    def full(writer, ids):
        nonlocal calls
        calls += 1
        if calls > 30:
            raise OSError(28, "No space left on device")
        real(writer, ids)

    monkeypatch.setattr(prepare.StoreWriter, "append", full)
    with pytest.raises(
        RunError,
        match=r"cannot be written \(No space left on device\)\. Run the same command again",
    ):
        _prepare(source, tmp_path / "out")
    monkeypatch.setattr(prepare.StoreWriter, "append", real)
    assert _contents(_prepare(source, tmp_path / "out").folder) == _contents(
        _prepare(source, tmp_path / "whole").folder
    )


def test_wrong_arguments_and_sources_write_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _refused(source, out, "bytes", 300).startswith(
        "--vocab-size 300: only for --tokenizer bpe"
    )
    assert (
        _refused(source, out, "bpe", 200)
        == "--vocab-size 200: a byte-level BPE needs at least 258 ids"
    )
    assert _refused(source, out, "none.json").startswith(
        "--tokenizer none.json: no such file. Give bytes, bpe, or the path of"
    )
    assert _refused(tmp_path / "none.txt", out).startswith(
        f"SOURCE={tmp_path / 'none.txt'}: no such file"
    )
    assert not (tmp_path / "out.partial").exists()
    assert "--text-key body: " in _refused(source, out, key="body")
    assert "--text-key body: " in _refused(source, out, "bpe", key="body")
    assert not (tmp_path / "out.partial").exists()
    (tmp_path / "empty.txt").write_text("")
    assert (
        _refused(tmp_path / "empty.txt", tmp_path / "e")
        == f"SOURCE={tmp_path / 'empty.txt'}: holds no text; left out: 1 empty or null"
    )
    assert not (tmp_path / "e.partial").exists()


def test_a_trained_bpe_is_reused_after_an_interruption(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(progress: PreparationProgress) -> None:
        if progress.stage == "tokenizing":
            raise KeyboardInterrupt

    corpus = text_corpus(str(source), "text")
    with pytest.raises(KeyboardInterrupt):
        prepare_store(corpus, tmp_path / "out", "bpe", 300, stop)

    def never(*_: object) -> None:
        raise AssertionError("trained twice")

    monkeypatch.setattr(prepare, "train_bpe", never)
    store = prepare_store(corpus, tmp_path / "out", "bpe", 300, _silent)
    assert store.meta.tokenizer == "bpe 300"
    text = store.open_tokenizer().decode(store.document(0))
    assert text == "text number 1\nwith two lines<|endoftext|>"


@pytest.mark.usefixtures("small_batches")
def test_a_tokenizer_without_exact_pieces_gets_whole_documents(
    source: Path, tmp_path: Path, monkeypatch
) -> None:
    seen: list[str] = []
    real = ByteTokenizer.encode

    def noting(self: ByteTokenizer, pieces):
        seen.extend(pieces)
        return real(self, pieces)

    monkeypatch.setattr(ByteTokenizer, "encode", noting)
    monkeypatch.setattr(ByteTokenizer, "exact_pieces", False)
    _prepare(source, tmp_path / "out")
    assert "a line of a long book\n" * 60 in seen


@pytest.mark.parametrize("name", ["", "lock", "journal.json.tmp", "tokens.bin", "tokenizer.json"])
def test_links_in_the_place_of_an_unfinished_store_are_refused(source, tmp_path, name):
    """In a shared folder, somebody else may have made them."""
    victim, partial = tmp_path / "victim", tmp_path / "out.partial"
    if name:
        partial.mkdir()
        victim.write_text("keep me")
    else:
        victim.mkdir()
    (partial / name if name else partial).symlink_to(victim)
    assert "is a symbolic link. Remove it, or give another OUT." in _refused(
        source, tmp_path / "out"
    )
    assert victim.read_text() == "keep me" if name else not any(victim.iterdir())


def test_a_complete_store_is_not_changed(source: Path, tmp_path: Path) -> None:
    _prepare(source, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert _prepare(source, tmp_path / "out").meta.num_documents == 35
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
