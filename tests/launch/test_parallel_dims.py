"""Ranks and their places along the dimensions of parallelism."""

from __future__ import annotations

import pytest

from mtrain_cli.launch.environment import ParallelDims


def test_data_parallelism_takes_the_workers_that_the_other_degrees_leave():
    dims = ParallelDims.of(12, cp=4)
    assert (dims.dp, dims.cp, dims.workers) == (3, 4, 12)
    assert str(dims) == "3 data x 4 context"
    assert dims.sizes == {"pp": 1, "dp": 3, "cp": 4, "tp": 1}


@pytest.mark.parametrize(("workers", "cp"), [(6, 4), (2, 4)])
def test_degrees_must_multiply_to_the_workers(workers, cp):
    with pytest.raises(ValueError, match=f"must divide the {workers} workers"):
        ParallelDims.of(workers, cp=cp)


@pytest.mark.parametrize("cp", [0, -8])
def test_degrees_must_be_positive(cp):
    with pytest.raises(ValueError, match="at least 1"):
        ParallelDims.of(8, cp=cp)


def test_the_last_dimension_counts_fastest():
    dims = ParallelDims.of(6, cp=2)
    places = [(dims.coordinate("dp", rank), dims.coordinate("cp", rank)) for rank in range(6)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_group_differs_only_along_its_dimension():
    dims = ParallelDims.of(6, cp=2)
    assert dims.group("cp", 3) == (2, 3)
    assert dims.group("dp", 3) == (1, 3, 5)
    assert dims.groups("cp") == [(0, 1), (2, 3), (4, 5)]
    assert dims.groups("dp") == [(0, 2, 4), (1, 3, 5)]
