"""The order of the sequences in a run. The state is two integers for any number of workers."""

from __future__ import annotations

from collections.abc import Mapping

from mtrain_cli.data.permutation import cached_permutation


class Sampler:
    """The order of the sequences in a run: in each epoch a new permutation of the dataset.

    A sequence number counts through all epochs, so it has no upper limit. Number n belongs to epoch
    n // num_sequences.

    num_sequences: number of sequences in the dataset.
    seed: determines the permutations.
    consumed: number of sequences that the run has read so far, over all workers and epochs.
    """

    def __init__(self, num_sequences: int, seed: int) -> None:
        if num_sequences < 1:
            raise ValueError(f"A sampler needs at least one sequence, not {num_sequences}.")
        self.num_sequences, self.seed, self.consumed = num_sequences, seed, 0

    def sequence(self, number: int) -> int:
        """Return the dataset index of the run's sequence ``number``."""
        if number < 0:
            raise ValueError(f"Sequence numbers start at 0, not {number}.")
        epoch, position = divmod(number, self.num_sequences)
        return cached_permutation(self.num_sequences, self.seed, epoch)(position)

    def advance(self, count: int) -> None:
        """Add ``count`` to ``consumed``."""
        assert count >= 0
        self.consumed += count

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint: ``seed`` and ``consumed``."""
        return {"seed": self.seed, "consumed": self.consumed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from ``state``, which a sampler over the same dataset saved."""
        seed, consumed = int(state["seed"]), int(state["consumed"])
        if consumed < 0:
            raise ValueError(f"The number of consumed sequences cannot be negative: {consumed}.")
        self.seed, self.consumed = seed, consumed
