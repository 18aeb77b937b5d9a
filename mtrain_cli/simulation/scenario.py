"""Predict a training run on a cluster: its query-key pairs, its plan, and the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.mask_rule import FullLayers, MaskRule
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.pattern_settings import PATTERNS, FixedSettings, VerticalSlashSettings
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.calibration import VALUE, Calibration
from mtrain_cli.simulation.expert_exchange import dealt_over
from mtrain_cli.simulation.families import FAMILIES, IndexFamily
from mtrain_cli.simulation.predicted_step import PredictedStep, predict_step
from mtrain_cli.simulation.prediction import Prediction, predict
from mtrain_cli.simulation.router_loads import ExpertLoads
from mtrain_cli.simulation.tensor_cost import cluster_of_groups
from mtrain_cli.simulation.timeline import Disturbances
from mtrain_cli.simulation.what_if import ReplaySetup, require_enough_blocks
from mtrain_cli.simulation.workload import AttentionWorkload
from mtrain_cli.sparsity.fixed import make_pattern
from mtrain_cli.training.first_masks import first_masks
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.initial_weights import beyond_reach
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.run_plan import RunPlan

DENSE, FIXED, CLUSTERED = "dense", "fixed", "clustered"
DENSITY, COLUMNS = 0.05, 2048  # of a synthetic index, where neither pattern nor user gives them
_KEPT = 8  # number of layers whose indices are cached, because cases of one command share them
_LEAST_COLUMNS = 8  # the smallest number of columns of a configuration with slashes and columns


@dataclass(frozen=True)
class PairSource:
    """The query-key pairs that a training run computes.

    name: ``dense``, ``fixed`` (indices drawn by the pattern ``fixed``), or an index family.
    density, columns, fewest, most: see `IndexFamily`.
    layers: number of layers whose indices are drawn. These layers stand for all layers, or for all
        sparse layers under ``sparsity.dense_layers``.
    """

    name: str
    density: float = DENSITY
    columns: int = COLUMNS
    layers: int = 1
    fewest: int = 1
    most: int = 0

    @staticmethod
    def of(
        config: Config | None,
        layers: int = 1,
        family: str | None = None,
        density: float | None = None,
        columns: int | None = None,
    ) -> PairSource:
        """Return the pairs that a prediction of a training run assumes.

        Args:
            config: its pattern bounds the pairs; None for no bounds.
            family: index family of a pattern that depends on the data; None for `CLUSTERED`.
            density, columns: as typed; None for what the pattern says, or else the defaults.

        Raises:
            ConfigError: there are no synthetic indices of the pattern.
        """
        bounds: tuple[int, int] = (1, 0)
        if config is not None:
            settings = config.sparsity
            if settings.pattern in (DENSE, FIXED):
                return PairSource(settings.pattern, layers=layers)
            if settings.bitmap:
                raise ConfigError(
                    f"sparsity={settings.pattern}: there are no synthetic indices for this "
                    "pattern; give --index FILE from a profile of a run with "
                    f"sparsity={settings.pattern}"
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
        return PairSource(family or CLUSTERED, density, columns, layers, *bounds)

    def most_covered(self, config: Config) -> float:
        """Return the share of the causal blocks that the longest slashes within `most` cover."""
        blocks = _blocks(config)
        slashes = min(self.most, blocks) or blocks
        return slashes * (2 * blocks - slashes + 1) / (blocks * (blocks + 1))

    def describe(self, config: Config) -> str:
        """Describe drawn pairs: ``slashes on 5% of the blocks, plus 2,048 columns per head``."""
        covered = self.most_covered(config)
        share = f"{'at most ' * (covered < self.density)}{100 * min(self.density, covered):.3g}%"
        columns = f"{self.columns:,} column{'' if self.columns == 1 else 's'}"
        return f"slashes on {share} of the blocks, plus {columns} per head"

    def sparsity(self) -> list[str]:
        """Return sparsity settings for a plan that computes about as many query-key pairs.

        A plan's memory and exchange depend on these settings.
        """
        if self.name == DENSE:
            return []
        if self.columns < _LEAST_COLUMNS:
            columns = f"sparsity.columns={self.columns}"
            return ["sparsity=fixed", f"sparsity.density={self.density:g}", columns]
        fewest = [f"sparsity.min_columns={self.columns}"] if self.columns < 64 else []
        pattern = f"sparsity={VerticalSlashSettings.name}"
        return [pattern, f"sparsity.max_columns={self.columns}", *fewest]

    def problem(self, config: Config) -> AttentionWorkload:
        """Return the workload of one micro-batch, for all heads of the model.

        Each sequence is a single document, unless the data bring masks and can be read. Then it is
        the micro-batch with the median number of pairs, of the first ones of the data.
        """
        model, stripe = config.model, config.topology.block_size
        sequences, layers, full = config.train.micro_batch, range(self.layers), None
        rules = MaskRule.of(config).by_layers(model.num_layers)
        mask, *others = (rule.undivided(config.seq, config.seq) for rule, _ in rules)
        read, masks = first_masks(config), (mask,) * sequences
        if read is not None and read.masks:
            masks = read.typical
        if others:
            layers = range(model.num_layers)
            numbers = frozenset(filter(config.mask.is_full, layers))
            full = FullLayers((others[0],) * sequences, numbers, model.num_layers)
        recorded_as = RecordedSetup(
            seq=config.seq,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype_bytes=_bytes(config),
            workers=1,
            per_node=1,
            layout=config.layout,
            exchange=config.topology.exchange,
            block_size=stripe,
            chunk=config.topology.chunk,
        )
        fixed = config.sparsity if self.name == FIXED else None
        workload = AttentionWorkload(
            recorded_as,
            masks,
            tuple(layers),
            lru_cache(_KEPT)(self._draw(config)),
            self.name,
            -1 if fixed is None else fixed.column_bound or 0,
            # A layer draws its `fixed` index once, so no step spends time on estimating it.
            estimated=fixed is None,
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
        bounds = {"fewest": self.fewest, "most": self.most}
        family = IndexFamily(self.name, self.density, columns, block, config.seed, **bounds)

        def draw(layer: int) -> VerticalSlash:
            one = family.index(layer, config.seq, heads)
            slashes, columns = (
                torch.cat([lines] * sequences) for lines in (one.slashes, one.columns)
            )
            return VerticalSlash(one.block, one.blocks, slashes, columns)

        return draw


def _blocks(config: Config) -> int:
    """Return the number of blocks of an index that `PairSource` draws."""
    return -(-config.seq // (config.sparsity.block or config.topology.block_size))


def _bytes(config: Config) -> int:
    name = config.train.dtype
    return 4 if name == "float32" or (name == "auto" and config.topology.device == "cpu") else 2


@dataclass(frozen=True)
class Scenario:
    """A training run to predict.

    kernel: replaces ``train.kernel`` unless None.
    words: settings as the user typed them.
    """

    config: Config
    problem: AttentionWorkload
    kernel: str | None = None
    calibration: Calibration | None = None
    conditions: Disturbances = field(default_factory=Disturbances)
    words: tuple[str, ...] = ()
    loads: ExpertLoads = field(default_factory=ExpertLoads)

    def sets(self, key: str) -> bool:
        """Return whether the user set a key."""
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
        """Whether attention computes every pair that the mask allows.

        MFU is defined only for dense attention.
        """
        return self.attention.facts["pattern"] == DENSE

    @property
    def remarks(self) -> tuple[str, ...]:
        costs, pattern = self.attention.costs.get(VALUE), self.attention.facts["pattern"]
        times = None if costs is None else costs.kernels.non_attention
        source = "the cluster's constants give the times of matrix products, memory and links"
        if times is not None and times.dtype == self.plan.dtype:
            source = (
                "layers and loss take measured times (`mtrain profile non-attention`); the "
                "cluster's constants give the times of links and optimizer"
            )
            if self.plan.config.model.moe.experts:
                source = source.replace(
                    "layers and loss take", "layers without experts and loss take"
                )
        own_masks = self.plan.config.data.mask_key is not None
        documents = "" if own_masks else " every sequence is one document;"
        remarks = [
            *self.attention.remarks,
            f"steps: {source};{documents} loading data and writing checkpoints take no time",
        ]
        causal = self.plan.config.mask.kind == "causal" and not own_masks
        if self.dense and causal and self.plan.config.data.document_mask:
            remarks.append(
                "a sequence of mtrain train may hold several documents (data.document_mask=true), "
                "whose uneven work topology.layout=auto balances with striped; if your sequences "
                "are single documents, set topology.layout"
            )
        if pattern in FAMILIES:
            remarks.append(
                f"the computed pairs are drawn at random ({pattern}), and the balance between "
                "workers depends on them; to use the pairs of a profile, give --index"
            )
        if self.plan.search is not None and self.plan.search.chosen is not None:
            remarks.append(
                f"train.memory=auto chooses {self.plan.search.chosen.overrides or 'the defaults'}"
            )
        if self.plan.dims.tp > 1:
            remarks.append(
                "topology.tensor_parallel: messages take the times of the cluster's collectives, "
                "and matrix products the rates of whole layers; neither was compared with a "
                "measurement of tensor parallelism on GPUs"
            )
        if self.plan.config.model.moe.experts:
            remarks.append(self._of_experts())
        if self.plan.dims.pp > 1:
            remarks.append(
                "topology.pipeline_parallel: the times of the stages are played through the "
                "schedule; no measurement of a pipeline on GPUs was compared"
            )
        if self.plan.config.train.compile == False:  # noqa: E712 - auto is a word
            remarks.append(
                "train.compile=false: element-wise kernels take 2.8 times as long as compiled ones "
                "(measured on one H200 at 32K tokens)"
            )
        if beyond := beyond_reach(self.plan.config):
            remarks.append(beyond)
        return tuple(remarks)

    def _of_experts(self) -> str:
        moe, degree = self.plan.config.model.moe, dealt_over(self.plan)
        text = f"experts: loads {self.loads.source}"
        if not self.loads.shares:
            largest = self.loads.largest(moe.experts, moe.top_k)
            text += f" (largest {largest:.2f} times the mean)"
        text += (
            "; the times of grouped products, routers and kernels of experts follow from FLOP, "
            "bytes and rates; some rates are guesses"
        )
        if degree == 1:
            return f"{text}; every worker computes with all experts"
        busiest = self.loads.busiest(moe.experts, moe.top_k, degree)
        text += f"; the busiest of {degree} workers computes {busiest:.2f} times the mean"
        if not self.loads.shares and self.loads.exponent:
            text += ", if popular experts are dealt at random; best and worst deal them evenly and "
            text += "to one worker"
        return f"{text}; memory assumes equal loads"


def plan_on(
    cluster: Cluster, config: Config, *, workers: int, kernel: str | None = None, **topology: Any
) -> RunPlan:
    """Plan a training run on ``workers`` GPUs of a cluster.

    topology: settings that replace those of ``config.topology``, such as ``layout``.

    Raises:
        ConfigError: settings contradict each other, or no kernel supports the run.
    """
    if config.train.dtype not in ("auto", "bfloat16"):
        raise ConfigError(
            f"train.dtype={config.train.dtype}: kernels were measured in bfloat16 only; allowed: "
            "auto, bfloat16"
        )
    if cluster.gpu.is_cpu:
        raise ConfigError(
            f"topology.device={config.topology.device}: {cluster.name} has {cluster.gpu.name}, a "
            "CPU; allowed: cpu"
        )
    if config.topology.device == "cpu":
        raise ConfigError(f"topology.device=cpu: {cluster.name} has GPUs; allowed: auto, cuda")
    config = config.changed(
        topology={"workers": workers, **topology}, train={"kernel": kernel or config.train.kernel}
    )
    return make_plan(config, Hardware.of_cluster(cluster)).dealt


def setup_of(plan: RunPlan) -> ReplaySetup:
    """Return the setup to replay for one context group of a plan."""
    per_node = plan.environment.context_per_node
    return ReplaySetup(plan.layout.name, plan.exchange.name, plan.dims.cp, per_node)


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
        InvalidSetup: the configuration is impossible.
        ConfigError: the calibration has no times of the kernel, or the index is damaged.
    """
    what = plan.recompute if recompute is None else recompute
    attention = _predict_slowest(
        cluster,
        scenario.problem,
        setup_of(plan),
        scenario.conditions,
        plan.dims.tp,
        kernel=plan.kernel,
        dense_kernel=None if plan.dense_kernel is None else plan.dense_kernel[0],
        calibration=scenario.calibration,
        recompute=what,
        number=number,
        rows=rows,
        bounds=bounds,
        choice=plan.exchange,
    )
    return with_step(cluster, scenario, plan, attention, bounds=bounds)


