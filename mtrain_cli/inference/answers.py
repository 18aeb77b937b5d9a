"""Show what a model generates: text as it comes, or a JSON object for each prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from mtrain_cli.config.dense_layers import last_layers
from mtrain_cli.config.sizes import with_count
from mtrain_cli.inference.engine import Completion, Engine
from mtrain_cli.inference.text import TextCodec, TextStream
from mtrain_cli.launch import guarded_streams
from mtrain_cli.printable import printable, printable_json
from mtrain_cli.sparsity.pattern import display_name


class AnswerPrinter:
    """Prints to stdout what a model generates for each prompt.

    The text of a single prompt appears as it comes.
    """

    def __init__(self, codec: TextCodec, prompts: int, *, as_json: bool = False) -> None:
        """prompts: number of prompts."""
        self._codec, self._prompts, self._as_json = codec, prompts, as_json
        self._stream = TextStream(codec.decode)
        self._done: list[Completion] = []

    def token(self, prompt: int, token: int) -> None:
        """Show a token. prompt: number of the prompt, from 0."""
        del prompt
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
        prompt_tokens = sum(each.prompt_tokens for each in self._done)
        prefill = sum(each.prefill_seconds for each in self._done)
        line = (
            f"{with_count(prompt_tokens, 'prompt token')} in {prefill:.2f} s "
            f"({prompt_tokens / max(prefill, 1e-9):,.0f} tokens/s)"
        )
        longest = max(self._done, key=lambda each: len(each.ids))
        steps = len(longest.ids) - 1
        if steps > 0:
            line += f"; {1e3 * longest.decode_seconds / steps:.1f} ms per generated token"
        ended = sum(each.finish == "length" for each in self._done)
        reached = f"{ended} of {len(self._done)} prompts" if self._prompts > 1 else "the text"
        return f"{line}; {reached} ended at --max-new" if ended else line


def describe(engine: Engine, *, generates: bool = True) -> list[str]:
    """Return the lines of a banner: the model, and the attention of prompts and of new tokens.

    generates: whether there are new tokens.
    """
    choices, model = engine.choices, engine.config.model
    dims, device = engine.environment.dims, engine.device.type
    workers = ""
    if dims.workers > 1:
        workers = f", {dims.workers} workers ({choices.layout.name}, {choices.exchange.label})"
    pattern = "dense"
    if choices.pattern is not None:
        pattern = f"{display_name(choices.pattern)} ({choices.pattern.describe()})"
    mask = engine.config.mask
    if mask.kind != "causal":
        pattern += f" under {mask.describe()}"
    step = "" if engine.step is None else f", step {engine.step}"
    dtype = str(choices.dtype).removeprefix("torch.")
    attention = f"{pattern}, kernel {choices.kernel.name}"
    if (last := last_layers(engine.config)) and choices.dense_kernel is not None:
        attention += f", {last} dense, kernel {choices.dense_kernel[0].name}"
    new = f"dense over the whole cache, kernel {engine.decode_kernel}"
    return [
        f"{model.name}{step}: {model.num_layers} layers, {dtype} on {device}{workers}",
        f"prompts: {attention}; new tokens: {new}" if generates else f"attention: {attention}",
    ]


def report(lines: Sequence[str]) -> None:
    """Print lines to stderr, since stdout takes the text."""
    for line in lines:
        guarded_streams.print_error(line)
