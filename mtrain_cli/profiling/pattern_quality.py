"""`mtrain profile sparsity`: measure the density and recall of patterns in real training steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.environment import Environment, loopback_variables, resolve_environment
from mtrain_cli.model.decoder import Attend
from mtrain_cli.sparsity.pattern import MaskedPositions, Pattern
from mtrain_cli.sparsity.recall import recall
from mtrain_cli.training.batch import Batch
from mtrain_cli.training.callback import Callback
from mtrain_cli.training.flops import causal_pairs
from mtrain_cli.training.trainer import Trainer


@dataclass(frozen=True)
class HeadRecord:
    """Density and recall of a pattern for one query head of one layer in one training step.

    density: number of computed pairs / number of causal pairs, including pairs across documents.
    of_mask: number of computed pairs / number of pairs that the mask allows.
    recall: share of dense attention that the index keeps, averaged over the sampled queries.
        Patterns estimate their indices from other queries.
    worst: lowest recall of a sampled query.
    slashes: number of slashes; 0 for patterns that list blocks.
    columns: number of single columns; 0 for patterns that list blocks.
    """

    step: int
    pattern: str
    layer: int
    head: int
    density: float
    of_mask: float
    recall: float
    worst: float
    slashes: int
    columns: int


def profile_sparsity(
    config: Config,
    patterns: Sequence[Pattern],
    steps: Sequence[int],
    rows: int,
    progress: Callable[[int, float | None], None],
) -> list[HeadRecord]:
    """Train on one worker. In the given steps, measure the patterns on the first sequence.

    Args:
        steps: numbers of the training steps in which to measure, from 1.
        rows: number of queries to sample per layer. The number of the step is the seed. The sample
            excludes the queries from which a pattern estimates its index.
        progress: called with step and loss after each step.

    Raises:
        ConfigError: the patterns probe every query.
    """
    _sampled(patterns, config.seq, 1, rows)
    config = dataclasses.replace(
        config, topology=dataclasses.replace(config.topology, workers=1, context_parallel=1)
    )
    environment = resolve_environment(config)
    with _alone(environment):
        trainer = Trainer(config, environment)
        # Close the data loader. If it still runs when Python exits, compiled modules stay alive and
        # print long warnings about leaks.
        with closing(trainer):
            measurement = _Measurement(patterns, rows, config.seq)
            trainer.callbacks.append(measurement)
            for step in range(1, max(steps) + 1):
                measurement.start(step if step in steps else None)
                result = trainer.train_step(False)
                progress(step, result.loss)
    return measurement.records


class _Measurement(Callback):
    """Measure the patterns on each layer, at the first call of its attention in a step."""

    def __init__(self, patterns: Sequence[Pattern], rows: int, seq: int) -> None:
        self.records: list[HeadRecord] = []
        self._patterns, self._rows, self._seq = patterns, rows, seq
        self._step: int | None = None
        self._measured: set[tuple[str, int]] = set()

    def start(self, step: int | None) -> None:
        """Begin a training step.

        step: number of the training step; None to measure nothing in this step.
        """
        self._step = step
        self._measured.clear()

    def wrap_attention(self, batch: Batch, attend: Attend) -> Attend:
        if self._step is None:
            return attend

        def measure_and_attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
        ) -> torch.Tensor:
            self._measure(q.detach()[:1], k.detach()[:1], batch, layer)
            return attend(q, k, v, layer)

        return measure_and_attend

    def _measure(self, q: torch.Tensor, k: torch.Tensor, batch: Batch, layer: int) -> None:
        assert self._step is not None
        for pattern in self._patterns:
            if (pattern.name, layer) in self._measured:
                continue
            self._measured.add((pattern.name, layer))
            sampled = _sampled(self._patterns, batch.masks[0].length, self._step, self._rows)
            self.records.extend(_heads(pattern, q, k, batch, layer, self._step, sampled, self._seq))


def _sampled(patterns: Sequence[Pattern], length: int, step: int, rows: int) -> IntArray:
    """Sample queries that no pattern probes. Return their positions in ascending order."""
    free = np.ones(length, bool)
    for pattern in patterns:
        free[pattern.probed_rows(length).numpy()] = False
    held_out = np.flatnonzero(free)
    if not len(held_out):
        raise ConfigError(
            f"sparsity.last_q: the patterns probe all {length} queries of a sequence, but recall "
            "needs queries that no pattern probes; give a smaller value"
        )
    return np.sort(np.random.default_rng(step).permutation(held_out)[:rows])


@torch.no_grad()
def _heads(
    pattern: Pattern,
    q: torch.Tensor,
    k: torch.Tensor,
    batch: Batch,
    layer: int,
    step: int,
    sampled: IntArray,
    seq: int,
) -> Iterator[HeadRecord]:
    masks, request = batch.masks[:1], pattern.request()
    masked = MaskedPositions.make(masks, request.block, bitmap=request.bitmap).to(q.device)
    index = pattern.estimate(q, k, masked, layer)
    counts = index.counts(masked.tables)
    kept = recall(index, q, k, masked, torch.from_numpy(sampled).to(q.device))[0]
    means, worst = kept.mean(-1), kept.amin(-1)
    for head in range(len(kept)):
        pairs = counts.pairs[0, head].item()
        yield HeadRecord(
            step=step,
            pattern=pattern.name,
            layer=layer,
            head=head,
            density=pairs / causal_pairs(seq),
            of_mask=pairs / masks[0].pairs,
            recall=means[head].item(),
            worst=worst[head].item(),
            slashes=int(counts.slashes[0, head]),
            columns=int(counts.columns[0, head]),
        )


@contextmanager
def _alone(environment: Environment) -> Iterator[None]:
    """Provide a process group that contains only this process."""
    backend = "cpu:gloo,cuda:nccl" if environment.device == "cuda" else "gloo"
    device = (
        torch.device("cuda", torch.cuda.current_device()) if environment.device == "cuda" else None
    )
    os.environ.update(loopback_variables())
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()