def _predict_slowest(
    cluster: Cluster,
    workload: AttentionWorkload,
    setup: ReplaySetup,
    conditions: Disturbances,
    degree: int,
    **details: Any,
) -> Prediction:
    """Predict the slowest context group, with the heads of the slowest tensor coordinate.

    Workers of a tensor group wait for one another in every layer. Without an index, all of them
    have equal work.
    """
    of_groups = cluster_of_groups(cluster, degree)
    # A drawn or recorded index has other pairs on each head.
    places = 1 if workload.index(workload.layers[0]) is None else degree

    def predict_group(conditions: Disturbances) -> Prediction:
        found = (
            predict(
                of_groups, workload.part(place, degree), setup, conditions=conditions, **details
            )
            for place in range(places)
        )
        return max(found, key=lambda prediction: prediction.duration.value)

    slowest = slowest_group(conditions.of_tensor_groups(degree), setup.workers, predict_group)
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
    """Plan a training run with this layout and exchange, and predict it.

    Raises:
        InvalidSetup, ConfigError: the configuration is impossible.
    """
    topology = scenario.config.topology
    context = topology.context_parallel
    sharing = topology.tensor_parallel * topology.pipeline_parallel
    shared_by = context if isinstance(context, int) else workers // sharing
    check_enough_blocks(scenario.config, layout, workers, shared_by)
    plan = plan_on(
        cluster,
        scenario.config,
        workers=workers,
        kernel=scenario.kernel,
        layout=layout,
        exchange=exchange,
    )
    return evaluate(cluster, scenario, plan, number=number, rows=rows)


