"""`mtrain simulate run` and `recommend`: what they predict, write and print."""

from __future__ import annotations

import json

import pytest
import yaml
from commands.typed_line import DENSE, SMALL, STRIPED, document, run, simulate
from simulation.recordings import SEQ, record

from mtrain_cli import resource_dir
from mtrain_cli.config.cluster import shipped
from mtrain_extras.validate.actions import _kernel_source


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_recorded_indices_on_another_cluster(tmp_path):
    path = record(tmp_path / "measurements/one", "vertical_slash")
    for index in (str(path), str(path.parent)):
        found = run(
            "simulate --index",
            index,
            "--cluster a100_4x8 --workers 8 --exchange ring --json --no-files",
        )
        assert found.exit_code == 0, found.stderr
        document = json.loads(found.stdout)
        assert document["layers"] == [0, 3, 5]
        assert [case["seq"] for case in document["cases"]] == [SEQ, SEQ]
        assert "not calibrated on NVIDIA A100-SXM4-40GB" in document["predicted"][0]["remarks"][0]
        for predicted in document["predicted"]:
            assert predicted["ms"]["low"] < predicted["ms"]["value"] < predicted["ms"]["high"]


def test_a_sweep_prints_a_table_and_can_be_reported(tmp_path):
    words = (
        "simulate model=tiny --columns 64 --cluster a100_4x8 --layout",
        "striped,zigzag --exchange ring",
    )
    found = run(*words, "seq=1k,32k nodes=1,2,4 --out swept")
    assert (found.exit_code, found.stderr) == (0, "")
    assert (
        len([line for line in found.stdout.splitlines() if line.strip().startswith(("1k", "32k"))])
        == 12
    )
    # Remarks on every row are printed once; remarks on some rows stay with them.
    flat = " ".join(found.stdout.split())
    # So is each reason why a row cannot be predicted.
    assert flat.count("not topology.workers=16: 1024 tokens in blocks of 128 are too few") == 1
    assert (
        flat.count("note not calibrated on NVIDIA A100-SXM4-40GB")
        == flat.count("note the simulator: ")
        == 1
    )
    assert flat.count("note the computed pairs are drawn at random (clustered)") == 1
    assert "To \"fit\" means to use at most 95% of a GPU's memory and 90% of the host's" in flat
    summary = json.loads((tmp_path / "swept/summary.json").read_text())
    assert len(summary["sweep"]) == 12
    assert all(f"note {remark}" in flat for remark in summary["remarks"])
    assert (
        "guessed constants: 15 (gpu.gemm_tflops, gpu.launch_us, gpu.step_ms and 12 more; --json "
        "has all)" in flat
    )
    assert len(summary["remarks"]) >= 4
    assert all("cannot" in row or row["seconds"]["value"] > 0 for row in summary["sweep"])
    assert len((tmp_path / "swept/sweep.csv").read_text().splitlines()) == 13
    shown = run("report swept", columns=200)
    assert shown.exit_code == 0, shown.stderr
    assert "predicted for a100_4x8" in shown.stdout
    page = (tmp_path / "swept/report.html").read_text()
    assert "Predicted steps" in page
    again = run(*words, "nodes=1,2 --out swept")
    assert again.exit_code == 2
    assert "--out swept: already holds a profile or simulation" in again.stderr


def test_a_recommendation_is_reasoned_and_reported(tmp_path):
    words = (
        "simulate recommend model=tiny seq=32k --columns 64 --cluster a100_4x8 --nodes 2",
        "--exchange ring,all_gather",
    )
    found = run(*words, "--out best", columns=200)
    assert (found.exit_code, found.stderr) == (0, "")
    for start in (
        "best   ",
        "next   ",
        "why    ",
        "type   torchrun --nnodes 2",
        "not    ",
        "time   ",
        "memory ",
    ):
        assert any(line.startswith(start) for line in found.stdout.splitlines()), start
    summary = json.loads((tmp_path / "best/summary.json").read_text())
    assert (
        summary["recommended"]["ranked"][0]["seconds"] == summary["predicted"][0]["step"]["seconds"]
    )
    assert len(summary["cases"]) == len(summary["results"]) == 1
    assert run("report best").exit_code == 0
    content = yaml.safe_load(shipped()["a100_4x8"].read_text())
    content["gpu"]["hbm_gib"] = {"value": 1, "source": "guess"}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    none = run(
        "simulate recommend model=tiny seq=32k --cluster small.yaml --exchange ring --no-files",
        "--layout striped",
    )
    assert none.exit_code == 1
    assert "nothing fits small: a GPU needs at least " in none.stdout


