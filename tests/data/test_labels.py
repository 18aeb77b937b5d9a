"""The label that the loss ignores."""

import inspect

import torch

from mtrain_cli.data.labels import IGNORED


def test_torchs_cross_entropy_ignores_the_label_by_default():
    signature = inspect.signature(torch.nn.functional.cross_entropy)
    assert signature.parameters["ignore_index"].default == IGNORED