def predict_attention_alone(
    cluster: Cluster,
    workload: AttentionWorkload,
    config: Config | None,
    layout: str,
    exchange: str,
    *,
    workers: int,
    per_node: int | None,
    kernel: str | None,
    conditions: Disturbances,
    **details: Any,
) -> Prediction:
    """Predict a layer's attention without its training step.

    Args:
        config: the configuration that sets topology and kernel; None if only a recording is given.
        per_node: number of workers per node; None for the cluster's number.
        kernel: replaces ``train.kernel`` unless None.

    Raises:
        InvalidSetup, ConfigError: the configuration is impossible.
    """
    per_node = per_node or min(cluster.gpus_per_node, workers)
    choice, degree, dense_kernel = None, 1, None
    if config is None:
        setup = ReplaySetup(layout, exchange, workers, per_node)
    else:
        of_all, degree = workers, config.topology.tensor_parallel
        workers = _tensor_groups_of_a_stage(config, workers, per_node)
        per_node //= degree
        given = config.topology.context_parallel
        context = given if isinstance(given, int) else workers
        check_enough_blocks(config, layout, workers, context)
        if config.topology.device == "cpu":
            # There is no plan for CPUs. The cluster's kernels and links price attention.
            if workers % context:
                raise ConfigError(
                    f"topology.context_parallel={context}: must divide the {workers} workers"
                )
            each = min(per_node, context)
            setup = ReplaySetup(layout, exchange, context, each, config.topology)
            kernel = kernel or (None if config.train.kernel == "auto" else config.train.kernel)
        else:
            plan = plan_on(
                cluster, config, workers=of_all, kernel=kernel, layout=layout, exchange=exchange
            )
            setup, kernel, choice = setup_of(plan), plan.kernel, plan.exchange
            dense_kernel = None if plan.dense_kernel is None else plan.dense_kernel[0]
    return _predict_slowest(
        cluster,
        workload,
        setup,
        conditions,
        degree,
        kernel=kernel,
        dense_kernel=dense_kernel,
        choice=choice,
        **details,
    )


