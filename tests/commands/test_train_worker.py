"""A worker of `mtrain train` records profiles only if `profile.every` asks for them."""

from __future__ import annotations

import pytest

from mtrain_cli.commands import train_worker
from mtrain_cli.composition.compose import compose
from mtrain_cli.profiling.periodic_profile import TrainingProfile


@pytest.mark.parametrize(
    ("words", "callbacks"), [([], []), (["profile.every=2"], [TrainingProfile])]
)
def test_callbacks_follow_the_settings(monkeypatch, words, callbacks):
    seen = []
    monkeypatch.setattr(train_worker.loop, "train", lambda *given: seen.append(given) or True)
    config = compose(words)
    assert train_worker.train(config, "run", "environment", resume=False)
    assert seen == [(config, "run", "environment", False, callbacks)]
