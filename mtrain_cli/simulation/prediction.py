"""Predictions: configurations of a cluster, their work counted, priced and played, with the figures of a profile.

What is predicted here is the attention of each layer, index estimates and messages included, as `mtrain profile imbalance
--attention-only` measures it: all ranks begin a pass together. `step` makes a whole training step of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.profiling.imbalance import Imbalance, degrees
from mtrain_cli.profiling.index_file import RecordedSetup
from mtrain_cli.simulation.calibration import (
    DENSE,
    HIGH,
    LISTS,
    LOW,
    SPARSE,
    VALUE,
    Calibration,
    KernelCurves,
    kernels_for,
    same_device,
    shipped,
)
from mtrain_cli.simulation.cluster import Cluster
from mtrain_cli.simulation.constants import CONSTANTS
from mtrain_cli.simulation.costs import (
    BOUNDS,
    INDEX_DEVICE,
    INDEX_HEADS,
    Costs,
    LayerPrices,
    index_scale,
)
from mtrain_cli.simulation.program import program
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule
from mtrain_cli.simulation.timeline import Disturbances, PassTimes, play, together
from mtrain_cli.simulation.what_if import ReplayCase, ReplaySetup, make_case, resized
from mtrain_cli.simulation.work_counts import FLOP_PER_PAIR, StepWork
from mtrain_cli.training.flops import causal_pairs, peak_flops

MOST_ROWS = 20_000_000  # of a case; beyond it there are tables only
_NEED_OUT: tuple[
    str, ...
] = ()  # kernels whose backward cannot use delta (`Kernel.needs_out`; its classes need torch)
_SM90 = ("H100", "H200", "H800", "GH200", "H20")


@dataclass(frozen=True)
class AttentionWorkload:
    """What is computed. made: shapes. masks: one a sequence. layers: which. index: of a layer, None for dense; made when asked for.
    pattern: what the indices are, in words. columns: as in `what_if.make_case`. estimated: whether estimating indices is in the time.
    """

    made: RecordedSetup
    masks: tuple[SequenceMask, ...]
    layers: tuple[int, ...]
    index: Callable[[int], Index | None]
    pattern: str
    columns: int | None = -1
    estimated: bool = True
    model: str = ""


@dataclass(frozen=True)
class BoundedTime:
    """A prediction, and what it is at best and at worst by the bounds of the constants."""

    low: float
    value: float
    high: float

    @staticmethod
    def around(value: float, low: float | None = None, high: float | None = None) -> BoundedTime:
        """A bound on the wrong side is none: it is the value, and never stands for the other one."""
        return BoundedTime(
            value if low is None else min(low, value),
            value,
            value if high is None else max(high, value),
        )


@dataclass(frozen=True)
class PredictedPass:
    """Means over layers; ms. duration: of a layer, the slowest worker. time, work: degrees. computed: share of attention in the time of a
    pass (`imbalance.ComputationRatios.total`). spent: by `recording.COMPUTING`, the mean over workers; late, exposed: waits, likewise.
    carried:
    ms in which the links to a rank are full, inside its node and from others, of the rank with most.
    """

    duration: BoundedTime
    time: Imbalance
    work: Imbalance
    computed: float
    late: float
    exposed: dict[str, float]
    spent: dict[str, float]
    carried: tuple[float, float]


@dataclass(frozen=True)
class Prediction:
    """One configuration. rows: `records.ROW` of one iteration, where they were asked for. costs: what it was priced with, by bound."""

    setup: ReplaySetup
    exchange: str
    kernel: str
    passes: dict[str, PredictedPass]
    facts: dict[str, Any]
    remarks: tuple[str, ...]
    rows: np.ndarray | None = field(default=None, repr=False)
    costs: dict[str, Costs] = field(default_factory=dict, repr=False)

    @property
    def duration(self) -> BoundedTime:
        """Of all passes of a layer."""
        of_passes = [found.duration for found in self.passes.values()]
        return BoundedTime(
            *(sum(getattr(d, name) for d in of_passes) for name in (LOW, VALUE, HIGH))
        )


def default_kernel(gpu: str, pattern_is_dense: bool) -> str:
    """What `kernel=auto` would choose, as far as a GPU's name tells."""
    if any(name in gpu for name in _SM90):
        return "flash4"
    return "sdpa" if pattern_is_dense else "triton"


