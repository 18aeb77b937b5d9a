"""Predict a training run on a cluster: its query-key pairs, its plan, and the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from mtrain_cli.attention.index import BlockBitmap, Index, VerticalSlash
from mtrain_cli.attention.mask_rule import FullLayers, MaskRule
from mtrain_cli.config.cluster import Cluster, load_cluster, shipped
from mtrain_cli.config.exchanges import OURS, RingVariant
from mtrain_cli.config.pattern_settings import (
    BlockTopkSettings,
    FixedSettings,
    VerticalSlashSettings,
)
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.calibration import VALUE, Calibration
from mtrain_cli.simulation.costs import LEARNED_SCORE, SCORE_DIMS, UPDATE_SCORES
from mtrain_cli.simulation.expert_cost import ExpertLoads, cluster_of_groups, dealt_over
from mtrain_cli.simulation.predicted_step import PredictedStep, predict_step
from mtrain_cli.simulation.prediction import AttentionWorkload, Prediction, predict
from mtrain_cli.simulation.synthetic_index import SyntheticBlocks, SyntheticIndex
from mtrain_cli.simulation.what_if import ReplaySetup, require_enough_blocks
from mtrain_cli.sparsity.fixed import make_pattern
from mtrain_cli.training.dry_run import beyond_reach
from mtrain_cli.training.flops import causal_pairs
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.progress import StepEstimate
from mtrain_cli.training.run_plan import RunPlan, first_masks

DENSE, FIXED, CLUSTERED = "dense", "fixed", "clustered"
DENSITY, COLUMNS = 0.05, 2048  # of a synthetic index, where neither pattern nor user gives them
HOT = 1 / 12  # share of a synthetic list's pairs that lie in blocks seen by all later queries
MOST_BLOCKS = 1 << 14  # of a synthetic list, whose size grows with their square
MOST_CONTEXT = 64  # workers that share a sequence, if predicting more can take minutes
_KEPT = 8  # number of layers whose indices are cached, because cases of one command share them
_LEAST_COLUMNS = 8  # the smallest number of columns of a configuration with slashes and columns


@dataclass(frozen=True)
class PairSource:
    """The query-key pairs that a training run computes.

    name: ``dense``, ``fixed`` (indices drawn by the pattern ``fixed``), or `CLUSTERED`.
    density, columns, fewest, most: see `SyntheticIndex`.
    layers: number of layers whose indices are drawn; they stand for all sparse layers.
    groups: number of groups of heads that share a list of blocks (`SyntheticBlocks`), of which
        ``columns`` tokens are hot; 0 for slashes.
    """

    name: str
    density: float = DENSITY
    columns: int = COLUMNS
    layers: int = 1
    fewest: int = 1
    most: int = 0
    groups: int = 0

    @staticmethod
    def of(
        config: Config | None,
        layers: int = 1,
        density: float | None = None,
        columns: int | None = None,
    ) -> PairSource:
        """Return the pairs that a prediction of a training run assumes.

        Args:
            config: its pattern bounds the pairs; None for no bounds.
            density, columns: None for what the pattern says, else the defaults.

        Raises:
            ConfigError: there are no synthetic indices of the pattern.
        """
        bounds: tuple[int, int] = (1, 0)
        if config is not None:
            settings = config.sparsity
            if settings.pattern in (DENSE, FIXED):
                return PairSource(settings.pattern, layers=layers)
            if isinstance(settings, BlockTopkSettings) and _blocks(config) <= MOST_BLOCKS:
                model, shared = config.model, settings.index_per == "kv_group"
                groups = model.num_kv_heads if shared else model.num_heads
                density = density or settings.density or DENSITY
                most = int(density * config.seq)
                if columns is not None and columns > most:
                    raise ConfigError(
                        f"columns={columns}: tokens that all later queries see would hold more "
                        f"than the density {density:.10g}; allowed: 0 to {most}"
                    )
                hot = int(HOT * most) if columns is None else columns
                return PairSource(CLUSTERED, density, hot, layers, groups=groups)
            if settings.bitmap:
                raise ConfigError(
                    f"sparsity={settings.pattern}: there are no synthetic indices for this "
                    "pattern and length; set index to the profile of a run with it"
                )
            if columns is None:
                most = COLUMNS if settings.column_bound is None else settings.column_bound
                columns = min(max(COLUMNS, settings.least_columns), most)
            if (known := settings.known_density(config.seq)) is not None:
                # As in `FixedSettings.known_density`: a column covers 2 / seq of the pairs.
                density = max(0.0, known - 2 * columns / config.seq)
            bounds = settings.least_slashes, settings.slash_bound(_blocks(config))
        density = DENSITY if density is None else density
        columns = COLUMNS if columns is None else columns
        return PairSource(CLUSTERED, density, columns, layers, *bounds)

    def most_covered(self, config: Config) -> float:
        """Return the share of the causal blocks that the longest slashes within `most` cover."""
        blocks = _blocks(config)
        slashes = min(self.most, blocks) or blocks
        return slashes * (2 * blocks - slashes + 1) / (blocks * (blocks + 1))

    def describe(self, config: Config) -> str:
        """Describe drawn pairs: ``slashes on 5% of the blocks, plus 2,048 columns per head``."""
        if isinstance(config.sparsity, BlockTopkSettings):
            block = config.sparsity.block
            hot = f"{with_count(self.columns // block, 'block')} of them seen by all later queries"
            return f"{100 * self.density:.3g}% of the pairs in blocks of {block} tokens, {hot}"
        covered = self.most_covered(config)
        share = f"{'at most ' * (covered < self.density)}{100 * min(self.density, covered):.3g}%"
        slashes = f"slashes on {share} of the blocks"
        of_fewest = replace(self, most=self.fewest).most_covered(config)
        if self.fewest > 1 and of_fewest > self.density:
            slashes = f"{'at least ' * (self.most != self.fewest)}{self.fewest:,} slashes per head"
        return f"{slashes}, plus {self.columns:,} columns per head"

    def sparsity(self) -> list[str]:
        """Return settings whose plan has about as many pairs; memory depends on them."""
        if self.name == DENSE:
            return []
        if self.columns < _LEAST_COLUMNS:
            columns = f"sparsity.columns={self.columns}"
            return ["sparsity=fixed", f"sparsity.density={self.density:g}", columns]
        fewest = [f"sparsity.min_columns={self.columns}"] if self.columns < 64 else []
        pattern = f"sparsity={VerticalSlashSettings.name}"
        return [pattern, f"sparsity.max_columns={self.columns}", *fewest]

    def problem(self, config: Config) -> AttentionWorkload:
        """Return the workload of one micro-batch of sequences of one document.

        If the data bring masks and can be read, it is the one with the median number of pairs.
        """
        model, sequences = config.model, config.train.micro_batch
        layers, full = config.pattern_layers[: self.layers], None
        rules = MaskRule.of(config).by_layers(model.num_layers)
        mask, *others = (rule.undivided(config.seq, config.seq) for rule, _ in rules)
        read, masks = first_masks(config), (mask,) * sequences
        if read is not None and read.masks:
            masks = read.typical
        if others:
            layers = list(range(model.num_layers))
            numbers = frozenset(filter(config.mask.is_full, layers))
            full = FullLayers((others[0],) * sequences, numbers, model.num_layers)
        dtype, on_cpu = config.train.dtype, config.topology.device == "cpu"
        recorded_as = RecordedSetup(
            seq=config.seq,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype_bytes=4 if dtype == "float32" or (dtype == "auto" and on_cpu) else 2,
            workers=1,
            per_node=1,
            layout=config.layout,
            exchange=config.topology.exchange,
            block_size=config.topology.block_size,
            chunk=config.topology.chunk,
        )
        fixed = self.name == FIXED
        workload = AttentionWorkload(
            recorded_as,
            masks,
            tuple(layers),
            lru_cache(_KEPT)(self._draw(config)),
            self.name,
            (config.sparsity.column_bound or 0) if fixed else -1,
            # A layer draws its `fixed` index once, so no step spends time on estimating it.
            estimated=not fixed,
            scores=scores_of(config),
            model=model.name,
            full=full,
            remark="" if read is None else f"data.mask_key={read.key}: {read.describe()}",
        )
        return workload.with_dense(config.sparsity.dense_of(model.num_layers), model.num_layers)

    def _draw(self, config: Config) -> Callable[[int], Index | None]:
        heads, sequences = config.model.num_heads, config.train.micro_batch
        if self.name == DENSE:
            return lambda layer: None  # noqa: ARG005
        if self.name == FIXED:
            assert isinstance(config.sparsity, FixedSettings)
            pattern = make_pattern(config.sparsity, config.seed)
            return lambda layer: pattern.draw(layer, sequences, heads, config.seq)
        columns = min(self.columns, config.seq)
        block = config.sparsity.block or config.topology.block_size
        if isinstance(config.sparsity, BlockTopkSettings):
            hot, cap = self.columns // block, config.sparsity.row_cap
            lists = SyntheticBlocks(self.density, hot, block, cap, self.groups, config.seed)

            def draw_lists(layer: int) -> BlockBitmap:
                bits = lists.index(layer, config.seq, heads).bits
                return BlockBitmap.whole(block, bits.expand(sequences, -1, -1, -1))

            return draw_lists
        drawn = SyntheticIndex(self.density, columns, block, config.seed, self.fewest, self.most)

        def draw(layer: int) -> VerticalSlash:
            one = drawn.index(layer, config.seq, heads)
            slashes, columns = (torch.cat([x] * sequences) for x in (one.slashes, one.columns))
            return VerticalSlash(one.block, one.blocks, slashes, columns)

        return draw


def scores_of(config: Config) -> float:
    """Return the number of scores from which a layer's index is estimated (`costs.Costs`)."""
    settings, model = config.sparsity, config.model
    if not isinstance(settings, BlockTopkSettings):
        return 0.0
    tokens, pairs = config.seq, causal_pairs(config.seq)
    scores = float(model.num_heads * pairs) * max(1.0, model.head_dim / SCORE_DIMS)
    if settings.score == "learned":
        each = LEARNED_SCORE * max(1.0, settings.rank / SCORE_DIMS)
        scores = float(model.num_kv_heads * pairs) * each
        scores += UPDATE_SCORES * model.num_heads * tokens
    return config.train.micro_batch * scores


