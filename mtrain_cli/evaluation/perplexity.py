"""Loss of whole sequences of text by context, and on the tokens that need the long context.

Key tokens follow LongPPL (Fang et al., arXiv:2410.23771, section 3): a token is key if the long
context raises its log-probability by more than 2 nats over a short one, and the log-probability
with the long context is above -2.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size, with_count
from mtrain_cli.data.corpora import describe_left_out
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.text_files import refuse_unread_key, text_corpus
from mtrain_cli.data.token_cache import cached_store
from mtrain_cli.data.tokenizers import Tokenizer
from mtrain_cli.evaluation.measurement import Cell, Item, Measurement, Row
from mtrain_cli.evaluation.results import (
    HELD_OUT_TEXT,
    NATS,
    Part,
    Result,
    key_of,
    read_results,
    read_sample_rows,
    weighted_mean_and_error,
)
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.scorer import Scorer
from mtrain_cli.inference.text import TextCodec
from mtrain_cli.launch.run_dir import RESOLVED, run_of
from mtrain_cli.training.evaluation import bucket_edges

if TYPE_CHECKING:
    from mtrain_cli.evaluation.request import EvaluationRequest

TASK = "perplexity"
HELD_OUT = "held out"
LEAST_GAIN = 2.0  # nats, alpha of LongPPL
LEAST_LOG_P = -2.0  # beta of LongPPL
_BEGIN = 32  # tokens of a text
STRIDES = 4  # a short context has 1 to 1 + 1 / STRIDES times its length, as in LongPPL

KeyPlaces = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TextSequence:
    """A whole sequence.

    documents: number of each token's document, int32 [length]; None if all tokens are one document.
    """

    ids: np.ndarray  # token ids, int32 [length]
    documents: np.ndarray | None = None

    @property
    def earlier(self) -> np.ndarray:
        """The number of earlier tokens in the document of each token, int64 [length]."""
        places = np.arange(len(self.ids))
        if self.documents is None:
            return places
        starts = np.flatnonzero(np.diff(self.documents, prepend=self.documents[0] - 1))
        return places - starts[np.searchsorted(starts, places, side="right") - 1]


def store_of_files(path: str, text_key: str, tokenizer: Tokenizer) -> TokenStore:
    """Return the tokens of a file or folder of text. Raises ConfigError if it cannot be read."""
    corpus = text_corpus(path, text_key, path_option="--text", key_option="--text-key")
    refuse_unread_key(corpus, text_key)
    return cached_store(corpus, tokenizer)[0]


def sequences_of_files(
    store: TokenStore, tokenizer: Tokenizer, length: int, count: int
) -> list[TextSequence]:
    """Return at most ``count`` sequences of ``length`` tokens, each from one document.

    Each starts with the begin token, also if it does not begin its document. The first sequence of
    each document comes first, so that few documents do not give all. Shorter documents and rests
    are left out; ConfigError if none is long enough.
    """
    tokens = np.diff(store.offsets)
    if not len(tokens) or tokens.max() < length:
        longest = int(tokens.max()) if len(tokens) else 0
        raise ConfigError(
            f"--text {store.meta.source}: no document has {length:,} tokens; the longest has "
            f"{longest:,}. Give longer documents, or a smaller --length"
        )
    begin = np.array(tokenizer.begin.ids, np.int32)
    skip, own = len(begin), length - len(begin)
    parts = (
        store.read(int(unit), skip + turn * own, skip + (turn + 1) * own).tokens.astype(np.int32)
        for turn in range((int(tokens.max()) - skip) // own)
        for unit in np.flatnonzero(tokens - skip >= (turn + 1) * own)
    )
    return [TextSequence(np.concatenate([begin, ids])) for ids in itertools.islice(parts, count)]


def left_out_of_files(store: TokenStore, length: int) -> str:
    """Return a line on the files and documents that `sequences_of_files` does not use, or ""."""
    counts = dict(store.meta.left_out)
    if short := int((np.diff(store.offsets) < length).sum()):
        counts[f"shorter than {length:,} tokens"] = short
    return describe_left_out(counts)


def sequences_of_run(config: Config, length: int, count: int) -> list[TextSequence]:
    """Return at most ``count`` sequences of ``length`` tokens that a run held out of training.

    Documents keep their borders if the run masks them (``data.document_mask``). ConfigError if the
    run held out fewer tokens, or its data are missing or bring masks.
    """
    data = config.data
    if not data.eval_sequences:
        raise ConfigError(
            "the run held out no text (data.eval_sequences=0). Give --text FILE with text that it "
            "was not trained on"
        )
    if data.mask_key is not None or data.positions_key is not None:
        raise ConfigError(
            "the run's data has its own masks or positions, which this command does not support; "
            "give --text FILE"
        )
    if data.mix is not None and length > config.seq:
        raise ConfigError(
            f"--length {format_size(length)}: the held-out sequences of data.mix have "
            f"{config.seq:,} tokens and do not follow each other. Give at most "
            f"{format_size(config.seq)}, or --text FILE"
        )
    samples = open_dataset(config).held_out
    joined = [_joined(samples)] if length > config.seq else [_joined([one]) for one in samples]
    sequences = [
        TextSequence(ids[at : at + length], _numbered(documents[at : at + length]))
        for ids, documents in joined
        for at in range(0, len(ids) - length + 1, length)
    ]
    if not sequences:
        raise ConfigError(
            f"--length {format_size(length)}: the run held out "
            f"{with_count(data.eval_sequences, 'sequence')} of at most {config.seq:,} tokens "
            "(data.eval_sequences). Give a smaller --length or --text FILE"
        )
    return sequences[:count]


def _joined(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of consecutive samples without padding, and the document of each."""
    ids, documents = [], []
    last = 0
    for sample in samples:
        ids.append(sample.tokens[: sample.real])
        documents.append(sample.documents[: sample.real] + last)
        last = int(documents[-1][-1]) + int(sample.ends_document)
    return np.concatenate(ids), np.concatenate(documents)


