"""Samples of RULER (arXiv:2404.06654), equal to the bytes that the original's generators write.

Compared with NVIDIA/RULER, commit c3f5e3b. The tasks with essays cut sentences by another rule than
the original, so their needles may stand a few sentences elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.config.suggest import no_such
from mtrain_cli.data.tokenizers import Tokenizer
from mtrain_cli.evaluation.fitting import (
    Fitted,
    Fitting,
    Prompts,
    Stream,
    TooShortError,
    batched,
    find_size,
)
from mtrain_cli.evaluation.matching import (
    Metric,
    clean_prediction,
    percentage,
    string_match_all,
    string_match_part,
)
from mtrain_cli.evaluation.ruler_questions import QuestionPrompts
from mtrain_cli.evaluation.ruler_retrieval import NeedleKinds, NeedlePrompts
from mtrain_cli.evaluation.ruler_templates import (
    COMMON_WORDS,
    FREQUENT_WORDS,
    NEEDLES,
    QUESTIONS,
    TRACKING,
    Template,
)
from mtrain_cli.evaluation.ruler_tracking import tracking_prompts
from mtrain_cli.evaluation.ruler_words import CommonWordPrompts, FrequentWords
from mtrain_cli.evaluation.samples import Sample
from mtrain_cli.evaluation.sources import (
    Sources,
    read_haystack,
    read_hotpotqa,
    read_squad,
    read_words,
)
from mtrain_cli.evaluation.token_counts import TokenCounter

SEED = 42  # RULER's own


@dataclass(frozen=True)
class Task:
    """One task of RULER.

    template: its prompt.
    needles: what it hides; None for tasks without needles.
    source: field of `Sources` that it needs; "" for none.
    metric: grade of a prediction.
    """

    template: Template
    needles: NeedleKinds | None = None
    source: str = ""
    metric: Metric = string_match_all


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

    Raises:
        ConfigError: there is no such task, or it takes no file.
    """
    base, at, file = name.partition("@")
    if base not in TASKS:
        raise ConfigError(f"--tasks {name}: {no_such('task', base, TASKS)}")
    if at and (TASKS[base].source != "essays" or not file):
        names = ", ".join(task for task, found in TASKS.items() if found.source == "essays")
        raise ConfigError(f"--tasks {name}: only the tasks with essays take @FILE: {names}")
    return TASKS[base]


