"""The data of a training run as one worker reads them, and checks that all ranks have the same."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data import checked_files
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.loader import Loader
from mtrain_cli.data.mixture import Dataset
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment, describe_place
from mtrain_cli.launch.failures import PeerLostError
from mtrain_cli.parallel.collectives import share
from mtrain_cli.training.batch import HostBatch
from mtrain_cli.training.layout_choice import layout_advice
from mtrain_cli.training.worker import Worker

_QUICKLY_READ = 1 << 28  # tokens: at most 1 GiB, whose checksums take 1.1 s on two cores


class TrainData:
    """The dataset of a run, and the micro-batches that this worker takes from it.

    places: host and device of each rank.
    lacking: whether a worker could not read its data, so that all stop.
    advice: a line about the layout, known after the first batch; "" for none.
    """

    def __init__(self, worker: Worker, make_batch: Callable[[list[Sample]], HostBatch]) -> None:
        config, environment = worker.config, worker.environment
        self._worker = worker
        self.dataset: Dataset = open_dataset(config)
        self.places = check_same_data(
            config, self.dataset.fingerprint, worker.device, worker.host_group
        )
        self.sampler = self.dataset.sampler(config.seed)
        self.loader = Loader(
            self.dataset,
            self.sampler,
            dp_rank=environment.dims.coordinate("dp", environment.rank),
            dp=environment.dims.dp,
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            make_batch=make_batch,
        )
        self.held_out: list[Sample] = self.dataset.held_out
        self.lacking, self.advice, self._checked_layouts = False, "", False

    def check(self, *, resumed: bool) -> None:
        """Read all data and verify their checksums, if ``data.verify`` asks for it.

        The workers of a machine share the work. Raises ConfigError if a file has changed.
        """
        choice, environment = self._worker.config.data.verify, self._worker.environment
        asked = choice == "full"
        if choice == "auto" and not environment.restarts:  # a restart read the data moments ago
            asked = resumed or self.dataset.num_tokens < _QUICKLY_READ
        if asked:
            progress_record.note("checks the data")
            say = partial(print, flush=True) if environment.rank == 0 else lambda _: None
            report = checked_files.lines(say, "data.verify=sampled skips this")
            self.dataset.verify(environment.local_rank, environment.local_workers, report)
            progress_record.note("")

    def next_on_host(self, step: int) -> tuple[Sequence[HostBatch], float]:
        """Return the data of a step in host memory, and how many seconds this worker waited."""
        worker, started = self._worker, time.perf_counter()
        on_host: Sequence[HostBatch] = ()
        error = None
        try:
            on_host = next(self.loader)
        except Exception as failure:  # raised below, after all workers know
            error = failure
        waited = time.perf_counter() - started
        first_without = first_rank_without_data(
            worker.environment, worker.host_group, has_data=error is None
        )
        if first_without is not None:
            self.lacking = True
            raise error or PeerLostError(f"rank {first_without} has no data for step {step}")
        if not self._checked_layouts:
            self._checked_layouts = True
            if worker.choices.balancer is not None:
                check_same_layouts(worker.config, worker.environment, on_host, worker.host_group)
            elif worker.environment.rank == 0 and worker.device.type == "cuda":
                cp, per_node = worker.environment.dims.cp, worker.environment.context_per_node
                masks = [plan.masks for plan in on_host[0].plans.values()]
                self.advice = layout_advice(worker.config, cp, per_node, masks)
        return on_host, waited


def check_same_data(
    config: Config, fingerprint: str, device: torch.device, group: dist.ProcessGroup
) -> list[str]:
    """Return host and device of each rank. Raise ConfigError if one reads another corpus.

    Corpora differ if machines have different files or, for data=stdlib, versions of Python.
    """
    answers = share((fingerprint, describe_place(device)), group)
    other = next((rank for rank, (data, _) in enumerate(answers) if data != answers[0][0]), None)
    if other is not None:
        raise ConfigError(
            f"data.kind={config.data.kind}: rank {other} reads a different corpus than "
            "rank 0. Give all machines the same data."
        )
    return [place for _, place in answers]


def check_same_layouts(
    config: Config, environment: Environment, batches: Sequence[HostBatch], group: dist.ProcessGroup
) -> None:
    """Raise ConfigError if ranks of a context group gave the first batches different layouts.

    Every rank balances its batches itself, and versions of NumPy might differ.
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
