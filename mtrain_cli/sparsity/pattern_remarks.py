"""Remarks on what a sparse run computes that its user may not expect, for banner and dry run."""

from __future__ import annotations

from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import format_size
from mtrain_cli.sparsity.pattern_registry import make_pattern


def computes_everything(config: Config) -> str | None:
    """Return why the pattern computes every pair whatever the data, or None if it does not.

    None for dense attention, too.
    """
    pattern = make_pattern(config.sparsity, config.seed)
    covering = pattern.covers(config.seq) if pattern is not None else None
    return (
        f"{covering} all of seq={format_size(config.seq)}: computes every pair, like sparsity=dense"
        if covering
        else None
    )


def remarks(config: Config) -> list[str]:
    """Return one line per remark; none for a dense run."""
    sparsity = config.sparsity
    notes = [line for line in (computes_everything(config),) if line is not None]
    if sparsity.dense_steps and sparsity.dense_steps >= config.train.steps:
        notes.append(
            f"no step is sparse: sparsity.dense_steps={sparsity.dense_steps} must be below "
            f"train.steps={config.train.steps}"
        )
    if sparsity.windows == 1 and config.data.document_mask and not notes:
        notes.append(
            "a single window at the end probes only the last packed document; "
            "set sparsity.windows=4 to probe several"
        )
    return notes
