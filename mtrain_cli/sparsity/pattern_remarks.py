"""Remarks on surprising sparsity settings, for the banner and the dry run."""

from __future__ import annotations

from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import format_size
from mtrain_cli.sparsity.pattern_registry import make_pattern

_DENSE_SHARE = 4  # one layer in four; with the last two of eight dense, small models lost nothing


def computes_everything(config: Config) -> str | None:
    """Return why the pattern chooses every pair for any data, or None if it may leave out pairs."""
    pattern = make_pattern(config.sparsity, config.seed)
    covering = pattern.covers(config.seq) if pattern is not None else None
    if not covering:
        return None
    seq = f"seq={format_size(config.seq)}"
    return f"{covering} all of {seq}: computes every pair, like sparsity=dense"


def remarks(config: Config) -> list[str]:
    sparsity = config.sparsity
    notes = [line for line in (computes_everything(config),) if line is not None]
    if sparsity.dense_steps >= config.train.steps:
        notes.append(
            f"no step is sparse: sparsity.dense_steps={sparsity.dense_steps} must be below "
            f"train.steps={config.train.steps}"
        )
    if notes:
        return notes
    if (remark := sparsity.packed_documents_remark) and config.data.document_mask:
        notes.append(remark)
    layers = config.model.num_layers
    if sparsity.loses_in_all_layers and not sparsity.dense_layers and layers > 1:
        dense = max(1, layers // _DENSE_SHARE)
        last = "the last layer" if dense == 1 else f"the last {dense} layers"
        notes.append(
            "every layer is sparse: such models found fewer needles than dense ones in `mtrain "
            f"study learning` (docs/studies.md); sparsity.dense_layers={dense} keeps {last} dense"
        )
    return notes
