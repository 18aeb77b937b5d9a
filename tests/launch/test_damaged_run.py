"""`mtrain status` on files that a crash or another program left damaged."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.config.compose import compose, save
from mtrain_cli.launch import restart
from mtrain_cli.launch.run_dir import RunDir

GOOD = (
    '{"time": 1.7e9, "reason": "rank 1 died", "rank": 1, "reached": 2, "step": 2, "workers": 2}\n'
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(compose(["seq=256"]), tmp_path / "resolved.yaml")
    return tmp_path


def status(run: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["status", str(run), *words], prog_name="mtrain")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("words", [(), ("--json",)])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        (".lock", b"\xff\xfe\x00garbage"),
        (
            "restarts.jsonl",
            b"\xff\xfe[1, 2\n[]\n"
            + GOOD.replace("1.7e9", '"yesterday"').encode()
            + GOOD.replace("2,", "null,").encode(),
        ),
        ("resolved.yaml", b"seq: 25"),
        ("state.json", b'{"phase": "training", "time": "noon", "began": null, "step": [1]}'),
        ("state.json", b'{"phase": "training", "time": 1e400, "began": 1, "seconds_left": NaN}'),
        ("metrics.jsonl", b'{"step": 1, "loss": "high"}\n{"step": "one"}\n\xff\n'),
    ],
)
def test_damage_is_passed_over(run, name, data, words):
    (run / name).write_bytes(data)
    shown = status(run, *words)
    if name in ("restarts.jsonl", "resolved.yaml"):
        assert "damaged" in shown
        assert name in shown.partition("damaged")[2]


def test_restarts_that_can_be_read_are_shown_beside_damaged_ones(run):
    (run / "restarts.jsonl").write_text("{garbage\n" + GOOD + GOOD.replace("1.7e9", '"yesterday"'))
    assert [entry.reason for entry in restart.read_restarts(RunDir(run))] == ["rank 1 died"]
    assert "rank 1 died" in status(run)
