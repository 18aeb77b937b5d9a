"""Tables of computed work, to compare a profile with its replay by integer equality.

A table holds whole numbers [ranks, 2 * steps + 1]. A row holds the number of query-key pairs of
each step, of pairs of gathered columns, and of block pairs of each step. A step without pairs has
no records in a profile, so its blocks count as 0. Each number is a mean over layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mtrain_cli.parallel.recording import ATTENTION, COLUMNS, DIRECTIONS, KINDS
from mtrain_cli.records.analysis import CaseAnalysis, PassAnalysis
from mtrain_cli.records.record_files import RecordedFolder

_NEEDED = (
    "case", "iteration", "micro", "layer", "direction", "step", "rank", "phase", "blocks", "pairs",
)  # fmt: skip


def work_table(analysis: PassAnalysis) -> np.ndarray:
    """Return the work of a pass as a mean over all its samples."""
    return _whole(analysis.pairs, analysis.column_pairs, analysis.blocks)


def micro_batch_tables(
    recorded: RecordedFolder,
    cases: Sequence[CaseAnalysis],
    layers: Mapping[int, Collection[int]],
    iteration: int,
) -> dict[int, dict[str, np.ndarray]]:
    """Return the work of the first micro-batch of an iteration in the first context group.

    Documents differ between micro-batches, and replays know those of one. With tensor parallelism,
    only the first rank of each tensor group counts; with a pipeline, each layer's stage.

    Args:
        layers: numbers of the layers to count, by number of the case.

    Returns:
        The table of each pass, by number of the case; no cases without rows of the iteration.
    """
    sums = {
        (case.number, DIRECTIONS.index(name)): np.zeros(
            (2, case.workers, of_pass.pairs.shape[1] + 1), np.int64
        )
        for case in cases
        for name, of_pass in case.passes.items()
    }
    tensor = {case.number: int(case.facts.get("tp") or 1) for case in cases}
    of_a_stage = {case.number: case.workers * case.groups // _stages(case) for case in cases}
    found = set[int]()
    for batch in recorded.batches(_NEEDED):
        counts = (batch["iteration"] == iteration) & (batch["micro"] == 0)
        counts &= np.isin(batch["phase"], [KINDS.index(ATTENTION), KINDS.index(COLUMNS)])
        for (number, direction), both in sums.items():
            mine = counts & (batch["case"] == number) & (batch["direction"] == direction)
            mine &= np.isin(batch["layer"], list(layers[number]))
            rank = batch["rank"] % of_a_stage[number]
            worker, coordinate = np.divmod(rank, tensor[number])
            mine &= (worker < both.shape[1]) & (coordinate == 0)
            if mine.any():
                found.add(number)
            columns = batch["phase"][mine] == KINDS.index(COLUMNS)
            slot = np.where(columns, 0, batch["step"][mine] + 1)
            for table, name in zip(both, ("pairs", "blocks"), strict=True):
                np.add.at(table, (worker[mine], slot), batch[name][mine])
    tables: dict[int, dict[str, np.ndarray]] = {number: {} for number in sorted(found)}
    for (number, direction), both in sums.items():
        if number in found:
            pairs, blocks = both / len(layers[number])
            tables[number][DIRECTIONS[direction]] = _whole(pairs[:, 1:], pairs[:, 0], blocks[:, 1:])
    return tables


def _stages(case: CaseAnalysis) -> int:
    return 1 if case.pipeline is None else case.pipeline.pipeline.stages


def _whole(pairs: np.ndarray, column_pairs: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    return np.rint(np.column_stack([pairs, column_pairs, np.where(pairs > 0, blocks, 0)]))
