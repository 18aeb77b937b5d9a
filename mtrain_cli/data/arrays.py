"""Read arrays of token ids: ``.npy`` of any integer type, or ``.bin`` of raw uint16 or uint32.

Each row of a two-dimensional .npy is a document. Any other array ``corpus.npy`` or ``corpus.bin``
may have offsets beside it, in ``corpus.documents.npy`` or as raw int64 in ``corpus.documents.bin``:
document d is tokens[offsets[d] : offsets[d + 1]]. Without them, the array is one document.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors, sample_of
from mtrain_cli.data.store import StoreMeta, TokenStore

SUFFIXES = (".npy", ".bin")
# The fingerprint covers 64 evenly spaced stretches of 16,384 tokens, so it is fast for any file.
_PROBES, _PROBE_SIZE = 64, 1 << 14


def open_array(path: Path, origin: str, token_dtype: str, vocab_size: int) -> TokenStore:
    """Open an array as a token store.

    Args:
        origin: how the user named the file, for messages.
        token_dtype: integer type of a .bin file: uint16, uint32 or auto, which is uint16 if all ids
            of ``vocab_size`` fit.
    """
    missing = f"{origin}: no such file. Give a token store or an array ({' or '.join(SUFFIXES)})."
    with explain_read_errors(f"{origin}:", missing):
        if path.suffix == ".npy":
            rows = _open_npy(path, origin)
        else:
            rows = _open_bin(path, origin, token_dtype, vocab_size)
        samples = {path.name: sample_of(path)}
    tokens = rows.reshape(-1)
    if tokens.size == 0:
        raise ConfigError(f"{origin}: holds no tokens")
    if rows.ndim == 2:
        offsets = np.arange(rows.shape[0] + 1, dtype=np.int64) * rows.shape[1]
        documents = "one document per row"
    else:
        offsets, documents = _document_offsets(path, tokens.size, origin)
    digest = hashlib.sha256(f"{tokens.dtype.name} {tokens.size}".encode())
    for start in np.linspace(0, max(0, tokens.size - _PROBE_SIZE), _PROBES).astype(np.int64):
        digest.update(np.ascontiguousarray(tokens[start : start + _PROBE_SIZE]).data)
    digest.update(np.ascontiguousarray(offsets).data)
    meta = StoreMeta(
        dtype=tokens.dtype.name,
        tokenizer=f"{tokens.dtype.name} array, {documents}",
        num_tokens=tokens.size,
        num_documents=offsets.size - 1,
        sha256=digest.hexdigest(),
        source=str(path),
    )
    return TokenStore(meta, tokens, offsets, path, samples=samples)


def _open_npy(path: Path, origin: str) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{origin}: not a readable .npy file ({reason})") from None
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise ConfigError(
            f"{origin}: holds {array.dtype} of shape {array.shape}. Give integers in one "
            "dimension, or in two with one document per row."
        )
    return array.view(np.ndarray)


def _open_bin(path: Path, origin: str, token_dtype: str, vocab_size: int) -> np.ndarray:
    is_small = token_dtype == "uint16" or (token_dtype == "auto" and vocab_size <= 1 << 16)
    dtype = np.dtype("<u2" if is_small else "<u4")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ConfigError(
            f"{origin}: has {size:,} bytes, which is not a whole number of {dtype.name} tokens. "
            "Either the file is truncated, or it holds uint16: set data.token_dtype=uint16."
        )
    return np.memmap(path, dtype, mode="r").view(np.ndarray) if size else np.zeros(0, dtype)


def _document_offsets(path: Path, num_tokens: int, origin: str) -> tuple[np.ndarray, str]:
    beside = (path.with_name(f"{path.stem}.documents{suffix}") for suffix in SUFFIXES)
    if (file := next(filter(Path.exists, beside), None)) is None:
        return np.array([0, num_tokens], np.int64), "one document"
    if file.suffix == ".npy":
        offsets = _open_npy(file, f"{origin}: {file.name}")
    else:
        offsets = np.fromfile(file, "<i8")
    is_list = offsets.ndim == 1 and offsets.size >= 2
    # `np.diff` of unsigned integers would wrap around.
    if (
        not is_list
        or (offsets[0], offsets[-1]) != (0, num_tokens)
        or np.any(offsets[1:] <= offsets[:-1])
    ):
        raise ConfigError(
            f"{origin}: the offsets in {file.name} must rise from 0 to {num_tokens:,}, the number "
            "of tokens"
        )
    return np.asarray(offsets, np.int64), f"documents by {file.name}"
