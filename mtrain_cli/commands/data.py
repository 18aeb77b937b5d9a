"""`mtrain data`: tokenize a corpus once for many runs, and inspect the result."""

from __future__ import annotations

import os
import re
import shlex
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli.commands.completion import complete_tokenizers
from mtrain_cli.commands.options import MOST_DOCUMENTS, MOST_IDS, MOST_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from rich.progress import TaskID
    from rich.table import Table

    from mtrain_cli.console import Console
    from mtrain_cli.data.corpora import Corpus
    from mtrain_cli.data.prepare import PreparationProgress
    from mtrain_cli.data.store import TokenStore
    from mtrain_cli.data.tokenizers import Tokenizer

app = typer.Typer(
    name="data",
    help="Tokenize a corpus once for many runs, and inspect the result.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_SNIPPET = 240  # tokens
_SECONDS_PER_LINE = 10.0


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A .txt, .md, .py, .jsonl or .parquet file, or a folder of them, or of MDS "
            "shards, or 'stdlib' for Python's own sources.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder of the token store; must hold nothing else."),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="bytes|bpe|FILE",
            help="Raw bytes, a byte-level BPE trained on SOURCE, or a Hugging Face tokenizer.json.",
            autocompletion=complete_tokenizers,
        ),
    ] = "bytes",
    vocab_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Vocabulary size of the BPE to train, 8192 by default; only with --tokenizer bpe.",
            max=MOST_IDS,
        ),
    ] = None,
    text_key: Annotated[
        str,
        typer.Option(metavar="KEY", help="Field that holds the text in .jsonl and .parquet files."),
    ] = "text",
    from_tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="bytes|FILE",
            help="Tokenizer of the ids in SOURCE; only for MDS shards.",
            show_default=False,
        ),
    ] = None,
    domain: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Keep only these domains. A document's domain is its field 'domain', else its "
            "first folder below SOURCE.",
            show_default=False,
        ),
    ] = None,
    min_tokens: Annotated[
        str, typer.Option(metavar="N", help="Leave out documents with fewer tokens, such as 64k.")
    ] = "0",
    max_tokens: Annotated[
        str, typer.Option(metavar="N", help="Leave out documents with more tokens; 0 = no limit.")
    ] = "0",
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Cut longer documents at --max-tokens instead."),
    ] = False,
    min_chars: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Leave out documents with fewer characters; 0 = no limit.",
            max=MOST_DOCUMENTS,
        ),
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=MOST_THREADS,
            help="CPU threads of the tokenizer; all cores by default.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Tokenize SOURCE into memory-mapped arrays in OUT, for data=tokens.

    Keeps document boundaries and domains. A tokenizer.json or BPE runs on all cores. If the command
    is interrupted, run it again: it continues where it stopped, with the same result.

    [bold]Examples[/bold]

      [cyan]mtrain data prepare stdlib data/python --tokenizer bpe --vocab-size 8192[/cyan]
          Train a BPE on Python's own sources and tokenize them with it
      [cyan]mtrain data prepare corpus/ data/qwen --tokenizer Qwen2.5-3B/tokenizer.json[/cyan]
          Tokenize a folder of text with a model's tokenizer
      [cyan]mtrain data prepare books.jsonl data/books --text-key body[/cyan]
          Read the text from another field
      [cyan]mtrain data prepare mds/ out/ --from-tokenizer a.json --tokenizer b.json[/cyan]
          Tokenize MDS shards again, for another model
    """
    from mtrain_cli.console import Console
    from mtrain_cli.data.filters import Filters
    from mtrain_cli.data.prepare import prepare_store

    if threads is not None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)
    domains = tuple(part.strip() for part in (domain or "").split(",") if part.strip())
    filters = Filters(
        domains,
        _parse_count("--min-tokens", min_tokens),
        _parse_count("--max-tokens", max_tokens),
        truncate,
        min_chars,
    )
    console = Console(soft_wrap=True, highlight=False)
    corpus = _corpus(source, text_key, from_tokenizer, domains)
    had_store = (out.expanduser() / "meta.json").is_file()
    try:
        with _progress_bar() as report:
            store = prepare_store(corpus, out, tokenizer, vocab_size, report, filters)
    except KeyboardInterrupt:
        console.print("Interrupted. Finished work is kept: run the same command to continue.")
        raise typer.Exit(130) from None
    meta = store.meta
    rounded = -(-meta.vocab_size // 8) * 8
    console.print(f"{'Already complete' if had_store else 'Wrote'}: {out}", markup=False)
    console.print(
        f"  {meta.num_documents:,} documents, {meta.num_tokens:,} tokens, "
        f"{store.tokens.nbytes / 2**20:,.1f} MiB of {meta.dtype}"
    )
    ending = (
        "documents have no end token"
        if meta.eos is None
        else f"each document ends with id {meta.eos}"
    )
    room = f" ({rounded:,} for the model, a multiple of 8)" if rounded != meta.vocab_size else ""
    console.print(
        f"  tokenizer {meta.tokenizer}, vocabulary {meta.vocab_size:,}{room}, {ending}",
        markup=False,
    )
    if meta.left_out:
        console.print(
            "  left out: "
            + ", ".join(f"{count:,} {reason}" for reason, count in meta.left_out.items())
        )
    if meta.cut:
        console.print(f"  cut at --max-tokens: {meta.cut:,}, which have no end token")
    if (table := _domain_table(*_by_domain(store))) is not None:
        console.print(table)
    console.print("Next:")
    console.print(
        f"  mtrain train data=tokens {shlex.quote(f'data.path={out}')} model.vocab_size={rounded}",
        markup=False,
    )


def _corpus(
    source: str, text_key: str, from_tokenizer: str | None, domains: tuple[str, ...]
) -> Corpus:
    """Return the corpus of SOURCE: MDS shards of token ids, Python's own sources, or text files."""
    from mtrain_cli.config.schema import ConfigError
    from mtrain_cli.data.corpora import stdlib_corpus
    from mtrain_cli.data.mds_corpus import mds_corpus, mds_folders
    from mtrain_cli.data.text_files import text_corpus
    from mtrain_cli.data.tokenizers import open_tokenizer

    path = Path(source).expanduser()
    if source != "stdlib" and path.is_dir() and mds_folders(path):
        if from_tokenizer is None:
            raise ConfigError(
                f"SOURCE={source}: holds token ids; give their tokenizer as --from-tokenizer FILE "
                "(or bytes)"
            )
        return mds_corpus(source, open_tokenizer(from_tokenizer, "--from-tokenizer"), domains)
    if from_tokenizer is not None:
        raise ConfigError(
            f"--from-tokenizer {from_tokenizer}: only for MDS shards, and SOURCE={source} is not "
            "a folder of them"
        )
    if source == "stdlib":
        return stdlib_corpus(origin="SOURCE=stdlib")
    return text_corpus(source, text_key, path_option="SOURCE", key_option="--text-key")


