"""`mtrain simulate`: options and settings take effect together or are refused, never ignored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import python_path
from simulation.recordings import record
from typer.testing import CliRunner

from mtrain_cli import resource_dir
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.commands import app as command_line
from mtrain_cli.commands.simulate_validate import _kernel_source
from mtrain_cli.records import record_files
from mtrain_cli.records.index_file import RecordedSetup, save_indices
from mtrain_cli.simulation.calibration import kernels_for, load_calibration, same_device
from mtrain_cli.simulation.cluster import load_cluster
from mtrain_cli.simulation.prediction import AttentionWorkload, predict
from mtrain_cli.simulation.validation import key_of
from mtrain_cli.simulation.what_if import ReplaySetup, topology_of

DENSE = ("model=tiny", "seq=32k", "sparsity=dense")
STRIPED = ("--layout", "striped", "--exchange", "ring")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words: str, columns: int = 200):
    return CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(
        command_line.app, ["simulate", *words], prog_name="mtrain"
    )


def document(*words: str) -> dict[str, Any]:
    result = run(*words, "--json", "--no-files")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_slow_rank_needs_a_group_of_one_size():
    words = (*DENSE, "train.global_batch=8", "--recommend", "--slow", "3=2", "--no-files", *STRIPED)
    refused = run(*words)
    assert refused.exit_code == 2, refused.output
    assert (
        "--slow 3=2: --recommend tries groups of any size; add topology.context_parallel=N"
        in refused.stderr
    )
    fixed = run(*words, "topology.context_parallel=4")
    assert fixed.exit_code == 0, fixed.output
    # Ranks are numbered over all workers and groups.
    assert run(*words, "--slow", "7=2", "topology.context_parallel=4").exit_code == 0
    beyond = run(*words, "--slow", "8=2", "topology.context_parallel=4")
    assert (
        beyond.exit_code,
        "--slow 8=2: there is no rank 8; allowed: 0 to 7" in beyond.stderr,
    ) == (2, True)
    # `auto` is no size.
    assert run(*words, "topology.context_parallel=auto").exit_code == 2


def test_a_slow_rank_may_be_in_any_group():
    """A slow rank costs the same in any group, and the slowest of several groups counts."""
    words = (*DENSE, "train.global_batch=2", "topology.context_parallel=4", *STRIPED)
    for more in ((), ("--attention-only",)):

        def result(slow: str, more: tuple[str, ...] = more) -> tuple[float, str]:
            (entry,) = document(*words, *more, "--slow", slow)["predicted"]
            return (entry["step"]["seconds"] if "step" in entry else entry["ms"])[
                "value"
            ], " ".join(entry["remarks"])

        (first, remarks), (second, other) = result("2=2"), result("6=2")
        assert first == second
        assert (
            "the context group of ranks 4 to 7 is shown, the slowest one; its ranks count "
            "from 0" in other
        )
        assert "is shown, the slowest" not in remarks
        assert result("1=1.5,6=2") == (first, other)
        assert result("1=3,6=2")[0] == result("1=3")[0] > first


def test_attention_only_equals_the_attention_of_the_step():
    """Settings of topology, groups and kernel apply as in a step."""
    words = (*DENSE, "--workers", "4", *STRIPED)
    usual = document(*words, "--attention-only")
    (case,), (ms,) = usual["cases"], [p["ms"] for p in usual["predicted"]]
    assert (case["cp"], case["kernel"], case["exchange"]) == (4, "sdpa", "ring")
    for more, fact, value in (
        (("topology.prefetch=2",), "exchange", "ring (2 hops ahead)"),
        (("topology.circulates=queries",), "exchange", "ring (queries circulate in backward)"),
        (("topology.context_parallel=2", "train.global_batch=2"), "cp", 2),
    ):
        alone, step = document(*words, *more, "--attention-only"), document(*words, *more)
        assert alone["cases"][0][fact] == step["cases"][0][fact] == value
        assert alone["predicted"][0]["ms"] == step["predicted"][0]["ms"] != ms
    of_processes = document(
        *words,
        "topology.device=cpu",
        "topology.prefetch=2",
        "train.kernel=sdpa",
        "--attention-only",
    )["cases"][0]
    assert (of_processes["exchange"], of_processes["kernel"]) == ("ring (2 hops ahead)", "sdpa")
    sparse = (
        "model=tiny",
        "seq=16k",
        "--columns",
        "64",
        "train.kernel=triton",
        "--attention-only",
        *STRIPED,
    )
    assert document(*sparse)["cases"][0]["kernel"] == "triton"


def test_without_a_model_ineffective_settings_are_refused(tmp_path):
    path = record(tmp_path / "one", "vertical_slash")
    for word in ("topology.prefetch=2", "train.kernel=sdpa"):
        refused = run("--index", str(path), word, "--workers", "4", "--no-files", *STRIPED)
        assert refused.exit_code == 2
        assert (
            f"{word}: --index {path} without model= gives only the shape of attention; add model="
            in refused.stderr
        )


def test_a_replay_uses_the_exchange_options_of_the_profile(tmp_path):
    """Cases of one run that differ only in these options are two cases."""
    setup = RecordedSetup(
        seq=4096,
        heads=4,
        kv_heads=2,
        head_dim=64,
        dtype_bytes=2,
        workers=4,
        per_node=4,
        layout="striped",
        exchange="ring",
        needs_out=True,
    )
    masks = (SequenceMask.causal(4096, 4096),)
    problem = AttentionWorkload(setup, masks, (0,), lambda layer: None, "dense")  # noqa: ARG005
    plain = ReplaySetup("striped", "ring", 4, 4)
    of_heads = ReplaySetup("striped", "ulysses", 2, 2)
    typed = [
        plain,
        replace(plain, options=replace(topology_of(plain), prefetch=2, circulates="queries")),
        replace(plain, options=replace(topology_of(plain), ulysses=2)),
        replace(plain, exchange="all_gather", options=replace(topology_of(plain), chunks=2)),
        of_heads,
    ]
    facts = []
    for number, one in enumerate(typed):
        result = predict(
            load_cluster("h200_1x8"), problem, one, kernel="flash4", rows=True, number=number
        )
        record_files.write_part(result.rows, tmp_path / "run", number)
        facts.append(result.facts)
    record_files.join_parts(tmp_path / "run")
    save_indices(tmp_path / "run" / record_files.INDEX, setup, masks, [("dense", 0, None)])
    about = {
        "kind": "profile",
        "mode": "attention",
        "complete": True,
        "workers": 4,
        "samples_wanted": 1,
        "samples": 1,
        "cases": facts,
    }
    record_files.write_summary(
        tmp_path / "run", about | {"environment": {"started": "2026-01-02T00:00:00+0000"}}
    )
    labels = [fact["exchange"] for fact in facts]
    assert labels[1:] == [
        "ring (2 hops ahead, queries circulate in backward)", "ulysses over 2, then ring",
        "all_gather (2 parts of the heads)",
        "ulysses over 2",
    ]  # fmt: skip
    assert len({key_of(fact) for fact in facts}) == len(typed)
    result = run("--validate", str(tmp_path / "run"), "--out", str(tmp_path / "v"), "--json")
    assert result.exit_code == 0, result.output
    message = json.loads(result.stdout)
    assert (len(message["cases"]), message["not_predicted"]) == (len(typed), [])
    assert message["agreement"]["mape"] < 1e-3


def test_mfu_is_shown_for_dense_attention_only():
    words = ("model=tiny", "seq=16k", "--workers", "2", *STRIPED)
    (dense,), (sparse,) = (
        document(*words, *more)["predicted"] for more in (("--index", "dense"), ("--columns", "64"))
    )
    assert dense["step"]["mfu"] == dense["step"]["mfu_as_dense"] > 0
    assert sparse["step"]["mfu"] is None
    assert sparse["step"]["mfu_as_dense"] > 0
    assert 0 < sparse["step"]["hfu"] < 1


def test_the_used_calibration_is_reported():
    files = ["kernels-h200.json", "non-attention-h200.json", "worker-calls-h200.json"]
    words = ("model=tiny", "seq=4k", "--workers", "1", *STRIPED)
    for more in ((), ("--attention-only",), ("--recommend",), ("--sweep", "columns=64,128")):
        result = document(*words, *more)
        assert result["calibration"] == {
            "device": "NVIDIA H200",
            "files": files,
            "own": False,
            "scaled": False,
        }
    other = document(*words, "--cluster", "a100_4x8", "--calibration", str(shipped_file()))
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
        both = document(*words, "--calibration", str(own))
        assert both["calibration"] == {
            "device": "NVIDIA H200",
            "files": used,
            "own": True,
            "scaled": False,
        }
    assert any(
        "layers and the loss as measured (profile non-attention)" in note
        for note in result["remarks"]
    )
    assert (
        _kernel_source(result["calibration"])
        == "kernels-h200.json, non-attention-h200.json, worker-calls-h200.json of NVIDIA H200"
    )
    assert "does not name" in _kernel_source(None)


def shipped_file():
    return resource_dir("profiles") / "kernels-h200.json"


@pytest.mark.parametrize(
    ("device", "gpu", "same"),
    [
        ("NVIDIA H200", "NVIDIA H200", True),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-80GB", False),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", True),
        ("NVIDIA H200", "NVIDIA H200 NVL", False),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", False),
        ("NVIDIA H100 NVL", "NVIDIA H100 PCIe", False),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H200", False),
        ("a laptop", "another", False),
        ("a laptop", "a laptop", True),
    ],
)
def test_equivalent_device_names_count_as_the_same(device, gpu, same):
    assert same_device(device, gpu) == same_device(gpu, device) == same


def test_times_of_another_device_are_never_used_silently():
    measured = load_calibration(shipped_file())
    of_h100 = replace(measured, device="NVIDIA H100 80GB HBM3")
    peaks = {of_h100.device: 989e12}
    pcie = kernels_for("NVIDIA H100 PCIe", 756e12, "triton", "sparse", peaks, of_h100)
    assert all(curve.scaled is not None for curve in pcie.whole.values())
    assert "not calibrated on NVIDIA H100 PCIe" in pcie.remarks[0]
    alike = kernels_for("NVIDIA H100 SXM5", 989e12, "triton", "sparse", peaks, of_h100)
    assert all(curve.scaled is None for curve in alike.whole.values())
    assert alike.remarks[0].startswith("kernel times are those of NVIDIA H100 80GB HBM3")


def test_missing_measurements_are_reported():
    """Index times come from one kind of GPU; the simulator's own constants have sources too."""
    words = (
        "model=qwen3b",
        "seq=8k",
        "--columns",
        "64",
        "--workers",
        "1",
        "--attention-only",
        *STRIPED,
    )
    message = (
        "estimating an index was measured of vertical_slash with 16 heads on NVIDIA H200, not of "
    )
    (here,) = document(*words)["predicted"]
    assert not [line for line in here["remarks"] if line.startswith("estimating")]
    result = document(*words, "--cluster", "a100_4x8")
    by = (
        ": a token takes x 2.7 of that, by number of heads and bandwidth of memory, and bounds are "
        "wider"
    )
    assert f"{message}16 heads on NVIDIA A100-SXM4-40GB{by}" in result["predicted"][0]["remarks"]
    (more,) = document("model=llama8b", *words[1:])["predicted"]
    assert (
        message + "32 heads on NVIDIA H200: a token takes x 2 of that, by number of heads"
        in more["remarks"]
    )
    (dense,) = document("model=llama8b", "seq=8k", "--index", "dense", *words[4:])["predicted"]
    assert not [line for line in dense["remarks"] if line.startswith("estimating")]
    constants = result["cluster"]["constants"]
    assert constants["costs.index_together_us"] | {"note": ""} == {
        "value": 1050, "source": "measured", "note": "", "low": pytest.approx(735), "high": 1575,
    }  # fmt: skip
    assert constants["costs.launches.sparse step"]["source"] == "guess"
    (guesses,) = [line for line in here["remarks"] if line.startswith("the simulator: ")]
    own = [
        name
        for name, of in constants.items()
        if of["source"] == "guess" and not name.startswith(("gpu.", "links."))
    ]
    assert all(name in guesses for name in own)
    assert f" {len(own)} constants" in guesses


