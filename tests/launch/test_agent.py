"""The agent starts one process a rank, tells a cause from its consequences, and stops the rest."""

from __future__ import annotations

import os
import sys
import textwrap
import time

import pytest

from mtrain_cli.launch.agent import WorkerAgent, WorkerFiles, _is_stopped, worker_command


def agent(folder, code: str, workers: int = 3, timeout_s: float = 60.0) -> WorkerAgent:
    """Return an agent whose workers run ``code`` with their rank in ``rank``."""
    script = f"import os, time\nrank = int(os.environ['RANK'])\n{textwrap.dedent(code)}"
    variables = {"FOLDER": str(folder)}
    return WorkerAgent(workers, [sys.executable, "-c", script], folder, variables, timeout_s)


def test_every_rank_runs_once_with_its_variables(tmp_path):
    run = agent(tmp_path, "open(f'{os.environ[\"FOLDER\"]}/ran-{rank}', 'x').close()")
    run.run_to_end()
    assert run.failures == []
    assert sorted(path.name for path in tmp_path.glob("ran-*")) == ["ran-0", "ran-1", "ran-2"]


def test_a_failed_worker_is_reported_and_the_others_are_stopped(tmp_path):
    run = agent(tmp_path, "time.sleep(60 if rank != 1 else 0); os._exit(7)")
    began = time.monotonic()
    run.run_to_end()
    assert [(failure.rank, failure.exit_code) for failure in run.failures] == [(1, 7)]
    assert time.monotonic() - began < 30


def test_a_cause_that_comes_after_its_consequence_is_waited_for(tmp_path):
    """Rank 0 aborts, as NCCL's watchdog would make it, half a second before rank 2 exits."""
    run = agent(
        tmp_path,
        """
        if rank == 0:
            os.abort()
        time.sleep(0.5 if rank == 2 else 60)
        os._exit(5)
        """,
    )
    run.run_to_end()
    assert {failure.rank for failure in run.failures if not failure.is_consequence} == {2}


def test_each_worker_has_its_own_failure_file(tmp_path):
    files = WorkerFiles(tmp_path, {"SHARED": "1"})
    variables: dict[int, dict[str, str]] = {0: {}, 1: {}}
    assert files.reify(variables).error_files == {
        rank: str(files.failure_file(rank)) for rank in (0, 1)
    }
    assert [v["TORCHELASTIC_ERROR_FILE"] for v in variables.values()] == [
        str(tmp_path / "failure-0.json"),
        str(tmp_path / "failure-1.json"),
    ]
    assert {v["SHARED"] for v in variables.values()} == {"1"}


@pytest.mark.parametrize(("path", "safe"), [(["", "/lib"], False), (["/lib"], True)])
def test_workers_import_from_the_current_folder_only_if_this_process_does(monkeypatch, path, safe):
    monkeypatch.setattr(sys, "path", path)
    command = worker_command("package.module", "run", "--resume")
    assert ("-P" in command) is safe
    assert command[-4:] == ["-m", "package.module", "run", "--resume"]


def test_a_running_process_and_a_missing_one_are_not_stopped():
    assert not _is_stopped(os.getpid())
    assert not _is_stopped(2**22 + 1)
