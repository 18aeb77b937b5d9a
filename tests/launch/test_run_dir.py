"""A run's folder: its content, its lock, and what a mistake leaves behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mtrain_cli
from mtrain_cli.composition.compose import compose, resume
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import run_dir, stop_request
from mtrain_cli.launch.job import current_job
from mtrain_cli.launch.local import _resume_hint
from mtrain_cli.launch.manifest import manifest_file
from mtrain_cli.launch.run_dir import LOCK, RunDir, RunLock, study_command
from mtrain_cli.training.loop import _next_commands
from mtrain_extras.studies.cells import Study
from mtrain_extras.studies.tiers import TIERS

HOLDER = """
import sys, time
from mtrain_cli.launch.run_dir import RunLock
from pathlib import Path
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(mtrain_cli.__file__).parents[1]))
    before = signal.getsignal(signal.SIGTERM)  # a run of a job takes it
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("below", ["", "/b", "/b/c"])
def test_a_file_in_the_place_of_a_folder_is_one_line(below):
    Path("a").touch()
    with pytest.raises(ConfigError, match=rf"^run.dir=.*a{below}: cannot write there \("):
        run_dir.create(config_for(f"run.dir=a{below}"), [])


def config_for(*overrides: str) -> Config:
    return compose(list(overrides))


def test_a_new_run_is_named_after_model_length_and_time_and_can_be_read_back(here, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["/opt/venv/bin/mtrain", "train", "seq=8k", "train.init_from=my models/one"]
    )
    run = run_dir.create(config_for("seq=8k"), ["seq=8k"])
    assert run.path.parent == here / "runs"
    assert run.path.name.startswith("tiny-8k-20")
    saved = resolved_file.load(run.resolved)
    assert (saved.run.name, Path(saved.run.dir), saved.seq) == (run.path.name, run.path, 8192)
    assert run.overrides.read_text() == "seq=8k\n"
    facts = json.loads(run.environment.read_text())
    assert {"mtrain", "python", "torch"} <= facts["versions"].keys()
    # As typed, word by word, whatever folder the command is installed in.
    assert facts["command"] == ["mtrain", "train", "seq=8k", "train.init_from=my models/one"]
    assert (here / "runs" / "latest").resolve() == run.path
    run.release()
    assert run_dir.open("runs/latest").path == run.path


def test_two_runs_started_in_the_same_second_get_two_folders(monkeypatch):
    monkeypatch.setattr(run_dir.time, "strftime", lambda _: "same-second")
    first, second = (run_dir.create(config_for(), []) for _ in range(2))
    assert second.path.name == f"{first.path.name}-2"
    assert resolved_file.load(second.resolved).run.name == second.path.name


def test_a_folder_that_holds_a_run_is_refused_and_left_alone():
    config = config_for("run.dir=mine")
    run_dir.create(config, []).release()
    before = {path: path.read_bytes() for path in Path("mine").iterdir() if path.name != ".lock"}
    with pytest.raises(
        ConfigError,
        match=r"run\.dir=.*mine: already holds a run\. It has no checkpoint\. Begin it again with "
        r"--resume auto, or choose",
    ):
        run_dir.create(config, ["seed=1"])
    assert before == {
        path: path.read_bytes() for path in Path("mine").iterdir() if path.name != ".lock"
    }


def commit(run: run_dir.RunDir) -> None:
    """Make a folder that counts as a complete checkpoint."""
    manifest = manifest_file(run.checkpoints, 1)
    manifest.parent.mkdir(parents=True)
    manifest.touch()


def test_a_name_that_is_taken_is_refused_by_its_key():
    config = config_for("run.name=mine")
    run = run_dir.create(config, [])
    commit(run)
    run.release()
    with pytest.raises(
        ConfigError,
        match=r"^run\.name=mine: runs/mine already holds a run\. Resume it with "
        r"--resume runs/mine, or choose another run\.name\.$",
    ):
        run_dir.create(config, [])


def test_a_folder_in_use_is_refused_until_its_process_ends_even_by_sigkill():
    run = run_dir.create(config_for("run.dir=mine"), [])
    run.release()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        for action in (
            lambda: run_dir.open("mine"),
            lambda: run_dir.create(config_for("run.dir=mine"), []),
        ):
            with pytest.raises(
                ConfigError, match=rf"mine: in use by process {holder.pid} on {os.uname().nodename}"
            ):
                action()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert run_dir.open("mine").path == run.path


