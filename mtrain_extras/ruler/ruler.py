"""Samples of RULER (arXiv:2404.06654), equal to the bytes that the original's generators write.

Compared with NVIDIA/RULER, commit c3f5e3b. The tasks with essays cut sentences by another rule than
the original, so their needles may stand a few sentences elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.config.suggest import no_such
from mtrain_cli.data.tokenizers import Tokenizer
from mtrain_extras.ruler.ruler_files import (
    Sample,
    Sources,
    read_haystack,
    read_hotpotqa,
    read_squad,
    read_words,
)
from mtrain_extras.ruler.ruler_prompts import (
    CommonWordPrompts,
    Count,
    Draft,
    NeedleKinds,
    NeedlePrompts,
    Prompts,
    QuestionPrompts,
    Stream,
    TooShortError,
    TrackingPrompts,
    fitting,
    frequent_words,
)
from mtrain_extras.ruler.ruler_templates import (
    COMMON_WORDS,
    FREQUENT_WORDS,
    NEEDLES,
    QUESTIONS,
    TRACKING,
    Template,
)

T = TypeVar("T")
SEED = 42  # RULER's own
_CONTROL = re.compile(r"[\x00-\x1f]")


def clean_prediction(text: str) -> str:
    """Replace control characters with newlines, and strip whitespace at both ends, like RULER."""
    return _CONTROL.sub("\n", text.strip()).strip()


def string_match_all(prediction: str, outputs: Sequence[str]) -> float:
    """Return the share of answers that the cleaned prediction contains, whatever their case."""
    return sum(output.lower() in prediction.lower() for output in outputs) / len(outputs)


def string_match_part(prediction: str, outputs: Sequence[str]) -> float:
    """Return 1 if the cleaned prediction contains one of the answers, whatever its case, else 0."""
    return float(any(output.lower() in prediction.lower() for output in outputs))


@dataclass(frozen=True)
class Task:
    """One task of RULER."""

    template: Template  # its prompt
    needles: NeedleKinds | None = None  # what it hides; None for tasks without needles
    source: str = ""  # field of `Sources` that it needs; "" for none
    metric: Callable[[str, Sequence[str]], float] = string_match_all  # grade of a prediction


def _needles(haystack: str, **kinds: str | int) -> Task:
    source = "essays" if haystack == "essay" else ""
    return Task(NEEDLES, NeedleKinds(haystack, **kinds), source)  # type: ignore[arg-type]


TASKS = {
    "niah_single_1": _needles("noise"),
    "niah_single_2": _needles("essay"),
    "niah_single_3": _needles("essay", value="uuids"),
    "niah_multikey_1": _needles("essay", keys=4),
    "niah_multikey_2": _needles("needle"),
    "niah_multikey_3": _needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": _needles("essay", values=4),
    "niah_multiquery": _needles("essay", queries=4),
    "vt": Task(TRACKING),
    "cwe": Task(COMMON_WORDS),
    "fwe": Task(FREQUENT_WORDS),
    "qa_1": Task(QUESTIONS, source="squad", metric=string_match_part),
    "qa_2": Task(QUESTIONS, source="hotpotqa", metric=string_match_part),
}
# The tasks that need no files of the user, and all tasks.
RULER6 = tuple(name for name, task in TASKS.items() if not task.source)
RULER13 = tuple(TASKS)


def find_task(name: str) -> Task:
    """Return the task of a name such as ``niah_single_2`` or ``niah_single_2@FILE``.

    Raises ConfigError if there is no such task, or it takes no file.
    """
    base, at, file = name.partition("@")
    if base not in TASKS:
        raise ConfigError(f"--tasks {name}: {no_such('task', base, TASKS)}")
    if at and (TASKS[base].source != "essays" or not file):
        names = ", ".join(name for name, task in TASKS.items() if task.source == "essays")
        raise ConfigError(f"--tasks {name}: only the tasks with essays take @FILE: {names}")
    return TASKS[base]


def needs_words(name: str) -> bool:
    """Return whether a task takes words from the package wonderwords."""
    task = find_task(name)
    by_words = task.needles is not None and "words" in (task.needles.key, task.needles.value)
    return by_words or task.template is COMMON_WORDS


def files_of(name: str, sources: Sources) -> list[Path]:
    """Return the user's files that a task reads. Raises ConfigError if it lacks one."""
    source, (_, _, given) = find_task(name).source, name.partition("@")
    if source and not given and not (given := getattr(sources, source) or ""):
        other = f", or name the task {name}@FILE for another text" if source == "essays" else ""
        raise ConfigError(f"--tasks {name}: give --{source} FILE{other}")
    given = given or (sources.words or "" if name == "cwe" else "")
    return [Path(given).expanduser()] if given else []


