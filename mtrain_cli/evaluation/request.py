"""What to evaluate, as a file that the workers read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from mtrain_cli.config import documents, resolved_file
from mtrain_cli.config.problem import ConfigError, as_typed
from mtrain_cli.config.schema import NIAH, PERPLEXITY, PYTHON, SENTENCES, Config
from mtrain_cli.config.sizes import format_size, with_count
from mtrain_cli.data.corpora import Corpus, stdlib_corpus
from mtrain_cli.data.needles import NeedleSettings, needle_documents
from mtrain_cli.data.text_files import text_corpus
from mtrain_cli.data.tokenizers import Tokenizer, documents_identity
from mtrain_cli.evaluation import generated, retrieval
from mtrain_cli.evaluation.depth_grid import DepthGrid
from mtrain_cli.evaluation.generated import Generated
from mtrain_cli.evaluation.held_out_text import (
    held_out_count,
    left_out_of_files,
    sequences_of_files,
    sequences_of_run,
    store_of_files,
)
from mtrain_cli.evaluation.measurement import Item, Measurement
from mtrain_cli.evaluation.perplexity import HELD_OUT, Perplexity
from mtrain_cli.evaluation.results import key_of, read_results, read_sample_rows
from mtrain_cli.evaluation.retrieval import Retrieval
from mtrain_cli.evaluation.sources import Sources
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.text import TextCodec
from mtrain_cli.launch.manifest import Manifest, ManifestError
from mtrain_cli.launch.run_dir import PLAN
from mtrain_cli.training.checkpoint_source import RESOLVED, run_of

RULER = "ruler"
STDLIB = "stdlib"
_IN_TRAINING = "training-"  # begins the identity of weights that a run trains
_HAYSTACK_CHARACTERS = 1 << 23  # of a corpus, which then repeats


@dataclass(frozen=True)
class PerplexityOptions:
    """The text of perplexity. text: None for what the run held out."""

    text: str | None = None
    text_key: str = "text"
    short: int | None = None
    keys_from: str | None = None


@dataclass(frozen=True)
class NeedleOptions:
    """Needles. form: `SENTENCES` or `PYTHON`. haystack: `STDLIB` or a path."""

    form: str = SENTENCES
    haystack: str = STDLIB
    needles: int = 10
    chains: float = 0.0
    seed: int = 1


@dataclass(frozen=True)
class RulerOptions:
    """Tasks of RULER, paths of the user's files, and files of samples."""

    tasks: tuple[str, ...] = ()
    essays: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None
    words: str | None = None
    files: tuple[str, ...] = ()
    max_new: int = 128


@dataclass(frozen=True)
class HarnessOptions:
    """Tasks of lm-eval."""

    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    num_fewshot: int | None = None


class DamagedCheckpointError(ConfigError):
    """A checkpoint is damaged."""


