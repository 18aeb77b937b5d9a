"""The order of sequences in a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain_cli.data.sampler import Sampler


@given(size=st.integers(1, 60), seed=st.integers(0, 2**32), epochs=st.integers(1, 4))
def test_each_epoch_has_every_sequence_exactly_once(size: int, seed: int, epochs: int) -> None:
    sampler = Sampler(size, seed)
    order = [sampler.sequence(number) for number in range(size * epochs)]
    for epoch in range(epochs):
        assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_give_different_orders() -> None:
    sampler, other = Sampler(50, 0), Sampler(50, 1)
    first = [sampler.sequence(number) for number in range(50)]
    assert first != [sampler.sequence(number) for number in range(50, 100)]
    assert first != [other.sequence(number) for number in range(50)]


@given(size=st.integers(1, 60), numbers=st.lists(st.integers(0, 500), max_size=30))
def test_a_sequence_depends_on_its_number_only(size: int, numbers: list[int]) -> None:
    """Neither earlier calls nor the progress of the run matter."""
    sampler = Sampler(size, 9)
    sampler.advance(17)
    assert [sampler.sequence(number) for number in numbers] == [
        Sampler(size, 9).sequence(number) for number in numbers
    ]


def test_state_is_two_integers_and_restores_the_order() -> None:
    sampler = Sampler(10, 3)
    sampler.advance(25)
    state = sampler.state()
    assert state == {"seed": 3, "consumed": 25}
    restored = Sampler(10, 99)
    restored.sequence(3)
    restored.load_state(state)
    assert restored.consumed == 25
    assert [restored.sequence(number) for number in range(40)] == [
        Sampler(10, 3).sequence(number) for number in range(40)
    ]


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        Sampler(0, 0)
    with pytest.raises(ValueError, match="cannot be negative"):
        Sampler(1, 0).load_state({"seed": 0, "consumed": -1})
    with pytest.raises(ValueError, match="start at 0"):
        Sampler(1, 0).sequence(-1)
