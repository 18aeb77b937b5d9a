"""The files of `mtrain simulate` are read like those of a profile."""

from __future__ import annotations

import json

import pytest
from commands.typed_line import DENSE, SMALL, STRIPED, document, run, simulate

from mtrain_cli import resource_dir
from mtrain_cli.commands.simulate_validate import _kernel_source


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_its_files_can_be_reported_like_a_profile(tmp_path):
    found = run(
        "simulate",
        SMALL,
        "train.activation_checkpoint=full --layers 2 --out mine --exchange ring",
        "--slow 3=2 --jitter 0.1",
    )
    assert found.exit_code == 0, found.stderr
    assert "mtrain report mine" in found.stdout
    summary = json.loads((tmp_path / "mine/summary.json").read_text())
    assert summary["kind"] == "simulation"
    assert summary["cluster"]["constants"]["gpu.peak_tflops"]["source"] == "datasheet"
    assert len(summary["results"]) == len(summary["cases"]) == 2
    for predicted, result in zip(summary["predicted"], summary["results"], strict=True):
        for name in ("forward", "recompute", "backward"):
            assert result["passes"][name]["duration_ms"]["mean"] == pytest.approx(
                predicted["passes"][name]["ms"]["value"], rel=1e-3
            )
    shown = run("report mine", columns=200)
    assert shown.exit_code == 0, shown.stderr
    assert "rank 3" in shown.stdout
    assert (tmp_path / "mine/report.html").is_file()
    again = run("simulate", SMALL, "--out mine --exchange ring")
    assert again.exit_code == 2
    assert "--out mine: already holds a profile or simulation" in again.stderr


def shipped_file():
    return resource_dir("profiles") / "kernels-h200.json"


def test_the_used_calibration_is_reported():
    files = ["kernels-h200.json", "non-attention-h200.json", "worker-calls-h200.json"]
    words = ("model=tiny seq=4k --workers 1", STRIPED)
    for more in (
        ("run",),
        ("run", "--attention-only"),
        ("recommend",),
        ("sweep", "columns=64,128"),
    ):
        result = document(*more, *words)
        assert result["calibration"] == {
            "device": "NVIDIA H200",
            "files": files,
            "own": False,
            "scaled": False,
        }
    other = document(*words, "--cluster a100_4x8 --calibration", str(shipped_file()))
    assert other["calibration"] == {
        "device": "NVIDIA H200",
        "files": files[:1],
        "own": True,
        "scaled": True,
    }
    assert (
        _kernel_source(other["calibration"])
        == "kernels-h200.json of NVIDIA H200, another device: scaled by peak FLOP/s"
    )
    rest = shipped_file().with_name("non-attention-h200.json")
    for own, used in (
        (f"{shipped_file()}, {rest}", [files[0], files[1]]),
        (rest, [files[1], *files]),
    ):
        both = document(*words, "--calibration", f"'{own}'")
        assert both["calibration"] == {
            "device": "NVIDIA H200",
            "files": used,
            "own": True,
            "scaled": False,
        }
    assert any(
        "layers and loss take measured times (`mtrain profile non-attention`)" in note
        for note in result["remarks"]
    )
    assert (
        _kernel_source(result["calibration"])
        == "kernels-h200.json, non-attention-h200.json, worker-calls-h200.json of NVIDIA H200"
    )
    assert "does not name" in _kernel_source(None)


def test_an_unwritable_folder_is_refused_before_computing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in ("prediction", "scenario"):
        monkeypatch.setattr(f"mtrain_cli.simulation.{place}.predict", None)
    for more in (("run",), ("run", "--attention-only"), ("recommend",), ("sweep", "workers=2,4")):
        refused = simulate(*more, DENSE, STRIPED, "--out file/in/it")
        assert refused.exit_code == 2, refused.output
        assert refused.stderr.startswith(
            "mtrain: --out file/in/it: cannot be written (Not a directory); give another folder"
        )
    assert simulate(DENSE, STRIPED, "--out /proc").exit_code == 2  # is there, and takes no file
    # A mistake that is found later leaves no new folders either.
    assert simulate(DENSE, "--exchange ulysses --layout zigzag --out new/one").exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
