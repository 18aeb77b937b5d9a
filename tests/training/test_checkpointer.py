"""Checkpoints of one process: retention, damage, crashes and full disks."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.training.checkpointer import (
    Checkpointer,
    CheckpointError,
    NoCheckpointError,
    load_model_state,
    write_model_state,
)


def state_of(step: int) -> dict[str, Any]:
    """Return a state whose every number is derived from its step."""
    return {
        "model": {
            "weight": torch.full((300, 7), float(step)),
            "bias": torch.full((3,), step, dtype=torch.bfloat16),
        },
        "optimizer": {
            "state": {"weight": {"exp_avg": torch.full((300, 7), step / 3)}},
            "param_groups": [{"lr": step / 7, "betas": (0.9, step)}],
        },
        "trainer": {"step": step, "rate": step / 11, "sampler": {"seed": 3, "consumed": 8 * step}},
        "rng": {"cpu": torch.full((16,), step, dtype=torch.uint8)},
    }


def assert_is_of(step: int, state: dict[str, Any]) -> None:
    for part, expected in state_of(step).items():
        torch.testing.assert_close(state[part], expected, rtol=0, atol=0)


def loaded(directory: Path) -> tuple[int, list[str]]:
    """Load into zeros with a fresh checkpointer; return the step, all consistent, and reports."""
    reports: list[str] = []
    state = state_of(0)
    step = Checkpointer(directory, keep=2, report=reports.append).load(state)
    assert_is_of(step, state)
    return step, reports


def save(checkpointer: Checkpointer, step: int, **options: bool) -> None:
    checkpointer.save(step, state_of(step), **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2."""
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2)
    save(checkpointer, 1)
    save(checkpointer, 2)
    checkpointer.wait()
    return tmp_path / "checkpoints"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_loaded_state_is_bitwise_the_saved_one(saved):
    assert loaded(saved) == (2, [])
    assert Checkpointer(saved, keep=1).latest() == 2


def test_old_checkpoints_go_only_after_their_successor_is_complete(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 10, 11):
        save(checkpointer, step, asynchronous=False)
    assert names(tmp_path) == ["step-10", "step-11"]


def test_every_mth_checkpoint_stays_for_good(tmp_path):
    for steps in ((1, 2, 3, 4, 5), (6, 7, 8, 9)):  # a run that resumes goes on likewise
        checkpointer = Checkpointer(tmp_path, keep=2, keep_every=4)
        for step in steps:
            save(checkpointer, step, asynchronous=False)
    assert names(tmp_path) == ["step-4", "step-8", "step-9"]
    save(Checkpointer(tmp_path, keep=1), 10, asynchronous=False)
    assert names(tmp_path) == ["step-10"], "the settings of the last run decide"


def test_the_last_good_checkpoint_stays_whatever_is_damaged(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1, keep_every=4)
    for step in (4, 7, 8, 9):
        save(checkpointer, step, asynchronous=False)
    assert names(tmp_path) == ["step-4", "step-8", "step-9"]
    for step in (8, 9):
        flip_a_byte(tmp_path / f"step-{step}" / "__0_0.distcp")
    checkpointer = Checkpointer(tmp_path, keep=1, keep_every=4, report=print)
    assert checkpointer.load(state_of(0)) == 4
    (tmp_path / "step-6.tmp-1").touch()  # this save fails
    with pytest.raises(CheckpointError):
        save(checkpointer, 6, asynchronous=False)
    (tmp_path / "step-6.tmp-1").unlink()
    assert checkpointer.load(state_of(0)) == 4
    save(checkpointer, 6, asynchronous=False)
    save(checkpointer, 7, asynchronous=False)
    assert checkpointer.load(state_of(0)) == 7
    assert names(tmp_path) == ["step-4", "step-7", "step-8", "step-9"]


def test_a_new_checkpoint_stays_although_later_steps_exist(tmp_path):
    # After falling back to an earlier step, the run repeats the same steps.
    checkpointer = Checkpointer(tmp_path, keep=1)
    save(checkpointer, 9, asynchronous=False)
    save(checkpointer, 4, asynchronous=False)
    assert "step-4" in names(tmp_path)


def test_saving_a_step_again_replaces_it(saved):
    checkpointer = Checkpointer(saved, keep=2)
    checkpointer.save(2, {**state_of(5), "trainer": {}}, asynchronous=False)
    assert torch.equal(load_model_state(saved)[1]["weight"], torch.full((300, 7), 5.0))
    assert names(saved) == ["step-1", "step-2"]


