"""Data behind URLs are copied once, completely, and trained on like files here."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from places.fake_hub import COMMIT, fake_hub
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose, resume
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_extras.places import files, names
from mtrain_extras.places.entry import local

SMALL = ["seq=64", "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2",
         "model.num_kv_heads=1", "model.head_dim=16", "model.intermediate_size=48",
         "topology.workers=1", "topology.device=cpu", "train.steps=1"]  # fmt: skip


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names.local.cache_clear()
    yield fsspec.filesystem("memory")
    names.local.cache_clear()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def mtrain(*words):
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def text(number):
    return "".join(json.dumps({"text": f"document {number} {n} " * 9}) + "\n" for n in range(20))


def test_memory_and_file_urls_are_prepared_and_trained_on(machine, tmp_path):
    machine.pipe_file("/corpus/a.jsonl", text(1).encode())
    machine.pipe_file("/corpus/deep/b.jsonl", text(2).encode())
    mtrain("data", "prepare", "memory://corpus", "store")
    (tmp_path / "plain" / "deep").mkdir(parents=True)
    (tmp_path / "plain" / "a.jsonl").write_text(text(1))
    (tmp_path / "plain" / "deep" / "b.jsonl").write_text(text(2))
    mtrain("data", "prepare", "plain", "same")
    assert (tmp_path / "store/tokens.bin").read_bytes() == (
        tmp_path / "same/tokens.bin"
    ).read_bytes()
    meta = json.loads((tmp_path / "store/meta.json").read_text())
    assert "memory%3A%2F%2Fcorpus/@" in meta["source"]


def test_a_token_store_behind_a_url_is_trained_on(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 200)
    mtrain("data", "prepare", "a.txt", "store")
    url = f"file://{tmp_path}/store"
    mtrain("train", "data=tokens", f"data.path={url}", "run.name=x", *SMALL)
    path = resolved_file.load(tmp_path / "runs/x/resolved.yaml").data.path
    assert files.origin(path)[0] == url
    assert (Path(path) / "tokens.bin").read_bytes() == (tmp_path / "store/tokens.bin").read_bytes()


def test_a_file_is_copied_once_and_again_when_it_changes(machine, monkeypatch):
    machine.pipe_file("/a.txt", b"first")
    read, get = [], MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda self, *a, **k: read.append(a) or get(self, *a, **k)
    )
    first = local("data.path=", "memory://a.txt", "data")
    names.local.cache_clear()
    assert local("data.path=", "memory://a.txt", "data") == first
    assert Path(first).name == "a.txt"
    assert Path(first).read_bytes() == b"first"
    assert len(read) == 1
    names.local.cache_clear()
    machine.pipe_file("/a.txt", b"other")
    second = local("data.path=", "memory://a.txt", "data")
    assert Path(second).read_bytes() == b"other"
    assert Path(first).read_bytes() == b"first"  # a run that resumes keeps its data


def test_of_several_processes_one_copies(machine, monkeypatch):
    machine.pipe_file("/a.txt", b"first")
    read, get = [], MemoryFileSystem.get_file

    def slowly(self, *rest, **options):
        read.append(rest)
        time.sleep(0.05)
        get(self, *rest, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", slowly)
    with ThreadPoolExecutor(4) as pool:  # locks of files hold between threads, too
        jobs = [pool.submit(files.copy_here, "data.path=", "memory://a.txt") for _ in range(4)]
    assert {job.result().read_bytes() for job in jobs} == {b"first"}
    assert len(read) == 1


def test_a_copy_made_again_is_the_same_corpus(machine, tmp_path):
    machine.pipe_file("/a.jsonl", text(1).encode())
    mtrain("data", "prepare", "memory://a.jsonl", "store")
    names.local.cache_clear()
    shutil.rmtree(tmp_path / "cache")
    time.sleep(0.01)
    assert "Already complete" in mtrain("data", "prepare", "memory://a.jsonl", "store")


def test_of_a_token_store_only_its_files_are_copied(machine):
    machine.pipe_file("/store/meta.json", json.dumps({"files": {"tokens.bin": {}}}).encode())
    for name in ("tokens.bin", "tokenizer.json", "other.bin", "deep/tokens.bin"):
        machine.pipe_file(f"/store/{name}", b"12345678")
    folder = Path(local("data.path=", "memory://store", "data"))
    assert {p.name for p in folder.rglob("*")} == {"meta.json", "tokens.bin", "tokenizer.json"}


def test_an_incomplete_copy_is_never_used(machine, monkeypatch, tmp_path):
    machine.pipe_file("/a.txt", b"first")
    get = MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda *a, **_: Path(a[2]).write_bytes(b"fir")
    )
    with pytest.raises(ConfigError, match="has 3 bytes, not 5; it changed during the copy"):
        local("data.path=", "memory://a.txt", "data")
    assert not [p for p in tmp_path.glob("cache/**/*") if p.name == "a.txt"]
    monkeypatch.setattr(MemoryFileSystem, "get_file", get)
    assert Path(local("data.path=", "memory://a.txt", "data")).read_bytes() == b"first"


@pytest.mark.parametrize(
    "name", ["../../a.txt", "{absolute}/a.txt", "b//a.txt", "b/./a.txt", "b\\a.txt"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(monkeypatch, tmp_path, name):
    key = f"/d/{name.format(absolute=tmp_path)}"
    facts = {key: {"size": 5, "type": "file", "name": key}}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: facts)
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda *a, **_: Path(a[2]).write_bytes(b"first")
    )
    with pytest.raises(ConfigError, match="leads out of the folder"):
        local("data.path=", "memory://d", "data")
    assert not list(tmp_path.rglob("a.txt"))


def test_without_locks_the_first_copy_stays(machine, monkeypatch):
    """While this process copies, another one makes the same copy."""
    machine.pipe_file("/d/a.txt", b"first")

    def flock(*_):
        raise OSError("no locks")

    others, get = [], MemoryFileSystem.get_file

    def get_file(self, *rest, **options):
        monkeypatch.setattr(MemoryFileSystem, "get_file", get)
        others.append(files.copy_here("data.path=", "memory://d"))
        get(self, *rest, **options)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    folder = files.copy_here("data.path=", "memory://d")
    assert others == [folder]
    assert (folder / "a.txt").read_bytes() == b"first"
    assert len([*folder.parent.parent.glob(".*tmp*")]) == 0


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("memory://none", "data.path=memory://none: no such file or folder, or an empty one"),
        ("nosuch://a/b", "data.path=nosuch://a/b: cannot be opened (Protocol not known: nosuch)"),
        ("s3://k:secret@b/c", "give user and password in the environment, not in the URL"),
    ],
)
def test_wrong_urls_are_one_line(url, line):
    with pytest.raises(ConfigError) as caught:
        compose(["data=text", f"data.path={url}"])
    (problem,) = caught.value.problems
    assert line in problem


def test_a_plan_without_data_asks_no_place():
    compose(["data=text", "data.path=memory://none"], plan=True, data_elsewhere=True)


def test_a_run_that_resumes_gets_its_data_again_and_refuses_others(machine):
    machine.pipe_file("/d/a.txt", b"first" * 99)
    saved = compose(["data=text", "data.path=memory://d", "model.vocab_size=264"])
    path = Path(saved.data.path)
    names.local.cache_clear()
    shutil.rmtree(path.parent)
    again = resume(saved, ["data=text", "data.path=memory://d", "model.vocab_size=264"])
    assert again.data.path == saved.data.path
    assert (path / "a.txt").is_file()

    names.local.cache_clear()
    shutil.rmtree(path.parent)
    machine.pipe_file("/d/a.txt", b"other" * 99)
    with pytest.raises(
        ConfigError, match=r"data\.path=memory://d: has changed since the run began"
    ):
        resume(saved)


def test_a_named_set_becomes_json_lines_of_its_commit(monkeypatch, tmp_path):
    """The Hub is a server on loopback; `datasets.load_dataset` is replaced."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, config, **options):
        asked.append((name, config, options))
        yield {"text": "ä" * 50, "when": datetime.date(2026, 1, 2)}
        yield {"text": "two" * 50, "when": None}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with fake_hub(monkeypatch, tmp_path) as hub:
        hub.sets["org/set"] = {}
        mtrain("data", "prepare", "hf://org/set?split=test&name=en", "store")
        meta = json.loads((tmp_path / "store/meta.json").read_text())
        assert asked == [
            ("org/set", "en", {"split": "test", "revision": COMMIT, "streaming": True})
        ]
        assert f"hf%3A%2F%2Forg%2Fset%40{COMMIT}" in meta["source"]
        assert meta["num_documents"] == 2

        saved = compose(["data=text", "data.path=hf://org/set", "model.vocab_size=264"])
        rows = [json.loads(line) for line in Path(saved.data.path).read_text().splitlines()]
        assert rows[0] == {"text": "ä" * 50, "when": "2026-01-02"}
        hub.sets.clear()
        names.local.cache_clear()
        words = ["data=text", "data.path=hf://org/set", "model.vocab_size=264"]
        assert resume(saved, words).data.path == saved.data.path
        with pytest.raises(ConfigError, match=r"hf://org/none: no such .* repository on the Hub"):
            local("data.path=", "hf://org/none", "data")
        with pytest.raises(ConfigError, match="give split=NAME, name=CONFIGURATION or both"):
            local("data.path=", "hf://org/none?splits=a", "data")


