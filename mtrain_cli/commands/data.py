"""`mtrain data`: tokenise a corpus once for many runs, and look at the result."""

from __future__ import annotations

import re
import shlex
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from mtrain_cli.data.prepare import Progress
    from mtrain_cli.data.store import TokenStore

app = typer.Typer(
    name="data", help="Tokenise a corpus once for many runs, and look at the result.", no_args_is_help=True, rich_markup_mode="rich"
)

_PREPARE_EXAMPLES = """Examples:

mtrain data prepare stdlib data/python --tokenizer bpe --vocab-size 8192

mtrain data prepare corpus/ data/corpus --tokenizer Qwen2.5-3B/tokenizer.json

mtrain data prepare books.jsonl data/books --text-key body"""
_SHOW_EXAMPLES = """Examples:

mtrain data show data/python

mtrain data show data/python --document 17 --check"""
_SNIPPET = 240  # tokens
_SECONDS_PER_LINE = 10.0


@app.command(epilog=_PREPARE_EXAMPLES)
def prepare(
    source: Annotated[
        str,
        typer.Argument(help="a .txt, .md, .py, .jsonl or .parquet file, or a folder of them, or 'stdlib' for Python's own sources"),
    ],
    out: Annotated[Path, typer.Argument(help="folder of the token store; must not hold anything else")],
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|bpe|FILE", help="raw bytes, a byte-level BPE trained on SOURCE, or a Hugging Face tokenizer.json")
    ] = "bytes",
    vocab_size: Annotated[
        int | None, typer.Option(metavar="N", help="ids of the BPE to train, 8192 unless told; only with --tokenizer bpe")
    ] = None,
    text_key: Annotated[str, typer.Option(metavar="KEY", help="key or column that holds the text in .jsonl and .parquet")] = "text",
) -> None:
    """Tokenise SOURCE into memory-mapped arrays in OUT, for data=tokens.

    Document boundaries are kept. After an interruption of any kind the same command goes on where it stopped, with the same result.
    """
    from rich.console import Console

    from mtrain_cli.data.corpora import stdlib_corpus
    from mtrain_cli.data.prepare import prepare_store
    from mtrain_cli.data.text_files import text_corpus

    console = Console(soft_wrap=True, highlight=False)
    if source == "stdlib":
        corpus = stdlib_corpus(origin="SOURCE=stdlib")
    else:
        corpus = text_corpus(source, text_key, path_option="SOURCE", key_option="--text-key")
    had_store = (out.expanduser() / "meta.json").is_file()
    try:
        with _progress_bar() as report:
            store = prepare_store(corpus, out, tokenizer, vocab_size, report)
    except KeyboardInterrupt:
        console.print("Interrupted. What is done stays: run the same command to go on.")
        raise typer.Exit(130) from None
    meta = store.meta
    rounded = -(-meta.vocab_size // 8) * 8
    console.print(f"{'Already there, nothing to do' if had_store else 'Wrote'}: {out}", markup=False)
    console.print(f"  {meta.num_documents:,} documents, {meta.num_tokens:,} tokens, {store.tokens.nbytes / 2**20:,.1f} MiB of {meta.dtype}")
    ending = "documents have no end token" if meta.eos is None else f"each document ends with id {meta.eos}"
    room = f" ({rounded:,} for the model, a multiple of 8)" if rounded != meta.vocab_size else ""
    console.print(f"  tokenizer {meta.tokenizer}, vocabulary {meta.vocab_size:,}{room}, {ending}", markup=False)
    console.print("Next:")
    console.print(f"  mtrain train data=tokens {shlex.quote(f'data.path={out}')} model.vocab_size={rounded}", markup=False)


@app.command(epilog=_SHOW_EXAMPLES)
def show(
    path: Annotated[Path, typer.Argument(help="a folder written by mtrain data prepare")],
    document: Annotated[int, typer.Option(metavar="N", help="which document the snippet is from, counted from 0")] = 0,
    check: Annotated[bool, typer.Option("--check", help="read all tokens and compare their checksum")] = False,
) -> None:
    """Show what a token store holds: counts, lengths of documents, and the beginning of one document as text."""
    from rich.console import Console

    from mtrain_cli.config.schema import ConfigError
    from mtrain_cli.data.store import TokenStore

    console = Console(soft_wrap=True, highlight=False)
    store = TokenStore.open(path, f"PATH={path}")
    meta = store.meta
    if not 0 <= document < meta.num_documents:
        raise ConfigError(f"--document {document}: the store has documents 0 to {meta.num_documents - 1}")
    if check:
        store.check()
    console.print(f"{path}: {meta.num_documents:,} documents, {meta.num_tokens:,} tokens of {meta.source}", markup=False)
    console.print(f"  tokenizer {meta.tokenizer}, vocabulary {meta.vocab_size:,}, {meta.dtype}, end token {meta.eos}", markup=False)
    console.print(f"  sha256 {meta.sha256}{' (checked)' if check else ''}")
    console.print(_length_table(store))
    _print_snippet(console, store, document)


@contextmanager
def _progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A function that shows each ``Progress`` that it is given: as bars on a terminal, else as a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[counts]}"),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        stages: dict[str, TaskID] = {}

        def report(progress: Progress) -> None:
            if progress.stage not in stages:
                stages[progress.stage] = bars.add_task(progress.stage, total=progress.size, counts="", completed=progress.read)
            bars.update(stages[progress.stage], completed=progress.read, total=progress.size, counts=_counts(progress))

        yield report


def _lines(console: Console) -> Callable[[Progress], None]:
    shown = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _SECONDS_PER_LINE:
            shown = time.monotonic()
            read = f"{progress.read / 2**20:,.0f} of {progress.size / 2**20:,.0f} MiB"
            console.print(f"{progress.stage}: {read}  {_counts(progress)}", soft_wrap=True, highlight=False)

    return report


def _counts(progress: Progress) -> str:
    return f"{progress.documents:,} documents, {progress.tokens:,} tokens" if progress.tokens else ""


def _length_table(store: TokenStore) -> Table:
    """Documents and tokens by length of document, in powers of four."""
    import numpy as np
    from rich.table import Table

    lengths = np.diff(store.offsets)
    low, median, high = np.quantile(lengths, (0.1, 0.5, 0.9)).astype(int)
    table = Table(
        title=f"lengths: 10 % up to {low:,}, half up to {median:,}, 90 % up to {high:,}, longest {lengths.max():,} tokens",
        title_justify="left",
        title_style="",
    )
    for heading in ("tokens in document", "documents", "share of all tokens"):
        table.add_column(heading, justify="right")
    table.add_column("")
    bounds = [0, *(4**power for power in range(4, 13)), int(lengths.max()) + 1]
    for low, high in pairwise(bounds):
        inside = lengths[(lengths >= low) & (lengths < high)]
        if inside.size:
            share = inside.sum() / store.meta.num_tokens
            table.add_row(f"{low:,} to {high - 1:,}", f"{inside.size:,}", f"{share:.1%}", "█" * round(30 * share))
    return table


def _print_snippet(console: Console, store: TokenStore, number: int) -> None:
    from mtrain_cli.config.schema import ConfigError

    ids = store.document(number)
    console.print(f"document {number} ({ids.size:,} tokens) begins:")
    try:
        text = store.open_tokenizer().decode(ids[:_SNIPPET])
    except ConfigError as error:
        console.print(f"  (not shown: {error})", markup=False)
        return
    # A corpus may hold escape sequences, which a terminal must not obey.
    console.print(re.sub(r"[^\S\n]|[\x00-\x09\x0b-\x1f\x7f-\x9f]", " ", text), markup=False, style="dim")