def test_a_background_save_does_not_see_later_changes(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    state = state_of(1)
    checkpointer.save(1, state)
    for tensor in (
        *state["model"].values(),
        state["optimizer"]["state"]["weight"]["exp_avg"],
        state["rng"]["cpu"],
    ):
        tensor.fill_(99)
    state["trainer"]["sampler"]["consumed"] = 99
    state["optimizer"]["param_groups"][0]["lr"] = 99
    checkpointer.wait()
    assert loaded(tmp_path) == (1, [])


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("__0_0.distcp", flip_a_byte, "__0_0.distcp was altered (its checksum differs)"),
        (
            "__0_0.distcp",
            lambda file: os.truncate(file, 100),
            "__0_0.distcp has 100 bytes instead of ",
        ),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        (".metadata", flip_a_byte, ".metadata was altered (its checksum differs)"),
        (
            "manifest.json",
            lambda file: file.write_text(file.read_text().replace('"step": 2', '"step": 3')),
            "manifest.json was altered",
        ),
    ],
)
def test_a_damaged_checkpoint_is_reported_in_one_line_and_the_previous_one_loads(
    saved, file, damage: Callable[[Path], object], problem
):
    damage(saved / "step-2" / file)
    step, reports = loaded(saved)
    assert step == 1
    assert len(reports) == 1
    assert reports[0].startswith(f"{saved / 'step-2'}: {problem}")
    assert reports[0].endswith("; using the previous checkpoint instead")


def test_a_save_keeps_the_checkpoint_that_a_damaged_one_was_replaced_by(saved):
    flip_a_byte(saved / "step-2" / "__0_0.distcp")
    checkpointer = Checkpointer(saved, 2, [].append)
    assert checkpointer.load(state_of(0)) == 1
    checkpointer.save(3, state_of(3), asynchronous=False)
    assert {folder.name for folder in saved.glob("step-*")} == {"step-1", "step-2", "step-3"}
    checkpointer.save(2, state_of(2), asynchronous=False)
    checkpointer.save(4, state_of(4), asynchronous=False)
    assert {folder.name for folder in saved.glob("step-*")} == {"step-3", "step-4"}


def test_without_an_intact_checkpoint_each_problem_is_reported(saved):
    (saved / "step-1" / "__0_0.distcp").unlink()
    flip_a_byte(saved / "step-2" / ".metadata")
    with pytest.raises(NoCheckpointError) as caught:
        loaded(saved)
    assert isinstance(caught.value, ConfigError)
    assert caught.value.problems == (
        f"{saved / 'step-2'}: .metadata was altered (its checksum differs)",
        f"{saved / 'step-1'}: __0_0.distcp is missing",
    )
    with pytest.raises(NoCheckpointError, match="holds no checkpoint"):
        loaded(saved.parent / "elsewhere")


def test_a_checkpoint_of_a_different_model_is_refused(saved):
    for change, problem in (
        ({"weight": torch.zeros(300, 8)}, "Size mismatch"),
        ({"more": torch.zeros(3)}, "Missing key"),
    ):
        state = {"model": {**state_of(0)["model"], **change}}
        with pytest.raises(NoCheckpointError, match=problem):
            Checkpointer(saved, keep=1).load(state)
    state = {"model": {"weight": torch.zeros(300, 7)}}
    with pytest.raises(
        NoCheckpointError, match=r"holds model\.bias, which this model does not have"
    ):
        Checkpointer(saved, keep=1).load(state)


def test_a_checkpoint_of_only_weights_cannot_be_resumed(tmp_path):
    write_model_state(tmp_path, 0, state_of(0)["model"])
    with pytest.raises(
        ConfigError, match=r"step-0: holds only weights, .* train\.init_from=HF_FOLDER$"
    ):
        Checkpointer(tmp_path, keep=1).load(state_of(0))
    state = {"model": state_of(1)["model"]}
    assert Checkpointer(tmp_path, keep=1).load(state) == 0


def test_a_state_that_json_cannot_hold_is_refused_at_once(tmp_path):
    with pytest.raises(TypeError):
        Checkpointer(tmp_path, keep=1).save(1, {**state_of(1), "trainer": {"loss": torch.ones(1)}})


