"""`mtrain profile links` on CPU processes: files, a cluster for the simulator, refused options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import mtrain
from commands.typed_line import split
from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line
from mtrain_cli.config.cluster import load_cluster
from mtrain_extras.bench.link_fit import (
    ALL_TO_ALL,
    GATHER,
    HOP,
    HOPS_AT_ONCE,
    SCATTER,
    TWO_HOPS,
)

HOST = ("gpu.host_gib", "gpu.host_link_gbps", "gpu.host_memory_gbps")


def test_two_processes_are_measured_as_a_cluster_for_the_simulator(tmp_path):
    words = ["topology.device=cpu", "topology.workers=2", "--sizes", "4k,256k", "--repeats", "3"]
    result = mtrain(
        tmp_path, "profile", "links", *words, *split("--cluster-out my.yaml --json run.name=one")
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "measurements/one/links.json").read_text())
    assert (document["kind"], document["schema"], document["complete"]) == ("links", 1, True)
    assert document["backend"] == "gloo"
    assert document["versions"]["torch"]
    assert [(t["what"], t["size"]) for t in document["times"]] == [
        (what, size)
        for what in (HOP, TWO_HOPS, GATHER, SCATTER, ALL_TO_ALL)
        for size in (4 << 10, 256 << 10)
    ]
    for t in document["times"]:
        assert 0 < t["low"] <= t["us"] <= t["high"]
        assert t["loaded_us"] > 0
        assert t["gbps"] == pytest.approx(t["size"] / t["us"] / 1e3)
    assert any(t["slowdown"] for t in document["times"])
    cluster = load_cluster(str(tmp_path / "my.yaml"))
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == ("my", 1, 2)
    assert (cluster.gpu.name, cluster.gpu.device) == (document["device"], "cpu")
    assert {
        name for name, constant in cluster.constants().items() if constant.source == "guess"
    } == {"gpu.step_ms", *HOST}
    assert cluster.inner.bandwidth_gbps.value == pytest.approx(
        document["fits"]["inner"][HOP]["gbps"], rel=1e-3
    )
    rates = {what: fit["gbps"] for what, fit in document["fits"]["inner"].items()}
    assert cluster.inner.all_to_all_factor is not None
    assert cluster.inner.all_to_all_factor.value == pytest.approx(
        rates[GATHER] / rates[ALL_TO_ALL], rel=1e-3
    )
    assert (tmp_path / "my.yaml").read_text() == (
        tmp_path / "measurements/one/cluster.yaml"
    ).read_text()
    assert (tmp_path / "my.yaml").read_text().startswith("# Measured on 2 x ")


@pytest.mark.slow
def test_links_within_and_between_nodes_are_measured_separately(tmp_path):
    words = split(
        "topology.device=cpu topology.workers=4 topology.gpus_per_node=2 --sizes",
        "4k,64k --repeats 3",
    )
    result = mtrain(tmp_path, "profile", "links", *words, "run.name=four")
    assert result.returncode == 0, result.stderr
    document = json.loads((tmp_path / "measurements/four/links.json").read_text())
    assert document["virtual_nodes"]
    assert {(t["link"], t["ranks"]) for t in document["times"]} == {("inner", 2), ("outer", 2)}
    assert {t["what"] for t in document["times"] if t["link"] == "outer"} == {
        HOP,
        HOPS_AT_ONCE,
        TWO_HOPS,
        GATHER,
        SCATTER,
        ALL_TO_ALL,
    }
    cluster = load_cluster(str(tmp_path / "measurements/four/cluster.yaml"))
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 2)
    assert cluster.outer is not None
    assert cluster.outer.shared_by.value in (1, 2)
    assert "nodes are parts of one host" in cluster.outer.latency_us.note
    assert "no network" in result.stdout
    # Without a terminal, there is no progress bar.
    assert "measuring inner hop, 1 of 11\n" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "4k"], "--sizes 4k: a latency and a bandwidth need at least two sizes"),
        (["--sizes", "4k,1"], "--sizes 4k,1: each must be from 64 bytes to 4g"),
        (["--sizes", "4k,many"], "--sizes 4k,many: many is not a number; give items such as"),
        (["--repeats", "1"], "--repeats 1: must be at least 3"),
        (["topology.workers=1"], "topology.workers=1: there are no links to measure; give at"),
        (["topology.workers=4", "topology.gpus_per_node=3"], "topology.gpus_per_node=3: does not"),
        (["topology.context_parallel=1", "train.global_batch=2"], "topology.context_parallel=1:"),
        (["--cluster-out", "mine.txt"], "--cluster-out mine.txt: give a file that ends in .yaml"),
        (["--cluster-out", "notes.yaml"], "--cluster-out notes.yaml: exists and is not a"),
        (["--cluster-out", "notes.yaml/my.yaml"], "--cluster-out notes.yaml/my.yaml: cannot be"),
    ],
)
def test_mistakes_are_one_line_and_keep_existing_files(tmp_path: Path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.yaml").write_text("mine")
    result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(
        command_line.app, ["profile", "links", "topology.device=cpu", *words], prog_name="mtrain"
    )
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.yaml"]
    assert (tmp_path / "notes.yaml").read_text() == "mine"
