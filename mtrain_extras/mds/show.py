"""The terminal output of `mtrain data show` for MDS shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mtrain_cli.commands.data_output import print_lengths, print_snippet, require_document
from mtrain_cli.console import Console
from mtrain_cli.data.tokenizers import Tokenizer
from mtrain_extras.mds.shards import (
    DOMAIN,
    SPANS,
    TARGETS,
    TOKENS,
    MdsFolder,
    open_mds_folders,
    sample_lengths,
)


def show_shards(
    console: Console, path: Path, document: int, tokenizer: Tokenizer | None, *, check: bool
) -> None:
    """Print columns, sample counts, and tokens by domain and length of MDS folders."""
    folders = list(open_mds_folders(path.expanduser(), f"PATH={path}"))
    first = folders[0][1]
    require_document(document, first.num_samples)
    parts: dict[str, list[np.ndarray]] = {}
    for name, shards in folders:
        lengths = sample_lengths(shards)
        size = sum((shard.zip_data or shard.raw_data).bytes for shard in shards.shards)
        compression = shards.shards[0].compression
        console.print(
            f"{shards.folder}: {shards.num_samples:,} samples, {int(lengths.sum()):,} tokens in "
            f"{len(shards.shards)} MDS shards ({size / 2**20:,.1f} MiB"
            f"{f', {compression}' if compression else ''})"
        )
        console.print(f"  columns {shards.describe_columns()}")
        in_samples = not name and DOMAIN in shards.columns
        by_domain = _samples_by_domain(shards, lengths) if in_samples else {name: lengths}
        for domain, of_domain in by_domain.items():
            parts.setdefault(domain, []).append(of_domain)
        if check:
            columns = [column for column in (TOKENS, SPANS, TARGETS) if column in shards.columns]
            for number in range(shards.num_samples):
                shards.sample(number, columns)
    if check:
        console.print("  every sample was read; sizes and available checksums match")
    print_lengths(console, {name: np.concatenate(lengths) for name, lengths in parts.items()})
    print_snippet(console, first.sample(document, [TOKENS])[TOKENS], document, tokenizer)


def _samples_by_domain(shards: MdsFolder, lengths: np.ndarray) -> dict[str, np.ndarray]:
    labels = np.array(
        [str(shards.sample(number, [DOMAIN])[DOMAIN]) for number in range(shards.num_samples)]
    )
    return {str(label): lengths[labels == label] for label in np.unique(labels)}