@dataclass(frozen=True)
class Weights:
    """The weights of a model.

    path: a Hugging Face folder or one checkpoint.
    step: optimizer steps of the checkpoint; None for a folder.
    identity: hash that differs between weights.
    """

    path: str
    is_folder: bool
    step: int | None
    identity: str

    @staticmethod
    def of_folder(path: Path) -> Weights:
        """Return the weights of a Hugging Face folder, identified by names, sizes and times."""
        files = sorted([*path.glob("*.safetensors"), path / "config.json"])
        facts = [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns]
            for file in files
            if file.is_file()
        ]
        return Weights(str(path.absolute()), True, None, key_of({"files": facts}))

    @staticmethod
    def of_checkpoint(path: Path) -> Weights:
        """Return the weights of a checkpoint.

        Raises:
            DamagedCheckpointError: the manifest is unreadable, or a file has another size.
        """
        try:
            manifest = Manifest.read(path)
        except ManifestError as error:
            raise DamagedCheckpointError(f"{path}: {error}") from None
        if wrong := manifest.wrong_sizes(path):
            raise DamagedCheckpointError(f"{path}: {'; '.join(wrong)}")
        crc = zlib.crc32(json.dumps(asdict(manifest)["files"], sort_keys=True).encode())
        return Weights(str(path.absolute()), False, manifest.step, f"{manifest.step}-{crc:08x}")

    @staticmethod
    def in_training(run: Path, step: int) -> Weights:
        """Return the weights that a run trains, after ``step`` optimizer steps."""
        return Weights(str(run.absolute()), False, step, f"{_IN_TRAINING}{step}")

    @property
    def is_in_training(self) -> bool:
        """Whether a run trains these weights."""
        return self.identity.startswith(_IN_TRAINING)


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate. Every combination of weights, attention, task and length gives a result.

    kind: `PERPLEXITY`, `NIAH`, `RULER` or the name of an `OtherKind`.
    out: folder of the results.
    model: name of the model in the results (`results.model_name`).
    weights: in the order in which to evaluate them. The first finds the key tokens.
    attentions: names of the patterns.
    lengths: tokens of a sample.
    samples: number of samples for each result. 0 with lm-eval means all samples of a task.
    tokenizer: folder of a tokenizer to use instead of the model's.
    """

    kind: str
    out: str
    model: str
    weights: tuple[Weights, ...]
    attentions: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    tokenizer: str | None = None
    perplexity: PerplexityOptions = PerplexityOptions()
    niah: NeedleOptions = NeedleOptions()
    ruler: RulerOptions = RulerOptions()
    lm_eval: HarnessOptions = HarnessOptions()

    def save(self, folder: Path, configs: tuple[Config, ...]) -> None:
        """Write the request, and the configuration of each attention."""
        (folder / PLAN).write_text(json.dumps(asdict(self)) + "\n")
        for number, config in enumerate(configs):
            resolved_file.save(config, _config_file(folder, number))

    @staticmethod
    def load(folder: Path) -> tuple[EvaluationRequest, tuple[Config, ...]]:
        """Read what `save` wrote."""
        request = documents.checked(EvaluationRequest, documents.read_json(folder / PLAN))
        numbers = range(len(request.attentions))
        return request, tuple(resolved_file.load(_config_file(folder, n)) for n in numbers)


def _config_file(folder: Path, number: int) -> Path:
    return folder / f"attention-{number}.yaml"


def open_measurement(
    request: EvaluationRequest, source: ModelSource, codec: TextCodec
) -> Measurement:
    """Open the texts of an evaluation.

    Raises:
        ConfigError: a text is missing or too short, or the model has no tokenizer.
    """
    if request.kind == PERPLEXITY:
        return _perplexity(request, source, codec)
    require_tokenizer(codec)
    assert codec.tokenizer is not None
    if request.kind == NIAH:
        return _retrieval(request, codec.tokenizer)
    options = request.ruler
    sources = Sources(
        *(None if one is None else Path(one)
          for one in (options.essays, options.squad, options.hotpotqa, options.words))
    )  # fmt: skip
    files = tuple(map(Path, options.files))
    generated.require_distinct(files)
    return Generated(
        codec, options.tasks, request.lengths, request.samples, sources, files, options.max_new
    )


def require_tokenizer(codec: TextCodec) -> None:
    """Raise ConfigError if a model has no tokenizer."""
    if codec.tokenizer is None:
        raise ConfigError(f"{codec.missing.partition('. Give')[0]}. Give --tokenizer FOLDER")


def _perplexity(request: EvaluationRequest, source: ModelSource, codec: TextCodec) -> Perplexity:
    options = request.perplexity
    if options.text is not None:
        require_tokenizer(codec)
        assert codec.tokenizer is not None
        store = store_of_files(options.text, options.text_key, codec.tokenizer)
        read = partial(sequences_of_files, store, codec.tokenizer)
        origin = options.text
    elif source.is_folder:
        raise ConfigError("no text: give --text FILE with text that the model was not trained on")
    else:
        run = resolved_file.load(run_of(source.path) / RESOLVED)
        read = partial(sequences_of_run, run)
        origin = HELD_OUT
    sequences = {length: read(length, request.samples) for length in request.lengths}
    begin = () if options.text is None else codec.begin
    measurement = Perplexity(sequences, origin, options.short, read=read, begin=begin)
    if origin == HELD_OUT and request.samples:
        measurement.remarks = dict(_remarks(run, request.samples, sequences))
    elif options.text is not None:
        lines = ((length, left_out_of_files(store, length)) for length in request.lengths)
        measurement.remarks = {length: line for length, line in lines if line}
    if options.keys_from is not None:
        folder = Path(options.keys_from)
        measurement.keys = _keys(folder, options.short)
        measurement.key_origin = key_of({"keys": measurement.keys})
        measurement.key_label = measurement.keys_from = str(folder)
    return measurement


def _remarks(
    run: Config, wanted: int, sequences: Mapping[int, Sequence[object]]
) -> Iterator[tuple[int, str]]:
    """Yield each length with fewer sequences than the run held out and the user wants, and why."""
    for length, found in sequences.items():
        held_out = held_out_count(run, length)
        if len(found) < min(wanted, held_out):
            yield (
                length,
                f"{len(found)} of {with_count(held_out, 'held-out sequence')} "
                f"{'has' if len(found) == 1 else 'have'} {length:,} tokens; shorter ones, at the "
                "end of a corpus, do not count",
            )


def _keys(folder: Path, short: int | None) -> dict[str, list[int]]:
    """Return the key tokens in a folder of results, of its dense results if it has any."""
    results = {result.key: result for result in read_results(folder)}
    try:
        samples = read_sample_rows(folder)
    except ConfigError as error:
        raise ConfigError(*(f"--keys-from {line}" for line in error.problems)) from None
    rows = [
        row
        for row in samples
        if isinstance(row.get("keys"), list)
        and isinstance(row.get("text"), str)
        and isinstance(row.get("key"), str)
    ]
    if not rows:
        raise ConfigError(
            f"--keys-from {folder}: holds no key tokens. Run `mtrain eval perplexity --short N` "
            "for that model first"
        )
    found = {key: result.key_tokens.begin for key, result in results.items() if result.key_tokens}
    # Rows of earlier versions do not name their short context.
    shorts = [row.get("short", found.get(row["key"])) for row in rows]
    rows = [row for row, own in zip(rows, shorts, strict=True) if own == short]
    if not rows:
        held = sorted({own for own in shorts if isinstance(own, int)})
        names = " or ".join(format_size(own) for own in held) or "the one that was used"
        raise ConfigError(
            f"--short {format_size(short or 0)}: the key tokens of --keys-from {folder} were found "
            f"with another short context; give --short {names}"
        )
    dense = [row for row in rows if row["key"] in results
             and results[row["key"]].attention == "dense"]  # fmt: skip
    return {row["text"]: row["keys"] for row in dense or rows}


def _retrieval(request: EvaluationRequest, tokenizer: Tokenizer) -> Retrieval:
    options = request.niah
    in_run = request.weights[0].is_in_training
    named = "eval.haystack" if in_run else "--haystack"
    given = as_typed(named, options.haystack)
    if options.haystack == STDLIB:
        corpus = stdlib_corpus(origin=given)
    else:
        key = "the haystack's key"
        corpus = text_corpus(options.haystack, "text", path_option=named, key_option=key)
    make: Callable[[int], Iterator[Item]]
    if options.form == PYTHON:

        def make(length: int) -> Iterator[Item]:
            settings = NeedleSettings(length, options.needles, options.chains, options.seed)
            for document in needle_documents(corpus, tokenizer, settings, request.samples):
                yield retrieval.python_item(document, tokenizer)

    else:
        text = _text(corpus)
        if not text.strip():
            raise ConfigError(f"{given}: holds no text")
        grid = DepthGrid(text, tokenizer)
        depths = [n / max(1, options.needles - 1) for n in range(options.needles)]

        def make(length: int) -> Iterator[Item]:
            samples = grid.samples(
                length, depths, request.samples, seed=options.seed, together=True
            )
            yield from map(retrieval.sentence_item, samples)

    origin = {
        **asdict(options),
        "corpus": corpus.signature,
        "tokenizer": documents_identity(tokenizer),
    }
    return Retrieval(request.lengths, make, origin)


def _text(corpus: Corpus) -> str:
    """Return the beginning of a corpus as one text."""
    pieces: list[str] = []
    total = 0
    for unit in corpus.units:
        for document in unit.documents(0):
            for piece in document.pieces:
                pieces.append(piece)
                total += len(piece)
                if total >= _HAYSTACK_CHARACTERS:
                    return "".join(pieces)
    return "".join(pieces)