def _blocks(config: Config) -> int:
    """Return the number of blocks of an index that `PairSource` draws."""
    return -(-config.seq // (config.sparsity.block or config.topology.block_size))


@dataclass(frozen=True)
class Scenario:
    """A training run to predict.

    words: settings as the user typed them. variant: how the rings run.
    """

    config: Config
    problem: AttentionWorkload
    calibration: Calibration | None = None
    slow: Mapping[int, float] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    loads: ExpertLoads = field(default_factory=ExpertLoads)
    variant: RingVariant = OURS

    def sets(self, key: str) -> bool:
        return any(word.startswith(f"{key}=") for word in self.words)


@dataclass(frozen=True)
class PredictedScenario:
    """The prediction of one training run."""

    plan: RunPlan
    attention: Prediction
    step: PredictedStep
    loads: ExpertLoads = field(default_factory=ExpertLoads)

    @property
    def layout(self) -> str:
        return self.plan.layout.name

    @property
    def context(self) -> int:
        return self.plan.dims.cp

    @property
    def dense(self) -> bool:
        """Whether attention computes every pair that the mask allows. Else MFU is undefined."""
        return self.attention.facts["pattern"] == DENSE

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user must know about the assumptions of this prediction."""
        plan, config, pattern = self.plan, self.plan.config, self.attention.facts["pattern"]
        costs, experts = self.attention.costs.get(VALUE), config.model.moe.experts
        times = None if costs is None else costs.kernels.non_attention
        source = "the cluster's constants give the times of matrix products, memory and links"
        if times is not None and times.dtype == plan.dtype:
            layers = "layers without experts and loss" if experts else "layers and loss"
            source = (
                f"{layers} take measured times (`mtrain profile non-attention`); the cluster's "
                "constants give the times of links and optimizer"
            )
        own_masks = config.data.mask_key is not None
        documents = "" if own_masks else " every sequence is one document;"
        packed = self.dense and config.mask.kind == "causal" and config.data.document_mask
        shown = [f"steps: {source};{documents} loading data and checkpoints take no time"]
        if packed and not own_masks:
            shown.append(
                "a sequence of mtrain train may hold several documents (data.document_mask=true), "
                "whose uneven work topology.layout=auto balances with striped; if your sequences "
                "are single documents, set topology.layout"
            )
        if pattern == CLUSTERED:
            shown.append(
                f"the computed pairs are drawn at random ({pattern}), and the balance between "
                "workers depends on them; to use the pairs of a profile, set index"
            )
        if self.step.for_host:
            shown.append(
                "the GPUs wait for the host, which launches a step more slowly than they run it; "
                "longer sequences, a larger train.micro_batch"
                f"{' or fewer GPUs' * (plan.dims.workers > 1)} use them better"
            )
        if isinstance(config.sparsity, BlockTopkSettings) and config.sparsity.score == "learned":
            shown.append(
                "block_topk updates its maps once for each micro-batch: steps take longer than "
                "this in the first 113 micro-batches, in which it updates them 8 times (the "
                "first: 128)"
            )
        if plan.dims.tp > 1 or plan.dims.pp > 1:
            shown.append("tensor and pipeline parallelism: no measurement on GPUs was compared")
        if plan.search is not None and plan.search.chosen is not None:
            chosen = plan.search.chosen.overrides or "the defaults"
            shown.append(f"train.memory=auto chooses {chosen}")
        if experts:
            degree, top_k = dealt_over(plan), config.model.moe.top_k
            busiest = self.loads.busiest(experts, top_k, degree)
            shown.append(
                f"experts: loads {self.loads.source}; the busiest of {degree} workers computes "
                f"{busiest:.2f} times the mean; times follow from FLOP, bytes and rates, some of "
                "which are guesses; memory assumes equal loads"
            )
        beyond = beyond_reach(config)
        return (*self.attention.remarks, *shown, *filter(None, [beyond]))


def plan_on(cluster: Cluster, config: Config, *, workers: int, **topology: Any) -> RunPlan:
    """Plan a training run on ``workers`` GPUs of a cluster. topology: replaces settings.

    Raises:
        ConfigError: settings contradict each other, or no kernel supports the run.
    """
    dtype, device = config.train.dtype, config.topology.device
    if dtype not in ("auto", "bfloat16"):
        raise ConfigError(f"train.dtype={dtype}: no times were measured; allowed: auto, bfloat16")
    if cluster.gpu.is_cpu or device == "cpu":
        allowed = "cpu" if cluster.gpu.is_cpu else "auto, cuda"
        raise ConfigError(
            f"topology.device={device}: {cluster.name} has {cluster.gpu.name}; allowed: {allowed}"
        )
    config = config.changed(topology={"workers": workers, **topology})
    return make_plan(config, Hardware.of_cluster(cluster)).dealt


def evaluate(
    cluster: Cluster,
    scenario: Scenario,
    plan: RunPlan,
    *,
    number: int = 0,
    rows: bool = False,
    bounds: bool = True,
    recompute: Recompute | None = None,
) -> PredictedScenario:
    """Predict a training run.

    recompute: the part of attention that the prediction recomputes; None for ``plan.recompute``.

    Raises:
        ConfigError: the configuration is impossible, or the calibration has no times of the kernel.
    """
    again = plan.recompute if recompute is None else recompute
    details = {"recompute": again, "number": number, "rows": rows, "bounds": bounds}
    attention = _attention_of(cluster, scenario, plan, **details)
    return with_step(cluster, scenario, plan, attention, bounds=bounds)


def _attention_of(
    cluster: Cluster, scenario: Scenario, plan: RunPlan, **details: Any
) -> Prediction:
    per_node = plan.environment.context_per_node
    setup = ReplaySetup(plan.layout.name, plan.exchange.name, plan.dims.cp, per_node)
    dense = None if plan.dense_kernel is None else plan.dense_kernel[0]
    details |= {"kernel": plan.kernel, "dense_kernel": dense, "choice": plan.exchange}
    return _predict_slowest(cluster, scenario, setup, plan.dims.tp, **details)


def _predict_slowest(
    cluster: Cluster, scenario: Scenario, setup: ReplaySetup, degree: int, **details: Any
) -> Prediction:
    """Predict the slowest context group, with the heads of the slowest tensor coordinate."""
    of_groups, workload = cluster_of_groups(cluster, degree), scenario.problem
    # A drawn or recorded index has other pairs on each head.
    places = 1 if workload.first_index is None else degree

    def predict_group(slow: Mapping[int, float]) -> Prediction:
        predictions = (
            predict(
                of_groups,
                workload.part(place, degree),
                setup,
                slow=slow,
                calibration=scenario.calibration,
                variant=scenario.variant,
                **details,
            )
            for place in range(places)
        )
        return max(predictions, key=lambda prediction: prediction.duration.value)

    # The slow workers of each context group with one, and of the first if there is none. A tensor
    # group is as slow as its slowest rank.
    slow: dict[int, dict[int, float]] = {}
    for rank, factor in sorted(scenario.slow.items()):
        group, place = divmod(rank // degree, setup.workers)
        of_group = slow.setdefault(group, {})
        of_group[place] = max(factor, of_group.get(place, 0.0))
    by_group = {group: predict_group(ranks) for group, ranks in (slow or {0: {}}).items()}
    group = max(by_group, key=lambda group: by_group[group].duration.value)
    slowest, first = by_group[group], group * setup.workers
    if group:
        ranks = f"ranks {first} to {first + setup.workers - 1}; its ranks count from 0"
        remark = f"shows the slowest context group, {ranks}"
        slowest = replace(slowest, remarks=(*slowest.remarks, remark))
    if degree == 1:
        return slowest
    # The density is that of all heads, as a run measures it.
    facts = {**slowest.facts, "tp": degree, "density": workload.density}
    return replace(slowest, facts=facts)


def predict_training(
    cluster: Cluster,
    scenario: Scenario,
    workers: int,
    layout: str,
    exchange: str,
    *,
    number: int = 0,
    rows: bool = False,
) -> PredictedScenario:
    """Plan a training run with this layout and exchange, and predict it."""
    config, topology = scenario.config, scenario.config.topology
    context = topology.context_parallel
    sharing = topology.tensor_parallel * topology.pipeline_parallel
    shared_by = context if isinstance(context, int) else workers // sharing
    check_enough_blocks(config, layout, workers, shared_by)
    plan = plan_on(cluster, config, workers=workers, layout=layout, exchange=exchange)
    return evaluate(cluster, scenario, plan, number=number, rows=rows)


def predict_attention_alone(
    cluster: Cluster,
    scenario: Scenario,
    layout: str,
    exchange: str,
    *,
    workers: int,
    planned: bool = True,
    **details: Any,
) -> Prediction:
    """Predict a layer's attention without its training step.

    planned: whether the configuration describes a whole training run, and not only a recording's
        topology and kernel.
    """
    config, topology = scenario.config, scenario.config.topology
    given, context = topology.gpus_per_node, topology.context_parallel
    per_node = given if isinstance(given, int) else min(cluster.gpus_per_node, workers)
    kernel = None if config.train.kernel == "auto" else config.train.kernel
    if not planned:
        setup = ReplaySetup(layout, exchange, workers, per_node)
        return _predict_slowest(cluster, scenario, setup, 1, kernel=kernel, **details)
    degree, stages = topology.tensor_parallel, topology.pipeline_parallel
    if per_node % degree or workers % degree:
        raise ConfigError(
            f"topology.tensor_parallel={degree}: must divide the {per_node} workers of a node"
        )
    groups, rest = divmod(workers // degree, stages)
    if rest:
        raise ConfigError(f"topology.pipeline_parallel={stages}: must divide {workers // degree}")
    context = context if isinstance(context, int) else groups
    check_enough_blocks(config, layout, groups, context)
    if topology.device == "cpu":
        # There is no plan for CPUs. The cluster's kernels and links price attention.
        if groups % context:
            why = f"must divide the {groups} workers"
            raise ConfigError(f"topology.context_parallel={context}: {why}")
        setup = ReplaySetup(layout, exchange, context, min(per_node // degree, context), topology)
        return _predict_slowest(cluster, scenario, setup, degree, kernel=kernel, **details)
    plan = plan_on(cluster, config, workers=workers, layout=layout, exchange=exchange)
    return _attention_of(cluster, scenario, plan, **details)


def with_step(
    cluster: Cluster,
    scenario: Scenario,
    plan: RunPlan,
    attention: Prediction,
    *,
    bounds: bool = True,
) -> PredictedScenario:
    """Predict a step of a plan from the attention of a layer, recomputed as the plan does."""
    step = predict_step(
        cluster, plan, attention, scenario.slow, bounds=bounds, loads=scenario.loads
    )
    return PredictedScenario(plan, attention, step, scenario.loads)


def check_enough_blocks(config: Config, layout: str, workers: int, context: int) -> None:
    """Raise InvalidSetup if a sequence has fewer blocks than a context group has workers."""
    setup, stripe = ReplaySetup(layout, "auto", workers, 1), config.topology.block_size
    require_enough_blocks(setup, config.seq, config.sparsity.block, stripe, context)


def train_line(
    cluster: Cluster, plan: RunPlan, words: Sequence[str], changes: Mapping[str, Any]
) -> str:
    """Return the command that starts a training run. With several nodes, run it on each node."""
    # State the predicted memory settings, because train.memory=auto might choose others.
    # The numbers of GPUs follow from the launch, not from the description of the cluster.
    replaced = (*changes, "topology.workers", "topology.gpus_per_node", "train.memory")
    kept = [w for w in words if w.partition("=")[0] not in replaced]
    kept = [word for word in kept if word != f"topology={cluster.name}"]
    settings = " ".join([*kept, *(f"{key}={value}" for key, value in changes.items())])
    environment = plan.environment
    if environment.nodes == 1:
        return f"mtrain train {settings} topology.workers={environment.dims.workers}"
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
    each = min(environment.dims.workers, cluster.gpus_per_node)
    nodes = environment.dims.workers // each
    workers = f"--nnodes {nodes} --nproc-per-node {each}"
    return f"torchrun {workers} {rendezvous} -m mtrain_cli train {settings}"


def estimate_step(plan: RunPlan) -> StepEstimate:
    """Estimate a step as `mtrain simulate` predicts it; on a CPU without a time."""
    config, on_cpu = plan.config, plan.environment.device == "cpu"
    if config.model.is_foreign:
        return StepEstimate(None)
    try:
        pairs = PairSource.of(config)
        workload = pairs.problem(config)
    except ConfigError:
        known = config.sparsity.known_density(config.seq)
        why = f"sparsity={config.sparsity.pattern} has no synthetic index; `mtrain simulate "
        return StepEstimate(known, problem="" if on_cpu else f"{why}--index` takes a recorded one")
    drawn = pairs.describe(config) if pairs.name == CLUSTERED else ""
    if on_cpu:
        return StepEstimate(workload.density, drawn)
    cluster = _cluster_of(plan)
    problem = ""
    if cluster is None:
        alone = plan.environment.nodes == 1
        has = f"a node with {plan.dims.workers}" if alone else "several nodes of"
        problem = f"no cluster of mtrain has {has} {plan.hardware.gpu}; give topology.cluster=FILE"
    elif plan.dtype != "bfloat16":
        problem = f"kernels were measured in bfloat16, not in {plan.dtype}"
    elif plan.dims.cp > MOST_CONTEXT and (
        config.sparsity.bitmap or config.mask.kind != "causal" or config.data.mask_key is not None
    ):
        problem = f"{plan.dims.cp} workers share a sequence; `mtrain simulate` takes minutes"
    else:
        try:
            found = evaluate(cluster, Scenario(config, workload), plan.dealt)
            step, density = found.step.seconds, found.attention.facts["density"]
            return StepEstimate(density, drawn, cluster.name, (step.value, step.low, step.high))
        except ConfigError as error:
            problem = str(error)
    return StepEstimate(workload.density, drawn, problem=problem)


def _cluster_of(plan: RunPlan) -> Cluster | None:
    """Return the cluster that the settings name, or else a shipped one with the plan's GPUs."""
    given, workers = plan.config.topology.cluster, plan.dims.workers
    for name in ([] if given == "auto" else [given]) + list(shipped()):
        cluster = load_cluster(name)
        links_all = workers <= cluster.gpus_per_node or cluster.outer is not None
        if cluster.gpu.name == plan.hardware.gpu and links_all:
            return cluster
    return None
