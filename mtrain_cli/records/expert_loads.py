"""The loads of experts in a profile: rows in a file, and their imbalance degrees.

`profiles/definitions.md` defines every number. A profile of a model with experts writes one part
after each sample and joins the parts at the end, as it does with its records (`record_files`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain_cli.config.schema import ConfigError, ModelConfig
from mtrain_cli.parallel.recording import BACKWARD, DIRECTIONS, EXPERTS, FORWARD, KINDS, RECOMPUTE
from mtrain_cli.records import record_files
from mtrain_cli.records.imbalance import Estimate
from mtrain_cli.records.record_files import RecordedFolder

if TYPE_CHECKING:
    import pandas

LOADS, LOAD_PARTS = "experts.parquet", "experts"
FACT = "experts"  # key of a case of a model with experts in summary.json
DEALT = (2, 4, 8)  # numbers of workers of the what-if
_ORDER = (FORWARD, RECOMPUTE, BACKWARD)
MOST_CELLS = 1 << 26  # layers x ranks x experts of a file
ROW = np.dtype(
    [
        ("case", np.int16),  # number of the case in summary.json
        ("step", np.int32),  # training step
        ("layer", np.int16),
        ("rank", np.int16),  # rank that holds the tokens
        ("expert", np.int32),
        ("tokens", np.int64),  # tokens of the rank that the expert computes
    ]
)


def expert_facts(model: ModelConfig, parallel: int) -> dict[str, Any]:
    """Return the fact ``experts`` of a case; empty for a model without experts."""
    fact = {"count": model.moe.experts, "top_k": model.moe.top_k, "parallel": parallel}
    return {FACT: fact} if model.moe.experts else {}


@dataclass(frozen=True)
class ExpertAnalysis:
    """The loads of one case. Tokens count once for each expert that computes them.

    parallel: number of workers over which the experts of a layer are dealt.
    steps, layers, ranks: numbers of the training steps, layers and ranks with loads.
    worker, step: imbalance degrees of the number of tokens, over samples. A sample is a layer of a
        training step.
    dealt: the worker degree that the same loads would have if the experts were dealt over this many
        workers, by number of workers.
    largest: tokens of the expert with the most, divided by the mean, over samples.
    shares: share of each expert in the tokens of its layer, float32 [steps, layers, E].
    time: worker imbalance degree of the recorded time of the experts; None without records.
    ms: that time for one layer, by direction, as the mean over ranks, layers and steps.
    """

    case: int
    label: str
    parallel: int
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    worker: Estimate
    step: Estimate
    dealt: dict[int, Estimate]
    largest: Estimate
    shares: np.ndarray
    time: Estimate | None
    ms: dict[str, float]

    @property
    def experts(self) -> int:
        return self.shares.shape[2]

    def to_json(self) -> dict[str, Any]:
        """Return the entry ``experts`` of the case's results."""
        times = {} if self.time is None else {"time": {"worker": self.time.to_json()}}
        return {
            "parallel": self.parallel,
            "samples": self.worker.n,
            "worker": self.worker.to_json(),
            "step": self.step.to_json(),
            "dealt": {str(workers): value.to_json() for workers, value in self.dealt.items()},
            "largest": self.largest.to_json(),
            **times,
            "ms": self.ms,
            "shares": [[float(f"{x:.4g}") for x in row] for row in self.shares.mean(0).tolist()],
        }


