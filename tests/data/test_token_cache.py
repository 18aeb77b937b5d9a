"""Corpora tokenised on the fly: once, by one process, whatever happens to the others."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import token_cache
from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.data.text_files import text_corpus
from mtrain_cli.data.tokenizers import ByteTokenizer


@pytest.fixture
def corpus(jsonl: Callable[..., Path]) -> Corpus:
    return text_corpus(str(jsonl(["some text", "more text"])), "text")


def _entries(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.suffix != ".lock"]


def test_opening_again_reads_the_cache_and_not_the_corpus(corpus: Corpus, cache_root: Path) -> None:
    first, where = token_cache.cached_store(corpus, ByteTokenizer())
    (entry,) = _entries(cache_root)
    assert where == f"cached in {entry}"
    Path(corpus.origin.split("=")[1]).unlink()
    second, _ = token_cache.cached_store(corpus, ByteTokenizer())
    assert np.array_equal(first.tokens, second.tokens)


def test_the_error_of_an_empty_corpus_says_what_was_left_out(tmp_path: Path) -> None:
    for name in ("a.txt", "b.pdf", "c.pdf"):
        (tmp_path / name).touch()
    message = r"holds no text; left out: 2 of other kinds, 1 empty or null"
    with pytest.raises(ConfigError, match=message):
        token_cache.cached_store(text_corpus(str(tmp_path), "text"), ByteTokenizer())


@pytest.mark.parametrize("damaged", ["tokens.bin", "documents.bin", "meta.json"])
def test_a_damaged_entry_is_rebuilt(corpus: Corpus, cache_root: Path, damaged: str) -> None:
    first, _ = token_cache.cached_store(corpus, ByteTokenizer())
    expected = first.tokens.tolist()
    (entry,) = _entries(cache_root)
    (entry / damaged).unlink()
    (entry / damaged).write_bytes(b"{")
    second, where = token_cache.cached_store(corpus, ByteTokenizer())
    assert second.tokens.tolist() == expected
    assert where.startswith("cached")


def test_leftovers_of_a_killed_process_are_removed(corpus: Corpus, cache_root: Path) -> None:
    token_cache.cached_store(corpus, ByteTokenizer())
    (entry,) = _entries(cache_root)
    (cache_root / f"{entry.name}.tmpdead").mkdir()
    token_cache.cached_store(corpus, ByteTokenizer())
    assert _entries(cache_root) == [entry]


def test_a_cache_folder_that_cannot_be_written_falls_back_to_memory_and_says_so(
    make_config, jsonl: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(kind="text", path=str(jsonl(["some text " * 20])))
    cached = open_dataset(config)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    dataset = open_dataset(config)
    assert (
        "in memory, since the cache folder cannot be written (Not a directory)"
        in dataset.describe()
    )
    assert dataset.fingerprint == cached.fingerprint
    assert np.array_equal(dataset[0].tokens, cached[0].tokens)


def test_waiting_for_a_removed_lock_file_still_excludes_later_processes(
    tmp_path: Path,
) -> None:
    """Locks belong to opened files, so three threads do: one fails, one has waited for it, and one
    comes when the file is gone.
    """
    inside, most, order = 0, 0, []
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def work(name: str, hold_s: float, begun: threading.Event | None = None) -> None:
        nonlocal inside, most
        with token_cache._lock(tmp_path / "key.lock", tmp_path / "key") as alone:
            assert alone
            inside += 1
            most = max(most, inside)
            order.append(name)
            if begun is not None:
                begun.set()
            time.sleep(hold_s)
            inside -= 1

    workers = [
        threading.Thread(target=work, args=words)
        for words in (("first", 0.3, first_is_in), ("second", 0.3, second_is_in), ("third", 0.0))
    ]
    workers[0].start()
    assert first_is_in.wait(10)
    workers[1].start()
    assert second_is_in.wait(10)
    workers[2].start()
    for worker in workers:
        worker.join(10)
    assert (most, order) == (1, ["first", "second", "third"])
    assert list(tmp_path.iterdir()) == []


def test_without_a_home_folder_the_store_is_in_memory(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/does/not/count")
    monkeypatch.delenv("HOME", raising=False)

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    store, where = token_cache.cached_store(corpus, ByteTokenizer())
    assert store.meta.num_documents == 2
    assert "this user has no home folder" in where


@pytest.mark.parametrize("locks", [True, False])
def test_workers_that_start_at_once_share_one_entry(
    jsonl: Callable[..., Path], cache_root: Path, locks: bool
) -> None:
    """Start four processes at once, with file locks and on a file system without."""
    path = jsonl([f"text number {number} " * 50 for number in range(2000)])
    script = f"""
import fcntl, sys
from mtrain_cli.data import token_cache
from mtrain_cli.data.text_files import text_corpus
from mtrain_cli.data.tokenizers import ByteTokenizer
if not {locks}:
    def flock(*_):
        raise OSError(37, "No locks available")
    fcntl.flock = flock
corpus = text_corpus({str(path)!r}, "text")
print("ready", flush=True)
sys.stdin.readline()
store, where = token_cache.cached_store(corpus, ByteTokenizer())
store.verify()
print(where, store.meta.sha256)
"""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path.cwd(),
        )
        for _ in range(4)
    ]
    try:
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        answers = {worker.communicate(timeout=60)[0] for worker in workers}
    finally:
        for worker in workers:
            worker.kill()
    (answer,) = answers
    assert answer.startswith("cached in ")
    (entry,) = _entries(cache_root)
    assert json.loads((entry / "meta.json").read_text())["num_documents"] == 2000


def test_a_changed_corpus_or_tokenizer_is_another_entry(
    make_config, jsonl: Callable[..., Path], bpe_file: Path, cache_root: Path
) -> None:
    path = str(jsonl(["x" * 100]))
    config = make_config(kind="text", path=path)
    before = open_dataset(config)
    jsonl(["y" * 100])
    assert open_dataset(config).fingerprint != before.fingerprint
    open_dataset(make_config(kind="text", path=path, tokenizer=str(bpe_file), vocab_size=300))
    assert len(_entries(cache_root)) == 3


def test_a_full_disk_falls_back_to_memory_and_leaves_nothing(
    corpus: Corpus, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mtrain_cli.data.store.os.fsync", full)
    store, where = token_cache.cached_store(corpus, ByteTokenizer())
    assert store.meta.num_documents == 2
    assert "No space left on device" in where
    assert _entries(cache_root) == []
