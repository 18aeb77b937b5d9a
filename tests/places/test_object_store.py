"""A run whose data, checkpoints and export are on an object store survives its machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places.object_store import BUCKET, files, object_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 40


def mtrain(folder: Path, variables: dict[str, str], *words: str) -> list[str]:
    """Run a command to its end, and return the lines of both its streams."""
    done = subprocess.run(
        [sys.executable, "-m", "mtrain_cli", *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (done.stdout + done.stderr).splitlines()


def refused(folder: Path, variables: dict[str, str], *words: str) -> str:
    """Return the one line with which a command refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "mtrain_cli", *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


def kept_numbers(run: Path) -> list[tuple]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def test_a_run_resumes_from_the_store_after_its_machine_is_lost(tmp_path):
    with object_store() as variables:
        store, variables = files(variables), {**variables, "XDG_CACHE_HOME": str(tmp_path / "a")}
        texts = [
            {"text": f"Document {n}. " + "The quick brown fox. " * (n % 40)} for n in range(400)
        ]
        corpus = "".join(json.dumps(one) + "\n" for one in texts)
        store.pipe_file(f"{BUCKET}/corpus/texts.jsonl", corpus.encode())
        mtrain(tmp_path, variables, "data", "prepare", f"s3://{BUCKET}/corpus", "tokens")
        store.put(str(tmp_path / "tokens"), f"{BUCKET}/tokens", recursive=True)
        store.pipe_file(f"{BUCKET}/tokens/unrelated.bin", b"0" * 1000)
        shutil.rmtree(tmp_path / "tokens")

        settings = [
            "train", "data=tokens", f"data.path=s3://{BUCKET}/tokens", "seq=256",
            "model.num_layers=1", f"train.steps={STEPS}", "train.checkpoint_every=2",
            "optim.warmup_steps=2", "topology.workers=2", "topology.device=cpu",
        ]  # fmt: skip
        mtrain(tmp_path, variables, *settings, "run.name=whole")
        assert not [*tmp_path.glob("a/mtrain/places/**/unrelated.bin")]

        words = [*settings, "run.name=lost", f"run.remote=s3://{BUCKET}/runs"]
        with (tmp_path / "lost.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "mtrain_cli", *words],
                cwd=tmp_path,
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            place, deadline = f"{BUCKET}/runs/lost/checkpoints", time.monotonic() + 120
            while not store.glob(f"{place}/step-*/manifest.json") and time.monotonic() < deadline:
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        before = {name.rpartition("/")[2] for name in store.glob(f"{place}/step-*")}
        lost = tmp_path / "runs" / "lost"
        assert len(kept_numbers(lost)) < STEPS, (tmp_path / "lost.log").read_text()
        time.sleep(0.5)  # its workers end with it
        shutil.rmtree(lost)
        shutil.rmtree(tmp_path / "a")
        variables["XDG_CACHE_HOME"] = str(tmp_path / "b")  # another machine

        lines = mtrain(tmp_path, variables, *words, "--resume", "auto")
        resumed = next(line for line in lines if line.startswith("resumed from the checkpoint"))
        assert int(resumed.split()[-1]) in range(2, STEPS)
        assert kept_numbers(lost) == kept_numbers(tmp_path / "runs" / "whole")

        here = {
            path.relative_to(lost).as_posix(): path.read_bytes()
            for path in lost.glob("checkpoints/step-*/*")
        }
        found = store.find(f"{BUCKET}/runs/lost/checkpoints")
        there = {name.partition("/lost/")[2]: store.cat_file(name) for name in found}
        newest = f"checkpoints/step-{STEPS}/"
        assert {n: c for n, c in here.items() if n.startswith(newest)} == {
            name: content for name, content in there.items() if name.startswith(newest)
        }
        # Those that were never on the second machine stay.
        kept = {n.split("/")[1] for n in here} | before - {f"step-{resumed.split()[-1]}"}
        assert {n.split("/")[1] for n in there} <= kept
        for name in ("metrics.jsonl", "resolved.yaml", "report.html"):
            assert store.cat_file(f"{BUCKET}/runs/lost/{name}")
        assert (
            store.cat_file(f"{BUCKET}/runs/lost/metrics.jsonl")
            == (lost / "metrics.jsonl").read_bytes()
        )

        mtrain(tmp_path, variables, "checkpoint", "export", "lost", f"s3://{BUCKET}/hf")
        mtrain(tmp_path, variables, "checkpoint", "export", "lost", "hf")
        mtrain(tmp_path, variables, "checkpoint", "export", "whole", "whole-hf")
        exported = {n.rpartition("/")[2]: store.cat_file(n) for n in store.find(f"{BUCKET}/hf")}
        assert exported == {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
        export = ["checkpoint", "export", "lost", "s3://nosuch/hf"]
        assert "HF_FOLDER=s3://nosuch/hf: cannot be written" in refused(
            tmp_path, variables, *export
        )
        start = [*settings, "run.name=none", "run.remote=s3://nosuch/runs"]
        assert "run.remote=s3://nosuch/runs: cannot be used" in refused(tmp_path, variables, *start)
        assert not store.exists("nosuch")
        assert (tmp_path / "whole-hf/model.safetensors").read_bytes() == exported[
            "model.safetensors"
        ]
