"""Predict attention on a cluster: count the work, price it, simulate it, summarize it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import cycle, product
from typing import Any

import numpy as np

from mtrain_cli.attention.index import (
    BlockBitmap,
    GatedBitmap,
    Index,
    StartBitmap,
    VerticalSlash,
)
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import FullLayers
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.config.cluster import Cluster, Constant, Gpu
from mtrain_cli.config.exchanges import OURS, RingVariant
from mtrain_cli.config.mask_settings import LAYER_KINDS
from mtrain_cli.config.pattern_settings import SPARSE_KINDS
from mtrain_cli.parallel.dispatch import RowPrices
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.records.imbalance import Imbalance, degrees
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation import costs, expert_cost, host_time, non_attention_cost, timeline
from mtrain_cli.simulation.calibration import (
    DENSE,
    HIGH,
    LISTS,
    LOW,
    PUBLISHED,
    SPARSE,
    UNKNOWN,
    VALUE,
    Calibration,
    kernels_for,
    same_device,
)
from mtrain_cli.simulation.costs import (
    BOUNDS,
    INDEX_DEVICE,
    LISTED_BLOCKS,
    Costs,
    LayerPrices,
)
from mtrain_cli.simulation.long_rings import is_long, mixed, shorter_cases
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule
from mtrain_cli.simulation.timeline import NOT_SLOW, PassTimes, play, together
from mtrain_cli.simulation.what_if import ReplayCase, ReplaySetup, make_case, resized
from mtrain_cli.simulation.work_counts import FLOP_PER_PAIR, StepWork
from mtrain_cli.training.flops import causal_pairs


def _fixed(value: float, note: str) -> Constant:
    """Return a guess that keeps its value in the best and the worst case of a prediction."""
    return Constant(value, "guess", f"{note}; not varied", value, value)


def _factor(low: float, high: float, note: str) -> Constant:
    """Return a factor on times: 1 as expected, ``low`` in the best case, ``high`` in the worst."""
    return Constant(1.0, "guess", note, low, high)


_MEASURED, _BEYOND = non_attention_cost.MEASURED, non_attention_cost.BEYOND
_INDEX_TIMES = {
    "index_alone_us": "shortest time to estimate an index on one GPU",
    "index_per_token_us": "time to estimate an index, for each token on a GPU; scaled by the "
    "number of heads and by 1 / memory bandwidth",
    "index_per_score_us": "time to score a query and a key for an index of block_topk; scaled by "
    "1 / peak FLOP/s",
    "index_together_us": "shortest time to estimate an index on several GPUs",
}
_OF_INDEX = f"measured with {costs.INDEX_HEADS} heads on {costs.INDEX_DEVICE}"
_EXPERTS = ("GROUPED", "ROUTER", "FLOAT32", "EXPERT_LAUNCHES", "WAIT_FOR_NUMBERS")
CONSTANTS: dict[str, Constant] = {
    "non_attention.eager": non_attention_cost.EAGER,
    "non_attention.launches": non_attention_cost.LAUNCHES,
    **{f"expert_cost.{name.lower()}": getattr(expert_cost, name) for name in _EXPERTS},
    **{f"host_time.{name.lower()}": getattr(host_time, name) for name in host_time.CONSTANTS},
    "non_attention.measured": _factor(
        _MEASURED[LOW], _MEASURED[HIGH], "other times vary between GPUs of one model and under load"
    ),
    "non_attention.beyond": _factor(
        _BEYOND[LOW], _BEYOND[HIGH], "other times, if only layers of another size were measured"
    ),
    **{
        f"costs.launches.{name}": _fixed(number, "number of kernel launches, counted roughly")
        for name, number in costs.LAUNCHES.items()
    },
    **{
        f"costs.{name}": Constant(
            value := getattr(costs, name.upper()),
            "measured",
            f"{note}; {_OF_INDEX}",
            costs.INDEX_BOUNDS[LOW] * value,
            costs.INDEX_BOUNDS[HIGH] * value,
        )
        for name, note in _INDEX_TIMES.items()
    },
    "costs.listed_blocks": LISTED_BLOCKS,
    "costs.least_copy_us": _fixed(costs.LEAST_COPY_US, "shortest time of a copy"),
    "timeline.least_power": _fixed(
        timeline.LEAST_POWER, "messages leave at least this share of a GPU to computation"
    ),
    "calibration.published": _factor(*PUBLISHED, "kernel times that others published for this GPU"),
    "calibration.unknown": _factor(
        *UNKNOWN, "kernel times measured on another GPU (scaled by peak FLOP/s) or another kernel"
    ),
}


@dataclass(frozen=True)
class AttentionWorkload:
    """The attention to predict.

    made: shapes, as an index file records them.
    index: returns the index of a layer, or None for dense attention.
    columns: largest number of single columns per head, as in `what_if.make_case`.
    estimated: whether the time includes that of estimating indices.
    scores: number of scores from which an index is estimated (`costs.Costs`).
    full: the layers of the second kind: without a window, or without an index under a pattern.
    drawn: number of sparse layers with an index of their own, which others repeat; None for all.
    remark: where the masks come from, for the user.
    """

    made: RecordedSetup
    masks: tuple[SequenceMask, ...]
    layers: tuple[int, ...]
    index: Callable[[int], Index | None]
    pattern: str
    columns: int | None = -1
    estimated: bool = True
    scores: float = 0.0
    model: str = ""
    full: FullLayers | None = None
    drawn: int | None = None
    remark: str = ""

    def part(self, i: int, n: int) -> AttentionWorkload:
        """Return the attention of the i-th of n equal parts of the heads."""
        if n == 1:
            return self

        def index(layer: int) -> Index | None:
            whole = self.index(layer)
            return None if whole is None else whole.part(i, n)

        made = replace(self.made, heads=self.made.heads // n, kv_heads=self.made.kv_heads // n)
        return replace(self, made=made, index=index, scores=self.scores / n)

    @property
    def first_index(self) -> Index | None:
        """The index of the first layer of the first kind; None for dense attention."""
        return self.index((self.kinds[0][1] or self.layers)[0])

    @property
    def sparse(self) -> bool:
        return self.first_index is not None

    @property
    def density(self) -> float:
        """Share of the causal pairs that attention computes, as a mean over layers."""
        index, causal = self.first_index, causal_pairs(self.made.seq)
        shares = [sum(mask.pairs for mask in masks) / len(masks) for masks, _ in self.kinds]
        weights = [len(layers) for _, layers in self.kinds]
        if index is not None:
            bitmap = isinstance(index, BlockBitmap)
            tables = MaskTables.make(self.masks, index.block, bitmap=bitmap)
            drawn = (self.index(layer) for layer in self.kinds[0][1][: self.drawn])
            found = [float(i.counts(tables).pairs.double().mean()) for i in drawn if i is not None]
            shares[0] = sum(found) / len(found)
        return sum(s * w for s, w in zip(shares, weights, strict=True)) / sum(weights) / causal

    @property
    def kinds(self) -> list[tuple[tuple[SequenceMask, ...], list[int]]]:
        """The masks of each kind of layer, and the numbers of the layers to predict."""
        if self.full is None:
            return [(self.masks, list(self.layers))]
        full = self.full.layers
        others = [layer for layer in self.layers if layer not in full]
        numbers = [layer for layer in self.layers if layer in full]
        return [(self.masks, others), (tuple(self.full.masks), numbers)]

    @property
    def layer_kinds(self) -> dict[str, list[int]]:
        """The numbers of the layers to predict, by kind; empty if all are alike."""
        if self.full is None:
            return {}
        names = SPARSE_KINDS if self.sparse else LAYER_KINDS
        return dict(zip(names, (layers for _, layers in self.kinds), strict=True))

    def with_dense(self, dense: frozenset[int], layers: int) -> AttentionWorkload:
        """Return the attention of a model whose layers in ``dense`` have no index.

        The other layers of ``self`` stand for all sparse layers of the model.
        """
        if not dense or not self.sparse:
            return self
        own, index = [layer for layer in self.layers if layer not in dense], self.index
        sparse = (layer for layer in range(layers) if layer not in dense)
        shown = dict(zip(sparse, cycle(own)))

        def of_layer(layer: int) -> Index | None:
            return index(shown[layer]) if layer in shown else None

        known = self.full is not None and self.full.layers == dense
        full = self.full if known else FullLayers(self.masks, dense, layers)
        every = tuple(range(layers))
        return replace(self, layers=every, index=of_layer, full=full, drawn=len(own))


MOST_ROWS = 20_000_000  # per case; a larger case gets tables but no rows
_NAMED = 3  # guessed constants that a remark names
_SM90 = ("H100", "H200", "H800", "GH200", "H20")


@dataclass(frozen=True)
class BoundedTime:
    """A predicted value, and its bounds: all constants at their best, or all at their worst."""

    low: float
    value: float
    high: float

    @staticmethod
    def around(value: float, low: float | None = None, high: float | None = None) -> BoundedTime:
        """Make a bounded value. The value replaces a missing or crossed bound."""
        least, most = (value if bound is None else bound for bound in (low, high))
        return BoundedTime(min(least, value), value, max(most, value))

    def map(self, function: Callable[[float], float], *, falling: bool = False) -> BoundedTime:
        """Apply a monotonic function. falling: whether a larger input gives a smaller result."""
        low, value, high = map(function, (self.low, self.value, self.high))
        return BoundedTime(high, value, low) if falling else BoundedTime(low, value, high)


@dataclass(frozen=True)
class PredictedPass:
    """One pass of a layer, in ms, averaged over layers.

    duration: time of the slowest worker.
    time, work: imbalance degrees of attention time, and of the number of pairs.
    computed: share of attention in the time of a pass (`records.analysis.Ratios.total`).
    late, exposed: mean wait for slower workers, and exposed communication by link.
    spent: mean time by kind (`recording.COMPUTING`).
    carried: times for which messages occupy the (inner, outer) link of the slowest rank.
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
    """The prediction of one configuration.

    exchange: label of the exchange, with the options that ``auto`` chose.
    facts: description of the case for summary.json.
    rows: records of one iteration, of dtype `record_files.ROW`; None if not requested.
    costs: prices by bound, those of sparse layers if there are dense layers, too.
    """

    setup: ReplaySetup
    exchange: str
    kernel: str
    passes: dict[str, PredictedPass]
    facts: dict[str, Any]
    remarks: tuple[str, ...]
    rows: np.ndarray | None = field(default=None, repr=False)
    costs: dict[str, Costs] = field(default_factory=dict, repr=False)
    played: tuple[_PlayedLayer, ...] = field(default=(), repr=False)
    # Results of `of_layers`: plans that share attention, and their bounds, have the same stages.
    _parts: dict[frozenset[int], Prediction] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of_layers(self, numbers: Collection[int]) -> Prediction:
        """Return the prediction of some layers of a model that has two kinds of layers."""

        def pairs(layers: Iterable[_PlayedLayer]) -> float:
            return float(np.mean([layer.work[FORWARD].total_pairs.sum() for layer in layers]))

        of = frozenset(numbers)
        if of not in self._parts:
            chosen = [layer for layer in self.played if layer.number in of]
            if "layer_kinds" not in self.facts or len(chosen) in (0, len(self.played)):
                return self
            density = self.facts["density"] * pairs(chosen) / pairs(self.played)
            passes = _passes(chosen, tuple(self.passes))
            facts = {**self.facts, "density": density}
            self._parts[of] = replace(self, passes=passes, facts=facts)
        return self._parts[of]

    @property
    def duration(self) -> BoundedTime:
        """Return the time of all passes of a layer, in ms."""
        of_passes = [predicted.duration for predicted in self.passes.values()]
        return BoundedTime(
            *(sum(getattr(d, name) for d in of_passes) for name in (LOW, VALUE, HIGH))
        )


