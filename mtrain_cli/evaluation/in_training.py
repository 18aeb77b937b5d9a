"""Measure tasks of `mtrain eval` during training, with the weights that are being trained.

The samples and their scores are those of `mtrain eval` of the checkpoint of the same step. Results
go to the same folder in the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from mtrain_cli.config.problem import Names
from mtrain_cli.config.schema import NIAH, Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.evaluation.request import (
    EvaluationRequest,
    NeedleOptions,
    Weights,
    open_measurement,
)
from mtrain_cli.evaluation.results import FOLDER, ResultsFolder
from mtrain_cli.evaluation.runner import InTraining, Runner
from mtrain_cli.inference.limits import require_hidden_labels
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.scorer import Scorer
from mtrain_cli.inference.text import TextCodec, codec_of_files
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.failures import not_written
from mtrain_cli.launch.run_dir import RunDir, RunLock
from mtrain_cli.parallel.collectives import share
from mtrain_cli.parallel.fsdp import reshard
from mtrain_cli.training.callback import Callback, FinishedStep
from mtrain_cli.training.conversion import tokenizer_of_data
from mtrain_cli.training.trainer import Trainer

# The keys of a run for options of `mtrain data needles` and `mtrain eval niah`.
_KEYS = Names(
    options=False,
    other={"length": "eval.length", "pairs": "eval.needles", "tokenizer": "data.tokenizer"},
    lacks=("questions",),
)


def requests(config: Config, run: Path, step: int = 0) -> list[EvaluationRequest]:
    """Return a request for each of ``train.eval_tasks``."""
    chosen = config.eval
    niah = NeedleOptions(chosen.form, chosen.haystack, chosen.needles, chosen.chains, chosen.seed)
    return [
        EvaluationRequest(
            kind=task,
            out=str((run / FOLDER).absolute()),
            model="..",
            weights=(Weights.in_training(run, step),),
            attentions=(config.sparsity.pattern,),
            lengths=chosen.lengths(config.seq),
            samples=chosen.samples,
            niah=niah,
        )
        for task in dict.fromkeys(config.train.eval_tasks)
    ]


def codec_of(config: Config) -> TextCodec:
    """Return the tokenizer of a run's data.

    Raises ConfigError if the data do not name a tokenizer.
    """
    files, reason = tokenizer_of_data(config)
    if files is None:
        raise ConfigError(f"train.eval_tasks: needs a tokenizer to make texts ({reason})")
    return codec_of_files(files)


def require_tasks(config: Config) -> None:
    """Check ``train.eval_tasks`` before a run starts, by making the first samples.

    Raises ConfigError if a length is too short or exceeds the positions of the model, a text or the
    tokenizer is missing, or the mask shows the model the tokens that it predicts.
    """
    if not config.train.eval_tasks:
        return
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
            with _KEYS.in_errors():
                measurement = open_measurement(request, source, codec)
                for cell in measurement.cells():
                    next(measurement.items(cell))


class TaskEvaluations(Callback):
    """Evaluate tasks at the start and end of training and every ``train.eval_every`` steps."""

    def __init__(self, trainer: Trainer, run_dir: RunDir, message: Callable[..., None]) -> None:
        """Open the texts. message: shows a line to the user, as a warning with ``warning=True``.

        Raises ConfigError if a text is missing, or no kernel supports a length.
        """
        self._trainer, self._message = trainer, message
        config = trainer.config
        scorer = Scorer(config, trainer.environment, trainer.tensor)
        scorer.decoder = trainer.decoder
        training = InTraining(scorer, codec_of(config), message)
        with _KEYS.in_errors():
            self._runners = [
                Runner(request, [config], trainer.environment, training=training)
                for request in requests(config, run_dir.path, trainer.step)
            ]
        self._out = run_dir.path / FOLDER
        # A run that resumes trains the steps after its checkpoint again.
        self._last: int | None = trainer.step

    def before_training(self) -> None:
        self._evaluate(at_end=self._trainer.step == 0)

    def after_step(self, step: FinishedStep) -> None:
        # After a stop request the user waits for the checkpoint, so do not evaluate.
        if not step.result.stop:
            self._evaluate(at_end=step.last)

    def _evaluate(self, *, at_end: bool) -> None:
        """Evaluate the model if due. at_end: whether training starts or ends at this step."""
        trainer, every = self._trainer, self._trainer.config.train.eval_every
        due = at_end or bool(every and trainer.step % every == 0)
        if not due and self._last is None:
            return
        progress_record.note("evaluation", progress_record.SEVERAL)
        with self._opened() as (folder, problem):
            if share(problem, trainer.host_group)[0]:
                if problem:
                    line = f"step {trainer.step}: no task is evaluated ({problem})"
                    self._message(line, warning=True)
                return
            self._last = None
            for runner in self._runners if due else ():
                runner.run_at(trainer.step, folder)
                if runner.problem:
                    self._message(f"{runner.problem}; training goes on", warning=True)
        reshard(trainer.decoder)  # otherwise the backward pass reshards, but none follows here

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[ResultsFolder | None, str]]:
        """Yield the folder of results on the first worker, and why it cannot be opened or ""."""
        if self._trainer.environment.rank:
            yield None, ""
            return
        lock, folder, problem = None, None, ""
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            lock = RunLock(self._out)
            folder = ResultsFolder.open(self._out, "..")
            for line in folder.damage:
                self._message(line, warning=True)
            if self._last is not None:
                folder.drop_training(self._last)
        except ConfigError as error:
            busy = f"another `mtrain eval` writes to {self._out}"
            problem = busy if lock is None else error.problems[0]
        except OSError as error:
            problem = not_written(error, self._out)
        try:
            yield (None if problem else folder), problem
        finally:
            if lock is not None:
                lock.release()
