"""`metrics.jsonl`: one JSON object per optimizer step, written by the first worker."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mtrain_cli import install_command
from mtrain_cli.config import documents
from mtrain_cli.config.earlier_versions import RENAMED_METRICS, renamed
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.records import step_lines

METRICS_FILE = "metrics.jsonl"
# First steps that rates exclude: compilation, first communicators and growth of the allocator.
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimizer step. They cover all workers, unless a line says otherwise.

    loss: mean loss of the tokens with a label, in nats; None if no token has a label.
    grad_norm: global L2 norm of the gradients before clipping; None if not computed.
    tokens: number of tokens trained on since the start, without padding, including this step.
    targets: number of labels of this step that count toward the loss. Masks of the data, a mask
        that shows a query its next token, the ends of documents and padding leave labels out.
    tokens_per_second_per_gpu: number of tokens of this step / seconds / workers.
    targets_per_second_per_gpu: the same for targets; None in files of earlier versions.
    mfu_model: MFU, a share of the GPU's peak FLOP/s (`flops.FlopsPerToken`). None on a CPU, on an
        unknown GPU, and for a sparse step, which skips pairs that the mask allows.
    mfu_executed: HFU, a share of the GPU's peak FLOP/s. None on a CPU and on an unknown GPU.
    density: number of computed pairs / number of causal pairs of the whole sequence. A dense step
        has density 1.0. With packed documents, its density is the share of causal pairs that lie
        inside one document.
    dense_density: density that the step would have with dense attention; None for a dense step.
    peak_memory_gib: peak allocated memory of the first worker in this step; None on a CPU.
    seconds: wall-clock time of the step, including data loading.
    epoch: number of passes over the data so far, with a fraction.
    consumed: number of sequences read since the start.
    data_seconds: longest time that a worker waited until its data were read and on the device. This
        time is a part of `seconds`.
    slashes: number of slashes per head, averaged over heads and layers; None for a dense step.
    columns: number of single columns per head, averaged over heads and layers; None for a dense
        step.
    index_seconds: time that the first worker spent on index estimates; None for a dense step.
    density_by_layer: density of each layer; None for a dense step.
    balance_loss: mean of the balance loss of the routers, without its coefficient, over sequences
        and layers. 1 is perfect balance. None for a model without experts, as the next five.
    router_z: mean of logsumexp^2 of the routers' scores over tokens and layers.
    expert_load: largest tokens of an expert / mean tokens of the experts of its layer, over layers.
    expert_load_by_layer: the same of each layer that has experts.
    router_entropy: mean entropy of the routers' scores over tokens and layers, in nats.
    dropped: number of times that an expert did not compute a token that chose it, summed over
        layers (train.expert_capacity).
    skipped: whether the optimizer skipped the update, because of a spike (optim.skip_spikes) or
        because no token has a label. None also means that no update was skipped.
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
    targets: int | None = None
    targets_per_second_per_gpu: float | None = None
    dense_density: float | None = None
    data_seconds: float | None = None
    slashes: float | None = None
    columns: float | None = None
    index_seconds: float | None = None
    density_by_layer: list[float] | None = None
    balance_loss: float | None = None
    router_z: float | None = None
    expert_load: float | None = None
    expert_load_by_layer: list[float] | None = None
    router_entropy: float | None = None
    dropped: int | None = None
    skipped: bool | None = None

    def to_json(self) -> str:
        """Return one line of strict JSON; NaN and infinities become null."""
        return documents.json_text(asdict(self))


def steady_steps(metrics: Sequence[StepMetrics], restarts: Sequence[int] = ()) -> list[StepMetrics]:
    """Return the steps of a run except the first `WARM_UP_STEPS` steps after each start.

    If no step remains, return the last step.

    Args:
        restarts: step numbers of the checkpoints from which the run restarted.
    """
    starts = (metrics[0].step - 1 if metrics else 0, *restarts)
    warm_up = {start + number for start in starts for number in range(1, WARM_UP_STEPS + 1)}
    return [step for step in metrics if step.step not in warm_up] or list(metrics[-1:])


def timed_steps(steps: Sequence[StepMetrics]) -> list[StepMetrics]:
    """Return the steps with a time and a rate. A file that others changed may lack them."""
    return [step for step in steps if None not in (step.seconds, step.tokens_per_second_per_gpu)]


def median_rate(steps: Sequence[StepMetrics]) -> float:
    """Return the throughput of one worker in tokens/s, as the median over the steps."""
    return statistics.median(step.tokens_per_second_per_gpu for step in steps)


def rate_unit(steps: Sequence[StepMetrics]) -> str:
    """Return the unit of `tokens_per_second_per_gpu`: per worker if any step ran on a CPU."""
    on_cpu = any(step.peak_memory_gib is None for step in steps)
    return "tokens/s/worker" if on_cpu else "tokens/s/GPU"


class MetricsWriter:
    """Appends steps to `metrics.jsonl` of a run, and to TensorBoard if requested.

    `start_step` is the step from which the run resumes, or 0 for a new run. Opening the file
    removes two kinds of lines:
    - steps after `start_step`, which an earlier attempt trained after its last checkpoint
    - an incomplete last line, which a crash cut short

    Damaged lines before them stay.

    Raises:
        ConfigError: TensorBoard is requested but not installed.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool, start_step: int) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self._events = _summary_writer(Path(run_dir), start_step) if tensorboard else None
        if self.path.exists():
            step_lines.drop_later_steps(self.path, start_step)
        self._file = self.path.open("ab", buffering=0)
        self.lost = 0  # consecutive lines that could not be written

    def write(self, metrics: StepMetrics) -> str | None:
        """Append one step and flush it to the operating system.

        Returns:
            A warning if the write fails, for example because the disk is full; else None. If
            several writes in a row fail, only the first returns a warning.
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
                # The next line would be appended to half a line.
                os.ftruncate(self._file.fileno(), before)
            self.lost += 1
            if self.lost == 1:
                problem = (
                    f"{self.path}: metrics of step {metrics.step} were not written "
                    f"({error.strerror}); training goes on"
                )
        if self._events is not None:
            for field in fields(metrics):
                value = getattr(metrics, field.name)
                if isinstance(value, int | float) and field.name != "step":
                    self._events.add_scalar(f"train/{field.name}", value, metrics.step)
            self._events.flush()
        return problem

    def close(self) -> None:
        """Close the files. Later calls of `write` are not allowed."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """Do as `read_readable_metrics`, but refuse damaged lines.

    Raises:
        ConfigError: the file is missing, or a line is damaged.
    """
    steps, damaged = read_readable_metrics(path)
    if damaged:
        file = metrics_file(path)
        raise ConfigError(f"{documents.damaged_lines(file, damaged)}; each line must be a step")
    return steps


def read_readable_metrics(path: Path) -> tuple[list[StepMetrics], list[int]]:
    """Read the steps of a `metrics.jsonl` in file order.

    Skip an incomplete last line, which a crash cut short. Ignore unknown keys and replace missing
    values by None, so files of other versions can be read.


    Returns:
        The steps, and the numbers of the damaged lines, from 1.

    Raises:
        ConfigError: the file is missing.
    """
    file = metrics_file(path)
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give a run's folder or its {METRICS_FILE}")
    return step_lines.read_steps(file, _from_row)


def metrics_file(path: Path) -> Path:
    """Return the metrics file of a run's folder. path: the folder, or the file itself."""
    return path / METRICS_FILE if path.is_dir() else path


def _from_row(row: dict[str, Any]) -> StepMetrics:
    metrics = documents.checked(StepMetrics, renamed(row, RENAMED_METRICS), nulls=True)
    if metrics.step < 1:
        raise documents.UnreadableError(f"step={metrics.step}: steps count from 1")
    return replace(metrics, mfu_model=sound_mfu(metrics.mfu_model, metrics.mfu_executed))


def sound_mfu(mfu: float | None, hfu: float | None) -> float | None:
    """Return `mfu`, or None if it exceeds HFU.

    Earlier versions wrote an MFU above HFU, because they counted pairs that a sparse step skips.
    """
    return None if mfu is not None and hfu is not None and mfu > hfu else mfu


def _summary_writer(run_dir: Path, start_step: int) -> Any:
    """Open TensorBoard's files in `run_dir/tensorboard`.

    TensorBoard then hides steps after `start_step` that an earlier attempt wrote.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"run.tensorboard=true: tensorboard is not installed; {install_command('tensorboard')}"
        ) from error
    return SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=start_step + 1)
