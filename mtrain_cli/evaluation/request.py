"""What to evaluate, as a file that the workers read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents, resolved_file
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.schema import PERPLEXITY, Config
from mtrain_cli.data.needles import STDLIB
from mtrain_cli.evaluation.measurement import Measurement
from mtrain_cli.evaluation.perplexity import open_perplexity
from mtrain_cli.evaluation.results import key_of
from mtrain_cli.evaluation.retrieval import SENTENCES, open_retrieval
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.text import TextCodec
from mtrain_cli.launch.manifest import Manifest, ManifestError
from mtrain_cli.launch.run_dir import PLAN


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
class Weights:
    """The weights of a model."""

    path: str  # a Hugging Face folder or one checkpoint
    is_folder: bool
    step: int | None  # optimizer steps of the checkpoint; None for a folder
    identity: str  # hash that differs between weights

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
        """Return the weights of a checkpoint. Raises ConfigError if it is damaged."""
        try:
            manifest = Manifest.read(path)
        except ManifestError as error:
            raise ConfigError(f"{path}: {error}") from None
        if wrong := manifest.wrong_sizes(path):
            raise ConfigError(f"{path}: {'; '.join(wrong)}")
        crc = zlib.crc32(json.dumps(asdict(manifest)["files"], sort_keys=True).encode())
        return Weights(str(path.absolute()), False, manifest.step, f"{manifest.step}-{crc:08x}")

    @staticmethod
    def in_training(run: Path, step: int) -> Weights:
        """Return the weights that a run trains, after ``step`` optimizer steps."""
        return Weights(str(run.absolute()), False, step, f"training-{step}")


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate. Every combination of weights, attention, task and length gives a result.

    weights: in the order in which to evaluate them. The first finds the key tokens.
    """

    kind: str  # `PERPLEXITY`, `NIAH` or one of `runner.find`
    out: str  # folder of the results
    model: str  # name of the model in the results (`results.model_name`)
    weights: tuple[Weights, ...]
    attentions: tuple[str, ...]  # names of the patterns
    lengths: tuple[int, ...]  # tokens of a sample; 0 if it has its own
    samples: int  # number of samples for each result. 0 with lm-eval means all samples of a task.
    tokenizer: str | None = None  # folder of a tokenizer to use instead of the model's
    perplexity: PerplexityOptions = PerplexityOptions()
    niah: NeedleOptions = NeedleOptions()
    options: Mapping[str, Any] = field(default_factory=dict)  # of an evaluation by `runner.find`

    def save(self, folder: Path, configs: tuple[Config, ...]) -> None:
        """Write the request, and the configuration of each attention."""
        (folder / PLAN).write_text(json.dumps(asdict(self)) + "\n")
        for number, config in enumerate(configs):
            resolved_file.save(config, folder / f"attention-{number}.yaml")

    @staticmethod
    def load(folder: Path) -> tuple[EvaluationRequest, tuple[Config, ...]]:
        """Read what `save` wrote."""
        request = documents.checked(EvaluationRequest, documents.read_json(folder / PLAN))
        files = (folder / f"attention-{n}.yaml" for n in range(len(request.attentions)))
        return request, tuple(map(resolved_file.load, files))


def open_measurement(
    request: EvaluationRequest, source: ModelSource, codec: TextCodec
) -> Measurement:
    """Open the texts of an evaluation. Raises ConfigError if a text or the tokenizer is missing."""
    if request.kind == PERPLEXITY:
        return open_perplexity(request, source, codec)
    return open_retrieval(request, codec.required)
