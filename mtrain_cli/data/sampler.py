"""The order of sequences in a run. Its whole state is two integers, independent of the workers."""

from __future__ import annotations

from collections.abc import Mapping

from mtrain_cli.data.permutation import cached_permutation


class Sampler:
    """Order the sequences of a run: each epoch is another permutation, chosen by (seed, epoch).

    ``consumed`` counts the sequences handed out since the start of the run, over all workers and
    epochs. Sequence numbers have no upper limit: number n belongs to epoch n // num_sequences.
    """

    def __init__(self, num_sequences: int, seed: int, consumed: int = 0) -> None:
        if num_sequences < 1:
            raise ValueError(f"A sampler needs at least one sequence, not {num_sequences}.")
        if consumed < 0:
            raise ValueError(f"The number of consumed sequences cannot be negative: {consumed}.")
        self.num_sequences = num_sequences
        self.seed = seed
        self.consumed = consumed

    @property
    def epoch(self) -> int:
        """Number of full passes over the dataset so far."""
        return self.consumed // self.num_sequences

    def sequence(self, number: int) -> int:
        """Return the dataset index of sequence ``number`` of the whole run."""
        if number < 0:
            raise ValueError(f"Sequence numbers start at 0, not {number}.")
        epoch, position = divmod(number, self.num_sequences)
        return cached_permutation(self.num_sequences, self.seed, epoch)(position)

    def advance(self, count: int) -> None:
        """Record that ``count`` more sequences were handed out."""
        assert count >= 0
        self.consumed += count

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint: ``seed`` and ``consumed``."""
        return {"seed": self.seed, "consumed": self.consumed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from ``state()`` of a sampler of this dataset, with any number of workers."""
        seed, consumed = int(state["seed"]), int(state["consumed"])
        if consumed < 0:
            raise ValueError(f"The number of consumed sequences cannot be negative: {consumed}.")
        self.seed, self.consumed = seed, consumed