def needs_words(name: str) -> bool:
    """Return whether a task takes words from the package wonderwords.

    Raises:
        ConfigError: there is no such task.
    """
    task = find_task(name)
    by_words = task.needles is not None and "words" in (task.needles.key, task.needles.value)
    return by_words or task.template is COMMON_WORDS


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

    The tokenizer uses all cores. The samples do not depend on their number.

    Args:
        task: a name in `TASKS`, or ``niah_single_2@FILE`` for another haystack than the essays.
        length: most tokens of a sample, those for the answer included.
        tokenizer: tokenizer of the model to evaluate.
        seed: 42 gives RULER's samples.
        sources: files for the tasks with essays and questions.

    Raises:
        ConfigError: there is no such task, the length is too short for it, or it lacks words or a
            file.
    """
    found, counter = find_task(task), TokenCounter(tokenizer)
    try:
        fitted = _fitted(task, found, length, count, seed, counter, sources or Sources())
        for batch in batched(enumerate(fitted), lambda pair: len(pair[1].draft.prompt)):
            yield from _samples(found, batch, counter)
    except TooShortError as error:
        raise _too_short(task, length, error) from None


def score(task: str, predictions: Sequence[str], outputs: Sequence[Sequence[str]]) -> float:
    """Return RULER's score of a task in percent, rounded to two digits.

    Args:
        predictions: the text that the model wrote for each sample.
        outputs: the expected answers of each sample.

    Raises:
        ConfigError: there is no such task, or there are no predictions.
    """
    if not predictions:
        raise ConfigError(f"RULER: {task}: no predictions")
    return percentage(grades(task, predictions, outputs))


def grades(task: str, predictions: Sequence[str], outputs: Sequence[Sequence[str]]) -> list[float]:
    """Return the grade of each prediction, from 0 to 1.

    Raises:
        ConfigError: there is no such task.
    """
    metric = find_task(task).metric
    pairs = zip(predictions, outputs, strict=True)
    return [metric(clean_prediction(text), expected) for text, expected in pairs]


def _fitted(
    name: str,
    task: Task,
    length: int,
    count: int,
    seed: int,
    counter: TokenCounter,
    sources: Sources,
) -> Iterator[Fitted]:
    """Yield the prompts of a task before they are split into input and answer prefix."""
    stream = Stream(seed)
    if task.template is FREQUENT_WORDS:
        yield from FrequentWords(length - task.template.tokens, seed, counter).samples(
            stream, count
        )
        return
    prompts: Prompts
    if task.template is TRACKING:
        prompts = tracking_prompts(length, stream, counter)
    elif task.template is COMMON_WORDS:
        with _named(name, replace(task, source="words")):
            more_words = None if sources.words is None else read_words(sources.words)
        prompts = CommonWordPrompts(length, seed, more_words)
    elif task.needles is not None:
        words: Sequence[str] = ()
        if task.source:
            path = _source(name, task, sources)
            with _named(name, task):
                words = read_haystack(path)
        prompts = NeedlePrompts(task.needles, length, seed, words)
    else:
        path = _source(name, task, sources)
        with _named(name, task):
            content = read_squad(path) if task.source == "squad" else read_hotpotqa(path)
        if count > len(content.questions):
            raise ConfigError(
                f"--{task.source} {path}: has {with_count(len(content.questions), 'question')} for "
                f"{name}, fewer than the {with_count(count, 'sample')}; give fewer --samples"
            )
        prompts = QuestionPrompts(content, seed)
    size = find_size(prompts, stream, length, counter)
    yield from Fitting(prompts, stream, size, length, counter).samples(count)


@contextlib.contextmanager
def _named(name: str, task: Task) -> Iterator[None]:
    """Begin the lines of a ConfigError, which begin with the file, with the option of the file."""
    base, at, _ = name.partition("@")
    option = f"--tasks {base}@" if at else f"--{task.source} "
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{option}{line}" for line in error.problems)) from None


def _source(name: str, task: Task, sources: Sources) -> Path:
    """Return the file that a task needs."""
    _, _, file = name.partition("@")
    path = Path(file).expanduser() if file else getattr(sources, task.source)
    if path is None:
        other = f", or name the task {name}@FILE for another text" if task.needles else ""
        raise ConfigError(f"--tasks {name}: needs a file of {task.source}; give one{other}")
    return path


def _samples(
    task: Task, batch: Sequence[tuple[int, Fitted]], counter: TokenCounter
) -> Iterator[Sample]:
    """Yield the samples of fitted prompts. Needle tasks record where the first answer stands."""
    split = [task.template.split(fitted.draft.prompt) for _, fitted in batch]
    places: list[int | None] = [None] * len(batch)
    tokens: Sequence[int | None] = places
    if task.needles is not None:
        pairs = zip(split, batch, strict=True)
        found = [text.find(fitted.draft.outputs[0]) for (text, _), (_, fitted) in pairs]
        tokens = counter.exact([text[:at] for (text, _), at in zip(split, found, strict=True)])
        places = list(found)
    for (number, fitted), (text, prefix), place, before in zip(
        batch, split, places, tokens, strict=True
    ):
        index = number if place is None else place
        yield Sample(index, text, fitted.draft.outputs, fitted.length, prefix, before)


def _too_short(task: str, length: int, error: TooShortError) -> ConfigError:
    needs = f"; the shortest that was drawn has {error.shortest:,}" if error.shortest else ""
    return ConfigError(f"--length {length}: too few tokens for a sample of {task}{needs}")
