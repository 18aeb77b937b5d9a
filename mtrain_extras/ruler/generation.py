"""What RULER and InfiniteBench share: the model generates greedily, and the text is graded."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from mtrain_cli.evaluation.measurement import Cell, Item, Measurement, Row
from mtrain_cli.evaluation.results import PERCENT, Result, mean_and_error
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.limits import MOST_TOGETHER
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.scorer import Scorer
from mtrain_cli.inference.text import TextCodec


@dataclass
class Generation(Measurement):
    """Samples with the keys ``ids`` and ``outputs``, the expected answers."""

    codec: TextCodec
    together, generates = MOST_TOGETHER, True
    _hashes: dict[Path, str] = field(default_factory=dict, init=False, repr=False)

    @abstractmethod
    def answer_tokens(self, cell: Cell) -> int:
        """Return the most tokens to generate for a sample of a cell."""

    @abstractmethod
    def grade(self, cell: Cell, text: str, outputs: Sequence[str]) -> float:
        """Return the grade of a generated text, from 0 to 1."""

    def measure(self, scorer: Scorer, cell: Cell, items: Sequence[Item]) -> list[Row]:
        engine = cast(Engine, scorer)  # `mtrain eval` alone measures this, with an engine
        prompts, most, stop = [i["ids"] for i in items], self.answer_tokens(cell), self.codec.stop
        rows = []
        for item, completion in zip(
            items, engine.generate(prompts, most, Sampling(), stop), strict=True
        ):
            text, outputs = self.codec.decode(completion.ids) or "", item["outputs"]
            facts = {key: value for key, value in item.items() if key != "ids"}
            rows.append(
                {"score": 100.0 * self.grade(cell, text, outputs), "prediction": text, **facts,
                 "finish": completion.finish, "prompt_tokens": completion.prompt_tokens}
            )  # fmt: skip
        return rows

    def result(self, rows: Sequence[Row], result: Result) -> Result:
        score, error = mean_and_error([row["score"] for row in rows])
        return replace(result, score=score, error=error, unit=PERCENT)

    def content(self, path: Path) -> str:
        """Return the hash of a file, which is read once."""
        if path not in self._hashes:
            self._hashes[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self._hashes[path]
