"""`metrics.jsonl` and other files of steps: one JSON object per line, and what is wrong with them.

A crash may cut the last line short. Such a line has no newline and does not count. Any other line
that is not a step is damaged. A run that resumes first removes the steps after its checkpoint, so
the steps of an intact file have the numbers 1, 2, 3, ...
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from mtrain_cli.config import documents
from mtrain_cli.config.documents import replacing
from mtrain_cli.config.earlier_versions import RENAMED_METRICS, renamed
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.grouping import grouped, show_spans, spans

T = TypeVar("T")
METRICS_FILE = "metrics.jsonl"
# First steps that rates exclude: compilation, first communicators and growth of the allocator.
WARM_UP_STEPS = 2
_ALL = 0.995  # share of the allowed pairs from which a pattern leaves nothing out


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimizer step, of all workers unless a line says otherwise.

    loss: mean loss of the tokens with a label, in nats; None if no token has a label.
    grad_norm: global L2 norm of the gradients before clipping; None if not computed.
    tokens: tokens trained on since the start, without padding.
    targets: labels of this step that count toward the loss.
    tokens_per_second_per_gpu: tokens of this step / seconds / workers; targets likewise.
    mfu_model: MFU (`flops.FlopsPerToken`). None on a CPU, on an unknown GPU, and for a sparse step,
        which skips pairs that the mask allows.
    mfu_executed: HFU. None on a CPU and on an unknown GPU.
    density: computed pairs / causal pairs of the whole sequence. A dense step has 1.0, or with
        packed documents the share of causal pairs that lie inside one document.
    dense_density: density that a sparse step would have with dense attention.
    peak_memory_gib: peak allocated memory of the first worker in this step; None on a CPU.
    seconds: wall-clock time of the step, including data loading (`data_seconds`, the longest).
    epoch, consumed: passes over the data, with what rollbacks left out, and sequences trained on.
    slashes, columns: number per head, averaged over heads and layers, in a sparse step.
    index_seconds: time that the first worker spent on index estimates in a sparse step.
    index_cut: share of the blocks that reached their layer's level, but that `sparsity.row_cap` of
        `block_topk` cut.
    density_by_layer: density of each layer in a sparse step.
    balance_loss: balance loss of the routers without its coefficient, mean over sequences and
        layers; 1 is perfect. None for a model without experts, as the next four.
    router_z: mean of logsumexp^2 of the routers' scores over tokens and layers.
    expert_load: largest tokens of an expert / mean of the experts of its layer, over layers.
    router_entropy: mean entropy of the routers' scores over tokens and layers, in nats.
    skipped: whether the update was skipped.
    skip_reason: spike (optim.skip_spikes), no label, or not finite (train.skip_nonfinite).
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
    index_cut: float | None = None
    density_by_layer: list[float] | None = None
    balance_loss: float | None = None
    router_z: float | None = None
    expert_load: float | None = None
    expert_load_by_layer: list[float] | None = None
    router_entropy: float | None = None
    skipped: bool | None = None
    skip_reason: str | None = None

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
    """Appends steps to `metrics.jsonl` of a run.

    start_step: the step from which the run resumes, or 0. Opening the file removes later steps.
    """

    def __init__(self, run_dir: Path, *, start_step: int) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        if self.path.exists():
            drop_later_steps(self.path, start_step)
        self._file = self.path.open("ab", buffering=0)
        self.lost = 0  # consecutive lines that could not be written

    def write(self, metrics: StepMetrics) -> str | None:
        """Append one step; return a warning if this fails, once for several failures in a row."""
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
        return problem

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """Do as `read_readable_metrics`, but raise ConfigError for damaged lines, too."""
    steps, damaged = read_readable_metrics(path)
    if damaged:
        file = metrics_file(path)
        raise ConfigError(f"{documents.damaged_lines(file, damaged)}; each line must be a step")
    return steps


def read_readable_metrics(path: Path) -> tuple[list[StepMetrics], list[int]]:
    """Return the steps of a `metrics.jsonl`, and the numbers of its damaged lines, from 1.

    Ignore unknown keys and replace missing values by None, so files of other versions can be read.

    Raises:
        ConfigError: the file is missing.
    """
    file = metrics_file(path)
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give a run's folder or its {METRICS_FILE}")
    return read_steps(file, _from_row)


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


# --- files of steps -----


def read_steps(path: Path, parse: Callable[[dict[str, Any]], T]) -> tuple[list[T], list[int]]:
    """Return the steps of a file, and the numbers of its damaged lines, from 1.

    parse: makes a step of a row. It raises UnreadableError for a row that is no step.
    """
    steps, damaged = [], []
    for number, _, row in _lines(path):
        try:
            if _step_of(row) is None:
                raise documents.UnreadableError("step is missing")
            steps.append(parse(row or {}))
        except documents.UnreadableError:
            damaged.append(number)
    return steps, damaged


def drop_later_steps(path: Path, last: int) -> list[dict[str, Any]]:
    """Remove the steps after ``last`` from a file atomically; return the rows that stay.

    Damaged lines before these steps stay as they are: they may be earlier steps.
    """
    kept: list[bytes] = []
    rows: list[dict[str, Any]] = []
    is_later = False
    for _, line, row in _lines(path):
        step = _step_of(row)
        is_later = is_later or (step is not None and step > last)
        if row is not None and step is not None and step <= last:
            kept.append(line)
            rows.append(row)
        elif step is None and not is_later:
            kept.append(line)
    with replacing(path) as draft, draft.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    return rows


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yield the number, content and JSON object (or None) of each line that is not blank.

    Only a newline ends a line: a carriage return inside of a line is white space of its JSON.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                row = documents.json_object(line)
                if row is not None or line.endswith(b"\n"):
                    yield number, line.rstrip(b"\r\n"), row


def _step_of(row: dict[str, Any] | None) -> int | None:
    step = None if row is None else row.get("step")
    return step if isinstance(step, int) and documents.is_number(step) and step >= 0 else None


# --- remarks -----


def step_remarks(steps: Sequence[StepMetrics], last: int = 0) -> list[str]:
    """Return what is wrong with the steps of a file, for example "step 5 is missing".

    A step whose update was skipped may have no loss, and has no remark.

    last: a step that the run has reached. The file must have the steps up to it.
    """
    numbers = [step.step for step in steps]
    present = sorted(set(numbers))
    ends = [0, *present, max(last, *present, 0) + 1]
    missing = [range(low + 1, high) for low, high in pairwise(ends) if high > low + 1]
    repeated = {number for number, after in pairwise(sorted(numbers)) if number == after}
    lossless = (
        s.step for s in steps if not is_finite(s.loss) and not (s.loss is None and s.skipped)
    )
    remarks = [
        _remark(missing, "is missing", "are missing"),
        _remark(spans(sorted(repeated)), "appears more than once", "appear more than once"),
        loss_remark(lossless),
        "the steps are not in order" * any(after < n for n, after in pairwise(numbers)),
    ]
    return [remark for remark in remarks if remark]


def loss_remark(numbers: Iterable[int]) -> str:
    """Return a remark on steps without a finite loss; "" without such steps."""
    return _remark(spans(sorted(set(numbers))), "has no finite loss", "have no finite loss")


def skipped_updates(steps: Iterable[StepMetrics]) -> list[str]:
    """Return for each reason why updates were skipped the steps, such as "spike: 5, 9-11"."""
    by_reason = grouped((step for step in steps if step.skip_reason), lambda s: s.skip_reason)
    return [f"{why}: {show_spans(spans(s.step for s in of))}" for why, of in by_reason.items()]


def nothing_left_out(step: StepMetrics) -> str:
    """Return a note if a sparse step computed nearly all pairs that the mask allows, else ""."""
    allowed = step.dense_density
    if not allowed or step.density < _ALL * allowed:
        return ""
    share = "" if allowed > _ALL else ", as with dense attention"
    return f"density {step.density:.0%}{share}: the pattern leaves nothing out at this length"


def is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _remark(found: Sequence[range], is_one: str, are_several: str) -> str:
    if not found:
        return ""
    one = sum(map(len, found)) == 1
    return f"step{'s' * (not one)} {show_spans(found)} {is_one if one else are_several}"


def line_on_file(file: Path, damage: str, remarks: Sequence[str]) -> str:
    """Return a line on a file. damage: a line that names the file, or ""."""
    text = "; ".join(filter(None, (damage, *remarks)))
    return f"{file}: {text}" if text and not damage else text
