"""Trainings on a cluster: the pairs that they compute, their plan, and the time of a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.schema import PATTERNS, Config, ConfigError
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.calibration import VALUE, Calibration
from mtrain_cli.simulation.cluster import Cluster, uneven_nodes
from mtrain_cli.simulation.families import FAMILIES, IndexFamily
from mtrain_cli.simulation.predicted_step import PredictedStep, predict_step
from mtrain_cli.simulation.prediction import AttentionWorkload, Prediction, predict
from mtrain_cli.simulation.timeline import Disturbances
from mtrain_cli.simulation.what_if import InvalidSetup, ReplaySetup
from mtrain_cli.sparsity.fixed import fixed_index
from mtrain_cli.training.flops import recomputes_attention
from mtrain_cli.training.memory import GIB
from mtrain_cli.training.run_plan import RunPlan, plan_for

DENSE, FIXED = "dense", "fixed"
_KEPT = 8  # layers whose indices are kept
_LEAST_COLUMNS = 8  # of vertical_slash


@dataclass(frozen=True)
class PairSource:
    """The pairs that a training computes.

    name: ``dense``, ``fixed`` (drawn as by the pattern of that name), or the name of an index
        family.
    density, columns, fewest, most: see `IndexFamily`.
    layers: layers whose indices are drawn; the others are assumed to be like these.
    """

    name: str
    density: float = 0.05
    columns: int = 2048
    layers: int = 1
    fewest: int = 1
    most: int = 0

    def sparsity(self) -> list[str]:
        """Return the settings of a training that computes about as much.

        Memory and the choice of an exchange depend on them.
        """
        if self.name == DENSE:
            return []
        if self.columns < _LEAST_COLUMNS:
            return [
                "sparsity=fixed",
                f"sparsity.density={self.density:g}",
                f"sparsity.columns={self.columns}",
            ]
        fewest = [f"sparsity.min_columns={self.columns}"] if self.columns < 64 else []
        return ["sparsity=vertical_slash", f"sparsity.max_columns={self.columns}", *fewest]

    def problem(self, config: Config) -> AttentionWorkload:
        """Return the workload of one micro-batch; each of its sequences is one document."""
        model, block, sequences = config.model, config.topology.block_size, config.train.micro_batch
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
            block_size=block,
        )
        masks = (SequenceMask.causal(config.seq, config.seq),) * sequences
        block = config.sparsity.block or block
        fixed = self.name == FIXED
        return AttentionWorkload(
            recorded_as,
            masks,
            tuple(range(self.layers)),
            _cached(self._draw(config, block)),
            self.name,
            int(config.sparsity.columns or 0) if fixed else -1,
            # a layer draws its `fixed` index once and keeps it: no cost a step
            estimated=not fixed,
            model=model.name,
        )

    def _draw(self, config: Config, block: int) -> Callable[[int], Index | None]:
        heads, sequences, sparsity = (
            config.model.num_heads,
            config.train.micro_batch,
            config.sparsity,
        )
        if self.name == DENSE:
            return lambda layer: None  # noqa: ARG005
        if self.name == FIXED:
            return lambda layer: fixed_index(
                seed=config.seed + 1000 * layer,
                batch=sequences,
                heads=heads,
                seq=config.seq,
                block=block,
                slashes=sparsity.slashes or 0,
                columns=sparsity.columns or 0,
                density=sparsity.density or None,
            )
        family = IndexFamily(
            self.name,
            self.density,
            min(self.columns, config.seq),
            block,
            config.seed,
            fewest=self.fewest,
            most=self.most,
        )

        def draw(layer: int) -> VerticalSlash:
            one = family.index(layer, config.seq, heads)
            slashes, columns = (
                torch.cat([lines] * sequences) for lines in (one.slashes, one.columns)
            )
            return VerticalSlash(one.block, one.blocks, slashes, columns)

        return draw


def _bytes(config: Config) -> int:
    """Bytes of a number, as `training.resolution.compute_dtype` chooses the dtype."""
    name = config.train.dtype
    return 4 if name == "float32" or (name == "auto" and config.topology.device == "cpu") else 2


def _cached(draw: Callable[[int], Index | None]) -> Callable[[int], Index | None]:
    """Cache the indices of a few layers: the cases of one run share them."""
    kept: dict[int, Any] = {}

    def of(layer: int) -> Index | None:
        if layer not in kept:
            if len(kept) >= _KEPT:
                kept.clear()
            kept[layer] = draw(layer)
        return kept[layer]

    return of


@dataclass(frozen=True)
class Scenario:
    """A training to predict.

    problem: its attention.
    kernel: replaces ``train.kernel``.
    words: its settings, as typed.
    """

    config: Config
    problem: AttentionWorkload
    kernel: str | None = None
    calibration: Calibration | None = None
    conditions: Disturbances = field(default_factory=Disturbances)
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class PredictedScenario:
    """The prediction of one training."""

    plan: RunPlan
    attention: Prediction
    step: PredictedStep

    @property
    def layout(self) -> str:
        return self.plan.layout.name

    @property
    def context(self) -> int:
        return self.plan.environment.cp

    @property
    def dense(self) -> bool:
        """Whether it computes every pair that the mask allows. If not, it has an HFU but no MFU."""
        return self.attention.facts["pattern"] == DENSE

    @property
    def remarks(self) -> tuple[str, ...]:
        train = self.plan.config.train
        costs = self.attention.costs.get(VALUE)
        measured = (
            costs is not None
            and costs.kernels.non_attention is not None
            and costs.kernels.non_attention.dtype == self.plan.dtype
        )
        source = (
            "layers and the loss as measured (profile non-attention), links and optimizer"
            if measured
            else "matrix products, memory and links"
        )
        remarks = [
            *self.attention.remarks,
            f"steps: {source} by the constants of the cluster; every sequence is one document; "
            "loading data and writing checkpoints are not in them",
        ]
        if self.attention.facts["pattern"] in FAMILIES:
            family = self.attention.facts["pattern"]
            remarks.append(
                f"which pairs are computed is drawn ({family}), and balance depends on it; --index "
                "takes those of a profile"
            )
        if self.plan.search is not None and self.plan.search.chosen is not None:
            remarks.append(
                f"train.memory=auto takes {self.plan.search.chosen.overrides or 'the defaults'}"
            )
        if train.compile == False:  # noqa: E712 - auto is a word
            remarks.append(
                "train.compile=false: element-wise kernels take 2.8 times as long, as measured on "
                "one H200 at 32K"
            )
        return tuple(remarks)


def capability(gpu: str) -> tuple[int, int]:
    """Return the CUDA compute capability of a GPU by its name; Ampere's if the name is unknown."""
    if re.search(r"\b(GB|B)[23]00\b", gpu):
        return (10, 0)
    return (9, 0) if re.search(r"\bG?H(20|100|200|800)\b", gpu) else (8, 0)


