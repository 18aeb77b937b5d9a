"""`mtrain data needles`: write documents with questions that need a long memory."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Annotated

from mtrain_cli.commands.completion import complete_tokenizers
from mtrain_cli.commands.evaluate import parse_chains
from mtrain_cli.commands.options import (
    MOST_DOCUMENTS,
    argument,
    bounded,
    option,
    token_count,
    writing,
)
from mtrain_cli.config.schema import ConfigError

MOST_PAIRS = 2048  # a question may need two of the 4,096 names
_FILE = "needles.jsonl"


def needles(
    out: Annotated[Path, argument("OUT")],
    length: Annotated[str, option("N")] = "8k",
    pairs: Annotated[int, bounded(1, MOST_PAIRS)] = 64,
    questions: Annotated[int, bounded(1, MOST_PAIRS)] = 1,
    documents: Annotated[int, bounded(1, MOST_DOCUMENTS)] = 256,
    seed: Annotated[int, bounded(0, MOST_DOCUMENTS)] = 1,
    chains: Annotated[str, option("SHARE")] = "25%",
    haystack: Annotated[str, option("stdlib|PATH")] = "stdlib",
    tokenizer: Annotated[str, option("bytes|FILE", complete=complete_tokenizers)] = "bytes",
) -> None:
    """Write documents that hide numbers and ask for them later, for data=text.

    Each document has exactly --length tokens: lines of Python such as magic["calm-otter"] = 4817263
    among lines of a corpus, and later expected["calm-otter"] = 4817263. For every other number, the
    last question is in the last 2k tokens. All other questions are anywhere after their number.

    [bold]Examples[/bold]

      [cyan]mtrain data needles data/needles --length 8k --pairs 64 --seed 1[/cyan]
          Write 256 documents of 8,192 bytes
      [cyan]mtrain train data=text data.path=data 'data.mix={books: 0.8, needles: 0.2}'[/cyan]
          Draw a fifth of all training sequences from data/needles, the others from data/books
      [cyan]mtrain data needles data/first --length 256 --pairs 1 --questions 5 --chains 0[/cyan]
          Write short documents from which a small model learns to copy a number

    Args:
        out: Folder for needles.jsonl; must not hold one.
        length: Tokens of each document, such as 8k. Use it as seq, so that each sequence is one
            document.
        pairs: Needles in each document.
        questions: Questions about each needle. Small models learn sooner from several.
        documents: Number of documents.
        seed: Determines names, numbers and places.
        chains: Share of the needles whose questions use another name.
        haystack: Corpus between the needles: a file or folder of text, or 'stdlib' for Python's own
            sources. It repeats if it is too short.
        tokenizer: Tokenizer that counts tokens: that of the training run.
    """
    from mtrain_cli.config.documents import replacing
    from mtrain_cli.config.sizes import format_size, with_count
    from mtrain_cli.console import Console
    from mtrain_cli.data.corpora import describe_left_out
    from mtrain_cli.data.needles import NeedleSettings, needle_documents, open_haystack
    from mtrain_cli.data.tokenizers import open_tokenizer

    settings = NeedleSettings(
        token_count("--length", length, 1), pairs, parse_chains(chains), seed, questions
    )
    opened = open_tokenizer(tokenizer, "--tokenizer")
    corpus = open_haystack(haystack)
    made = needle_documents(corpus, opened, settings, documents)
    path = out.expanduser() / _FILE
    if path.exists():
        raise ConfigError(f"OUT={out}: already holds {_FILE}; delete it or give another folder")
    first = next(made)  # a mistake leaves no folder behind
    with writing(f"OUT={out}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
            file.writelines(document.line() for document in itertools.chain([first], made))
    console = Console(soft_wrap=True, highlight=False)
    size = format_size(settings.length)
    console.print(
        f"Wrote {path}: {with_count(documents, 'document')} of {settings.length:,} tokens of "
        f"{opened.name}, {with_count(pairs * questions, 'question')} each"
    )
    if corpus.left_out:
        console.print(f"  haystack: {describe_left_out(corpus.left_out)}")
    given = {"data.path": out, "seq": size, "data.tokenizer": tokenizer}
    words = " ".join(shlex.quote(f"{key}={value}") for key, value in given.items())
    console.print(f"Next:\n  mtrain train data=text {words}")
