"""environment.json has what somebody needs to repeat a run."""

from __future__ import annotations

import json
import subprocess

from mtrain_cli.launch import run_facts
from mtrain_cli.launch.run_facts import environment_facts


def test_the_facts_name_command_versions_and_machine(monkeypatch):
    monkeypatch.setattr("sys.argv", ["anything", "train", "seq=512"])
    facts = json.loads(json.dumps(environment_facts()))
    assert facts["command"] == ["mtrain", "train", "seq=512"]
    assert {"mtrain", "python", "torch", "numpy"} <= facts["versions"].keys()
    assert facts["host"]
    assert facts["cpu_cores"]


def test_the_revision_says_whether_files_have_changed(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    module = tmp_path / "mtrain_cli" / "__init__.py"
    module.parent.mkdir()
    module.write_text("")
    monkeypatch.setattr(run_facts.mtrain_cli, "__file__", str(module))
    assert run_facts._git_revision() is None, "this folder is no checkout"
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert run_facts._git_revision() == git("rev-parse", "HEAD")
    module.write_text("changed = True\n")
    assert run_facts._git_revision() == git("rev-parse", "HEAD") + "+changes"


def test_a_tool_that_fails_gives_nothing():
    assert run_facts._output_of("false") == ""
    assert run_facts._output_of("no-such-tool-on-this-machine") == ""
