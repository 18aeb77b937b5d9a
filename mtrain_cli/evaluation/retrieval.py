"""Needles in a haystack by forced scoring: each sequence has many questions with their answers.

One forward pass scores them all: a model that writes greedily begins with an answer exactly when,
at each of its tokens, the token before has predicted it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain_cli.config.problem import ConfigError, cli_option
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.needles import (
    NAMES,
    NeedleDocument,
    NeedleSettings,
    needle_documents,
    open_haystack,
)
from mtrain_cli.data.tokenizers import Tokenizer, documents_identity
from mtrain_cli.evaluation.measurement import Cell, Item, Measurement, Row
from mtrain_cli.evaluation.results import (
    PERCENT,
    Part,
    Result,
    mean_and_error,
    weighted_mean_and_error,
)
from mtrain_cli.inference.scorer import Scorer

if TYPE_CHECKING:
    from mtrain_cli.evaluation.request import EvaluationRequest

TASK = "niah"
SENTENCES, PYTHON = "sentences", "python"
DEPTHS = 10  # ranges of depth in a result
_HAYSTACK_CHARACTERS = 1 << 23  # of a corpus, which then repeats
_NEEDLE = "\nThe magic number of {name} is {answer}.\n"
_QUESTION = "\nWhat is the magic number of {name}? The magic number of {name} is"
_ANSWER = " {answer}"
_BREAK = re.compile(r"(?<=[.!?]\s)|(?<=\n)")  # behind a sentence or a line
_LEAST_TEXT = 16  # tokens of haystack in the shortest sample


class DepthGrid:
    """Samples from one haystack, with needles at given depths and their questions at the end.

    The text repeats if it is too short. Raises ConfigError if it is empty.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        if not text.strip():
            raise ConfigError("The haystack holds no text.")
        encoded = tokenizer.encode([piece for piece in _BREAK.split(text) if piece])
        self._tokenizer = tokenizer
        self._begin = begin = tokenizer.begin.before(np.zeros(0, dtype=np.int64))
        if begin.size and tokenizer.begin.before(encoded[0]) is encoded[0]:
            encoded[0] = encoded[0][begin.size :]  # every sample gets one
        self._ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
        self._ends = np.cumsum([0, *map(len, encoded)])  # tokens before each possible place

    def samples(
        self, length: int, depths: Sequence[float], count: int = 1, *, seed: int = 1
    ) -> Iterator[Item]:
        """Yield samples with a needle at each depth: ids, and spans of needles and answers.

        The questions come in random order, so that no answer is always the last. Raises ConfigError
        if the length is too short, or a depth is not from 0 to 1.

        Args:
            length: tokens of each sample.
            depths: share of the haystack before each needle, from 0 to 1.
            seed: determines names, numbers and the part of the haystack.
        """
        depths = tuple(depths)
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ConfigError(f"Depth {depth}: must be a share from 0 to 1.")
        for number in range(count):
            yield self._sample(length, depths, Random(f"{seed} {length} {depths} {number}"))

    def _sample(self, length: int, depths: Sequence[float], random: Random) -> Item:
        names = random.sample(NAMES, len(depths))
        answers = list(map(str, random.sample(range(1_000_000, 10_000_000), len(depths))))
        needles, questions, replies = (
            self._encode(text, names, answers) for text in (_NEEDLE, _QUESTION, _ANSWER)
        )
        room = length - sum(map(len, [self._begin, *needles, *questions, *replies]))
        if room < _LEAST_TEXT:
            raise ConfigError(
                f"{cli_option('length', length)}: too few tokens for "
                f"{with_count(len(depths), 'needle')} and their questions; give "
                f"{self._longest(len(depths)):,} or more"
            )
        start = int(self._ends[random.randrange(len(self._ends) - 1)])
        parts: list[np.ndarray] = [self._begin]
        spans: dict[int, list[int]] = {}
        passed = 0
        for number in sorted(range(len(depths)), key=lambda number: depths[number]):
            place = max(passed, self._place(start, round(depths[number] * room)))
            parts += [self._text(start + passed, place - passed), needles[number]]
            spans[number], passed = _span(parts), place
        parts.append(self._text(start + passed, room - passed))
        order = random.sample(range(len(depths)), len(depths))
        asked = []
        for number in order:
            parts += [questions[number], replies[number]]
            asked.append(_span(parts))
        return {
            "ids": np.concatenate(parts).tolist(),
            "depths": [depths[number] for number in order],
            "needles": [spans[number] for number in order],
            "answers": asked,
        }

    def _longest(self, needles: int) -> int:
        """Return a length that is enough for every draw of names."""
        answers = ["9999999"] * len(NAMES)
        texts = (self._encode(text, NAMES, answers) for text in (_NEEDLE, _QUESTION, _ANSWER))
        own = len(self._begin) + _LEAST_TEXT
        return needles * sum(max(map(len, encoded)) for encoded in texts) + own

    def _encode(
        self, template: str, names: Sequence[str], answers: Sequence[str]
    ) -> list[np.ndarray]:
        pairs = zip(names, answers, strict=True)
        texts = [template.format(name=name, answer=answer) for name, answer in pairs]
        return [np.asarray(ids, dtype=np.int64) for ids in self._tokenizer.encode(texts)]

    def _place(self, start: int, tokens: int) -> int:
        """Return how many tokens behind ``start``, at most ``tokens``, the last sentence ends."""
        rounds, rest = divmod(start + tokens, len(self._ids))
        end = int(self._ends[np.searchsorted(self._ends, rest, side="right") - 1])
        return max(0, rounds * len(self._ids) + end - start)

    def _text(self, start: int, tokens: int) -> np.ndarray:
        """Return ``tokens`` ids of the haystack from position ``start``, which may repeat it."""
        return self._ids.take(np.arange(start, start + tokens), mode="wrap")


