"""Closed counts of one causal document, and counts of other masks, against their definition."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel.layout import Balanced, Layout, make_layout
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.simulation import work_counts
from mtrain_cli.simulation.synthetic_index import SyntheticIndex
from mtrain_cli.simulation.work_counts import WorkCounter

LENGTHS = (7, 64, 129, 700)  # with and without padding, less than a block for each worker
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


def layout_of(name: str, workers: int, seq: int, stripe: int, unit: int) -> Layout:
    if name != "balanced":
        return make_layout(name, workers, seq, stripe, unit=unit)
    chunks = -(-seq // stripe // workers) * workers
    owner = np.random.default_rng(seq).permutation(np.arange(chunks) % workers)
    return Balanced.of(owner, workers, seq, stripe)


def masks_of(seq: int, padded: int) -> dict[str, SequenceMask]:
    documents = np.sort(np.random.default_rng(seq).integers(0, 4, seq))
    window = np.maximum(np.arange(padded) - 21, 0)
    return {
        "one document": SequenceMask.causal(seq, padded),
        "documents": SequenceMask.from_documents(documents, padded),
        "window": SequenceMask.from_first(window, seq),
    }


@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_counts_between_groups_equal_their_definition(name, block):
    rng, positions = np.random.default_rng(0), np.arange(max(LENGTHS))
    for workers, heads, seq in ((1, 1, 129), *((6, h, seq) for h in (1, 2) for seq in LENGTHS)):
        layout = layout_of(name, workers, seq, 4, block or 1)
        schedule = make_schedule("ring", ScheduleOptions(workers, workers, heads=heads))
        for kind, mask in masks_of(seq, layout.padded_seq).items():
            counter = WorkCounter.make(schedule, layout, [mask], 4, block)
            assert counter.closed == (not mask.low[:, :seq].any())
            if counter.block_owner is None and not counter.closed:
                continue
            unit = 1 if counter.block_owner is None else counter.block
            chosen = rng.integers(0, 5, -(-layout.padded_seq // unit))
            at = positions[:seq]
            seen = (at >= mask.low[0, :seq, None]) & (at < mask.high[0, :seq, None])
            away = at[:, None] // unit - at // unit
            weights = np.where(away >= 0, chosen[np.maximum(away, 0)], 0) * seen
            group = np.eye(counter.groups, dtype=np.int64)[counter.owner[:seq]]
            pairs, blocks = counter._kinds[0].between(chosen)
            about = (workers, heads, seq, kind)
            assert np.array_equal(pairs, group.T @ weights @ group), about
            if counter.block_owner is not None:
                edge = np.arange(0, seq, unit)
                largest = np.maximum.reduceat(np.maximum.reduceat(weights, edge), edge, axis=1)
                assert np.array_equal(blocks, group[edge].T @ largest @ group[edge]), about


@pytest.mark.parametrize("exchange", ["all_gather", "hierarchical_all_gather", "group_cast"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_large_gathers_count_sums_over_all_keys(name, exchange, monkeypatch):
    for heads, chunks, seq in ((1, 1, 1000), (1, 2, 2048), (2, 1, 1111)):
        layout = layout_of(name, 12, seq, 8, 8)
        options = ScheduleOptions(12, 4, chunks=chunks, heads=heads)
        schedule = make_schedule(exchange, options)
        mask = SequenceMask.causal(seq, layout.padded_seq)
        for index in (None, SyntheticIndex(0.1, 60, 8).index(0, layout.padded_seq, 4)):
            found = []
            for most in (work_counts.MOST_PLAYED, 1):
                monkeypatch.setattr(work_counts, "MOST_PLAYED", most)
                counter = WorkCounter.make(schedule, layout, [mask], 4, index and index.block)
                assert counter.sums_only == (most == 1)
                found.append(counter.count(index))
            monkeypatch.undo()
            for direction, work in found[0].items():
                for field in ("pairs", "blocks", "columns", "column_pairs", "of_columns"):
                    one, other = (getattr(of[direction], field) for of in found)
                    assert np.array_equal(one, other), (heads, chunks, seq, field)
                assert work.total_pairs.sum() > 0
