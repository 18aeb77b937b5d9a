"""A worker evaluates what its folder says, and stops when asked."""

from __future__ import annotations

import pytest
import torch
from evaluation.evaluated_runs import configs_of, request_of, runner_of, small_run
from inference.small_models import source

from mtrain_cli.evaluation.request import NIAH
from mtrain_cli.evaluation.results import read_results
from mtrain_cli.evaluation.worker import evaluate, run
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.run_dir import RunDir


@pytest.fixture
def model(tmp_path):
    return small_run(tmp_path)


def worker(model, tmp_path, *, stopped: bool) -> bool:
    folder = tmp_path / "worker"
    folder.mkdir()
    request_of(model, NIAH, samples=1).save(folder, configs_of(model))
    run_dir = RunDir(folder)
    if stopped:
        run_dir.stop_request.touch()
    config = source(model).config
    return run(config, run_dir, resolve_environment(config), False)


def test_a_worker_leaves_results(model, tmp_path):
    assert worker(model, tmp_path, stopped=False) is False
    assert len(read_results(model)) == 1


def test_a_worker_stops_when_asked(model, tmp_path):
    assert worker(model, tmp_path, stopped=True) is True
    assert read_results(model) == []


def test_lack_of_memory_gets_a_line(model, monkeypatch):
    runner = runner_of(model, request_of(model, NIAH))

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "run", fail)
    with pytest.raises(RunError, match=r"smaller --length or more topology\.workers"):
        evaluate(runner, resolve_environment(source(model).config))
