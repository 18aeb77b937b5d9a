"""`mtrain` ends quietly on Ctrl-C and closed pipes, and reports output that it cannot write."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["typer", "mtrain_cli.commands.train", "mtrain_cli.launch.guarded_streams"]
)
def test_an_interrupt_during_imports_exits_quietly(module):
    script = f"""
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from mtrain_cli.__main__ import main
main()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("number", "words", "ends"),
    [
        ("SIGUSR1", ["config", "list"], (0, "mtrain: SIGUSR1: this command writes no checkpoints")),
        ("SIGUSR2", ["eval", "niah", "x"], (143, "mtrain: stopped by SIGUSR2\n")),
        ("SIGTERM", ["data", "show", "x"], (143, "mtrain: stopped by SIGTERM\n")),
        ("SIGUSR2", ["train", "--cfg"], (0, "")),
        ("SIGUSR1", ["train", "--cfg"], (0, "")),
    ],
)
def test_a_warning_during_imports_is_answered_or_remembered(number, words, ends):
    script = f"""
import os, signal, sys

class Signalling:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Signalling())
sys.argv = {["mtrain", *words]!r}
from mtrain_cli.__main__ import main
main()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == ends[0], result.stderr
    assert result.stderr.startswith(ends[1])


def shell(command: str) -> subprocess.CompletedProcess[str]:
    line = command.replace("mtrain", f"{sys.executable} -m mtrain_cli", 1)
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", ["mtrain train --cfg", "mtrain config list", "mtrain --help"])
def test_a_closed_pipe_ends_the_command_quietly(command):
    result = shell(f"{command} | true; exit ${{PIPESTATUS[0]}}")
    assert (result.returncode, result.stdout, result.stderr) == (141, "", "")


@pytest.mark.parametrize(
    "command", ["mtrain train --cfg", "mtrain config list", "mtrain --help", "mtrain --version"]
)
def test_an_unwritable_result_is_one_error_line(command):
    result = shell(f"{command} > /dev/full")
    assert (result.returncode, result.stderr) == (
        1,
        "error: standard output: No space left on device\n",
    )


def test_exit_code_is_kept_when_stderr_is_closed():
    assert shell("mtrain train seq=512q 2> /dev/full").returncode == 2
