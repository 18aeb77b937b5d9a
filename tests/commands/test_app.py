"""The command line: help, version, mistakes, exit codes."""

import errno
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

from mtrain_cli import __version__
from mtrain_cli.commands import app as command_line
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.failures import RunError

COMMANDS = ([], ["train"], ["report"], ["config"], ["config", "list"], ["config", "show"])


def run(*words: str, **variables: str):
    return CliRunner(env={"COLUMNS": "80", "TERM": "dumb", **variables}).invoke(
        command_line.app, list(words), prog_name="mtrain"
    )


def process(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mtrain_cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **variables}
    )


def test_help_opens_with_three_examples_that_parse():
    from mtrain_cli.composition.compose import compose

    text = run("--help").stdout
    examples = [
        line.strip() for line in text.splitlines() if line.strip().startswith("mtrain train")
    ]
    assert len(examples) == 3
    assert text.index(examples[-1]) < text.index("Options")
    for example in examples:
        compose([word for word in example.split()[2:] if not word.startswith("--")])


def test_the_example_of_a_plan_for_several_nodes_plans_several_nodes_and_fits():
    from mtrain_cli.composition.compose import compose
    from mtrain_cli.training.dry_run import fits
    from mtrain_cli.training.planning import make_plan

    lines = run("--help").stdout.splitlines()
    (example,) = (line.split()[2:] for line in lines if line.strip().endswith("--dry-run"))
    plan = make_plan(compose(example[:-1]))
    assert plan.environment.nodes == 4
    assert fits(plan)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_in_80_columns(words):
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"mtrain {' '.join(words)}".strip() in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def commands(command, *names: str):
    """Yield (words, command) of a command and all commands below it."""
    yield names, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *names, name)


@pytest.mark.parametrize(
    ("words", "param"),
    [
        pytest.param(words, param, id=" ".join((*words, param.opts[0])))
        for words, command in commands(typer.main.get_command(command_line.app))
        for param in command.params
        if param.param_type_name == "option" and not param.is_flag
    ],
)
def test_an_empty_or_second_value_of_an_option_is_refused(words, param):
    (name,) = param.opts
    wrong = [] if "''" in param.help else [[f"{name}="]]
    wrong += [] if param.multiple else [[name, "1", name, "2"]]
    for values in wrong:
        result = run(*words, *values)
        said = f"{name} 2: {name} is given twice; give one value. See `mtrain {' '.join(words)}"
        if values[-1] != "2":
            said = f"{name} '': "
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert result.stderr.startswith(f"mtrain: {said}")