def _span(parts: Sequence[np.ndarray]) -> list[int]:
    """Return the first and last position of the last part, the last excluded."""
    end = sum(map(len, parts))
    return [end - len(parts[-1]), end]


@dataclass
class Retrieval(Measurement):
    """Needles at several lengths.

    make: returns the items of a length: ids, places of the answers and depths.
    """

    lengths: Sequence[int]  # tokens of a sequence
    make: Callable[[int], Iterator[Item]]
    origin: Mapping[str, Any]  # what determines the items, for the key of a result

    def cells(self) -> list[Cell]:
        return [Cell(TASK, length) for length in self.lengths]

    def settings(self, cell: Cell) -> Mapping[str, Any]:  # noqa: ARG002 - the same for all lengths
        return self.origin

    def labels(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002
        names = ("haystack", "needles", "chains", "seed")
        shown = (f"{name} {self.origin.get(name)}" for name in names)
        return str(self.origin.get("form", "")), *shown

    def details(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002
        return (f"haystack files {str(self.origin.get('corpus', ''))[:8]}",)

    def items(self, cell: Cell) -> Iterator[Item]:
        return self.make(cell.length)

    def measure(self, scorer: Scorer, cell: Cell, items: Sequence[Item]) -> list[Row]:
        del cell  # samples of every length and task are measured alike
        return [_measure(scorer, item) for item in items]

    def result(self, rows: Sequence[Row], result: Result) -> Result:
        score, error = mean_and_error([row["score"] for row in rows])
        parts = []
        for number in range(DEPTHS):
            inside = [
                [
                    hit
                    for depth, hit in row["hits"]
                    if min(DEPTHS - 1, int(depth * DEPTHS)) == number
                ]
                for row in rows
            ]
            asked = [hits for hits in inside if hits]
            means = [100.0 * sum(hits) / len(hits) for hits in asked]
            own, spread = weighted_mean_and_error(means, list(map(len, asked)))
            if means:
                begin, end = 100 * number // DEPTHS, 100 * (number + 1) // DEPTHS
                parts.append(Part(begin, end, sum(map(len, inside)), own, spread))
        note = ""
        if result.attention != "dense":
            note = "the rows of the answers are sparse, too; when the model generates, they are not"
        return replace(
            result, score=score, error=error, unit=PERCENT, parts=tuple(parts), note=note
        )


def open_retrieval(request: EvaluationRequest, tokenizer: Tokenizer) -> Retrieval:
    """Open the haystack of a request. Raises ConfigError if it is missing or holds no text."""
    options = request.niah
    corpus = open_haystack(options.haystack)
    make: Callable[[int], Iterator[Item]]
    if options.form == PYTHON:

        def make(length: int) -> Iterator[Item]:
            settings = NeedleSettings(length, options.needles, options.chains, options.seed)
            for document in needle_documents(corpus, tokenizer, settings, request.samples):
                yield python_item(document, tokenizer)

    else:
        text = ""
        documents = (document for unit in corpus.units for document in unit.documents(0))
        for piece in itertools.chain.from_iterable(document.pieces for document in documents):
            text += piece
            if len(text) >= _HAYSTACK_CHARACTERS:
                break
        if not text.strip():
            raise ConfigError(f"--haystack {options.haystack}: holds no text")
        grid = DepthGrid(text, tokenizer)
        depths = [n / max(1, options.needles - 1) for n in range(options.needles)]

        def make(length: int) -> Iterator[Item]:
            return grid.samples(length, depths, request.samples, seed=options.seed)

    identity = documents_identity(tokenizer)
    origin = {**asdict(options), "corpus": corpus.signature, "tokenizer": identity}
    return Retrieval(request.lengths, make, origin)


def python_item(document: NeedleDocument, tokenizer: Tokenizer) -> Item:
    """Return the item of a document of `needle_documents`, without its end token.

    The text is cut in front of each answer, with the space before it, so that the tokens of the
    answer can be told from those of the question.
    """
    cuts = [0]
    for question in document.questions:
        cuts += [question.start - 1, question.start + len(question.answer)]
    cuts.append(len(document.text))
    pieces = [document.text[begin:end] for begin, end in itertools.pairwise(cuts)]
    first, *others = tokenizer.encode(pieces)
    encoded = [tokenizer.begin.before(first).astype(np.int64), *others]
    ends = np.cumsum([len(ids) for ids in encoded]).tolist()
    answers = [[ends[at - 1], ends[at]] for at in range(1, len(pieces), 2)]
    depths = [question.needle / len(document.text) for question in document.questions]
    return {"ids": np.concatenate(encoded).tolist(), "answers": answers, "depths": depths}


def _measure(scorer: Scorer, item: Item) -> Row:
    places = np.concatenate([np.arange(first, last) for first, last in item["answers"]])
    order = np.argsort(places, kind="stable")
    losses, hits = scorer.token_scores(item["ids"], places=places[order].tolist())
    right, nats = np.empty(len(places), bool), np.empty(len(places))
    right[order], nats[order] = hits.numpy(), losses.double().numpy()
    ends = np.cumsum([last - first for first, last in item["answers"]])[:-1]
    is_right = [bool(one.all()) for one in np.split(right, ends)]
    costs = [float(one.sum()) for one in np.split(nats, ends)]
    return {
        "score": 100.0 * sum(is_right) / len(is_right),
        "hits": [[d, int(hit)] for d, hit in zip(item["depths"], is_right, strict=True)],
        "places": [first for first, _ in item["answers"]],
        "nats": [round(cost, 4) if np.isfinite(cost) else None for cost in costs],
    }
