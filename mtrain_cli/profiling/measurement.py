"""What the measurements of several cases share: what to measure, groups and exchanges, and the files that they leave."""

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
# What a worker runs. As words, so that a command that starts workers need not import what they do.
TARGETS = {
    ATTENTION_ONLY: "mtrain_cli.profiling.attention_benchmark:run",
    TRAINING: "mtrain_cli.profiling.step_benchmark:run",
}


@dataclass(frozen=True)
class MeasurementPlan:
    """What to measure. mode: `ATTENTION_ONLY` or `TRAINING`. cases: labelled configurations. samples: recorded iterations of each. warmup:
    training steps before the first. every: training steps from one to the next. peer: whether what PyTorch offers is measured, too.
    quiet: nothing is shown, for scripts.
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
        """Its entry in the summary."""
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
        """Of one query-key pair of one head, forward and backward: 2 and 5 products of 2 * head_dim."""
        return 4.0 * self.config.model.head_dim, 10.0 * self.config.model.head_dim


@dataclass
class Bench:
    """What the cases of one measurement share on this worker."""

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
        """Has cases of the same kind use communicators that there are already."""
        self._groups[_kind(choices)] = group

    def case(self, number: int, label: str, config: Config) -> MeasurementCase:
        """label: in which ``auto`` becomes the exchange that runs."""
        choices = resolve_run(config, self.environment)
        words = [choices.exchange.label if word == "auto" else word for word in label.split()]
        return MeasurementCase(number, " ".join(words), config, choices, self._exchange(choices))

    def _exchange(self, choices: ResolvedRun) -> Exchange:
        how, e = choices.exchange, self.environment
        key = _kind(choices)
        if key not in self._groups:
            self._groups[key] = make_context_group(
                e.rank,
                e.workers,
                e.cp,
                self.device,
                self.timeout,
                per_node=how.per_node,
                heads=how.heads,
                channels=how.channels,
            )
        return make_exchange(
            how.name, choices.layout, self._groups[key],
            chunks=how.chunks, prefetch=how.prefetch, circulates=how.circulates, shared_columns=how.shared_columns,
        )  # fmt: skip

    def together(self) -> None:
        """All workers go on from here at once: on a GPU the last thing they wait for is a message on the device."""
        dist.barrier(self.host_group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            if self.environment.workers > 1:
                dist.all_reduce(torch.zeros(1, device=self.device))

    def clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def everyone(self, mine: Any) -> list[Any]:
        """What every worker has, on every worker."""
        found: list[Any] = [None] * self.environment.workers
        dist.all_gather_object(found, mine, group=self.host_group)
        return found


def _kind(choices: ResolvedRun) -> tuple[int, int, tuple[str, ...]]:
    """What communicators depend on."""
    how = choices.exchange
    return how.per_node, how.heads, tuple(how.channels)


def slowest(everyone: Sequence[Sequence[Sequence[float]]]) -> np.ndarray:
    """Times [workers][iterations][parts] -> [iterations, parts] of the slowest worker of each."""
    return np.array(everyone, dtype=np.float64).max(0)


class MeasurementProgress:
    """A line while cases are measured, in a terminal only, and lines that stay; on the first worker."""

    def __init__(self, shown: bool, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        from mtrain_cli.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._shown = shown
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self._console, transient=True, disable=not shown or not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> MeasurementProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def now(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def done(self) -> None:
        self._bar.advance(self._task)

    def sampled(self, done: int, of: int) -> None:
        """A line where there is no bar."""
        if not self._console.is_terminal:
            self.say(f"sample {done} of {of}")

    def say(self, line: RenderableType, style: str = "") -> None:
        if self._shown:
            self._console.print(line, style=style)