def default_kernel(gpu: Gpu, index: Index | None) -> str:
    """Return the kernel that ``train.kernel=auto`` stands for on this GPU."""
    gated = isinstance(index, (GatedBitmap, StartBitmap))
    whole = index is None or (index.block == 128 and not gated)
    if whole and not gpu.is_cpu and any(name in gpu.name for name in _SM90):
        return "flash4"
    return "sdpa" if index is None or gpu.is_cpu else "triton"


def predict(
    cluster: Cluster,
    problem: AttentionWorkload,
    setup: ReplaySetup,
    *,
    kernel: str | None = None,
    dense_kernel: str | None = None,
    calibration: Calibration | None = None,
    recompute: Recompute = Recompute.NOTHING,
    slow: Mapping[int, float] = NOT_SLOW,
    number: int = 0,
    rows: bool = False,
    bounds: bool = True,
    choice: ExchangeChoice | None = None,
    prices: RowPrices | None = None,
    variant: RingVariant = OURS,
) -> Prediction:
    """Predict the attention of one configuration.

    Args:
        kernel, dense_kernel: kernels, also of dense layers in a sparse model; None for the default.
        recompute: the part of the forward pass that backward runs again, as a pass of its own.
        slow: factor by which the computation of a rank takes longer.
        bounds: also predict the best and the worst case, in three times the time.
        choice: the exchange that was already chosen for ``setup``; None to choose an exchange.
        prices: of rows, for a balanced layout; None for those on ``cluster``.
        variant: how the rings run.

    Raises:
        ConfigError: a configuration is impossible, a kernel has no times, an index is damaged.
    """
    first = problem.first_index
    name = kernel or default_kernel(cluster.gpu, first)
    prices = prices or RowPrices.on(cluster, problem.made.heads, problem.made.kv_heads)
    # Dense layers of a sparse model have the same masks, which a layout needs only once.
    mixed = problem.full is not None and first is None
    balanced = problem.full.kinds(problem.masks) if problem.full is not None and mixed else ()
    players: list[_CasePlayer] = []
    for masks, numbers in problem.kinds:
        if numbers:
            case = make_case(
                problem.made, masks, setup, first, problem.columns, choice, prices, balanced
            )
            own = replace(problem, masks=masks, layers=tuple(numbers), full=None)
            dense = dense_kernel or kernel or default_kernel(cluster.gpu, None)
            own_kernel = name if own.sparse or first is None else dense
            if not players:
                fits = rows and _rows_of(case, recompute) * len(problem.layers) <= MOST_ROWS
            details = own_kernel, calibration, slow, recompute, variant
            of_case = partial(_CasePlayer, cluster, own, *details)
            long = not (slow or fits) and is_long(case.counter, own.first_index)
            per_node = cluster.gpus_per_node
            players.append(_LongPlayer(case, of_case, per_node) if long else of_case(case))
    player, case = players[0], players[0].case
    of_kernels = [remark for player in players for remark in player.kernels.remarks]
    remarks = [*dict.fromkeys(of_kernels), *_uncertain(cluster), *filter(None, [problem.remark])]
    if rows and not fits:
        remarks.append(
            f"more than {MOST_ROWS / 1e6:.0f} million rows: records.parquet does not hold this case"
        )
    chosen, alike = BOUNDS if bounds else (VALUE,), problem.full is not None
    layers = [one for p in players for one in p.play_layers(chosen, rows=fits, alike=alike)]
    layers.sort(key=lambda layer: layer.number)
    table = _rows(layers, problem.made.head_dim, number) if fits else None
    return Prediction(
        setup,
        case.choice.label,
        name,
        _passes(layers, player.directions),
        _facts(cluster, problem, case, name, layers),
        tuple(remarks),
        table,
        player.costs,
        tuple(layers),
    )


