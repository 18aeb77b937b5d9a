"""`metrics.jsonl`: one JSON object per optimizer step, written by the first worker and read by every tool that draws a curve."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mtrain_cli import install_command
from mtrain_cli.config import documents
from mtrain_cli.config.earlier_versions import RENAMED_METRICS, renamed
from mtrain_cli.config.schema import ConfigError

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one optimizer step leaves behind. Numbers hold for the whole job unless they say otherwise.

    step: optimizer steps done, this one included; the first is 1.
    loss: mean over the valid tokens of the step, in nats; None where no token has a label.
    grad_norm: global L2 norm before clipping; None when the run does not compute it.
    lr: learning rate that this step used.
    tokens: tokens trained on since step 0, this step included (pads are not tokens).
    tokens_per_second_per_gpu: tokens of this step / seconds / workers.
    mfu_model, mfu_executed: MFU and HFU, shares of the GPU's peak in the two conventions of `flops.FlopsPerToken`; None on a CPU or an
        unknown GPU. A sparse step has no MFU: it leaves out pairs that the mask allows.
    density: computed pairs / causal pairs of the whole sequence, for dense and sparse steps alike. A dense step has 1.0 without
        documents, and with packed documents the share of the causal pairs that lies inside them.
    peak_memory_gib: most memory that the allocator of the first worker held during the step; None on a CPU.
    seconds: wall time of the step, data loading included.
    epoch: passes over the data, with a fraction.
    consumed: sequences read since step 0.
    data_seconds: what of `seconds` the worker that waited longest stood still for its data: to be read, and to be brought to the device.
    slashes, columns: block diagonals and single columns of a head, means over heads and layers; None for a dense step.
    index_seconds: time that the first worker spent estimating indices; None for a dense step.
    density_by_layer: the same ratio for each layer; None for a dense step.
    skipped: whether the update was left out: that of a spike (optim.skip_spikes), or of a step without labels, which is true whatever
        that key says. None for other steps without optim.skip_spikes.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_second_per_gpu: float
    mfu_model: float | None
    mfu_executed: float | None
    density: float
    peak_memory_gib: float | None
    seconds: float
    epoch: float
    consumed: int
    data_seconds: float | None = None
    slashes: float | None = None
    columns: float | None = None
    index_seconds: float | None = None
    density_by_layer: list[float] | None = None
    skipped: bool | None = None

    def to_json(self) -> str:
        """One line of strict JSON; NaN and infinities, which JSON has no word for, become null."""
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }
        return json.dumps(values, allow_nan=False)


class MetricsWriter:
    """Appends steps to ``metrics.jsonl`` of a run, each on disk as soon as it is written, and to TensorBoard when asked.

    ``start_step`` is the step that the run continues from (0 for a new one): lines of later steps, left by an attempt that went on
    after its last checkpoint, are dropped first, and a line cut short by a crash with them. The file is replaced in one move.

    Raises:
        ConfigError: TensorBoard is asked for and not installed.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool, start_step: int) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self._events = _summary_writer(Path(run_dir), start_step) if tensorboard else None
        if self.path.exists():
            _drop_later_steps(self.path, start_step)
        self._file = self.path.open("ab", buffering=0)
        self.lost = 0  # lines in a row that could not be written

    def write(self, metrics: StepMetrics) -> str | None:
        """Append one step and flush it to the operating system, so that it outlives this process.

        Returns what is wrong the first time that a line cannot be written, such as a full disk; training goes on without that line.
        """
        problem = None
        before = os.fstat(self._file.fileno()).st_size
        line = (metrics.to_json() + "\n").encode()
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
            self.lost = 0
        except OSError as error:
            with contextlib.suppress(OSError):
                # Half a line would spoil the next one.
                os.ftruncate(self._file.fileno(), before)
            self.lost += 1
            if self.lost == 1:
                problem = f"{self.path}: step {metrics.step} was not written ({error.strerror}); training goes on"
        if self._events is not None:
            for field in fields(metrics):
                value = getattr(metrics, field.name)
                if isinstance(value, int | float) and field.name != "step":
                    self._events.add_scalar(f"train/{field.name}", value, metrics.step)
            self._events.flush()
        return problem

    def close(self) -> None:
        """Close the files; writing afterwards is an error."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps of a ``metrics.jsonl`` (or of the run folder that holds one), in file order; a last line cut short is left out.

    Keys that this version does not know are ignored and missing ones read as null, so that older and newer files open.

    Raises:
        ConfigError: there is no such file, or a line before the last is no step.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a run's folder or its {METRICS_FILE}")
    try:
        return [_from_row(row) for _, row in _rows(path)]
    except documents.UnreadableError as error:
        raise ConfigError(f"{path}: holds a line that is no step ({error})") from None


def _from_row(row: dict[str, Any]) -> StepMetrics:
    metrics = documents.checked(StepMetrics, renamed(row, RENAMED_METRICS), nulls=True)
    return replace(metrics, mfu_model=sound_mfu(metrics.mfu_model, metrics.mfu_executed))


def sound_mfu(mfu: float | None, hfu: float | None) -> float | None:
    """An MFU as it stands in a file; None where it exceeds HFU, as it did where earlier versions counted pairs that nobody computes."""
    return None if mfu is not None and hfu is not None and mfu > hfu else mfu


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(line, parsed line) of every step in the file."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append((line, row))
        elif number < len(lines):
            raise ConfigError(
                f"{path}:{number}: not a step; each line must be a JSON object with an integer step"
            )
    return rows


def _drop_later_steps(path: Path, last: int) -> None:
    """Rewrite the file with the steps up to ``last`` only, by way of a second file that takes its place."""
    kept = "".join(f"{line}\n" for line, row in _rows(path) if row["step"] <= last)
    draft = path.with_suffix(".jsonl.new")
    with draft.open("w", encoding="utf-8") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _summary_writer(run_dir: Path, start_step: int) -> Any:
    """TensorBoard's writer into ``run_dir/tensorboard``; events after ``start_step`` of an earlier attempt are hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"run.tensorboard=true: tensorboard is not installed; {install_command('tensorboard')}"
        ) from error
    return SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=start_step + 1)