def predict(
    cluster: Cluster,
    problem: AttentionWorkload,
    setup: ReplaySetup,
    *,
    kernel: str | None = None,
    calibration: Calibration | None = None,
    recompute: bool = False,
    conditions: Disturbances | None = None,
    number: int = 0,
    rows: bool = False,
    bounds: bool = True,
    choice: ExchangeChoice | None = None,
) -> Prediction:
    """number: of the case in its file. bounds: also what it is at best and at worst, which takes three times as long. choice: the exchange
    of ``setup`` where it was chosen already.

    Raises:
        Unfit: the configuration cannot be.
        ConfigError: its kernel has no times, or the index is damaged.
    """
    first = problem.index(problem.layers[0])
    name = kernel or (
        "sdpa" if cluster.gpu.is_cpu else default_kernel(cluster.gpu.name, first is None)
    )
    problem = replace(problem, made=replace(problem.made, needs_out=name in _NEED_OUT))
    case = make_case(problem.made, problem.masks, setup, first, problem.columns, choice)
    lockstep = SpmdSchedule.of(case.schedule)
    kernels = _kernels(cluster, name, first, case, calibration)
    player = _CasePlayer(
        cluster, problem, case, lockstep, kernels, conditions or Disturbances(), recompute
    )
    fits = rows and player.rows_of_layer * len(problem.layers) <= MOST_ROWS
    remarks = [*kernels.remarks, *_uncertain(cluster), *_of_index(cluster, problem, first)]
    if rows and not fits:
        remarks.append(
            f"more than {MOST_ROWS / 1e6:.0f} million rows: records.parquet does not hold this case"
        )
    found: dict[str, list[dict[str, PassTimes]]] = {
        direction: [] for direction in player.directions
    }
    works, played = [], []
    for layer in problem.layers:
        index = problem.index(layer)
        work = case.counter.count(None if index is None else resized(index, case.counter.blocks))
        works.append(work)
        for direction in player.directions:
            times = {
                bound: player.play(
                    work, index, layer, direction, bound, rows=fits and bound == VALUE
                )
                for bound in (BOUNDS if bounds else (VALUE,))
            }
            found[direction].append(times)
            played.append((layer, direction, times[VALUE]))
    passes = {
        direction: _summary(
            of_layers, [w[FORWARD if direction == RECOMPUTE else direction] for w in works]
        )
        for direction, of_layers in found.items()
    }
    return Prediction(
        setup, case.choice.label, name, passes, _facts(cluster, problem, case, name, works), tuple(remarks),
        _rows(played, problem.made.head_dim, number) if fits else None, player.costs,
    )  # fmt: skip


def _kernels(
    cluster: Cluster,
    name: str,
    index: Index | None,
    case: ReplayCase,
    calibration: Calibration | None,
) -> KernelCurves:
    # Workers that share all heads compute whole sequences, whatever the layout.
    lists = (
        index is None
        and case.setup.layout == "striped"
        and case.schedule.heads < case.setup.workers
    )
    form = SPARSE if index is not None else LISTS if lists else DENSE
    known = [*([calibration] if calibration is not None else []), *shipped()]
    peaks = {c.device: peak_flops(c.device) or cluster.gpu.peak_tflops.value * 1e12 for c in known}
    return kernels_for(
        cluster.gpu.name, cluster.gpu.peak_tflops.value * 1e12, name, form, peaks, calibration
    )


def _uncertain(cluster: Cluster) -> list[str]:
    by_source: dict[str, list[str]] = {}
    for key, constant in cluster.constants().items():
        by_source.setdefault(constant.source, []).append(key)
    guessed = by_source.get("guess", [])
    own = [name for name, constant in CONSTANTS.items() if constant.source == "guess"]
    return [
        _guesses(name, of) for name, of in ((cluster.name, guessed), ("the simulator", own)) if of
    ]


