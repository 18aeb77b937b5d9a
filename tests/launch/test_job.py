"""A run under torchrun and srun: one folder, one report of the cause, and an end for all ranks."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist
import warm
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import mtrain_cli
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import job as jobs
from mtrain_cli.launch.job import PORT, SECRET, Job, current_job, listen, seal, unseal

HERE = Path(__file__).parent


class SimulatedJob:
    """Processes with the variables that srun gives its tasks, in the current folder."""

    def __init__(
        self,
        target: str,
        tasks: int,
        *overrides: str,
        of_rank: dict[int, list[str]] | None = None,
        late: dict[int, float] | None = None,
        torch_of: dict[int, str] | None = None,
        variables_of: dict[int, dict[str, str]] | None = None,
    ) -> None:
        """Start the tasks.

        late: delays a rank's connection to rank 0's hub, in seconds.
        torch_of: the version of torch that a rank's machine seems to have.
        variables_of: more environment variables of a rank.
        """
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.ranks = []
        for rank in range(tasks):
            variables = {
                "SLURM_JOB_ID": "77",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": str(tasks),
                "SLURM_LOCALID": str(rank),
                "SLURM_STEP_NODELIST": "127.0.0.1",
                "MASTER_PORT": str(port),
                "LATE_S": str((late or {}).get(rank, 0.0)),
                "TORCH_VERSION": (torch_of or {}).get(rank, ""),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCHELASTIC_ERROR_FILE": str(Path(f"failure-{rank}").absolute()),
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(mtrain_cli.__file__).parents[1]), str(HERE)]
                ),
            }
            variables |= (variables_of or {}).get(rank, {})
            own = (of_rank or {}).get(rank, [])
            words = [target, "topology.device=cpu", *overrides, *own]
            self.ranks.append(
                warm.Command("job_process", words, Path.cwd(), {**os.environ, **variables})
            )

    def ends(self) -> list[tuple[int, str]]:
        """Return exit code and stderr of every rank."""
        try:
            return [
                (rank.returncode, stderr)
                for rank in self.ranks
                for stderr in [rank.communicate(timeout=90)[1]]
            ]
        finally:
            for rank in self.ranks:
                rank.kill()


def torchrun_shows(ends: list[tuple[int, str]]) -> str:
    """Return the cause at the end of torchrun's report on ranks that ended so."""
    failed = {
        rank: ProcessFailure(rank, 1, code, f"failure-{rank}")
        for rank, (code, _) in enumerate(ends)
    }
    return str(ChildFailedError("job", failed)).rpartition("traceback : ")[2].rstrip("=\n")


