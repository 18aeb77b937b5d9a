"""Trainings on a cluster: which pairs they compute, what they plan, and how long a step of theirs takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.schema import PATTERNS, Config, ConfigError
from mtrain_cli.profiling.index_file import RecordedSetup
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
_KEPT = 8  # indices of layers
_FEWEST_BARS = 8  # of vertical_slash


@dataclass(frozen=True)
class PairSource:
    """Which pairs are computed: ``dense``, ``fixed`` (as the pattern of that name draws them), or the name of a family with its numbers.
    layers: indices of how many layers are drawn; the others are taken to be like these. fewest, most: diagonals of a head of a family.
    """

    name: str
    density: float = 0.05
    columns: int = 2048
    layers: int = 1
    fewest: int = 1
    most: int = 0

    def sparsity(self) -> list[str]:
        """Settings of a training that computes about as much: memory and exchange depend on these."""
        if self.name == DENSE:
            return []
        if self.columns < _FEWEST_BARS:
            return [
                "sparsity=fixed",
                f"sparsity.density={self.density:g}",
                f"sparsity.columns={self.columns}",
            ]
        fewest = [f"sparsity.min_columns={self.columns}"] if self.columns < 64 else []
        return ["sparsity=vertical_slash", f"sparsity.max_columns={self.columns}", *fewest]

    def problem(self, config: Config) -> AttentionWorkload:
        """Of one micro-batch, each of its sequences one document."""
        model, block, sequences = config.model, config.topology.block_size, config.train.micro_batch
        made = RecordedSetup(
            seq=config.seq, heads=model.num_heads, kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype_bytes=_bytes(config),
            workers=1, per_node=1, layout=config.layout, exchange=config.topology.exchange, block_size=block,
        )  # fmt: skip
        masks = (SequenceMask.causal(config.seq, config.seq),) * sequences
        block = config.sparsity.block or block
        # What `fixed` draws costs nothing in a step: a layer keeps it.
        return AttentionWorkload(
            made, masks, tuple(range(self.layers)), _remembered(self._draw(config, block)), self.name,
            int(config.sparsity.columns or 0) if self.name == FIXED else -1, estimated=self.name != FIXED, model=model.name,
        )  # fmt: skip

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
                seed=config.seed + 1000 * layer, batch=sequences, heads=heads, seq=config.seq, block=block,
                slashes=sparsity.slashes or 0, columns=sparsity.columns or 0, density=sparsity.density or None,
            )  # fmt: skip
        family = IndexFamily(
            self.name,
            self.density,
            min(self.columns, config.seq),
            block,
            config.seed,
            fewest=self.fewest,
            most=self.most,
        )

        def drawn(layer: int) -> VerticalSlash:
            one = family.index(layer, config.seq, heads)
            slashes, columns = (
                torch.cat([lines] * sequences) for lines in (one.slashes, one.columns)
            )
            return VerticalSlash(one.block, one.blocks, slashes, columns)

        return drawn


def _bytes(config: Config) -> int:
    """Of a number, as `training.resolution.compute_dtype` has it for the device that the settings name."""
    name = config.train.dtype
    return 4 if name == "float32" or (name == "auto" and config.topology.device == "cpu") else 2


def _remembered(draw: Callable[[int], Index | None]) -> Callable[[int], Index | None]:
    """The cases of one run share the indices of all layers, unless these are many."""
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
    """A training to predict. problem: of its configuration. kernel: instead of ``train.kernel``. words: its settings, as they are typed."""

    config: Config
    problem: AttentionWorkload
    kernel: str | None = None
    calibration: Calibration | None = None
    conditions: Disturbances = field(default_factory=Disturbances)
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class PredictedScenario:
    """One training, predicted."""

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
        """Whether every pair that the mask allows is computed, as MFU takes it; as in training an index has HFU alone."""
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
        what = (
            "layers and the loss as measured (profile non-attention), links and optimizer"
            if measured
            else "matrix products, memory and links"
        )
        found = [
            *self.attention.remarks,
            f"steps: {what} by the constants of the cluster; every sequence is one document; "
            "loading data and writing checkpoints are not "
            "in them",
        ]
        if self.attention.facts["pattern"] in FAMILIES:
            family = self.attention.facts["pattern"]
            found.append(
                f"which pairs are computed is drawn ({family}), and balance depends on it; --index "
                "takes those of a profile"
            )
        if self.plan.search is not None and self.plan.search.chosen is not None:
            found.append(
                f"train.memory=auto takes {self.plan.search.chosen.words or 'the defaults'}"
            )
        if train.compile == False:  # noqa: E712 - auto is a word
            found.append(
                "train.compile=false: element-wise kernels take 2.8 times as long, as measured on "
                "one H200 at 32K"
            )
        return tuple(found)


def capability(gpu: str) -> tuple[int, int]:
    """CUDA compute capability by a GPU's name; Ampere's where it tells nothing."""
    if re.search(r"\b(GB|B)[23]00\b", gpu):
        return (10, 0)
    return (9, 0) if re.search(r"\bG?H(20|100|200|800)\b", gpu) else (8, 0)


def plan_on(
    cluster: Cluster, config: Config, *, workers: int, kernel: str | None = None, **topology: Any
) -> RunPlan:
    """The plan of a training on so many GPUs of a cluster. topology: what differs from that of ``config``, such as ``layout``.

    Raises:
        ConfigError: sizes do not fit each other, or no kernel serves the run.
    """
    if config.train.dtype not in ("auto", "bfloat16"):
        raise ConfigError(
            f"train.dtype={config.train.dtype}: kernels were measured in bfloat16 alone; allowed: "
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
    """What one context group of a plan does."""
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
    """recompute: as `prediction.predict`; otherwise where attention is computed again.

    Raises:
        Unfit: the configuration cannot be.
        ConfigError: its kernel has no times, or the index is damaged.
    """
    again = recomputes_attention(plan.config.train)

    def of_group(conditions: Disturbances) -> Prediction:
        return predict(
            cluster, scenario.problem, setup_of(plan), kernel=plan.kernel, calibration=scenario.calibration, recompute=recompute or again,
            conditions=conditions, number=number, rows=rows, bounds=bounds, choice=plan.exchange,
        )  # fmt: skip

    return with_step(
        cluster,
        scenario,
        plan,
        slowest_group(scenario.conditions, plan.environment.cp, of_group),
        bounds=bounds,
    )


def slowest_group(
    conditions: Disturbances, size: int, predicted: Callable[..., Prediction]
) -> Prediction:
    """The attention of the context group that takes longest, since the others wait for it: all have the same work, but not the same GPUs.
    size: ranks of a group. predicted: attention of a group, whose ``conditions`` are of its own ranks.
    """
    found = {group: predicted(conditions=of) for group, of in conditions.of_groups(size).items()}
    group = max(found, key=lambda group: found[group].duration.value)
    if not group:
        return found[group]
    first = group * size
    told = (
        f"the context group of ranks {first} to {first + size - 1} is played, which has the "
        "slowest; its ranks count from 0"
    )
    return replace(found[group], remarks=(*found[group].remarks, told))


def with_step(
    cluster: Cluster,
    scenario: Scenario,
    plan: RunPlan,
    attention: Prediction,
    *,
    bounds: bool = True,
) -> PredictedScenario:
    """The same attention in a step of another plan: another recomputation, with ``RECOMPUTE`` among its passes if attention is in it."""
    return PredictedScenario(
        plan, attention, predict_step(cluster, plan, attention, scenario.conditions, bounds=bounds)
    )


def check_dealt(config: Config, layout: str, workers: int, context: int) -> None:
    """Raises Unfit where there are fewer blocks than workers that share a sequence."""
    piece = config.sparsity.block or (config.topology.block_size if layout == "striped" else 1)
    if context * piece > config.seq:
        most = max(1, config.seq // piece)
        said = (
            f"{config.seq} tokens in blocks of {piece} cannot be dealt to "
            f"{'so many' if workers == context else context}; allowed"
        )
        raise InvalidSetup(
            ReplaySetup(layout, "auto", workers, 1), "workers", f"{said}: 1 to {most}"
        )


def train_line(
    cluster: Cluster, plan: RunPlan, words: Sequence[str], changes: Mapping[str, Any]
) -> str:
    """What to type for a training; on several nodes on each of them."""
    # What is said of memory is what was predicted: `auto` might choose something else.
    unsaid = (*changes, "topology.workers", "topology.gpus_per_node", "train.memory")
    kept = [word for word in words if word.partition("=")[0] not in unsaid]
    said = " ".join([*kept, *(f"{key}={value}" for key, value in changes.items())])
    environment = plan.environment
    if environment.nodes == 1:
        return f"mtrain train {said} topology.workers={environment.workers}"
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
    each = min(environment.workers, cluster.gpus_per_node)
    nodes = environment.workers // each
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {each} {rendezvous} -m mtrain_cli train {said}"
    )


def pattern_words(label: str) -> list[str]:
    """Settings of a training whose indices were recorded under so named a pattern."""
    name = label.partition(" ")[0]
    return [f"sparsity={name}"] if name in PATTERNS and name != DENSE else []
