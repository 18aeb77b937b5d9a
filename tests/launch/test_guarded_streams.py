"""Standard streams whose terminal, reader or disk is gone."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from mtrain_cli.launch.guarded_streams import GuardedStream, OutputLostError


def closed_terminal() -> TextIO:
    master, slave = os.openpty()
    os.close(master)
    return os.fdopen(slave, "w")


def pipe_without_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk() -> TextIO:
    return open("/dev/full", "w")


def closed_file() -> TextIO:
    stream = full_disk()
    stream.close()
    return stream


LOST = (closed_terminal, pipe_without_reader, full_disk, closed_file)


@pytest.mark.parametrize("make", LOST)
def test_losing_an_optional_stream_is_silent(make):
    stream = make()
    guarded = GuardedStream(stream, required=False)
    for _ in range(2):
        assert guarded.write("a line\n") == 7
        guarded.flush()
        guarded.writelines(["one\n", "two\n"])
    if not stream.closed:
        # Neither a library's output to the descriptor nor the flush at exit can fail.
        os.write(stream.fileno(), b"from elsewhere\n")
        stream.close()


@pytest.mark.parametrize(
    ("make", "message", "reader_left"),
    [
        (closed_terminal, "Input/output error", False),
        (pipe_without_reader, "Broken pipe", True),
        (full_disk, "No space left on device", False),
        (closed_file, "I/O operation on closed file.", False),
    ],
)
def test_a_required_stream_fails_once_with_the_reason(make, message, reader_left):
    guarded = GuardedStream(make(), required=True)
    with pytest.raises(OutputLostError) as caught:
        print("a line", file=guarded, flush=True)
    assert (str(caught.value), caught.value.reader_left) == (
        f"standard output: {message}",
        reader_left,
    )
    print("another", file=guarded, flush=True)


def test_an_encoding_error_does_not_count_as_a_lost_stream():
    raw = io.BytesIO()
    guarded = GuardedStream(io.TextIOWrapper(raw, encoding="ascii"), required=False)
    with pytest.raises(UnicodeEncodeError):
        guarded.write("ä")
    guarded.write("a")
    guarded.flush()
    assert raw.getvalue() == b"a"


def test_no_file_takes_the_descriptor_of_a_closed_stream(tmp_path: Path):
    code = (
        "import os, sys; from mtrain_cli.launch import guarded_streams; "
        "guarded_streams.guard_streams(output_required=False); "
        "file = open(sys.argv[1], 'w'); print('a word'); print('more', file=sys.stderr); "
        "os.write(1, b'raw'); sys.exit(file.fileno() < 3)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    assert (
        subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "bash", *command], timeout=60).returncode
        == 0
    )
    assert (tmp_path / "file").read_text() == ""


def test_native_output_is_diverted_and_python_output_is_not(tmp_path):
    program = """
import os, sys
from mtrain_cli.launch import guarded_streams
guarded_streams.divert_native_output(open(sys.argv[1], "a"))
os.write(2, b"native\\n")
print("word \\udcff", file=sys.stderr)
sys.stdout.write("written")
sys.stdout.flush()
sys.stdin.read()
print("nobody reads", file=sys.stderr)
sys.stderr.flush()
"""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert child.stdout.read(7) == b"written"
    assert os.read(reader, 100) == b"word \\udcff\n"
    os.close(reader)
    child.communicate(b"")
    assert child.returncode == 0
    assert (tmp_path / "log").read_text() == "native\n"
