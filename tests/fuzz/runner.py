"""Run commands in forked processes and detect tracebacks, hangs and messages in Python's terms."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MEMORY = 12 << 30  # address space of a command
PYTHON = re.compile(
    r"Traceback \(most recent|NoneType|float\(\) argument|int\(\) argument|list indices|unhashable"
    r"|not subscriptable|not iterable|object has no attribute|unexpected keyword argument"
    r"|positional argument|must be real number|invalid literal|codec can't|KeyError|TypeError"
    r"|ValueError|IndexError|AttributeError|OverflowError|RecursionError"
    r"|UnicodeDecodeError|<class '"
)
FINE = (0, 1, 2)


@dataclass(frozen=True)
class Outcome:
    """The result of a command line.

    kind: fine, traceback, words (Python's terms in a message), silent (a failure without a line),
        typo (accepted), or hang.
    about: the message, or where it failed.
    """

    kind: str
    code: int
    about: str
    seconds: float = 0.0


def run(words: Sequence[str], typos: Sequence[str] = ()) -> Outcome:
    """Run a command line in this process."""
    from typer.testing import CliRunner

    from mtrain_cli.commands.app import app

    started = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()) as other:
        result = CliRunner().invoke(app, list(words), prog_name="mtrain")
    output = result.stderr + other.getvalue()
    seconds = time.monotonic() - started
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        return Outcome("traceback", 1, _where(error), seconds)
    if result.exit_code not in FINE:
        return Outcome(
            "traceback", result.exit_code, f"exit code {result.exit_code}: {output[-300:]}", seconds
        )
    if match := PYTHON.search(_without(output, words)):
        return Outcome("words", result.exit_code, f"{match[0]}: {output[-300:]}", seconds)
    if result.exit_code and not output.strip() and not result.stdout.strip():
        return Outcome("silent", result.exit_code, "", seconds)
    if typos and not result.exit_code:
        return Outcome("typo", 0, " ".join(typos)[:200], seconds)
    return Outcome("fine", result.exit_code, output[-200:], seconds)


def _without(output: str, words: Sequence[str]) -> str:
    for word in words:
        output = output.replace(word, "") if len(word) > 3 else output
    return output


def _where(error: BaseException) -> str:
    own = re.compile(r".*\bmtrain_(?:cli|studies)/")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if own.match(f.filename)]
    at = f"{own.sub('', frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
    return f"{at} {type(error).__name__}: {str(error)[:160]}"


def run_watched(
    count: int,
    prepare: Callable[[], None],
    run_one: Callable[[int], Outcome],
    limit_s: float,
    workers: int = 2,
) -> Iterator[tuple[int, Outcome]]:
    """Call ``run_one`` for every number below ``count`` in forked processes.

    A process that returns nothing for ``limit_s`` seconds is killed and counts as a hang.
    """
    shares = [list(range(first, count, workers)) for first in range(workers)]
    children = [_Child(share, prepare, run_one) for share in shares if share]
    while children:
        ready, _, _ = select.select([child.pipe for child in children], [], [], 1.0)
        for child in list(children):
            if child.pipe in ready:
                yield from child.read()
            if child.ended:
                children.remove(child)
                if child.left:  # it died
                    yield child.left[0], Outcome("traceback", 1, "the process died")
                    if child.left[1:]:
                        children.append(_Child(child.left[1:], prepare, run_one))
            elif time.monotonic() - child.heard > limit_s:
                child.kill()
                children.remove(child)
                yield child.left[0], Outcome("hang", -1, f"more than {limit_s:g} s")
                if child.left[1:]:
                    children.append(_Child(child.left[1:], prepare, run_one))


class _Child:
    """A process that runs inputs one after the other and sends a line after each."""

    def __init__(
        self, numbers: list[int], prepare: Callable[[], None], run_one: Callable[[int], Outcome]
    ) -> None:
        self.left, self.ended, self.heard, self._text = list(numbers), False, time.monotonic(), ""
        self.pipe, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.pipe)
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1):
                os.dup2(null, stream)
            code = 0
            try:
                prepare()
                with os.fdopen(write_end, "w") as out:
                    for number in numbers:
                        out.write(json.dumps([number, asdict(run_one(number))]) + "\n")
                        out.flush()
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        os.close(write_end)

    def read(self) -> Iterator[tuple[int, Outcome]]:
        data = os.read(self.pipe, 1 << 16)
        if not data:
            self.ended = True
            os.close(self.pipe)
            os.waitpid(self._pid, 0)
            return
        self.heard = time.monotonic()
        *lines, self._text = (self._text + data.decode(errors="replace")).split("\n")
        for line in lines:
            number, outcome = json.loads(line)
            self.left.remove(number)
            yield number, Outcome(**outcome)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self.pipe)


def stub_heavy_work(monkeypatch: Any = None) -> None:
    """Stub training and measurement and cache composing, so that a command takes milliseconds.

    Without ``monkeypatch`` this lasts for the whole process.
    """
    import copy

    import hydra

    from mtrain_cli.launch import local
    from mtrain_cli.profiling import pattern_quality
    from mtrain_extras.bench import kernels, non_attention
    from mtrain_extras.studies import cells

    replace = setattr if monkeypatch is None else monkeypatch.setattr
    composed: dict[tuple[str, ...], Any] = {}
    compose = hydra.compose

    def cached(name: str, overrides: Sequence[str] = ()) -> Any:
        from hydra.core.global_hydra import GlobalHydra

        search = str(GlobalHydra.instance().config_loader().get_search_path())
        key = (search, name, *overrides)
        if key not in composed:
            composed[key] = compose(name, overrides=list(overrides))
        return copy.deepcopy(composed[key])

    replace(hydra, "compose", cached)
    replace(local, "launch", lambda *_, **__: 0)
    replace(cells, "compute", lambda *_, **__: None)
    replace(kernels, "profile_kernels", lambda *_, **__: [])
    replace(non_attention, "profile_non_attention", lambda *_, **__: [])
    replace(pattern_quality, "profile_sparsity", _recall_of_a_head)


def _recall_of_a_head(_: Any, patterns: Sequence[Any], steps: Sequence[int], *__: Any) -> list[Any]:
    """Return what every measurement has at least: a row of each measured step and pattern."""
    from mtrain_cli.profiling.pattern_quality import HeadRecord

    return [
        HeadRecord(step, pattern.name, 0, 0, 0.5, 0.5, 0.9, 0.8, 2, 64)
        for step in steps
        for pattern in patterns
    ]


def table(outcomes: Sequence[Outcome], names: Sequence[str]) -> str:
    """Return the number of outcomes of each kind, with an example for each place."""
    kinds = ("fine", "traceback", "words", "silent", "typo", "hang")
    lines = [
        "  ".join(f"{kind} {sum(o.kind == kind for o in outcomes)}" for kind in kinds)
        + f"  of {len(outcomes)}"
    ]
    seen: dict[str, tuple[int, str]] = {}
    for outcome, name in zip(outcomes, names, strict=True):
        if outcome.kind != "fine":
            place = (
                f"{outcome.kind:<9} {outcome.about[:230]!r}"
                if outcome.kind not in ("typo",)
                else f"typo      {outcome.about[:60]!r}"
            )
            place = re.sub(r"\d{4,}", "N", place)
            count, example = seen.get(place, (0, name))
            seen[place] = (count + 1, example)
    lines += [
        f"{count:>5} x {place}\n          {example[:300]!r}"
        for place, (count, example) in sorted(seen.items(), key=lambda i: -i[1][0])
    ]
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
