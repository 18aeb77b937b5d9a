"""`mtrain data ruler`: write the samples of RULER."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mtrain_cli.commands.completion import complete_tokenizers
from mtrain_cli.commands.data import app
from mtrain_cli.commands.options import (
    MOST_SAMPLES,
    argument,
    bounded,
    option,
    parse_names,
    token_lengths,
    writing,
)
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such


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
    needles in essays may stand a few sentences elsewhere.

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
    from mtrain_cli.evaluation.ruler import files_of, generate, needs_words
    from mtrain_cli.evaluation.ruler_files import Sources, write_samples
    from mtrain_cli.evaluation.word_lists import identity

    names, lengths = ruler_tasks(tasks), token_lengths("--length", length)
    files: dict[tuple[int, str], Path] = {}
    for tokens in lengths:
        for task in names:
            name, at, file = task.partition("@")
            path = out.expanduser() / str(tokens) / f"{name}{at}{Path(file).stem}.jsonl"
            if path in files.values():
                raise ConfigError(f"--tasks {tasks}: two tasks would write {path}; rename a file")
            if path.exists():
                raise ConfigError(
                    f"OUT={out}: already holds {path}; delete it or give another folder"
                )
            files[tokens, task] = path
    sources = Sources(*(str(path) if path else None for path in (essays, squad, hotpotqa, words)))
    for task in names:
        files_of(task, sources)
    opened = open_tokenizer(tokenizer, "--tokenizer")
    console = Console(soft_wrap=True, highlight=False)
    if any(map(needs_words, names)):
        console.print(f"Words of wonderwords, SHA-256 {identity()}")
    for (tokens, task), path in files.items():
        with writing(f"OUT={out}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_samples(path, generate(task, tokens, samples, opened, sources=sources))
        console.print(f"Wrote {path}: {with_count(samples, 'sample')}")


def ruler_tasks(text: str) -> list[str]:
    """Return the names of tasks, each of which exists."""
    from mtrain_cli.evaluation.ruler import RULER6, RULER13, TASKS, find_task

    suites = {"ruler6": RULER6, "ruler13": RULER13}
    names = parse_names("--tasks", text)
    if not names:
        raise ConfigError(f"--tasks {text!r}: names nothing; allowed: ruler6, ruler13 or tasks")
    for name in names:
        if name.partition("@")[0] not in (*suites, *TASKS):
            raise ConfigError(f"--tasks {name}: {no_such('task', name, (*suites, *TASKS))}")
    tasks = dict.fromkeys(task for name in names for task in suites.get(name, (name,)))
    for task in tasks:
        find_task(task)
    return list(tasks)
