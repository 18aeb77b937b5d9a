"""Shared by all benchmarks: the plan, the cases, process groups and exchanges, the progress bar."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.config import compose
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import PLAN, RunDir
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.exchange_registry import make_exchange
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group
from mtrain_cli.profiling.record_collector import RecordCollector
from mtrain_cli.training.resolution import ResolvedRun, resolve_run

if TYPE_CHECKING:
    from rich.console import RenderableType

ATTENTION_ONLY, TRAINING = "attention", "training"
# Entry points of the workers, as strings: the command that starts workers need not import them.
TARGETS = {
    ATTENTION_ONLY: "mtrain_cli.profiling.attention_benchmark:run",
    TRAINING: "mtrain_cli.profiling.step_benchmark:run",
}


@dataclass(frozen=True)
class MeasurementPlan:
    """What to measure.

    mode: `ATTENTION_ONLY` or `TRAINING`
    cases: (label, configuration)
    samples: recorded iterations per case
    warmup: training steps before the first sample
    every: training steps from one sample to the next
    peer: whether to also time PyTorch's context parallelism
    quiet: print nothing
    """

    mode: str
    cases: list[tuple[str, Config]]
    samples: int
    warmup: int = 0
    every: int = 1
    peer: bool = False
    quiet: bool = False

    def save(self, run_dir: RunDir) -> None:
        folder = run_dir.path / "cases"
        folder.mkdir(exist_ok=True)
        for i, (_, config) in enumerate(self.cases):
            compose.save(config, folder / f"{i}.yaml")
        document = {**asdict(self), "cases": [label for label, _ in self.cases]}
        (folder / PLAN).write_text(json.dumps(document, indent=1) + "\n")

    @staticmethod
    def load(run_dir: RunDir) -> MeasurementPlan:
        folder = run_dir.path / "cases"
        document = json.loads((folder / PLAN).read_text())
        cases = [
            (label, compose.load(folder / f"{i}.yaml"))
            for i, label in enumerate(document.pop("cases"))
        ]
        return MeasurementPlan(cases=cases, **document)


@dataclass(frozen=True)
class MeasurementCase:
    """One configuration, ready to be measured."""

    number: int
    label: str
    config: Config
    choices: ResolvedRun
    exchange: Exchange

    def facts(self, environment: Environment) -> dict[str, Any]:
        """Return the case's entry in summary.json."""
        config, model = self.config, self.config.model
        schedule = self.exchange.schedule
        return {
            "label": self.label,
            "layout": config.layout,
            "exchange": self.choices.exchange.label,
            "pattern": config.sparsity.pattern,
            "kernel": self.choices.kernel.name,
            "model": model.name,
            "seq": config.seq,
            "micro_batch": config.train.micro_batch,
            "workers": environment.workers,
            "cp": environment.cp,
            "per_node": schedule.per_node,
            "heads": schedule.heads,
            "layers": model.num_layers,
            "steps": {"forward": len(schedule.forward[0]), "backward": len(schedule.backward[0])},
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "density": None,
        }

    @property
    def flop(self) -> tuple[float, float]:
        """FLOP per pair and head, forward and backward: 2 and 5 products of 2 * head_dim."""
        return 4.0 * self.config.model.head_dim, 10.0 * self.config.model.head_dim


@dataclass
class Bench:
    """Device, process groups and record collector, shared by all cases of a measurement."""

    environment: Environment
    timeout: timedelta
    device: torch.device = field(init=False)
    host_group: dist.ProcessGroup = field(init=False)
    collector: RecordCollector = field(init=False)
    _groups: dict[tuple[int, int, tuple[str, ...]], ContextGroup] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        e = self.environment
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if e.device == "cuda"
            else torch.device("cpu")
        )
        self.host_group = dist.new_group(backend="gloo", timeout=self.timeout)
        self.collector = RecordCollector(e.rank, e.workers, self.device, self.host_group)

    def adopt(self, choices: ResolvedRun, group: ContextGroup) -> None:
        """Let cases of the same kind use communicators that already exist."""
        self._groups[_kind(choices)] = group

    def case(self, number: int, label: str, config: Config) -> MeasurementCase:
        """Resolve a configuration. In the label, ``auto`` becomes the chosen exchange."""
        choices = resolve_run(config, self.environment)
        tokens = [choices.exchange.label if word == "auto" else word for word in label.split()]
        return MeasurementCase(number, " ".join(tokens), config, choices, self._exchange(choices))

    def _exchange(self, choices: ResolvedRun) -> Exchange:
        chosen, e = choices.exchange, self.environment
        key = _kind(choices)
        if key not in self._groups:
            self._groups[key] = make_context_group(
                e.rank,
                e.workers,
                e.cp,
                self.device,
                self.timeout,
                per_node=chosen.per_node,
                heads=chosen.heads,
                channels=chosen.channels,
            )
        return make_exchange(
            chosen.name,
            choices.layout,
            self._groups[key],
            chunks=chosen.chunks,
            prefetch=chosen.prefetch,
            circulates=chosen.circulates,
            shared_columns=chosen.shared_columns,
        )

    def synchronize(self) -> None:
        """Let all workers start together; on a GPU the last wait is for a message on the device."""
        dist.barrier(self.host_group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            if self.environment.workers > 1:
                dist.all_reduce(torch.zeros(1, device=self.device))

    def free_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def gather(self, mine: Any) -> list[Any]:
        """Return the value of every worker, on every worker."""
        values: list[Any] = [None] * self.environment.workers
        dist.all_gather_object(values, mine, group=self.host_group)
        return values


def _kind(choices: ResolvedRun) -> tuple[int, int, tuple[str, ...]]:
    """Return what communicators depend on."""
    chosen = choices.exchange
    return chosen.per_node, chosen.heads, tuple(chosen.channels)


def slowest(everyone: Sequence[Sequence[Sequence[float]]]) -> np.ndarray:
    """Reduce times [workers][iterations][parts] to the slowest worker, [iterations, parts]."""
    return np.array(everyone, dtype=np.float64).max(0)


class MeasurementProgress:
    """A progress bar in a terminal, and lines that stay; only the first worker shows them."""

    def __init__(self, shown: bool, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        from mtrain_cli.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._shown = shown
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn(), console=self._console, transient=True,
            disable=not shown or not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> MeasurementProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def now(self, description: str) -> None:
        self._bar.update(self._task, description=description)

    def done(self) -> None:
        self._bar.advance(self._task)

    def sampled(self, done: int, of: int) -> None:
        """Print progress as a line where there is no bar."""
        if not self._console.is_terminal:
            self.say(f"sample {done} of {of}")

    def say(self, line: RenderableType, style: str = "") -> None:
        if self._shown:
            self._console.print(line, style=style)
