"""A request reaches the workers unchanged, and a stop request ends them."""

from __future__ import annotations

import contextlib
import io
import json
import pkgutil
from dataclasses import replace
from pathlib import Path

import gloo
import pytest
from inference.small_models import source, tokens, write_hf

from mtrain_cli.inference import worker
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.text import TextCodec
from mtrain_cli.inference.worker import GenerateRequest
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.local import TARGETS_WITHOUT_CHECKPOINTS
from mtrain_cli.launch.run_dir import RunDir

NEW = 9


def request(folder: Path) -> GenerateRequest:
    return GenerateRequest(
        str(folder), True, [tokens(30), tokens(5)], NEW, Sampling(0.7, seed=4), as_json=True
    )


def test_a_saved_request_is_read_unchanged(tmp_path):
    saved = request(tmp_path)
    saved.save(RunDir(tmp_path))
    assert GenerateRequest.of(json.loads((tmp_path / "plan.json").read_text())) == saved


def run_worker(rank: int, world: int, folder: str) -> tuple[bool, list[str]]:
    """Run the worker of a launched command. Rank 0 alone can read the request.

    Return whether it was stopped, and the lines that it printed.
    """
    here = Path(folder) / ("run" if rank == 0 else f"elsewhere-{rank}")
    found = source(Path(folder) / "hf", f"topology.workers={world}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        stopped = worker.run(found.config, RunDir(here), gloo.environment(rank, world), False)
    return stopped, printed.getvalue().splitlines()


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_end_together(tmp_path, stopped):
    write_hf(tmp_path / "hf")
    (tmp_path / "run").mkdir()
    request(tmp_path / "hf").save(RunDir(tmp_path / "run"))
    if stopped:
        RunDir(tmp_path / "run").stop_request.touch()
    first, second = gloo.run(2, run_worker, str(tmp_path))
    assert (first[0], second) == (stopped, (stopped, []))
    assert len(first[1]) == (0 if stopped else 2)
    for line in first[1]:
        assert len(json.loads(line)["ids"]) == NEW


def test_the_launcher_finds_the_worker_and_expects_no_checkpoint():
    assert pkgutil.resolve_name(worker.TARGET) is worker.run
    assert worker.TARGET.startswith(TARGETS_WITHOUT_CHECKPOINTS)


@pytest.mark.parametrize("ignore_end", [False, True])
def test_end_tokens_count_unless_the_request_ignores_them(
    tmp_path, monkeypatch, capsys, ignore_end
):
    found = source(write_hf(tmp_path / "hf"))
    environment = resolve_environment(found.config)
    asked = replace(request(tmp_path / "hf"), ignore_end=ignore_end)
    worker.answer(asked, found.config, environment)
    free = json.loads(capsys.readouterr().out.splitlines()[0])["ids"]
    codec = TextCodec(None, frozenset([free[3]]), "none")
    monkeypatch.setattr(worker, "open_codec", lambda *_: codec)
    worker.answer(asked, found.config, environment)
    again = json.loads(capsys.readouterr().out.splitlines()[0])["ids"]
    assert again == (free if ignore_end else free[: free.index(free[3])])
