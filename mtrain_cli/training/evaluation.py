"""Held-out loss by context length, which shows whether the model uses long context.

Layout and exchange do not change the result. The context of a token is counted in the whole
sequence, and losses are summed in float64 over all workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.config import documents
from mtrain_cli.config.sizes import format_size
from mtrain_cli.records.metrics import drop_later_steps, read_steps

if TYPE_CHECKING:
    from mtrain_cli.training.batch import Batch, HostBatch
    from mtrain_cli.training.trainer import Trainer

EVALUATIONS_FILE = "evaluations.jsonl"
FIRST_EDGE = 128  # tokens; the end of each later bucket is twice the end of the previous one


@dataclass(frozen=True)
class ContextBucket:
    """The tokens with `begin` to `end` - 1 earlier tokens in their document or sequence."""

    begin: int
    end: int
    tokens: int
    loss: float | None  # mean in nats; None if the bucket is empty or the loss not finite


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss of the model after `step` optimizer steps."""

    step: int
    loss: float | None  # mean over all tokens with a label, in nats; None if not finite
    tokens: int  # with a label
    sequences: int
    seconds: float
    attention: str  # "dense", or the name of the sparse pattern
    buckets: tuple[ContextBucket, ...]  # loss by context length, shortest first

    def line(self) -> str:
        """Summarize the evaluation in one line for the user."""
        by_context = ", ".join(
            f"up to {format_size(b.end)} {b.loss:.4f}" for b in self.buckets if b.loss is not None
        )
        count = f"{self.sequences} sequence{'s' * (self.sequences != 1)}"
        loss = "not finite" if self.loss is None else f"{self.loss:.4f}"
        return (
            f"held-out loss {loss} at step {self.step} ({self.attention}, {count}); "
            f"by context: {by_context}"
        )


def bucket_edges(seq: int) -> np.ndarray:
    doublings = math.ceil(math.log2(max(1, seq / FIRST_EDGE)))
    return np.array([0, *(FIRST_EDGE << n for n in range(doublings)), seq])


def evaluate(trainer: Trainer) -> Evaluation:
    """Measure the held-out loss with the attention of the next step. All workers call this.

    Attention is dense until a pattern that learns has learned.
    """
    started = time.perf_counter()
    # Imported here because the import takes a second, and reports need only this module's readers.
    from mtrain_cli.parallel.fsdp import reshard

    e, held_out = trainer.environment, trainer.held_out
    make = trainer.evaluation_batch_maker()
    bounds = bucket_edges(trainer.config.seq)
    # The last column collects tokens without a label.
    sums = torch.zeros(2, len(bounds), dtype=torch.float64, device=trainer.device)
    firsts = range(0, len(held_out), e.dims.dp)
    replica = e.dims.coordinate("dp", e.rank)
    hosts: dict[int, HostBatch] = {}

    def batch_of(number: int) -> Batch:
        # Workers gather parameters together, so one without a sequence computes that of another.
        own = firsts[number] + replica < len(held_out)
        sample = held_out[firsts[number] + replica if own else firsts[number]]
        hosts[number] = make.on_host([sample])
        return make.to_device(hosts[number])

    def count(number: int, losses: torch.Tensor | None) -> None:
        host = hosts.pop(number)
        if losses is None or firsts[number] + replica >= len(held_out):
            return
        places = _bucket_of_tokens(host, bounds)
        if trainer.tensor is not None:
            places = trainer.tensor.own(places, len(bounds) - 1)[0]
        places = places.to(trainer.device)
        sums[0].index_add_(0, places, losses.flatten().double())
        sums[1].index_add_(0, places, torch.ones_like(places, dtype=torch.float64))

    with torch.no_grad():
        if trainer.stage is not None:
            trainer.stage.token_losses(trainer.decoder, len(firsts), batch_of, count)
        else:
            for number in range(len(firsts)):
                batch = batch_of(number)
                inputs = batch.tokens, batch.positions, batch.labels, batch.attention
                count(number, trainer.decoder.token_losses(*inputs))
    reshard(trainer.decoder)  # otherwise the backward pass reshards, but none follows here
    totals = sums.cpu()
    dist.all_reduce(totals, group=trainer.host_group)
    losses, counts = totals.numpy()[:, :-1]
    buckets = tuple(
        ContextBucket(int(begin), int(end), int(count), _finite_mean(loss, count))
        for (begin, end), loss, count in zip(pairwise(bounds), losses, counts, strict=True)
    )
    return Evaluation(
        step=trainer.step,
        loss=_finite_mean(losses.sum(), max(1.0, counts.sum())),
        tokens=int(counts.sum()),
        sequences=len(trainer.held_out),
        seconds=time.perf_counter() - started,
        attention="dense" if make.pattern is None else trainer.config.sparsity.pattern,
        buckets=buckets,
    )


def _finite_mean(total: float, count: float) -> float | None:
    mean = float(total / count) if count else math.nan
    return mean if math.isfinite(mean) else None


def _bucket_of_tokens(host: HostBatch, bounds: np.ndarray) -> torch.Tensor:
    """Return the bucket of each token, int64 [batch * tokens]; the last is for those unlabelled."""
    labels = host.numbers[2].numpy()
    places = np.searchsorted(bounds, host.earlier, side="right") - 1
    return torch.from_numpy(np.where(labels < 0, len(bounds) - 1, places).ravel())


class EvaluationWriter:
    """Append to `evaluations.jsonl` of a run, where only rows up to `start_step` are kept."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        self.path = Path(run_dir) / EVALUATIONS_FILE
        exists = self.path.exists()
        self.kept: list[dict[str, Any]] = drop_later_steps(self.path, start_step) if exists else []

    def write(self, evaluation: Evaluation) -> str | None:
        """Append a row. Return None, or a warning if the row cannot be written."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(documents.json_text(asdict(evaluation)) + "\n")
        except OSError as error:
            return (
                f"{self.path}: the evaluation of step {evaluation.step} was not written "
                f"({error.strerror}); training goes on"
            )
        return None


def read_evaluations(path: Path) -> tuple[list[Evaluation], list[int]]:
    """Return the evaluations in a run's folder, and the numbers of damaged lines, from 1."""
    file = Path(path) / EVALUATIONS_FILE
    if not file.is_file():
        return [], []
    return read_steps(file, partial(documents.checked, Evaluation))


def losses_by_bucket(
    evaluations: Sequence[Evaluation],
) -> list[tuple[int, int, list[float | None]]]:
    """Return begin, end and losses by evaluation (None if empty) of each bucket with tokens."""
    spans = sorted(
        {(b.begin, b.end) for evaluation in evaluations for b in evaluation.buckets if b.tokens}
    )
    by_span = [{(b.begin, b.end): b.loss for b in evaluation.buckets} for evaluation in evaluations]
    return [(begin, end, [losses.get((begin, end)) for losses in by_span]) for begin, end in spans]
