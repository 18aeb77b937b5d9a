"""Hooks of a training run, and those that watch for spikes and stragglers.

Both watches compare a value with the median of recent values, which a few outliers do not move.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mtrain_cli.parallel.recording import Moment, elapsed, moment

if TYPE_CHECKING:
    from mtrain_cli.model.decoder import Attend
    from mtrain_cli.records.metrics import StepMetrics
    from mtrain_cli.training.batch import Batch, PackedSample
    from mtrain_cli.training.step import StepResult
    from mtrain_cli.training.trainer import Trainer


@dataclass(frozen=True)
class FinishedStep:
    """One optimizer step, as callbacks see it."""

    result: StepResult
    metrics: StepMetrics  # the step's line of metrics.jsonl
    last: bool  # whether it is the last of `train.steps`


class Callback:
    """An object that follows a training run. Override the hooks that you need.

    All workers call the hooks at the same points of a step, in the order of `Trainer.callbacks`, so
    hooks may communicate.

    needs_samples: whether `on_samples` needs the whole sequences, which may take gigabytes and
        otherwise are dropped. Set this before the first step.
    """

    needs_samples = False

    def before_training(self) -> None:
        """Run before the first step, and after loading a checkpoint if the run resumes."""

    def before_step(self) -> None:
        """Run before a step reads its data."""

    def on_samples(self, samples: Sequence[Sequence[PackedSample]]) -> None:
        """Receive the samples of each micro-batch of a step. Leave no gradients behind."""

    def wrap_attention(self, batch: Batch, attend: Attend) -> Attend:  # noqa: ARG002 - a hook
        """Return a micro-batch's attention. The wrapper of the first callback is outermost."""
        return attend

    def after_step(self, step: FinishedStep) -> None:
        """Run after a step has updated the weights."""

    def on_checkpoint(self, step: int) -> None:
        """Run when a background thread starts to write the checkpoint of `step`."""

    def on_rollback(self, step: int) -> None:
        """Run when the run went back to the checkpoint of `step`. Its later steps did not count."""

    def on_error(self, error: Exception) -> None:
        """Run when a step, a save or a callback fails. Do not communicate: workers may be gone."""

    def close(self) -> None:
        """Run once after the last step, when the last checkpoint is on disk."""


