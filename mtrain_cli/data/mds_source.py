"""Tokens of a folder of MDS shards as one stream: raw documents, or samples that are already
packed.

Columns: ``input_ids``, one-dimensional integers. Packed samples also have ``indices``, the spans of
their documents as a list of (begin, end), and may have ``mask``, true where a token is a target.
Tokens outside every span are no targets.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.mds import MdsFolder
from mtrain_cli.data.store import VERSION, StoreMeta, Stretch
from mtrain_cli.data.token_cache import cached_array

TOKENS, SPANS, TARGETS, DOMAIN = "input_ids", "indices", "mask", "domain"
_INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


class MdsSource:
    """Source of tokens for `PackedDataset`. A unit is a sample, which shuffling never cuts."""

    folder: Path | None

    def __init__(self, path: str | Path, origin: str) -> None:
        """Open the shards.

        Raises:
            ConfigError: the folder is broken or has no column of tokens.
        """
        self.shards = MdsFolder(path, origin)
        self.folder = self.shards.folder
        require_tokens(self.shards)
        self._columns = [TOKENS]
        if SPANS in self.shards.columns:
            self.shards.require_column(SPANS, "ndarray", "json")
            self._columns.append(SPANS)
        if TARGETS in self.shards.columns:
            self.shards.require_column(TARGETS, "ndarray")
            self._columns.append(TARGETS)
        self._origin = origin
        lengths = sample_lengths(self.shards)
        self.offsets = np.zeros(lengths.size + 1, np.int64)
        np.cumsum(lengths, out=self.offsets[1:])
        identity = hashlib.sha256(self.shards.identity.encode() + lengths.tobytes()).hexdigest()
        kind = "packed samples" if self.packed else "documents"
        self.meta = StoreMeta(
            version=VERSION,
            dtype="uint32",
            tokenizer="of the shards",
            tokenizer_identity="",
            eos=None,
            vocab_size=0,
            num_tokens=int(self.offsets[-1]),
            num_documents=lengths.size,
            sha256=identity,
            source=f"{kind} of {path}",
        )

    @property
    def packed(self) -> bool:
        return SPANS in self._columns

    def read(self, unit: int, start: int, stop: int) -> Stretch:
        sample = self.shards.sample(unit, self._columns)
        tokens = sample[TOKENS]
        length = int(self.offsets[unit + 1] - self.offsets[unit])
        if tokens.shape != (length,):
            raise ConfigError(
                f"{self._origin}: sample {unit} has {tokens.shape} tokens instead of {length}. The "
                "shards have changed."
            )
        ends = targets = None
        if SPANS in sample:
            ends, targets = self._parse_spans(sample[SPANS], unit, length)
        if TARGETS in sample:
            mask = np.asarray(sample[TARGETS]).astype(bool)
            if mask.shape != (length,):
                raise ConfigError(
                    f"{self._origin}: sample {unit} has a {TARGETS} of shape {mask.shape} for "
                    f"{length} tokens"
                )
            targets = mask if targets is None else targets & mask
        if ends is not None:
            ends = ends[(ends > start) & (ends < stop)] - start
        return Stretch(tokens[start:stop], ends, None if targets is None else targets[start:stop])

    def _parse_spans(
        self, spans: object, unit: int, length: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return where documents end in a sample, and which tokens are inside one (None: all)."""
        try:
            pairs = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{self._origin}: sample {unit}: {SPANS} is not a list of (begin, end)"
            ) from None
        flat = pairs.ravel()
        if (
            np.any(np.diff(flat) < 0)
            or np.any(pairs[:, 0] == pairs[:, 1])
            or (flat.size and (flat[0] < 0 or flat[-1] > length))
        ):
            raise ConfigError(
                f"{self._origin}: sample {unit}: {SPANS} must be increasing spans within its "
                f"{length} tokens"
            )
        inside = None
        if int((pairs[:, 1] - pairs[:, 0]).sum()) != length:
            inside = np.zeros(length, bool)
            for begin, end in pairs:
                inside[begin:end] = True
        return np.unique(flat), inside


def require_tokens(shards: MdsFolder) -> None:
    """Raise ConfigError unless the shards hold rows of token ids."""
    shards.require_column(TOKENS, "ndarray")
    encoding = shards.columns[TOKENS]
    wrong_dtype = encoding.dtype is not None and encoding.dtype.name not in _INTEGERS
    if wrong_dtype or (encoding.shape is not None and len(encoding.shape) != 1):
        raise ConfigError(
            f"{shards.origin}: column {TOKENS} is {shards.encodings[TOKENS]}. It must hold rows of "
            "integers, such as ndarray:uint32."
        )


def sample_lengths(shards: MdsFolder) -> np.ndarray:
    """Return the number of tokens of every sample, int64.

    This has to unpack compressed shards, so the result is kept in the cache folder.
    """
    facts = [shards.identity]
    for shard in shards.shards:
        for name in (shard.name, shard.packed[0] if shard.packed else None):
            path = shards.folder / name if name else None
            if path is not None and path.exists():
                status = path.stat()
                facts.append(f"{name} {status.st_size} {status.st_mtime_ns}")
    key = hashlib.sha256(
        "\n".join(["mds lengths 1", str(shards.folder.absolute()), *facts]).encode()
    ).hexdigest()[:32]
    return cached_array(
        key,
        lambda: np.concatenate(
            [shards.array_lengths(TOKENS, number) for number in range(len(shards.shards))]
        ),
    )
