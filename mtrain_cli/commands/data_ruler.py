"""`mtrain data ruler`: write the samples of RULER."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mtrain_cli.commands.completion import complete_tokenizers
from mtrain_cli.commands.data import app
from mtrain_cli.commands.options import (
    MOST_SAMPLES,
    MOST_TOKENS,
    argument,
    bounded,
    option,
    writing,
)
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such

if TYPE_CHECKING:
    from mtrain_cli.evaluation.sources import Sources


@app.command()
def ruler(
    out: Annotated[Path, argument("OUT")],
    tokenizer: Annotated[str, option("FILE|bytes", complete=complete_tokenizers)],
    length: Annotated[str, option("N,...")] = "4k",
    tasks: Annotated[str, option("ruler6|ruler13|NAME,...")] = "ruler6",
    samples: Annotated[int, bounded(1, MOST_SAMPLES)] = 500,
    essays: Annotated[Path | None, option("FILE")] = None,
    squad: Annotated[Path | None, option("FILE")] = None,
    hotpotqa: Annotated[Path | None, option("FILE")] = None,
    words: Annotated[Path | None, option("FILE")] = None,
) -> None:
    """Write RULER's samples to OUT/LENGTH/TASK.jsonl.

    The files equal those of the original's generators at commit c3f5e3b, byte for byte. Only the
    needles in essays may stand a few sentences elsewhere. The tokenizer uses all cores.

    [bold]Examples[/bold]

      [cyan]mtrain data ruler ruler --tokenizer Qwen2.5-3B --length 4k,128k[/cyan]
          Write 500 samples of the six tasks that need no further files, at two lengths
      [cyan]mtrain data ruler ruler --tokenizer Qwen2.5-3B --tasks niah_single_2@book.txt[/cyan]
          Hide needles in your own text

    Args:
        out: Folder for the files.
        tokenizer: A Hugging Face tokenizer.json, its folder, or bytes: that of the model.
        length: Maximum tokens of a sample, including those for the answer, such as 4k,128k.
        tasks: ruler6, ruler13 (needs --essays, --squad and --hotpotqa), or names of tasks.
        samples: Samples of each task and length.
        essays: Haystack of the tasks with essays: text, or RULER's PaulGrahamEssays.json.
        squad: SQuAD 2.0, for qa_1.
        hotpotqa: HotpotQA, for qa_2.
        words: RULER's english_words.json, for cwe at lengths that need more than 8,166 words.
    """
    from mtrain_cli.config.sizes import with_count
    from mtrain_cli.console import Console
    from mtrain_cli.data.tokenizers import open_tokenizer
    from mtrain_cli.evaluation.ruler import generate, needs_words
    from mtrain_cli.evaluation.samples import write_samples
    from mtrain_cli.evaluation.sources import Sources
    from mtrain_cli.evaluation.word_lists import identity

    names, lengths = ruler_tasks(tasks), token_lengths(length)
    files = {
        (tokens, task): out.expanduser() / str(tokens) / f"{_file_name(task)}.jsonl"
        for tokens in lengths
        for task in names
    }
    for path in files.values():
        if list(files.values()).count(path) > 1:
            raise ConfigError(f"--tasks {tasks}: two tasks would write {path}; rename a file")
        if path.exists():
            raise ConfigError(f"OUT={out}: already holds {path}; delete it or give another folder")
    sources = Sources(essays, squad, hotpotqa, words)
    require_files(names, sources)
    opened = open_tokenizer(tokenizer, "--tokenizer")
    console = Console(soft_wrap=True, highlight=False)
    if any(needs_words(task) for task in names):
        console.print(f"Words of wonderwords, SHA-256 {identity()}")
    for (tokens, task), path in files.items():
        made = generate(task, tokens, samples, opened, sources=sources)
        with writing(f"OUT={out}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            count = write_samples(path, made)
        console.print(f"Wrote {path}: {with_count(count, 'sample')}")


def ruler_tasks(text: str) -> list[str]:
    """Return the names of tasks, each of which exists."""
    from mtrain_cli.evaluation.ruler import RULER6, RULER13, TASKS, find_task

    suites = {"ruler6": RULER6, "ruler13": RULER13}
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--tasks {text!r}: names nothing; allowed: ruler6, ruler13 or tasks")
    for name in names:
        if name.partition("@")[0] not in (*suites, *TASKS):
            raise ConfigError(f"--tasks {name}: {no_such('task', name, (*suites, *TASKS))}")
    found = [task for name in names for task in suites.get(name, (name,))]
    for task in found:
        find_task(task)
    return list(dict.fromkeys(found))


def token_lengths(text: str) -> list[int]:
    from mtrain_cli.config.sizes import EXPECTED, parse_size

    lengths = []
    for item in text.split(","):
        try:
            tokens = parse_size(item)
        except ValueError:
            raise ConfigError(f"--length {text}: {item!r} is not {EXPECTED}") from None
        if not 2 <= tokens <= MOST_TOKENS:
            raise ConfigError(f"--length {text}: must be from 2 to {MOST_TOKENS:,} tokens")
        lengths.append(tokens)
    return list(dict.fromkeys(lengths))


def require_files(names: list[str], sources: Sources) -> None:
    """Raise ConfigError if a task lacks a file."""
    from mtrain_cli.evaluation.ruler import find_task

    for name in names:
        source = find_task(name).source
        if source and "@" not in name and getattr(sources, source) is None:
            raise ConfigError(f"--tasks {name}: give --{source} FILE")


def _file_name(task: str) -> str:
    """Return ``niah_single_2@book`` for ``niah_single_2@folder/book.txt``."""
    name, at, file = task.partition("@")
    return f"{name}{at}{Path(file).stem}"