def _tensor_groups_of_a_stage(config: Config, workers: int, per_node: int) -> int:
    """Return the number of tensor groups, or of workers, on a stage of the pipeline."""
    degree, stages = config.topology.tensor_parallel, config.topology.pipeline_parallel
    if per_node % degree or workers % degree:
        raise ConfigError(
            f"topology.tensor_parallel={degree}: must divide the {per_node} workers of a node"
        )
    if workers // degree % stages:
        raise ConfigError(
            f"topology.pipeline_parallel={stages}: must divide the {workers // degree} workers"
        )
    return workers // (degree * stages)


def slowest_group(
    conditions: Disturbances, size: int, predict_group: Callable[..., Prediction]
) -> Prediction:
    """Predict attention for the slowest context group. The other groups wait for this group.

    All groups have the same work, but disturbances slow some GPUs.

    Args:
        size: number of ranks in a group.
        predict_group: function that predicts one group. Its argument ``conditions`` holds the
            disturbances of this group, with ranks numbered from 0.
    """
    predictions = {
        group: predict_group(conditions=own) for group, own in conditions.of_groups(size).items()
    }
    group = max(predictions, key=lambda group: predictions[group].duration.value)
    slowest = predictions[group]
    if not group:
        return slowest
    first = group * size
    remark = (
        f"shows the slowest context group, ranks {first} to {first + size - 1}; its ranks count "
        "from 0"
    )
    return replace(slowest, remarks=(*slowest.remarks, remark))