@pytest.mark.parametrize(
    "words",
    [
        ("model=qwen3b", "seq=64k", "--cluster", "a100_4x8"),
        (*DENSE, "train.global_batch=8", "--recommend"),
        ("model=tiny", "--sweep", "seq=1k,32k workers=2,16", "--cluster", "a100_4x8", *STRIPED),
        (*DENSE, "--attention-only", "--recompute"),
    ],
    ids=["steps", "recommend", "sweep", "attention"],
)
def test_output_fits_80_columns(words):
    result = run(*words, "--no-files", columns=80)
    assert result.exit_code == 0, result.output
    # A command stays on one line, so that it can be copied.
    lines = [line for line in result.stdout.splitlines() if not line.startswith("type ")]
    assert max(map(len, lines)) <= 80
    table = result.stdout.partition(" ─")[2].partition("\n\n")[0]
    assert "…" not in result.stdout
    assert "ring" in table
    assert "columns dropped to fit: " in result.stdout or "--sweep" in words


def test_cpu_workers_get_no_message_about_cuda(tmp_path):
    """Attention on CPUs is predicted in float32; whole steps are refused in one line."""
    made = yaml.safe_load((resource_dir("conf") / "cluster/h200_1x8.yaml").read_text())
    for gpu in ({"name": "AMD EPYC 9654"}, {"name": "some chip", "device": "cpu"}):
        made["gpu"] |= gpu
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(made))
        words = ("model=tiny", "seq=16k", "--columns", "64", "--cluster", "mine.yaml", *STRIPED)
        for more in ((), ("--recommend",), ("--sweep", "workers=2,4")):
            refused = run(*words, *more, "--no-files")
            assert refused.exit_code == 2
            message = (
                f"--cluster mine.yaml: {gpu['name']} is a CPU, and steps are predicted for GPUs "
                "only; give --attention-only"
            )
            assert refused.stderr.strip() == f"mtrain: {message}"
        alone = document(*words, "--attention-only")
        assert alone["cases"][0]["kernel"] == "sdpa"
        assert not [remark for remark in alone["predicted"][0]["remarks"] if "triton" in remark]
        typed = document(*words, "topology.device=cpu", "--attention-only")
        assert alone["predicted"] == typed["predicted"]
        refused = run(*words, "topology.device=cuda", "--attention-only", "--no-files")
        assert (
            f"topology.device=cuda: mine has {gpu['name']}, a CPU; allowed: cpu" in refused.stderr
        )
    made["gpu"]["device"] = "tpu"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(made))
    assert "mine.yaml: gpu.device=tpu: allowed: cuda, cpu" in run(*words, "--no-files").stderr


