"""Reports of ranks, and index metrics for any micro-batches and workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain_cli.attention.index import IndexCounts
from mtrain_cli.parallel.context_attention import IndexRecord
from mtrain_cli.training.step import (
    NonFiniteError,
    StepReport,
    check_finite,
    index_metrics,
    index_records,
    local_index_sums,
)

SEQ, LAYERS = 9, 2  # 45 causal pairs


def record(
    layer: int,
    pairs: list[list[int]],
    slashes: list[list[int]],
    columns: list[list[int]],
    workers: int = 1,
    cut: list[int] | None = None,
) -> IndexRecord:
    """Build a record; counts are [sequences, heads]."""
    zero = torch.zeros(len(pairs), len(pairs[0]), dtype=torch.int64)
    counts = IndexCounts(
        torch.tensor(pairs),
        blocks=zero,
        columns=torch.tensor(columns),
        column_pairs=zero,
        slashes=torch.tensor(slashes),
    )
    return IndexRecord(layer, counts, workers, 1.0, 1.25 + layer, cut and torch.tensor(cut))


# Two heads. The first micro-batch has two sequences, the second one.
RECORDS = [
    record(0, [[20, 30], [10, 40]], [[1, 2], [3, 4]], [[10, 20], [30, 40]]),
    record(1, [[45, 45], [44, 45]], [[5, 6], [7, 8]], [[0, 50], [60, 70]]),
    record(0, [[12, 14]], [[2, 2]], [[7, 9]]),
    record(1, [[5, 6]], [[3, 1]], [[4, 5]]),
]
SUM = [
    25.0 + 25 + 13,
    45.0 + 44.5 + 5.5,
    1.5 + 3.5 + 5.5 + 7.5 + 2 + 2,
    15.0 + 35 + 25 + 65 + 8 + 4.5,
    3.0,
    0.0,
    0.0,
]


def test_sums_are_over_sequences_of_means_over_heads():
    total = local_index_sums(RECORDS, range(LAYERS), torch.device("cpu"))
    assert total.dtype == torch.float64
    assert total.tolist() == SUM


def test_a_step_is_the_mean_over_sequences_and_layers():
    results = index_metrics(SUM, RECORDS, SEQ, {})
    assert results.density_by_layer == (63 / 3 / 45, 95 / 3 / 45)
    assert results.density == pytest.approx(158 / 6 / 45)
    assert results.slashes == 22 / 6
    assert results.columns == 152.5 / 6
    assert results.seconds == 0.25 + 1.25 + 0.25 + 1.25


def test_lines_are_means_over_the_layers_with_an_index():
    sparse = [record for record in RECORDS if record.layer == 1]
    total = local_index_sums(sparse, [1], torch.device("cpu"))
    results = index_metrics(total.tolist(), sparse, SEQ, {0: 0.75, 2: 0.75})
    assert results.density_by_layer == (0.75, 95 / 3 / 45, 0.75)
    assert results.slashes == (5.5 + 7.5 + 2) / 3


def test_partial_counts_of_workers_add_up_to_the_total():
    parts = [[[8, 30], [6, 18]], [[12, 0], [4, 22]]]
    none = [[0, 0], [0, 0]]
    cuts = [[3, 1], [5, 3]]
    mine, other = (
        local_index_sums([record(0, pairs, none, none, 2, cut)], [0], torch.device("cpu"))
        for pairs, cut in zip(parts, cuts, strict=True)
    )
    results = index_metrics((mine + other).tolist(), [], SEQ, {})
    assert results.density_by_layer == (25 / 45,)
    assert results.cut == 4 / 8
    assert index_metrics(SUM, RECORDS, SEQ, {}).cut is None


def test_a_stage_of_only_dense_layers_adds_nothing_to_the_sums():
    nothing = local_index_sums([], range(LAYERS), torch.device("cpu"))
    assert nothing.dtype == torch.float64
    assert nothing.tolist() == [0.0] * len(SUM)


def test_a_sparse_step_without_records_is_no_dense_step():
    def attention(index: Any) -> Any:
        return SimpleNamespace(index=index)

    sparse = SimpleNamespace(records=[], count=lambda: None)
    assert index_records([attention(sparse)]) == []
    assert index_records([attention(None)]) is None


FINE = StepReport(2.5, 4.0, 0.0, 0.0, 0.1, 0.2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_error_names_step_quantity_and_ranks(value):
    lost = StepReport(value, 4.0, 0.0, 0.0, 0.1, 0.2)
    with pytest.raises(NonFiniteError, match=r"^step 3: the loss is not finite on ranks 1, 2; "):
        check_finite([FINE, lost, lost, FINE], 3)
    with pytest.raises(NonFiniteError, match=r"^step 3: the gradient is not finite on rank 0; "):
        check_finite([StepReport(2.5, value, 0.0, 0.0, 0.1, 0.2), FINE], 3)
