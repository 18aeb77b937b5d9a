"""The token store on disk."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from masked_documents import without_checksums

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import checked_files
from mtrain_cli.data.arrays import open_array
from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.store import StoreWriter, TokenStore
from mtrain_cli.data.tokenizers import ByteTokenizer, open_tokenizer
from mtrain_cli.launch.failures import READ_FAILURES, RunError, failure_from
from mtrain_cli.launch.restart import is_machine_failure
from mtrain_extras.mds.shards import MdsFolder

CORPUS = Corpus("a test", "", "", ())
DOCUMENTS = [b"hello", b"", b"the second", b"x"]


def _write(folder: Path, documents: list[bytes] = DOCUMENTS) -> Path:
    folder.mkdir()
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "documents.bin").open("wb") as offsets,
    ):
        files = {"tokens.bin": tokens, "documents.bin": offsets}
        writer = StoreWriter(files, ByteTokenizer())
        for document in documents:
            for part in (document[:2], document[2:]):
                writer.append(np.frombuffer(part, np.uint8))
            writer.end_document()
        writer.finish(folder, CORPUS, {"corpus": "c"})
    return folder


def test_documents_are_read_back_with_boundaries_and_end_tokens(tmp_path: Path) -> None:
    store = TokenStore.open(_write(tmp_path / "s"))
    store.verify()
    assert store.tokens.dtype == np.uint16
    assert [store.document(number).tolist() for number in range(3)] == [
        [*document, 257] for document in DOCUMENTS if document
    ]
    assert (
        store.meta.num_documents,
        store.meta.num_tokens,
        store.meta.vocab_size,
        store.meta.source,
    ) == (3, 19, 264, "a test")
    assert store.open_tokenizer().decode(store.tokens) == "hellothe secondx"


def test_large_vocabularies_are_stored_in_32_bits(bpe_file: Path) -> None:
    tokenizer = open_tokenizer(str(bpe_file))
    tokenizer.vocab_size = 70_000
    writer = StoreWriter.in_memory(tokenizer)
    writer.append(np.array([3, 69_999]))
    writer.end_document()
    store = writer.memory_store(CORPUS)
    assert store.meta.dtype == "uint32"
    assert store.tokens.tolist() == [3, 69_999, 0]


def test_the_fingerprint_depends_on_boundaries_not_only_on_tokens(tmp_path: Path) -> None:
    one = TokenStore.open(_write(tmp_path / "a", [b"ab"]))
    endless = ByteTokenizer()
    endless.eos = None
    writer = StoreWriter.in_memory(endless)
    for part in ([97], [98, 257]):
        writer.append(np.array(part))
        writer.end_document()
    other = writer.memory_store(CORPUS)
    assert np.array_equal(one.tokens, other.tokens)
    assert one.meta.sha256 != other.meta.sha256


def _meta(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**content, **changes}))

    return change


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-2])


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _unsorted(folder: Path) -> None:
    (folder / "documents.bin").write_bytes(np.array([0, 12, 6, 19], "<i8").tobytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut("tokens.bin"), "tokens.bin has 36 bytes, but meta.json implies 38"),
        (_cut("documents.bin"), "documents.bin has 30 bytes, but meta.json implies 32"),
        (_remove("tokens.bin"), "tokens.bin is missing"),
        (
            _remove("meta.json"),
            "no meta.json in it. Give a folder that `mtrain data prepare` of this",
        ),
        (_unsorted, "documents.bin is corrupt"),
        (_meta(version=99), "meta.json has version 99, but mtrain reads version 1"),
        (_meta(dtype="int8"), "meta.json is damaged"),
        (_meta(dtype=[]), "meta.json is damaged"),
        (_meta(num_tokens=0), "meta.json is damaged"),
        (_meta(num_tokens="many"), "meta.json is damaged"),
        (_meta(files={"tokens.bin": 3}), "meta.json is damaged"),
        (_meta(files={"../x": {"bytes": 1, "sample": "", "chunks": []}}), "meta.json is damaged"),
        (_meta(left_out={"a": "x"}), "meta.json is damaged"),
        (_meta(files=[]), "meta.json is damaged"),
        (lambda folder: (folder / "meta.json").write_text("{"), "meta.json is not JSON"),
        (lambda folder: (folder / "meta.json").write_bytes(b"\xff\xfe"), "meta.json is not JSON"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "meta.json has version None"),
        (
            lambda folder: (folder / "meta.json").write_text('{"version": 1}'),
            "meta.json is damaged (dtype is missing)",
        ),
    ],
)
def test_a_damaged_store_is_one_clear_line(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = _write(tmp_path / "s")
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        TokenStore.open(folder, f"data.path={folder}")
    assert str(caught.value).startswith(f"data.path={folder}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [*sorted(READ_FAILURES), errno.EACCES, errno.ENOENT])
def test_a_failing_disk_is_a_machine_failure_and_an_unreadable_file_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    shards = MdsFolder(Path(__file__).parents[1] / "mds" / "shards" / "raw")
    np.save(tmp_path / "a.npy", np.arange(4, dtype=np.uint16))
    folder = _write(tmp_path / "s")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(np, "memmap", fail)
    monkeypatch.setattr(np, "load", fail)
    readings: list[Callable[[], object]] = [
        lambda: TokenStore.open(folder),
        lambda: shards.sample(0, list(shards.columns)),
        lambda: open_array(tmp_path / "a.npy", "data.path=a.npy", "auto", 100),
    ]
    for read in readings:
        with pytest.raises((ConfigError, RunError)) as caught:
            read()
        assert isinstance(caught.value, RunError) == (number in READ_FAILURES)
        assert is_machine_failure(failure_from(caught.value)) == (number in READ_FAILURES), str(
            caught.value
        )


def _flip(path: Path, at: int = 4) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_opening_finds_a_change_in_the_sample_and_names_the_file(tmp_path, name):
    folder = _write(tmp_path / "s")
    TokenStore.open(folder).verify()
    _flip(folder / name, 12)
    with pytest.raises(ConfigError, match=rf"data\.path=s: {name} (has changed|is corrupt)"):
        TokenStore.open(folder, "data.path=s")


def test_verify_finds_one_bit_outside_the_sample_in_the_part_that_has_it(tmp_path, monkeypatch):
    """Four callers share the chunks, and one of them has the bit."""
    monkeypatch.setattr(checked_files, "_CHUNK", 1 << 12)
    monkeypatch.setattr(checked_files, "_BLOCK", 1 << 5)
    folder = _write(tmp_path / "s", [bytes(range(256)) * 100])
    _flip(folder / "tokens.bin", 9_000)
    store, seen = TokenStore.open(folder), []
    failed = []
    for part in range(4):
        try:
            store.verify(part, 4, lambda done, size: seen.append((done, size)))
        except ConfigError as error:
            failed.append((part, str(error)))
    assert failed == [
        (
            2,
            f"{folder}: tokens.bin has changed since it was written: bytes 8,192 to 12,288 have "
            "another checksum. Put the file back, or prepare the store again.",
        )
    ]
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_store_without_checksums_of_files_opens_and_is_verified_by_its_one_hash(tmp_path):
    folder = without_checksums(_write(tmp_path / "s"))
    before = TokenStore.open(folder)
    before.verify()
    _flip(folder / "tokens.bin")
    after = TokenStore.open(folder)
    assert after.samples["tokens.bin"] != before.samples["tokens.bin"]
    with pytest.raises(ConfigError, match=r"tokens\.bin or another file has changed.*sha256"):
        after.verify()


def test_a_sample_reads_little_of_a_large_file_and_its_places_follow_the_size(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    before = checked_files.sample_of(path)
    with path.open("r+b") as file:
        file.seek((1 << 40) - 1)
        file.write(b"x")
    assert checked_files.sample_of(path) != before, "the last block is in the sample"
    os.truncate(path, (1 << 40) - 1)
    assert checked_files.sample_of(path) != before, "the size is in the sample"


def test_a_store_in_memory_equals_one_on_disk(tmp_path: Path) -> None:
    on_disk = TokenStore.open(_write(tmp_path / "s"))
    writer = StoreWriter.in_memory(ByteTokenizer())
    for document in DOCUMENTS:
        writer.append(np.frombuffer(document, np.uint8))
        writer.end_document()
    in_memory = writer.memory_store(CORPUS)
    assert in_memory.meta.sha256 == on_disk.meta.sha256
    assert np.array_equal(in_memory.tokens, on_disk.tokens)
    assert np.array_equal(in_memory.offsets, on_disk.offsets)