def test_every_option_of_every_command_has_help_from_the_docstring():
    commands = [typer.main.get_command(command_line.app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        assert "Args:" not in (command.help or ""), command.name
        assert all(param.help for param in command.params), command.name


def test_the_bare_command_shows_help():
    for words in ([], ["config"]):
        result = run(*words)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.split() == run(*words, "--help").stdout.split()


def test_the_version_is_printed():
    result = process("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"mtrain {__version__}\n", "")


def test_help_imports_neither_torch_nor_hydra():
    """What makes it fast. Its seconds depend on what else a machine does."""
    assert process("--help").returncode == 0
    code = (
        "import sys, mtrain_cli.commands.app; "
        "print([m for m in ('torch', 'hydra', 'omegaconf', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "[]\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "--layuot", "zigzag"],
            "No such option: --layuot; settings are written key=value: topology.layout=...",
        ),
        (
            ["eval", "ruler", "x", "--task", "vt"],
            "No such option: --task (Possible options: --tasks). See `mtrain eval ruler --help`.",
        ),
        (
            ["generate", "x", "--max-tokens", "3"],
            "No such option: --max-tokens (Possible options: --max-new, --tokenizer). See",
        ),
        (["generate", "x", "--layout", "3"], "are written key=value: topology.layout=..."),
        (["train", "--lr", "3"], "settings are written key=value: optim.lr=..."),
        (["train", "--zzzzz"], "No such option: --zzzzz. See `mtrain train --help`."),
        (
            ["trian"],
            "Did you mean train? Commands: train, generate, eval, study, status, profile, ",
        ),
        (
            ["profile", "x"],
            "No such command x. Commands: imbalance, kernels, links, non-attention, ",
        ),
        (
            ["data", "x"],
            "No such command x. Commands: prepare, show, ",
        ),
        (["checkpoint", "exprt"], "Commands: import, export, verify. See `mtrain checkpoint "),
        (["config", "lst"], "Commands: list, show. See `mtrain config --help`."),
        (["--zzzzz"], "No such option: --zzzzz. See `mtrain --help`."),
        (["config", "show"], "Missing argument GROUP/NAME. See `mtrain config show --help`."),
        (["train", "--resume"], "requires an argument. See `mtrain train --help`."),
        (["checkpoint", "verify", "x", "--tokens", "0"], "--tokens 0: must be at least 1. See"),
        (
            ["checkpoint", "verify", "x", "--tokens", "few"],
            "--tokens few: expected a whole number. See",
        ),
        (
            ["checkpoint", "verify", "x", "--tolerance", "none"],
            "--tolerance none: expected a number. See",
        ),
        (
            ["checkpoint", "verify", "x", "--tolerance", "nan"],
            "--tolerance nan: expected a number. See",
        ),
        (
            ["checkpoint", "verify", "x", "--tolerance", "2e3"],
            "--tolerance 2e3: must be at most 1,000. See",
        ),
        (["checkpoint", "verify", ""], "HF_FOLDER_OR_RUN : is empty; give a value. See"),
        (["report", "a", ""], "RUN : is empty; give a value. See"),
        (["train", "--resume", "A", "--resume=B"], "--resume B: --resume is given twice; give one"),
        (
            ["checkpoint", "export", "x", "y", "--dtype", "float16"],
            "--dtype float16: expected one of bfloat16, float32. See",
        ),
        (
            ["data", "show", "x", "--document", "first"],
            "--document first: expected a whole number. See",
        ),
        (["train", "tiny"], "tiny: expected key=value (did you mean model=tiny?)"),
        (["train", "seq=512q"], "seq=512q: expected a number of tokens"),
        (["train", "--", "--layout=zigzag"], "did you mean topology.layout=zigzag?"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_with_exit_code_2(words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("mtrain: ")
    assert message in result.stderr.replace("'", "")  # releases of typer differ in their quotes
    assert result.stderr.count("\n") == 1


def test_each_of_several_mistakes_is_a_line_and_no_traceback_is_shown():
    result = process("train", "seq=512q", "modle=tiny", "optim.lr=abc")
    assert result.returncode == 2
    assert [line.split(": ")[:2] for line in result.stderr.splitlines()] == [
        ["mtrain", "modle=tiny"],
        ["mtrain", "seq=512q"],
        ["mtrain", "optim.lr=abc"],
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train seq=abc", True),
        ("profile imbalance seq=abc", True),
        ("config show seq=abc", False),
    ],
)
@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_rank_tells_the_others_of_a_mistake_in_a_command_whose_ranks_meet(
    monkeypatch, words, told, rank
):
    said = []
    monkeypatch.setattr(command_line, "tell_the_others", said.extend)
    monkeypatch.setenv("SLURM_PROCID", rank)
    result = CliRunner().invoke(command_line.app, words.split())
    assert result.exit_code == 2
    assert [line.partition(":")[0] for line in said] == ["seq=abc"] * told


def test_in_a_job_one_process_per_machine_prints_the_error():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.PrefixStore("mtrain/0/4", store).set("mtrain note is read", "")  # by rank 0

    def message(rank: int, local_rank: int) -> str:
        job = {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # so that nobody waits for the others
        }
        return run("train", "seq=512q", RANK=str(rank), LOCAL_RANK=str(local_rank), **job).stderr

    assert message(0, 0).startswith("mtrain: seq=512q")
    assert message(1, 1) == ""
    assert message(2, 0).startswith("mtrain: rank 2: seq=512q")
    alone = run("train", "seq=512q", RANK="3")
    assert (alone.exit_code, alone.stderr.count("\n")) == (2, 1)
    assert alone.stderr.startswith("mtrain: rank 3: RANK=3: the environment sets a rank but not ")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ConfigError("a: b", "c: d"), 2, "mtrain: a: b\nmtrain: c: d\n"),
        (RunError("no room"), 1, "error: no room\n"),
        (FileNotFoundError(errno.ENOENT, "No file", "a\nb"), 2, "mtrain: a\\nb: No file\n"),
    ],
)
def test_exceptions_become_exit_codes_and_torchrun_shows_them(
    monkeypatch, tmp_path, raised, code, said
):
    from mtrain_cli.composition import compose

    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(compose, "compose", fail)
    record = tmp_path / "error.json"
    result = run("train", "--cfg", TORCHELASTIC_ERROR_FILE=str(record))
    assert (result.exit_code, result.stderr) == (code, said)
    report = str(ChildFailedError("mtrain", {0: ProcessFailure(0, 1, code, str(record))}))
    shown = report.rpartition("traceback : ")[2].rstrip("=\n").split("\n  ")
    assert not said or shown == [line.partition(": ")[2] for line in said.splitlines()]