def _parse_count(option: str, text: str) -> int:
    from mtrain_cli.config.schema import ConfigError
    from mtrain_cli.config.sizes import EXPECTED, parse_size

    try:
        count = 0 if text == "0" else parse_size(text)
        if not 0 <= count <= MOST_DOCUMENTS:
            raise ValueError(text)
        return count
    except ValueError:
        raise ConfigError(
            f"{option} {text}: expected {EXPECTED}, or 0 for no limit; at most 2^40"
        ) from None


@app.command()
def show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A folder written by mtrain data prepare, a folder of MDS shards (or of such "
            "folders), or a .npy or .bin file.",
        ),
    ],
    document: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Number of the document to show as text, from 0.",
            max=MOST_DOCUMENTS,
        ),
    ] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Read everything and verify the checksums.")
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="bytes|FILE",
            help="Tokenizer that decodes the ids of MDS shards and arrays.",
            show_default=False,
        ),
    ] = None,
    token_dtype: Annotated[
        str, typer.Option(metavar="uint16|uint32", help="Integer type of a .bin file.")
    ] = "uint16",
) -> None:
    """Show tokenized data: counts, document lengths, domains, and the start of a document.

    [bold]Examples[/bold]

      [cyan]mtrain data show data/python[/cyan]
          Show the size and document lengths of a token store
      [cyan]mtrain data show data/python --document 17 --check[/cyan]
          Show the start of document 17, and verify the checksums
      [cyan]mtrain data show prolong-data-512K/book-524288 --tokenizer llama3.json[/cyan]
          Show MDS shards, decoded with their tokenizer
    """
    from mtrain_cli.config.schema import ConfigError
    from mtrain_cli.console import Console
    from mtrain_cli.data.arrays import SUFFIXES, open_array
    from mtrain_cli.data.mds_corpus import mds_folders
    from mtrain_cli.data.store import TokenStore
    from mtrain_cli.data.tokenizers import open_tokenizer

    console = Console(soft_wrap=True, highlight=False)
    origin = f"PATH={path}"
    if token_dtype not in ("uint16", "uint32"):
        raise ConfigError(f"--token-dtype {token_dtype}: expected uint16 or uint32")
    chosen = None if tokenizer is None else open_tokenizer(tokenizer, "--tokenizer")
    folder = path.expanduser()
    if folder.is_dir() and not (folder / "meta.json").is_file() and mds_folders(folder):
        _show_shards(console, folder, origin, document, check, chosen)
        return
    array = folder.suffix in SUFFIXES and not folder.is_dir()
    if not array and not (folder / "meta.json").is_file():
        problem = (
            "holds no tokens"
            if folder.is_dir()
            else "is not a token array"
            if folder.exists()
            else "no such folder or file"
        )
        kinds = f"a folder of MDS shards, or a {' or '.join(SUFFIXES)}"
        raise ConfigError(
            f"{origin}: {problem}; give a folder written by `mtrain data prepare`, {kinds}"
        )
    store = open_array(folder, origin, token_dtype, 0) if array else TokenStore.open(path, origin)
    meta = store.meta
    if not 0 <= document < meta.num_documents:
        raise ConfigError(
            f"--document {document}: the store has documents 0 to {meta.num_documents - 1}"
        )
    if check and not array:
        store.verify()
    console.print(
        f"{path}: {meta.num_documents:,} documents, {meta.num_tokens:,} tokens from {meta.source}",
        markup=False,
    )
    if array:
        largest = int(store.tokens.max()) if check else int(store.tokens[: 1 << 24].max())
        where = "" if check or store.tokens.size <= 1 << 24 else " among the first 16M"
        console.print(f"  {meta.tokenizer}; largest id {largest:,}{where}", markup=False)
    else:
        console.print(
            f"  tokenizer {meta.tokenizer}, vocabulary {meta.vocab_size:,}, {meta.dtype}, "
            f"end token {meta.eos}",
            markup=False,
        )
        console.print(f"  sha256 {meta.sha256}{' (checked)' if check else ''}")
    names, lengths = _by_domain(store)
    if (table := _domain_table(names, lengths)) is not None:
        console.print(table)
    console.print(_length_table(_concatenated(lengths)))
    _print_snippet(
        console,
        store.document(document),
        document,
        chosen or (None if array else store.open_tokenizer),
    )