def _rows_of(case: ReplayCase, recompute: Recompute) -> int:
    """Return the number of records of a layer."""
    forward, backward = case.schedule.forward[0], case.schedule.backward[0]
    again = () if recompute is Recompute.NOTHING else forward
    each = sum(4 + 3 * len(step.transfers) for step in (*forward, *again, *backward))
    return each * case.setup.workers


def _uncertain(cluster: Cluster) -> list[str]:
    remarks = []
    for whose, constants in ((cluster.name, cluster.constants()), ("the simulator", CONSTANTS)):
        guesses = [name for name, constant in constants.items() if constant.source == "guess"]
        more = f" and {len(guesses) - _NAMED} more; --json has all" if len(guesses) > _NAMED else ""
        if guesses:
            named = ", ".join(guesses[:_NAMED])
            remarks.append(f"{whose}: guessed constants: {len(guesses)} ({named}{more})")
    return remarks


@dataclass(frozen=True)
class _PlayedLayer:
    number: int
    work: dict[str, StepWork]
    column_width: int
    times: dict[str, dict[str, PassTimes]]


class _CasePlayer:
    def __init__(
        self,
        cluster: Cluster,
        problem: AttentionWorkload,
        kernel: str,
        calibration: Calibration | None,
        slow: Mapping[int, float],
        recompute: Recompute,
        variant: RingVariant,
        case: ReplayCase,
    ) -> None:
        self.problem, self.case, self.slow, self.recompute = problem, case, slow, recompute
        self.overlap = variant.overlap
        self.spmd = spmd = SpmdSchedule.of(case.schedule)
        # If the workers only share heads, each computes whole sequences, whatever the layout.
        lists = case.setup.layout == "striped" and case.schedule.heads != case.setup.workers
        form = SPARSE if problem.sparse else LISTS if lists else DENSE
        peak = cluster.gpu.peak_tflops.value * 1e12
        kernels = kernels_for(cluster.gpu.name, peak, kernel, form, calibration)
        if isinstance(problem.first_index, BlockBitmap) and kernel == "triton":
            kernels = kernels.slower(LISTED_BLOCKS.value)
        self.kernels = kernels
        again = (RECOMPUTE,) if recompute is not Recompute.NOTHING else ()
        self.directions = (FORWARD, *again, BACKWARD)
        first, gpu = problem.first_index, cluster.gpu.name
        own = isinstance(first, VerticalSlash) and same_device(INDEX_DEVICE, gpu)
        head_dim = problem.made.head_dim
        stripe = case.layout.block_size if kernels.by_stripes else 0
        of_case = cluster, kernels, case.sizes, spmd, head_dim
        costs = Costs(*of_case, measured=own, stripe=stripe, order=variant.order)
        self.costs = {bound: replace(costs, bound=bound, _messages={}) for bound in BOUNDS}
        curves = [*kernels.whole.values(), *kernels.alone.values()]
        # Kernels that do not skip the pairs that an index leaves out compute all pairs of the mask.
        self.masked = None if all(curve.skips for curve in curves) else case.counter.count(None)

    def play_layers(
        self, bounds: Sequence[str], *, rows: bool, alike: bool
    ) -> Iterator[_PlayedLayer]:
        """Simulate all passes of all layers.

        alike: whether the first layers stand for all: those with an index of their own, or one.
        """
        own, layers = self.problem.drawn if self.problem.sparse else 1, self.problem.layers
        simulated = layers[:own] if alike else layers
        played = [self.play_layer(n, bounds, rows=rows) for n in simulated]
        return (replace(played[i % len(played)], number=n) for i, n in enumerate(layers))

    def play_layer(self, layer: int, bounds: Sequence[str], *, rows: bool) -> _PlayedLayer:
        """Simulate all passes of a layer. rows: whether to keep the records of `VALUE`."""
        index, case = self.problem.index(layer), self.case
        work = case.counter.count(None if index is None else resized(index, case.counter.blocks))
        # Of all sizes, only those of single columns depend on the layer.
        sizes, seq = case.sizes_under(index), case.layout.padded_seq * len(self.problem.masks)
        share = self.spmd.grid.workers / case.setup.workers  # less than 1 in a shorter ring
        estimated = seq * share if self.problem.estimated and index is not None else 0.0
        times: dict[str, dict[str, PassTimes]] = {direction: {} for direction in self.directions}
        for direction, bound in product(self.directions, bounds):
            costs = replace(
                self.costs[bound],
                sizes=sizes,
                sparse=index is not None,
                estimated=estimated,
                scores=self.problem.scores * share if estimated else 0.0,
            )
            prices = LayerPrices(costs, work, direction, self.masked)
            program = case.program(
                backward=direction == BACKWARD,
                columns=prices.columns,
                # PyTorch's kernel copies out and dout; the other kernels take views.
                copies_parts=costs.kernels.whole[BACKWARD].kernel == "sdpa",
            )
            if direction == RECOMPUTE:
                program = program.recomputed(self.recompute)
            keep = rows and bound == VALUE
            of_pass = program, self.spmd, prices
            times[direction][bound] = play(
                *of_pass, slow=self.slow, rows=keep, overlap=self.overlap
            )
        return _PlayedLayer(layer, work, sizes.column_width, times)


