"""Checks that all ranks have the same data and the same layouts. All ranks call these together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment, describe_place
from mtrain_cli.parallel.collectives import share
from mtrain_cli.training.batch import HostBatch


def check_same_data(
    config: Config, fingerprint: str, device: torch.device, group: dist.ProcessGroup
) -> list[str]:
    """Check that all ranks read the same corpus. Return host and device of each rank.

    Corpora differ if machines have different files or, for data=stdlib, different versions of
    Python. Without this check, the ranks would train on different tokens unnoticed.

    Args:
        fingerprint: of this rank's corpus.
        group: all ranks, in host memory.

    Raises:
        ConfigError: a rank reads another corpus than rank 0.
    """
    answers = share((fingerprint, describe_place(device)), group)
    expected = answers[0][0]
    other = next((rank for rank, (data, _) in enumerate(answers) if data != expected), None)
    if other is not None:
        raise ConfigError(
            f"data.kind={config.data.kind}: rank {other} reads a different corpus than "
            "rank 0. Give all machines the same data."
        )
    return [place for _, place in answers]


def check_same_layouts(
    config: Config,
    environment: Environment,
    batches: Sequence[HostBatch],
    group: dist.ProcessGroup,
) -> None:
    """Check that the ranks of each context group gave the first batches the same layout.

    Every rank balances its batches itself. Ranks with different versions of NumPy might not find
    the same layout.

    Raises:
        ConfigError: two ranks found different layouts.
    """
    layouts = repr([host.layout for host in batches])
    digest, rank = hashlib.sha256(layouts.encode()).hexdigest(), environment.rank
    sequences = environment.dims.coordinate("dp", rank)
    answers = share((sequences, digest), group)
    other = next((r for r, (s, d) in enumerate(answers) if s == sequences and d != digest), None)
    if other is not None:
        raise ConfigError(
            f"topology.layout={config.topology.layout}: ranks {rank} and {other} balance "
            "the same batch differently. Give all machines the same versions of mtrain and "
            "NumPy, or set topology.layout=striped."
        )


def first_rank_without_data(
    environment: Environment, group: dist.ProcessGroup, *, has_data: bool
) -> int | None:
    """Return the first rank that has no data for this step, or None."""
    ranks = environment.dims.workers
    first = torch.tensor(ranks if has_data else environment.rank)
    if ranks > 1:
        progress_record.note("waits for the data of all ranks", progress_record.SEVERAL)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
        progress_record.note("")
    return int(first) if int(first) < ranks else None