def _show_shards(
    console: Console,
    root: Path,
    origin: str,
    document: int,
    check: bool,
    tokenizer: Tokenizer | None,
) -> None:
    """Print columns, sample counts, and tokens by domain and length of MDS folders."""
    import numpy as np

    from mtrain_cli.config.schema import ConfigError
    from mtrain_cli.data.mds import MdsFolder
    from mtrain_cli.data.mds_corpus import mds_folders
    from mtrain_cli.data.mds_source import DOMAIN, TOKENS, require_tokens, sample_lengths

    lengths_by_domain: dict[str, list[np.ndarray]] = {}
    folders = mds_folders(root)
    first: MdsFolder | None = None
    for path in folders:
        name = "" if path == root else path.relative_to(root).as_posix()
        shards = MdsFolder(path, f"{origin}: {name}" if name else origin)
        require_tokens(shards)
        lengths = sample_lengths(shards)
        size = sum(shard.packed[1] if shard.packed else shard.size for shard in shards.shards)
        console.print(
            f"{path}: {shards.num_samples:,} samples, {int(lengths.sum()):,} tokens in "
            f"{len(shards.shards)} MDS shards ({size / 2**20:,.1f} MiB"
            f"{f', {shards.compression}' if shards.compression else ''})",
            markup=False,
        )
        console.print(f"  columns {shards.describe_columns()}", markup=False)
        if name or DOMAIN not in shards.columns:
            lengths_by_domain.setdefault(name, []).append(lengths)
        else:
            labels = np.array(
                [
                    str(shards.sample(number, [DOMAIN])[DOMAIN])
                    for number in range(shards.num_samples)
                ]
            )
            for label in np.unique(labels):
                lengths_by_domain.setdefault(str(label), []).append(lengths[labels == label])
        if check:
            for number in range(shards.num_samples):
                shards.sample(
                    number,
                    list(shards.columns)
                    if all(c.is_readable for c in shards.columns.values())
                    else [TOKENS],
                )
        first = first or shards
    if check:
        console.print("  every sample was read; sizes and available checksums match")
    names = list(lengths_by_domain)
    by_name = [np.concatenate(parts) for parts in lengths_by_domain.values()]
    if (table := _domain_table(names, by_name)) is not None:
        console.print(table)
    console.print(_length_table(np.concatenate(by_name)))
    assert first is not None
    if not 0 <= document < first.num_samples:
        raise ConfigError(
            f"--document {document}: {first.folder} has samples 0 to {first.num_samples - 1}"
        )
    _print_snippet(console, first.sample(document, [TOKENS])[TOKENS], document, tokenizer)


