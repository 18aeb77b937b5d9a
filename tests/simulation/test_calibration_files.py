"""Calibration files are found by path or name, and other files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain_cli import resource_dir
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.simulation.calibration_files import (
    KINDS_OF_FILES,
    calibration_files,
    read_calibration,
    shipped_files,
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(name: str, content: object) -> Path:
    path = Path(name)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def calibration(kind: str) -> dict[str, object]:
    return {"kind": kind, "device": "GPU", "times": [1]}


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_a_calibration_is_read(kind):
    assert read_calibration(written("a.json", calibration(kind))) == calibration(kind)


def test_several_files_are_given_by_path_and_by_name():
    own = written("own.json", calibration("kernels"))
    shipped = resource_dir("profiles") / "kernels-h200.json"
    assert calibration_files("own.json, kernels-h200") == [own, shipped]
    with pytest.raises(ConfigError, match=r"^--calibration 'own.json,': empty item"):
        calibration_files("own.json,")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such calibration"),
        ("{", "not readable as JSON"),
        ("[1]", "holds no times"),
        ({**calibration("kernels"), "times": []}, "holds no times"),
        ({"kind": "kernels", "times": [1]}, "holds no times"),
        (calibration("masks"), "holds no times"),
    ],
)
def test_another_file_is_refused_in_one_line(content, message):
    path = Path("a.json") if content is None else written("a.json", content)
    with pytest.raises(ConfigError, match=rf"^--calibration a\.json: {message}") as caught:
        read_calibration(path)
    assert len(caught.value.problems) == 1
    if content is None:
        assert "kernels-h200" in str(caught.value), "the shipped files are named"


def test_shipped_files_are_grouped_by_device():
    found = shipped_files()
    assert {path.stem for files in found.values() for path in files} >= {
        "kernels-h200",
        "non-attention-h200",
        "worker-calls-h200",
    }
    for device, files in found.items():
        assert {read_calibration(path)["device"] for path in files} == {device}
