"""What every worker of `mtrain generate` runs: answer the prompts of a request, and show them.

The text goes to stdout as it comes, or as a JSON object for each prompt; the rest goes to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mtrain_cli.config import documents
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count
from mtrain_cli.inference.engine import LENGTH, Completion, Engine
from mtrain_cli.inference.limits import MemoryNeed
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.text import TextCodec, TextStream, open_codec
from mtrain_cli.launch import guarded_streams
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.failures import reporting_out_of_memory
from mtrain_cli.launch.run_dir import PLAN, RunDir
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.parallel.collectives import share
from mtrain_cli.printable import one_line, printable, printable_json
from mtrain_cli.sparsity.pattern import display_name

TARGET = "mtrain_cli.inference.worker:run"
_TOKENS_PER_CHECK = 8  # between checks whether the user asked to stop


@dataclass(frozen=True)
class GenerateRequest:
    """What to generate."""

    path: str  # the model, as in `ModelSource`
    is_folder: bool
    prompts: list[list[int]]  # token ids, checked by `limits.require_prompts`
    max_new: int  # most tokens to generate for a prompt
    sampling: Sampling
    ignore_end: bool = False  # generate ``max_new`` tokens, whatever they are
    tokenizer: str | None = None  # folder of a tokenizer to use instead of the model's
    as_json: bool = False  # print JSON instead of text

    def save(self, run_dir: RunDir) -> None:
        (run_dir.path / PLAN).write_text(json.dumps(asdict(self)) + "\n")


class AnswerPrinter:
    """Prints to stdout what a model generates for ``prompts`` prompts, a single one as it comes."""

    def __init__(self, codec: TextCodec, prompts: int, *, as_json: bool = False) -> None:
        self._codec, self._prompts, self._as_json = codec, prompts, as_json
        self._stream = TextStream(codec.decode)
        self._done: list[Completion] = []

    def token(self, token: int) -> None:
        """Show a token of a single prompt."""
        if self._prompts == 1 and not self._as_json:
            sys.stdout.write(printable(self._stream.add(token)))
            sys.stdout.flush()

    def completed(self, completion: Completion) -> None:
        """Show the completion of the next prompt."""
        number = len(self._done)
        self._done.append(completion)
        text = self._codec.decode(completion.ids)
        if self._as_json:
            document = {"prompt": number, "text": text, **asdict(completion)}
            print(printable_json(json.dumps(document, ensure_ascii=False)))
        elif self._prompts == 1:
            print(printable(self._stream.rest()))
        else:
            shown = " ".join(map(str, completion.ids)) if text is None else text
            print(f"--- prompt {number + 1} ---\n{printable(shown)}")
        sys.stdout.flush()

    def summary(self) -> str:
        """Return a line with the speed of prefill and decode."""
        tokens = sum(done.prompt_tokens for done in self._done)
        prefill = sum(done.prefill_seconds for done in self._done)
        speed = tokens / max(prefill, 1e-9)
        line = f"{with_count(tokens, 'prompt token')} in {prefill:.2f} s ({speed:,.0f} tokens/s)"
        longest = max(self._done, key=lambda done: len(done.ids))
        if (steps := len(longest.ids) - 1) > 0:
            line += f"; {1e3 * longest.decode_seconds / steps:.1f} ms per generated token"
        cut = sum(done.finish == LENGTH for done in self._done)
        return f"{line}; {cut} of {len(self._done)} ended at --max-new" if cut else line


def describe(engine: Engine, *, generates: bool = True) -> list[str]:
    """Return the lines of a banner: the model, and the attention of prompts and of new tokens."""
    choices, config, dims = engine.choices, engine.config, engine.environment.dims
    workers = f", {dims.workers} workers ({choices.layout.name}, {choices.exchange.label})"
    pattern = "dense"
    if choices.pattern is not None:
        pattern = f"{display_name(choices.pattern)} ({choices.pattern.describe()})"
    if config.mask.kind != "causal":
        pattern += f" under {config.mask.describe()}"
    attention = f"{pattern}, kernel {choices.kernel.name}"
    if (dense := config.sparsity.dense_text) and choices.dense_kernel is not None:
        attention += f", {dense} dense, kernel {choices.dense_kernel[0].name}"
    step = "" if engine.step is None else f", step {engine.step}"
    dtype = str(choices.dtype).removeprefix("torch.")
    new = f"new tokens: dense over the whole cache, kernel {engine.decode_kernel}"
    return [
        f"{config.model.name}{step}: {config.model.num_layers} layers, {dtype} on "
        f"{engine.device.type}{workers if dims.workers > 1 else ''}",
        f"prompts: {attention}; {new}" if generates else f"attention: {attention}",
    ]


def report(lines: Sequence[str]) -> None:
    """Print lines to stderr, since stdout takes the text."""
    for line in lines:
        guarded_streams.print_error(line)


def warn(line: str) -> None:
    report([f"mtrain: warning: {one_line(line)}"])


def run(config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> bool:
    """Generate on one worker. Return whether a stop request ended it early."""
    text = (run_dir.path / PLAN).read_text() if environment.rank == 0 else "null"
    request = documents.checked(GenerateRequest, share(json.loads(text))[0])
    try:
        answer(request, config, environment, StopFlag(run_dir))
    except _StoppedError:
        return True
    return False


def answer(
    request: GenerateRequest, config: Config, environment: Environment, stop: StopFlag | None = None
) -> None:
    """Load the model and generate until the end, or until the user asked to ``stop``.

    The first worker prints. Raises ConfigError if the model cannot be loaded or a prompt does not
    fit the memory, RunError if the memory is full.
    """
    source = ModelSource(Path(request.path), request.is_folder, config)
    longest = max(map(len, request.prompts))
    # Before the weights are read, which takes time.
    MemoryNeed.of(config, environment).require_fit(longest, request.max_new, environment.device)
    codec = open_codec(source, request.tokenizer)
    first, generated = environment.rank == 0, 0
    printer = AnswerPrinter(codec, len(request.prompts), as_json=request.as_json)

    def on_token(_prompt: int, token: int) -> None:
        nonlocal generated
        if first:
            printer.token(token)
        generated += 1
        if stop is not None and generated % _TOKENS_PER_CHECK == 0:
            requested = torch.tensor(int(stop.requested()))
            dist.all_reduce(requested, dist.ReduceOp.MAX)
            if requested:
                raise _StoppedError

    advice = "Give shorter prompts, a smaller --max-new or more topology.workers"
    with reporting_out_of_memory(lambda _: f"rank {environment.rank} ran out of memory. {advice}"):
        engine = Engine(source, environment, warn if first else None)
        if first:
            report([*describe(engine), *filter(None, [codec.starts])])
        ends = frozenset() if request.ignore_end else codec.stop
        for completion in engine.generate(
            request.prompts, request.max_new, request.sampling, ends, on_token
        ):
            if first:
                printer.completed(completion)
    if first:
        report([printer.summary()])


class _StoppedError(Exception):
    """Some worker got a request to stop. All workers raise this together."""
