"""The terminal output of `mtrain data`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from operator import itemgetter

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.console import Console
from mtrain_cli.data.checked_files import lines
from mtrain_cli.data.corpora import describe_left_out
from mtrain_cli.data.prepare import PreparationProgress
from mtrain_cli.data.store import StoreMeta, TokenStore
from mtrain_cli.data.tokenizers import Tokenizer
from mtrain_cli.reporting.table import Column, Table, count, percent
from mtrain_cli.reporting.terminal import print_table

_SNIPPET = 240  # tokens
_ENDS = 1000  # tokens that the first and the last part of a long document show
_SECONDS_PER_LINE = 10.0


def describe_store(console: Console, store: TokenStore, *, lengths: bool = False) -> None:
    """Print the contents of a store. lengths: also print the lengths of its documents."""
    meta = store.meta
    console.print(
        f"  {with_count(meta.num_documents, 'document')}, {meta.num_tokens:,} tokens, "
        f"{store.tokens.nbytes / 2**20:,.1f} MiB of {meta.dtype}, from {meta.source}"
    )
    ending = "documents have no end token"
    if meta.eos is not None:
        ending = f"each document ends with id {meta.eos}"
    rounded = rounded_vocabulary(meta)
    room = f" ({rounded:,} for the model, a multiple of 8)" if rounded != meta.vocab_size else ""
    console.print(f"  tokenizer {meta.tokenizer}, vocabulary {meta.vocab_size:,}{room}, {ending}")
    if begin := store.describe_begin():
        console.print(f"  {begin}")
    _print_left_out_and_columns(console, meta)
    by_domain = _by_domain(store)
    (print_lengths if lengths else _print_domains)(console, by_domain)


def rounded_vocabulary(meta: StoreMeta) -> int:
    """Return the vocabulary size for the model, a multiple of 8."""
    return -(-meta.vocab_size // 8) * 8


def show_store(
    console: Console,
    store: TokenStore,
    document: int,
    tokenizer: Tokenizer | None,
    *,
    check: bool,
    targets: bool = False,
) -> None:
    """Print counts and lengths of a token store, and the start of a document.

    targets: print both ends of the document instead, and which of its tokens the loss may predict.
    """
    require_document(document, store.meta.num_documents)
    if check:
        warn = Console(stderr=True, soft_wrap=True, highlight=False).print
        store.verify(report=lines(warn, "the whole store"))
    describe_store(console, store, lengths=True)
    console.print(f"sha256 {store.meta.sha256}{' (checked)' if check else ''}")
    ids = store.document(document)
    if targets:
        own = store.read(document, 0, ids.size).targets
        print_targets(console, ids, own, tokenizer or store.open_tokenizer())
    else:
        print_snippet(console, ids, document, tokenizer or store.open_tokenizer)


def require_document(document: int, count: int) -> None:
    if document >= count:
        held = with_count(count, "document")
        raise ConfigError(f"--document {document}: PATH has {held}, numbered from 0")


def _print_left_out_and_columns(console: Console, meta: StoreMeta) -> None:
    columns, total = meta.columns, meta.num_documents
    for line in meta.remarks:
        console.print(f"  {line}")
    if meta.left_out:
        console.print(f"  {describe_left_out(meta.left_out)}")
    if meta.mask_key:
        console.print(
            f"  masks in the column {meta.mask_key}: {columns.masked:,} of {total:,} documents, at "
            f"most {with_count(columns.intervals, 'interval')} of keys per query"
        )
        if columns.keyless or columns.empty_slices:
            console.print(
                f"  tokens that see no key: {columns.keyless:,}; slices without queries or keys: "
                f"{columns.empty_slices:,}"
            )
    if meta.positions_key:
        console.print(
            f"  rotary positions in the column {meta.positions_key}: {columns.positioned:,} of "
            f"{total:,} documents, up to {columns.largest_position:,}"
        )


def _by_domain(store: TokenStore) -> dict[str, np.ndarray]:
    lengths = np.diff(store.offsets)
    if store.domains is None:
        return {"": lengths}
    return {name: lengths[store.domains == i] for i, name in enumerate(store.meta.domains)}


def print_lengths(console: Console, by_domain: dict[str, np.ndarray]) -> None:
    _print_domains(console, by_domain)
    lengths = np.concatenate(list(by_domain.values()))
    low, median, high = np.quantile(lengths, (0.1, 0.5, 0.9)).astype(int)
    console.print(
        f"  lengths: 10 % up to {low:,}, half up to {median:,}, 90 % up to {high:,}, longest "
        f"{lengths.max():,} tokens"
    )


def _print_domains(console: Console, by_domain: dict[str, np.ndarray]) -> None:
    """Print a table of documents and lengths by domain, unless no domain has a name."""
    if not any(by_domain):
        return
    total = sum(int(lengths.sum()) for lengths in by_domain.values())
    rows = []
    for name, of_domain in sorted(by_domain.items(), key=lambda pair: -int(pair[1].sum())):
        ends = np.quantile(of_domain, (0.5, 0.9, 1)).astype(int) if of_domain.size else (0, 0, 0)
        tokens = of_domain.sum()
        rows.append((name or "(none)", of_domain.size, tokens, tokens / total, *ends))
    heads = ("documents", "tokens", "share", "median", "90 %", "longest")
    columns = [
        Column(head, itemgetter(at), percent if head == "share" else count)
        for at, head in enumerate(heads, 1)
    ]
    columns.insert(0, Column("domain", itemgetter(0), words=True))
    print_table(console, Table("by domain, lengths in tokens", columns, rows))


def progress_lines() -> Callable[[PreparationProgress], None]:
    """Return a function that prints a line on stderr every 10 seconds."""
    console, shown = Console(stderr=True), time.monotonic()

    def report(progress: PreparationProgress) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _SECONDS_PER_LINE:
            shown = time.monotonic()
            read = f"{progress.read / 2**20:,.0f} of {progress.size / 2**20:,.0f} MiB"
            counts = f"{with_count(progress.documents, 'document')}, {progress.tokens:,} tokens"
            line = f"{progress.stage}: {read}  {counts * bool(progress.tokens)}"
            console.print(line, soft_wrap=True, highlight=False)

    return report


def print_targets(
    console: Console, ids: np.ndarray, targets: np.ndarray | None, tokenizer: Tokenizer
) -> None:
    """Print both ends of a document, with what the loss may predict in colour or in brackets."""
    cut = (_ENDS, ids.size - _ENDS) if ids.size > 2 * _ENDS else ()
    on = np.ones(ids.size, bool) if targets is None else targets
    changes = np.union1d(np.flatnonzero(on[1:] != on[:-1]) + 1, np.array(cut, int))
    for part, start in zip(np.split(ids, changes), (0, *changes), strict=True):
        if cut and start == cut[0]:
            console.print(f"\n... {cut[1] - cut[0]:,} tokens are not shown ...")
        if cut and cut[0] <= start < cut[1]:
            continue
        text = tokenizer.decode(part)
        if on[start] and console.color_system is None:
            text = f"[{text}]"
        style = "bold green" if on[start] else "dim"
        console.print(text, style=style, end="", markup=False, highlight=False)
    console.print(f"\n({on[1:].sum():,} of {ids.size:,} tokens count toward the loss)")


def print_snippet(
    console: Console,
    ids: np.ndarray,
    number: int,
    tokenizer: Tokenizer | Callable[[], Tokenizer] | None,
) -> None:
    if tokenizer is None:
        console.print(
            f"document {number} ({ids.size:,} tokens) begins with ids "
            f"{', '.join(map(str, ids[:12]))}; give --tokenizer to show text"
        )
        return
    console.print(f"document {number} ({ids.size:,} tokens) begins:")
    try:
        text = (tokenizer() if callable(tokenizer) else tokenizer).decode(ids[:_SNIPPET])
    except ConfigError as error:
        console.print(f"  (not shown: {error})")
        return
    # A corpus may contain escape sequences; the terminal must not execute them.
    console.print(re.sub(r"[^\S\n]|[\x00-\x09\x0b-\x1f\x7f-\x9f]", " ", text), style="dim")
