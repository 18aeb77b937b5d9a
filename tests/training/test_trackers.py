"""Trackers receive the rows of a run's files, by the real packages without a network."""

import json
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from reporting.training_runs import step as metrics_of

from mtrain_cli.commands.train import load_callbacks
from mtrain_cli.composition.compose import compose
from mtrain_cli.records.metrics import MetricsWriter
from mtrain_extras.trackers import follower as module
from mtrain_extras.trackers.follower import follower


def fail(line, **_):
    pytest.fail(line)


def followed_by(name, make, folder, start=0, message=fail):
    """Return trackers that have begun to follow a run's folder."""
    config = compose([f"run.loggers=[{name}]", "run.project=books"])
    environment = SimpleNamespace(rank=0)
    trainer = SimpleNamespace(environment=environment, config=config, step=start)
    made = make(trainer, SimpleNamespace(path=folder), message)
    made.before_training()
    return made


def attempt(folder, name, first, last, start=0, make=None, message=fail):
    """Follow an attempt of a run that writes the steps ``first`` to ``last``."""
    if make is None:
        (make,) = load_callbacks(compose([f"run.loggers=[{name}]"]))
    with MetricsWriter(folder, start_step=start) as writer:
        followed = followed_by(name, make, folder, start, message)
        for step in range(first, last + 1):
            writer.write(replace(metrics_of(step), loss=10.0 * first + step))
    with (folder / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps({"step": last, "loss": float(last), "buckets": []}) + "\n")
    followed.close()


def tensorboard_rows(folder, _):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in ("train/loss", "held_out/loss")
    }


def mlflow_rows(_, own):
    from mlflow import MlflowClient

    client = MlflowClient()
    assert client.get_run(own).data.params["run.project"] == "books"
    assert client.get_run(own).info.status == "FINISHED"
    history = {tag: client.get_metric_history(own, tag) for tag in ("train/loss", "held_out/loss")}
    return {tag: [(row.step, row.value) for row in rows] for tag, rows in history.items()}


def trackio_rows(folder, own):
    import sqlite3

    with sqlite3.connect(folder / "trackio" / "books.db") as base:
        rows = base.execute("select step, metrics from metrics where run_name = ?", (own,))
        return by_tag([(step, json.loads(text)) for step, text in rows])