def plan_on(
    cluster: Cluster, config: Config, *, workers: int, kernel: str | None = None, **topology: Any
) -> RunPlan:
    """Plan a training on ``workers`` GPUs of a cluster.

    topology: values that replace those of ``config``, such as ``layout``.

    Raises:
        ConfigError: sizes do not fit each other, or no kernel serves the run.
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
    per_node = config.topology.gpus_per_node
    if per_node == "auto" and (why := uneven_nodes(cluster, workers)):
        raise ConfigError(f"topology.workers={workers}: {why}")
    topology = {
        "workers": workers,
        "gpus_per_node": min(cluster.gpus_per_node, workers) if per_node == "auto" else per_node,
        **topology,
    }
    config = replace(config, topology=replace(config.topology, **topology))
    return plan_for(
        config,
        gpu=cluster.gpu.name,
        capability=capability(cluster.gpu.name),
        capacity=round(cluster.gpu.hbm_gib.value * GIB),
        host=round(cluster.gpu.host_gib.value * GIB),
        kernel=kernel,
    )


def setup_of(plan: RunPlan) -> ReplaySetup:
    """Return the setup of one context group of a plan."""
    environment = plan.environment
    return ReplaySetup(
        plan.layout.name,
        plan.exchange.name,
        environment.cp,
        min(environment.workers_per_node, environment.cp),
    )


def evaluate(
    cluster: Cluster,
    scenario: Scenario,
    plan: RunPlan,
    *,
    number: int = 0,
    rows: bool = False,
    bounds: bool = True,
    recompute: bool = False,
) -> PredictedScenario:
    """Predict a training.

    recompute: also predict the recomputation of attention, even if the plan has none.

    Raises:
        InvalidSetup: the configuration is impossible.
        ConfigError: its kernel has no times, or the index is damaged.
    """
    recompute = recompute or recomputes_attention(plan.config.train)

    def predict_group(conditions: Disturbances) -> Prediction:
        return predict(
            cluster,
            scenario.problem,
            setup_of(plan),
            kernel=plan.kernel,
            calibration=scenario.calibration,
            recompute=recompute,
            conditions=conditions,
            number=number,
            rows=rows,
            bounds=bounds,
            choice=plan.exchange,
        )

    return with_step(
        cluster,
        scenario,
        plan,
        slowest_group(scenario.conditions, plan.environment.cp, predict_group),
        bounds=bounds,
    )


def slowest_group(
    conditions: Disturbances, size: int, predict_group: Callable[..., Prediction]
) -> Prediction:
    """Return the attention of the slowest context group: the other groups wait for it.

    All groups have the same work but, under disturbances, not equally fast GPUs.

    Args:
        size: ranks of a group.
        predict_group: predicts a group; its ``conditions`` count that group's ranks from 0.
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
        f"the context group of ranks {first} to {first + size - 1} is shown, the slowest one; its "
        "ranks count from 0"
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
    """Put attention into a step of a plan, which may recompute other parts than its own plan does.

    If the plan recomputes attention, ``RECOMPUTE`` must be among the passes.
    """
    return PredictedScenario(
        plan, attention, predict_step(cluster, plan, attention, scenario.conditions, bounds=bounds)
    )


