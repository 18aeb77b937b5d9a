"""Fixtures shared by the tests of the simulator."""

import pytest

from mtrain_cli.simulation import calibration


@pytest.fixture(scope="module")
def by_constants():
    """Price everything except attention by the cluster's constants, as if it was not measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_non_attention_of", lambda *_: None)
        yield