class PeriodicEvaluation(Callback):
    """Evaluates at the start and end of training and every ``train.eval_every`` steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def before_training(self) -> None:
        self._evaluate_after(is_end=self._trainer.step == 0)

    def after_step(self, step: FinishedStep) -> None:
        # After a stop request the user waits for the checkpoint, so do not evaluate.
        if not step.result.stop:
            self._evaluate_after(is_end=step.last)

    def _evaluate_after(self, *, is_end: bool) -> None:
        every = self._trainer.config.train.eval_every
        self.evaluate(due=is_end or bool(every and self._trainer.step % every == 0))

    def evaluate(self, *, due: bool) -> None:
        """Evaluate the model if ``due``. Called after every step."""
        raise NotImplementedError


WINDOW = 64  # number of latest steps to compare with
MIN_STEPS = 16  # number of steps before the first comparison
# For a normal distribution, 1.4826 x the median absolute deviation is the standard deviation.
_NORMAL = 1.4826
_MIN_LOSS_SIGMA = 0.01  # smallest standard deviation of the loss, as a share of its median
_MIN_NORM_SIGMA = 0.05  # smallest standard deviation of the logarithm of the gradient norm

STRAGGLER_STEPS = 20  # number of latest steps to compare
STRAGGLER_WARM_UP = 3  # first steps to ignore: compilation and first communicators


def _sigmas(values: deque[float], value: float, minimum: float) -> float:
    """Return how many robust deviations, at least `minimum`, `value` lies above the median."""
    if len(values) < MIN_STEPS:
        return 0.0
    middle = statistics.median(values)
    deviation = _NORMAL * statistics.median(abs(v - middle) for v in values)
    return (value - middle) / max(deviation, minimum)


class SpikeWatch:
    """Detect spikes of the loss and of the gradient norm, with the same result on all workers.

    A step is a spike if its loss, or the logarithm of its gradient norm, exceeds the median of the
    last 64 steps by more than `sigma` robust standard deviations. The first 16 steps are never
    spikes. The median includes spikes, so a lasting change stops being a spike after 32 steps.
    """

    def __init__(self, sigma: float) -> None:
        """sigma: threshold in robust standard deviations. 0 disables the watch."""
        self._sigma = sigma
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)  # their logarithms
        self._since: int | None = None  # first step of the current spike

    def check(self, step: int, loss: float, grad_norm: float) -> tuple[bool, str]:
        """Return whether this step is a spike, and a line if a spike starts or ends, else ""."""
        log_norm = math.log(grad_norm) if grad_norm > 0 else -math.inf
        before = len(self._losses)
        outliers = self._outliers(loss, grad_norm, log_norm) if self._sigma else []
        self._losses.append(loss)
        if log_norm > -math.inf:
            self._norms.append(log_norm)
        line = ""
        if outliers and self._since is None:
            self._since = step
            line = f"step {step} is a spike: {' and '.join(outliers)} of the last {before} steps"
        elif not outliers and self._since is not None:
            count = step - self._since
            lasted = f"the spike lasted {count} step{'s' * (count > 1)}"
            line = f"step {step} is back to normal; {lasted}"
            self._since = None
        return bool(outliers), line

    def far_above(self, loss: float, sigma: float) -> str:
        """Return how far a loss is above the median of the last steps; "" up to ``sigma``."""
        middle = statistics.median(self._losses) if self._losses else 0.0
        sigmas = _sigmas(self._losses, loss, _MIN_LOSS_SIGMA * abs(middle))
        if sigmas <= sigma:
            return ""
        return f"loss {loss:.4f}, {_format_sigmas(sigmas)} above the median {middle:.4f}"

    def _outliers(self, loss: float, grad_norm: float, log_norm: float) -> list[str]:
        outliers = list(filter(None, [self.far_above(loss, self._sigma)]))
        sigmas = _sigmas(self._norms, log_norm, _MIN_NORM_SIGMA)
        if sigmas > self._sigma:
            middle = math.exp(statistics.median(self._norms))
            distance = f"{_format_sigmas(sigmas)} above the median {middle:.3g}"
            outliers.append(f"gradient norm {grad_norm:.3g}, {distance}")
        return outliers

    def state(self) -> dict[str, Any]:
        return {"loss": list(self._losses), "norm": list(self._norms)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(map(float, state["loss"]), maxlen=WINDOW)
        self._norms = deque(map(float, state["norm"]), maxlen=WINDOW)
        self._since = None


def _format_sigmas(sigmas: float) -> str:
    return f"{sigmas:.0f} sigma" if sigmas < 1000 else "over 1000 sigma"


class StragglerWatch(Callback):
    """Warn of workers that have become slower than the others. Runs on the first worker.

    A rank is a straggler if it takes more than 1 + `share` times as long as the median of the other
    ranks for the same part of a layer (`ComputeTimer`), in more than half of the last 20 steps. It
    is reported once, and when it has caught up. A share of 0 disables the watch.
    """

    def __init__(
        self,
        share: float | str,
        device: str,
        places: Sequence[str],
        warn: Callable[[str], None],
        records: Iterable[Callable[[int, float | None], None]] = (),
    ) -> None:
        """share: ``auto`` is 0.1 on GPUs, 0.5 on CPUs that share cores.

        records: get a rank and its ratio, or None when it has caught up or is seen not to be slow.
        """
        self._share = (0.1 if device == "cuda" else 0.5) if isinstance(share, str) else share
        self._places, self._warn, self._records = places, warn, [*records]
        self._ratios: list[deque[float]] = [deque(maxlen=STRAGGLER_STEPS) for _ in places]
        self._slow, self._judged = set[int](), set[int]()
        self._seen = 0

    def after_step(self, step: FinishedStep) -> None:
        for line in self.check([report.compute_seconds for report in step.result.reports]):
            self._warn(line)

    def check(self, seconds: Sequence[float]) -> list[str]:
        """Return a line for each rank that has become a straggler or has caught up.

        seconds: time that each rank took. 0 if not measured.
        """
        self._seen += 1
        is_measured = len(seconds) > 1 and all(seconds)
        if not self._share or self._seen <= STRAGGLER_WARM_UP or not is_measured:
            return []
        lines = []
        for rank, own in enumerate(seconds):
            ratios = self._ratios[rank]
            ratios.append(own / statistics.median([*seconds[:rank], *seconds[rank + 1 :]]))
            if len(ratios) < STRAGGLER_STEPS:
                continue
            ratio, name = statistics.median_low(ratios), f"rank {rank} ({self._places[rank]})"
            if rank not in self._slow and ratio > 1 + self._share:
                self._slow.add(rank)
                self._record(rank, ratio)
                lines.append(
                    f"{name} is a straggler: it takes {ratio:.2f}x as long as the others for the "
                    f"same part of a layer, in most of the last {STRAGGLER_STEPS} steps"
                )
            # It catches up only below half the threshold, so as not to be reported repeatedly.
            elif rank in self._slow and ratio < 1 + self._share / 2:
                self._slow.remove(rank)
                self._record(rank, None)
                lines.append(f"{name} has caught up with the others")
            elif rank not in self._judged | self._slow:
                self._record(rank, None)
            self._judged.add(rank)
        return lines

    def _record(self, rank: int, ratio: float | None) -> None:
        for record in self._records:
            record(rank, ratio)


LAYERS = 8  # number of layers timed, evenly spread


class ComputeTimer(Callback):
    """Times the part after attention in some layers of one worker, once per step.

    A GPU records two events per layer, which are read one step later, so that the host never waits.

    seconds: of the previous step, summed over the timed layers; 0 if not measured.
    """

    seconds = 0.0

    def __init__(
        self, layers: Mapping[int, nn.Module], device: torch.device, most: int = LAYERS
    ) -> None:
        """Add a forward hook to each timed layer.

        layers: by number, already sharded by FSDP, so that these hooks run after those of FSDP.
        most: number of layers of the worker with the fewest. All workers time as many.
        """
        self._device = device
        count, numbers = min(LAYERS, len(layers), most), list(layers)
        self._chosen = sorted({numbers[len(layers) * n // count] for n in range(count)})
        self._began: dict[int, Moment] = {}
        self._spans: dict[int, tuple[Moment, Moment]] = {}
        self._waits: list[tuple[Moment, Moment]] = []  # of timed layers, for their tensor group
        self._running = False  # whether a timed layer runs the timed part
        for index in self._chosen:
            layers[index].register_forward_hook(self._layer_hook(index))

    def before_step(self) -> None:
        """Read the times of the previous step. The device must have finished that step."""
        complete = len(self._spans) == len(self._chosen)
        timed = sum(starmap(elapsed, self._spans.values())) - sum(starmap(elapsed, self._waits))
        self.seconds = timed if complete else 0.0
        self._began, self._spans, self._waits, self._running = {}, {}, [], False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the ``with`` block, a wait for other workers, out of the time of a layer."""
        if not self._running:
            yield
            return
        began = moment(self._device)
        try:
            yield
        finally:
            self._waits.append((began, moment(self._device)))

    def wrap_attention(self, _batch: Batch, attend: Attend) -> Attend:
        """Return a function that calls `attend` and marks the end of a timed layer's attention."""

        def timed(q: Tensor, k: Tensor, v: Tensor, layer: int, *sinks: Tensor) -> Tensor:
            out = attend(q, k, v, layer, *sinks)
            # Later micro-batches and recomputation call attention again. Time only the first call.
            if layer not in self._began and layer in self._chosen:
                self._began[layer], self._running = moment(self._device), True
            return out

        return timed

    def _layer_hook(self, index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if index in self._began and index not in self._spans:
                self._running = False
                self._spans[index] = self._began[index], moment(self._device)

        return hook
