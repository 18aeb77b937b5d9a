"""What mtrain needs of this package: the evaluation ``ruler`` of `mtrain.evaluations`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_extras.ruler.ruler_files import NO_SOURCES, Sources

if TYPE_CHECKING:
    from mtrain_cli.config.schema import Config
    from mtrain_cli.evaluation.request import EvaluationRequest
    from mtrain_cli.evaluation.results import Result
    from mtrain_cli.evaluation.runner import Runner
    from mtrain_cli.inference.model_source import ModelSource
    from mtrain_cli.inference.text import TextCodec
    from mtrain_cli.launch.environment import Environment
    from mtrain_cli.reporting.table import Table
    from mtrain_extras.ruler.generated import Generated
    from mtrain_extras.ruler.generation import Generation


@dataclass(frozen=True)
class RulerOptions:
    """Tasks of RULER with the user's files, and files of samples."""

    tasks: tuple[str, ...] = ()
    sources: Sources = NO_SOURCES
    files: tuple[str, ...] = ()
    max_new: int = 128


@dataclass(frozen=True)
class GeneratedAnswers:
    """An evaluation of answers that the model generates. measure: opens the samples."""

    measure: Callable[[EvaluationRequest, ModelSource, TextCodec], Generation]

    def runner(
        self,
        request: EvaluationRequest,
        configs: Sequence[Config],
        environment: Environment,
        stop: Callable[[], bool],
        tasks: None = None,
    ) -> Runner:
        from mtrain_cli.evaluation.runner import Runner

        del tasks  # `check` returns none
        return Runner(request, configs, environment, stop, measure=self.measure)


class Ruler(GeneratedAnswers):
    """Tasks of RULER, and files of samples."""

    def check(self, request: EvaluationRequest, source: ModelSource, *, beyond: bool) -> None:
        """Make the first samples. Raises ConfigError if one is too long, or a file is missing."""
        from mtrain_cli.evaluation.runner import tokenizer_text
        from mtrain_cli.inference.limits import (
            require_known_ids,
            require_prompts,
            require_whole_cache,
        )
        from mtrain_cli.inference.text import open_codec

        codec = open_codec(source, request.tokenizer)
        generated = open_generated(request, source, codec)
        tokenizer, vocabulary = tokenizer_text(request, source), source.config.model.vocab_size
        # The last token of an answer takes no position, so one special token has room.
        most = source.max_position - max(0, len(codec.begin) - 1)
        for cell in generated.cells():
            prompts = []
            if not cell.length:
                prompts = [item["ids"] for item in generated.items(cell)]
            elif cell.length == min(request.lengths):
                prompts = [next(generated.items(cell))["ids"]]
            for ids in prompts:
                require_known_ids(ids, vocabulary, str(cell), tokenizer)
            if (file := generated.file_of(cell)) is not None:
                names = [f"--file {file}: sample {n}" for n in range(1, len(prompts) + 1)]
                new = generated.answer_tokens(cell)
                require_prompts(source, prompts, new, beyond=beyond, names=names)
                continue
            require_whole_cache(source.config.mask, cell.length)
            if not beyond and cell.length > most:
                raise ConfigError(
                    f"--length {cell.length}: the model has {source.max_position:,} positions, and "
                    f"the tokenizer adds {len(codec.begin)} tokens to a prompt; give at most "
                    f"{most:,}, or add --beyond to go on anyway"
                )

    def tables(self, results: Sequence[Result]) -> Iterator[Table]:
        from mtrain_extras.ruler.tables import ruler_tables

        return ruler_tables(results)


def open_generated(request: EvaluationRequest, _: ModelSource, codec: TextCodec) -> Generated:
    """Open the samples of a request. Raises ConfigError without a tokenizer."""
    from mtrain_extras.ruler.generated import Generated

    options = documents.checked(RulerOptions, request.options)
    assert codec.required  # raises if there is none
    files = tuple(map(Path, options.files))
    names = [path.stem for path in files]
    for path in files:
        if names.count(path.stem) > 1:
            raise ConfigError(f"--file {path}: another file has this name; rename one")
    return Generated(
        codec, options.tasks, request.lengths, request.samples, options.sources, files,
        options.max_new,
    )  # fmt: skip


RULER = Ruler(open_generated)