@pytest.mark.parametrize("existed", [False, True])
def test_discard_leaves_what_was_there_before_create(here, existed):
    if existed:
        Path("mine").mkdir()
    run = run_dir.create(config_for("run.dir=mine"), [])
    run.logs.mkdir()
    run.log.write_text("what a worker said before it found a mistake")
    assert run.discard()
    assert sorted(path.name for path in here.rglob("*") if path.name != ".lock") == (
        ["mine"] if existed else []
    )
    run.release()
    run_dir.create(config_for("run.dir=mine"), [])


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(here):
    Path("thesis").mkdir()
    for number in range(4):
        Path(f"thesis/chapter-{number}").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        run_dir.create(config_for("run.dir=thesis"), [])
    (line,) = caught.value.problems
    assert line.endswith(
        "thesis: is not empty and holds no run (chapter-0, chapter-1, chapter-2 and more). Choose "
        "a new or an empty folder."
    )
    assert sorted(path.name for path in here.rglob("*")) == [
        *(f"chapter-{number}" for number in range(4)),
        "thesis",
    ]


def test_latest_points_to_the_earlier_run_again_when_a_start_is_discarded(here):
    first = run_dir.create(config_for("run.name=first"), [])
    run_dir.create(config_for("run.name=second"), []).discard()
    assert (here / "runs/latest").resolve() == first.path
    discarded = run_dir.create(config_for("run.name=third"), [])
    later = run_dir.create(config_for("run.name=fourth"), [])
    discarded.discard()
    assert (here / "runs/latest").resolve() == later.path, (
        "a run that was started meanwhile keeps it"
    )


def test_a_discarded_start_elsewhere_leaves_a_link_of_the_user(here):
    run_dir.create(config_for("run.name=first"), [])
    (here / "mine").mkdir()
    (here / "mine/latest").symlink_to("third")
    run_dir.create(config_for("run.dir=mine/third"), []).discard()
    assert os.readlink(here / "mine/latest") == "third"


def test_a_start_is_discarded_while_another_one_is(monkeypatch):
    """Listing the runs fails if one of them goes away meanwhile."""
    run = run_dir.create(config_for("run.name=only"), [])
    monkeypatch.setattr(run_dir, "list_runs", lambda: [run.path.with_name("gone").stat()])
    assert run.discard()


def test_discard_removes_the_parent_folders_of_a_run(here):
    run_dir.create(config_for("run.name=only"), []).discard()
    assert list(here.iterdir()) == []
    deep = run_dir.create(config_for("run.dir=a/b/c"), [])
    other = run_dir.create(config_for("run.dir=a/d"), [])
    deep.discard()
    assert sorted(path.name for path in (here / "a").iterdir()) == ["d"], (
        "what another run is in stays"
    )
    assert other.resolved.exists()


def test_the_resume_command_is_quoted_for_a_shell(here):
    run = run_dir.create(config_for("run.dir=my runs/it's one"), [])
    assert shlex.split(run.resume_command) == [
        "mtrain",
        "train",
        "--resume",
        str(here / "my runs/it's one"),
    ]
    commit(run)
    run.release()
    with pytest.raises(ConfigError) as caught:
        run_dir.create(config_for("run.dir=my runs/it's one"), [])
    assert shlex.quote(str(run.path)) in str(caught.value)


def test_discard_keeps_a_run_that_has_made_a_step():
    run = run_dir.create(config_for("run.dir=mine"), [])
    run.metrics.write_text("{}\n")
    assert not run.discard()
    run.metrics.unlink()
    (run.checkpoints / "step-1").mkdir(parents=True)
    assert not run.discard()
    assert run.resolved.exists()


def test_open_requires_a_readable_run_and_removes_an_old_stop_request():
    run = run_dir.create(config_for("run.dir=mine"), [])
    run.stop_request.touch()
    run.release()
    assert not run_dir.open("mine").stop_request.exists()
    run.resolved.write_text("seq: [")
    with pytest.raises(ConfigError, match=r"resolved\.yaml"):
        run_dir.open("mine")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("metrics.jsonl", "folder"), ("log.txt", "folder"), ("logs", "file"), ("checkpoints", "file")],
)
def test_a_file_or_folder_in_the_place_of_the_other_is_named(name, kind):
    run = run_dir.create(config_for("run.dir=mine"), [])
    run.release()
    place = run.path / name
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    place.mkdir() if kind == "folder" else place.touch()
    with pytest.raises(ConfigError, match=rf"mine: {name} is a {kind}\. Move it away\."):
        run_dir.open("mine")


