"""metrics.jsonl reads back as written, and a resumed run never records a step twice."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from reporting.training_runs import step as metrics_of

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.records import metrics as module
from mtrain_cli.records.metrics import (
    MetricsWriter,
    drop_later_steps,
    median_rate,
    nothing_left_out,
    read_metrics,
    read_readable_metrics,
    read_steps,
    steady_steps,
    step_remarks,
)

STEP = metrics_of(1)


def write(folder, steps, start_step=0):
    with MetricsWriter(folder, start_step=start_step) as writer:
        for step in steps:
            writer.write(replace(STEP, step=step, loss=float(step)))


def steps(folder):
    return [metrics.step for metrics in read_metrics(folder)]


def test_steps_are_read_back_as_written(tmp_path):
    with MetricsWriter(tmp_path, start_step=0) as writer:
        writer.write(STEP)
        writer.write(replace(STEP, step=2, mfu_model=0.4))
    assert read_metrics(tmp_path) == [STEP, replace(STEP, step=2, mfu_model=0.4)]
    assert read_metrics(tmp_path / "metrics.jsonl") == read_metrics(tmp_path)


def test_columns_have_their_former_name_in_metrics_of_earlier_versions(tmp_path):
    row = {**json.loads(STEP.to_json()), "slashes": 3.0, "bars": 7.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert read_metrics(tmp_path) == [replace(STEP, slashes=3.0, columns=7.5)]


def test_an_mfu_above_hfu_from_earlier_versions_is_dropped(tmp_path):
    # 94 % counted all causal pairs of packed documents, 359 % those that an index skipped.
    shares = ((0.4, 0.5), (0.94, 0.45), (3.59, 0.53))
    rows = [
        replace(STEP, step=step, mfu_model=mfu, mfu_executed=hfu)
        for step, (mfu, hfu) in enumerate(shares, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    assert [(step.mfu_model, step.mfu_executed) for step in read_metrics(tmp_path)] == [
        (0.4, 0.5),
        (None, 0.45),
        (None, 0.53),
    ]


def test_every_line_has_every_key_of_the_contract(tmp_path):
    write(tmp_path, [1])
    assert set(json.loads((tmp_path / "metrics.jsonl").read_text())) == {
        *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second_per_gpu"),
        *("mfu_model", "mfu_executed"),
        *("density", "peak_memory_gib", "seconds", "epoch", "consumed", "data_seconds"),
        *("slashes", "columns", "index_seconds", "index_cut", "density_by_layer"),
        *("skipped", "skip_reason"),
        *("balance_loss", "router_z", "expert_load", "expert_load_by_layer"),
        *("router_entropy", "targets", "targets_per_second_per_gpu", "dense_density"),
    }


def test_non_finite_numbers_become_null():
    line = replace(STEP, loss=float("nan"), grad_norm=float("-inf")).to_json()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row["loss"] is row["grad_norm"] is None


def test_rates_leave_out_two_steps_after_each_start():
    run = [replace(STEP, step=step, tokens_per_second_per_gpu=float(step)) for step in range(5, 15)]

    def left(steps, *restarts):
        return [each.step for each in steady_steps(steps, restarts)]

    assert left(run) == [7, 8, 9, 10, 11, 12, 13, 14]
    assert left(run, 9) == [7, 8, 9, 12, 13, 14]
    assert left(run[:2]) == [6], "the last step, if no other is left"
    assert left([]) == []
    assert median_rate([run[0], run[1], run[9]]) == 6.0


def test_resuming_drops_the_steps_after_the_checkpoint(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5])
    write(tmp_path, [4, 5, 6], start_step=3)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_failed_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path, [1, 2, 3])

    def full_disk(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(module.os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path, [2], start_step=1)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_step_outlives_a_killed_process(tmp_path):
    code = (
        "import os, sys\nsys.path.insert(0, sys.argv[2])\nfrom pathlib import Path\n"
        "from records.test_metrics import STEP, MetricsWriter\n"
        "writer = MetricsWriter(Path(sys.argv[1]), start_step=0)\n"
        "writer.write(STEP)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parents[1])], timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert read_metrics(tmp_path) == [STEP]


def test_damaged_lines_are_named_and_hide_no_other_step(tmp_path):
    write(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    # true is no number, although Python says so.
    wrong = b'{"step": 4, "loss": []}\n{"step": 0}\n{"step": true}\n{}\n'
    path.write_bytes(b"".join([b"oops\n", first, b"\n", b"\xff{}\n", *others, wrong, b"[]\n"]))
    read, damaged = read_readable_metrics(tmp_path)
    assert [step.step for step in read] == [1, 2, 3]
    assert damaged == [1, 4, 7, 8, 9, 10, 11]
    message = r"metrics\.jsonl: lines 1, 4, 7, 8, 9 and more are damaged; each line must be a step"
    with pytest.raises(ConfigError, match=message):
        read_metrics(tmp_path)


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file; give a run's folder"):
        read_metrics(tmp_path / "nowhere")


def test_a_full_disk_costs_lines_but_not_the_training(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path, start_step=0)
    assert writer.write(replace(STEP, step=1)) is None
    real = writer._file

    class Full:
        """Write ten bytes of a line, like an almost full disk."""

        def __init__(self) -> None:
            self.room = 10

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            taken, self.room = self.room, 0
            return real.write(data[:taken])

        def fileno(self) -> int:
            return real.fileno()

    for step, warning in (
        (
            2,
            f"{tmp_path / 'metrics.jsonl'}: metrics of step 2 were not written "
            "(No space left on device); training goes on",
        ),
        (3, None),
    ):
        monkeypatch.setattr(writer, "_file", Full())
        assert writer.write(replace(STEP, step=step)) == warning, "warn only once"
    monkeypatch.setattr(writer, "_file", real)
    assert writer.write(replace(STEP, step=4)) is None
    monkeypatch.setattr(writer, "_file", Full())
    assert writer.write(replace(STEP, step=5)) is not None, "a disk that is full again"
    monkeypatch.setattr(writer, "_file", real)
    writer.close()
    assert steps(tmp_path) == [1, 4]


ROWS = [b'{"step": 1}\n', b"\xffoops\n", b"\n", b'{"step": 2}\n', b'{"step": 3}\n']


def steps_of(file: Path) -> tuple[list[int], list[int]]:
    return read_steps(file, lambda row: row["step"])


def test_later_steps_go_and_damaged_lines_before_them_stay(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(ROWS) + b"oops\n")
    assert drop_later_steps(file, 2) == [{"step": 1}, {"step": 2}]
    assert file.read_bytes() == ROWS[0] + ROWS[1] + ROWS[3]
    file.write_bytes(ROWS[0] + ROWS[1] + b'{"step": 2, "lo')
    assert drop_later_steps(file, 1) == [{"step": 1}]
    assert file.read_bytes() == ROWS[0] + ROWS[1]


def test_the_new_content_is_on_the_disk_before_it_replaces_the_file(tmp_path, monkeypatch):
    file = tmp_path / "steps.jsonl"
    old = b"".join(ROWS)
    file.write_bytes(old)
    synced = []

    def fsync(descriptor):
        assert file.read_bytes() == old
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(module.os, "fsync", fsync)
    drop_later_steps(file, 2)
    assert synced == [file.stat().st_size] != [len(old)]


@pytest.mark.parametrize("cut", [b'{"step": 2, "lo', b"{", b"\xff"])
def test_a_cut_line_is_not_damaged_and_goes_with_a_rewrite(tmp_path, cut):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(ROWS[0] + cut)
    assert steps_of(file) == ([1], [])
    drop_later_steps(file, 9)
    assert file.read_bytes() == ROWS[0]
    file.write_bytes(ROWS[0] + cut + b"\n")
    assert steps_of(file) == ([1], [2])
    drop_later_steps(file, 9)
    assert file.read_bytes() == ROWS[0] + cut + b"\n"


def test_a_whole_last_line_gets_its_newline(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b'{"step": 1}\r\n{"step": 2}')
    drop_later_steps(file, 2)
    assert file.read_bytes() == ROWS[0] + ROWS[3]


def test_only_a_newline_ends_a_line(tmp_path):
    file = tmp_path / "steps.jsonl"
    line = '{"step": 1,\r"note": "a\u2028b\x85c"}\n'.encode()
    file.write_bytes(line + ROWS[3])
    assert steps_of(file) == ([1, 2], [])
    drop_later_steps(file, 1)
    assert file.read_bytes() == line


def remarks_of(*numbers: int, last: int = 0) -> list[str]:
    return step_remarks([replace(STEP, step=number) for number in numbers], last)


def test_an_intact_file_has_no_remark(tmp_path):
    assert (
        remarks_of()
        == remarks_of(1)
        == remarks_of(1, 2, 3, last=3)
        == remarks_of(1, 2, 3, last=2)
        == []
    )
    write(tmp_path, [1, 2, 3, 4, 5])
    write(tmp_path, [4, 5, 6], start_step=3)  # a run that resumes at its checkpoint
    assert step_remarks(read_metrics(tmp_path), 6) == []


def test_missing_steps_are_named_at_the_start_inside_and_at_the_end():
    assert remarks_of(2, 3) == ["step 1 is missing"]
    assert remarks_of(1, 4, 6, 10**15) == [f"steps 2-3, 5, 7-{10**15 - 1} are missing"]
    assert remarks_of(1, last=3) == ["steps 2-3 are missing"]
    assert remarks_of(last=1) == ["step 1 is missing"]


def test_repeated_and_disordered_steps_are_named():
    assert remarks_of(1, 2, 2, 2, 3) == ["step 2 appears more than once"]
    assert remarks_of(1, 2, 1, 2) == [
        "steps 1-2 appear more than once",
        "the steps are not in order",
    ]
    assert remarks_of(1, 3, 2) == ["the steps are not in order"]


@pytest.mark.parametrize("loss", [None, float("nan"), float("-inf")])
def test_a_step_without_a_finite_loss_is_named_unless_it_had_no_label(loss):
    steps = [STEP, replace(STEP, step=2, loss=loss), replace(STEP, step=3, loss=loss)]
    assert step_remarks(steps) == ["steps 2-3 have no finite loss"]
    unlabelled = replace(STEP, step=3, loss=None, skipped=True)
    assert step_remarks([*steps[:2], unlabelled]) == ["step 2 has no finite loss"]


@pytest.mark.parametrize(
    ("density", "allowed", "note"),
    [
        (1.0, 1.0, "density 100%: the pattern leaves nothing out at this length"),
        (
            0.43,
            0.43,
            "density 43%, as with dense attention: the pattern leaves nothing out at this length",
        ),
        (0.99, 1.0, ""),
        (0.40, 0.43, ""),
        (1.0, None, ""),  # a dense step
    ],
)
def test_a_pattern_that_leaves_nothing_out_is_noted(density, allowed, note):
    assert nothing_left_out(replace(STEP, density=density, dense_density=allowed)) == note
