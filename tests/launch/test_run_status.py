"""`mtrain status` on files that a crash or another program left damaged."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.resolved_file import save
from mtrain_cli.launch import restart
from mtrain_cli.launch.run_dir import RunDir

GOOD = (
    '{"time": 1.7e9, "reason": "rank 1 died", "rank": 1, "reached": 2, "step": 2, "workers": 2}\n'
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(compose(["seq=256"]), tmp_path / "resolved.yaml")
    return tmp_path


def status(run: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["status", str(run), *options], prog_name="mtrain")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
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
        ("metrics.jsonl", b'{"step": 1, "loss": NaN}\n{"step": 2, "loss": Infinity}\n'),
    ],
)
def test_status_skips_damaged_files(run, name, data, options):
    (run / name).write_bytes(data)
    shown = status(run, *options)
    if name in ("restarts.jsonl", "resolved.yaml"):
        assert "damaged" in shown
        assert name in shown.partition("damaged")[2]


def test_status_shows_readable_restarts_among_damaged_ones(run):
    (run / "restarts.jsonl").write_text("{garbage\n" + GOOD + GOOD.replace("1.7e9", '"yesterday"'))
    assert [entry.reason for entry in restart.read_restarts(RunDir(run))] == ["rank 1 died"]
    assert "rank 1 died" in status(run)
    (run / "restarts.jsonl").write_text(GOOD.replace("rank 1 died", "a\u2028b"))
    assert restart.count_unreadable_lines(RunDir(run)) == 0, "only a newline ends a line"