class _LongPlayer(_CasePlayer):
    """Simulates shorter rings that stand for a long one."""

    def __init__(
        self, case: ReplayCase, of_case: Callable[[ReplayCase], _CasePlayer], per_node: int
    ) -> None:
        self.shorter = [(weight, of_case(own)) for weight, own in shorter_cases(case, per_node)]
        vars(self).update(vars(self.shorter[0][1]) | {"case": case})

    def play_layer(self, layer: int, bounds: Sequence[str], *, rows: bool) -> _PlayedLayer:
        played = [(weight, of.play_layer(layer, bounds, rows=rows)) for weight, of in self.shorter]
        times = {
            direction: {b: mixed([(w, of.times[direction][b]) for w, of in played]) for b in bounds}
            for direction in self.directions
        }
        return replace(played[0][1], times=times)


def _passes(layers: Sequence[_PlayedLayer], directions: Sequence[str]) -> dict[str, PredictedPass]:
    return {
        direction: _summary(
            [layer.times[direction] for layer in layers],
            [layer.work[FORWARD if direction == RECOMPUTE else direction] for layer in layers],
        )
        for direction in directions
    }


def _summary(by_layer: Sequence[dict[str, PassTimes]], works: Sequence[StepWork]) -> PredictedPass:
    likely = [times[VALUE] for times in by_layer]
    low, value, high = (
        float(np.mean([times.get(bound, times[VALUE]).duration for times in by_layer])) / 1e3
        for bound in (LOW, VALUE, HIGH)
    )
    time = [degrees(t.attention[None], t.spent["columns"][None, :, 0]) for t in likely]
    work = [degrees(w.pairs[None], w.column_pairs[None]) for w in works]
    if rings := [w.ring for w in works if w.ring is not None]:
        time = work = [np.array([astuple(ring.balance)]).T for ring in rings]
    computing = ((t.attention.sum(1) + t.spent["columns"][:, 0]).mean() for t in likely)
    computed = [float(us) / max(t.duration, 1e-9) for us, t in zip(computing, likely, strict=True)]
    workers, zero = len(likely[0].end), np.zeros(1)

    def milliseconds(tables: Iterable[np.ndarray]) -> float:
        """Convert tables of microseconds to milliseconds, averaged over layers and workers."""
        return float(np.mean([table.sum() / workers for table in tables])) / 1e3

    links = dict.fromkeys(link for times in likely for link in times.exposed)
    exposed = {link: milliseconds(t.exposed.get(link, zero) for t in likely) for link in links}
    spent = {kind: milliseconds(t.spent[kind] for t in likely) for kind in likely[0].spent}
    late = milliseconds(t.late for t in likely)
    inner, outer = np.mean([t.carried.max(1) for t in likely], axis=0) / 1e3
    duration, shares = BoundedTime.around(value, low, high), float(np.mean(computed))
    carried = float(inner), float(outer)
    return PredictedPass(duration, _mean(time), _mean(work), shares, late, exposed, spent, carried)


