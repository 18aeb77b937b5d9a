"""Progress of a run: plain lines, a live display in a terminal, nothing on other workers."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from mtrain_cli.launch import run_status
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.training.progress import TrainingProgress, format_duration, sparkline

STEP = StepMetrics(
    step=1,
    loss=5.5,
    grad_norm=1.25,
    lr=1e-3,
    tokens=4096,
    tokens_per_second_per_gpu=1234.5,
    mfu_model=0.431,
    mfu_executed=0.5,
    density=1.0,
    peak_memory_gib=101.26,
    seconds=2.0,
    epoch=0.1,
    consumed=1,
)
ON_CPU = replace(STEP, mfu_model=None, mfu_executed=None, peak_memory_gib=None)


class Clock:
    """A clock that advances only when a test sets it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make(tmp_path=None, *, terminal=False, width=80, total=100, start=0, enabled=True, log_every=1):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    clock = Clock()
    log = None if tmp_path is None else tmp_path / "log.txt"
    options = {"log": log, "log_every": log_every, "console": console, "clock": clock}
    return TrainingProgress(total, start, enabled, **options), console.file, clock


UNTIMED = {"tokens_per_second_per_gpu": None, "loss": None}


def test_outside_a_terminal_each_step_is_one_plain_line():
    progress, out, _ = make()
    with progress:
        progress.step(STEP)
        progress.step(replace(ON_CPU, step=2))
    first, second = out.getvalue().splitlines()
    assert (
        first == "step   1/100  loss 5.5000  grad 1.25  lr 1.00e-03  "
        "1,234 tokens/s/GPU  MFU 43.1%  101.3 GiB  2.00 s"
    )
    rate = "1,234 tokens/s/worker"
    assert second == f"step   2/100  loss 5.5000  grad 1.25  lr 1.00e-03  {rate}  2.00 s"
    special = replace(ON_CPU, targets=530, expert_load=1.7)
    assert progress.line(special).endswith(f"{rate}  targets 530  expert load 1.70x  2.00 s")


def test_a_step_without_labels_has_no_loss_and_the_summary_covers_the_others():
    progress, out, _ = make(total=4)
    with progress:
        for number, loss in enumerate((None, 4.0, 3.0, None), 1):
            progress.step(replace(ON_CPU, step=number, loss=loss))
        progress.display(120)
        progress.summary("trained 4 steps")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1/4  loss n/a  grad")
    assert any(
        line.split()[:8] == ["loss", "4.0000", "at", "step", "2,", "3.0000", "at", "step"]
        and "at step 3" in line
        for line in lines
    )
    alone, out, _ = make(total=1)
    with alone:
        alone.step(replace(ON_CPU, loss=None))
        alone.display(120)
        alone.summary("trained 1 step")
    assert "n/a: no step had a label" in out.getvalue()


def test_a_long_wait_for_data_is_shown():
    progress, out, _ = make()
    with progress:
        for number, waited in enumerate((0.01, 0.0, 0.5, 0.5)):
            progress.step(replace(ON_CPU, step=number + 1, data_seconds=waited))
        progress.summary("done")
    lines = out.getvalue().splitlines()
    assert ["data" in line for line in lines[:4]] == [False, False, True, True]
    assert lines[3].endswith("2.00 s  data 25%") or "  data 25%" in lines[3]
    assert any(line.startswith("data        25% of the time waiting") for line in lines)


def test_log_every_skips_lines_but_keeps_the_last():
    progress, out, _ = make(total=7, log_every=3)
    with progress:
        for step in range(1, 8):
            progress.step(replace(STEP, step=step))
    assert re.findall(r"step (\d)/7", out.getvalue()) == ["3", "6", "7"]


def test_the_log_holds_plain_lines_in_any_terminal(tmp_path):
    for terminal in (True, False):
        progress, _, _ = make(tmp_path, terminal=terminal)
        with progress:
            progress.step(STEP)
            progress.message("checkpoint saved")
            progress.summary(
                "trained 1 step", commands=[("resume", "mtrain train --resume runs/x")]
            )
    text = (tmp_path / "log.txt").read_text()
    assert "\x1b" not in text
    for line in ("step   1/100", "checkpoint saved", "resume      mtrain train --resume runs/x"):
        assert text.count(line) == 2
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path):
    (tmp_path / "log.txt").symlink_to("/dev/full")
    progress, out, _ = make(tmp_path)
    with progress:
        progress.step(STEP)
        progress.summary("trained 1 step")
    assert "trained 1 step" in out.getvalue()


def test_other_workers_show_nothing_and_write_nothing(tmp_path):
    progress, out, _ = make(tmp_path, enabled=False)
    with progress:
        progress.step(STEP)
        progress.message("checkpoint saved")
        progress.show("banner")
        progress.summary("trained")
    assert out.getvalue() == ""
    assert not (tmp_path / "log.txt").exists()