def with_step(
    cluster: Cluster,
    scenario: Scenario,
    plan: RunPlan,
    attention: Prediction,
    *,
    bounds: bool = True,
) -> PredictedScenario:
    """Predict a step of a plan from a prediction of attention.

    attention: prediction of one layer's attention. Several plans may share it. If ``plan``
        recomputes attention, the prediction must have a pass `RECOMPUTE` for ``plan.recompute``.
    """
    step = predict_step(
        cluster, plan, attention, scenario.conditions, bounds=bounds, loads=scenario.loads
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
    described = (f"topology={cluster.name}", f"topology.cluster={cluster.name}")
    kept = [w for w in words if w.partition("=")[0] not in replaced and w not in described]
    settings = " ".join([*kept, *(f"{key}={value}" for key, value in changes.items())])
    environment = plan.environment
    if environment.nodes == 1:
        return f"mtrain train {settings} topology.workers={environment.dims.workers}"
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
    each = min(environment.dims.workers, cluster.gpus_per_node)
    nodes = environment.dims.workers // each
    workers = f"--nnodes {nodes} --nproc-per-node {each}"
    return f"torchrun {workers} {rendezvous} -m mtrain_cli train {settings}"


def pattern_words(label: str) -> list[str]:
    """Return settings for a training run with the same pattern as recorded indices.

    label: label of the recorded indices. A label begins with the name of a pattern.
    """
    name = label.partition(" ")[0]
    return [f"sparsity={name}"] if name in PATTERNS and name != DENSE else []
