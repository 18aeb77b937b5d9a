"""`mtrain simulate run`, `sweep` and `recommend`: what they predict, write and print."""

from __future__ import annotations

import json

import pytest
import yaml
from commands.typed_line import DENSE, STRIPED, document, run, simulate
from simulation.recordings import SEQ, record

from mtrain_cli.commands.simulate_output import brief_remark
from mtrain_cli.config.cluster import shipped
from mtrain_cli.config.exchanges import COMPARED_EXCHANGES


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


def test_dense_attention_on_an_own_cluster(tmp_path):
    content = yaml.safe_load(shipped()["a800_4x8"].read_text()) | {"nodes": 2, "gpus_per_node": 4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    found = run("simulate model=tiny seq=16k --cluster mine.yaml --index dense --json --no-files")
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    assert (document["cluster"]["name"], document["workers"]) == ("mine", 8)
    assert {case["density"] for case in document["cases"]} == {1.0}


def test_a_sweep_prints_a_table_and_can_be_reported(tmp_path):
    words = (
        "simulate sweep model=tiny --columns 64 --cluster a100_4x8 --layout",
        "striped,zigzag --exchange ring",
    )
    found = run(*words, "seq=1k,32k nodes=1,2,4 --tokens 1e9 --price 1 --out swept")
    assert (found.exit_code, found.stderr) == (0, "")
    assert (
        len([line for line in found.stdout.splitlines() if line.strip().startswith(("1k", "32k"))])
        == 12
    )
    # Each reason why a row cannot be predicted stands once, below the table.
    assert (
        found.stdout.count("\nnot    1024 tokens in blocks of 128 are too few for 16 workers") == 1
    )
    # Remarks on every row are printed once; remarks on some rows stay with them.
    flat = " ".join(found.stdout.split())
    assert (
        flat.count("note not calibrated on NVIDIA A100-SXM4-40GB")
        == flat.count("note the simulator: ")
        == 1
    )
    assert flat.count("note the computed pairs are drawn at random (clustered)") == 1
    assert "To \"fit\" means to use at most 95% of a GPU's memory and 90% of the host's" in flat
    summary = json.loads((tmp_path / "swept/summary.json").read_text())
    assert len(summary["sweep"]) == 12
    assert all(f"note {brief_remark(remark)}" in flat for remark in summary["remarks"])
    assert (
        "15 constants are guesses (gpu.gemm_tflops, gpu.launch_us, gpu.step_ms and 12 more; --json "
        "has all, with bounds)" in flat
    )
    assert len(summary["remarks"]) >= 4
    assert all("cannot" in row or row["dollars"]["value"] > 0 for row in summary["sweep"])
    assert len((tmp_path / "swept/sweep.csv").read_text().splitlines()) == 13
    shown = run("report swept", columns=200)
    assert shown.exit_code == 0, shown.stderr
    assert "predicted for a100_4x8" in shown.stdout
    page = (tmp_path / "swept/report.html").read_text()
    assert "Scaling" in page
    assert "Predicted steps" in page
    again = run(*words, "nodes=1 --out swept")
    assert again.exit_code == 2
    assert "--out swept: already holds a profile or simulation" in again.stderr


def test_a_recommendation_is_reasoned_and_reported(tmp_path):
    words = (
        "simulate recommend model=tiny seq=32k --columns 64 --cluster a100_4x8 --nodes 2",
        "--exchange ring,all_gather",
    )
    found = run(*words, "--out best --price 1", columns=200)
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
    assert "instead of 1:" in none.stdout


def test_an_unmeasured_gpu_gets_wide_bounds(tmp_path):
    content = yaml.safe_load(shipped()["h200_1x8"].read_text())
    content["gpu"] |= {"name": "Unheard Of X9", "peak_tflops": {"value": 500, "source": "guess"}}
    del content["gpu"]["gemm_tflops"]
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(content))
    found = run(
        "simulate model=qwen3b seq=64k --cluster new.yaml --layout striped",
        "--exchange ring --no-files --json",
    )
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    (entry,) = document["predicted"]
    assert "not calibrated on Unheard Of X9" in entry["remarks"][0]
    assert entry["step"]["seconds"]["high"] > 2.5 * entry["step"]["seconds"]["low"]
    gemm = document["cluster"]["constants"]["gpu.gemm_tflops"]
    assert (gemm["value"], gemm["low"], gemm["high"], gemm["source"]) == (385, 250, 475, "guess")


def test_a_slow_rank_may_be_in_any_group():
    """A slow rank costs the same in any group, and the slowest of several groups counts."""
    words = (DENSE, "train.global_batch=2 topology.context_parallel=4", STRIPED)
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
    """Index times come from one kind of GPU; the simulator's own constants have sources too."""
    rest = ("--workers 1 --attention-only", STRIPED)
    words = ("model=qwen3b seq=8k --columns 64", *rest)
    message = (
        "estimating an index was measured for vertical_slash with 16 heads on NVIDIA H200, not for "
    )
    (here,) = document(*words)["predicted"]
    assert not [line for line in here["remarks"] if line.startswith("estimating")]
    result = document(*words, "--cluster a100_4x8")
    by = (
        ": the time per token is scaled by 2.7 for the number of heads and the memory bandwidth, "
        "and bounds are wider"
    )
    assert f"{message}16 heads on NVIDIA A100-SXM4-40GB{by}" in result["predicted"][0]["remarks"]
    (more,) = document("model=llama8b seq=8k --columns 64", *rest)["predicted"]
    assert (
        message
        + "32 heads on NVIDIA H200: the time per token is scaled by 2 for the number of heads"
        in more["remarks"]
    )
    (dense,) = document("model=llama8b seq=8k --index dense", *rest)["predicted"]
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


TWO_NODES = "model=tiny seq=32k --cluster a100_4x8 --nodes 2 --layout striped"


def test_between_nodes_all_exchanges_are_compared_that_auto_chooses_from():
    cases = document(TWO_NODES)["cases"]
    assert {case["exchange"].partition(" (")[0] for case in cases} == set(COMPARED_EXCHANGES)


@pytest.mark.parametrize("command", ["run", "recommend", "sweep seq=32k,64k"])
def test_the_exchange_that_auto_chooses_is_listed_once(command):
    words = TWO_NODES if "sweep" not in command else TWO_NODES.replace("seq=32k ", "")
    both = document(command, words, "--exchange auto,hierarchical_all_gather")
    one = document(command, words, "--exchange hierarchical_all_gather")
    for entry in ("cases", "predicted", "sweep"):
        assert both.get(entry) == one.get(entry)
    ranked = [d.get("recommended", {}).get("ranked") for d in (both, one)]
    assert ranked[0] == ranked[1]
    if command != "recommend":
        shown = simulate(command, words, "--exchange auto,ring --no-files")
        assert "--exchange auto chooses hierarchical_all_gather here" in shown.stdout


def test_a_dense_prediction_says_which_documents_it_assumes():
    said = "a sequence of mtrain train may hold several documents"
    assert said in simulate(TWO_NODES, "--exchange ring --no-files").stdout
    for word in ("data.document_mask=false", "--density 0.1"):
        assert said not in simulate(TWO_NODES, "--exchange ring --no-files", word).stdout