def wait_for(condition: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def signed_in(count: int) -> Callable[[], bool]:
    return lambda: len(list(Path("run").glob("pid-?"))) == count


def test_all_ranks_share_the_folder_that_rank_0_names():
    assert SimulatedJob("adds_ranks", 2).ends() == [(0, ""), (0, "")]
    (run,) = (path for path in Path("runs").iterdir() if not path.is_symlink())
    assert resolved_file.load(run / "resolved.yaml").run.name == run.name
    for rank in range(2):
        assert (run / f"result-{rank}").read_text() == f"3 1 slurm False {run.absolute()}"


@pytest.mark.parametrize(("killed", "teller"), [(1, 0), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_ranks_that_wait_for_nothing(killed, teller):
    job = SimulatedJob("sleeps", 3, "run.dir=run")
    wait_for(signed_in(3))
    killed_at = time.monotonic()
    job.ranks[killed].send_signal(signal.SIGKILL)
    ends = job.ends()
    assert time.monotonic() - killed_at < 10
    assert [code for code, _ in ends] == [
        -signal.SIGKILL if rank == killed else 1 for rank in range(3)
    ]
    expected = (
        f"error: rank {killed} is gone: its process was killed (host out of memory? see dmesg) or "
        "its machine or link failed\n"
        "Where each worker was:\n  all: before the first training step, prepares\n"
    )
    assert torchrun_shows(ends) == expected.partition("\n")[0].removeprefix("error: ")
    ends = [(code, re.sub(r" \(\d+ s ago\)", "", stderr)) for code, stderr in ends]
    assert [stderr for _, stderr in ends] == [
        expected if rank == teller else "" for rank in range(3)
    ]


def test_a_rank_killed_in_a_ring_is_reported_with_the_activity_of_all_ranks():
    ends = SimulatedJob("rank_1_is_killed_in_a_ring", 3, "run.dir=run").ends()
    assert [code for code, _ in ends] == [1, -signal.SIGKILL, 1], ends
    assert ends[0][1].splitlines() == [
        "error: rank 1 is gone: its process was killed (host out of memory? see dmesg) or its "
        "machine or link failed",
        "Where each worker was:",
        "  rank 0: training step 3, ring, layer 1, forward, step 3 of 3: waits for kv from rank 1",
        "  rank 1: training step 3, ring, layer 1, forward, step 2 of 3",
        "  rank 2: training step 3, ring, layer 1, forward, step 3 of 3: waits for kv from rank 1",
    ]
    assert ends[2][1] == ""


@pytest.mark.slow
def test_a_rank_stopped_in_a_ring_is_reported_and_the_others_end_in_time():
    job = SimulatedJob("rank_1_is_stopped_in_a_ring", 3, "run.dir=run", "topology.timeout_s=5")
    record = Path("run/logs/rank-1.where")
    wait_for(lambda: record.exists() and b"step 2 of 3" in record.read_bytes())
    stopped_at = time.monotonic()
    try:
        outputs = [job.ranks[rank].communicate(timeout=30)[1] for rank in (0, 2)]
        assert time.monotonic() - stopped_at < 25
        assert [rank.poll() for rank in job.ranks] == [1, None, 1], (
            "srun or torchrun ends the one that is stopped"
        )
    finally:
        for rank in job.ranks:
            rank.kill()
    first, *where = outputs[0].splitlines()
    assert first.startswith(
        "error: topology.timeout_s=5: rank 1 kept the others waiting longer than this without "
        "reporting an error"
    )
    assert re.fullmatch(
        r"  rank 1: training step 3, ring, layer 1, forward, step 2 of 3 \(\d+ s ago\)", where[2]
    )
    assert outputs[1] == ""


def test_ranks_with_different_settings_end_before_they_wait_for_each_other():
    job = SimulatedJob(
        "adds_ranks", 2, "run.dir=run", of_rank={1: ["topology.exchange=ring", "seed=7"]}
    )
    ends = job.ends()
    assert [(code, bool(stderr)) for code, stderr in ends] == [(2, True), (2, False)], ends
    assert ends[0][1].splitlines() == [
        "mtrain: seed=7: rank 1 was started with this value, rank 0 with 0. Start all ranks with "
        "the same settings.",
        "mtrain: topology.exchange=ring: rank 1 was started with this value, rank 0 with auto. "
        "Start all ranks with the same settings.",
    ]
    assert not Path("run").exists()


def test_ranks_with_other_versions_end_before_they_wait_for_each_other():
    job = SimulatedJob("adds_ranks", 2, "run.dir=run", torch_of={0: "9.8", 1: "9.9"})
    ends = job.ends()
    assert [code for code, _ in ends] == [2, 2], ends
    assert ends[0][1] == (
        f"mtrain: torch=9.9: rank 1 on {socket.gethostname()} has this version, rank 0 has 9.8. "
        "Install the same version on all machines.\n"
    )
    assert ends[1][1] == ""
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("own", "words", "expected"),
    [
        ({"MTRAIN_SECRET": "b" * 32}, [], "MTRAIN_SECRET: an entry in the job's store was written"),
        ({"SLURM_NTASKS": "4"}, [], "rank 2: SLURM_NTASKS=4: rank 2 on "),
        ({}, ["seq=abc"], "rank 2: seq=abc: expected a number of tokens"),
    ],
    ids=["secret", "number of ranks", "mistake"],
)
def test_rank_0_learns_at_once_why_a_rank_does_not_come(own, words, expected):
    same = {rank: {"MTRAIN_SECRET": "a" * 32} for rank in range(3)}
    job = SimulatedJob(
        "adds_ranks", 3, "run.dir=run", of_rank={2: words}, variables_of={**same, 2: same[2] | own}
    )
    codes, errors = zip(*job.ends(), strict=True)
    assert (codes[0], codes[2]) == (2, 2)
    assert codes[1] != 0
    assert errors[0].startswith(f"before the workers: {expected}")
    assert "Traceback" not in errors[1]
    assert not Path("run").exists()


@pytest.fixture
def agent_store(monkeypatch) -> dist.TCPStore:
    """The store of torchrun, whose place this process takes."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(True))
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def under_torchrun(store: dist.Store, rank: int, ranks: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    numbers |= {"MASTER_PORT": getattr(store, "port", 1)}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


@pytest.mark.parametrize("wrong", [{"MTRAIN_SECRET": "b" * 32}, {}], ids=["secret", "setting"])
def test_torchrun_ends_rank_0_after_it_said_why_another_rank_does_not_come(wrong, agent_store):
    variables = {rank: under_torchrun(agent_store, rank, 2) for rank in range(2)}
    same = {"MTRAIN_SECRET": "a" * 32}
    job = SimulatedJob(
        "adds_ranks", 2, "run.dir=run", of_rank={1: [] if wrong else ["seq=abc"]},
        variables_of={0: variables[0] | same, 1: variables[1] | same | wrong},
    )  # fmt: skip
    assert job.ranks[1].wait(60) == 2
    if job.ranks[0].poll() is None:
        job.ranks[0].send_signal(signal.SIGTERM)
    (code, said), _ = job.ends()
    # The sign of life of a rank with another secret may end rank 0 first.
    assert code == 128 + signal.SIGTERM or (wrong and code == 2)
    expected = "MTRAIN_SECRET: an entry in the job's" if wrong else "rank 1: seq=abc: expected"
    assert said.startswith(f"mtrain: {expected}")
    assert not Path("run").exists()


def test_a_signal_of_torchrun_after_a_run_leaves_its_files(agent_store):
    variables = {rank: under_torchrun(agent_store, rank, 2) for rank in range(2)}
    target = "rank_0_is_asked_to_end_after_the_run"
    job = SimulatedJob(target, 2, "run.dir=run", variables_of=variables)
    assert job.ends() == [(0, ""), (0, "")]
    assert Path("run/resolved.yaml").exists()


@pytest.mark.parametrize("how", ["decides", "does not come"])
def test_rank_0_that_serves_the_store_stays_until_the_others_know_why_it_ends(how, monkeypatch):
    store, said = dist.HashStore(), []
    for name, value in under_torchrun(store, 0, 3).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jobs, "open_store", lambda _: store)

    def fail() -> None:
        if how == "decides":
            monkeypatch.setattr(jobs, "job_store", lambda _: store)
            with pytest.raises(ConfigError, match="too long"):
                jobs.decide_on_rank_zero(lambda: _raise(ConfigError("seq=1g: too long")), "choice")
        else:
            jobs.tell_the_others(["seq=1g: too long"])
        said.append(time.monotonic())

    failing = threading.Thread(target=fail)
    failing.start()
    key = "choice" if how == "decides" else jobs._HELLO
    wait_for(lambda: store.check([key]))
    for _ in range(2):  # the others
        failing.join(0.4)
        assert failing.is_alive()
        store.add("readers of choice" if how == "decides" else jobs._NOTES, 1)
    failing.join(5)
    assert said


def _raise(error: Exception) -> NoReturn:
    raise error


def test_a_rank_does_not_end_under_torchrun_before_rank_0_has_read_why(agent_store, monkeypatch):
    for name, value in under_torchrun(agent_store, 1, 2).items():
        monkeypatch.setenv(name, value)
    teller = threading.Thread(target=jobs.tell_the_others, args=(["seq=abc: no number"],))
    teller.start()
    store = dist.PrefixStore("mtrain/0/2", agent_store)
    wait_for(lambda: store.check([jobs._NOTE]))
    teller.join(0.5)
    assert teller.is_alive()
    with pytest.raises(ConfigError, match=r"^rank 1: seq=abc: no number$"):
        jobs.require_no_note(store)
    teller.join(0.5)
    assert teller.is_alive(), "rank 0 has not yet printed it"
    teller.join(10)
    assert not teller.is_alive()


def test_a_rank_says_itself_why_it_does_not_come_if_rank_0_does_not(
    agent_store, monkeypatch, capsys
):
    monkeypatch.setattr(jobs, "_ANSWER_S", 0.5)
    for rank, said in (1, "mtrain: rank 1: seq=abc: no number\n"), (2, ""):
        variables = under_torchrun(agent_store, rank, 4) | {"LOCAL_WORLD_SIZE": "2"}
        for name, value in (variables | {"LOCAL_RANK": str(rank % 2)}).items():
            monkeypatch.setenv(name, value)
        jobs.tell_the_others(["seq=abc: no number"])
        assert capsys.readouterr().err == said, "the first rank of a node has said it already"


def test_a_rank_that_has_met_the_others_still_tells_why_it_does_not_come():
    decides = {rank: {"DECIDES_FIRST": "1"} for rank in range(2)}
    job = SimulatedJob(
        "adds_ranks", 2, "run.dir=run", of_rank={1: ["seq=abc"]}, variables_of=decides
    )
    began = time.monotonic()
    (code, said), (other, _) = job.ends()
    assert (code, other) == (2, 2)
    assert said.startswith("mtrain: rank 1: seq=abc: expected a number of tokens")
    assert time.monotonic() - began < 40
    assert not Path("run").exists()


def test_rank_0_turns_the_others_away_if_it_does_not_come():
    began = time.monotonic()
    ends = SimulatedJob("adds_ranks", 3, "run.dir=run", of_rank={0: ["seq=abc"]}).ends()
    assert [code for code, _ in ends] == [2, 2, 2]
    assert ends[0][1].startswith("before the workers: seq=abc: expected a number of tokens")
    assert [stderr for _, stderr in ends[1:]] == ["", ""]
    assert time.monotonic() - began < 60


def test_a_program_that_is_no_store_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(jobs, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        job = Job("slurm", 1, 2, 1, 2, "127.0.0.1", other.getsockname()[1])
        with pytest.raises(ConfigError, match=r"rank 1 cannot reach .* \(another program may lis"):
            jobs.job_store.__wrapped__(job)


def test_ranks_that_continue_see_what_those_of_the_whole_job_write_in_the_store_of_torchrun(
    monkeypatch,
):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(True))
    monkeypatch.setattr(jobs, "_smaller", None)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job("torchrun", 0, 4, 0, 2, "127.0.0.1", server.port)
    jobs.connect(job, timedelta(seconds=5)).set("sign of life", "1")
    smaller = jobs.continue_on(job, [0, 1])
    assert jobs.connect(smaller, timedelta(seconds=5)).check(["sign of life"])
    again = jobs.connect(replace(job, restarts=1), timedelta(seconds=5))
    assert not again.check(["sign of life"])


def test_rank_0_names_the_ranks_that_do_not_come_in_time(monkeypatch):
    monkeypatch.setattr(jobs, "STORE_TIMEOUT", timedelta(seconds=0.3))
    store = dist.HashStore()
    late = Job("srun", 0, 5, 0, 1, "localhost", 1)
    for rank in (1, 3):
        store.add(f"{jobs._JOINED}/{rank}", 1)
        store.add(jobs._JOINED, 1)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=5: rank 2, 4 did not come within 0.3 s"):
        jobs._meet(late, store)


def test_rank_0_ends_soon_after_a_rank_was_killed_before_the_meeting():
    began = time.monotonic()
    variables = {0: {"UNSEEN_S": "3"}, 1: {"ENDS_EARLY": "1"}}
    ends = SimulatedJob("adds_ranks", 2, "run.dir=run", variables_of=variables).ends()
    assert time.monotonic() - began < 30
    assert ends == [
        (
            1,
            f"before the workers: rank 1 on {socket.gethostname()} is gone: it showed no sign of "
            "life for 3 s before it met rank 0. See its output.\n",
        ),
        (-signal.SIGKILL, ""),
    ]


def test_rank_0_that_fails_in_a_decision_shows_its_own_error():
    variables = {0: {"FAILS_TO_DECIDE": str(errno.EIO)}}
    job = SimulatedJob("adds_ranks", 3, "run.dir=run", variables_of=variables, late={2: 2.5})
    ends = job.ends()
    assert [code for code, _ in ends] == [1, 1, 1]
    assert ends[0][1].startswith("error: rank 0 failed: OSError: [Errno 5] Input/output error\n")
    assert [stderr for _, stderr in ends[1:]] == ["", ""]
    assert torchrun_shows(ends).endswith("OSError: [Errno 5] Input/output error")


def test_a_rank_that_connects_after_the_mistake_ends_like_the_others():
    ends = SimulatedJob("sleeps", 3, "run.dir=run", of_rank={2: ["seq=1k"]}, late={1: 1.5}).ends()
    assert [(code, bool(stderr)) for code, stderr in ends] == [(2, True), (2, False), (2, False)]


@pytest.mark.slow
def test_rank_0_prints_the_cause_once_and_all_ranks_fail():
    ends = SimulatedJob("rank_1_raises_late", 2, "run.dir=run").ends()
    assert [code for code, _ in ends] == [1, 1], ends
    assert ends[0][1].startswith(
        "error: rank 1 failed: ValueError: the true cause\nTraceback (most recent call last):"
    )
    assert ends[1][1] == ""
    shown = torchrun_shows(ends)  # of the first record
    assert "ValueError: the true cause" in shown
    assert "Connection" not in ends[0][1] + shown


def test_a_mistake_that_workers_find_is_printed_once():
    ends = SimulatedJob("all_find_a_mistake", 2, "run.dir=run").ends()
    assert ends == [(2, "mtrain: data.path=x: too short\nmtrain: seq=4096: too long\n"), (2, "")]
    assert torchrun_shows(ends) == "data.path=x: too short\n  seq=4096: too long"
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_mistake_of_rank_0_ends_the_others_silently():
    Path("run").write_text("no folder")
    ends = SimulatedJob("adds_ranks", 2, "run.dir=run").ends()
    assert [code for code, _ in ends] == [2, 2], ends
    assert "run: cannot write there" in ends[0][1]
    assert ends[1][1] == ""


def test_a_job_that_is_preempted_while_its_ranks_join_stops_with_success():
    variables = {rank: {"TERM_WHILE_JOINING": "1"} for rank in range(2)}
    job = SimulatedJob("steps_until_stopped", 2, "run.dir=run", variables_of=variables)
    assert job.ends() == [(0, ""), (0, "")]
    assert Path("run/stopped-0").exists()


@pytest.mark.slow
def test_a_signal_to_one_rank_makes_all_save_and_stop():
    job = SimulatedJob("steps_until_stopped", 2, "run.dir=run")
    wait_for(signed_in(2))
    job.ranks[1].send_signal(signal.SIGHUP)
    assert job.ends() == [(0, ""), (0, "")]
    assert Path("run/stopped-0").exists()


def test_all_ranks_save_and_stop_at_the_same_step_when_srun_warns_each():
    job = SimulatedJob("steps_until_stopped", 2, "run.dir=run")
    wait_for(signed_in(2))
    saved = [Path(f"run/saved-{rank}") for rank in range(2)]
    for number in range(1, 3):
        for rank in job.ranks:
            rank.send_signal(signal.SIGUSR1)
        wait_for(lambda n=number: all(f.exists() and int(f.read_text()) >= n for f in saved))
    job.ranks[0].send_signal(signal.SIGUSR2)
    job.ranks[1].send_signal(signal.SIGUSR2)
    assert job.ends() == [(0, ""), (0, "")]
    assert saved[0].read_text() == saved[1].read_text()
    assert Path("run/stopped-1").exists()


@pytest.mark.slow
def test_torchrun_runs_and_shows_the_traceback_of_the_cause(here):
    module = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [sys.executable, *module, str(HERE / "job_process.py")]
    paths = os.pathsep.join([str(Path(mtrain_cli.__file__).parents[1]), str(HERE)])
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": paths,
    }

    def torchrun(target: str, folder: str) -> subprocess.CompletedProcess[str]:
        arguments = [*command, target, "topology.device=cpu", f"run.dir={folder}"]
        return subprocess.run(
            arguments, env=variables, capture_output=True, text=True, timeout=120, check=False
        )

    good = torchrun("adds_ranks", "good")
    assert (good.returncode, good.stderr) == (0, "")
    assert Path("good/result-1").read_text() == f"3 1 torchrun False {here / 'good'}"
    bad = torchrun("rank_1_raises", "bad")
    assert bad.returncode == 1
    assert bad.stderr.startswith(
        "error: rank 1 failed: ValueError: a bad thing\nTraceback (most recent call last):"
    )


def torchrun_sleeps(**variables: str) -> str:
    """Return what two ranks of torchrun print that cannot start. They must end soon."""
    began = time.monotonic()
    words = ["--nproc-per-node", "2", str(HERE / "job_process.py"), "sleeps", "run.dir=run"]
    paths = os.pathsep.join([str(Path(mtrain_cli.__file__).parents[1]), str(HERE)])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "topology.device=cpu"],
        env={**os.environ, **variables, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    # torchrun waits 30 s for ranks that a signal does not end.
    assert time.monotonic() - began < 25
    return done.stderr


@pytest.mark.slow
def test_torchrun_ends_soon_after_rank_0_refused_and_rank_0_says_why():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = torchrun_sleeps(MTRAIN_PORT=str(port))
    lines = [line for line in said.splitlines() if line.startswith("before the workers: ")]
    assert [line.partition(" (")[0] for line in lines] == [
        f"before the workers: MTRAIN_PORT={port}: rank 0 cannot listen on this port"
    ]
    assert not Path("run").exists()


@pytest.mark.slow
def test_torchrun_ends_soon_after_a_rank_was_killed_that_the_others_wait_for():
    assert "Signal 9 (SIGKILL)" in torchrun_sleeps(ENDS_EARLY="1")


def job_at(address: str, nodes: int = 2) -> Job:
    return Job("slurm", 0, 2 * nodes, 0, 2, address, 0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


FROM_1 = "must be at least 1, and at most WORLD_SIZE=2"


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"RANK": "3"}, "RANK=3: must be below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be at least 1"),
        ({"LOCAL_WORLD_SIZE": "3"}, f"LOCAL_WORLD_SIZE=3: {FROM_1}"),
        ({"LOCAL_WORLD_SIZE": "0"}, f"LOCAL_WORLD_SIZE=0: {FROM_1}"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2: must be below LOCAL_WORLD_SIZE=2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be a port from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: must be a port from 1 to 65535"),
    ],
)  # fmt: skip
def test_variables_that_contradict_each_other_are_refused_before_anybody_waits(wrong, line):
    right = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    assert current_job(right) is not None
    with pytest.raises(ConfigError) as error:
        current_job(right | wrong)
    assert str(error.value) == line


def test_ranks_of_one_machine_meet_on_loopback_whatever_the_address():
    with listen(job_at("192.0.2.1", nodes=1), 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"


def test_several_machines_meet_at_the_address_that_the_user_names(monkeypatch):
    monkeypatch.setattr(
        jobs.ipaddress, "ip_address", lambda _: type("Address", (), {"is_loopback": False})
    )
    with listen(job_at("127.0.0.2"), 0) as server:
        assert server.getsockname()[0] == "127.0.0.2"


@pytest.mark.parametrize(
    "address", ["localhost", "192.0.2.1"], ids=["loopback", "of another machine"]
)
def test_an_unreachable_address_means_all_interfaces(address):
    with listen(job_at(address), 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_a_secret_that_is_empty_or_the_name_of_a_file_is_refused(monkeypatch):
    monkeypatch.setenv("MTRAIN_SECRET", __file__)
    with pytest.raises(ConfigError, match=r"^MTRAIN_SECRET: is the name of a file") as caught:
        jobs.job_store.__wrapped__(Job("slurm", 0, 2, 0, 2, "127.0.0.1", 1))
    assert __file__ not in str(caught.value)
    monkeypatch.setenv("MTRAIN_SECRET", "")
    with pytest.raises(ConfigError, match=r"^MTRAIN_SECRET: is empty"):
        jobs.job_store.__wrapped__(Job("slurm", 0, 2, 0, 2, "127.0.0.1", 1))


def test_decisions_of_rank_0_need_the_secret(monkeypatch):
    assert unseal("decision/1", seal("decision/1", "a\nb").encode()) == "a\nb"
    without = seal("decision/1", "text").encode()
    monkeypatch.setenv(SECRET, "one")
    sealed = seal("decision/1", "a\nb").encode()
    assert unseal("decision/1", sealed) == "a\nb"
    for stranger in (without, sealed + b"c", b"", b"\xff\n"):
        with pytest.raises(ConfigError, match=f"{SECRET}: .* Give all ranks the same one"):
            unseal("decision/1", stranger)
    with pytest.raises(ConfigError):
        unseal("decision/2", sealed)
    monkeypatch.setenv(SECRET, "two")
    with pytest.raises(ConfigError):
        unseal("decision/1", sealed)


def test_a_job_under_srun_with_a_secret_and_a_port_listens_on_loopback_and_ends_well(monkeypatch):
    port = free_port()
    monkeypatch.setenv(SECRET, "of this job")
    monkeypatch.setenv(PORT, str(port))
    assert [code for code, _ in SimulatedJob("attacks_its_ports", 2, "run.dir=run").ends()] == [
        0,
        0,
    ]
    found = [line.split() for line in Path("run/listening-0").read_text().split("\n")]
    assert {address for _, address, _ in found} == {"127.0.0.1"}
    assert str(port) in {number for _, _, number in found}
