"""Results of evaluations on disk, a row per sample and a row per result. Does not import torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.config.documents import naming, replace_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.run_dir import LOCK, RunLock

FOLDER = "evaluation"  # in the folder of a run
RESULTS, SAMPLES, ABOUT = "results.jsonl", "samples.jsonl", "evaluation.json"
NATS, PERCENT = "nats", "%"
HELD_OUT_TEXT = "held-out text"  # in the settings of a result
_LONG = 1e6  # a number from here on has an exponent
IN_TRAINING = "in_training"  # key of a sample that a run measured during training


@dataclass(frozen=True)
class Part:
    """The score of a part of the samples, or of the tokens of all samples.

    begin, end: the part. For perplexity, tokens with ``begin`` to ``end`` - 1 earlier tokens. For
        needles, depths from ``begin`` to ``end`` percent of the sequence.
    error: standard error of the score over the samples; None for fewer than two samples.
    """

    begin: int
    end: int
    count: int  # number of tokens or questions
    score: float | None  # None if there are none, or if the score is not finite
    error: float | None = None


@dataclass(frozen=True)
class Result:
    """The score of a model in one task, at one length, with one attention.

    score: mean over the samples, for perplexity over their tokens; None if it is not finite.
    key_tokens: number of key tokens, with their loss in nats; None if it was not asked for.
    settings: settings of the samples, for the user. Reports show those in which results differ.
    details: further settings, from the most telling to the least. Reports show one if results of
        equal ``settings`` differ in it.
    """

    key: str  # hash of everything that determines the samples, apart from their number
    task: str  # ``perplexity``, ``niah``, or ``ruler:`` or ``lm-eval:`` with the name of a task
    length: int  # tokens of a sample. 0 if the task chooses it.
    attention: str  # name of the pattern
    pattern: str  # settings of the pattern, for the user
    step: int | None  # optimizer steps of the checkpoint; None for a Hugging Face folder
    samples: int  # number of samples
    score: float | None
    error: float | None  # standard error of the score; None for fewer than two samples
    unit: str  # `NATS` or `PERCENT`
    seconds: float = 0.0  # time to compute all samples
    parts: tuple[Part, ...] = ()  # scores by context or by depth
    key_tokens: Part | None = None
    note: str = ""  # what a reader must know to compare the score
    settings: tuple[str, ...] = ()
    details: tuple[str, ...] = ()


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of independent values and its standard error, sd / sqrt(n).

    None for a mean that is not finite or of no values, and for an error of fewer than two.
    """
    return weighted_mean_and_error(values, [1.0] * len(values))


def weighted_mean_and_error(
    values: Sequence[float], weights: Sequence[float]
) -> tuple[float | None, float | None]:
    """Return the weighted mean of independent values and its standard error.

    The weights are the numbers of tokens or questions, so that this is the mean of all of them. The
    error is that of a ratio, sqrt(n / (n - 1) * sum (w (x - mean))^2) / sum w. Values of weight 0
    do not count. None as in `mean_and_error`.
    """
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if not pairs or not all(math.isfinite(value) for value, _ in pairs):
        return None, None
    total = math.fsum(weight for _, weight in pairs)
    mean = math.fsum(value * weight for value, weight in pairs) / total
    if len(pairs) < 2:
        return mean, None
    squares = math.fsum((weight * (value - mean)) ** 2 for value, weight in pairs)
    return mean, math.sqrt(len(pairs) / (len(pairs) - 1) * squares) / total


def format_score(value: float | None, error: float | None, unit: str) -> str:
    """Return ``97.5 ± 1.2``, ``2.3e+21``, or ``-`` without a score."""
    if value is None:
        return "-"
    digits = 1 if unit == PERCENT else 4
    return " ± ".join(
        f"{one:.{digits}f}" if abs(one) < _LONG else f"{one:.4g}"
        for one in (value, error)
        if one is not None
    )


