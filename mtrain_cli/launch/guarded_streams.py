"""Keep the process alive without stdout or stderr: a closed terminal or pipe, or a full disk.

A command that prints its result must fail then. A training run writes its result to disk, so it
continues without output.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

CLOSED_PIPE = 141  # 128 + SIGPIPE: what a shell reports for a tool whose reader has gone


class OutputLostError(Exception):
    """Standard output is lost. This is not an OSError, so that no file handler catches it."""

    def __init__(self, error: OSError | ValueError) -> None:
        super().__init__(f"standard output: {getattr(error, 'strerror', None) or error}")
        self.reader_left = getattr(error, "errno", None) == errno.EPIPE


class GuardedStream:
    """A text stream that fails at most once and then points its descriptor to the null device.

    After that, no write to the descriptor fails: from the buffer, a library or a child process.
    """

    def __init__(self, stream: TextIO, required: bool) -> None:
        self._stream = stream
        self._lost = False
        self.required = required

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text``. Drop it if the stream is already lost.

        Raises:
            OutputLostError: the stream is required and this write lost it.
        """
        self._attempt(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of ``lines``, as `write` does."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream. Raises OutputLostError as `write` does."""
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[..., object], *arguments: object) -> None:
        try:
            if not self._lost:
                action(*arguments)
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: OSError | ValueError) -> None:
        if isinstance(error, UnicodeError):  # the text is wrong, not the stream
            raise error
        self._lost = True
        # A test's stream has no descriptor, and a closed stream has lost its descriptor.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        if self.required:
            raise OutputLostError(error) from error


def guard_streams(output_required: bool) -> None:
    """Guard this process's standard streams.

    Losing stdout is an error if ``output_required``; losing stderr never is. A later call may
    change ``output_required``.
    """
    _open_closed_descriptors()
    for name, required in (("stdout", output_required), ("stderr", False)):
        stream = getattr(sys, name)
        if isinstance(stream, GuardedStream):
            stream.required = required
        else:
            setattr(sys, name, cast(TextIO, GuardedStream(stream, required)))


def divert_native_output(log: TextIO) -> None:
    """Send what libraries and child processes write to standard error to ``log``.

    NCCL's watchdog, for example, writes stacks there before it ends a process. What Python writes
    to `sys.stderr` still goes where it went before.
    """
    descriptor = os.dup(2)
    encoding = sys.stderr.encoding
    # Stays open until the process exits.
    kept = open(descriptor, "w", 1, encoding, "backslashreplace")  # noqa: SIM115
    os.dup2(log.fileno(), 2)
    sys.stderr = cast(TextIO, GuardedStream(kept, required=False))


def _open_closed_descriptors() -> None:
    """Open the null device in place of standard streams that were closed when this process started.

    Otherwise the next file opened would take the number of the missing stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # os.open takes the lowest free number. The numbers below this one are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            # Stays open until the process exits.
            stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