def wandb_rows(folder, own):
    """Read the log of an offline run: blocks of 32 KiB of records in parts, as LevelDB's."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for path in sorted(folder.glob(f"wandb/offline-run-*/run-{own}.wandb")):
        data, place, record = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
                continue
            length, kind = struct.unpack_from("<HB", data, place + 4)
            record, place = record + data[place + 7 : place + 7 + length], place + 7 + length
            if kind in (1, 4):  # whole, or the last part
                item = Record.FromString(record).history.item
                found = {"/".join(x.nested_key) or x.key: json.loads(x.value_json) for x in item}
                rows += [(found["step"], found)] if "step" in found else []
                record = b""
    return by_tag(rows)


def by_tag(rows):
    return {
        tag: [(step, values[tag]) for step, values in rows if tag in values]
        for tag in ("train/loss", "held_out/loss")
    }


@pytest.mark.parametrize(
    ("name", "package", "read"),
    [
        ("tensorboard", "tensorboard", tensorboard_rows),
        ("mlflow", "mlflow", mlflow_rows),
        ("trackio", "trackio", trackio_rows),
        ("wandb", "wandb", wandb_rows),
    ],
)
def test_a_resumed_run_continues_its_curve(tmp_path, monkeypatch, name, package, read):
    pytest.importorskip(package)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    if name == "trackio":  # it reads TRACKIO_DIR when it is imported
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    attempt(tmp_path, name, 1, 2)
    time.sleep(1.1 if name == "wandb" else 0)  # the name of its folder has the second
    attempt(tmp_path, name, 3, 4, start=2)
    known = tmp_path / f"{name}.id"
    own = known.read_text().strip() if known.exists() else None
    expected = {
        "train/loss": [(1, 11.0), (2, 12.0), (3, 33.0), (4, 34.0)],
        "held_out/loss": [(2, 2.0), (4, 4.0)],
    }
    deadline = time.monotonic() + 20  # a package may write after it has ended
    while (found := read(tmp_path, own)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found == expected


def test_tensorboard_hides_the_steps_of_a_lost_attempt(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "loss": 9.0}\n')
    attempt(tmp_path, "tensorboard", 1, 3)
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "loss": 9.0}\n')  # as a resume does
    attempt(tmp_path, "tensorboard", 2, 2, start=1)
    assert tensorboard_rows(tmp_path, None) == {
        "train/loss": [(1, 11.0), (2, 22.0)],
        "held_out/loss": [(0, 9.0), (2, 2.0)],
    }


class Failing:
    def __init__(self, _):
        self.rows = 0

    def log(self, step, _):
        if step == 2:
            raise OSError("no room")

    def close(self, _):
        raise AssertionError("it was left before")


class Hanging:
    def __init__(self, _):
        threading.Event().wait()


@pytest.mark.parametrize(
    ("kind", "why"), [(Failing, "OSError: no room"), (Hanging, "did not answer for 0.2 seconds")]
)
def test_a_tracker_that_fails_or_hangs_is_left_with_one_warning(tmp_path, monkeypatch, kind, why):
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    warnings, begin = [], time.monotonic()

    def message(line, warning):
        assert warning
        warnings.append(line)

    attempt(tmp_path, "wandb", 1, 3, make=follower("wandb", kind), message=message)
    assert warnings == [
        f"run.loggers: wandb is left ({why}); training goes on, and metrics.jsonl has all steps"
    ]
    assert time.monotonic() - begin < 20


def test_half_a_line_waits_for_its_end(tmp_path, monkeypatch):
    seen = []

    class Listing:
        def __init__(self, _):
            pass

        def log(self, step, values):
            seen.append((step, values))

        def close(self, _):
            seen.append("closed")

    monkeypatch.setattr(module, "_POLL", 0.01)
    file = (tmp_path / "metrics.jsonl").open("a", buffering=1)
    file.write('{"step": 1, "loss": 2.5, "skipped": null, "ok": true}\n{"step": 2, "lo')
    file.flush()
    followed = followed_by("wandb", follower("wandb", Listing), tmp_path)
    deadline = time.monotonic() + 20
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen == [(1, {"train/loss": 2.5})]
    file.write('ss": 2.25}\n')
    file.close()
    followed.close()
    assert seen[1:] == [(2, {"train/loss": 2.25}), "closed"]


class Rows:
    def __init__(self, run):
        self.seen = run.folder / "seen"
        self.fails_at = int((run.folder / "fails_at").read_text())

    def log(self, step, values):
        if step == self.fails_at:
            raise OSError("no network")
        with self.seen.open("a") as file:
            file.writelines(f"{name} {step}\n" for name in values)

    def close(self, failed):
        with self.seen.open("a") as file:
            file.write(f"failed {failed}\n")


def test_a_resumed_run_sends_what_the_tracker_lacks_and_skips_damaged_lines(tmp_path):
    fails_at = tmp_path / "fails_at"
    fails_at.write_text("2")
    warnings, make = [], follower("rows", Rows)
    attempt(tmp_path, "wandb", 1, 3, make=make, message=lambda line, **_: warnings.append(line))
    assert len(warnings) == 1
    fails_at.write_text("9")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": \n[1]\n{"loss": 1.0}\n')
    (tmp_path / "seen").rename(tmp_path / "before")
    attempt(tmp_path, "wandb", 4, 4, start=3, make=make)
    losses = [f"train/loss {step}" for step in (2, 3, 4)]
    rest = ["held_out/loss 3", "held_out/loss 4", "failed False"]
    seen = (tmp_path / "seen").read_text().splitlines()
    assert [line for line in seen if "loss" in line or "failed" in line] == losses + rest


def test_a_tracker_learns_that_a_run_failed(tmp_path):
    (tmp_path / "fails_at").write_text("9")
    followed = followed_by("wandb", follower("rows", Rows), tmp_path)
    followed.on_error(ValueError("loss is not finite"))
    assert (tmp_path / "seen").read_text() == "failed True\n"


@pytest.mark.slow
def test_scores_page_and_changed_settings_reach_the_trackers(tmp_path, monkeypatch):
    for package in ("mlflow", "trackio", "wandb"):
        pytest.importorskip(package)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    first = [
        "run.name=tracked", "run.loggers=[mlflow,trackio,wandb]", "run.project=books", "seq=2k",
        "model.num_layers=1", "model.hidden_size=32", "train.steps=2", "topology.workers=1",
        "train.eval_tasks=[niah]", "eval.samples=1", "data.tokenizer=bytes",
    ]  # fmt: skip
    for words in first, ["--resume", "tracked", "train.steps=3", "optim.lr=1e-5"]:
        command = [sys.executable, "-m", "mtrain_cli", "train", *words]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=200)
    run = tmp_path / "runs/tracked"
    results = [json.loads(line) for line in (run / "evaluation/results.jsonl").open()]

    from mlflow import MlflowClient

    client, own = MlflowClient(), (run / "mlflow.id").read_text().strip()
    history = client.get_metric_history(own, "eval/niah/2048/dense")
    assert [(row.step, row.value) for row in history] == [(r["step"], r["score"]) for r in results]
    assert len({row.step for row in history}) == 3, "before training, and at the end of both"
    about = client.get_run(own).data
    assert about.params["optim.lr"] == "auto"
    assert about.tags["optim.lr from step 2"] == "1e-05"
    assert [file.path for file in client.list_artifacts(own)] == ["report.html"]
    (saved,) = (tmp_path / "mlruns").glob("*/*/artifacts/report.html")
    blobs = (tmp_path / "trackio/artifacts").glob("books/blobs/sha256/*/*")
    assert saved.read_bytes() in [blob.read_bytes() for blob in blobs]
    logs = [file.read_bytes() for file in run.glob("wandb/offline-run-*/*.wandb")]
    assert all(b"report.html" in log for log in logs)


def test_a_tracker_is_closed_even_if_the_page_fails(tmp_path, monkeypatch):
    closed, warnings = [], []

    class Keeping:
        def __init__(self, _):
            pass

        def log(self, step, values):
            pass

        def keep(self, page):
            pytest.fail(f"no page: {page}")

        def close(self, failed):
            closed.append(failed)

    def fails(_):
        raise OSError("no room")

    monkeypatch.setattr(module.Follower, "_page", fails)
    make = follower("wandb", Keeping)
    attempt(tmp_path, "wandb", 1, 2, make=make, message=lambda line, **_: warnings.append(line))
    assert closed == [False]
    assert len(warnings) == 1
    assert "OSError: no room" in warnings[0]


def test_mlflow_names_a_changed_setting_once(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    from mtrain_extras.trackers.mlflow import Mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    for start, rate in ((0, "auto"), (20, "1e-3"), (40, "1e-3"), (60, "auto")):
        config = compose([f"optim.lr={rate}"])
        Mlflow(module.TrackedRun(config, tmp_path, start)).close(False)
    own = (tmp_path / "mlflow.id").read_text().strip()
    tags = MlflowClient().get_run(own).data.tags
    changes = {name: tags[name] for name in tags if name.startswith("optim.lr from")}
    assert changes == {"optim.lr from step 20": "0.001", "optim.lr from step 60": "auto"}


def test_the_steps_after_a_rollback_are_sent_and_not_those_before(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POLL", 0.01)
    rows = []

    class Rows:
        def log(self, step, values):
            rows.append((step, values["train/loss"]))

        def close(self, failed):
            assert not failed

    def wait(count):
        deadline = time.monotonic() + 10
        while len(rows) < count and time.monotonic() < deadline:
            time.sleep(0.005)

    with MetricsWriter(tmp_path, start_step=0) as writer:
        followed = followed_by("tensorboard", follower("rows", lambda _: Rows()), tmp_path)
        for step in range(1, 7):
            writer.write(replace(metrics_of(step), loss=float(step)))
        wait(6)
    with MetricsWriter(tmp_path, start_step=3) as writer:
        followed.on_rollback(3)
        for step in range(4, 13):
            writer.write(replace(metrics_of(step), loss=step + 0.5))
        followed.close()
    lost = [(step, float(step)) for step in range(1, 7)]
    assert rows == [*lost, *((step, step + 0.5) for step in range(4, 13))]
