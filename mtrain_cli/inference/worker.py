"""The function that every worker of `mtrain generate` runs, and the request that it reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mtrain_cli.config.schema import Config
from mtrain_cli.inference.answers import AnswerPrinter, describe, report
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.limits import MemoryNeed
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.text import open_codec
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.run_dir import PLAN, RunDir
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.parallel.collectives import share
from mtrain_cli.printable import one_line

TARGET = "mtrain_cli.inference.worker:run"
_TOKENS_PER_CHECK = 8  # between checks whether the user asked to stop


@dataclass(frozen=True)
class GenerateRequest:
    """What to generate.

    path: the model, as in `ModelSource`.
    is_folder: whether the model is a Hugging Face folder.
    prompts: token ids, checked by `limits.require_prompts`.
    max_new: most tokens to generate for a prompt.
    ignore_end: generate ``max_new`` tokens, whatever they are.
    tokenizer: folder of a tokenizer to use instead of the model's.
    as_json: print JSON instead of text.
    """

    path: str
    is_folder: bool
    prompts: list[list[int]]
    max_new: int
    sampling: Sampling
    ignore_end: bool = False
    tokenizer: str | None = None
    as_json: bool = False

    @staticmethod
    def of(document: dict) -> GenerateRequest:
        """Return the request in the JSON object that `save` wrote."""
        return GenerateRequest(**{**document, "sampling": Sampling(**document["sampling"])})

    def save(self, run_dir: RunDir) -> None:
        (run_dir.path / PLAN).write_text(json.dumps(asdict(self)) + "\n")


def run(config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> bool:
    """Generate on one worker. Return whether a stop request ended it early."""
    read = None
    if environment.rank == 0:
        read = json.loads((run_dir.path / PLAN).read_text())
    request = GenerateRequest.of(share(read)[0])
    stop = _StopCheck(StopFlag(run_dir))
    try:
        answer(request, config, environment, stop)
    except _StoppedError:
        return True
    return False


def answer(
    request: GenerateRequest,
    config: Config,
    environment: Environment,
    stop: _StopCheck | None = None,
) -> None:
    """Load the model and generate. The first worker prints.

    Args:
        stop: says whether to stop; None to go on to the end.

    Raises:
        ConfigError: the model cannot be loaded, or a prompt does not fit the memory.
        RunError: the GPU ran out of memory.
    """
    source = ModelSource(Path(request.path), request.is_folder, config)
    longest = max(len(ids) for ids in request.prompts)
    # Before the weights are read, which takes time.
    MemoryNeed.of(config, environment).require_fit(longest, request.max_new, environment.device)
    folder = None if request.tokenizer is None else Path(request.tokenizer)
    codec = open_codec(source, folder)
    first = environment.rank == 0
    printer = AnswerPrinter(codec, len(request.prompts), as_json=request.as_json)

    def on_token(prompt: int, token: int) -> None:
        if first:
            printer.token(prompt, token)
        if stop is not None:
            stop.count()

    try:
        engine = Engine(source, environment, _warn if first else None)
        if first:
            report([*describe(engine), *filter(None, [codec.starts])])
        ends = frozenset() if request.ignore_end else codec.stop
        completions = engine.generate(
            request.prompts, request.max_new, request.sampling, ends, on_token
        )
        for completion in completions:
            if first:
                printer.completed(completion)
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"rank {environment.rank} ran out of GPU memory ({reason}). Give shorter prompts, a "
            "smaller --max-new or more topology.workers"
        ) from error
    if first:
        report([printer.summary()])


def _warn(line: str) -> None:
    report([f"mtrain: warning: {one_line(line)}"])


class _StoppedError(Exception):
    """The user asked to stop."""


class _StopCheck:
    """Asks from time to time whether any worker got a request to stop."""

    def __init__(self, flag: StopFlag) -> None:
        self._flag, self._tokens = flag, 0

    def count(self) -> None:
        """Count a token. All workers call this for each token.

        Raises:
            _StoppedError: on all workers, if any worker got a request to stop.
        """
        self._tokens += 1
        if self._tokens % _TOKENS_PER_CHECK:
            return
        requested = torch.tensor(int(self._flag.requested()))
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        if requested:
            raise _StoppedError
