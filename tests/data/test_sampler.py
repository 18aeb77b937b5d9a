"""The order of sequences in a run, and permutations that need no stored list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain_cli.data.sampler import Permutation, Sampler, mix64, shuffled_order


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


@settings(deadline=None)  # other processes share the cores
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


@settings(deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_permutation_is_a_bijection_of_its_range(size: int, seed: int, epoch: int) -> None:
    permutation = Permutation(size, seed, epoch)
    assert sorted(permutation(index) for index in range(size)) == list(range(size))


@given(
    size=st.integers(10**9, 10**15),
    seed=st.integers(0, 2**64 - 1),
    start=st.integers(0, 10**9 - 100),
)
def test_permutation_of_a_huge_range_stays_in_range_without_repeats(
    size: int, seed: int, start: int
) -> None:
    permutation = Permutation(size, seed)
    images = [permutation(index) for index in range(start, start + 100)]
    assert len(set(images)) == 100
    assert all(0 <= image < size for image in images)


@pytest.mark.parametrize("size", [2, 3, 5, 7, 16, 33])
def test_every_element_comes_first_about_equally_often(size: int) -> None:
    epochs = 400 * size
    counts = np.bincount(
        [Permutation(size, 1, epoch)(0) for epoch in range(epochs)], minlength=size
    )
    # expected: 400 each, with a standard deviation below 20
    assert counts.min() > 300
    assert counts.max() < 500


def test_orders_never_change_between_versions() -> None:
    """Resumed runs rely on these recorded values. Change them only with the checkpoint version."""
    permutation = Permutation(1000, 0, 0)
    assert [permutation(index) for index in range(5)] == [544, 620, 897, 727, 761]
    assert shuffled_order(8, 0).tolist() == [5, 0, 4, 3, 6, 7, 2, 1]
    assert mix64(1, 2) != mix64(2, 1)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000, 2048])
def test_images_equal_the_values_one_by_one(size: int) -> None:
    permutation = Permutation(size, 3, -1)
    assert permutation.images().tolist() == [permutation(index) for index in range(size)]