def test_discard_restores_what_a_rewrite_replaced():
    run_dir.create(config_for("run.dir=mine"), ["run.dir=mine"]).release()
    run = run_dir.open("mine")
    (run.checkpoints / "step-1").mkdir(parents=True)
    for overrides_were_there in (True, False):
        if not overrides_were_there:
            run.overrides.unlink()
        before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
        rewritten = run.rewrite(
            resume(resolved_file.load(run.resolved), ["train.steps=7"]), ["train.steps=7"]
        )
        assert resolved_file.load(run.resolved).train.steps == 7
        assert run.overrides.read_text().endswith("train.steps=7\n")
        assert not rewritten.discard()
        assert {
            path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()
        } == before
        assert not run.discard(), "the run itself stays"
    assert run.checkpoints.exists()


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        ('{"step": 1}\n{"step": 2}\n', False),
        ('{"step": 1}\n', False),  # cut off after the checkpoint, and no step since
        ("", False),
        ('{"step": 1}\n{"step": 2, "loss": 7}\n', True),
        ("checkpoint", True),  # by a run whose metrics the disk refuses
    ],
)
def test_a_rewrite_stays_once_a_step_has_run_under_it(after, kept):
    run_dir.create(config_for("run.dir=mine"), ["run.dir=mine"]).release()
    run = run_dir.open("mine")
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    rewritten = run.rewrite(
        resume(resolved_file.load(run.resolved), ["optim.lr=7e-3"]), ["optim.lr=7e-3"]
    )
    if after == "checkpoint":
        manifest = run.checkpoints / "step-3" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
    else:
        run.metrics.write_text(after)
    assert not rewritten.discard()
    assert (resolved_file.load(run.resolved).optim.lr == 7e-3) == kept
    assert ("optim.lr=7e-3" in run.overrides.read_text()) == kept


