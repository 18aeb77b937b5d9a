"""Orders that need no stored list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain_cli.data.sampler import Permutation, mix64, shuffled_order


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
