"""Shell completion, by direct calls and through the shells' protocol."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_cli.commands.completion import (
    candidates,
    complete_clusters,
    complete_options,
    complete_runs,
    in_list,
)
from mtrain_cli.config.groups import open_groups


def values(word: str, config_dir: Path | None = None) -> list[str]:
    return [value for value, _ in candidates(word, open_groups(config_dir))]


def test_an_empty_word_offers_groups_and_top_level_keys():
    groups = (
        *("data", "eval", "mask", "model", "optim", "profile", "recipe", "run", "sparsity"),
        *("topology", "train"),
    )
    assert values("") == [f"{name}=" for name in (*groups, "seq", "seed")]


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("optim.w", ["optim.weight_decay=", "optim.warmup_steps="]),
        ("model=qwen1", ["model=qwen1.5b", "model=qwen14b"]),
        (
            "topology.layout=",
            [
                f"topology.layout={name}"
                for name in ("auto", "contiguous", "zigzag", "striped", "balanced")
            ],
        ),
        ("train.compile=", ["train.compile=auto", "train.compile=true", "train.compile=false"]),
        ("topology.workers=", ["topology.workers=auto"]),
        (
            "topology.cluster=a",
            [f"topology.cluster={name}" for name in ("auto", "a100_4x8", "a800_4x8")],
        ),
        ("model=au", ["model=auto"]),
        ("topology.layout=zz", []),
        ("nosuch=", []),
        ("nosuch", []),
    ],
)
def test_keys_options_and_allowed_words_are_offered(word, offered, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # files of the working directory would be offered, too
    assert values(word) == offered


@pytest.mark.parametrize("word", ["topology.lay", "optim.lr", "train.compile", "data.text_key"])
def test_a_single_match_completes_up_to_the_equals_sign(word):
    """Shells insert the common prefix of candidates, and add a space only after a single one."""
    offered = values(word)
    key = offered[0].partition("=")[0]
    assert len(offered) > 1
    assert all(value.startswith(f"{key}=") for value in offered)


def test_candidates_carry_help():
    assert dict(candidates("model=", open_groups()))["model=qwen3b"].startswith("Qwen2.5-3B")
    assert (
        dict(candidates("optim.w", open_groups()))["optim.warmup_steps="]
        == "number of steps of linear warm-up; 0 = none"
    )


def test_paths_are_completed_with_hidden_files_only_on_request(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").touch()
    (tmp_path / ".hidden").touch()
    assert values("data.path=") == ["data.path=corpus/"]
    assert values("data.path=.h") == ["data.path=.hidden"]
    assert values("data.path=corpus/") == ["data.path=corpus/a.txt"]
    assert values(f"data.path={tmp_path}/cor") == [f"data.path={tmp_path}/corpus/"]
    assert values("data.path=no/such/") == []


def test_runs_and_options_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second", "broken"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("first", "second"):
        (tmp_path / "runs" / name / "resolved.yaml").touch()
    assert complete_runs("") == ["first", "second"]
    assert complete_runs("s") == ["second"]
    assert [name for name, _ in complete_options("topology/")] == [
        f"topology/{name}"
        for name in (
            "a100_4x8",
            "a800_4x8",
            "b200_4x8",
            "h100_4x8",
            "h200_1x8",
            "hierarchical",
            "local",
            "ulysses",
        )
    ]


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("", ["ring", "rows", "all"]),
        ("r", ["ring", "rows"]),
        ("ring,", ["ring,rows", "ring,all"]),
        ("all,r", ["all,ring", "all,rows"]),
        ("all,rows,x", []),
    ],
)
def test_lists_complete_their_last_name_without_repeats(word, offered):
    assert in_list(("ring", "rows", "all"), word) == offered


def test_files_are_offered_when_no_name_matches_except_in_bash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    assert [name for name, _ in complete_clusters("h")] == ["h100_4x8", "h200_1x8"]
    assert complete_clusters("mi") == [("mine.yaml", "")]
    monkeypatch.setenv("_MTRAIN_COMPLETE", "complete_bash")
    assert complete_clusters("mi") == []


# Through the shells' protocol


@pytest.fixture
def shell_path(tmp_path) -> dict[str, str]:
    """An environment with `mtrain` first on PATH and an empty home folder."""
    script = tmp_path / "bin/mtrain"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m mtrain_cli "$@"\n')
    script.chmod(0o755)
    repository = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([str(script.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "HOME": str(tmp_path), "PYTHONPATH": repository}


def ask(shell: str, environment: dict[str, str], **variables: str) -> str:
    result = subprocess.run(
        ["mtrain"],
        env={**environment, "_MTRAIN_COMPLETE": f"complete_{shell}", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in result.stderr
    return result.stdout


def test_bash_gets_bare_values_because_it_splits_at_the_equals_sign(shell_path):
    def offered(*words: str) -> list[str]:
        return ask(
            "bash", shell_path, COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1)
        ).split()

    assert offered("mtrain", "train", "model", "=", "qwen1") == ["qwen1.5b", "qwen14b"]
    assert offered("mtrain", "train", "topology.layout", "=") == [
        "auto",
        "contiguous",
        "zigzag",
        "striped",
        "balanced",
    ]
    assert offered("mtrain", "train", "seq", "=", "4k", "topology.exchange", "=", "r") == ["ring"]
    assert offered("mtrain", "train", "model=qwen1") == ["model=qwen1.5b", "model=qwen14b"], (
        "where = does not cut"
    )
    assert offered("mtrain", "train", "data.path", "=", "x") == [], "bash then offers files itself"
    assert offered("mtrain", "train", "topology.cluster", "=", "h1") == ["h100_4x8"]
    assert offered("mtrain", "tr") == ["train"]


def test_zsh_gets_whole_words_with_help(shell_path):
    text = ask("zsh", shell_path, _TYPER_COMPLETE_ARGS="mtrain train model=qwen3")
    assert '"model=qwen3b":"Qwen2.5-3B' in text
    assert "qwen7b" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_installing_writes_a_script_that_the_shell_runs(shell, shell_path, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    # A second command keeps the shell from exec-ing mtrain, which looks for its parent shell.
    install = subprocess.run(
        [shell, "-c", "mtrain --install-completion; true"],
        env=shell_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"{shell} completion installed" in install.stdout, install.stderr
    written = {
        "bash": tmp_path / ".bash_completions/mtrain.sh",
        "zsh": tmp_path / ".zfunc/_mtrain",
    }[shell]
    if shell == "bash":
        script = (
            f"source {written}; COMP_WORDS=(mtrain train model = qwen1); COMP_CWORD=4; "
            'COMPREPLY=(); _mtrain_completion mtrain; printf "%s " "${COMPREPLY[@]}"'
        )
        result = subprocess.run(
            ["bash", "-c", script], env=shell_path, capture_output=True, text=True, timeout=60
        )
        assert result.stdout.split() == ["qwen1.5b", "qwen14b"]
    else:
        assert "_MTRAIN_COMPLETE=complete_zsh" in written.read_text()