def test_a_rewrite_that_fails_halfway_restores_the_old_files():
    run_dir.create(config_for("run.dir=mine"), []).release()
    run = run_dir.open("mine")
    run.overrides.unlink()
    run.overrides.symlink_to("no folder/overrides.txt")
    before = run.resolved.read_bytes()
    with pytest.raises(ConfigError, match="cannot write there"):
        run.rewrite(resume(resolved_file.load(run.resolved), ["train.steps=7"]), ["train.steps=7"])
    assert run.resolved.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_one_line(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    said = r"run\.dir=.*/mine: cannot write there \(Read-only file system\)"
    with pytest.raises(ConfigError, match=said):
        run_dir.create(config_for("run.dir=mine"), [])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_one_line_and_leaves_no_folder():
    Path("disk").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "disk"], check=False
    ).returncode:
        pytest.skip("cannot mount here")
    try:
        Path("disk/filler").write_bytes(b"x" * 4096)
        with pytest.raises(
            ConfigError, match=r"disk/mine: cannot write there \(No space left on device\)"
        ):
            run_dir.create(config_for("run.dir=disk/mine"), [])
        assert [path.name for path in Path("disk").iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", "disk"], check=True)


def torchrun(monkeypatch, run_id: str, restarts: int = 0) -> None:
    variables = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    for name, value in {
        **variables,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": restarts,
    }.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("overrides", [[], ["run.name=night"]], ids=["no name", "a name"])
def test_a_restarted_job_finds_its_own_run_only(tmp_path, monkeypatch, overrides):
    monkeypatch.chdir(tmp_path)
    config = compose(["topology.device=cpu", *overrides])
    torchrun(monkeypatch, "first")
    assert run_dir.find_earlier_start(config, this_job=True) is None
    mine = run_dir.create(config, [])
    mine.release()
    torchrun(monkeypatch, "first", restarts=1)
    found = run_dir.find_earlier_start(config, this_job=True)
    assert found is not None
    assert found.path == mine.path
    torchrun(monkeypatch, "second", restarts=1)
    assert run_dir.find_earlier_start(config, this_job=True) is None
    asked = run_dir.find_earlier_start(config, this_job=False)
    assert (asked.path if asked else None) == (mine.path if overrides else None), (
        "--resume auto takes the name for what it is"
    )


def test_a_signal_of_torchrun_while_rank_0_makes_a_run_is_answered_later(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("it ended rank 0"))
    monkeypatch.setattr(
        run_dir, "environment_facts", lambda: signal.raise_signal(signal.SIGTERM) or {}
    )
    torchrun(monkeypatch, "first")
    run = run_dir.create(compose(["topology.device=cpu", "run.name=r"]), [])
    assert stop_request.take_received() == [signal.SIGTERM]
    assert run.discard()
    assert not Path("runs").exists()


def test_a_torchrun_job_without_an_id_is_named_after_its_agent(monkeypatch):
    torchrun(monkeypatch, "none")
    job = current_job()
    assert job is not None
    assert job.name.startswith(f"torchrun process {os.getppid()} of ")
    assert job.started_again, "torchrun does not count a start after a change of nodes"
    torchrun(monkeypatch, "given")
    assert not current_job().started_again
    torchrun(monkeypatch, "given", restarts=1)
    assert current_job().started_again


def test_the_revision_says_whether_files_have_changed(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    module = tmp_path / "mtrain_cli" / "__init__.py"
    module.parent.mkdir()
    module.write_text("")
    monkeypatch.setattr(run_dir.mtrain_cli, "__file__", str(module))
    assert run_dir.environment_facts()["git_revision"] is None, "this folder is no checkout"
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert run_dir.environment_facts()["git_revision"] == git("rev-parse", "HEAD")
    module.write_text("changed = True\n")
    assert run_dir.environment_facts()["git_revision"] == git("rev-parse", "HEAD") + "+changes"


OWNER = f"process {os.getpid()} on {socket.gethostname()}"


def test_a_second_lock_is_refused_until_the_first_is_released(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by {OWNER}"):
        RunLock(tmp_path)
    first.release()
    first.release()
    RunLock(tmp_path).release()


def test_a_lock_that_is_held_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    descriptor = os.open(tmp_path / LOCK, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    monkeypatch.setattr(run_dir.time, "sleep", lambda _: fcntl.flock(descriptor, fcntl.LOCK_UN))
    RunLock(tmp_path).release()
    os.close(descriptor)
    assert (tmp_path / LOCK).read_text() == f"{OWNER}\n"


def test_a_beat_renews_the_time_stamp_only_while_the_lock_is_held(tmp_path):
    lock, file = RunLock(tmp_path), tmp_path / LOCK
    os.utime(file, (1, 1))
    lock.beat()
    assert file.stat().st_mtime > 1
    lock.release()
    os.utime(file, (1, 1))
    lock.beat()
    assert file.stat().st_mtime == 1


def test_a_file_system_without_locks_does_not_stop_a_run(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(run_dir.fcntl, "flock", refuse)
    RunLock(tmp_path).beat()
    assert (tmp_path / LOCK).read_text() == ""


def test_a_run_that_appears_before_the_lock_is_taken_is_not_overwritten(monkeypatch):
    def lock_late(folder: Path) -> RunLock:
        (folder / "resolved.yaml").write_text("of another process")
        return RunLock(folder)

    monkeypatch.setattr(run_dir, "RunLock", lock_late)
    with pytest.raises(ConfigError, match="already holds a run"):
        run_dir.create(config_for("run.dir=a"), [])
    assert Path("a", "resolved.yaml").read_text() == "of another process"


WORDS = ["mtrain", "study", "learning", "--out", "my study"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return the run of a cell."""
    Study(tmp_path, TIERS["tiny"]).save(WORDS)
    path = tmp_path / "dense" / "seed-0" / "run"
    path.mkdir(parents=True)
    return RunDir(path)


def test_a_run_of_a_study_resumes_with_the_command_of_the_study(run: RunDir):
    command = "mtrain study learning --out 'my study'"
    assert study_command(run.path) == command
    assert run.resume_command == command
    assert _resume_hint(run) == f"continue the study: {command}", "also without a checkpoint"
    study = Study.open(run.path.parents[2])
    assert study is not None
    assert study.tier == TIERS["tiny"]


@pytest.mark.parametrize(
    "about", [None, "{", "[]", "{}", '{"command": "x"}', '{"command": ["mtrain", 1]}']
)
def test_another_run_resumes_by_itself(run: RunDir, about: str | None):
    other = RunDir(run.path.parent)
    assert other.resume_command == f"mtrain train --resume {other.path}"
    file = run.path.parents[2] / "study.json"
    file.unlink() if about is None else file.write_text(about)
    assert study_command(run.path) == ""
    assert run.resume_command == f"mtrain train --resume {run.path}"
    assert study_command(Path("/run")) == ""


def test_the_summary_of_a_training_names_the_study_only_while_steps_are_left(run, monkeypatch):
    config = compose(["train.steps=9"])
    for step, commands in ((None, []), (7, [("resume", run.resume_command)]), (9, [])):
        monkeypatch.setattr(RunDir, "last_step", lambda _, step=step: step)
        assert _next_commands(run, config) == commands
    labels = [label for label, _ in _next_commands(RunDir(run.path.parent), config)]
    assert labels == ["resume", "export"]


@pytest.mark.parametrize(
    "words",
    [
        ["rm", "-rf", "/"],
        ["mtrain", "study"],
        ["mtrain", "train", "--resume", "x"],
        [*WORDS, "a\nerror: no"],
        [*WORDS, "\x1b[2J"],
        [*WORDS, "\u202e"],
        [*WORDS, "\ud800"],
        [],
    ],
)
def test_words_that_are_no_command_of_a_study_are_not_shown(run: RunDir, words: list[str]):
    (run.path.parents[2] / "study.json").write_text(json.dumps({"command": words}))
    said = study_command(run.path)
    assert said == "mtrain study learning, with the options it was started with"
    assert run.resume_command == said


def test_only_the_folder_named_run_belongs_to_a_study(run: RunDir):
    other = run.path.with_name("other")
    other.mkdir()
    assert study_command(other) == ""
    assert study_command(run.path) != ""
