"""`mtrain profile sparsity`: density and recall of patterns in training steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import IntArray
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.environment import loopback_variables, resolve_environment
from mtrain_cli.model.decoder import Attend
from mtrain_cli.parallel.fsdp import reshard
from mtrain_cli.sparsity.pattern import LearningPattern, MaskedPositions, Pattern, learning
from mtrain_cli.sparsity.recall import recall
from mtrain_cli.training.batch import Batch
from mtrain_cli.training.callback import Callback
from mtrain_cli.training.flops import causal_pairs
from mtrain_cli.training.trainer import Trainer


@dataclass(frozen=True)
class Place:
    """Where a measurement is from. sample: 0, the first sequence; records of 0.1 have others."""

    step: int
    sample: int
    layer: int


@dataclass(frozen=True)
class LayerAttention:
    """What a layer's attention reads, and where it is measured.

    q, k: [1, seq, heads, head_dim] and [1, seq, kv_heads, head_dim], rotated.
    positions: int64 [seq], rotary positions.
    masked: the mask, for blocks of the first pattern.
    rows: int64 [rows], positions of the sampled queries.
    per_position: [frequencies], radians per position of the rotary embedding.
    factor: factor of its cosine and sine.
    """

    place: Place
    q: torch.Tensor
    k: torch.Tensor
    positions: torch.Tensor
    masked: MaskedPositions
    rows: IntArray
    per_position: torch.Tensor
    factor: float


class Analyzer(Protocol):
    """Analyzes the layers that a sparsity profile measures. Other packages bring one."""

    def on_layer(self, layer: LayerAttention) -> None:
        """Analyze a layer before its attention runs."""

    def on_output(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        masked: MaskedPositions, place: Place,
    ) -> None:  # fmt: skip
        """Look at inputs and output of a layer's attention that has a backward pass."""