def check_enough_blocks(config: Config, layout: str, workers: int, context: int) -> None:
    """Raise InvalidSetup if a sequence has fewer blocks than workers that share it."""
    piece = config.sparsity.block or (config.topology.block_size if layout == "striped" else 1)
    if context * piece > config.seq:
        most = max(1, config.seq // piece)
        sharing = "so many workers" if workers == context else f"{context} workers"
        raise InvalidSetup(
            ReplaySetup(layout, "auto", workers, 1),
            "workers",
            f"{config.seq} tokens in blocks of {piece} are too few for {sharing}; allowed: 1 to "
            f"{most}",
        )


def train_line(
    cluster: Cluster, plan: RunPlan, words: Sequence[str], changes: Mapping[str, Any]
) -> str:
    """Return the command that starts a training; with several nodes, the one for each node."""
    # Give the memory settings that were predicted: `auto` might choose others.
    replaced = (*changes, "topology.workers", "topology.gpus_per_node", "train.memory")
    kept = [word for word in words if word.partition("=")[0] not in replaced]
    settings = " ".join([*kept, *(f"{key}={value}" for key, value in changes.items())])
    environment = plan.environment
    if environment.nodes == 1:
        return f"mtrain train {settings} topology.workers={environment.workers}"
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
    each = min(environment.workers, cluster.gpus_per_node)
    nodes = environment.workers // each
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {each} {rendezvous} -m mtrain_cli train "
        f"{settings}"
    )


def pattern_words(label: str) -> list[str]:
    """Return the settings of a training whose indices were recorded under a pattern's label."""
    name = label.partition(" ")[0]
    return [f"sparsity={name}"] if name in PATTERNS and name != DENSE else []