def _numbered(documents: np.ndarray) -> np.ndarray | None:
    """Return documents counted from 0; None if there is only one."""
    counted = (documents - documents[0]).astype(np.int32)
    return counted if counted.any() else None


@dataclass
class Perplexity(Measurement):
    """Perplexity of sequences of several lengths.

    short: tokens of the short context that key tokens are compared with; None for no key tokens.
    keys: places of the key tokens by the hash of a sequence, from other results; None to find them.
    begin: ids with which each sequence starts, and so each window of a short context.
    """

    sequences: Mapping[int, Sequence[TextSequence]]  # sequences by length
    origin: str  # path of the text, or `HELD_OUT`
    short: int | None = None
    keys: KeyPlaces | None = None
    key_origin: str = ""  # hash that identifies the source of ``keys``
    key_label: str = ""  # name of the source of ``keys``, for the user
    keys_from: str = ""  # folder of ``keys``; "" if they come from a model of this evaluation
    remarks: Mapping[int, str] = field(default_factory=dict)  # what text is left out, by length
    begin: tuple[int, ...] = ()

    def cells(self) -> list[Cell]:
        return [Cell(TASK, length) for length in self.sequences]

    def settings(self, cell: Cell) -> dict[str, Any]:
        # The first sequence, not all: more samples continue an evaluation.
        text = text_hash(self.sequences[cell.length][0].ids)
        # However the path is spelled, it is one text.
        origin = HELD_OUT if self.origin == HELD_OUT else os.path.abspath(self.origin)
        return {"origin": origin, "text": text, "short": self.short, "keys": self.key_origin}

    def labels(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002 - the same for all lengths
        is_held_out = self.origin == HELD_OUT
        labels = [HELD_OUT_TEXT if is_held_out else f"text {Path(self.origin).name}"]
        if self.short is not None:
            labels.append(f"short {format_size(self.short)}")
            labels += [f"keys from {self.keys_from}"] if self.keys_from else []
        return tuple(labels)

    def details(self, cell: Cell) -> tuple[str, ...]:
        ids = self.sequences[cell.length][0].ids
        folder = "" if self.origin == HELD_OUT else f"in {Path(self.origin).absolute().parent}"
        # The beginning is mostly that of other lengths, too.
        begin, whole = text_hash(ids[:_BEGIN])[:8], text_hash(ids)[:8]
        return folder, f"text begins {begin}", f"first sequence {whole}"

    def items(self, cell: Cell) -> Iterator[Item]:
        for sequence in self.sequences[cell.length]:
            text = text_hash(sequence.ids)
            item: Item = {"ids": sequence.ids.tolist(), "text": text, "documents": None}
            if sequence.documents is not None:
                item["documents"] = sequence.documents.tolist()
            if self.keys is not None:
                item["keys"] = self.keys.get(text)
                if not are_places(item["keys"], cell.length):
                    raise ConfigError(
                        f"--keys-from {self.key_label}: holds no whole key tokens of this text at "
                        f"{cell.length:,} tokens. Evaluate that model with the same --text, "
                        "--length, --short and tokenizer first"
                    )
            yield item

    def measure(self, scorer: Scorer, cell: Cell, items: Sequence[Item]) -> list[Row]:
        del cell  # samples of every length and task are measured alike
        return [self._measure(scorer, item) for item in items]

    def _measure(self, scorer: Scorer, item: Item) -> Row:
        ids, documents = item["ids"], item["documents"]
        if documents is not None:
            documents = np.asarray(documents, np.int32)
        sequence = TextSequence(np.asarray(ids, np.int32), documents)
        losses = scorer.token_losses(ids, documents).double().numpy()
        earlier = sequence.earlier[:-1]
        counted = np.ones(len(losses), bool)
        if documents is not None:
            counted = documents[1:] == documents[:-1]
        row: Row = {
            "score": _finite(losses[counted].mean()),
            "tokens": int(counted.sum()),
            "text": item["text"],
            "buckets": _buckets(losses[counted], earlier[counted], len(ids)),
        }
        if self.short is not None:
            keys = item.get("keys")
            if keys is None:
                short = short_losses(scorer, ids, self.short, documents, len(self.begin))
                keys = key_places(losses, short, counted & (earlier >= self.short))
            row["short"] = self.short
            row["keys"] = list(map(int, keys))
            row["key_loss"] = _finite(losses[keys].mean()) if len(keys) else None
        return row

    def count(self, cell: Cell, wanted: int) -> int:
        return min(wanted, len(self.sequences[cell.length]))

    def learn(self, origin: str, label: str, rows: Sequence[Row]) -> None:
        """Take the key tokens of the first model and attention for all others."""
        if self.short is not None and self.keys is None:
            self.keys = {row["text"]: row["keys"] for row in rows if "text" in row}
            self.key_origin, self.key_label = origin, label

    def result(self, rows: Sequence[Row], result: Result) -> Result:
        score, error = weighted_mean_and_error(
            [_number(row["score"]) for row in rows], [row["tokens"] for row in rows]
        )
        notes = [self.remarks[result.length]] if result.length in self.remarks else []
        key_tokens = None
        if self.short is not None:
            if not all(are_places(row["keys"], result.length) for row in rows):
                raise ValueError("a row has key tokens outside its text")
            with_keys = [row for row in rows if row["keys"]]
            loss, key_error = weighted_mean_and_error(
                [_number(row["key_loss"]) for row in with_keys],
                [len(row["keys"]) for row in with_keys],
            )
            count = sum(len(row["keys"]) for row in rows)
            key_tokens = Part(self.short, result.length, count, loss, key_error)
            if self.keys is not None:
                notes.append(f"key tokens from {self.key_label}")
        return replace(
            result, score=score, error=error, unit=NATS, parts=_parts(rows),
            key_tokens=key_tokens, note="; ".join(notes),
        )  # fmt: skip


def open_perplexity(
    request: EvaluationRequest, source: ModelSource, codec: TextCodec
) -> Perplexity:
    """Open the text of a request. Raises ConfigError if it or the tokenizer is missing."""
    options, samples, lengths = request.perplexity, request.samples, request.lengths
    if options.text is not None:
        store = store_of_files(options.text, options.text_key, codec.required)
        sequences = {n: sequences_of_files(store, codec.required, n, samples) for n in lengths}
        measurement = Perplexity(sequences, options.text, options.short, begin=codec.begin)
        lines = ((length, left_out_of_files(store, length)) for length in lengths)
        measurement.remarks = {length: line for length, line in lines if line}
    elif source.is_folder:
        raise ConfigError("no text: give --text FILE with text that the model was not trained on")
    else:
        run = resolved_file.load(run_of(source.path) / RESOLVED)
        sequences = {length: sequences_of_run(run, length, samples) for length in lengths}
        measurement = Perplexity(sequences, HELD_OUT, options.short)
    if options.keys_from is not None:
        measurement.keys = _keys(Path(options.keys_from), options.short)
        measurement.key_origin = key_of({"keys": measurement.keys})
        measurement.key_label = measurement.keys_from = options.keys_from
    return measurement


def _keys(folder: Path, short: int | None) -> dict[str, list[int]]:
    """Return the key tokens in a folder of results, of its dense results if it has any."""
    results = {result.key: result for result in read_results(folder)}
    try:
        samples = read_sample_rows(folder)
    except ConfigError as error:
        raise ConfigError(*(f"--keys-from {line}" for line in error.problems)) from None
    shorts = {key: result.key_tokens.begin for key, result in results.items() if result.key_tokens}
    # Rows of earlier versions do not name their short context.
    rows = [
        row
        for row in samples
        if isinstance(row.get("keys"), list)
        and isinstance(row.get("text"), str)
        and row.get("short", shorts.get(str(row.get("key")))) == short
    ]
    if not rows:
        raise ConfigError(
            f"--keys-from {folder}: holds no key tokens with --short {format_size(short or 0)}. "
            "Run `mtrain eval perplexity` for that model with it first"
        )
    dense = {key for key, result in results.items() if result.attention == "dense"}
    dense_rows = [row for row in rows if row.get("key") in dense]
    return {row["text"]: row["keys"] for row in dense_rows or rows}


def text_hash(ids: np.ndarray) -> str:
    """Return a hash of the ids of a sequence."""
    return hashlib.sha256(np.ascontiguousarray(ids, np.int64).tobytes()).hexdigest()[:16]


def short_losses(
    scorer: Scorer, ids: Sequence[int], short: int, documents: np.ndarray | None = None,
    kept: int = 0,
) -> np.ndarray:  # fmt: skip
    """Return the loss of each token but the first with a short context, float64 [tokens - 1].

    A token has ``short`` to 1.25 * ``short`` earlier tokens, or all if there are fewer: the text is
    computed in windows of 1.25 * ``short`` tokens, each of which counts for its last fifth. Without
    ``documents``, every window starts with the first ``kept`` tokens.
    """
    stride = max(1, short // STRIDES)
    losses = np.empty(len(ids) - 1)
    done = 0
    while done < len(ids) - 1:
        begin = max(0, done - short)
        head = list(ids[: min(kept, begin)])
        end = min(len(ids), (done if done else short) + stride + 1)
        own = None if documents is None else documents[begin:end] - documents[begin]
        window = scorer.token_losses([*head, *ids[begin:end]], own).double().numpy()
        losses[done : end - 1] = window[len(head) + done - begin :]
        done = end - 1
    return losses


def key_places(long: np.ndarray, short: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return the places of the key tokens (LongPPL, section 3) among those that count.

    long, short: losses with the long and with the short context, in nats.
    """
    return np.flatnonzero(counted & (short - long > LEAST_GAIN) & (-long > LEAST_LOG_P))


def are_places(keys: Any, length: int) -> bool:
    """Return whether a value from the disk is a list of places in a text of ``length`` tokens."""
    return isinstance(keys, list) and all(
        type(place) is int and 0 <= place < length - 1 for place in keys
    )


def _buckets(losses: np.ndarray, earlier: np.ndarray, length: int) -> list[list[float | None]]:
    """Return (begin, end, tokens, mean loss) of each range of context that has tokens."""
    edges = bucket_edges(length)
    places = np.searchsorted(edges, earlier, side="right") - 1
    return [
        [int(begin), int(end), int(inside.sum()), _finite(losses[inside].mean())]
        for number, (begin, end) in enumerate(itertools.pairwise(edges))
        if (inside := places == number).any()
    ]


def _parts(rows: Sequence[Row]) -> tuple[Part, ...]:
    by_span: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for row in rows:
        for begin, end, count, loss in row["buckets"]:
            by_span.setdefault((begin, end), []).append((_number(loss), count))
    parts = []
    for (begin, end), pairs in sorted(by_span.items()):
        losses, counts = zip(*pairs, strict=True)
        parts.append(Part(begin, end, sum(counts), *weighted_mean_and_error(losses, counts)))
    return tuple(parts)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value