def _guesses(name: str, keys: Sequence[str]) -> str:
    said = "one constant is a guess" if len(keys) == 1 else f"{len(keys)} constants are guesses"
    return f"{name}: {said} ({', '.join(keys)})"


def _of_index(cluster: Cluster, problem: AttentionWorkload, first: Index | None) -> list[str]:
    """What estimating an index is taken from, where that is something else."""
    heads, here = problem.made.heads, same_device(INDEX_DEVICE, cluster.gpu.name)
    if (
        first is None
        or not problem.estimated
        or (heads == INDEX_HEADS and _measured(cluster, first))
    ):
        return []
    what = (
        f"{heads} heads{'' if isinstance(first, VerticalSlash) else ' and lists of blocks'} on "
        f"{cluster.gpu.name}"
    )
    by = f"number of heads{'' if here else ' and bandwidth of memory'}"
    wider = "" if _measured(cluster, first) else ", and bounds are wider"
    return [
        f"estimating an index was measured of vertical_slash with {INDEX_HEADS} heads on "
        f"{INDEX_DEVICE}, not of {what}: a token takes "
        f"x {index_scale(cluster.gpu, heads):.3g} of that, by {by}{wider}"
    ]


def _measured(cluster: Cluster, first: Index) -> bool:
    """Whether estimating such an index was, on such a GPU."""
    return isinstance(first, VerticalSlash) and same_device(INDEX_DEVICE, cluster.gpu.name)


class _CasePlayer:
    """Plays the passes of one case."""

    def __init__(
        self,
        cluster: Cluster,
        problem: AttentionWorkload,
        case: ReplayCase,
        lockstep: SpmdSchedule,
        kernels: KernelCurves,
        conditions: Disturbances,
        recompute: bool,
    ) -> None:
        self.problem, self.case, self.lockstep, self.conditions = (
            problem,
            case,
            lockstep,
            conditions,
        )
        self.directions = (FORWARD, RECOMPUTE, BACKWARD) if recompute else (FORWARD, BACKWARD)
        first = problem.index(problem.layers[0])
        costs = Costs(
            cluster, kernels, case.sizes, lockstep, problem.made.head_dim, sequences=len(problem.masks),
            measured=first is None or _measured(cluster, first),
        )  # fmt: skip
        self.costs = {bound: replace(costs, bound=bound, _messages={}) for bound in BOUNDS}
        curves = [*kernels.whole.values(), *kernels.alone.values()]
        # What a kernel computes that hides pairs instead of leaving them out.
        self.masked = None if all(curve.skips for curve in curves) else case.counter.count(None)

    @property
    def rows_of_layer(self) -> int:
        beats = [beat for direction in self.directions for beat in self.lockstep.beats(direction)]
        each = sum(4 + 3 * (len(beat.post) + len(beat.send)) for beat in beats)
        return each * self.case.setup.workers

    def play(
        self,
        work: dict[str, StepWork],
        index: Index | None,
        layer: int,
        direction: str,
        bound: str,
        *,
        rows: bool,
    ) -> PassTimes:
        costs = self.costs[bound]
        width = index.columns.shape[-1] if isinstance(index, VerticalSlash) else 0
        seq = self.case.layout.padded_seq * len(self.problem.masks)
        estimated = seq if self.problem.estimated and index is not None else 0
        # Messages of columns alone depend on the layer.
        costs = replace(costs, columns=width, sparse=index is not None, estimated=estimated)
        prices = LayerPrices(costs, work, direction, self.masked)
        return play(
            program(self.lockstep, prices), direction, self.case.setup.workers, len(self.lockstep.beats(direction)),
            grid=self.lockstep.grid, conditions=self.conditions, rows=rows, stream=3 * layer + self.directions.index(direction),
        )  # fmt: skip