def _by_domain(store: TokenStore) -> tuple[list[str], list[np.ndarray]]:
    """Return the domain names and each domain's document lengths; [""] if there are no domains."""
    import numpy as np

    lengths = np.diff(store.offsets)
    if store.domains is None:
        return [""], [lengths]
    return store.meta.domains, [
        lengths[store.domains == number] for number in range(len(store.meta.domains))
    ]


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    import numpy as np

    return np.concatenate(parts)


def _domain_table(names: Sequence[str], lengths: Sequence[np.ndarray]) -> Table | None:
    """Return a table of documents and lengths by domain, or None if no domain has a name."""
    import numpy as np
    from rich.table import Table

    if not any(names):
        return None
    table = Table(title="by domain, lengths in tokens", title_justify="left", title_style="")
    table.add_column("domain", overflow="fold")
    for heading in ("documents", "tokens", "share", "median", "90 %", "longest"):
        table.add_column(heading, justify="right")
    total = sum(int(part.sum()) for part in lengths)
    for name, part in sorted(
        zip(names, lengths, strict=True), key=lambda pair: -int(pair[1].sum())
    ):
        median, high = np.quantile(part, (0.5, 0.9)).astype(int) if part.size else (0, 0)
        longest = int(part.max()) if part.size else 0
        numbers = (
            f"{part.size:,}",
            f"{part.sum():,}",
            f"{part.sum() / total:.1%}",
            f"{median:,}",
            f"{high:,}",
            f"{longest:,}",
        )
        table.add_row(name or "(none)", *numbers)
    return table


@contextmanager
def _progress_bar() -> Iterator[Callable[[PreparationProgress], None]]:
    """Yield a function that shows progress: as bars on a terminal, else as a line now and then."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    from mtrain_cli.console import Console

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

        def report(progress: PreparationProgress) -> None:
            if progress.stage not in stages:
                stages[progress.stage] = bars.add_task(
                    progress.stage, total=progress.size, counts="", completed=progress.read
                )
            bars.update(
                stages[progress.stage],
                completed=progress.read,
                total=progress.size,
                counts=_counts(progress),
            )

        yield report


def _lines(console: Console) -> Callable[[PreparationProgress], None]:
    shown = time.monotonic()

    def report(progress: PreparationProgress) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _SECONDS_PER_LINE:
            shown = time.monotonic()
            read = f"{progress.read / 2**20:,.0f} of {progress.size / 2**20:,.0f} MiB"
            console.print(
                f"{progress.stage}: {read}  {_counts(progress)}", soft_wrap=True, highlight=False
            )

    return report


def _counts(progress: PreparationProgress) -> str:
    return (
        f"{progress.documents:,} documents, {progress.tokens:,} tokens" if progress.tokens else ""
    )


_BAR = 14  # columns of a full bar; the table must fit 80 columns whatever the lengths


def _length_table(lengths: np.ndarray) -> Table:
    """Return a table of documents and tokens by document length, in powers of four."""
    import numpy as np
    from rich.table import Table

    low, median, high = np.quantile(lengths, (0.1, 0.5, 0.9)).astype(int)
    table = Table(
        title=f"lengths: 10 % up to {low:,}, half up to {median:,}, 90 % up to {high:,}, "
        f"longest {lengths.max():,} tokens",
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
            share = inside.sum() / lengths.sum()
            table.add_row(
                f"{low:,} to {high - 1:,}",
                f"{inside.size:,}",
                f"{share:.1%}",
                "█" * round(_BAR * share),
            )
    return table


def _print_snippet(
    console: Console,
    ids: np.ndarray,
    number: int,
    tokenizer: Tokenizer | Callable[[], Tokenizer] | None,
) -> None:
    from mtrain_cli.config.schema import ConfigError

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
        console.print(f"  (not shown: {error})", markup=False)
        return
    # A corpus may contain escape sequences; the terminal must not execute them.
    console.print(
        re.sub(r"[^\S\n]|[\x00-\x09\x0b-\x1f\x7f-\x9f]", " ", text), markup=False, style="dim"
    )