def test_the_time_left_excludes_the_first_steps():
    progress, _, clock = make(total=10)
    with progress:
        for step, seconds in [(1, 100.0), (2, 50.0), (3, 2.0), (4, 4.0)]:
            clock.now += seconds
            progress.step(replace(STEP, step=step))
            if step <= 2:
                assert progress.seconds_left() is None
        assert progress.seconds_left() == pytest.approx(3.0 * 6)


@pytest.mark.parametrize(("width", "metrics"), [(80, STEP), (120, ON_CPU)])
def test_the_live_display_is_two_lines_that_fit(width, metrics):
    progress, _, clock = make(terminal=True, width=width, total=100_000)
    progress.start_step = 12_000
    for step in range(12_001, 12_030):
        clock.now += 60.0
        progress.step(
            replace(metrics, step=step, loss=10.0 - step / 1e4, tokens_per_second_per_gpu=123_456.0)
        )
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True)
    console.print(progress.display(width))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert "step 12029/100000" in lines[0]
    assert "left 61d 02:11" in lines[0]
    assert "loss 8.7971" in lines[1]
    assert "123,456 tokens/s" in lines[1]


def test_messages_scroll_above_the_live_display(tmp_path):
    progress, out, _ = make(tmp_path, terminal=True)
    with progress:
        progress.step(STEP)
        progress.message("the disk is nearly full", warning=True)
        progress.message("a\nb: nearly full", warning=True)
    assert "warning: the disk is nearly full" in out.getvalue()
    log = (tmp_path / "log.txt").read_text()
    assert "warning: the disk is nearly full\nwarning: a\\nb: nearly full\n" in log


def test_the_summary_shows_first_and_last_loss_and_never_breaks_a_command():
    progress, out, clock = make(total=4)
    command = "mtrain checkpoint export runs/" + "x" * 120 + " out"
    with progress:
        for step in range(1, 5):
            clock.now += 10.0
            progress.step(
                replace(STEP, step=step, loss=6.0 - step, tokens_per_second_per_gpu=100.0 * step)
            )
        progress.summary(
            "trained 4 steps",
            files=["runs/x/metrics.jsonl", "runs/x/checkpoints/step-4"],
            commands=[("export", command)],
        )
    text = out.getvalue()
    assert "time        0:40" in text
    assert "5.0000 at step 1, 2.0000 at step 4" in text
    assert "350 tokens/s/GPU, MFU 43.1%, median of 2 steps" in text
    assert "memory      peak 101.26 GiB" in text
    assert f"export      {command}\n" in text
    assert "            runs/x/checkpoints/step-4\n" in text


def test_a_dumb_terminal_gets_plain_lines():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"})
    with TrainingProgress(3, 0, True, console=console) as progress:
        progress.step(STEP)
    assert console.file.getvalue().startswith("step 1/3  loss 5.5000")


@pytest.mark.parametrize(
    ("values", "width", "columns"),
    [
        ([1.0, 8.0], 10, "▁█"),
        ([3.0, 3.0, 3.0], 10, "▁▁▁"),
        ([1.0], 10, ""),
        ([], 10, ""),
        ([8.0, 8.0, 1.0, 1.0], 2, "█▁"),
    ],
)
def test_sparkline(values, width, columns):
    assert sparkline(values, width) == columns


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-:--"),
        (0.2, "0:00"),
        (65, "1:05"),
        (7384, "2:03:04"),
        (3 * 86400 + 4 * 3600 + 300, "3d 04:05"),
    ],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_sparse_steps_show_hfu_and_density():
    sparse = replace(STEP, mfu_model=None, mfu_executed=0.5069, density=0.057, index_seconds=0.07)
    progress, out, clock = make()
    with progress:
        progress.step(replace(STEP, mfu_model=0.3))
        for step, share in ((2, 0.51), (3, 0.52), (4, 0.53), (5, 0.54)):
            clock.now += 10.0
            progress.step(replace(sparse, step=step, mfu_executed=share))
        progress.summary("trained 5 steps")
    text = out.getvalue()
    assert "HFU 51.0%  101.3 GiB  density 5.7%" in text
    assert text.count("MFU") == 1, "that of the dense step"
    assert "HFU 53.0%, median of 3 steps" in text


def test_mtrain_status_shows_the_same_steps_and_warnings(tmp_path):
    run = RunDir(tmp_path)
    reporter = run_status.StateReporter(run, launcher="mtrain", steps=100, step=0)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    progress = TrainingProgress(100, 0, True, reporter=reporter, console=console, clock=Clock())
    with progress:
        for step in (1, 2, 3, 100):
            progress.step(replace(STEP, step=step, loss=1.0 * step))
        progress.message("a spike", warning=True)
    written = run_status.read_state(run)
    values = written.phase, written.step, written.loss, written.seconds_left
    assert values == ("training", 100, 100.0, 0.0)
    assert [text for _, text in written.warnings] == ["a spike"]
