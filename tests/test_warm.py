"""A forked command behaves as a new program: its exit code, what it prints, and its end."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import warm

_HERE = str(Path(__file__).parent)


def main() -> None:
    """What the tests run as a command: do what the first word says."""
    match sys.argv[1]:
        case "thread":
            threading.Thread(target=_print_later).start()
        case "fail":
            raise LookupError("lost")
        case word:
            sys.exit(word)


def _print_later() -> None:
    time.sleep(0.2)
    print(sys.argv[1], os.environ["WORD"], Path.cwd(), os.environ.get("HOME"))


def test_a_forked_command_ends_as_a_new_program_does(tmp_path):
    given = {"WORD": "given", "PYTHONPATH": _HERE}
    done = warm.run("test_warm", ["thread"], tmp_path, given, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"thread given {tmp_path} None\n", "the command waits for its thread"
    done = warm.run("test_warm", ["a mistake"], tmp_path, given, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "a mistake\n")
    done = warm.run("test_warm", ["fail"], tmp_path, given, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("LookupError: lost\n")
