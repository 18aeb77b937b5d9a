"""Load the micro-batches of one rank. During a step, a thread prepares the next step's batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.mixture import Dataset
from mtrain_cli.data.sampler import Sampler

Batch = TypeVar("Batch")


class Loader(Generic[Batch]):
    """Endless iterator over optimizer steps that yields one rank's micro-batches of each step.

    A step takes the next ``global_batch`` sequences of the run and splits them into ``dp`` equal
    parts. Data-parallel rank r gets part r, and so do all workers of its context group. An error of
    the background thread comes out of the next call of ``next``.

    micro_batch: number of sequences per micro-batch.
    make_batch: turns a list of `Sample` into a micro-batch, in the background thread.
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
        if min(global_batch, micro_batch) < 1 or global_batch % (dp * micro_batch):
            raise ConfigError(
                f"train.global_batch={global_batch}: must be a multiple of {dp * micro_batch}: "
                f"train.micro_batch={micro_batch} for each of the {dp} context groups"
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
        """Return a list of the next step's global_batch / (dp * micro_batch) micro-batches."""
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
        """Stop the background thread after its current sequence. Do not use the loader again."""
        self._closing.set()
        self._reader.shutdown(wait=True, cancel_futures=True)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, after the last step that ``next`` returned.

        ``sequences`` and ``fingerprint`` identify the dataset, and ``samples`` the bytes that its
        files had when they were opened. The other keys are the sampler's state.
        """
        stream = {"sequences": len(self._dataset), "fingerprint": self._dataset.fingerprint}
        return {**self._sampler.state(), **stream, "samples": dict(self._dataset.samples)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the last step of a saved state. ``dp`` may differ from the saved run."""
        saved = (int(state["sequences"]), str(state["fingerprint"]))
        current = (len(self._dataset), self._dataset.fingerprint)
        if saved != current:
            raise ConfigError(
                "The data changed since the checkpoint. Then the corpus had the fingerprint "
                f"{saved[1][:12]} and {saved[0]:,} sequences; now it has {current[1][:12]} and "
                f"{current[0]:,}. Resume with the same data and seq (for data=stdlib also the same "
                "Python)."
            )
        samples = self._dataset.samples
        for name, digest in state.get("samples", {}).items():  # older checkpoints have none
            if samples.get(name, digest) != digest:
                raise ConfigError(
                    f"The data changed since the checkpoint: {name} has other bytes. Put it back, "
                    "or start a new run."
                )
        if self._next is not None:
            if not self._next.cancel():
                wait([self._next])  # the background thread still uses the sampler
            self._next = None
        self._sampler.load_state(state)

    def leave_out(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leave out ranges as `Sampler.leave_out`, before the first step or after `load_state`."""
        assert self._next is None, "that batch may be of these ranges"
        self._sampler.leave_out(ranges)

    def _read(self, consumed: int) -> list[Batch]:
        first, size = consumed + self._dp_rank * self._local, self._micro_batch
        return [
            self._make_batch([self._sample(start + i) for i in range(size)])
            for start in range(first, first + self._local, size)
        ]

    def _sample(self, number: int) -> Sample:
        if self._closing.is_set():
            raise CancelledError
        return self._dataset[self._sampler.sequence(self._sampler.position(number))]
