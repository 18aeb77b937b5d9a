"""Measure tasks of `mtrain eval` during training, as `mtrain eval` of the same step would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mtrain_cli.config.problem import Names
from mtrain_cli.config.schema import NIAH, Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.evaluation.request import EvaluationRequest, Weights, open_measurement
from mtrain_cli.evaluation.results import FOLDER, ResultsFolder, locked
from mtrain_cli.evaluation.runner import InTraining, Runner
from mtrain_cli.inference.limits import require_hidden_labels
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.scorer import Scorer
from mtrain_cli.inference.text import TextCodec, codec_of_files
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.failures import not_written
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.parallel.collectives import share
from mtrain_cli.parallel.fsdp import reshard
from mtrain_cli.training.callback import PeriodicEvaluation
from mtrain_cli.training.conversion import tokenizer_of_data
from mtrain_cli.training.trainer import Trainer


def requests(config: Config, run: Path, step: int = 0) -> list[EvaluationRequest]:
    """Return a request for each of ``train.eval_tasks``."""
    return [
        EvaluationRequest(
            kind=task,
            out=str((run / FOLDER).absolute()),
            model="..",
            weights=(Weights.in_training(run, step),),
            attentions=(config.sparsity.pattern,),
            lengths=config.eval.lengths(config.seq),
            samples=config.eval.samples,
        )
        for task in dict.fromkeys(config.train.eval_tasks)
    ]


def codec_of(config: Config) -> TextCodec:
    """Return the tokenizer of a run's data. Raises ConfigError if they do not name one."""
    files, reason = tokenizer_of_data(config)
    if files is None:
        raise ConfigError(f"train.eval_tasks: needs a tokenizer to make texts ({reason})")
    return codec_of_files(files)


def require_tasks(config: Config) -> None:
    """Raise ConfigError if ``train.eval_tasks`` cannot be measured, by making the first samples."""
    require_hidden_labels(config, "train.eval_tasks")
    source = ModelSource(Path(), False, config)
    most, longest = source.max_position, max(config.eval.lengths(config.seq))
    if longest > most:
        raise ConfigError(
            f"eval.length={format_size(longest)}: the model has {most:,} positions; give at most "
            f"{format_size(most)}"
        )
    codec = codec_of(config)
    for request in requests(config, Path()):
        if request.kind == NIAH:
            with Names(options=False, other={"length": "eval.length"}).in_errors():
                measurement = open_measurement(request, source, codec)
                for cell in measurement.cells():
                    next(measurement.items(cell))


class TaskEvaluations(PeriodicEvaluation):
    """Evaluates the tasks of ``train.eval_tasks``."""

    def __init__(self, trainer: Trainer, run_dir: RunDir, message: Callable[..., None]) -> None:
        """Open the texts. message: shows a line to the user, as a warning with ``warning=True``.

        Raises ConfigError if no kernel supports a length.
        """
        super().__init__(trainer)
        self._message = message
        config = trainer.config
        scorer = Scorer(config, trainer.environment, trainer.tensor)
        scorer.decoder = trainer.decoder
        scorer.choices = replace(scorer.choices, pattern=trainer.choices.pattern)
        training = InTraining(scorer, codec_of(config), message)
        self._runners = [
            Runner(request, [config], trainer.environment, training=training)
            for request in requests(config, run_dir.path, trainer.step)
        ]
        self._out = run_dir.path / FOLDER
        # A run that resumes trains the steps after its checkpoint again.
        self._last: int | None = trainer.step

    def on_rollback(self, step: int) -> None:
        self._last = step

    def evaluate(self, *, due: bool) -> None:
        trainer = self._trainer
        if due and not trainer.train_state.has_learned():
            line = f"step {trainer.step}: no task is evaluated (the index has not learned yet)"
            self._message(line)
            due = False
        if not due and self._last is None:
            return
        progress_record.note("evaluation", progress_record.SEVERAL)
        with contextlib.ExitStack() as stack:
            folder, problem = None, ""
            if not trainer.environment.rank:
                try:
                    folder = self._open(stack)
                except ConfigError as error:
                    problem = str(error)
                except OSError as error:
                    problem = not_written(error, self._out)
                if problem:
                    line = f"step {trainer.step}: no task is evaluated ({problem})"
                    self._message(line, warning=True)
            if share(problem, trainer.host_group)[0]:
                return
            self._last = None
            for runner in self._runners if due else ():
                runner.run_at(trainer.step, folder)
                if runner.problem:
                    self._message(f"{runner.problem}; training goes on", warning=True)
        reshard(trainer.decoder)  # otherwise the backward pass reshards, but none follows here

    def _open(self, stack: contextlib.ExitStack) -> ResultsFolder:
        """Open the folder of the results, which is locked until the stack closes."""
        stack.enter_context(locked(self._out))
        folder = ResultsFolder.open(self._out, "..")
        for line in folder.damage:
            self._message(line, warning=True)
        if self._last is not None:
            folder.drop_training(self._last)
        return folder