@dataclass(frozen=True)
class HeadRecord:
    """Density and recall of a pattern for one query head of one layer in one training step.

    density, of_mask: computed pairs / causal pairs, and / pairs that the mask allows.
    recall: share of dense attention that the index keeps, averaged over sampled queries, from which
        no pattern estimates its index.
    worst: lowest recall of a sampled query.
    slashes, columns: their numbers; 0 for patterns that list blocks.
    cut: share of the layer's blocks that reached the level, but that a cap cut; None without a cap.
    updates: number of updates, all in this command, that the layer's learned scores had before
        they chose; None for patterns that do not learn.
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
    cut: float | None = None
    updates: int | None = None


def profile_sparsity(
    config: Config,
    patterns: Sequence[Pattern],
    steps: Sequence[int],
    rows: int,
    progress: Callable[[int, float | None], None],
    analyzer: Analyzer | None = None,
) -> list[HeadRecord]:
    """Train on one worker. In the given steps, measure the patterns on the first sequence.

    Args:
        steps: numbers of the training steps in which to measure, from 1.
        rows: queries to sample per layer, with the step as the seed.

    Raises:
        ConfigError: the patterns probe every query.
    """
    sampled_rows(patterns, config.seq, 1, rows)
    with worker_alone(config) as trainer:
        measurement = Measurement(trainer, patterns, rows, analyzer)
        measurement.teach(trainer, max(steps))
        trainer.callbacks.append(measurement)
        for step in range(1, max(steps) + 1):
            measurement.start(step if step in steps else None)
            progress(step, trainer.train_step(False).loss)
    return measurement.records


@contextmanager
def worker_alone(config: Config) -> Iterator[Trainer]:
    """Provide the trainer of a run of one worker."""
    config = dataclasses.replace(
        config, topology=dataclasses.replace(config.topology, workers=1, context_parallel=1)
    )
    environment = resolve_environment(config)
    gpu = environment.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else None
    os.environ.update(loopback_variables())
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        # If the data loader still runs when Python exits, compiled modules print long warnings.
        with closing(Trainer(config, environment)) as trainer:
            yield trainer
    finally:
        dist.destroy_process_group()


class Measurement(Callback):
    """Measure attention in each layer, at the first call of the layer's attention in a step.

    records: the density and recall of the patterns.
    """

    def __init__(
        self, trainer: Trainer, patterns: Sequence[Pattern], rows: int, analyzer: Analyzer | None
    ) -> None:
        self.records: list[HeadRecord] = []
        self._measured: set[int] = set()  # layers
        self._patterns, self._rows, self._seq = patterns, rows, trainer.config.seq
        self._analyzer = analyzer
        self._decoder, self._model = trainer.decoder, trainer.config.model
        learners = (p for p in patterns if isinstance(p, LearningPattern))
        self._learners = [p for p in learners if p.state(self._model, [0], trainer.device)]
        self._step: int | None = None
        self._masked: dict[IndexRequest, MaskedPositions] = {}

    @torch.no_grad()
    def teach(self, trainer: Trainer, steps: int) -> None:
        """Let new patterns learn from the last sequence of the first epoch.

        Later, they learn from the first sequence of each step, after they have chosen for it.
        """
        if self._learners:
            last, read = len(trainer.dataset) - 1, trainer.config.train.global_batch
            if last < read * steps:
                raise ConfigError(
                    f"train.global_batch={read}: {steps} steps read all {last + 1} sequences of "
                    "the data, but learned scores are measured on others than they learned from; "
                    "give fewer steps, a smaller batch, more data or sparsity.score=exact"
                )
            sample = trainer.dataset[trainer.sampler.sequence(last)]
            batch = trainer.evaluation_batch_maker()([sample])
            attend = self.wrap_attention(batch, batch.attention)
            trainer.decoder.token_losses(batch.tokens, batch.positions, batch.labels, attend)
            reshard(trainer.decoder)

    def start(self, step: int | None) -> None:
        """Measure the next step, whose number seeds the sampled queries; None measures nothing."""
        self._step = step
        self._measured.clear()
        self._masked.clear()

    def wrap_attention(self, batch: Batch, attend: Attend) -> Attend:
        if self._step is None and not self._learners:
            return attend

        def measure_and_attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, *sinks: torch.Tensor
        ) -> torch.Tensor:
            if layer in self._measured:  # another micro-batch, or recomputation
                return attend(q, k, v, layer, *sinks)
            self._measured.add(layer)
            first = q.detach()[:1], k.detach()[:1]
            if self._step is None:
                for pattern in self._learners:
                    self._estimate(pattern, *first, batch, layer)
                return attend(q, k, v, layer, *sinks)
            self._measure(*first, batch, layer)
            out = attend(q, k, v, layer, *sinks)
            if self._analyzer is not None and out.requires_grad:
                masked = self._masked_of(self._patterns[0], batch, q.device)
                self._analyzer.on_output(q, k, v, out, masked, self._place(layer))
            return out

        return measure_and_attend

    def _place(self, layer: int) -> Place:
        assert self._step is not None
        return Place(self._step, 0, layer)

    def _masked_of(self, pattern: Pattern, batch: Batch, device: torch.device) -> MaskedPositions:
        request = pattern.request()
        if request not in self._masked:
            masked = MaskedPositions.make(batch.masks[:1], request.block, bitmap=request.bitmap)
            self._masked[request] = masked.to(device)
        return self._masked[request]

    @torch.no_grad()
    def _estimate(
        self, pattern: Pattern, q: torch.Tensor, k: torch.Tensor, batch: Batch, layer: int
    ) -> Index:
        with learning(pattern):
            return pattern.estimate(q, k, self._masked_of(pattern, batch, q.device), layer)

    @torch.no_grad()
    def _measure(self, q: torch.Tensor, k: torch.Tensor, batch: Batch, layer: int) -> None:
        place = self._place(layer)
        sampled = sampled_rows(self._patterns, batch.masks[0].length, place.step, self._rows)
        learned = {p.name: p.state(self._model, [layer], q.device) for p in self._learners}
        for pattern in self._patterns:
            masked, updates, cut = self._masked_of(pattern, batch, q.device), None, None
            if pattern.name in learned:
                updates = int(learned[pattern.name][f"{layer}.updates"])
            index = self._estimate(pattern, q, k, batch, layer)
            if (counts := getattr(pattern, "cut", None)) is not None:
                cut = float(counts[1] / counts[0].clamp(min=1))
            self.records += _heads(
                pattern.name, index, q, k, masked, place, sampled, self._seq, cut, updates
            )
        if self._analyzer is not None:
            masked, decoder = self._masked_of(self._patterns[0], batch, q.device), self._decoder
            self._analyzer.on_layer(
                LayerAttention(
                    place, q, k, batch.positions[0], masked, sampled,
                    decoder.inverse_frequencies_F, decoder.attention_factor,
                )
            )  # fmt: skip


def sampled_rows(patterns: Sequence[Pattern], length: int, seed: int, rows: int) -> IntArray:
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
    return np.sort(np.random.default_rng(seed).permutation(held_out)[:rows])


def _heads(
    name: str, index: Index, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions,
    place: Place, sampled: IntArray, seq: int, cut: float | None = None, updates: int | None = None,
) -> Iterator[HeadRecord]:  # fmt: skip
    counts, mask = index.counts(masked.tables), masked.masks[0]
    kept = recall(index, q, k, masked, torch.from_numpy(sampled).to(q.device))[0]
    for head, (mean, worst) in enumerate(zip(kept.mean(-1), kept.amin(-1), strict=True)):
        pairs = counts.pairs[0, head].item()
        yield HeadRecord(
            step=place.step, pattern=name, layer=place.layer, head=head,
            density=pairs / causal_pairs(seq), of_mask=pairs / mask.pairs,
            recall=mean.item(), worst=worst.item(),
            slashes=int(counts.slashes[0, head]), columns=int(counts.columns[0, head]),
            cut=cut, updates=updates,
        )  # fmt: skip
