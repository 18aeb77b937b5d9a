"""What is predicted follows from settings, options and a recorded index, or is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from command import python_path
from commands.typed_line import DENSE, STRIPED, document, run, simulate
from masked_documents import masked_store
from simulation.recordings import SEQ, record

from mtrain_cli import resource_dir
from mtrain_cli.commands.simulate import SimulateOptions
from mtrain_cli.commands.simulate_request import Request, parse_job
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
    for word in ("topology.prefetch=2", "train.micro_batch=2"):
        refused = simulate("--index", str(path), word, "--workers 4 --no-files", STRIPED)
        assert refused.exit_code == 2
        assert f"{word}: has no effect on a recorded index without model=" in refused.stderr


def test_a_synthetic_index_respects_the_slash_limits_of_the_pattern():
    """At 16k there are 128."""

    def diagonals(*words: str, density: float | None = None) -> set[int]:
        asked = Request(
            ("model=tiny", "seq=16k", "sparsity=vertical_slash", *words),
            None,
            density,
            columns=0,
            layers=2,
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
        monkeypatch.setattr(Request, "compose", lambda *_: config)
        words = ("model=tiny", "seq=16k", "sparsity=nearest")
        return Request(words, None, density, columns, 1)

    return make


def test_a_prediction_keeps_the_bounds_of_a_users_pattern(nearest):
    """Of 128 blocks, the 4 longest slashes cover 506 of 8256 pairs of blocks."""
    index = nearest(density=0.06).scenario().problem.index(0)
    assert (int(index.slashes.sum(-1).max()), index.columns.shape[-1]) == (4, 1)
    line = nearest(nearest=2).describe_pairs("clustered")
    assert ": slashes on at most 3.09% of the blocks, plus 1 columns per head," in line
    line = nearest(share=0.0101).describe_pairs("clustered")
    assert ": slashes on 0.998% of the blocks, plus 1 columns per head," in line


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        # Of 128 blocks, 2 slashes cover at most 3.1 % of the pairs of blocks, and 20 up to 28 %.
        ({"min_slashes": 2}, "slashes on 5% of the blocks"),
        ({"min_slashes": 20}, "at least 20 slashes per head"),
        ({"min_slashes": 20, "max_slashes": 20}, "20 slashes per head"),
    ],
)
def test_a_line_says_how_many_slashes_a_pattern_forces(bounds, said):
    words = [f"sparsity.{name}={number}" for name, number in bounds.items()]
    request = Request(("seq=16k", "sparsity=vertical_slash", *words), None, None, None, 1)
    assert f": {said}, plus 2,048 columns per head" in request.describe_pairs("clustered")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": 2}, "columns=2: sparsity=nearest allows at most 1 per head"),
        ({"density": 0.07}, "density=0.07: sparsity=nearest covers at most 6.129% of the blocks"),
        (
            {"density": 0.02, "share": 0.01},
            "density=0.02: sparsity=nearest always computes 1.000% of the pairs",
        ),
    ],
)
def test_options_beyond_the_bounds_of_a_users_pattern_are_refused(nearest, options, said):
    with pytest.raises(ConfigError, match=f"^{said}$"):
        nearest(**options).scenario()


def test_a_relative_file_of_a_cluster_is_the_cluster_of_the_prediction(tmp_path):
    (tmp_path / "mine.yaml").write_text(shipped()["h200_1x8"].read_text())
    words = "model=tiny seq=16k --workers 4 --no-files"
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
    shape = ["model=tiny", "train.global_batch=2"]  # seq follows from the index
    for more, message in (
        (
            ["train.micro_batch=2", "model.num_layers=5"],
            "model.num_layers=5: index={} holds layer 5, of another model",
        ),
        (["model.num_layers=6"], "train.micro_batch=1: index={} holds 2 sequences"),
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
    assert f"seq=32768: index={path} was recorded with {SEQ}; leave it out" in lines[0]
    assert any("model.num_heads=16" in line for line in lines)
    for option, value in (("--density", "0.03"), ("--columns", "0")):
        found = run("simulate --index", str(path), option, value)
        assert found.exit_code == 2
        assert (
            f"{option[2:]}={float(value):g}: index={path} has its own pairs; give only"
            in found.stderr
        )


def test_a_slow_rank_needs_a_group_of_one_size():
    words = ("recommend", DENSE, "train.global_batch=8 --no-files", STRIPED)
    refused = simulate(*words, "--slow 3=2")
    assert refused.exit_code == 2, refused.output
    assert (
        "slow: this command tries context groups of several sizes; set "
        "topology.context_parallel=N" in refused.stderr
    )
    fixed = simulate(*words, "--slow 3=2 topology.context_parallel=4")
    assert fixed.exit_code == 0, fixed.output
    # Ranks are numbered over all workers and groups.
    assert simulate(*words, "--slow 7=2 topology.context_parallel=4").exit_code == 0
    beyond = simulate(*words, "--slow 8=2 topology.context_parallel=4")
    assert (
        beyond.exit_code,
        "slow=8=2: there is no such rank; allowed: 0 to 7" in beyond.stderr,
    ) == (2, True)
    # `auto` is no size.
    assert simulate(*words, "--slow 3=2 topology.context_parallel=auto").exit_code == 2


def test_cpu_workers_get_no_message_about_cuda(tmp_path):
    """Attention on CPUs is predicted in float32; whole steps are refused in one line."""
    made = yaml.safe_load((resource_dir("conf") / "cluster/h200_1x8.yaml").read_text())
    for gpu in ({"name": "AMD EPYC 9654"}, {"name": "some chip", "device": "cpu"}):
        made["gpu"] |= gpu
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(made))
        words = ("model=tiny seq=16k --columns 64 --cluster mine.yaml", STRIPED)
        for more in (("run",), ("recommend",), ("workers=2,4",)):
            refused = simulate(*more, *words, "--no-files")
            assert refused.exit_code == 2
            message = (
                f"cluster=mine.yaml: {gpu['name']} is a CPU, and steps are predicted for GPUs only"
            )
            assert refused.stderr.startswith(f"mtrain: {message}")
        alone = document(*words, "--attention-only")
        assert alone["cases"][0]["kernel"] == "sdpa"
        assert not [remark for remark in alone["predicted"][0]["remarks"] if "triton" in remark]
        typed = document(*words, "topology.device=cpu --attention-only")
        assert alone["predicted"] == typed["predicted"]
        refused = simulate(*words, "topology.device=cuda --attention-only --no-files")
        assert f"topology.device=cuda: mine has {gpu['name']}; allowed: cpu" in refused.stderr
    made["gpu"]["device"] = "tpu"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(made))
    assert "mine.yaml: gpu.device=tpu: allowed: cuda, cpu" in simulate(*words, "--no-files").stderr


def test_invalid_settings_are_reported_before_importing_torch():
    """Uses a process of its own, since this one has imported it."""
    wrong = [
        "model=tinyy",
        "train.micro_batch=3",
        "workers=30",
        "--slow 99=2",
        "--slow 1=x",
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


@pytest.mark.parametrize(
    ("words", "casts"),
    [
        (["cluster=a100_4x8"], []),
        (["mask=sliding_window"], ["group_cast"]),
        (["mask=sliding_window", "cluster=a100_4x8"], ["group_cast", "hierarchical_group_cast"]),
    ],
)
@pytest.mark.parametrize("every", [False, True])
def test_group_casts_are_compared_under_a_mask_other_than_causal(words, casts, every):
    typed = SimulateOptions(overrides=[*words, "seq=4k"])
    job = parse_job(typed, every_exchange=every)
    assert [name for name in job.exchanges if "cast" in name] == casts
    swept = parse_job(SimulateOptions(overrides=[*words, "seq=4k", "density=2%,5%"]))
    assert swept.axes == {"density": ["2%", "5%"]}
    assert [name for name in swept.exchanges if "cast" in name] == casts


def test_the_layout_and_the_exchange_of_a_recipe_are_compared_too(tmp_path):
    store = masked_store(tmp_path)
    recipe = ["recipe=shared_question", f"data.path={store}", "data.positions_key=at"]
    usual, chosen = (parse_job(SimulateOptions(overrides=words)) for words in ([], recipe))
    assert chosen.layouts == [*usual.layouts, "balanced"]
    assert chosen.exchanges == [*usual.exchanges, "group_cast"]
    one = parse_job(SimulateOptions(overrides=recipe, layout="zigzag", exchange="ring"))
    assert (one.layouts, one.exchanges) == (["zigzag"], ["ring"])
    rings = ["topology.exchange=hierarchical_ring", "topology.layout=auto"]
    assert parse_job(SimulateOptions(overrides=rings)).exchanges == ["hierarchical_ring"]
    on_one_node = parse_job(SimulateOptions(overrides=["topology=hierarchical"]))
    assert set(usual.exchanges) <= set(on_one_node.exchanges)
