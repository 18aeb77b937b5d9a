"""Read the tokens in a folder of MDS shards as one stream.

A sample holds one document, or several that are already packed. Its columns:

- ``input_ids``: the tokens, a one-dimensional array of integers.
- ``indices``, in packed samples only: (begin, end) of each document. Tokens outside all
  documents are no targets of the loss.
- ``mask``, optional: whether each token is a target of the loss.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors
from mtrain_cli.data.file_sums import sample_of
from mtrain_cli.data.mds import INDEX, MdsFolder
from mtrain_cli.data.store import StoreMeta, Stretch
from mtrain_cli.data.token_cache import cached_array

TOKENS, SPANS, TARGETS, DOMAIN = "input_ids", "indices", "mask", "domain"
_SAMPLED_SHARDS = 8  # of these, a run remembers a sample of the bytes


class MdsSource:
    """Source of tokens for `PackedDataset`. A sample is a unit, which shuffling keeps whole."""

    folder: Path | None
    samples: dict[str, str]

    def __init__(self, path: str | Path, origin: str) -> None:
        """Open a folder of shards. origin: how the user named the folder, for messages.

        Raises:
            ConfigError: the folder is broken or has no column of tokens.
        """
        self.shards = shards = MdsFolder(path, origin)
        self.folder, self.verify = shards.folder, shards.verify
        require_tokens(shards)
        self._columns = [TOKENS]
        for column, kinds in ((SPANS, ("ndarray", "json")), (TARGETS, ("ndarray",))):
            if column in shards.columns:
                shards.require_column(column, *kinds)
                self._columns.append(column)
        self._origin = origin
        lengths = sample_lengths(shards)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        kind = "packed samples" if SPANS in self._columns else "documents"
        self.meta = StoreMeta(
            dtype="uint32",
            tokenizer="of the shards",
            num_tokens=int(self.offsets[-1]),
            num_documents=lengths.size,
            sha256=hashlib.sha256(shards.identity.encode() + lengths.tobytes()).hexdigest(),
            source=f"{kind} of {path}",
        )
        files = shards.files()
        self.samples = {}
        for file in files[:: -(-len(files) // _SAMPLED_SHARDS)]:
            place = f"{origin}: {file.basename}"
            with explain_read_errors(place, f"{place} is missing, but {INDEX} lists it"):
                self.samples[file.basename] = sample_of(shards.folder / file.basename)

    def read(self, unit: int, start: int, stop: int) -> Stretch:
        sample = self.shards.sample(unit, self._columns)
        place, tokens = f"{self._origin}: sample {unit}", sample[TOKENS]
        length = int(self.offsets[unit + 1] - self.offsets[unit])
        if tokens.shape != (length,):
            raise ConfigError(
                f"{place} has an {TOKENS} of shape {tokens.shape}, not ({length},) as at the start "
                "of the run. The shards have changed: start the run again."
            )
        ends = targets = None
        if SPANS in sample:
            spans = parse_spans(sample[SPANS], length, place, allow_empty=False)
            ends = np.unique(spans)
            ends = ends[(ends > start) & (ends < stop)] - start
            if np.diff(spans).sum() != length:
                targets = np.zeros(length, bool)
                for begin, end in spans:
                    targets[begin:end] = True
        if TARGETS in sample:
            mask = np.asarray(sample[TARGETS]).astype(bool)
            if mask.shape != (length,):
                raise ConfigError(
                    f"{place} has a {TARGETS} of shape {mask.shape}, but {length} tokens. Write "
                    "one value per token."
                )
            targets = mask if targets is None else targets & mask
        return Stretch(tokens[start:stop], ends, None if targets is None else targets[start:stop])


def parse_spans(spans: object, length: int, place: str, *, allow_empty: bool) -> np.ndarray:
    """Return (begin, end) of each document of a sample of ``length`` tokens, int64[documents, 2].

    Args:
        spans: value of the column ``indices``.
        place: name of the input, with which error messages begin.

    Raises:
        ConfigError: spans overlap, decrease or leave the sample, or a span is empty although
            ``allow_empty`` is False.
    """
    try:
        pairs = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: {SPANS} is not a list of (begin, end)") from None
    bounds = np.concatenate([[0], pairs.ravel(), [length]])
    if np.any(np.diff(bounds) < 0) or (not allow_empty and np.any(pairs[:, 0] == pairs[:, 1])):
        raise ConfigError(f"{place}: {SPANS} must be increasing spans within its {length} tokens")
    return pairs


def require_tokens(shards: MdsFolder) -> None:
    """Raise ConfigError unless the column ``input_ids`` holds one-dimensional integer arrays."""
    shards.require_column(TOKENS, "ndarray")
    encoding = shards.columns[TOKENS]
    wrong_dtype = encoding.dtype is not None and encoding.dtype.kind not in "iu"
    if wrong_dtype or (encoding.shape is not None and len(encoding.shape) != 1):
        raise ConfigError(
            f"{shards.origin}: column {TOKENS} is {shards.encodings[TOKENS]}. It must hold "
            "one-dimensional arrays of integers, such as ndarray:uint32."
        )


def sample_lengths(shards: MdsFolder) -> np.ndarray:
    """Return the number of tokens in each sample, int64[samples].

    The result is cached on disk, because counting may decompress every shard.
    """
    facts = ["mds lengths 1", str(shards.folder.absolute()), shards.identity]
    for shard in shards.shards:
        for file in filter(None, (shard.raw_data, shard.zip_data)):
            if (path := shards.folder / file.basename).exists():
                status = path.stat()
                facts.append(f"{file.basename} {status.st_size} {status.st_mtime_ns}")
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]

    def measure() -> np.ndarray:
        shard_numbers = range(len(shards.shards))
        return np.concatenate([shards.array_lengths(TOKENS, number) for number in shard_numbers])

    return cached_array(key, measure)
