"""Needles in a haystack by forced scoring: each sequence has many questions with their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from mtrain_cli.data.needles import NeedleDocument
from mtrain_cli.data.tokenizers import Tokenizer
from mtrain_cli.evaluation.depth_grid import DepthSample
from mtrain_cli.evaluation.forced import forced
from mtrain_cli.evaluation.measurement import Cell, Item, Measurement, Row
from mtrain_cli.evaluation.results import (
    PERCENT,
    Part,
    Result,
    mean_and_error,
    weighted_mean_and_error,
)
from mtrain_cli.inference.scorer import Scorer

TASK = "niah"
DEPTHS = 10  # ranges of depth in a result


@dataclass
class Retrieval(Measurement):
    """Needles at several lengths.

    lengths: tokens of a sequence.
    make: returns the items of a length, from `sentence_item` or `python_item`.
    origin: what determines the items, for the key of a result.
    """

    lengths: Sequence[int]
    make: Callable[[int], Iterator[Item]]
    origin: Mapping[str, Any]

    def cells(self) -> list[Cell]:
        return [Cell(TASK, length) for length in self.lengths]

    def settings(self, cell: Cell) -> Mapping[str, Any]:  # noqa: ARG002 - the same for all lengths
        return self.origin

    def labels(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002 - the same for all lengths
        shown = {name: self.origin.get(name) for name in ("haystack", "needles", "chains", "seed")}
        form = str(self.origin.get("form", ""))
        return (form, *(f"{name} {value}" for name, value in shown.items()))

    def details(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002 - the same for all lengths
        return (f"haystack files {str(self.origin.get('corpus', ''))[:8]}",)

    def items(self, cell: Cell) -> Iterator[Item]:
        return self.make(cell.length)

    def measure(
        self,
        scorer: Scorer,
        cell: Cell,  # noqa: ARG002 - the items say it all
        items: Sequence[Item],
    ) -> list[Row]:
        return [_measure(scorer, item) for item in items]

    def result(self, rows: Sequence[Row], result: Result) -> Result:
        score, error = mean_and_error([row["score"] for row in rows])
        parts = []
        for number in range(DEPTHS):
            begin, end = 100 * number // DEPTHS, 100 * (number + 1) // DEPTHS
            inside = [
                [hit for depth, hit in row["hits"] if _range(depth) == number] for row in rows
            ]
            asked = [hits for hits in inside if hits]
            means = [100.0 * sum(hits) / len(hits) for hits in asked]
            own, spread = weighted_mean_and_error(means, list(map(len, asked)))
            if means:
                parts.append(Part(begin, end, sum(map(len, inside)), own, spread))
        note = ""
        if result.attention != "dense":
            note = "the rows of the answers are sparse, too; when the model generates, they are not"
        return replace(
            result, score=score, error=error, unit=PERCENT, parts=tuple(parts), note=note
        )


def sentence_item(sample: DepthSample) -> Item:
    """Return the item of a sample of `DepthGrid`."""
    return {
        "ids": sample.ids.tolist(),
        "answers": [list(probe.answer) for probe in sample.probes],
        "depths": [probe.depth for probe in sample.probes],
    }


def python_item(document: NeedleDocument, tokenizer: Tokenizer) -> Item:
    """Return the item of a document of `needle_documents`, without its end token.

    The text is cut in front of each answer, with the space before it, so that the tokens of the
    answer can be told from those of the question.
    """
    cuts = [0]
    for question in document.questions:
        cuts += [question.start - 1, question.start + len(question.answer)]
    cuts.append(len(document.text))
    pieces = [document.text[begin:end] for begin, end in pairwise(cuts)]
    first, *others = tokenizer.encode(pieces)
    encoded = [tokenizer.begin.before(first).astype(np.int64), *others]
    ends = np.cumsum([len(ids) for ids in encoded]).tolist()
    answers = [[ends[at - 1], ends[at]] for at in range(1, len(pieces), 2)]
    depths = [question.needle / len(document.text) for question in document.questions]
    return {"ids": np.concatenate(encoded).tolist(), "answers": answers, "depths": depths}


def _measure(scorer: Scorer, item: Item) -> Row:
    places = [place for first, last in item["answers"] for place in range(first, last)]
    order = np.argsort(places, kind="stable")
    hits, losses = forced(scorer, item["ids"], [places[at] for at in order])
    found, nats = np.empty(len(places), bool), np.empty(len(places))
    found[order], nats[order] = hits, losses
    right, costs, at = [], [], 0
    for first, last in item["answers"]:
        right.append(bool(found[at : at + last - first].all()))
        costs.append(float(nats[at : at + last - first].sum()))
        at += last - first
    pairs = [[depth, int(hit)] for depth, hit in zip(item["depths"], right, strict=True)]
    return {
        "score": 100.0 * sum(right) / len(right),
        "hits": pairs,
        "places": [first for first, _ in item["answers"]],
        "nats": [round(cost, 4) if np.isfinite(cost) else None for cost in costs],
    }


def _range(depth: float) -> int:
    return min(DEPTHS - 1, int(depth * DEPTHS))