def _summary(of_layers: Sequence[dict[str, PassTimes]], works: Sequence[StepWork]) -> PredictedPass:
    likely = [times[VALUE] for times in of_layers]
    low, value, high = (
        float(np.mean([times.get(bound, times[VALUE]).duration for times in of_layers])) / 1e3
        for bound in (LOW, VALUE, HIGH)
    )
    time = [_degrees(times.attention, times.spent["columns"][:, 0]) for times in likely]
    work = [_degrees(w.pairs, w.column_pairs) for w in works]
    computed = [
        float((t.attention.sum(1) + t.spent["columns"][:, 0]).mean()) / max(t.duration, 1e-9)
        for t in likely
    ]
    links = dict.fromkeys(link for times in likely for link in times.exposed)
    zero = np.zeros(1)
    exposed = {
        link: float(np.mean([t.exposed.get(link, zero).sum() / len(t.end) for t in likely])) / 1e3
        for link in links
    }
    late = float(np.mean([t.late.sum() / len(t.end) for t in likely])) / 1e3
    spent = {
        kind: float(np.mean([t.spent[kind].sum() / len(t.end) for t in likely])) / 1e3
        for kind in likely[0].spent
    }
    inner, outer = np.mean([t.carried.max(1) for t in likely], axis=0) / 1e3
    return PredictedPass(
        BoundedTime.around(value, low, high), _mean(time), _mean(work), float(np.mean(computed)), late, exposed,
        spent, (float(inner), float(outer)),
    )  # fmt: skip


def _degrees(table: np.ndarray, columns: np.ndarray) -> Imbalance:
    """Columns are one step more where workers are compared, and none of those of a worker (`profiling.analysis`)."""
    found = degrees(table[None])[:, 0]
    if columns.any():
        found[[0, 2, 3]] = degrees(np.column_stack([table, columns])[None])[[0, 2, 3], 0]
    return Imbalance(*(float(value) for value in found))


def _mean(found: Sequence[Imbalance]) -> Imbalance:
    return Imbalance(
        *(
            float(np.mean([getattr(d, name) for d in found]))
            for name in ("worker", "step", "total", "critical")
        )
    )


def _rows(played: Sequence[tuple[int, str, PassTimes]], head_dim: int, number: int) -> np.ndarray:
    """One iteration: forward passes of all layers, then the others from the last layer back; each begins when the one before has ended."""
    forward = [entry for entry in played if entry[1] == FORWARD]
    others = [
        entry
        for layer in reversed([e[0] for e in forward])
        for entry in played
        if entry[0] == layer and entry[1] != FORWARD
    ]
    now, passes = 0.0, []
    for layer, _, times in [*forward, *others]:
        passes.append((layer, times.moved(now)))
        now += times.duration
    return together(passes, case=number, flop=(4.0 * head_dim, 10.0 * head_dim))


def _facts(
    cluster: Cluster,
    problem: AttentionWorkload,
    case: ReplayCase,
    kernel: str,
    works: Sequence[dict[str, StepWork]],
) -> dict[str, Any]:
    """The entry of the case in summary.json, as `profiling.measurement.MeasurementCase.facts` has it."""
    made, setup, schedule = problem.made, case.setup, case.schedule
    pairs = float(np.mean([w[FORWARD].total_pairs.sum() for w in works]))
    return {
        "label": f"{problem.pattern} {setup.layout} {setup.exchange}",
        "layout": setup.layout,
        "exchange": case.choice.label,
        "pattern": problem.pattern,
        "kernel": kernel,
        "model": problem.model,
        "seq": made.seq,
        "micro_batch": len(problem.masks),
        "workers": setup.workers,
        "cp": setup.workers,
        "per_node": schedule.per_node,
        "heads": schedule.heads,
        "layers": len(problem.layers),
        "steps": {"forward": len(schedule.forward[0]), "backward": len(schedule.backward[0])},
        "num_heads": made.heads,
        "num_kv_heads": made.kv_heads,
        "head_dim": made.head_dim,
        "density": pairs / (made.heads * len(problem.masks) * causal_pairs(made.seq)),
        "cluster": cluster.name,
        "flop": {
            d: float(
                FLOP_PER_PAIR[d] * made.head_dim * np.mean([w[d].total_pairs.sum() for w in works])
            )
            for d in (FORWARD, BACKWARD)
        },
    }