def test_an_unwritable_folder_is_refused_before_computing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in ("prediction", "scenario"):
        monkeypatch.setattr(f"mtrain_cli.simulation.{place}.predict", None)
    for more in ((), ("--attention-only",), ("--recommend",), ("--sweep", "workers=2,4")):
        refused = run(*DENSE, *STRIPED, *more, "--out", "file/in/it")
        assert refused.exit_code == 2, refused.output
        assert refused.stderr.startswith(
            "mtrain: --out file/in/it: cannot be written (Not a directory); give another folder"
        )
    assert run(*DENSE, *STRIPED, "--out", "/proc").exit_code == 2  # is there, and takes no file
    # A mistake that is found later leaves no new folders either.
    assert (
        run(*DENSE, "--exchange", "ulysses", "--layout", "zigzag", "--out", "new/one").exit_code
        == 2
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_invalid_settings_are_reported_before_importing_torch():
    """Uses a process of its own, since this one has imported it."""
    wrong = [
        "model=tinyy",
        "train.micro_batch=3",
        "topology.workers=3",
        "--slow 99=2",
        "--slow 1=x",
        "--jitter 9",
        "--density 7",
        "--cluster no",
    ]
    code = f"""
import sys
from typer.testing import CliRunner
from mtrain_cli.commands import app as command_line
for word in {wrong}:
    result = CliRunner().invoke(command_line.app, ["simulate", *word.split()], prog_name="mtrain")
    assert (result.exit_code, "torch" in sys.modules) == (2, False), (word, result.output)
    assert word.split()[-1].partition("=")[0] in result.stderr, result.stderr
"""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_a_saved_prediction_can_be_validated_later():
    """The shipped predictions and measurement, which the README quotes."""
    ships = resource_dir("profiles") / "predicted-4xh200"
    before = [
        word
        for folder in sorted((ships / "predictions").iterdir())
        for word in ("--prediction", str(folder))
    ]
    result = run("--validate", str(ships), *before, "--json", "--no-files")
    assert result.exit_code == 0, result.stderr
    assert not list(Path().iterdir())
    by_name = run(
        "--validate",
        "predicted-4xh200",
        "--prediction",
        "predicted-4xh200/predictions",
        "--json",
        "--no-files",
    )
    assert (
        json.loads(by_name.stdout)["agreement"]["mape"]
        == json.loads(result.stdout)["agreement"]["mape"]
    )
    refused = run("--validate", "predicted-4xh200", "--layout", "zigzag")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "--validate predicted-4xh200 and --layout" in refused.stderr
    agreement = json.loads(result.stdout)["agreement"]
    assert agreement["work_cells_equal"] == agreement["work_cells"] == 1472
    assert agreement["mape"] == pytest.approx(0.056, abs=5e-4)
    assert agreement["degree_mean_error"] == pytest.approx(0.044, abs=5e-4)


def test_the_choice_of_auto_is_printed():
    words = (
        "model=qwen3b", "seq=128k", "--cluster", "h100_4x8", "--layout", "striped",
        "--exchange", "all_gather", "--no-files", "--density", "5%",
    )  # fmt: skip
    message = " ".join(run(*words, "train.memory=auto").stdout.split())
    assert "note train.memory=auto takes train.shard=gradients" in message
    assert "auto takes" not in run(*words).stdout
