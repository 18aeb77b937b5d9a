"""Fixtures of the tests of training."""

import pytest

from mtrain_cli.launch import environment
from mtrain_cli.training import hardware
from mtrain_cli.training.memory import GIB


@pytest.fixture
def with_24_gib(monkeypatch):
    """Pretend to the plan and the trainer that this machine has 24 GiB."""
    for place in (hardware, environment):
        monkeypatch.setattr(place, "host_memory", lambda: 24 * GIB)
