"""Evaluation samples: a prompt and the answers that a model should give, one JSON line each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.config.atomic_files import replacing
from mtrain_cli.data.checked_files import explain_read_errors
from mtrain_cli.evaluation.sources import DamagedFileError


@dataclass(frozen=True)
class Sample:
    """One question about a long text.

    index: number of the sample. RULER's needle tasks store here the character offset of the first
        answer instead.
    input: the text and the question.
    outputs: the expected answers.
    length: number of tokens of input and answer_prefix, plus the tokens reserved for the answer.
    answer_prefix: beginning of the answer, which the model continues.
    answer_token: number of tokens of the input before the first answer; None if not recorded.
    """

    index: int
    input: str
    outputs: tuple[str, ...]
    length: int
    answer_prefix: str = ""
    answer_token: int | None = None

    @property
    def prompt(self) -> str:
        """The text that the model reads: the input and the beginning of the answer."""
        return self.input + self.answer_prefix

    def line(self) -> str:
        """Return the sample as a line of JSON. The bytes are those that RULER writes."""
        record: dict[str, Any] = {
            "index": self.index,
            "input": self.input,
            "outputs": list(self.outputs),
            "length": self.length,
            "length_w_model_temp": self.length,
            "answer_prefix": self.answer_prefix,
        }
        if self.answer_token is not None:
            record["token_position_answer"] = self.answer_token
        return json.dumps(record) + "\n"


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """Write samples to a .jsonl file, which appears when it is complete. Return their number."""
    count = 0
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(sample.line())
            count += 1
    return count


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of a .jsonl file of RULER, or of another file with ``outputs``.

    Raises:
        ConfigError: the file cannot be read.
        DamagedFileError: it has no samples, or a line is not a sample.
    """
    missing = f"--file {path}: no such file. Give a .jsonl file of samples."
    with explain_read_errors(f"--file {path}:", missing), path.open("rb") as file:
        empty = True
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse(line, f"--file {path}: line {number}", number - 1)
                empty = False
        if empty:
            raise DamagedFileError(
                f"--file {path}: has no samples; give lines with the keys input and outputs"
            )


def _parse(line: bytes, location: str, index: int) -> Sample:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{location} is not JSON ({documents.reason(error)})") from None
    if not isinstance(record, dict):
        raise DamagedFileError(f"{location} is not a JSON object with the keys input and outputs")
    for key in ("input", "outputs"):
        if key not in record:
            names = ", ".join(list(record)[:12]) or "none"
            raise DamagedFileError(f"{location} has no key {key}. Its keys: {names}")
    outputs = record["outputs"]
    if not _is_answers(outputs):
        raise DamagedFileError(f"{location}: outputs must be a list of one or more texts")
    text, prefix = record["input"], record.get("answer_prefix", "")
    if not isinstance(text, str) or not isinstance(prefix, str):
        raise DamagedFileError(f"{location}: input and answer_prefix must be texts")
    numbers = [record.get(key, 0) for key in ("index", "length", "token_position_answer")]
    if not all(isinstance(value, int) for value in numbers):
        raise DamagedFileError(
            f"{location}: index, length and token_position_answer must be integers"
        )
    given = record.get("token_position_answer")
    return Sample(
        record.get("index", index), text, tuple(outputs), record.get("length", 0), prefix, given
    )


def _is_answers(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(v, str) for v in value)
