"""What someone who set up a sparse run may not expect of it, in a line each below the pattern in banner and dry run."""

from __future__ import annotations

from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import format_size
from mtrain_cli.sparsity.pattern_registry import make_pattern


def computes_everything(config: Config) -> str | None:
    """Why the pattern computes every pair that the mask allows, whatever the data; None where it depends on them, or attention is dense."""
    pattern = make_pattern(config.sparsity, config.seed)
    covering = pattern.covers(config.seq) if pattern is not None else None
    return (
        f"{covering} all of seq={format_size(config.seq)}: computes every pair, as dense does"
        if covering
        else None
    )


def remarks(config: Config) -> list[str]:
    """Nothing for a dense run."""
    sparsity = config.sparsity
    found = [line for line in (computes_everything(config),) if line is not None]
    if sparsity.dense_steps and sparsity.dense_steps >= config.train.steps:
        found.append(
            f"no step is sparse: sparsity.dense_steps={sparsity.dense_steps} is not below train.steps={config.train.steps}"
        )
    if sparsity.windows == 1 and config.data.document_mask and not found:
        found.append(
            "one window at the end probes only the last document of packed ones; sparsity.windows=4 probes several"
        )
    return found
