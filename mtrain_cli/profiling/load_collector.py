"""Collect the loads of the experts of all workers on rank 0, as rows."""

from __future__ import annotations

import numpy as np

from mtrain_cli.profiling.measurement import Bench
from mtrain_cli.records.expert_loads import ROW
from mtrain_cli.training.router_batches import OwnLoads
from mtrain_cli.training.trainer import Trainer


def own_rows(own: OwnLoads | None, case: int, step: int, rank: int) -> np.ndarray:
    """Return the loads of a worker's tokens in one training step as rows of dtype `ROW`."""
    if own is None:
        return np.empty(0, ROW)
    tokens, dropped = own.counts()
    rows = np.zeros(tokens.size, ROW)
    layers, experts = np.indices(tokens.shape).reshape(2, -1)
    rows["case"], rows["step"], rows["rank"] = case, step, rank
    rows["layer"], rows["expert"] = np.array(own.layers, np.int64)[layers], experts
    rows["tokens"], rows["dropped"] = tokens.reshape(-1), dropped.reshape(-1)
    return rows


def expert_workers(trainer: Trainer) -> int:
    """Return the number of workers over which a run deals the experts of a layer."""
    return 1 if trainer.experts is None else trainer.experts.size


def collect_loads(bench: Bench, own: OwnLoads | None, case: int, step: int) -> np.ndarray:
    """Return the rows of all workers on every worker. All workers call this together.

    A model without experts has no rows, and its workers send nothing.
    """
    if own is None:
        return np.empty(0, ROW)
    return np.concatenate(bench.gather(own_rows(own, case, step, bench.environment.rank)))
