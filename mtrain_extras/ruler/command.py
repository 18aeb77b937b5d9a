"""The commands `mtrain eval ruler`, `mtrain eval infinitebench` and `mtrain data ruler`."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mtrain_cli.commands.completion import complete_tokenizers, in_list
from mtrain_cli.commands.evaluate import Common, Model, Words, run_evaluation
from mtrain_cli.commands.options import (
    MOST_SAMPLES,
    MOST_TOKENS,
    argument,
    bounded,
    name_list,
    option,
    parse_names,
    token_lengths,
    with_options,
    writing,
)
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such

if TYPE_CHECKING:
    from mtrain_extras.ruler.ruler_files import Sources


def complete_tasks(incomplete: str) -> list[str]:
    """Complete a comma-separated list of tasks of InfiniteBench."""
    from mtrain_extras.ruler.infinitebench import TASKS

    return in_list(list(TASKS), incomplete)


@dataclass(frozen=True)
class Chosen:
    """Options of both commands.

    tasks: ruler6, ruler13 (needs --essays, --squad and --hotpotqa), or names of tasks. With
        `mtrain eval ruler --file`, '' for none.
    essays: Haystack of the tasks with essays: text, or RULER's PaulGrahamEssays.json.
    squad: SQuAD 2.0, for qa_1.
    hotpotqa: HotpotQA, for qa_2.
    words: RULER's english_words.json, for cwe at lengths that need more than 8,166 words.
    """

    tasks: Annotated[str, option("ruler6|ruler13|NAME,...")] = "ruler6"
    essays: Annotated[Path | None, option("FILE")] = None
    squad: Annotated[Path | None, option("FILE")] = None
    hotpotqa: Annotated[Path | None, option("FILE")] = None
    words: Annotated[Path | None, option("FILE")] = None

    def names(self) -> list[str]:
        """Return the names of the tasks, each of which exists and has its files."""
        from mtrain_extras.ruler.ruler import RULER6, RULER13, TASKS, files_of, find_task

        suites = {"ruler6": RULER6, "ruler13": RULER13}
        names = parse_names("--tasks", self.tasks)
        if not names:
            raise ConfigError("--tasks '': names nothing; allowed: ruler6, ruler13 or tasks")
        for name in names:
            if name.partition("@")[0] not in (*suites, *TASKS):
                raise ConfigError(f"--tasks {name}: {no_such('task', name, (*suites, *TASKS))}")
        tasks = dict.fromkeys(task for name in names for task in suites.get(name, (name,)))
        for task in tasks:
            find_task(task)
        for task in tasks:
            files_of(task, self.sources())
        return list(tasks)

    def sources(self) -> Sources:
        from mtrain_extras.ruler.ruler_files import Sources

        files = (self.essays, self.squad, self.hotpotqa, self.words)
        return Sources(*(None if path is None else str(path) for path in files))


@with_options(Common)
@with_options(Chosen)
def evaluate(
    chosen: Chosen,
    common: Common,
    model: Model,
    overrides: Words = None,
    file: Annotated[list[Path] | None, option("FILE")] = None,
    samples: Annotated[int, bounded(1, MOST_SAMPLES)] = 50,
    max_new: Annotated[int, bounded(1, MOST_TOKENS)] = 128,
) -> None:
    """Score RULER: the model generates answers to the samples of the original.

    The prompt is computed under --attention; new tokens attend to everything. Prompts have no chat
    template. RULER's paper uses 500 samples.

    [bold]Examples[/bold]

      [cyan]mtrain eval ruler Qwen2.5-3B --length 4k,128k --samples 500[/cyan]
          Score the six tasks that need no further files
      [cyan]mtrain eval ruler runs/latest --tasks niah_single_1,niah_single_2@book.txt[/cyan]
          Score two tasks, one with your own haystack
      [cyan]mtrain eval ruler runs/latest --file questions.jsonl --tasks ''[/cyan]
          Score your own samples: lines with "input" and "outputs"

    Args:
        model: A Hugging Face folder, a run, or a step-N folder of a run.
        overrides: Settings of sparsity and topology, train.kernel and train.dtype.
        file: File of samples, in RULER's format; give the option several times for several files.
        samples: Samples of each task and length.
        max_new: Maximum number of tokens to generate for a sample of --file. RULER's tasks have
            their own.
    """
    from mtrain_extras.ruler.evaluation import RulerOptions

    names = tuple(chosen.names() if chosen.tasks or not file else ())
    files = tuple(str(path.expanduser().absolute()) for path in file or ())
    options = RulerOptions(names, chosen.sources(), files, max_new)
    lengths = token_lengths("--length", common.length) if names else [0]  # files have their own
    run_evaluation("ruler", common, model, overrides, samples, lengths, options=asdict(options))


@with_options(Common)
def infinitebench(
    common: Common,
    model: Model,
    data: Annotated[Path, option("DIR")],
    overrides: Words = None,
    tasks: Annotated[str | None, name_list(complete_tasks)] = None,
    samples: Annotated[int, bounded(1, MOST_SAMPLES)] = 50,
) -> None:
    """Score InfiniteBench: the model answers questions about books, code, dialogues and lists.

    A prompt that is longer than --length, less the room for the answer, keeps its first and its
    last half, as in the benchmark. The prompt is computed under --attention; new tokens attend to
    everything. The table has MTraining's published scores beside yours.

    [bold]Examples[/bold]

      [cyan]mtrain eval infinitebench Qwen2.5-3B --data InfiniteBench --length 128k[/cyan]
          Score 50 samples of each task whose file is in the folder
      [cyan]mtrain eval infinitebench runs/latest --data DIR --tasks passkey,code_debug[/cyan]
          Score two tasks

    Args:
        model: A Hugging Face folder, a run, or a step-N folder of a run.
        data: Folder of the released files, such as passkey.jsonl.
        overrides: Settings of sparsity and topology, train.kernel and train.dtype.
        tasks: Names of files without .jsonl; by default all in the folder.
        samples: Maximum number of samples of each task, its first ones. The largest has 590.
    """
    from mtrain_extras.ruler.infinitebench import find_files
    from mtrain_extras.ruler.infinitebench_evaluation import InfiniteBenchOptions

    folder = data.expanduser().absolute()
    options = InfiniteBenchOptions(str(folder), tuple(find_files(folder, tasks)))
    run_evaluation("infinitebench", common, model, overrides, samples, options=asdict(options))


@with_options(Chosen)
def write(
    chosen: Chosen,
    out: Annotated[Path, argument("OUT")],
    tokenizer: Annotated[str, option("FILE|bytes", complete=complete_tokenizers)],
    length: Annotated[str, option("N,...")] = "4k",
    samples: Annotated[int, bounded(1, MOST_SAMPLES)] = 500,
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
        samples: Samples of each task and length.
    """
    from mtrain_cli.config.sizes import with_count
    from mtrain_cli.console import Console
    from mtrain_cli.data.tokenizers import open_tokenizer
    from mtrain_extras.ruler.ruler import generate, needs_words
    from mtrain_extras.ruler.ruler_files import write_samples
    from mtrain_extras.ruler.word_lists import identity

    names, lengths = chosen.names(), token_lengths("--length", length)
    files: dict[tuple[str, int], Path] = {}
    for tokens in lengths:
        for task in names:
            name, at, file = task.partition("@")
            path = out.expanduser() / str(tokens) / f"{name}{at}{Path(file).stem}.jsonl"
            if path in files.values():
                raise ConfigError(
                    f"--tasks {chosen.tasks}: two tasks would write {path}; rename a file"
                )
            if path.exists():
                raise ConfigError(
                    f"OUT={out}: already holds {path}; delete it or give another folder"
                )
            files[task, tokens] = path
    opened = open_tokenizer(tokenizer, "--tokenizer")
    console = Console(soft_wrap=True, highlight=False)
    if any(map(needs_words, names)):
        console.print(f"Words of wonderwords, SHA-256 {identity()}")
    sources = chosen.sources()
    generated = {key: generate(*key, samples, opened, sources=sources) for key in files}
    firsts = {key: next(made) for key, made in generated.items()}  # a mistake writes nothing
    for key, path in files.items():
        with writing(f"OUT={out}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_samples(path, itertools.chain([firsts[key]], generated[key]))
        console.print(f"Wrote {path}: {with_count(samples, 'sample')}")