def key_of(settings: Mapping[str, Any]) -> str:
    """Return the hash of the settings that determine the samples of a result."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class ResultsFolder:
    """The results in a folder. Only the first worker opens it.

    samples: rows of samples by the key of their result and by their number.
    results: results by their key, in the order of the file.
    """

    path: Path
    samples: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    damage: tuple[str, ...] = ()  # a line on each file with lines that could not be read

    @staticmethod
    def open(path: Path, model: str) -> ResultsFolder:
        """Open or create a folder, without damaged lines and lines that a crash cut short.

        model: from `model_name`. Raises ConfigError if the folder holds something else.
        """
        require_own(path, model)
        path.mkdir(parents=True, exist_ok=True)
        replace_text(path / ABOUT, json.dumps({"model": model}) + "\n")
        samples, lost_samples = kept_rows(path / SAMPLES, _is_sample)
        results, lost = kept_rows(path / RESULTS, _is_result)
        by_key: dict[str, dict[int, dict[str, Any]]] = {}
        for row in samples:
            by_key.setdefault(row["key"], {})[row["index"]] = row
        own = {row["key"]: documents.checked(Result, row) for row in results}
        return ResultsFolder(path, by_key, own, tuple(filter(None, (lost_samples, lost))))

    def drop_training(self, after: int) -> None:
        """Drop what a run measured during training after step ``after``: it trains these again."""
        for key, rows in list(self.samples.items()):
            steps = [row.get("step") for row in rows.values() if row.get(IN_TRAINING)]
            if not all(isinstance(step, int) and step <= after for step in steps):
                self.drop_samples(key)

    def drop_samples(self, key: str) -> None:
        """Drop the samples of a result, and the result: a crash must not leave it without them."""
        self.results.pop(key, None)
        self.samples.pop(key, None)
        # Results first: a result without samples would be kept for ever.
        _rewrite(self.path / RESULTS, map(asdict, self.results.values()))
        _rewrite(
            self.path / SAMPLES, (row for rows in self.samples.values() for row in rows.values())
        )

    def add_sample(self, row: dict[str, Any]) -> None:
        """Append the row of a sample. It has the keys ``key``, ``index`` and ``score``."""
        self.samples.setdefault(row["key"], {})[row["index"]] = row
        append_row(self.path / SAMPLES, row)

    def add_result(self, result: Result) -> None:
        """Append a result. It replaces an earlier result of the same key."""
        replaces = self.results.pop(result.key, None) is not None
        self.results[result.key] = result
        if replaces:
            _rewrite(self.path / RESULTS, map(asdict, self.results.values()))
        else:
            append_row(self.path / RESULTS, asdict(result))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other evaluations out of a folder. Raises ConfigError if one writes there."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = RunLock(folder)
    except ConfigError:
        raise ConfigError(
            f"another `mtrain eval` writes to {folder}; wait for it or give another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def model_name(model: Path, out: Path) -> str:
    """Return how results name their model: relative in a run, which may move with them."""
    model, out = model.resolve(), out.resolve()
    return ".." if out.parent == model else str(model)


def require_own(path: Path, model: str) -> None:
    """Raise ConfigError unless a folder is new or empty, or holds results of this model."""
    about = path / ABOUT
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {path}: is a file; give a folder")
    rows = _read(path / SAMPLES, _is_sample)[0] or _read(path / RESULTS, _is_result)[0]
    if not about.is_file() and not rows:
        if path.is_dir() and any(entry.name != LOCK for entry in path.iterdir()):
            raise ConfigError(
                f"--out {path}: is not empty and holds no results of `mtrain eval`; give a new "
                "folder"
            )
        return
    try:
        held = documents.read_json(about)["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{about}: does not name the model ({documents.reason(error)}). Write "
            f"{json.dumps({'model': model})} into it if the results are of this model"
        ) from None
    if held != model:
        raise ConfigError(
            f"--out {path}: holds results of another model, {held}; give another folder"
        )


def read_results(folder: Path) -> list[Result]:
    """Return the results in a folder, or in the folder of a run; an empty list if it has none."""
    return read_whole_results(folder)[0]


def read_whole_results(folder: Path) -> tuple[list[Result], str]:
    """Do as `read_results`. Also return a line on what cannot be read, or ""."""
    for file in (folder / FOLDER / RESULTS, folder / RESULTS):
        rows, damaged = _read(file, _is_result)
        if rows or (damaged and (file.parent / ABOUT).is_file()):
            by_key = {row["key"]: documents.checked(Result, row) for row in rows}
            lost = documents.lines_not_shown(file, damaged, "result")
            return list(by_key.values()), lost and f"{lost}. Give the same `mtrain eval` again"
    return [], ""


def read_sample_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the samples in a folder of results. Raises ConfigError without them."""
    for file in (folder / FOLDER / SAMPLES, folder / SAMPLES):
        if file.is_file():
            return _read(file, _is_sample)[0]
    raise ConfigError(f"{folder}: holds no {SAMPLES} of `mtrain eval`")


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Append a JSON object to a file of rows. NaN and infinities become null."""
    with naming(file), file.open("a", encoding="utf-8") as open_file:
        open_file.write(documents.json_text(row) + "\n")


def _rewrite(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    replace_text(file, "".join(documents.json_text(row) + "\n" for row in rows))


def kept_rows(
    file: Path, is_whole: Callable[[dict[str, Any]], bool]
) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of `_read` and a line on damaged ones or "". Remove all other lines."""
    rows, damaged = _read(file, is_whole)
    if damaged or (file.exists() and not file.read_bytes().endswith(b"\n")):
        _rewrite(file, rows)
    again = "removed, and the `mtrain eval` that wrote it measures again"
    return rows, f"{documents.damaged_lines(file, damaged)}; {again}" if damaged else ""


def _read(
    file: Path, is_whole: Callable[[dict[str, Any]], bool]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return a file's whole rows and its damaged lines' numbers, less a last line cut short."""
    rows, damaged = [], []
    # Only "\n" ends a line: with other ends, one damaged line would count as several.
    lines = file.read_bytes().split(b"\n") if file.is_file() else []
    for number, line in enumerate(lines, 1):
        row = documents.json_object(line.decode(errors="replace"))
        if row is not None and is_whole(row):
            rows.append(row)
        elif line.strip() and number < len(lines):
            damaged.append(number)
    return rows, damaged


def _is_sample(row: Mapping[str, Any]) -> bool:
    """Return whether a row has the key of a result and the number of a sample."""
    key, index = row.get("key"), row.get("index")
    return isinstance(key, str) and isinstance(index, int) and index >= 0


def _is_result(row: Mapping[str, Any]) -> bool:
    with contextlib.suppress(documents.UnreadableError):
        return bool(documents.checked(Result, row))
    return False
