"""How the stages of a pipeline spend a step: from records, or from a predicted schedule.

`profiles/definitions.md` defines every number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mtrain_cli.parallel.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    Pipeline,
    TimedPipeline,
)
from mtrain_cli.parallel.recording import DIRECTIONS, KINDS, STAGE, WAIT
from mtrain_cli.parallel.schedule import STAGE as STAGE_LINK
from mtrain_cli.records.record_files import WORDS

MOST_ACTIONS = 1 << 16  # of a pipeline in a file
_PASS, _WAIT, _LINK = KINDS.index(STAGE), KINDS.index(WAIT), WORDS["link"].index(STAGE_LINK)
_KINDS = (FORWARD, BACKWARD)
_CODES = [DIRECTIONS.index(kind) for kind in _KINDS]


@dataclass(frozen=True)
class PipelineTimes:
    """The times of one step, in milliseconds. Means over iterations and over pipelines.

    timed: the schedule with the mean times of its passes. Measured hops count as free.
    work: time of all passes of a stage, [stages].
    makespan: time from the first pass of any stage to the end of the last pass.
    bubble: share of the makespan in which a stage computes nothing, as the mean over stages.
    late: waits for other stages that still compute, [stages]; None in a prediction.
    hops: waits for messages under way, [stages]; None in a prediction.
    """

    timed: TimedPipeline
    work: np.ndarray
    makespan: float
    bubble: float
    late: np.ndarray | None = None
    hops: np.ndarray | None = None

    @staticmethod
    def of(timed: TimedPipeline) -> PipelineTimes:
        """Return the times of a predicted step. timed: times in milliseconds."""
        played = timed.played
        work = np.array([played.busy(stage) for stage in range(played.stages)])
        return PipelineTimes(timed, work, played.makespan, played.bubble)

    @staticmethod
    def mean(of_iterations: Sequence[PipelineTimes]) -> PipelineTimes:
        """Return the mean of the iterations of one pipeline."""

        def mean(name: str) -> Any:
            return np.mean([getattr(times, name) for times in of_iterations], 0)

        forward, backward = (
            tuple(np.mean([getattr(times.timed, name) for times in of_iterations], 0).tolist())
            for name in _KINDS
        )
        return PipelineTimes(
            TimedPipeline(of_iterations[0].timed.pipeline, forward, backward),
            mean("work"),
            float(mean("makespan")),
            float(mean("bubble")),
            mean("late"),
            mean("hops"),
        )

    @property
    def pipeline(self) -> Pipeline:
        return self.timed.pipeline

    @property
    def imbalance(self) -> float:
        """Imbalance degree of the stages: the work of the busiest, divided by the mean."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the entry ``pipeline`` of the case's results."""
        more = {"late_ms": self.late, "hops_ms": self.hops}
        return {
            "formula": self.pipeline.bubble,
            "bubble": self.bubble,
            "played_bubble": self.timed.played.bubble,
            "imbalance": self.imbalance,
            "makespan_ms": self.makespan,
            "work_ms": self.work.tolist(),
            **{name: ms.tolist() for name, ms in more.items() if ms is not None},
            **{f"{kind}_ms": list(getattr(self.timed, kind)) for kind in _KINDS},
        }


class StepSums:
    """Collects the rows of one iteration. Rank r is on stage ``r // (ranks / stages)``."""

    def __init__(self, pipeline: Pipeline, ranks: int) -> None:
        self.pipeline = pipeline
        of_a_stage = max(1, ranks // pipeline.stages)
        self._shape = (pipeline.stages, of_a_stage)
        size = of_a_stage * pipeline.stages
        self._begin, self._end = np.full(size, np.inf), np.full(size, -np.inf)
        self._busy, self._late, self._hops = np.zeros((3, size))
        self._passes, self._counts = np.zeros((2, len(_KINDS), pipeline.last + 1))

    def add(self, rows: Mapping[str, np.ndarray]) -> None:
        rank, ms = rows["rank"], rows["dur_us"].astype(np.float64) / 1e3
        passes = (rows["phase"] == _PASS) & (rows["step"] <= self.pipeline.last)
        start = rows["start_us"][passes] / 1e3
        np.minimum.at(self._begin, rank[passes], start)
        np.maximum.at(self._end, rank[passes], start + ms[passes])
        np.add.at(self._busy, rank[passes], ms[passes])
        at = (rows["direction"][passes] == _CODES[1]).astype(int), rows["step"][passes]
        np.add.at(self._passes, at, ms[passes])
        np.add.at(self._counts, at, 1)
        waits = (rows["phase"] == _WAIT) & (rows["link"] == _LINK)
        late = np.clip(rows["late_us"][waits] / 1e3, 0, ms[waits])
        np.add.at(self._late, rank[waits], late)
        np.add.at(self._hops, rank[waits], ms[waits] - late)

    def result(self) -> PipelineTimes | None:
        """Return the times; None if a stage has no rows."""
        begin, end = self._begin.reshape(self._shape), self._end.reshape(self._shape)
        whole = np.isfinite(begin).all(0)
        if not whole.any() or not self._counts.all():
            return None
        makespan = (end.max(0) - begin.min(0))[whole]
        busy, late, hops = (
            table.reshape(self._shape)[:, whole] for table in (self._busy, self._late, self._hops)
        )
        forward, backward = self._passes / self._counts
        return PipelineTimes(
            TimedPipeline(self.pipeline, tuple(forward.tolist()), tuple(backward.tolist())),
            busy.mean(1),
            float(makespan.mean()),
            float((1 - busy.mean(0) / makespan).mean()),
            late.mean(1),
            hops.mean(1),
        )


def pipeline_of(document: Any) -> Pipeline | None:
    """Return the pipeline of a case, from its fact ``pipeline``; None if it is absent or damaged.

    The fact has the fields of `Pipeline`.
    """
    if not isinstance(document, dict):
        return None
    numbers: list[Any] = [document.get(n) for n in ("stages", "virtual_stages", "micro_batches")]
    if not all(isinstance(number, int) and number >= 1 for number in numbers):
        return None
    schedule, (stages, parts, count) = document.get("schedule"), numbers
    if schedule not in (GPIPE, ONE_F_ONE_B, INTERLEAVED) or stages * parts * count > MOST_ACTIONS:
        return None
    fits = count % stages == 0 if schedule == INTERLEAVED else parts == 1
    return Pipeline(schedule, stages, parts, count) if fits else None


def predicted_pipeline(document: Any) -> PipelineTimes | None:
    """Return the times of an entry ``pipeline`` in summary.json; None if absent or damaged."""
    pipeline = pipeline_of(document)
    if pipeline is None:
        return None
    try:
        forward, backward = (tuple(map(float, document[f"{kind}_ms"])) for kind in _KINDS)
        hop = float(document["hop_ms"])
    except (KeyError, TypeError, ValueError):
        return None
    times = (*forward, *backward, hop)
    sound = len(forward) == len(backward) == pipeline.last + 1 and any(times[:-1])
    if not sound or not all(0 <= ms < float("inf") for ms in times):
        return None
    return PipelineTimes.of(TimedPipeline(pipeline, forward, backward, hop))


def prediction_entry(timed: TimedPipeline) -> dict[str, Any]:
    """Return the entry that `predicted_pipeline` reads. timed: times in microseconds."""
    return {
        **asdict(timed.pipeline),
        **{f"{kind}_ms": [us / 1e3 for us in getattr(timed, kind)] for kind in _KINDS},
        "hop_ms": timed.hop / 1e3,
    }
