"""What tests of the simulator share."""

import pytest

from mtrain_cli.simulation import calibration


@pytest.fixture(scope="module")
def by_constants():
    """Everything beside attention is priced by the constants of the cluster, as where nothing of it was measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_non_attention_of", lambda *_: None)
        yield
