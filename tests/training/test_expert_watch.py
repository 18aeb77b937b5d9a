"""A router that sends all tokens to one expert gives one warning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtrain_cli.config.schema import MoeConfig
from mtrain_cli.training.callback import FinishedStep
from mtrain_cli.training.expert_watch import ExpertWatch


def warnings(moe: MoeConfig, *steps: list[float] | None) -> list[str]:
    lines: list[str] = []
    watch = ExpertWatch(moe, lines.append)
    for number, loads in enumerate(steps, 1):
        metrics: Any = SimpleNamespace(step=number, expert_load_by_layer=loads)
        result: Any = None
        watch.after_step(FinishedStep(result, metrics, last=False))
    return lines


@pytest.mark.parametrize("top_k", [1, 2])
def test_all_tokens_on_one_expert_give_one_warning(top_k):
    moe = MoeConfig(experts=8, top_k=top_k, expert_size=4, dense_layers=1)
    full = 8 / top_k
    (line,) = warnings(moe, [1.0, full * 0.9], [1.0, full], [full, full])
    assert line.startswith("step 2: in layer 2, all tokens chose the same expert (of 8")


def test_even_loads_and_dense_models_give_none():
    assert warnings(MoeConfig(experts=2, top_k=2, expert_size=4), [1.0, 1.0]) == []
    assert warnings(MoeConfig(), None) == []
    assert warnings(MoeConfig(experts=8, top_k=2, expert_size=4), [3.9, 1.2]) == []
