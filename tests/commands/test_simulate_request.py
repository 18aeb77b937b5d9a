"""What is predicted follows from settings, options and a recorded index, or is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from commands.typed_line import STRIPED, document, run, simulate
from simulation.recordings import SEQ, record

from mtrain_cli.commands.simulate_request import SimulateRequest
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import shipped
from mtrain_cli.config.pattern_settings import SparseSettings
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.training.planning import make_plan


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_a_model_ineffective_settings_are_refused(tmp_path):
    path = record(tmp_path / "one", "vertical_slash")
    for word in ("topology.prefetch=2", "train.kernel=sdpa"):
        refused = simulate("--index", str(path), word, "--workers 4 --no-files", STRIPED)
        assert refused.exit_code == 2
        assert (
            f"{word}: has no effect without model=, because --index {path} gives only the shape "
            "of attention; add model=NAME" in refused.stderr
        )


@pytest.mark.parametrize("index", [None, "local", "clustered", "uniform", "drifting"])
def test_a_family_respects_the_slash_limits_of_the_pattern(index):
    """At 16k there are 128."""

    def diagonals(*words: str, density: float | None = None) -> set[int]:
        asked = SimulateRequest(
            ("model=tiny", "seq=16k", "sparsity=vertical_slash", *words),
            index,
            density,
            0,
            2,
            "auto",
            None,
            "",
            0.0,
        )
        problem = asked.scenario().problem
        return {int(n) for layer in (0, 1) for n in problem.index(layer).slashes.sum(-1).flatten()}

    assert diagonals("sparsity.max_slashes=3") == {3}
    assert diagonals("sparsity.min_slashes=32") == {32}
    assert diagonals("sparsity.min_slashes=9", "sparsity.max_slashes=9") == {9}
    free = diagonals()
    assert all(3 <= n < 32 for n in free)
    assert diagonals("sparsity.min_slashes=1", "sparsity.max_slashes=100") == free
    assert min(diagonals(density=0.5)) > 30


@dataclass(frozen=True)
class NearestSettings(SparseSettings):
    """A pattern of a user: some slashes, and the first token."""

    name: ClassVar[str] = "nearest"
    nearest: int = 4
    share: float | None = None

    @property
    def column_bound(self) -> int:
        return 1

    def slash_bound(self, blocks: int) -> int:  # noqa: ARG002
        return self.nearest

    def known_density(self, seq: int) -> float | None:  # noqa: ARG002
        return self.share


@pytest.fixture
def nearest(monkeypatch):
    """Return requests that predict sparsity=nearest."""

    def make(density=None, columns=None, **settings):
        pattern = NearestSettings(block=128, **settings)
        config = replace(compose(["model=tiny", "seq=16k"]), sparsity=pattern)
        monkeypatch.setattr(SimulateRequest, "compose", lambda *_: config)
        words = ("model=tiny", "seq=16k", "sparsity=nearest")
        return SimulateRequest(words, None, density, columns, 1, "auto", None, "", 0.0)

    return make


def test_a_prediction_keeps_the_bounds_of_a_users_pattern(nearest):
    """Of 128 blocks, the 4 longest slashes cover 506 of 8256 pairs of blocks."""
    index = nearest(density=0.06).scenario().problem.index(0)
    assert (int(index.slashes.sum(-1).max()), index.columns.shape[-1]) == (4, 1)
    line = nearest(nearest=2).describe_pairs("clustered")
    assert ": slashes on at most 3.09% of the blocks, plus 1 column per head," in line
    line = nearest(share=0.0101).describe_pairs("clustered")
    assert ": slashes on 0.998% of the blocks, plus 1 column per head," in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": 2}, "--columns 2: sparsity=nearest allows at most 1 per head; give fewer"),
        (
            {"density": 0.07},
            "--density 0.07: sparsity=nearest chooses at most 4 slashes per head, which cover at "
            "most 6.13% of the blocks; give at most that",
        ),
        (
            {"density": 0.02, "share": 0.01},
            "--density 0.02: sparsity=nearest always computes 1% of the pairs; leave it out",
        ),
    ],
)
def test_options_beyond_the_bounds_of_a_users_pattern_are_refused(nearest, options, said):
    with pytest.raises(ConfigError, match=f"^{said}$"):
        nearest(**options).scenario()


def test_a_relative_file_of_a_cluster_is_the_cluster_of_the_prediction(tmp_path):
    (tmp_path / "mine.yaml").write_text(shipped()["h200_1x8"].read_text())
    words = "model=tiny seq=16k --workers 4 --exchange ring --no-files"
    for cluster in ("topology.cluster=mine.yaml", "topology.cluster=mine.yaml cluster=mine.yaml"):
        assert simulate(cluster, words, STRIPED).exit_code == 0


@pytest.mark.parametrize("more", ["", "--attention-only"])
def test_automatic_choices_take_the_rates_of_the_predicted_cluster(more):
    """Links with a tenth of the bandwidth make stages pay, which they do not on H100s."""
    content = yaml.safe_load(shipped()["h100_4x8"].read_text())
    for link in content["links"].values():
        for key in ("capacity_gbps", "collective_bandwidth_gbps", "bandwidth_gbps"):
            if key in link:
                link[key] = {"value": link[key]["value"] / 10, "source": "guess"}
    Path("slow.yaml").write_text(yaml.safe_dump(content))
    words = "model=qwen3b seq=512k mask=sliding_window mask.window=32k --layout zigzag"
    words += f" --exchange hierarchical_group_cast {more}"

    def exchange(cluster: str) -> str:
        return document(words, cluster)["cases"][0]["exchange"]

    config = compose(["model=qwen3b", "seq=512k", "mask=sliding_window", "mask.window=32k"])
    for cluster in ("h100_4x8", "slow.yaml"):
        topology = {"cluster": cluster, "layout": "zigzag", "exchange": "hierarchical_group_cast"}
        planned = make_plan(config.changed(topology={**topology, "device": "cuda"}))
        assert exchange(f"--cluster {cluster}") == planned.exchange.label
        assert exchange(f"topology.cluster={cluster}") == planned.exchange.label
        assert ("stages" in planned.exchange.label) == (cluster == "slow.yaml")


def test_an_index_of_another_model_is_refused(tmp_path):
    path = record(tmp_path / "one", "vertical_slash")
    shape = ["model=tiny", f"seq={SEQ}", "train.global_batch=2"]
    for more, message in (
        (
            ["train.micro_batch=2", "model.num_layers=5"],
            "model.num_layers=5: --index {} holds layer 5, so it is from another model",
        ),
        (["model.num_layers=6"], "train.micro_batch=1: --index {} holds 2 sequences"),
    ):
        found = run("simulate", *shape, *more, "--index", str(path), "--json --no-files")
        assert found.exit_code == 2
        assert message.format(path) in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1
    good = run(
        "simulate",
        *shape,
        "model.num_layers=6 train.micro_batch=2 --workers 4 --index",
        str(path),
        "--json --no-files",
    )
    assert good.exit_code == 0, good.stderr
    assert all(
        entry["step"]["seconds"]["value"] > 0 for entry in json.loads(good.stdout)["predicted"]
    )


def test_an_index_of_another_shape_is_refused(tmp_path):
    path = record(tmp_path, "vertical_slash")
    found = run("simulate model=qwen3b seq=32k --index", str(path))
    assert found.exit_code == 2
    lines = found.stderr.strip().splitlines()
    assert f"seq=32768: --index {path} was recorded with {SEQ}; leave it out" in lines[0]
    assert any("model.num_heads=16" in line for line in lines)
    for option, value in (("--density", "0.03"), ("--columns", "0")):
        found = run("simulate --index", str(path), option, value)
        assert found.exit_code == 2
        assert (
            f"{option} {value}: --index {path} has its own pairs; give only one of the two"
            in found.stderr
        )
