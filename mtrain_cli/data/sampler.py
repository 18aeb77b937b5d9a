"""Which sequence of the corpus comes when. The whole state is two integers and knows nothing of workers."""

from __future__ import annotations

from collections.abc import Mapping

from mtrain_cli.data.permutation import Permutation


class Sampler:
    """The order of sequences over a run: each epoch is another permutation of the dataset, chosen by (seed, epoch).

    ``consumed`` counts sequences that were handed out since the start of the run, over all workers and epochs. Sequence numbers go on
    without end: number n belongs to epoch n // num_sequences.
    """

    def __init__(self, num_sequences: int, seed: int, consumed: int = 0) -> None:
        if num_sequences < 1:
            raise ValueError(f"A sampler needs at least one sequence, not {num_sequences}.")
        if consumed < 0:
            raise ValueError(f"The number of consumed sequences cannot be negative: {consumed}.")
        self.num_sequences = num_sequences
        self.seed = seed
        self.consumed = consumed
        self._permutations: dict[tuple[int, ...], Permutation] = {}

    @property
    def epoch(self) -> int:
        """Full passes over the dataset that are done."""
        return self.consumed // self.num_sequences

    def sequence(self, number: int) -> int:
        """Index into the dataset of sequence ``number`` of the whole run."""
        if number < 0:
            raise ValueError(f"Sequence numbers start at 0, not {number}.")
        epoch, position = divmod(number, self.num_sequences)
        if (epoch,) not in self._permutations:
            self._permutations = {(epoch,): Permutation(self.num_sequences, self.seed, epoch)}
        return self._permutations[(epoch,)](position)

    def advance(self, count: int) -> None:
        """Note that ``count`` more sequences were handed out."""
        assert count >= 0
        self.consumed += count

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: ``seed`` and ``consumed``."""
        return {"seed": self.seed, "consumed": self.consumed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from ``state()`` of an earlier sampler of the same dataset, whatever its number of workers was."""
        seed, consumed = int(state["seed"]), int(state["consumed"])
        if consumed < 0:
            raise ValueError(f"The number of consumed sequences cannot be negative: {consumed}.")
        self.seed, self.consumed = seed, consumed
        self._permutations = {}