def generate(
    task: str,
    length: int,
    count: int,
    tokenizer: Tokenizer,
    *,
    seed: int = SEED,
    sources: Sources | None = None,
) -> Iterator[Sample]:
    """Yield ``count`` samples of a task.

    Raises ConfigError if there is no such task, the length is too short for it, or it lacks words
    or a file.

    Args:
        task: a name in `TASKS`, or ``niah_single_2@FILE`` for another haystack than the essays.
        length: maximum number of tokens of a sample, including its answer.
        tokenizer: tokenizer of the model to evaluate.
        seed: 42 gives RULER's samples.
        sources: files for the tasks with essays and questions.
    """

    def tokens(text: str) -> int:
        return len(tokenizer.encode([text])[0])

    own = find_task(task)
    try:
        drafts = _drafts(task, length, count, seed, tokens, sources or Sources())
        for number, draft in enumerate(drafts):
            text, prefix = own.template.split(draft.prompt)
            index, before = number, None
            if own.needles is not None:  # as in the original, the place of the first answer
                index = text.find(draft.outputs[0])
                before = tokens(text[:index])
            yield Sample(index, text, draft.outputs, draft.length, prefix, before)
    except TooShortError as error:
        needs = f"; the shortest that was drawn has {error.shortest:,}" if error.shortest else ""
        raise ConfigError(
            f"--length {length}: too few tokens for a sample of {task}{needs}"
        ) from None


def score(task: str, predictions: Sequence[str], outputs: Sequence[Sequence[str]]) -> float:
    """Return RULER's score of a task in percent, rounded to two digits.

    predictions, outputs: text of the model and expected answers of each sample. ConfigError if
    there is no such task, or there are no predictions.
    """
    if not predictions:
        raise ConfigError(f"RULER: {task}: no predictions")
    pairs = zip(predictions, outputs, strict=True)
    return round(sum(grade(task, *pair) for pair in pairs) / len(predictions) * 100, 2)


def grade(task: str, prediction: str, outputs: Sequence[str]) -> float:
    """Return the grade of a prediction, from 0 to 1. Raises ConfigError for an unknown task."""
    return find_task(task).metric(clean_prediction(prediction), outputs)


def _drafts(
    name: str, length: int, count: int, seed: int, tokens: Count, sources: Sources
) -> Iterator[Draft]:
    """Yield the prompts of a task before they are split into input and answer prefix."""
    task, stream, files = find_task(name), Stream(seed), files_of(name, sources)
    if task.template is FREQUENT_WORDS:
        limit = length - task.template.tokens
        yield from frequent_words(limit, seed, stream, tokens, count)
        return
    option = f"--tasks {name.partition('@')[0]}@" if "@" in name else f"--{task.source or 'words'} "

    def read(reader: Callable[[Path], T]) -> list[T]:
        """Return what the files hold. Lines of errors begin with the file, so name its option."""
        try:
            return [reader(file) for file in files]
        except ConfigError as error:
            raise ConfigError(*(f"{option}{line}" for line in error.problems)) from None

    prompts: Prompts
    if task.template is TRACKING:
        prompts = TrackingPrompts(length, stream, tokens)
    elif task.template is COMMON_WORDS:
        prompts = CommonWordPrompts(length, seed, *read(read_words))
    elif task.needles is not None:
        prompts = NeedlePrompts(task.needles, length, seed, *read(read_haystack))
    else:
        (content,) = read(read_squad if task.source == "squad" else read_hotpotqa)
        if count > len(content.questions):
            raise ConfigError(
                f"{option}{files[0]}: has {with_count(len(content.questions), 'question')} for "
                f"{name}, fewer than the {with_count(count, 'sample')}; give fewer --samples"
            )
        prompts = QuestionPrompts(content, seed)
    yield from fitting(prompts, stream, length, tokens, count)
