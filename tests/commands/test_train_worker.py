"""A worker of `mtrain train` profiles and evaluates only if the settings ask for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mtrain_cli.commands import train
from mtrain_cli.composition.compose import compose
from mtrain_cli.evaluation.in_training import TaskEvaluations
from mtrain_cli.profiling.periodic_profile import TrainingProfile
from mtrain_cli.training import loop


@pytest.mark.parametrize(
    ("words", "callbacks"),
    [
        ([], []),
        (["profile.every=2"], [TrainingProfile]),
        (["train.eval_tasks=[niah]"], [TaskEvaluations]),
    ],
)
def test_callbacks_follow_the_settings(monkeypatch, words, callbacks):
    seen = []
    monkeypatch.setattr(loop, "train", lambda *given: seen.append(given) or True)
    config = compose(words)
    environment = SimpleNamespace(device="cpu")
    assert train.run_worker(config, "run", environment, resume=False)
    assert seen == [(config, "run", environment, False, callbacks, None)]
