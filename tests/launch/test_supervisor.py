"""The supervisor starts a process per rank, finds the cause of a failure and stops the rest."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import pytest

from mtrain_cli.launch.local import Supervisor, worker_command


def supervisor(folder, code: str, workers: int = 3, timeout_s: float = 60.0) -> Supervisor:
    """Return a supervisor whose workers run ``code`` with their rank in ``rank``."""
    script = f"import os, time\nrank = int(os.environ['RANK'])\n{textwrap.dedent(code)}"
    variables = {"FOLDER": str(folder)}
    return Supervisor(workers, [sys.executable, "-c", script], folder, variables, timeout_s)


def test_a_failed_worker_is_reported_and_the_others_are_stopped(tmp_path):
    run = supervisor(
        tmp_path,
        """
        import signal
        def end(*_):
            open(f"{os.environ['FOLDER']}/asked-{rank}", 'x').close()
            os._exit(0)
        signal.signal(signal.SIGTERM, end)
        open(f"{os.environ['FOLDER']}/ready-{rank}", 'x').close()
        others = [f"{os.environ['FOLDER']}/ready-{n}" for n in (0, 2)]
        while rank != 1 or not all(map(os.path.exists, others)):
            time.sleep(0.01)
        os._exit(7)
        """,
    )
    run.run_to_end()
    assert [(failure.rank, failure.exit_code) for failure in run.failures] == [(1, 7)]
    asked = sorted(path.name for path in tmp_path.glob("asked-*"))
    assert asked == ["asked-0", "asked-2"], (
        "the others may end by themselves before they are killed"
    )


def test_a_cause_that_comes_after_its_consequence_is_waited_for(tmp_path):
    """Rank 0 aborts, as NCCL's watchdog would make it, half a second before rank 2 exits."""
    run = supervisor(
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


def test_each_worker_has_its_rank_and_its_own_failure_file(tmp_path):
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"
    names += ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)  # a variable that the run gives its workers
    run = supervisor(
        tmp_path,
        f"""
        words = " ".join(os.environ[name] for name in {names})
        open(f"{{os.environ['FOLDER']}}/ran-{{rank}}", 'x').write(words)
        """,
        workers=2,
    )
    run._variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    run.run_to_end()
    assert run.failures == []
    assert [(tmp_path / f"ran-{rank}").read_text() for rank in (0, 1)] == [
        f"{rank} {rank} 2 2 {tmp_path}/failure-{rank}.json 3" for rank in (0, 1)
    ]


def test_the_record_of_a_command_that_a_worker_runs_is_not_the_workers(tmp_path):
    run = supervisor(
        tmp_path,
        """
        from mtrain_cli.launch.failures import Failure, write_record
        if rank == 0:
            if os.fork() == 0:
                write_record(Failure(-1, 1, "config", "a failure that the worker ignores"))
                os._exit(2)
            os.wait()
            time.sleep(0.5)  # the supervisor looks meanwhile
            write_record(Failure(-1, 1, "error", "the cause"))
            os._exit(1)
        time.sleep(60)
        """,
        workers=2,
    )
    run.run_to_end()
    assert [(failure.rank, failure.message) for failure in run.failures] == [(0, "the cause")]


def test_workers_that_ignore_sigterm_and_their_children_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain_cli.launch.local.STOP_GRACE_S", 1)
    run = supervisor(
        tmp_path,
        """
        import signal, subprocess
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen(["sleep", "60"])
            open(f"{os.environ['FOLDER']}/child", "x").write(str(child.pid))
            os.rename(f"{os.environ['FOLDER']}/child", f"{os.environ['FOLDER']}/ready")
            time.sleep(60)
        while not os.path.exists(f"{os.environ['FOLDER']}/ready"):
            time.sleep(0.01)
        os._exit(7)
        """,
        workers=2,
    )
    run.run_to_end()
    assert [(failure.rank, failure.exit_code) for failure in run.failures] == [(1, 7)]
    child = Path(f"/proc/{(tmp_path / 'ready').read_text()}/stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("path", "safe"), [(["", "/lib"], False), (["/lib"], True)])
def test_workers_import_from_the_current_folder_only_if_this_process_does(monkeypatch, path, safe):
    monkeypatch.setattr(sys, "path", path)
    command = worker_command("package.module", "run", "--resume")
    assert ("-P" in command) is safe
    assert command[-4:] == ["-m", "package.module", "run", "--resume"]
