"""What benchmarks on several workers share: plan, cases, process groups, progress bar."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import PLAN, RunDir
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.parallel.exchange import Exchange, make_chosen_exchange
from mtrain_cli.parallel.mesh import ContextGroups
from mtrain_cli.parallel.pipeline_schedule import Pipeline
from mtrain_cli.profiling.record_collector import RecordCollector
from mtrain_cli.records.expert_loads import expert_facts
from mtrain_cli.simulation.work_counts import BACKWARD, FLOP_PER_PAIR, FORWARD
from mtrain_cli.training.attention_memory import column_width
from mtrain_cli.training.hardware import device_of
from mtrain_cli.training.resolution import ResolvedRun, resolve_run

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")
P = TypeVar("P", bound="BenchmarkPlan")
ATTENTION_ONLY, TRAINING = "attention", "training"
# The functions that the workers run, as strings: the command need not import their modules.
TARGETS = {
    ATTENTION_ONLY: "mtrain_cli.profiling.imbalance_benchmark:record_attention",
    TRAINING: "mtrain_cli.profiling.imbalance_benchmark:train_and_record",
}


@dataclass(frozen=True, kw_only=True)
class BenchmarkPlan:
    """What the workers measure. The command saves the plan, and the workers load it."""

    quiet: bool = False

    def save(self, run_dir: RunDir) -> None:
        (run_dir.path / PLAN).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, run_dir: RunDir) -> Self:
        return cls(**json.loads((run_dir.path / PLAN).read_text()))


@dataclass(frozen=True)
class MeasurementPlan(BenchmarkPlan):
    """The configurations to compare, and how often to record each configuration.

    cases: a (label, configuration) pair for each case.
    samples: number of recorded iterations per case.
    warmup, every: training steps before the first sample, and from one to the next.
    peer: whether to time PyTorch's context parallelism in the same run.
    """

    mode: str
    cases: list[tuple[str, Config]]
    samples: int
    warmup: int = 0
    every: int = 1
    peer: bool = False

    def save(self, run_dir: RunDir) -> None:
        folder = run_dir.path / "cases"
        folder.mkdir(exist_ok=True)
        for i, (_, config) in enumerate(self.cases):
            resolved_file.save(config, folder / f"{i}.yaml")
        document = {**asdict(self), "cases": [label for label, _ in self.cases]}
        (folder / PLAN).write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, run_dir: RunDir) -> Self:
        folder = run_dir.path / "cases"
        document = json.loads((folder / PLAN).read_text())
        labels = enumerate(document.pop("cases"))
        cases = [(label, resolved_file.load(folder / f"{i}.yaml")) for i, label in labels]
        return cls(cases=cases, **document)


@dataclass(frozen=True)
class MeasurementCase:
    """One configuration, ready to measure.

    layers: numbers of the layers with attention; None for all of the model.
    """

    number: int
    label: str
    config: Config
    choices: ResolvedRun
    exchange: Exchange
    expert_parallel: int = 1
    layers: Sequence[int] | None = None

    def facts(self, environment: Environment) -> dict[str, Any]:
        """Return the case's entry in summary.json."""
        config, model = self.config, self.config.of_worker.model
        schedule, choices = self.exchange.schedule, self.choices
        kinds, dense = config.layer_kinds, choices.dense_kernel
        pipeline, train = {}, config.train
        if environment.dims.pp > 1:
            micro_batches = train.global_batch // (train.micro_batch * environment.dims.dp)
            pipeline["pipeline"] = asdict(Pipeline.of(config.topology, micro_batches))
        dims = environment.dims
        return {
            "label": self.label,
            "layout": choices.layout.name,
            "exchange": choices.exchange.label,
            "pattern": config.sparsity.pattern,
            "kernel": choices.kernel.name,
            "model": model.name,
            **{"seq": config.seq, "padded_seq": choices.layout.padded_seq},
            **{"micro_batch": train.micro_batch, "workers": dims.workers, "cp": dims.cp},
            **({"tp": dims.tp} if dims.tp > 1 else {}),
            **pipeline,
            **expert_facts(config.model, self.expert_parallel),
            **{"per_node": schedule.per_node, "heads": schedule.heads, "layers": model.num_layers},
            **({"layer_kinds": kinds} if len(kinds) > 1 else {}),
            **({"dense_kernel": dense[0].name} if dense and len(kinds) > 1 else {}),
            "steps": {"forward": len(schedule.forward[0]), "backward": len(schedule.backward[0])},
            **{"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads},
            "head_dim": model.head_dim,
            "column_width": column_width(config, choices.pattern, choices.layout, choices.exchange),
            "density": None,
        }

    @property
    def single_layers(self) -> list[int]:
        """The first layer of each kind, which an attention-only measurement computes."""
        return [layers[0] for layers in self.config.layer_kinds.values()]

    @property
    def flop(self) -> tuple[float, float]:
        """Return FLOP per query-key pair of one head, (forward, backward)."""
        head_dim = self.config.model.head_dim
        return float(FLOP_PER_PAIR[FORWARD] * head_dim), float(FLOP_PER_PAIR[BACKWARD] * head_dim)


class Bench:
    """Device, process groups and record collector, which all cases of a measurement share.

    first: whether this worker has rank 0, which prints and writes.
    ranks: see `RecordCollector`.
    """

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        environment: Environment,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.config, self.run_dir, self.environment = config, run_dir, environment
        self.first = environment.rank == 0
        timeout = timedelta(seconds=config.topology.timeout_s)
        self.device = device_of(environment)
        self.host_group = (
            dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        )
        rank = environment.rank if ranks is None else ranks[environment.rank]
        self.collector = RecordCollector(
            rank, environment.dims.workers, self.device, self.host_group, ranks
        )
        self.stop = StopFlag(run_dir)
        self.groups = ContextGroups(environment.rank, environment.dims, timeout)

    def facts(self) -> dict[str, Any]:
        """Return the content of environment.json, if it is there."""
        file = self.run_dir.environment
        return json.loads(file.read_text()) if file.exists() else {}

    def cases(self, plan: MeasurementPlan) -> list[MeasurementCase]:
        """Resolve the plan's configurations. In labels, what ``auto`` chose replaces ``auto``."""
        cases = []
        for number, (label, config) in enumerate(plan.cases):
            choices = resolve_run(config, self.environment)
            chosen = {1: choices.layout.name, 2: choices.exchange.label}
            words = [chosen.get(i, w) if w == "auto" else w for i, w in enumerate(label.split())]
            group = self.groups.of(choices.exchange, self.device)
            exchange = make_chosen_exchange(choices.exchange, choices.layout, group)
            cases.append(MeasurementCase(number, " ".join(words), config, choices, exchange))
        return cases

    def synchronize(self) -> None:
        """Wait for all workers. On a GPU, also wait for an all-reduce between the devices."""
        dist.barrier(self.host_group)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            if self.environment.dims.workers > 1:
                dist.all_reduce(torch.zeros(1, device=self.device))

    def free_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def gather(self, mine: Any) -> list[Any]:
        """Return the values of all workers, on every worker."""
        if self.host_group is None:
            return [mine]
        values: list[Any] = [None] * self.environment.dims.workers
        dist.all_gather_object(values, mine, group=self.host_group)
        return values

    def share(self, make: Callable[[], T]) -> T:
        """Call ``make`` on the first worker. Return the result on every worker."""
        return self.gather(make() if self.first else None)[0]

    def stop_requested(self) -> bool:
        """Return whether any worker got a request to stop. All workers must call this."""
        return any(self.gather(self.stop.requested()))

    def slowest(self, mine: Sequence[Sequence[float]]) -> np.ndarray:
        """Return the maximum over workers of times [iterations, parts]."""
        return np.array(self.gather(mine), dtype=np.float64).max(0)


def entry_point(
    plan_type: type[P],
) -> Callable[[Callable[[Bench, P], bool]], Callable[[Config, RunDir, Environment, bool], bool]]:
    """Wrap a function of (bench, plan) as the launcher's entry point on every worker.

    Both return whether a stop request ended the measurement early.
    """

    def decorate(measure: Callable[[Bench, P], bool]):
        def run(config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> bool:
            bench = Bench(config, run_dir, environment)
            # As a dict: workers do not unpickle classes of other packages.
            fields = bench.share(lambda: vars(plan_type.load(run_dir)))
            return measure(bench, plan_type(**fields))

        return run

    return decorate


def rotated(items: Sequence[T], sample: int) -> list[T]:
    """Rotate the items by ``sample`` positions, so each sample starts with a different item."""
    first = sample % len(items)
    return [*items[first:], *items[:first]]


class MeasurementProgress:
    """A progress bar in a terminal, and lines of output. Only the first worker shows them."""

    def __init__(self, bench: Bench, plan: BenchmarkPlan, total: int) -> None:
        """total: number of calls of `done` until the bar is full."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        from mtrain_cli.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._shown = shown = bench.first and not plan.quiet
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

    def sampled(self, done: int, of: int, what: str = "sample") -> None:
        """Print the number of this sample or of ``what``, unless a terminal shows the bar."""
        if not self._console.is_terminal:
            self.say(f"{what} {done} of {of}")

    def say(self, line: RenderableType, style: str = "") -> None:
        if self._shown:
            self._console.print(line, style=style)
