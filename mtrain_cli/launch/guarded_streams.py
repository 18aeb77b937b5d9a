"""Handle the loss of stdout or stderr: a closed terminal, a closed pipe or a full disk.

A command that prints its result then fails. Training goes on, because its result is on disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

from mtrain_cli.printable import printable

CLOSED_PIPE = 141  # 128 + SIGPIPE, the exit code of a shell command whose reader is gone


class OutputLostError(Exception):
    """Standard output is lost: a pipe's reader left, or another failure. It is no OSError."""

    def __init__(self, error: OSError | ValueError) -> None:
        super().__init__(f"standard output: {getattr(error, 'strerror', None) or error}")
        self.reader_left = getattr(error, "errno", None) == errno.EPIPE


class GuardedStream:
    """A text stream that fails at most once; its descriptor then refers to the null device.

    required: whether the failure raises OutputLostError.
    """

    def __init__(self, stream: TextIO, required: bool) -> None:
        self._stream = stream
        self._lost = False
        self.required = required

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, or drop it if the stream has failed before."""
        self._attempt(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[..., object], *arguments: object) -> None:
        try:
            if not self._lost:
                action(*arguments)
        except UnicodeError:  # the text cannot be encoded, but the stream is intact
            raise
        except (OSError, ValueError) as error:
            self._lost = True
            # A closed stream has no descriptor, and neither has a stream in a test.
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if self.required:
                raise OutputLostError(error) from error


def guard_streams(output_required: bool) -> None:
    """Replace stdout and stderr of this process by guarded streams.

    output_required: whether losing stdout is an error. A later call can change it.
    """
    _open_closed_descriptors()
    for name, required in (("stdout", output_required), ("stderr", False)):
        stream = getattr(sys, name)
        if isinstance(stream, GuardedStream):
            stream.required = required
        else:
            setattr(sys, name, cast(TextIO, GuardedStream(stream, required)))


def print_error(text: str) -> None:
    """Print to stderr, with control characters escaped. Ignore a terminal that is gone."""
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def divert_native_output(log: TextIO) -> None:
    """Redirect to ``log`` what libraries such as NCCL, but not Python, write to standard error."""
    descriptor = os.dup(2)
    encoding = sys.stderr.encoding
    # Stays open until the process exits.
    kept = open(descriptor, "w", 1, encoding, "backslashreplace")  # noqa: SIM115
    os.dup2(log.fileno(), 2)
    sys.stderr = cast(TextIO, GuardedStream(kept, required=False))


def _open_closed_descriptors() -> None:
    """Open the null device for closed standard streams; the next file would get the descriptor."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # os.open takes the lowest free descriptor, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            # Stays open until the process exits.
            stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