def test_a_slow_rank_may_be_in_any_group():
    """A slow rank costs the same in any group, and the slowest of several groups counts."""
    # At 512K, the host launches a step faster than the GPUs run it.
    dense = DENSE.replace("seq=32k", "seq=512k")
    words = (dense, "train.global_batch=2 topology.context_parallel=4", STRIPED)
    for more in ((), ("--attention-only",)):

        def result(slow: str, more: tuple[str, ...] = more) -> tuple[float, str]:
            (entry,) = document(*words, *more, "--slow", slow)["predicted"]
            return (entry["step"]["seconds"] if "step" in entry else entry["ms"])[
                "value"
            ], " ".join(entry["remarks"])

        (first, remarks), (second, other) = result("2=2"), result("6=2")
        assert first == second
        assert "shows the slowest context group, ranks 4 to 7; its ranks count from 0" in other
        assert "slowest context group" not in remarks
        assert result("1=1.5,6=2") == (first, other)
        assert result("1=3,6=2")[0] == result("1=3")[0] > first


def test_attention_only_equals_the_attention_of_the_step():
    """Settings of topology, groups and kernel apply as in a step."""
    words = (DENSE, "--workers 4", STRIPED)
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
        *words, "topology.device=cpu topology.prefetch=2 train.kernel=sdpa --attention-only"
    )["cases"][0]
    assert (of_processes["exchange"], of_processes["kernel"]) == ("ring (2 hops ahead)", "sdpa")
    sparse = (
        "model=tiny",
        "seq=16k",
        "--columns",
        "64",
        "train.kernel=triton",
        "--attention-only",
        STRIPED,
    )
    assert document(*sparse)["cases"][0]["kernel"] == "triton"


def test_missing_measurements_are_reported():
    words = ("model=qwen3b seq=8k --columns 64 --workers 1 --attention-only", STRIPED)
    result = document(*words, "--cluster a100_4x8")
    (here,) = result["predicted"]
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
    assert f"guessed constants: {len(own)} ({own[0]}, " in guesses


TWO_NODES = "model=tiny seq=32k --cluster a100_4x8 --nodes 2 --layout striped"


@pytest.mark.parametrize("command", ["run", "recommend", "seq=32k,64k"])
def test_the_exchange_that_auto_chooses_is_listed_once(command):
    words = TWO_NODES if "seq" not in command else TWO_NODES.replace("seq=32k ", "")
    both = document(command, words, "--exchange auto,hierarchical_all_gather")
    one = document(command, words, "--exchange hierarchical_all_gather")
    for entry in ("cases", "predicted", "sweep"):
        assert both.get(entry) == one.get(entry)
    ranked = [d.get("recommended", {}).get("ranked") for d in (both, one)]
    assert ranked[0] == ranked[1]


def test_a_dense_prediction_says_which_documents_it_assumes():
    said = "a sequence of mtrain train may hold several documents"
    assert said in simulate(TWO_NODES, "--exchange ring --no-files").stdout
    for word in ("data.document_mask=false", "--density 0.1"):
        assert said not in simulate(TWO_NODES, "--exchange ring --no-files", word).stdout