def worker_tokens(tokens: np.ndarray, ranks: np.ndarray, parallel: int) -> np.ndarray:
    """Return the tokens that each worker computes with each expert it holds, [workers, E / ep].

    tokens: tokens of each rank by expert, [ranks, E]. ranks: their numbers, ascending.
    parallel: ep, the number of consecutive ranks over which the experts are dealt.
    """
    if parallel == 1:
        return tokens
    groups, first = np.unique(ranks // parallel, return_index=True)
    of_group = np.add.reduceat(tokens, first, axis=0)
    return of_group.reshape(len(groups) * parallel, -1)


def expert_degrees(computed: np.ndarray) -> tuple[float, float]:
    """Return the worker and the step imbalance degree of a result of `worker_tokens`."""
    totals, most = computed.sum(1), computed.max(1)
    busy = totals > 0
    if not busy.any():
        return 1.0, 1.0
    step = most[busy] * computed.shape[1] / totals[busy]
    return float(totals.max() / totals.mean()), float(step.mean())


def dealt_degree(totals: np.ndarray, workers: int) -> float:
    """Return the worker degree of experts with these tokens, [E], dealt over ``workers``."""
    parts = totals.reshape(workers, -1).sum(1)
    return float(parts.max() / parts.mean()) if parts.any() else 1.0


def analyse_experts(recorded: RecordedFolder) -> list[ExpertAnalysis]:
    """Return an analysis of each case with loads; an empty list for a profile without them.

    Raises:
        ConfigError: the file of loads is damaged.
    """
    folder = recorded.folder
    whole = folder / LOADS
    files = [whole] if whole.is_file() else sorted((folder / LOAD_PARTS).glob("*.parquet"))
    sums: dict[int, _CaseSums] = {}
    cases = recorded.summary.get("cases") or [recorded.summary.get("settings") or {}]
    for file in files:
        for case, step, rows in _samples(file):
            facts = cases[case] if 0 <= case < len(cases) else None
            if not isinstance(facts, dict):
                raise ConfigError(
                    f"{file}: has loads of case {case}, which {record_files.SUMMARY} does not list"
                )
            sums.setdefault(case, _CaseSums(case, facts, file)).add(step, rows)
    if not sums:
        return []
    times = _times(recorded)
    return [sums[case].result(times[times.case == case]) for case in sorted(sums)]


def _times(recorded: RecordedFolder) -> pandas.DataFrame:
    """Return the ms of the experts by case, step, layer, rank and direction."""
    import pandas

    key = ["case", "step", "layer", "rank", "direction"]
    frames = [pandas.DataFrame(columns=[*key, "ms"])]
    names = ("case", "iteration", "layer", "rank", "direction", "dur_us")
    for batch in recorded.batches((*names, "phase")):
        chosen = batch["phase"] == KINDS.index(EXPERTS)
        if chosen.any():
            frame = pandas.DataFrame({name: batch[name][chosen] for name in names})
            frame.columns = frames[0].columns
            frame["direction"] = [DIRECTIONS[code] for code in frame.direction]
            frames.append(frame.assign(ms=frame.ms.astype(float) / 1e3))
    # The rows of one layer and rank may lie in several batches.
    return pandas.concat(frames[1:] or frames).groupby(key, as_index=False)["ms"].sum()


def _samples(file: Path) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
    """Yield (case, step, rows) of each sample of a file, in the order of the file."""
    import pyarrow.parquet as pq

    names = ROW.names or ()
    with record_files.reading(file):
        table = pq.read_table(file)
        absent = [name for name in names if name not in table.column_names]
        if absent:
            raise ConfigError(f"{file}: has no column {', '.join(absent)}; measure again")
        columns = {}
        for name in names:
            values = table.column(name).to_numpy()
            if values.dtype.kind not in "iu":
                raise ConfigError(f"{file}: column {name} must hold integers; measure again")
            columns[name] = values.astype(np.int64)
    if not len(columns["case"]):
        return
    if min(int(values.min()) for values in columns.values()) < 0:
        raise ConfigError(f"{file}: holds negative numbers; measure again")
    case, step = columns["case"], columns["step"]
    bounds = np.flatnonzero((np.diff(case) != 0) | (np.diff(step) != 0)) + 1
    for begin, end in zip([0, *bounds], [*bounds, len(case)], strict=True):
        rows = {name: values[begin:end] for name, values in columns.items()}
        yield int(case[begin]), int(step[begin]), rows


class _CaseSums:
    def __init__(self, case: int, facts: dict[str, Any], file: Path) -> None:
        self._case, self._facts, self._file = case, facts, file
        about = facts.get(FACT)
        about = about if isinstance(about, dict) else {}
        parallel, count = about.get("parallel"), about.get("count")
        self._parallel = parallel if isinstance(parallel, int) and parallel > 0 else 1
        self._experts: int = count if isinstance(count, int) else 0
        self._shape: tuple[np.ndarray, np.ndarray] | None = None  # layers, ranks
        self._steps: list[int] = []
        self._shares: list[np.ndarray] = []
        self._degrees: list[np.ndarray] = []  # [worker, step, largest, dealt...] x layers

    def add(self, step: int, rows: dict[str, np.ndarray]) -> None:
        layers, ranks = np.unique(rows["layer"]), np.unique(rows["rank"])
        experts = int(rows["expert"].max()) + 1
        if self._shape is None:
            self._experts = max(self._experts, experts)
            if len(layers) * len(ranks) * self._experts > MOST_CELLS:
                raise ConfigError(f"{self._file}: has more loads than a report can show")
            self._parallel = self._parallel if self._experts % self._parallel == 0 else 1
            self._shape = layers, ranks
            self._dealt = [n for n in DEALT if self._experts % n == 0]
        same = all(map(np.array_equal, (layers, ranks), self._shape))
        if not same or experts > self._experts:
            raise ConfigError(
                f"{self._file}: step {step} has other layers, ranks or experts than steps before; "
                "measure again"
            )
        at = (np.searchsorted(layers, rows["layer"]), np.searchsorted(ranks, rows["rank"]))
        table = np.zeros((len(layers), len(ranks), self._experts))
        np.add.at(table, (*at, rows["expert"]), rows["tokens"])
        has = np.zeros((len(layers), len(ranks)), bool)
        has[at] = True
        self._steps.append(step)
        totals = table.sum(1)
        whole = totals.sum(1, keepdims=True)
        even = np.full_like(totals, 1 / self._experts)
        self._shares.append(np.divide(totals, whole, out=even, where=whole > 0).astype(np.float32))
        self._degrees.append(
            np.array([self._of_layer(table[i], has[i], ranks) for i in range(len(layers))]).T
        )

    def _of_layer(self, tokens: np.ndarray, has: np.ndarray, ranks: np.ndarray) -> list[float]:
        """Return worker, step, largest and dealt degrees of a layer, which some ranks compute."""
        totals = tokens.sum(0)
        largest = dealt_degree(totals, self._experts)
        worker, step = expert_degrees(worker_tokens(tokens[has], ranks[has], self._parallel))
        return [worker, step, largest, *(dealt_degree(totals, n) for n in self._dealt)]

    def result(self, times: pandas.DataFrame) -> ExpertAnalysis:
        """Return the analysis. times: rows of `_times` for this case."""
        assert self._shape is not None
        layers, ranks = self._shape
        degrees = np.stack(self._degrees)  # [steps, kinds, layers]
        owners = np.repeat(self._steps, len(layers))
        worker, step, largest, *dealt = (
            Estimate.of(degrees[:, kind], owners) for kind in range(degrees.shape[1])
        )
        of_pass = times.groupby("direction")["ms"].mean()
        return ExpertAnalysis(
            case=self._case,
            label=str(self._facts.get("label") or "one step"),
            parallel=self._parallel,
            steps=tuple(self._steps),
            layers=tuple(layers.tolist()),
            ranks=tuple(ranks.tolist()),
            worker=worker,
            step=step,
            dealt=dict(zip(self._dealt, dealt, strict=True)),
            largest=largest,
            shares=np.stack(self._shares),
            time=_time_degree(times),
            ms={n: float(ms) for n in _ORDER if not np.isnan(ms := of_pass.get(n, np.nan))},
        )


def _time_degree(times: pandas.DataFrame) -> Estimate | None:
    """Return the worker imbalance degree of the time of all passes; None without times."""
    if times.empty:
        return None
    by_rank = times.groupby(["step", "layer", "rank"])["ms"].sum()
    layers = by_rank.groupby(["step", "layer"])
    degrees = (layers.max() / layers.mean()).fillna(1.0)  # 0 / 0 if no rank took time
    return Estimate.of(degrees.to_numpy(), degrees.index.get_level_values("step").to_numpy())
