"""Predict the rows of published tables, on the clusters of their papers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from mtrain_cli.config.cluster import Cluster
from mtrain_cli.simulation.prediction import BoundedTime, PredictedPass, Prediction
from mtrain_cli.simulation.scenario import (
    PredictedScenario,
    Scenario,
    predict_attention_alone,
    predict_training,
)
from mtrain_cli.simulation.work_counts import FLOP_PER_PAIR
from mtrain_cli.training.memory import GIB
from mtrain_extras.studies.published import (
    COMPUTED,
    LESS,
    MEMORY,
    MESSAGES,
    MFU,
    RATE,
    REDUNDANT,
    RING,
    SPEED,
    SPEED_UP,
    STEP,
    WORK,
    WORKER,
    PublishedRow,
    PublishedTable,
    PublishedValue,
)
from mtrain_extras.studies.published_tables import StudyTable, StudyValue

T = TypeVar("T")
Scenarios = Callable[[PublishedRow], Scenario]  # composes the run of a row
Measured = Callable[[PublishedRow, str], tuple[float, str] | None]  # (value, hardware) of a row


@dataclass(frozen=True)
class _PredictedRow:
    row: PublishedRow
    cluster: Cluster
    scenario: Scenario

    @cached_property
    def step(self) -> PredictedScenario:
        row, cluster = self.row, self.cluster
        return predict_training(cluster, self.scenario, cluster.gpus, row.layout, row.exchange)

    @cached_property
    def attention(self) -> Prediction:
        if not self.row.attention_only:
            return self.step.attention
        row, cluster = self.row, self.cluster
        return predict_attention_alone(
            cluster, self.scenario, row.layout, row.exchange, workers=cluster.gpus
        )

    @property
    def duration(self) -> float:
        """The time that a speed-up compares: of a layer's attention, or of a token."""
        if self.row.attention_only:
            return self.attention.duration.value
        return 1 / self.step.step.tokens_per_second_per_gpu.value

    def degree(self, quantity: str) -> float:
        """Return an imbalance degree or a computation ratio, the mean of forward and backward."""
        passes = [self.attention.passes[name] for name in ("forward", "backward")]
        of_pass: dict[str, Callable[[PredictedPass], float]] = {
            WORKER: lambda one: one.time.worker,
            STEP: lambda one: one.time.step,
            COMPUTED: lambda one: one.computed,
            WORK: lambda one: one.work.worker,
        }
        return statistics.fmean(map(of_pass[quantity], passes))

    def bounded(self, quantity: str) -> BoundedTime:
        """Return what a quantity is predicted to be."""
        if quantity == RATE:
            return self.step.step.tokens_per_second_per_gpu
        if quantity == MFU:
            step = self.step.step
            share = 100 * step.mfu / step.tokens_per_second_per_gpu.value
            return step.tokens_per_second_per_gpu.map(lambda rate: rate * share)
        if quantity == MEMORY:
            return BoundedTime.around(self.step.plan.memory.total / GIB)
        if quantity == MESSAGES:
            return BoundedTime.around(self.messages)
        if quantity == SPEED:
            return self.attention.duration.map(lambda ms: self.flop / ms / 1e9, falling=True)
        return BoundedTime.around(self.degree(quantity))

    @property
    def messages(self) -> float:
        """The time in ms for which messages of all passes occupy the busier kind of link."""
        carried = [each.carried for each in self.attention.passes.values()]
        return max(sum(each[link] for each in carried) for link in (0, 1))

    @property
    def flop(self) -> float:
        """FLOP of a worker's attention in a layer, both passes."""
        model, facts = self.scenario.config.model, self.attention.facts
        pairs = self.scenario.problem.masks[0].pairs / facts["cp"]
        return sum(FLOP_PER_PAIR.values()) * model.head_dim * model.num_heads * pairs

    def formula(self, name: str) -> float:
        """Return the communication time of BurstEngine's table 1 in ms."""
        cluster, config = self.cluster, self.scenario.config
        ranks, nodes = cluster.gpus, cluster.nodes
        size = 2 * config.seq / ranks * config.model.num_heads * config.model.head_dim
        outer = cluster.link(outer=True)
        inner_us, outer_us = (
            link.latency_us.value + size / link.bandwidth_gbps.value / 1e3
            for link in (cluster.inner, outer)
        )
        inside, between = (ranks - nodes) * inner_us, nodes * outer_us
        us = {
            RING: 6 * ranks * max(inner_us, outer_us),
            "double_ring": 4 * max(inside, between) + 2 * (inside + between),
            "burst": 5 * max(inside, between),
        }
        return us[name] / 1e3


def redundant(row: PublishedRow, scenario: Scenario) -> float:
    """Return the share of a ring's rows that no query of the receiver sees, in percent."""
    from mtrain_cli.attention.mask_rule import MaskRule
    from mtrain_cli.parallel.layout import make_layout
    from mtrain_cli.parallel.traffic import count_traffic

    workers = int(row.redundancy["workers"])
    config = scenario.config
    layout = make_layout(str(row.redundancy["layout"]), workers, config.seq, 128)
    rule, _ = MaskRule.of(config).by_layers(config.model.num_layers)[0]
    mask = rule.undivided(config.seq, config.seq).repadded(layout.padded_seq)
    shards = [layout.positions(rank) for rank in range(workers)]
    return 100 * (1 - count_traffic([[mask]], shards).share_moved(layout.padded_seq))


def predict_table(table: PublishedTable, scenarios: Scenarios, measured: Measured) -> StudyTable:
    """Predict all rows of a table."""
    rows: dict[str, _PredictedRow] = {}
    for row in table.rows:
        rows[row.name] = _PredictedRow(row, row.on(table.cluster), scenarios(row))
    found = []
    for row in table.rows:
        for number, value in enumerate(row.values):
            each = _study_value(rows, row, value)
            was, where = measured(row, value.quantity) or (None, "")
            each = replace(each, measured=was, measured_on=where, counts=row.counts)
            found.append(replace(each, note="" if number else row.note))
    facts = table.name, table.title, table.paper, table.where, table.cluster
    return StudyTable(*facts, tuple(found), table.remarks)


def _study_value(
    rows: dict[str, _PredictedRow], row: PublishedRow, value: PublishedValue
) -> StudyValue:
    mine, other = rows[row.name], rows.get(value.over)
    quantity = value.quantity
    published_value = mine.formula(value.formula) if value.formula else value.value
    if quantity == REDUNDANT:
        return StudyValue(row.name, quantity, published_value, redundant(row, mine.scenario))
    if other is not None:
        if quantity == SPEED_UP:
            found = other.duration / mine.duration
        else:
            degree = quantity.removesuffix(LESS)
            found = other.degree(degree) / mine.degree(degree)
        return StudyValue(row.name, quantity, published_value, found)
    bounded = mine.bounded(quantity)
    bounds = (bounded.low, bounded.high) if bounded.low < bounded.high else (None, None)
    return StudyValue(row.name, quantity, published_value, bounded.value, *bounds)