def test_the_package_datasets_streams_a_named_set(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    with fake_hub(monkeypatch, tmp_path) as hub:
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        hub.sets["org/set"] = {
            "train.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
            "test.jsonl": b'{"text": "three"}\n',
        }
        path = Path(local("data.path=", "hf://org/set", "data"))
        assert path.read_text() == '{"text": "one"}\n{"text": "two"}\n'
        assert path.name == "set.jsonl"
        (tmp_path / "org" / "set").mkdir(parents=True)
        (tmp_path / "org" / "set" / "train.jsonl").write_text('{"text": "local"}\n')
        names.local.cache_clear()
        assert Path(local("data.path=", "hf://org/set", "data")) == path
        with pytest.raises(ConfigError, match=r"the folder org/set here hides the data set of the"):
            local("data.path=", "hf://org/set?split=test", "data")
        shutil.rmtree(tmp_path / "org")
        hub.sets["org/code"] = {"code.py": b"raise SystemExit", "train.jsonl": b'{"text": "one"}\n'}
        with pytest.raises(ConfigError, match=r"hf://org/code: .*scripts are no longer supported"):
            local("data.path=", "hf://org/code", "data")
        with pytest.raises(ConfigError, match=r"hf://org/set\?split=nine: cannot be read \(.*nine"):
            local("data.path=", "hf://org/set?split=nine", "data")


def test_files_of_the_hub_are_copied_as_they_are(monkeypatch, tmp_path):
    with fake_hub(monkeypatch, tmp_path) as hub:
        monkeypatch.setattr("huggingface_hub.HfFileSystem.cachable", False)
        hub.sets["org/set"] = {"a.jsonl": b'{"text": "one"}\n', "b.txt": b"two"}
        path = Path(local("data.path=", "hf://datasets/org/set/a.jsonl", "data"))
        assert path.read_bytes() == b'{"text": "one"}\n'
        folder = Path(local("data.path=", "hf://datasets/org/set", "data"))
        assert {one.name: one.read_bytes() for one in folder.iterdir()} == hub.sets["org/set"]