def test_a_model_is_read_and_written_without_a_process_group(saved, tmp_path):
    for path in (saved, saved.parent, saved / "step-2"):
        model = load_model_state(path)[1]
        assert model.keys() == {"weight", "bias"}
        assert torch.equal(model["weight"], torch.full((300, 7), 2.0))
        assert model["bias"].dtype == torch.bfloat16
    assert write_model_state(tmp_path / "imported", 0, model) == tmp_path / "imported" / "step-0"
    _, again = load_model_state(tmp_path / "imported")
    assert all(torch.equal(again[name], model[name]) for name in model)
    flip_a_byte(saved / "step-2" / "__0_0.distcp")
    assert torch.equal(load_model_state(saved)[1]["weight"], torch.full((300, 7), 1.0))
    with pytest.raises(NoCheckpointError, match=r"step-2: __0_0\.distcp was altered"):
        load_model_state(saved / "step-2")
    with pytest.raises(NoCheckpointError, match=r"manifest\.json is missing"):
        load_model_state(tmp_path / "nowhere")


def test_a_model_is_read_into_the_given_tensors(saved):
    into = {"weight": torch.empty(300, 7, dtype=torch.bfloat16), "bias": torch.empty(3)}
    seen = []

    def targets(shapes):
        seen.append(shapes)
        return into

    assert load_model_state(saved, targets=targets) == (2, into)
    assert seen == [{"weight": (300, 7), "bias": (3,)}]
    assert torch.equal(into["weight"], torch.full((300, 7), 2.0, dtype=torch.bfloat16))
    assert torch.equal(into["bias"], torch.full((3,), 2.0))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], check=False
        ).returncode
    ):
        pytest.skip("needs root to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_fails_the_save_in_one_line_and_the_next_save_may_succeed(small_disk):
    checkpointer = Checkpointer(small_disk, keep=1)
    save(checkpointer, 1, asynchronous=False)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 80_000)
    checkpointer.save(2, state_of(2))
    with pytest.raises(CheckpointError) as caught:
        checkpointer.wait()
    assert str(caught.value) == (
        f"{small_disk / 'step-2'}: the checkpoint of step 2 was not saved "
        "(No space left on device); the previous checkpoint is intact"
    )
    assert names(small_disk) == ["filler", "step-1"]
    assert loaded(small_disk) == (1, [])
    filler.unlink()
    save(checkpointer, 3, asynchronous=False)
    assert loaded(small_disk) == (3, [])


def test_the_next_save_reports_an_earlier_failure_and_still_saves(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        save(checkpointer, 1)
        with pytest.raises(
            CheckpointError,
            match=r"step 1 was not saved \(File too large\); there is no earlier checkpoint",
        ):
            save(checkpointer, 2)
        with pytest.raises(CheckpointError, match=r"step 2 was not saved \(File too large\)"):
            checkpointer.wait()
        with pytest.raises(CheckpointError, match=r"step 3 was not saved \(File too large\)"):
            save(checkpointer, 3, asynchronous=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save(checkpointer, 4)
    checkpointer.wait()
    assert names(tmp_path) == ["step-4"]


def killed_at(moment: int, directory: Path, step: int) -> bool:
    """Save `step` in a process, killed at its `moment`-th access to `directory`.

    Returns False if it finished first.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    code = 1
    try:
        left = moment
        events = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir")
        events += ("os.scandir", "shutil.rmtree")

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in events and str(directory) in str(arguments[0]):
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

        torch.set_num_threads(1)
        sys.addaudithook(count)
        save(Checkpointer(directory, keep=1), step, asynchronous=False)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("step", [1, 2], ids=["saving the same step again", "saving the next step"])
def test_sigkill_at_any_moment_of_a_save_leaves_a_usable_checkpoint(tmp_path, step):
    directory = tmp_path / "checkpoints"
    save(Checkpointer(directory, keep=1), 1, asynchronous=False)
    loaded_steps = set()
    for moment in range(1, 200):
        if not killed_at(moment, directory, step):
            break
        newest, reports = loaded(directory)
        assert reports == []
        assert set(names(directory)) <= {"step-1", f"step-{newest}"}
        loaded_steps.add(newest)
        if newest != 1:
            shutil.rmtree(directory)
            save(Checkpointer(directory, keep=1), 1, asynchronous=False)
    assert 10 < moment < 199
    assert loaded_steps == {1, step}


def test_the_manifest_lists_every_file_with_its_size(saved):
    manifest = json.loads((saved / "step-2" / "manifest.json").read_text())
    assert (manifest["schema"], manifest["step"], manifest["workers"]) == (1, 2, 1)
    sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    assert sizes == {
        path.name: path.stat().st_size
        for path in (saved / "step-2").iterdir()
        if path.name != "manifest.json"
    }
