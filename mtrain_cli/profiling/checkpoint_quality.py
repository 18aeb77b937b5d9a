"""`mtrain profile sparsity --checkpoints`: the same inputs through every checkpoint of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_bytes
from mtrain_cli.data.dataset import Sample
from mtrain_cli.launch.environment import host_memory
from mtrain_cli.parallel.fsdp import reshard
from mtrain_cli.profiling.attention_analysis import AttentionAnalyzer, Place
from mtrain_cli.profiling.pattern_quality import (
    HeadRecord,
    Measurement,
    sampled_rows,
    worker_alone,
)
from mtrain_cli.records.attention_files import COLUMNS, KEYS, SLASHES, OverlapRow
from mtrain_cli.sparsity.overlap import key_overlap, line_overlap
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.sparsity.top_keys import TopKeys
from mtrain_cli.training.checkpointer import load_model_state
from mtrain_cli.training.trainer import Trainer

_HOST_SHARE = 0.5  # of host memory for the largest keys of all checkpoints


def profile_checkpoints(
    config: Config,
    checkpoints: Sequence[Path],
    patterns: Sequence[Pattern],
    samples: int,
    rows: int,
    progress: Callable[[int, float | None], None],
    analyzer: AttentionAnalyzer,
) -> list[HeadRecord]:
    """Measure the attention of every checkpoint on the same sequences, on one worker.

    The sequences are the first held-out sequences of the run. If the run holds none out, they are
    the first sequences of its corpus, which training may have read.

    Args:
        checkpoints: folders ``step-N`` of the run, in ascending order.
        samples: number of sequences. Density and recall are measured on the first.
        rows: number of queries to sample per layer, the same for every checkpoint.
        progress: called with the step of the checkpoint and the mean loss after each checkpoint.
        analyzer: collects the results, including the overlap between checkpoints.

    Raises:
        ConfigError: there are too few sequences, a checkpoint is damaged, or the largest keys do
            not fit the memory of the host.
    """
    sampled_rows(patterns, config.seq, 0, rows)
    _require_memory(config, len(checkpoints) * samples, rows, analyzer.request.top_k)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=None))
    choices = Choices()
    with worker_alone(config) as trainer:
        inputs = _inputs(trainer, samples)
        measurement = Measurement(trainer, patterns, rows, analyzer, choices.keep)
        trainer.callbacks.append(measurement)
        for folder in checkpoints:
            step, weights = load_model_state(folder)
            _load(trainer, step, weights)
            losses = []
            for number, sample in enumerate(inputs):
                measurement.start(step, number, seed=number)
                losses.append(_run(trainer, sample, gradients=bool(analyzer.request.maps)))
            known = [loss for loss in losses if loss is not None]
            progress(step, sum(known) / len(known) if known else None)
        analyzer.files.overlap += choices.overlap(analyzer.request.top_k, trainer.device)
    return measurement.records


@dataclass
class Choices:
    """What every checkpoint chose, on the host.

    keys: the largest keys and the number of keys that each query sees.
    lines: slashes and columns by name of the pattern.
    """

    keys: dict[Place, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    lines: dict[Place, dict[str, VerticalSlash]] = field(default_factory=dict)

    def keep(self, place: Place, largest: TopKeys | None, indices: dict[str, Index]) -> None:
        """Keep what a layer chose. Indices other than slashes and columns are ignored."""
        if largest is not None:
            self.keys[place] = largest.keys.cpu(), largest.seen.cpu()
        self.lines[place] = {
            name: dataclasses.replace(
                index, slashes=index.slashes.cpu(), columns=index.columns.cpu()
            )
            for name, index in indices.items()
            if isinstance(index, VerticalSlash)
        }

    def overlap(self, counts: Sequence[int], device: torch.device) -> list[OverlapRow]:
        """Compare every two checkpoints. device: where to compare."""
        steps = sorted({place.step for place in self.lines})
        inputs = sorted({(place.sample, place.layer) for place in self.lines})
        rows: list[OverlapRow] = []
        for first, second in combinations(steps, 2):
            for sample, layer in inputs:
                one, other = Place(first, sample, layer), Place(second, sample, layer)
                rows += self._keys_between(one, other, counts, device)
                rows += self._lines_between(one, other)
        return rows

    def _keys_between(
        self, one: Place, other: Place, counts: Sequence[int], device: torch.device
    ) -> Iterator[OverlapRow]:
        if one not in self.keys:
            return
        (keys, seen), (others, _) = self.keys[one], self.keys[other]
        for k in counts:
            chosen = seen > k  # the k largest keys of other queries are all keys
            mine, theirs = (t[:, chosen, :k].to(device) for t in (keys, others))
            means = key_overlap(mine, theirs, k).mean(-1).tolist()
            yield from _rows(KEYS, k, "", one, other, means if chosen.any() else [None] * len(keys))

    def _lines_between(self, one: Place, other: Place) -> Iterator[OverlapRow]:
        for name, lines in self.lines[one].items():
            slashes, columns = line_overlap(lines, self.lines[other][name])
            yield from _rows(SLASHES, 0, name, one, other, slashes[0].tolist())
            yield from _rows(COLUMNS, 0, name, one, other, columns[0].tolist())


def _rows(
    kind: str, k: int, pattern: str, one: Place, other: Place, values: Sequence[float | None]
) -> Iterator[OverlapRow]:
    """Yield a row per head. values: Jaccard index of each head."""
    for head, value in enumerate(values):
        where = one.step, other.step, one.sample, one.layer, head
        yield OverlapRow(kind, k, pattern, *where, value)


def _require_memory(config: Config, inputs: int, rows: int, counts: Sequence[int]) -> None:
    model = config.model
    size = 4 * inputs * model.num_layers * model.num_heads * rows * max(counts, default=0)
    if size > _HOST_SHARE * host_memory():
        raise ConfigError(
            f"--rows {rows}: the {max(counts)} largest keys of {rows} queries take "
            f"{format_bytes(size)} over all heads, samples and checkpoints; this machine has "
            f"{format_bytes(host_memory())}. Give fewer --rows, --samples or keys in --top-k"
        )


def _inputs(trainer: Trainer, samples: int) -> list[Sample]:
    held_out, data = trainer.held_out, trainer.dataset
    there = len(held_out) or len(data)
    if samples > there:
        whose = "holds out" if held_out else "has"
        raise ConfigError(f"--samples {samples}: the data of the run {whose} {there} sequences")
    return held_out[:samples] or [data[index] for index in range(samples)]


def _load(trainer: Trainer, step: int, weights: dict[str, Any]) -> None:
    options = state_dict.StateDictOptions(full_state_dict=True)
    try:
        state_dict.set_model_state_dict(trainer.states.masters, weights, options=options)
    except RuntimeError as error:
        line = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"step-{step}: the checkpoint is of another model ({line})") from None
    trainer.states.send()
    trainer.train_state.step = step  # decides whether the run's first steps are dense


def _run(trainer: Trainer, sample: Sample, *, gradients: bool) -> float | None:
    make = trainer.next_batch_maker()
    batch = make.to_device(make.on_host([sample]))
    attend = trainer.attention_of(batch)
    if gradients:
        loss = trainer.run_step.forward_backward([batch], [attend], batch.valid)
        trainer.states.drop_gradients()
        return float(loss) if batch.valid else None
    with torch.no_grad():
        losses = trainer.decoder.token_losses(batch.tokens, batch.positions, batch.labels, attend)
    reshard(trainer.decoder)
    return float(losses.double().sum()) / batch.valid if batch.valid else None
