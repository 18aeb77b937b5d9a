"""Dense layers at the end of a sparse model, and the kinds of layers of a model."""

from __future__ import annotations

from mtrain_cli.config.mask_settings import LAYER_KINDS
from mtrain_cli.config.schema import Config

# The kinds of layers under `sparsity.dense_layers`.
SPARSE_KINDS = ("sparse", "dense")
EVERY_KIND = (*LAYER_KINDS, *SPARSE_KINDS)


def layer_kinds(config: Config) -> dict[str, list[int]]:
    """Return the numbers of the layers of each kind.

    The keys are `LAYER_KINDS` or `SPARSE_KINDS`, or "" if all layers are alike.
    """
    layers = config.model.num_layers
    dense = config.sparsity.dense_of(layers)
    if not dense:
        return config.mask.layer_kinds(layers)
    sparse = [layer for layer in range(layers) if layer not in dense]
    return dict(zip(SPARSE_KINDS, (sparse, sorted(dense)), strict=True))


def last_layers(config: Config) -> str:
    """Return ``the last 2 layers``: those that are dense in a sparse model; "" without any."""
    number = config.sparsity.dense_layers or 0
    if number < 2:
        return "the last layer" * number
    return f"the last {number} layers"
