"""The work that the simulator counts for a (rank, step) equals what the rank's kernels get."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from simulation.test_work_counts import BLOCK, HEADS, index_of, masks_of, of_executor

from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.exchange import Exchange, make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.records import record_files
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.prediction import AttentionWorkload, predict
from mtrain_cli.simulation.what_if import ReplayCase, ReplaySetup, make_case, resized

LAYOUTS = ("contiguous", "zigzag", "striped")
EXCHANGES = ("ring", "hierarchical_ring", "all_gather", "hierarchical_all_gather", "ulysses")
PATTERNS = ("dense", "vertical_slash", "columns", "bitmap")
LENGTHS = (61, 64, 100)  # one divides evenly
CONFIGURATIONS = [
    (layout, exchange, pattern, workers, per_node, seq, mask)
    for layout, exchange, pattern, (workers, per_node), seq, mask in product(
        LAYOUTS,
        EXCHANGES,
        PATTERNS,
        ((2, 2), (3, 3), (4, 2), (6, 3), (8, 4)),
        LENGTHS,
        ("causal", "documents"),
    )
]


def executors(case: ReplayCase) -> list[Exchange]:
    how, layout = case.choice, case.layout
    found = []
    for rank in range(layout.workers):
        ranks = tuple(range(layout.workers))
        group = ContextGroup(rank, ranks, how.per_node)
        if how.heads > 1:
            groups = layout.workers // how.heads
            inner = ContextGroup(
                rank // how.heads,
                ranks[rank % how.heads :: how.heads],
                min(max(1, how.per_node // how.heads), groups),
            )
            group = replace(group, heads=how.heads, exchange=inner)
        options = {
            "chunks": how.chunks,
            "prefetch": how.prefetch,
            "circulates": how.circulates,
            "shared_columns": how.shared_columns,
        }
        found.append(make_exchange(how.name, layout, group, **options))  # type: ignore[arg-type]
    return found


def table(rows: np.ndarray, direction: str, name: str, shape: tuple[int, int]) -> np.ndarray:
    mine = rows[rows["direction"] == record_files.WORDS["direction"].index(direction)]
    found = np.zeros(shape, np.int64)
    attention = mine[mine["phase"] == record_files.WORDS["phase"].index("attention")]
    np.add.at(found, (attention["rank"], attention["step"]), attention[name])
    return found


def check(
    layout: str, exchange: str, pattern: str, workers: int, per_node: int, seq: int, mask: str
) -> int:
    """Return how many numbers were compared; 0 if the configuration is impossible."""
    made = RecordedSetup(
        seq=seq,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=16,
        dtype_bytes=2,
        workers=workers,
        per_node=per_node,
        layout=layout,
        exchange=exchange,
        block_size=BLOCK,
    )
    padded = make_layout(layout, workers, seq, BLOCK, unit=BLOCK).padded_seq
    masks = tuple(masks_of(mask, padded, seq))
    index = index_of(pattern, make_layout(layout, workers, seq, BLOCK, unit=BLOCK))
    setup = ReplaySetup(layout, exchange, workers, per_node)
    problem = AttentionWorkload(made, masks, (0,), lambda _: index, pattern)
    try:
        case = make_case(made, masks, setup, index)
        rows = predict(
            load_cluster("h200_1x8"), problem, setup, kernel="triton", rows=True, bounds=False
        ).rows
    except ConfigError:
        return 0
    assert rows is not None
    compared = 0
    fitted = None if index is None else resized(index, case.counter.blocks)
    batch = (
        [m.repadded(case.layout.padded_seq) for m in masks] if pattern == "dense" else list(masks)
    )
    for rank, executor in enumerate(executors(case)):
        expected = of_executor(executor, batch, fitted, BLOCK if fitted is not None else None)
        for direction, (*steps, (columns, column_pairs)) in expected.items():
            shape = workers, len(steps)
            assert table(rows, direction, "pairs", shape)[rank].tolist() == [
                pairs for pairs, _ in steps
            ]
            if fitted is not None:
                blocks = table(rows, direction, "blocks", shape)[rank].tolist()
                assert blocks == [count if pairs else 0 for pairs, count in steps]
            of_columns = rows[
                (rows["phase"] == record_files.WORDS["phase"].index("columns"))
                & (rows["rank"] == rank)
                & (rows["direction"] == record_files.WORDS["direction"].index(direction))
            ]
            assert int(of_columns["pairs"].sum()) == column_pairs
            # Steps without time have no row. Phases that compute nothing need not count their
            # columns.
            assert int(of_columns["columns"].sum()) == (columns if column_pairs else 0)
            compared += 2 * len(steps) + 2
    return compared


def test_simulated_work_equals_the_work_of_kernels():
    """A sample that covers every layout, exchange, pattern and number of workers."""
    order = np.random.default_rng(0).permutation(len(CONFIGURATIONS))
    done = [CONFIGURATIONS[i] for i in order[:70] if check(*CONFIGURATIONS[i])]
    assert len(done) >= 50
    for at, names in enumerate((LAYOUTS, EXCHANGES, PATTERNS, (2, 3, 4, 6, 8))):
        assert {configuration[at] for configuration in done} == set(names)


@pytest.mark.slow
def test_simulated_work_equals_the_work_of_kernels_in_all_configurations():
    compared = [check(*configuration) for configuration in CONFIGURATIONS]
    assert sum(n > 0 for n in compared) == 1584
    assert sum(compared) == 126_144
