"""A request reaches the workers unchanged, and a stop request ends them."""

from __future__ import annotations

import json
from pathlib import Path

import gloo
import pytest
from inference.small_models import source, tokens, write_hf

from mtrain_cli.inference import worker
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.worker import GenerateRequest
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


def run_worker(rank: int, world: int, folder: str) -> bool:
    """Run the worker of a launched command. Rank 0 alone can read the request."""
    here = Path(folder) / ("run" if rank == 0 else f"elsewhere-{rank}")
    found = source(Path(folder) / "hf", f"topology.workers={world}")
    return worker.run(found.config, RunDir(here), gloo.environment(rank, world), False)


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_end_together(tmp_path, stopped, capfd):
    request(write_hf(tmp_path / "hf"))
    (tmp_path / "run").mkdir()
    request(tmp_path / "hf").save(RunDir(tmp_path / "run"))
    if stopped:
        RunDir(tmp_path / "run").stop_request.touch()
    assert gloo.run(2, run_worker, str(tmp_path)) == [stopped, stopped]
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == (0 if stopped else 2)
    for line in lines:
        assert len(json.loads(line)["ids"]) == NEW