def _mean(layers: Sequence[np.ndarray]) -> Imbalance:
    return Imbalance(*(float(np.mean(values)) for values in zip(*layers, strict=True)))


def _rows(layers: Sequence[_PlayedLayer], head_dim: int, number: int) -> np.ndarray:
    """Make the records of an iteration: forward passes, then the others from the last layer."""
    order = [(layer, FORWARD) for layer in layers]
    order += [
        (layer, name) for layer in reversed(layers) for name in layer.times if name != FORWARD
    ]
    now, passes = 0.0, []
    for layer, direction in order:
        times = layer.times[direction][VALUE]
        passes.append((layer.number, times.moved(now)))
        now += times.duration
    forward, backward = (float(FLOP_PER_PAIR[name] * head_dim) for name in (FORWARD, BACKWARD))
    return together(passes, case=number, flop=(forward, backward))


def _facts(
    cluster: Cluster,
    problem: AttentionWorkload,
    case: ReplayCase,
    kernel: str,
    layers: Sequence[_PlayedLayer],
) -> dict[str, Any]:
    """Return the case's entry in summary.json, as `MeasurementCase.facts` does."""
    made, setup, schedule = problem.made, case.setup, case.schedule
    pairs = {
        name: np.mean([layer.work[name].total_pairs.sum() for layer in layers])
        for name in (FORWARD, BACKWARD)
    }
    causal = made.heads * len(problem.masks) * causal_pairs(made.seq)
    return {
        "label": f"{problem.pattern} {setup.layout} {setup.exchange}",
        "layout": setup.layout,
        "exchange": case.choice.label,
        "pattern": problem.pattern,
        "kernel": kernel,
        "model": problem.model,
        "seq": made.seq,
        "padded_seq": case.layout.padded_seq,
        "micro_batch": len(problem.masks),
        "workers": setup.workers,
        "cp": setup.workers,
        "per_node": schedule.per_node,
        "heads": schedule.heads,
        "layers": len(problem.layers),
        **({"layer_kinds": problem.layer_kinds} if problem.full is not None else {}),
        "steps": {"forward": len(schedule.forward[0]), "backward": len(schedule.backward[0])},
        "num_heads": made.heads,
        "num_kv_heads": made.kv_heads,
        "head_dim": made.head_dim,
        "column_width": max(layer.column_width for layer in layers),
        "density": float(pairs[FORWARD]) / causal,
        "cluster": cluster.name,
        "flop": {name: float(FLOP_PER_PAIR[name] * made.head_dim * pairs[name]) for name in pairs},
    }
