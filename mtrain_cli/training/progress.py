"""Show the progress of a run: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from mtrain_cli.console import Console, full_width
from mtrain_cli.launch.run_status import StateReporter
from mtrain_cli.printable import one_line
from mtrain_cli.records.metrics import WARM_UP_STEPS, StepMetrics, median_rate, rate_unit

PACE_STEPS = 20  # latest steps that the estimate of the time left averages
LOG_WIDTH = 100
SHOWN_WAIT = 0.05  # share of a step from which a wait for data is shown
_LEVELS = "▁▂▃▄▅▆▇█"
_STATE = (  # fields of a step that `mtrain status` shows
    *("step", "loss", "grad_norm", "tokens", "targets", "tokens_per_second_per_gpu"),
    *("expert_load", "seconds"),
)


class TrainingProgress:
    """Show the steps of a run as they finish, in a terminal, in a log and to `mtrain status`.

    In a terminal, a two-line display stays at the bottom and messages scroll above it. Elsewhere, a
    line is printed every `log_every` steps. The printed lines also go to `log`.

    enabled: whether to show anything. True only on rank 0.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        enabled: bool,
        *,
        log: Path | None = None,
        log_every: int = 1,
        reporter: StateReporter | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.start_step, self.enabled = total_steps, start_step, enabled
        self.losses: list[float] = []
        self.last: StepMetrics | None = None
        self._log_every, self._reporter = log_every, reporter
        self._console, self._clock = console or Console(), clock
        self._started = self._finished = clock()
        self._durations: deque[float] = deque(maxlen=PACE_STEPS)
        self._steady: list[StepMetrics] = []
        self._seen = 0  # steps since the start or the last restart
        self._first_step = self._last_loss = start_step + 1  # first and last step with a loss
        self._log = log.open("a", encoding="utf-8") if enabled and log is not None else None
        self._live: Live | None = None

    def __enter__(self) -> TrainingProgress:
        self._started = self._finished = self._clock()
        if self.enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
            # Transient: a finished or failed run leaves a summary or an error, not a stale bar.
            self._live = Live(
                console=self._console,
                refresh_per_second=4,
                transient=True,
                get_renderable=lambda: self.display(self._console.width),
            )
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_display()
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None

    def _stop_display(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, metrics: StepMetrics) -> None:
        if not self.enabled:
            return
        now = self._clock()
        if self._seen >= WARM_UP_STEPS:
            self._durations.append(now - self._finished)
            self._steady.append(metrics)
        self._finished = now
        self._seen += 1
        if metrics.loss is not None:
            if not self.losses:
                self._first_step = metrics.step
            self.losses.append(metrics.loss)
            self._last_loss = metrics.step
        self.last = metrics
        if metrics.step % self._log_every == 0 or metrics.step == self.total_steps:
            line = self.line(metrics)
            self._write_log(line)
            if self._live is None:
                self._print_plain(line)
        if self._reporter is not None:
            last, left = metrics.step == self.total_steps, self.seconds_left()
            shown = {name: getattr(metrics, name) for name in _STATE}
            self._reporter.step(last=last, seconds_left=left, **shown)

    def message(self, text: str, *, warning: bool = False) -> None:
        if not self.enabled:
            return
        line = f"warning: {one_line(text)}" if warning else text
        if warning and self._reporter is not None:
            self._reporter.warn(text)
        self._write_log(line)
        if self._live is None:
            self._print_plain(line)
        else:
            self._console.print(Text(line, style="yellow" if warning else ""), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print the banner and write its plain text to the log."""
        if not self.enabled:
            return
        self._console.print(renderable, soft_wrap=isinstance(renderable, Text))
        if self._log is not None:
            plain = StringIO()
            console = Console(file=plain, width=LOG_WIDTH, color_system=None, force_terminal=False)
            console.print(renderable, soft_wrap=isinstance(renderable, Text))
            for line in plain.getvalue().splitlines():
                self._write_log(line.rstrip())

    def summary(
        self, headline: str, *, files: Sequence[str] = (), commands: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Show how the run ended. commands: label and command of each way to continue."""
        if not self.enabled:
            return
        self._stop_display()
        rows = [("time", format_duration(self._clock() - self._started))]
        if self.last is not None:
            rows += self._summary_rows(self.last)
        rows += [("files" if number == 0 else "", file) for number, file in enumerate(files)]
        text = Text(headline, style="bold")
        for label, value in [*rows, *commands]:
            text.append(f"\n{label:<12}", style="not bold dim")
            text.append(value.rstrip(), style="not bold")
        self.show(text)

    def _summary_rows(self, last: StepMetrics) -> list[tuple[str, str]]:
        loss = "n/a: no step had a label"
        if self.losses:
            begin = f"{self.losses[0]:.4f} at step {self._first_step}"
            end = f"{self.losses[-1]:.4f} at step {self._last_loss}"
            loss = f"{begin}, {end}  {self.sparkline(24)}"
        steady = self._steady or [last]
        rate = _rate(median_rate(steady), last)
        name, share = _utilization(last)
        if share is not None:
            used = [s for named, s in map(_utilization, steady) if named == name and s is not None]
            rate += f", {name} {statistics.median(used or [share]):.1%}"
        basis = "one step" if len(steady) == 1 else f"median of {len(steady)} steps"
        rows = [("loss", loss), ("throughput", f"{rate}, {basis}; {last.tokens:,} tokens in total")]
        waited, took = sum(m.data_seconds or 0.0 for m in steady), sum(m.seconds for m in steady)
        if (waiting := waited / max(1e-9, took)) >= SHOWN_WAIT:
            advice = "waiting; prepare the data once with `mtrain data prepare`"
            rows.append(("data", f"{waiting:.0%} of the time {advice}"))
        if last.peak_memory_gib is not None:
            peak = max(m.peak_memory_gib or 0.0 for m in steady)
            rows.append(("memory", f"peak {peak:.2f} GiB"))
        return rows

    def line(self, metrics: StepMetrics) -> str:
        width = len(str(self.total_steps))
        parts = [f"step {metrics.step:>{width}}/{self.total_steps}", f"loss {_loss(metrics)}"]
        if metrics.grad_norm is not None:
            parts.append(f"grad {metrics.grad_norm:.2f}")
        parts += [
            f"lr {metrics.lr:.2e}",
            _rate(metrics.tokens_per_second_per_gpu, metrics),
            *_special_parts(metrics),
            f"{metrics.seconds:.2f} s",
            *_data_parts(metrics),
        ]
        if (left := self.seconds_left()) is not None and metrics.step < self.total_steps:
            parts.append(f"ETA {format_duration(left)}")
        return "  ".join(parts)

    def seconds_left(self) -> float | None:
        if self.last is None or not self._durations:
            return None
        return statistics.fmean(self._durations) * (self.total_steps - self.last.step)

    def sparkline(self, width: int) -> str:
        return "" if self._console.options.ascii_only else sparkline(self.losses, width)

    def display(self, width: int) -> RenderableType:
        done = self.last.step if self.last is not None else self.start_step
        left = format_duration(self.seconds_left())
        share = f"{done / max(1, self.total_steps):4.0%}"
        since = format_duration(self._clock() - self._started)
        top = full_width(
            Text(f"step {done}/{self.total_steps}", style="bold"),
            ProgressBar(total=max(1, self.total_steps), completed=done),
            Text.assemble(share, ("  elapsed ", "dim"), since, ("  left ", "dim"), left),
        )
        if self.last is None:
            return Group(top, Text("first step: allocating and warming up", style="dim"))
        metrics = self.last
        bars = f" {self.sparkline(24 if width >= 100 else 10)}" if len(self.losses) > 1 else ""
        parts = [
            Text.assemble(("loss ", "dim"), (_loss(metrics), "bold"), bars),
            Text.assemble(("lr ", "dim"), f"{metrics.lr:.2e}"),
            Text(_rate(metrics.tokens_per_second_per_gpu, metrics)),
            *(Text(part) for part in (*_special_parts(metrics), *_data_parts(metrics))),
        ]
        return Group(top, Text("  ").join(parts))

    def _write_log(self, line: str) -> None:
        if self._log is not None:
            # A full disk must not end the training. Lines then stay in the file's buffer.
            with contextlib.suppress(OSError):
                self._log.write(line + "\n")
                self._log.flush()

    def _print_plain(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)
        self._console.file.flush()


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as at most `width` bars. A bar is the mean of several consecutive values."""
    count = min(width, len(values))
    if count < 2:
        return ""
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [statistics.fmean(values[low:high]) for low, high in pairwise(edges)]
    lowest, span = min(means), max(means) - min(means)
    return "".join(
        _LEVELS[round((mean - lowest) / span * (len(_LEVELS) - 1)) if span else 0] for mean in means
    )


def format_duration(seconds: float | None) -> str:
    """Format seconds as 1:05 (m:ss), 2:03:04 (h:mm:ss) or 3d 04:05 (hh:mm), and None as "-:--"."""
    if seconds is None:
        return "-:--"
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _loss(metrics: StepMetrics) -> str:
    return "n/a" if metrics.loss is None else f"{metrics.loss:.4f}"


def _rate(tokens_per_second: float, metrics: StepMetrics) -> str:
    return f"{tokens_per_second:,.0f} {rate_unit([metrics])}"


def _utilization(metrics: StepMetrics) -> tuple[str, float | None]:
    """Return "MFU", or "HFU" with a dynamic index, and its share of the peak, None if unknown."""
    model, executed = metrics.mfu_model, metrics.mfu_executed
    return ("HFU", executed) if model is None else ("MFU", model)


def _special_parts(metrics: StepMetrics) -> list[str]:
    """Return the number of targets, and what only steps on GPUs or with index or experts have."""
    name, share = _utilization(metrics)
    parts = [] if metrics.targets is None else [f"targets {metrics.targets:,}"]
    if share is not None:
        parts.append(f"{name} {share:.1%}")
    if metrics.peak_memory_gib is not None:
        parts.append(f"{metrics.peak_memory_gib:.1f} GiB")
    if metrics.index_seconds is not None:
        parts.append(f"density {metrics.density:.1%}")
    if metrics.expert_load is not None:
        parts.append(f"expert load {metrics.expert_load:.2f}x")
    return parts


def _data_parts(metrics: StepMetrics) -> list[str]:
    """Return the share of the step spent waiting for data, or nothing if the share is small."""
    share = (metrics.data_seconds or 0.0) / metrics.seconds if metrics.seconds else 0.0
    return [f"data {share:.0%}"] if share >= SHOWN_WAIT else []


@dataclass(frozen=True)
class StepEstimate:
    """The prediction of a step.

    density: mean share of the pairs of a causal mask; None if it is unknown before training.
    drawn: which pairs are assumed, if the pattern depends on the data; else "".
    cluster: name of the cluster whose constants give the time.
    seconds: (expected, best, worst); None if not predicted, for the reason ``problem``.
    """

    density: float | None
    drawn: str = ""
    cluster: str = ""
    seconds: tuple[float, float, float] | None = None
    problem: str = ""

    def describe(self) -> str:
        """Return one line on the time, with density and source; "" on a CPU."""
        if self.seconds is None:
            return self.problem and f"not predicted: {self.problem}"
        expected, best, worst = self.seconds
        at = f" at density {self.density:.1%} ({self.drawn})" if self.drawn else ""
        bounds = f"between {duration(best)} and {duration(worst)}"
        return (
            f"{exact(expected)} per step{at}, predicted as by `mtrain simulate` on {self.cluster}; "
            f"{bounds} within the bounds of the constants"
        )


def duration(seconds: float) -> str:
    """Format seconds, for example as 41 s, 9.2 min or 2.5 h."""
    unit, scale = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / scale:,.3g} {unit}"


def exact(seconds: float) -> str:
    """Format a predicted time as the tables of `mtrain simulate` do."""
    return f"{seconds:.4g} s" if seconds < 9999.5 else f"{seconds:,.0f} s"
