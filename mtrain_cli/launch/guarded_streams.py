"""Standard output and error when what is behind them takes no more: a terminal that was closed, a reader that has gone, a full disk.

A command whose output is its result has to say so and fail. A training has its result on disk: it goes on in silence.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any, TextIO, cast

CLOSED_PIPE = 141  # 128 + SIGPIPE, what a shell reports for a tool whose reader has gone


class OutputLostError(Exception):
    """Standard output takes no more. Not an OSError: nobody is to take it for one of a file."""

    def __init__(self, error: OSError | ValueError) -> None:
        super().__init__(f"standard output: {getattr(error, 'strerror', None) or error}")
        self.reader_left = getattr(error, "errno", None) == errno.EPIPE


class GuardedStream:
    """A text stream that fails at most once. From then on its descriptor leads to the null device.

    So what is still in buffers, and what libraries and child processes write to the descriptor, cannot fail either.
    """

    def __init__(self, stream: TextIO, required: bool) -> None:
        self._stream = stream
        self._lost = False
        self.required = required

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``, or drop it once the stream is lost.

        Raises:
            OutputLostError: the stream is required and has just been lost.
        """
        try:
            if not self._lost:
                self._stream.write(text)
        except (OSError, ValueError) as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """As `write`, for each of ``lines``."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Raises OutputLostError as `write` does."""
        try:
            if not self._lost:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: OSError | ValueError) -> None:
        if isinstance(error, UnicodeError):  # the text is at fault, not the stream
            raise error
        self._lost = True
        # A stream of a test has no descriptor, and a closed one has none any more.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        if self.required:
            raise OutputLostError(error) from error


def guard(output_required: bool) -> None:
    """Guard this process's standard streams, or change whether the loss of standard output is an error. That of standard error never is."""
    _open_missing()
    for name, required in (("stdout", output_required), ("stderr", False)):
        stream = getattr(sys, name)
        if isinstance(stream, GuardedStream):
            stream.required = required
        else:
            setattr(sys, name, cast(TextIO, GuardedStream(stream, required)))


def divert_native(log: TextIO) -> None:
    """From here on ``log`` gets what libraries and child processes write to standard error, such as the stacks of NCCL's watchdog before it
    ends a process. What Python writes to `sys.stderr` goes where it went.
    """
    descriptor = os.dup(2)
    kept = open(
        descriptor, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace"
    )
    os.dup2(log.fileno(), 2)
    sys.stderr = cast(TextIO, GuardedStream(kept, required=False))


def _open_missing() -> None:
    """Have the null device where this process was started with a stream closed; otherwise the next file opened would be that stream."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is the missing one, since those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115, for as long as the process lives
