"""Load one worker's micro-batches. A background thread prepares the next step during training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.dataset import Dataset, Sample
from mtrain_cli.data.sampler import Sampler

Batch = TypeVar("Batch")


class Loader(Generic[Batch]):
    """Endless iterator over optimizer steps. Each step is this rank's list of micro-batches.

    ``make_batch`` turns a list of `Sample` into a micro-batch, in the background thread.

    For any ``dp``, a step takes the next ``global_batch`` sequences of the run. Data-parallel rank
    r gets the r-th equal part of them. All workers of a context group have the same ``dp_rank``, so
    they get the same batches. ``next`` raises the errors of the background thread.

    Raises:
        ConfigError: global_batch is not a multiple of dp x micro_batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        dp_rank: int,
        dp: int,
        global_batch: int,
        micro_batch: int,
        make_batch: Callable[[list[Sample]], Batch],
    ) -> None:
        if global_batch < 1 or global_batch % dp:
            raise ConfigError(
                f"train.global_batch={global_batch}: must be a multiple of {dp}, the number of "
                "data-parallel groups"
            )
        if micro_batch < 1 or (global_batch // dp) % micro_batch:
            raise ConfigError(
                f"train.micro_batch={micro_batch}: must divide the {global_batch // dp} sequences "
                f"per data-parallel group (train.global_batch={global_batch} over {dp})"
            )
        assert 0 <= dp_rank < dp
        assert sampler.num_sequences == len(dataset)
        self._dataset, self._sampler = dataset, sampler
        self._dp_rank, self._local = dp_rank, global_batch // dp
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._make_batch = make_batch
        self._closing = threading.Event()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mtrain-data")
        self._next: Future[list[Batch]] | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """Return the micro-batches of the next step: local batch / micro_batch of them."""
        pending, self._next = self._next, None
        if pending is None:
            pending = self._reader.submit(self._read, self._sampler.consumed)
        batches = pending.result()
        self._sampler.advance(self._global_batch)
        self._next = self._reader.submit(self._read, self._sampler.consumed)
        return batches

    def __enter__(self) -> Loader[Batch]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead after the current sequence. The loader cannot be used again."""
        self._closing.set()
        self._reader.shutdown(wait=True, cancel_futures=True)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        It holds the sampler's state after the last step handed out. The other keys identify the
        stream of sequences.
        """
        stream = {"sequences": len(self._dataset), "fingerprint": self._dataset.fingerprint}
        return {**self._sampler.state(), **stream}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the last step of a saved state, which may come from another ``dp``.

        Raises:
            ConfigError: the corpus is a different one.
        """
        saved = (int(state["sequences"]), str(state["fingerprint"]))
        current = (len(self._dataset), self._dataset.fingerprint)
        if saved != current:
            raise ConfigError(
                f"The data changed since the checkpoint: it was written for corpus {saved[1][:12]} "
                f"with {saved[0]:,} sequences, but this corpus is {current[1][:12]} with "
                f"{current[0]:,}. Resume with the same data and seq (and for data=stdlib the same "
                "Python)."
            )
        if self._next is not None:
            if not self._next.cancel():
                wait([self._next])  # the reader uses the sampler
            self._next = None
        self._sampler.load_state(state)

    def _read(self, consumed: int) -> list[Batch]:
        first = consumed + self._dp_rank * self._local
        batches = []
        for start in range(first, first + self._local, self._micro_batch):
            samples = []
            for number in range(start, start + self._micro_batch):
                if self._closing.is_set():
                    raise CancelledError
                samples.append(self._dataset[self._sampler.sequence(number)])
            batches.append(self._make_batch(samples))
        return batches