def test_its_files_can_be_reported_like_a_profile(tmp_path):
    found = run(
        "simulate",
        SMALL,
        "train.activation_checkpoint=full --layers 2 --out mine --exchange ring",
        "--slow 3=2",
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
        ("columns=64,128",),
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
    for more in (("run",), ("run", "--attention-only"), ("recommend",), ("workers=2,4",)):
        refused = simulate(*more, DENSE, STRIPED, "--out file/in/it")
        assert refused.exit_code == 2, refused.output
        assert refused.stderr.startswith(
            "mtrain: --out file/in/it: cannot be written; give another folder"
        )
    # A mistake that is found later leaves no new folders either.
    assert simulate(DENSE, "--exchange ulysses --layout zigzag --out new/one").exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_first_line_says_which_pairs_are_predicted():
    words = "model=tiny seq=16k --layout zigzag --exchange ring --no-files"

    def first(*more: str) -> str:
        return run("simulate", words, *more, columns=200).stdout.splitlines()[0]

    dense = "pairs  dense: all causal pairs, each sequence one document"
    assert first("sparsity=dense") == dense
    assert (
        first() == f"{dense}, the default of mtrain train; set sparsity, density or index for fewer"
    )
    window = "pairs  dense: all pairs of sliding_window, window 4,096, each sequence"
    assert first("mask=sliding_window").startswith(window)
    drawn = "each sequence one document; set index for the pairs of a profile"
    for more, name in (
        ("--density 5%", "(clustered)"),
        ("sparsity=vertical_slash", "(clustered) for sparsity=vertical_slash"),
    ):
        asked = "slashes on 5% of the blocks, plus 2,048 columns per head"
        assert first(more) == f"pairs  synthetic {name}: {asked}, {drawn}"
    fixed = "pairs  as drawn by sparsity=fixed, each sequence one document"
    assert first("sparsity=fixed") == fixed


def test_step_parts_and_memory_are_printed():
    words = (
        "simulate model=qwen3b seq=8k --density 5% --layout striped --exchange ring --no-files",
    )
    found = run(*words, "--json")
    (entry,) = json.loads(found.stdout)["predicted"]
    step = entry["step"]
    assert sum(step["parts_s"].values()) == pytest.approx(step["seconds"]["value"], rel=1e-4)
    dry = run(
        "train model=qwen3b seq=8k sparsity=vertical_slash",
        "sparsity.max_columns=2048 topology.exchange=ring topology.workers=8",
        "topology.device=cuda --dry-run",
    )
    total = next(line for line in dry.stdout.splitlines() if line.startswith("total"))
    assert f"{step['memory_bytes'] / 2**30:.2f} GiB" in total
    shown = run(*words)
    assert "parts  of one row" not in shown.stdout
    assert (
        f"memory {step['memory_bytes'] / 2**30:.2f} GiB of 139.8 (132.8 usable) at its peak"
        in " ".join(shown.stdout.split())
    )


def test_mfu_is_shown_for_dense_attention_only():
    words = ("model=tiny seq=16k --workers 2", STRIPED)
    (dense,), (sparse,) = (
        document(*words, *more)["predicted"] for more in ((), ("--columns", "64"))
    )
    assert dense["step"]["mfu"] == dense["step"]["mfu_as_dense"] > 0
    assert sparse["step"]["mfu"] is None
    assert sparse["step"]["mfu_as_dense"] > 0
    assert 0 < sparse["step"]["hfu"] < 1


@pytest.mark.parametrize(
    "words",
    [
        ("model=qwen3b", "seq=64k", "--cluster", "a100_4x8"),
        ("recommend", DENSE, "train.global_batch=8"),
        ("model=tiny", "seq=1k,32k", "workers=2,16", "--cluster", "a100_4x8", STRIPED),
        (DENSE, "--attention-only", "--recompute"),
    ],
    ids=["steps", "recommend", "sweep", "attention"],
)
def test_output_fits_80_columns(words):
    result = simulate(*words, "--no-files", columns=80)
    assert result.exit_code == 0, result.output
    # A command stays on one line, so that it can be copied.
    lines = [line for line in result.stdout.splitlines() if not line.startswith("type ")]
    assert max(map(len, lines)) <= 80
    table = result.stdout.partition(" ─")[2].partition("\n\n")[0]
    assert "…" not in result.stdout
    assert any(exchange in table for exchange in ("ring", "all_gather"))
    assert "columns dropped to fit: " in result.stdout or "seq=1k,32k" in words
    # The table of steps has several rows.
    assert ("parts  of one row follow; --json has those of all" in lines) == ("seq=64k" in words)


def test_rows_of_experts_are_shown_exposed_and_hidden():
    words = (
        "model=qwen3_30b_a3b model.num_layers=2 seq=16k --cluster h200_1x8 --layout striped "
        "--exchange all_gather --expert-loads zipf:0.5 topology.expert_parallel=4"
    )
    (entry,) = json.loads(run("simulate", words, "--no-files", "--json").stdout)["predicted"]
    rows = entry["step"]["expert_rows"]
    assert entry["step"]["ep"] == 4
    assert entry["step"]["parts_s"]["experts"] == pytest.approx(rows["exposed"], rel=1e-4)
    shown = " ".join(run("simulate", words, "--no-files").stdout.split())
    assert f"experts dealt over 4 workers: {rows['size'] / 2**30:.2f} GiB" in shown
    share = rows["exposed"] / entry["step"]["seconds"]["value"]
    assert f"waiting for rows of experts {share:.1%}" in shown
