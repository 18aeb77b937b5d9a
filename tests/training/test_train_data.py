"""Ranks that differ in data or layout are refused. (`test_loop` and `test_trainer` run them.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.training import trainer
from mtrain_cli.training.trainer import (
    check_same_data,
    check_same_layouts,
    first_rank_without_data,
)

GROUP: Any = None
CPU = torch.device("cpu")


def answers(monkeypatch, *others: Any) -> None:
    """Let other ranks give these answers, after this rank's."""
    monkeypatch.setattr(trainer, "share", lambda mine, _: [mine, *others])


def test_equal_data_give_the_place_of_each_rank(monkeypatch):
    answers(monkeypatch, ("abc", "host-2 cpu"))
    places = check_same_data(compose(), "abc", CPU, GROUP)
    assert places[1] == "host-2 cpu"
    answers(monkeypatch, ("abc", ""), ("xyz", ""))
    with pytest.raises(ConfigError, match=r"data\.kind=stdlib: rank 2 reads a different corpus"):
        check_same_data(compose(), "abc", CPU, GROUP)


def test_only_ranks_of_the_same_sequence_need_equal_layouts(monkeypatch):
    environment, batch = gloo.environment(0, 4, 2), SimpleNamespace(layout="mine")
    batches: Any = [batch]
    answers(monkeypatch, (1, "another"), (1, "another"))
    check_same_layouts(compose(), environment, batches, GROUP)
    answers(monkeypatch, (0, "another"))
    with pytest.raises(ConfigError, match="ranks 0 and 1 balance the same batch differently"):
        check_same_layouts(compose(), environment, batches, GROUP)


def test_the_first_rank_without_data_is_named(monkeypatch):
    alone = gloo.environment(0, 1, 1)
    assert first_rank_without_data(alone, GROUP, has_data=True) is None
    assert first_rank_without_data(alone, GROUP, has_data=False) == 0
    monkeypatch.setattr(dist, "all_reduce", lambda first, *_, **__: first.clamp_(max=2))
    assert first_rank_without_data(gloo.environment(3, 4, 4), GROUP, has_data=True) == 2
