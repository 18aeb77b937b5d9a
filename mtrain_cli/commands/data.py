"""`mtrain data`: tokenize a corpus once for many runs, and inspect the result."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli.commands.completion import complete_tokenizers
from mtrain_cli.commands.options import (
    MOST_DOCUMENTS,
    MOST_IDS,
    MOST_THREADS,
    argument,
    bounded,
    flag,
    option,
    token_count,
)
from mtrain_cli.config.problem import ConfigError, Names

if TYPE_CHECKING:
    from mtrain_cli.data.corpora import Corpus
    from mtrain_cli.data.token_documents import TokenFields

app = typer.Typer(name="data", no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def data() -> None:
    """Tokenize a corpus once for many runs, inspect it, and write needles or RULER's samples.

    [bold]Examples[/bold]

      [cyan]mtrain data prepare books/ data/books[/cyan]
          Tokenize a folder of text files
      [cyan]mtrain data show data/books[/cyan]
          Show documents, lengths and domains
    """


@app.command()
def prepare(
    source: Annotated[str, argument("SOURCE")],
    out: Annotated[Path, argument("OUT")],
    tokenizer: Annotated[str, option("bytes|bpe|FILE", complete=complete_tokenizers)] = "bytes",
    vocab_size: Annotated[int | None, bounded(most=MOST_IDS)] = None,
    text_key: Annotated[str, option("KEY")] = "text",
    tokens_key: Annotated[str | None, option("KEY")] = None,
    mask_key: Annotated[str | None, option("KEY")] = None,
    positions_key: Annotated[str | None, option("KEY")] = None,
    targets_key: Annotated[str | None, option("KEY")] = None,
    from_tokenizer: Annotated[str | None, option("bytes|FILE")] = None,
    domain: Annotated[str | None, option("A,B")] = None,
    min_tokens: Annotated[str, option("N")] = "0",
    max_tokens: Annotated[str, option("N")] = "0",
    threads: Annotated[int | None, bounded(1, MOST_THREADS)] = None,
    bos: Annotated[str, option("auto|true|false")] = "auto",
    kind: Annotated[str | None, option("KIND")] = None,
    setting: Annotated[list[str] | None, option("KEY=VALUE")] = None,
) -> None:
    """Tokenize SOURCE into memory-mapped arrays in OUT, for data=tokens.

    OUT keeps document boundaries and domains. A tokenizer.json or BPE runs on all cores. After an
    interruption, run the same command again to continue; the result is the same.

    [bold]Examples[/bold]

      [cyan]mtrain data prepare stdlib data/python --tokenizer bpe --vocab-size 8192[/cyan]
          Train a BPE on Python's own sources and tokenize them with it
      [cyan]mtrain data prepare corpus/ data/qwen --tokenizer Qwen2.5-3B/tokenizer.json[/cyan]
          Tokenize a folder of text with a model's tokenizer
      [cyan]mtrain data prepare mds/ out/ --from-tokenizer a.json --tokenizer b.json[/cyan]
          Tokenize MDS shards again, for another model
      [cyan]mtrain data prepare q.jsonl data/q --tokens-key input_ids --mask-key mask[/cyan]
          Keep the token ids of the source, and the attention mask of each document

    Args:
        source: A .txt, .md, .py, .jsonl, .json or .parquet file, or a folder of them; all but
            .parquet may end in .gz or .zst. Or a folder of MDS shards, or 'stdlib' for Python's own
            sources.
        out: Folder of the token store; must hold nothing else.
        tokenizer: Raw bytes, a byte-level BPE trained on SOURCE, or a Hugging Face tokenizer.json.
        vocab_size: Vocabulary size of the BPE to train, 8192 by default; only with --tokenizer bpe.
        text_key: Field that holds the text in .jsonl, .json and .parquet files.
        tokens_key: Field that holds the token ids of a document in .jsonl, .json and .parquet
            files, instead of text. --tokenizer names the tokenizer that made them. They stay as
            they are: no begin or end token is added.
        mask_key: Field that holds the mask of a document: a list of slices [query start, query
            stop, key start, key stop, kind] in tokens of the document. The kind is full, causal,
            inverse, bicausal or 0 to 3. null = causal. Only with --tokens-key.
        positions_key: Field that holds the rotary position of each token; null = the positions in
            the sequence. Only with --tokens-key.
        targets_key: Field that holds true or 1 for each token that the loss may predict, and false
            or 0 for the others; null = all. Only with --tokens-key.
        from_tokenizer: Tokenizer that made the token ids in SOURCE; only for MDS shards.
        domain: Keep only these domains. The domain of a document is its field 'domain', or else the
            first folder of its path below SOURCE.
        min_tokens: Leave out documents with fewer tokens, such as 64k.
        max_tokens: Leave out documents with more tokens; 0 = no limit.
        threads: CPU threads of the tokenizer; all cores by default.
        bos: Start each document with the begin token of the tokenizer; auto = if its post-processor
            adds one.
        kind: Read SOURCE as data=KIND does, such as chat.
        setting: A key of data for --kind, such as train_on=last. You can repeat it.
    """
    from mtrain_cli.commands.data_output import describe_store, progress_lines, rounded_vocabulary
    from mtrain_cli.console import Console
    from mtrain_cli.data.corpora import Filters
    from mtrain_cli.data.prepare import prepare_store

    if threads is not None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)
    if bos not in ("auto", "true", "false"):
        raise ConfigError(f"--bos {bos}: expected auto, true or false")
    begins = bos if bos == "auto" else bos == "true"
    domains = tuple(part.strip() for part in (domain or "").split(",") if part.strip())
    least = token_count("--min-tokens", min_tokens, 0, MOST_DOCUMENTS)
    most = token_count("--max-tokens", max_tokens, 0, MOST_DOCUMENTS)
    filters = Filters(domains, least, most)
    console = Console(soft_wrap=True, highlight=False)
    fields = _token_fields(tokens_key, mask_key, positions_key, targets_key)
    if kind is None and setting:
        raise ConfigError(f"--setting {setting[0]}: only with --kind")
    if kind is not None:
        for name, value in (("tokens-key", tokens_key), ("from-tokenizer", from_tokenizer)):
            if value:
                raise ConfigError(f"--{name} {value}: not with --kind {kind}; leave one out")
        corpus = _corpus_of_kind(kind, source, tokenizer, setting or [])
    else:
        corpus = _corpus(source, text_key, from_tokenizer, domains, fields)
    had_store = (out.expanduser() / "meta.json").is_file()
    try:
        report = progress_lines()
        store = prepare_store(corpus, out, tokenizer, vocab_size, report, filters, begins)
    except KeyboardInterrupt:
        console.print("Interrupted. Finished work is kept: run the same command to continue.")
        raise
    console.print(f"{'Already complete' if had_store else 'Wrote'}: {out}")
    describe_store(console, store)
    rounded = rounded_vocabulary(store.meta)
    given = {"path": out, "mask_key": mask_key, "positions_key": positions_key}
    words = (
        shlex.quote(f"data.{key}={value}") for key, value in given.items() if value is not None
    )
    console.print(f"Next:\n  mtrain train data=tokens {' '.join(words)} model.vocab_size={rounded}")


def _token_fields(
    tokens_key: str | None, mask_key: str | None, positions_key: str | None, targets_key: str | None
) -> TokenFields | None:
    from mtrain_cli.data.token_documents import RecordKey, TokenFields

    given = {"--mask-key": mask_key, "--positions-key": positions_key, "--targets-key": targets_key}
    keys = [None if name is None else RecordKey(name, typed) for typed, name in given.items()]
    if tokens_key is not None:
        mask, positions, targets = keys
        return TokenFields(RecordKey(tokens_key, "--tokens-key"), mask, positions, targets)
    for key in filter(None, keys):
        raise ConfigError(f"{key.option} {key.name}: only for token ids; add --tokens-key")
    return None


def _corpus_of_kind(kind: str, source: str, tokenizer: str, settings: list[str]) -> Corpus:
    """Return the corpus that a run with ``data=KIND`` and other keys of data would read."""
    from mtrain_cli.composition.compose import compose
    from mtrain_cli.config.data_kinds import KINDS
    from mtrain_cli.data.tokenizers import open_tokenizer

    words = [f"data={kind}", f"data.path={source}", f"data.tokenizer={tokenizer}"]
    with Names(other={"data.path": "SOURCE"}).in_errors():
        data = compose([*words, *(f"data.{setting}" for setting in settings)]).data
        if not KINDS[kind].tokenizes:
            raise ConfigError(f"--kind {kind}: consists of token ids, which need no preparation")
        return KINDS[kind].corpus(data, open_tokenizer(tokenizer, "--tokenizer"))


def _corpus(
    source: str,
    text_key: str,
    from_tokenizer: str | None,
    domains: tuple[str, ...],
    fields: TokenFields | None,
) -> Corpus:
    """Return the corpus of SOURCE: MDS shards, Python's own sources, or files of text or token ids.

    fields: fields of documents of token ids; None for text.
    """
    from mtrain_cli.config.data_kinds import KINDS
    from mtrain_cli.data.corpora import stdlib_corpus
    from mtrain_cli.data.text_files import refuse_unread_key, text_corpus, token_corpus
    from mtrain_cli.data.tokenizers import open_tokenizer

    path = Path(source).expanduser()
    is_folder = source != "stdlib" and path.is_dir()
    kind = next((k for k in KINDS.values() if is_folder and k.recognizes(path)), None)
    if fields is not None and (source == "stdlib" or kind or from_tokenizer is not None):
        raise ConfigError(
            f"--tokens-key {fields.tokens.name}: reads .jsonl, .json and .parquet files, not MDS "
            "shards or stdlib. Leave it out, or write the documents as .jsonl."
        )
    if kind is not None and from_tokenizer is not None:
        return kind.decoded(source, open_tokenizer(from_tokenizer, "--from-tokenizer"), domains)
    if kind is not None:
        raise ConfigError(
            f"SOURCE={source}: holds token ids, not text; to decode them, give the tokenizer "
            "that made them: --from-tokenizer tokenizer.json, or --from-tokenizer bytes"
        )
    if from_tokenizer is not None:
        raise ConfigError(
            f"--from-tokenizer {from_tokenizer}: only for MDS shards, and SOURCE={source} is not "
            "a folder of them"
        )
    if source == "stdlib":
        return stdlib_corpus(origin="SOURCE=stdlib")
    if fields is not None:
        return token_corpus(source, fields)
    corpus = text_corpus(source, text_key, path_option="SOURCE", key_option="--text-key")
    refuse_unread_key(corpus, text_key)
    return corpus


@app.command()
def show(
    path: Annotated[Path, argument("PATH")],
    document: Annotated[int, bounded(0, MOST_DOCUMENTS)] = 0,
    check: Annotated[bool, flag("--check")] = False,
    tokenizer: Annotated[str | None, option("bytes|FILE")] = None,
    targets: Annotated[bool, flag("--targets")] = False,
) -> None:
    """Show tokenized data: counts, document lengths, domains, and the start of a document.

    [bold]Examples[/bold]

      [cyan]mtrain data show data/python[/cyan]
          Show the size and document lengths of a token store
      [cyan]mtrain data show data/python --document 17 --check[/cyan]
          Show the start of document 17, and verify the checksums
      [cyan]mtrain data show prolong-data-512K/book-524288 --tokenizer llama3.json[/cyan]
          Show MDS shards, decoded with their tokenizer

    Args:
        path: A folder that `mtrain data prepare` wrote, a folder of MDS shards, or a folder that
            contains folders of MDS shards.
        document: Number of the document to show as text, from 0.
        check: Read everything and verify the checksums.
        tokenizer: Tokenizer that decodes the ids of MDS shards.
        targets: Show both ends of a document, and which of its tokens the loss counts.
    """
    from mtrain_cli.commands import data_output
    from mtrain_cli.config.data_kinds import KINDS
    from mtrain_cli.console import Console
    from mtrain_cli.data.store import TokenStore
    from mtrain_cli.data.tokenizers import open_tokenizer

    console = Console(soft_wrap=True, highlight=False)
    folder, origin = path.expanduser(), f"PATH={path}"
    chosen = None if tokenizer is None else open_tokenizer(tokenizer, "--tokenizer")
    if (folder / "meta.json").is_file():
        store = TokenStore.open(path, origin)
        data_output.show_store(console, store, document, chosen, check=check, targets=targets)
        return
    for kind in KINDS.values():
        if folder.is_dir() and kind.recognizes(folder):
            kind.show(console, path, document, chosen, check=check)
            break
    else:
        problem = "holds no tokens" if folder.exists() else "no such folder"
        raise ConfigError(
            f"{origin}: {problem}; give a folder written by `mtrain data prepare`, or a folder of "
            "MDS shards"
        )
