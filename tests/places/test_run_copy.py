"""The copy of a run has complete checkpoints only, and a store that fails never stops training.

The store is the file system of fsspec in this process's memory.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
import zlib
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mtrain_cli.commands.train import require_runnable
from mtrain_cli.composition.compose import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import run_dir
from mtrain_cli.launch.manifest import Manifest, checksum, committed_steps
from mtrain_extras.places import entry, fetched_run, run_copy, run_place
from mtrain_extras.places.files import open_place, why

URL = "memory://runs"


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_place, "PAUSE_S", 0.001)
    monkeypatch.setattr(run_copy, "_POLL_S", 0.01)
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class Run:
    """A run's folder whose checkpoints a test writes, and the callbacks that follow it."""

    def __init__(self, folder, nodes=1, step=0, words=()):
        self.folder, self.lines = folder, []
        folder.mkdir(parents=True, exist_ok=True)
        config = compose([f"run.remote={URL}", f"run.dir={folder}", *words])
        self.keep_every = config.train.keep_every
        resolved_file.save(config, folder / "resolved.yaml")
        self.copies = []
        for node in range(nodes):
            environment = SimpleNamespace(rank=node, local_workers=1 if nodes > 1 else 2)
            trainer = SimpleNamespace(config=config, environment=environment, step=step)
            copy = entry.follow(trainer, SimpleNamespace(path=folder), self.message)
            self.copies.append(copy)
        for copy in self.copies:
            copy.before_training()

    def message(self, line, warning=False):
        self.lines.append((line, warning))

    def save(self, step, keep=2, attempt="of"):
        """Write a checkpoint as two ranks do, with a new row of metrics before it."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        partial = self.folder / "checkpoints" / f"step-{step}.tmp"
        partial.mkdir(parents=True)
        for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
            (partial / name).write_bytes(f"{name} {attempt} {step}".encode() * 50)
        sums = {path.name: checksum(path) for path in partial.iterdir()}
        Manifest(step, 2, "2", sums, {"step": step}).write(partial)
        if partial.with_suffix("").exists():
            shutil.rmtree(partial.with_suffix(""))
        partial.rename(partial.with_suffix(""))
        for old in committed_steps(self.folder / "checkpoints")[keep:]:
            if self.keep_every and not old % self.keep_every:
                continue
            for path in (self.folder / "checkpoints" / f"step-{old}").iterdir():
                path.unlink()
            (self.folder / "checkpoints" / f"step-{old}").rmdir()

    def wait(self, condition):
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, self.lines
            for copy in self.copies:
                copy.after_step()
            time.sleep(0.005)

    def close(self):
        for copy in reversed(self.copies):
            copy.close()

    @property
    def warnings(self):
        return [line for line, is_warning in self.lines if is_warning]


def complete(store, name="night"):
    """Return the steps whose manifest is at the store, after comparing what it names.

    Files are compared by their checksums, as a fetch does.
    """
    found = []
    for manifest in store.glob(f"/runs/{name}/checkpoints/step-*/manifest.json"):
        folder = manifest.rpartition("/")[0]
        for file, facts in json.loads(store.cat_file(manifest))["files"].items():
            content = store.cat_file(f"{folder}/{file}")
            assert {"bytes": len(content), "crc32": zlib.crc32(content)} == facts
        found.append(int(folder.rpartition("-")[2]))
    return sorted(found)


def recorded(monkeypatch, method, act=lambda *_: None):
    """Record the paths that a method of the store writes. act: may fail before it writes."""
    written, original = [], getattr(MemoryFileSystem, method)

    def call(self, *words, **options):
        path = words[1] if method == "put_file" else words[0]
        act(len(written), path)
        written.append(path)
        return original(self, *words, **options)

    monkeypatch.setattr(MemoryFileSystem, method, call)
    return written


def test_checkpoints_arrive_with_their_manifest_last(store, tmp_path, monkeypatch):
    put, piped = recorded(monkeypatch, "put_file"), recorded(monkeypatch, "pipe_file")
    seen = []
    monkeypatch.setattr(run_place.RunPlace, "write", watched(run_place.RunPlace.write, seen, put))
    run = Run(tmp_path / "night")
    run.save(2)
    run.wait(lambda: complete(store) == [2])
    run.save(4)
    run.close()
    assert complete(store) == [2, 4]
    assert all(f"/runs/night/checkpoints/step-{step}/{name}" in before
               for step, before in seen
               for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"))  # fmt: skip
    assert [step for step, _ in seen] == [2, 4]
    assert piped
    assert store.cat_file("/runs/night/metrics.jsonl") == b'{"step": 2}\n{"step": 4}\n'
    assert run.lines == [(f"run.remote={URL}: {URL}/night has the checkpoint of step 4", False)]


def watched(write, seen, put):
    def call(self, name, content):
        if name.endswith("manifest.json"):
            seen.append((int(name.split("/")[1].removeprefix("step-")), list(put)))
        write(self, name, content)

    return call


def test_deleted_checkpoints_are_deleted_after_the_newer_one_is_complete(store, tmp_path):
    run = Run(tmp_path / "night")
    for step in (2, 4, 6):
        run.save(step, keep=1)
        run.wait(lambda step=step: step in complete(store))
    run.close()
    assert complete(store) == [6]
    assert not store.glob("/runs/night/checkpoints/step-4*")


def test_a_checkpoint_that_the_run_deletes_meanwhile_arrives(store, tmp_path, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()

    def act(_, path):
        if path.endswith("__0_0.distcp") and not go_on.is_set():
            entered.set()
            assert go_on.wait(10)

    recorded(monkeypatch, "put_file", act)
    run = Run(tmp_path / "night")
    run.save(2, keep=1)
    run.wait(entered.is_set)
    run.save(4, keep=1)
    assert not (run.folder / "checkpoints/step-2").exists()
    go_on.set()
    run.close()
    assert complete(store) == [4]
    assert not run.warnings
    assert not list(run.folder.glob("uploading*"))


def test_checkpoints_that_stay_for_good_arrive_and_stay(store, tmp_path, monkeypatch):
    go_on = threading.Event()

    def act(_, path):
        if "step-2/" in path:
            assert go_on.wait(10)

    recorded(monkeypatch, "put_file", act)
    kept = ["train.checkpoint_every=2", "train.keep_every=4"]
    run = Run(tmp_path / "night", words=kept)
    run.save(2, keep=1)
    time.sleep(0.1)  # the store is slow, and the run goes on
    for step in (4, 6, 8, 10):
        run.save(step, keep=1)
    go_on.set()
    run.wait(lambda: complete(store) == [4, 8, 10])
    run.save(12, keep=1)
    run.save(14, keep=1)
    run.close()
    assert complete(store) == [4, 8, 12, 14]
    assert committed_steps(run.folder / "checkpoints") == [14, 12, 8, 4]
    assert not run.warnings


def test_the_metrics_arrive_before_a_checkpoint_that_is_kept_meanwhile(
    store, tmp_path, monkeypatch
):
    go_on, seen, original = threading.Event(), {}, run_place.RunPlace.write

    def write(self, name, content):
        if name.endswith("manifest.json"):
            seen[name.split("/")[1]] = store.cat_file("/runs/night/metrics.jsonl")
        original(self, name, content)

    monkeypatch.setattr(run_place.RunPlace, "write", write)
    recorded(monkeypatch, "put_file", lambda _, path: "step-2/" in path and go_on.wait(10))
    kept = ["train.checkpoint_every=2", "train.keep_every=4"]
    run = Run(tmp_path / "night", words=kept)
    run.save(2)
    time.sleep(0.1)
    run.save(4)  # while the store gets the first one
    go_on.set()
    run.wait(lambda: complete(store) == [2, 4])
    run.close()
    assert seen["step-4"].splitlines()[-1] == b'{"step": 4}'


def fail_while(condition):
    def act(number, path):
        if condition(number, path):
            raise OSError("the store is away")

    return act


def test_a_store_that_fails_twice_is_tried_again(store, tmp_path, monkeypatch):
    failures = []

    def act(_, path):
        if path.endswith(".distcp") and len(failures) < 2:
            failures.append(path)
            raise OSError("the store is away")

    recorded(monkeypatch, "put_file", act)
    run = Run(tmp_path / "night")
    run.save(2)
    run.wait(lambda: complete(store) == [2])
    run.close()
    assert len(failures) == 2
    assert not run.warnings


def test_a_store_that_fails_is_left_until_the_next_checkpoint(store, tmp_path, monkeypatch):
    is_away = False
    recorded(monkeypatch, "put_file", fail_while(lambda *_: is_away))
    run = Run(tmp_path / "night")
    run.wait(lambda: store.exists("/runs/night/resolved.yaml"))
    is_away = True
    run.save(2)
    run.wait(lambda: run.warnings)
    time.sleep(0.2)
    assert run.warnings == [
        f"run.remote={URL}: failed (the store is away); it has no checkpoint; tried again with "
        "the next checkpoint"
    ]
    is_away = False
    time.sleep(0.1)
    assert complete(store) == []
    run.save(4)
    run.wait(lambda: complete(store) == [4])
    run.close()
    assert len(run.warnings) == 1


def test_a_store_that_fails_for_good_is_said_at_the_end(store, tmp_path, monkeypatch):
    is_away = False
    recorded(monkeypatch, "put_file", fail_while(lambda *_: is_away))
    run = Run(tmp_path / "night")
    run.save(2)
    run.wait(lambda: complete(store) == [2])
    is_away = True
    run.save(4)
    run.close()
    assert complete(store) == [2]
    assert run.warnings[-1] == f"run.remote={URL}: failed (the store is away); it has step 2"
    assert run.lines[-1] == (
        f"run.remote={URL}: {URL}/night has the checkpoint of step 2", False,
    )  # fmt: skip


def test_the_end_waits_only_so_long(tmp_path, monkeypatch):
    monkeypatch.setattr(run_copy, "END_S", 0.2)
    hang = threading.Event()
    recorded(monkeypatch, "put_file", lambda _, path: "step-2" in path and hang.wait(20))
    run = Run(tmp_path / "night")
    run.save(2)
    began = time.monotonic()
    run.close()
    assert time.monotonic() - began < 5
    assert run.warnings == [
        f"run.remote={URL}: failed (not complete after 0.2 seconds); it has no checkpoint"
    ]
    assert not list((tmp_path / "night").glob("uploading-*"))
    hang.set()
    run.copies[0]._thread.join()


def test_a_store_that_no_longer_answers_is_left_although_its_package_tries_for_minutes(
    store, tmp_path, monkeypatch
):
    is_gone, mended = False, threading.Event()
    recorded(monkeypatch, "put_file", lambda *_: is_gone and mended.wait(20))
    recorded(monkeypatch, "cat_file", lambda *_: is_gone and mended.wait(20))
    monkeypatch.setattr(run_copy, "_QUIET_S", 0.1)
    monkeypatch.setattr(run_copy, "_ANSWER_S", 0.5)
    run = Run(tmp_path / "night")
    run.save(2)
    run.wait(lambda: complete(store) == [2])
    is_gone = True
    run.save(4)
    began = time.monotonic()
    run.close()
    assert time.monotonic() - began < 5
    assert run.warnings == [f"run.remote={URL}: failed (no answer for 0.5 seconds); it has step 2"]
    mended.set()
    run.copies[0]._thread.join()


def test_a_store_that_is_slow_or_away_for_a_moment_is_waited_for(store, tmp_path, monkeypatch):
    is_away = threading.Event()
    recorded(monkeypatch, "put_file", lambda *_: time.sleep(0.3))
    recorded(monkeypatch, "cat_file", lambda *_: is_away.is_set() and time.sleep(0.3))
    monkeypatch.setattr(run_copy, "_QUIET_S", 0.1)
    monkeypatch.setattr(run_copy, "_ANSWER_S", 2.0)
    run = Run(tmp_path / "night")
    run.save(2)
    is_away.set()
    run.close()
    is_away.clear()
    assert complete(store) == [2]
    assert run.warnings == []


def test_an_upload_that_holds_all_connections_of_its_client_is_waited_for(
    store, tmp_path, monkeypatch
):
    uploading, put, cat = {}, MemoryFileSystem.put_file, MemoryFileSystem.cat_file

    def put_file(self, *words, **options):
        if "step-2" in words[1]:
            uploading[id(self)] = threading.Event()
            time.sleep(1)
            uploading.pop(id(self)).set()
        return put(self, *words, **options)

    def cat_file(self, *words, **options):
        if upload := uploading.get(id(self)):
            upload.wait(20)
        return cat(self, *words, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(run_copy, "_QUIET_S", 0.1)
    monkeypatch.setattr(run_copy, "_ANSWER_S", 0.2)
    run = Run(tmp_path / "night")
    run.save(2)
    run.close()
    assert run.warnings == []
    assert complete(store) == [2]


def test_one_small_file_that_comes_too_late_is_no_reason_to_give_up(store, tmp_path, monkeypatch):
    asked, uploading = [], threading.Event()

    def upload(_, path):
        if "step-2" in path:
            uploading.set()
            time.sleep(1)

    def answer(*_):
        if uploading.is_set() and not asked:
            asked.append(1)
            time.sleep(0.6)

    recorded(monkeypatch, "put_file", upload)
    recorded(monkeypatch, "cat_file", answer)
    monkeypatch.setattr(run_copy, "_QUIET_S", 0.1)
    monkeypatch.setattr(run_copy, "_ANSWER_S", 0.3)
    run = Run(tmp_path / "night")
    run.save(2)
    run.wait(uploading.is_set)
    run.close()
    assert asked
    assert run.warnings == []
    assert complete(store) == [2]


def test_a_refused_run_leaves_nothing_at_its_place(store):
    run = run_dir.create(compose([f"run.remote={URL}", "run.name=night"]), [])
    first = Run(run.path)
    first.wait(lambda: store.exists("/runs/night/resolved.yaml"))
    first.close()
    (run.path / "metrics.jsonl").unlink(missing_ok=True)
    assert run.discard()
    assert store.find("/runs") == []
    again = Run(run.path)  # would be refused if the place had a run
    again.close()


@pytest.mark.parametrize("whose", ["another run's", "of a run with a checkpoint"])
def test_a_refused_run_removes_no_files_that_are(store, tmp_path, whose):
    kept = Run(tmp_path / "night")
    if whose == "of a run with a checkpoint":
        kept.save(2)
    kept.close()
    before = store.find("/runs")
    if whose == "another run's":
        (tmp_path / "night" / run_place.ID).write_text("mine\n")
    run_copy.unclaim(URL, tmp_path / "night")
    assert store.find("/runs") == before


def test_a_run_that_claimed_no_place_opens_none(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(run_copy, "RunPlace", lambda *words: opened.append(words))
    run_copy.unclaim(URL, tmp_path / "night")
    assert opened == []


def test_a_refused_run_does_not_wait_for_a_place_that_hangs(tmp_path, monkeypatch):
    kept, hang = Run(tmp_path / "night"), threading.Event()
    kept.close()
    recorded(monkeypatch, "cat_file", lambda *_: hang.wait(20))
    monkeypatch.setattr(run_copy, "_ANSWER_S", 0.2)
    began = time.monotonic()
    run_copy.unclaim(URL, tmp_path / "night")
    assert time.monotonic() - began < 5
    hang.set()


def test_each_node_sends_its_own_files_and_nothing_twice(store, tmp_path, monkeypatch):
    put = recorded(monkeypatch, "put_file")
    senders = {}
    original = run_place.RunPlace.put

    def note(self, file, name):
        senders[name] = (*senders.get(name, ()), file.parent.name)
        original(self, file, name)

    monkeypatch.setattr(run_place.RunPlace, "put", note)
    run = Run(tmp_path / "night", nodes=2)
    run.save(2)
    run.wait(lambda: complete(store) == [2])
    run.close()
    sent = {n.rpartition("/")[2]: by for n, by in senders.items() if "step-2" in n}
    assert sent == {
        "__0_0.distcp": ("uploading-0",),
        ".metadata": ("uploading-0",),
        "__1_0.distcp": ("uploading-1",),
    }
    assert len([path for path in put if "step-2" in path]) == 3
    assert not run.warnings


def test_a_node_that_cannot_send_tells_the_first_which_then_need_not_wait(
    store, tmp_path, monkeypatch
):
    words, is_away = {}, True
    monkeypatch.setattr(run_copy, "leave_word", words.__setitem__)
    monkeypatch.setattr(run_copy, "find_word", lambda key: words.get(key, ""))
    monkeypatch.setattr(run_copy, "_FAILED_NODE_S", 0.3)
    monkeypatch.setattr(run_copy.socket, "gethostname", lambda: "node1")

    def act(_, path):
        if is_away and path.endswith("__1_0.distcp"):
            raise PermissionError("AccessDenied")

    recorded(monkeypatch, "put_file", act)
    run = Run(tmp_path / "night", nodes=2)
    run.save(2)
    run.wait(lambda: len(run.warnings) == 2)
    line = "it has no checkpoint; tried again with the next checkpoint"
    assert sorted(run.warnings) == [
        f"run.remote={URL}: failed (AccessDenied); {line}",
        f"run.remote={URL}: failed (rank 1 on node1: AccessDenied); {line}",
    ]
    assert complete(store) == []
    is_away = False
    run.save(4)
    run.wait(lambda: complete(store) == [4])
    run.close()
    assert len(run.warnings) == 2


def test_a_checkpoint_that_another_node_leaves_out_is_not_waited_for(store, tmp_path):
    run = Run(tmp_path / "night", nodes=2)
    run.copies[1]._newest = lambda: (-1, 0)  # this node is late
    run.save(2)
    run.wait(lambda: store.exists("/runs/night/checkpoints/step-2/node-0-0"))
    run.save(4)
    del run.copies[1]._newest
    run.wait(lambda: 4 in complete(store))
    run.close()
    assert complete(store) == [4]
    assert not run.warnings


def test_a_checkpoint_that_stays_for_good_keeps_the_files_that_a_faster_node_sent(store, tmp_path):
    kept = ["train.checkpoint_every=2", "train.keep_every=4"]
    run = Run(tmp_path / "night", nodes=2, words=kept)
    run.copies[0]._newest = lambda: (-1, 0)
    run.copies[0]._here = lambda: iter(())
    for step in (4, 6):
        run.save(step)
        mark = f"/runs/night/checkpoints/step-{step}/node-1-1"
        run.wait(lambda mark=mark: store.exists(mark))
    del run.copies[0]._newest, run.copies[0]._here
    run.wait(lambda: complete(store) == [4, 6])
    run.close()
    assert complete(store) == [4, 6]
    assert not run.warnings


def manifests(store, run, step):
    """Return the manifest of a step at the store and here."""
    name = f"checkpoints/step-{step}/manifest.json"
    there = f"/runs/night/{name}"
    return store.cat_file(there) if store.exists(there) else None, (run.folder / name).read_bytes()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_step_that_is_trained_again_replaces_the_first_attempt(store, tmp_path, nodes, restarts):
    run = Run(tmp_path / "night", nodes)
    for step in (2, 4, 6):
        run.save(step, keep=3)
        run.wait(lambda step=step: step in complete(store))
    if restarts:
        run.close()
        run = Run(tmp_path / "night", nodes, step=2)
    for copy in run.copies:
        copy.on_checkpoint(4)  # the run fell back to step 2, and the later checkpoints are there
    run.save(4, keep=3, attempt="OF")
    run.wait(lambda: len({*manifests(store, run, 4)}) == 1)
    assert complete(store) == [2, 4, 6]
    run.close()
    assert not run.warnings


def test_a_checkpoint_that_goes_before_the_first_look_is_removed(store, tmp_path, monkeypatch):
    copied(tmp_path, 2).folder.rename(tmp_path / "lost")
    assert fetched_run.fetch(URL, tmp_path / "night")
    monkeypatch.setattr(run_copy, "_POLL_S", 60)
    run = Run(tmp_path / "night", step=2)
    run.save(4, keep=1)
    run.close()
    assert complete(store) == [4]


def test_files_of_a_dead_attempt_are_not_taken_for_those_of_another_node(
    store, tmp_path, monkeypatch
):
    folder, go_on = "/runs/night/checkpoints/step-2", threading.Event()
    size = len(b"__1_0.distcp of 2" * 50)
    store.pipe_file(f"{folder}/__1_0.distcp", b"x" * size)
    store.pipe_file(f"{folder}/node-1-1", b"hash of another manifest")
    recorded(
        monkeypatch,
        "put_file",
        lambda _, path: path.endswith("__1_0.distcp") and go_on.wait(10),
    )
    run = Run(tmp_path / "night", nodes=2)
    run.save(2)
    run.wait(lambda: store.exists(f"{folder}/__0_0.distcp"))
    time.sleep(0.2)
    assert not store.exists(f"{folder}/manifest.json")
    assert not store.exists(f"{folder}/node-1-1")  # of files that are being replaced
    go_on.set()
    run.wait(lambda: complete(store) == [2])
    run.save(4, keep=1)
    run.close()
    assert complete(store) == [4]
    assert not store.glob(f"{folder}/*")  # the marks go with the checkpoint
    assert fetched_run.fetch(URL, tmp_path / "other" / "night")
    assert not list((tmp_path / "other").rglob("node-*"))


def test_a_manifest_of_an_earlier_attempt_goes_before_its_files_change(
    store, tmp_path, monkeypatch
):
    run = Run(tmp_path / "night", nodes=2)
    run.save(2)
    run.wait(lambda: complete(store) == [2])
    seen = []
    recorded(
        monkeypatch,
        "put_file",
        lambda _, path: seen.append(store.exists(f"{path.rpartition('/')[0]}/manifest.json")),
    )
    run.save(2, attempt="OF")
    run.wait(lambda: len({*manifests(store, run, 2)}) == 1)
    run.close()
    assert complete(store) == [2]
    assert not any(seen[:3])


def test_a_fetched_run_keeps_the_older_checkpoints_of_its_place(store, tmp_path):
    copied(tmp_path, 10, 20, 30).folder.rename(tmp_path / "lost")
    store.pipe_file("/runs/night/checkpoints/step-15/__0_0.distcp", b"incomplete")
    assert fetched_run.fetch(URL, tmp_path / "night")
    run = Run(tmp_path / "night", step=30)
    run.save(40, keep=3)
    run.wait(lambda: 40 in complete(store))
    run.close()
    assert complete(store) == [10, 20, 30, 40]
    assert not store.glob("/runs/night/checkpoints/step-15*")


@pytest.mark.parametrize("name", ["evaluation//{0}/evil.id", "/{0}/evil.id", "tokenizer/./evil.id"])
def test_names_that_lead_out_of_the_run_are_refused(tmp_path, monkeypatch, name):
    copied(tmp_path, 2).folder.rename(tmp_path / "lost")
    find, key = MemoryFileSystem.find, f"/runs/night/{name.format(str(tmp_path)[1:])}"

    def with_evil(self, path, **options):
        return {**find(self, path, **options), key: {"size": 4, "type": "file", "name": key}}

    monkeypatch.setattr(MemoryFileSystem, "find", with_evil)
    with pytest.raises(
        ConfigError, match=r"cannot be read \(the name '.*' leads out of the folder"
    ):
        fetched_run.fetch(URL, tmp_path / "night")
    assert not list(tmp_path.rglob("evil.id"))


def test_a_place_of_another_run_is_refused(tmp_path):
    Run(tmp_path / "a" / "night").close()
    with pytest.raises(ConfigError, match="memory://runs/night has another run; resume that one"):
        Run(tmp_path / "b" / "night")


def test_a_run_that_is_lost_before_its_first_checkpoint_starts_again(store, tmp_path, capsys):
    first = Run(tmp_path / "night")
    first.wait(lambda: store.exists("/runs/night/resolved.yaml"))
    shutil.move(tmp_path / "night", tmp_path / "lost")
    config = compose([f"run.remote={URL}", "run.dir=night"])
    entry.fetch_run(config)
    assert capsys.readouterr().err == (
        f"run.remote={URL}: {URL}/night has no complete checkpoint; the run starts again\n"
    )
    second = Run(tmp_path / "night")
    # The first one is alive after all. It leaves the place to the second one.
    first.copies[0]._folder = first.folder = tmp_path / "lost"
    first.save(2)
    first.wait(lambda: first.warnings)
    assert "has another run" in first.warnings[0]
    assert complete(store) == []
    second.save(4)
    second.close()
    assert complete(store) == [4]
    first.close()


def test_a_full_store_is_named_by_its_own_path(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file, place = tmp_path / "0.distcp", open_place("run.remote=x", f"file://{tmp_path}/store")
    file.write_bytes(bytes(100))
    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(OSError, match="No space left") as caught:
        place.put(file, "checkpoints/0.distcp")
    expected = f"No space left on device: {tmp_path}/store/checkpoints/0.distcp"
    assert why(caught.value) == expected


def test_a_new_run_needs_a_place_that_works(tmp_path, monkeypatch):
    def cat_file(*_, **__):
        raise PermissionError("access denied")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with pytest.raises(
        ConfigError, match=r"run\.remote=memory://runs: cannot be used \(access den"
    ):
        Run(tmp_path / "night")
    run = Run(tmp_path / "night", step=4)  # a run that resumes goes on
    run.close()
    assert "failed (access denied); it has no checkpoint" in run.warnings[0]


def test_a_new_run_waits_only_so_long_for_an_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(run_copy, "_START_S", 0.1)
    hang = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: hang.wait(20))
    with pytest.raises(ConfigError, match=r"memory://runs: does not answer for 0\.1 seconds"):
        Run(tmp_path / "night")
    run = Run(tmp_path / "night", step=4)  # a run that resumes does not wait
    hang.set()
    run.close()


def copied(tmp_path, *steps):
    run = Run(tmp_path / "night")
    for step in steps:
        run.save(step, keep=len(steps))
        run.wait(lambda step=step: step in complete(fsspec.filesystem("memory")))
    run.close()
    return run


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_lost_run_comes_back_with_its_newest_checkpoint(tmp_path):
    run = copied(tmp_path, 2, 4)
    before = contents(run.folder)
    run.folder.rename(tmp_path / "lost")
    assert fetched_run.fetch(URL, tmp_path / "night")
    after = contents(tmp_path / "night")
    assert {n: c for n, c in before.items() if "step-2/" not in n} == {
        n: c for n, c in after.items() if n != "report.html"
    }
    assert not fetched_run.fetch(URL, tmp_path / "other")
    assert not list(tmp_path.glob(".*fetch*"))


@pytest.mark.parametrize(
    ("resume", "words"), [(f"{URL}/night", []), ("night", ["seq=8", f"run.remote={URL}"])]
)
def test_resume_takes_the_place_of_a_run(tmp_path, resume, words):
    copied(tmp_path, 2).folder.rename(tmp_path / "lost")
    assert entry.fetch_named(resume, words) == "night"
    assert committed_steps(tmp_path / "runs" / "night" / "checkpoints") == [2]
    with pytest.raises(ConfigError, match="--resume memory://runs/day: no run with a complete"):
        entry.fetch_named(f"{URL}/day", words)


def test_a_run_here_gets_only_what_is_newer(store, tmp_path):
    run = copied(tmp_path, 2)
    old = contents(run.folder)
    other = tmp_path / "elsewhere" / "night"
    assert fetched_run.fetch(URL, other)
    later = Run(other, step=2)
    later.save(4)
    later.close()
    assert fetched_run.fetch(URL, run.folder)
    assert committed_steps(run.folder / "checkpoints") == [4, 2]
    now = contents(run.folder)
    assert {n: now[n] for n in old if "step-2/" in n} == {n: old[n] for n in old if "step-2/" in n}
    assert now["metrics.jsonl"] == b'{"step": 2}\n{"step": 4}\n'
    (run.folder / "metrics.jsonl").write_text("mine")
    assert fetched_run.fetch(URL, run.folder)  # nothing is newer
    assert (run.folder / "metrics.jsonl").read_text() == "mine"
    assert complete(store) == [2, 4]


@pytest.mark.parametrize("damage", ["altered", "missing", "manifest", "incomplete"])
def test_a_damaged_copy_is_skipped(store, tmp_path, capsys, damage):
    copied(tmp_path, 2, 4).folder.rename(tmp_path / "lost")
    folder = "/runs/night/checkpoints/step-4"
    if damage == "altered":
        size = len(store.cat_file(f"{folder}/__1_0.distcp"))
        store.pipe_file(f"{folder}/__1_0.distcp", b"x" * size)
    elif damage == "missing":
        store.rm_file(f"{folder}/__1_0.distcp")
    elif damage == "manifest":
        store.pipe_file(f"{folder}/manifest.json", b"{}")
    else:
        store.rm_file(f"{folder}/manifest.json")
    assert fetched_run.fetch(URL, tmp_path / "night")
    assert committed_steps(tmp_path / "night" / "checkpoints") == [2]
    assert ("warning: memory://runs/night/checkpoints/step-4: " in capsys.readouterr().err) == (
        damage != "incomplete"
    )


def test_without_an_intact_checkpoint_nothing_is_written(store, tmp_path):
    copied(tmp_path, 2).folder.rename(tmp_path / "lost")
    store.pipe_file("/runs/night/checkpoints/step-2/.metadata", b"x")
    with pytest.raises(ConfigError, match=r"no intact checkpoint; .*\.metadata has 1 bytes"):
        fetched_run.fetch(URL, tmp_path / "night")
    assert not (tmp_path / "night").exists()


def test_a_wrong_url_is_said_before_workers_start(tmp_path):
    config = compose(["run.remote=nosuch://b/x", f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=r"run.remote=nosuch://b/x: cannot be opened .*nosuch"):
        require_runnable(config)
