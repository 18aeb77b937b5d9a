"""`mtrain simulate`: table, JSON, files for `mtrain report`, and refused options."""

from __future__ import annotations

import json

import pytest
import yaml
from simulation.recordings import SEQ, record
from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line
from mtrain_cli.commands.simulate_args import SimulateRequest
from mtrain_cli.commands.simulate_output import brief_remark
from mtrain_cli.simulation.cluster import shipped
from mtrain_cli.simulation.sweep import axes

SMALL = ("model=tiny", "seq=16k", "--columns", "64", "--density", "0.1")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words: str, columns: int = 80):
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    return CliRunner(env=environment).invoke(command_line.app, list(words), prog_name="mtrain")


def test_every_configuration_is_one_row_at_any_width(tmp_path):
    for columns in (40, 200):
        found = run("simulate", *SMALL, "--no-files", columns=columns)
        assert (found.exit_code, found.stderr) == (0, "")
        rows = [
            line
            for line in found.stdout.splitlines()
            if line.strip().startswith(("zigzag", "striped"))
        ]
        # Within a node, hierarchical rings are plain rings.
        assert len(rows) == 4
    assert "h200_1x8 (1 x 8 NVIDIA H200), 8 workers, seq 16,384, clustered" in found.stdout
    assert "constants are guesses" in found.stdout
    assert not list(tmp_path.iterdir())


def test_without_sparsity_settings_it_predicts_dense_attention_and_says_so():
    words = (
        "simulate",
        "model=tiny",
        "seq=16k",
        "--layout",
        "zigzag",
        "--exchange",
        "ring",
        "--no-files",
    )

    def first(*more: str) -> str:
        found = run(*words, *more, columns=200)
        assert found.exit_code == 0, found.stderr
        return found.stdout.splitlines()[0]

    dense = "pairs  dense: all causal pairs, each sequence one document"
    asks = ", the default of mtrain train; use sparsity=, --density or --index for fewer"
    assert first() == dense + asks
    assert first("--recommend") == dense + asks
    assert first("--attention-only") == dense + asks
    assert first("sparsity=dense") == first("--index", "dense") == dense
    assert first("--sweep", "seq=16k,32k") == dense + asks
    drawn = "each sequence one document; use --index for those of a profile"
    assert (
        first("--density", "5%")
        == first("--sweep", "density=5%,10%")
        == f"pairs  synthetic (clustered), {drawn}"
    )
    assert first("--columns", "64", "--index", "local") == f"pairs  synthetic (local), {drawn}"
    assert (
        first("sparsity=vertical_slash")
        == f"pairs  synthetic (clustered) for sparsity=vertical_slash, {drawn}"
    )
    assert (
        first("sparsity=fixed") == "pairs  as drawn by sparsity=fixed, each sequence one document"
    )
    (default,), (typed,) = (
        json.loads(run(*words, *more, "--json").stdout)["predicted"]
        for more in ((), ("sparsity=dense",))
    )
    assert default == typed
    assert default["step"]["mfu"] > 0
    # A recipe sets the sparsity as a typed setting does.
    recipe = run(
        "simulate",
        "recipe=stdlib_64k",
        "--workers",
        "1",
        "--layout",
        "striped",
        "--exchange",
        "ring",
        "--no-files",
        columns=200,
    )
    assert "for sparsity=vertical_slash" in recipe.stdout.splitlines()[0], recipe.stderr


def test_its_files_can_be_reported_like_a_profile(tmp_path):
    found = run(
        "simulate",
        *SMALL,
        "train.activation_checkpoint=full",
        "--layers",
        "2",
        "--out",
        "mine",
        "--exchange",
        "ring",
        "--slow",
        "3=2",
        "--jitter",
        "0.1",
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
    shown = run("report", "mine", columns=200)
    assert shown.exit_code == 0, shown.stderr
    assert "rank 3" in shown.stdout
    assert (tmp_path / "mine/report.html").is_file()
    again = run("simulate", *SMALL, "--out", "mine", "--exchange", "ring")
    assert again.exit_code == 2
    assert "--out mine: already holds a profile or simulation" in again.stderr


def test_recorded_indices_on_another_cluster(tmp_path):
    path = record(tmp_path / "measurements/one", "vertical_slash")
    for index in (str(path), str(path.parent)):
        found = run(
            "simulate",
            "--index",
            index,
            "--cluster",
            "a100_4x8",
            "--workers",
            "8",
            "--exchange",
            "ring",
            "--json",
            "--no-files",
        )
        assert found.exit_code == 0, found.stderr
        document = json.loads(found.stdout)
        assert document["layers"] == [0, 3, 5]
        assert [case["seq"] for case in document["cases"]] == [SEQ, SEQ]
        assert "not calibrated on NVIDIA A100-SXM4-40GB" in document["predicted"][0]["remarks"][0]
        for predicted in document["predicted"]:
            assert predicted["ms"]["low"] < predicted["ms"]["value"] < predicted["ms"]["high"]


def test_a_density_may_be_a_percentage():
    words = (
        "simulate",
        "model=tiny",
        "seq=16k",
        "--columns",
        "64",
        "--layout",
        "zigzag",
        "--exchange",
        "ring",
        "--json",
        "--no-files",
    )
    found = [run(*words, "--density", density).stdout for density in ("20%", "0.2", "5%")]
    assert len({json.loads(text)["cases"][0]["density"] for text in found}) == 2
    assert json.loads(found[0])["cases"] == json.loads(found[1])["cases"]
    assert axes(["density=20%,0.05"]) == {"density": ["20%", "0.05"]}


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


def test_dense_attention_on_an_own_cluster(tmp_path):
    content = yaml.safe_load(shipped()["a800_4x8"].read_text()) | {"nodes": 2, "gpus_per_node": 4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    found = run(
        "simulate",
        "model=tiny",
        "seq=16k",
        "--cluster",
        "mine.yaml",
        "--index",
        "dense",
        "--json",
        "--no-files",
    )
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    assert (document["cluster"]["name"], document["workers"]) == ("mine", 8)
    assert {case["density"] for case in document["cases"]} == {1.0}


def test_step_parts_and_training_cost_are_printed():
    words = (
        "simulate",
        "model=qwen3b",
        "seq=8k",
        "--density",
        "5%",
        "--layout",
        "striped",
        "--exchange",
        "ring",
        "--no-files",
    )
    found = run(*words, "--tokens", "1b", "--json")
    (entry,) = json.loads(found.stdout)["predicted"]
    step = entry["step"]
    assert sum(step["parts_s"].values()) == pytest.approx(step["seconds"]["value"], rel=1e-4)
    assert step["dollars"] is None
    assert step["days"]["value"] == pytest.approx(
        1e9 / 8 / step["tokens_per_second_per_gpu"]["value"] / 86400, rel=1e-4
    )
    dry = run(
        "train", "model=qwen3b", "seq=8k", "sparsity=vertical_slash", "sparsity.max_columns=2048",
        "topology.exchange=ring", "topology.workers=8", "topology.device=cuda", "--dry-run",
    )  # fmt: skip
    total = next(line for line in dry.stdout.splitlines() if line.startswith("total"))
    assert f"{step['memory_bytes'] / 2**30:.2f} GiB" in total
    shown = run(*words, "--tokens", "1b", "--price", "2")
    assert (
        f"memory {step['memory_bytes'] / 2**30:.2f} GiB of 139.8 (132.8 usable) at its peak"
        in " ".join(shown.stdout.split())
    )
    assert "at $2 per GPU and hour" in " ".join(shown.stdout.split())
    unknown = run(
        "simulate",
        *SMALL,
        "--layout",
        "striped",
        "--exchange",
        "ring",
        "--no-files",
        "--tokens",
        "1b",
    )
    assert "cost unknown, give --price X" in " ".join(unknown.stdout.split())
    priced = run(
        "simulate",
        *SMALL,
        "--layout",
        "striped",
        "--exchange",
        "ring",
        "--no-files",
        "--price",
        "2",
    )
    assert "--price 2: has no effect without --tokens" in priced.stderr.replace("2.0", "2")


def test_a_sweep_prints_a_table_and_can_be_reported(tmp_path):
    words = (
        "simulate",
        "model=tiny",
        "--columns",
        "64",
        "--cluster",
        "a100_4x8",
        "--layout",
        "striped,zigzag",
        "--exchange",
        "ring",
    )
    found = run(
        *words,
        "--sweep",
        "seq=1k,32k nodes=1,2,4",
        "--tokens",
        "1e9",
        "--price",
        "1",
        "--out",
        "swept",
    )
    assert (found.exit_code, found.stderr) == (0, "")
    assert (
        len([line for line in found.stdout.splitlines() if line.strip().startswith(("1k", "32k"))])
        == 12
    )
    # Each reason why a row cannot be predicted stands once, below the table.
    assert (
        found.stdout.count("\nnot    1024 tokens in blocks of 128 are too few for so many workers")
        == 1
    )
    # Remarks on every row are printed once; remarks on some rows stay with them.
    flat = " ".join(found.stdout.split())
    assert (
        flat.count("note not calibrated on NVIDIA A100-SXM4-40GB")
        == flat.count("note the simulator: ")
        == 1
    )
    assert flat.count("note which pairs are computed is drawn (clustered)") == 1
    assert "means to use at most 95% of a GPU's memory and 90% of the host's" in flat
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
    shown = run("report", "swept", columns=200)
    assert shown.exit_code == 0, shown.stderr
    assert "predicted for a100_4x8" in shown.stdout
    page = (tmp_path / "swept/report.html").read_text()
    assert "Scaling" in page
    assert "Predicted steps" in page
    again = run(*words, "--sweep", "seq=32k", "--out", "swept")
    assert again.exit_code == 2
    assert "--out swept: already holds a profile or simulation" in again.stderr


def test_a_recommendation_is_reasoned_and_reported(tmp_path):
    words = (
        "simulate",
        "model=tiny",
        "seq=32k",
        "--columns",
        "64",
        "--cluster",
        "a100_4x8",
        "--nodes",
        "2",
    )
    found = run(*words, "--recommend", "--out", "best", "--price", "1", columns=200)
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
    assert run("report", "best").exit_code == 0
    content = yaml.safe_load(shipped()["a100_4x8"].read_text())
    content["gpu"]["hbm_gib"] = {"value": 1, "source": "guess"}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    none = run(
        "simulate",
        "model=tiny",
        "seq=32k",
        "--cluster",
        "small.yaml",
        "--recommend",
        "--exchange",
        "ring",
        "--no-files",
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
        "simulate",
        "model=qwen3b",
        "seq=64k",
        "--cluster",
        "new.yaml",
        "--layout",
        "striped",
        "--exchange",
        "ring",
        "--no-files",
        "--json",
    )
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    (entry,) = document["predicted"]
    assert "not calibrated on Unheard Of X9" in entry["remarks"][0]
    assert entry["step"]["seconds"]["high"] > 2.5 * entry["step"]["seconds"]["low"]
    gemm = document["cluster"]["constants"]["gpu.gemm_tflops"]
    assert (gemm["value"], gemm["low"], gemm["high"], gemm["source"]) == (385, 250, 475, "guess")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--price", "-1"], "--price -1: expected dollars per GPU and hour, at least 0"),
        (["--tokens", "many"], "--tokens many: expected a number of tokens such as 20b"),
        (["--tokens", "0"], "--tokens 0: expected a number of tokens"),
        (["--sweep", "nods=1"], "--sweep nods=1: nods cannot be swept; did you mean nodes?"),
        (["--sweep", "nodes=0"], "nodes=0: expected a whole number of at least 1"),
        (
            ["--sweep", "nodes=2"],
            "nodes=2: h200_1x8 does not describe links between nodes; allowed: 1, or --cluster "
            "a100_4x8, ",
        ),
        (["--sweep", "workers=4,9"], "--sweep workers=9: h200_1x8 has 8 GPUs; allowed: 1 to 8"),
        (["--sweep", "seq=32k,long"], "seq=long: expected a number of tokens"),
        (
            ["--sweep", "seq=512", "--density", "5%"],
            "--sweep seq=512: 512 tokens in blocks of 128 are too few for",
        ),
        (["--sweep", "nodes=1", "--recommend"], "--sweep and --recommend: give only one of them"),
        (["--sweep", "nodes=1", "--slow", "1=2"], "--slow 1=2: a rank means something else"),
        (["--recompute"], "--recompute: only with --attention-only"),
        (["--layers", "5"], "--layers 5: tiny has 4; allowed: 1 to 4"),
        (["train.dtype=float32"], "train.dtype=float32: kernels were measured in bfloat16 only"),
        (
            ["train.kernel=flash4"],
            "train.kernel=flash4: head_dim 32 is not 64 or 128; allowed on NVIDIA H200: auto",
        ),
        (["sparsity=moba"], "sparsity=moba: there are no synthetic block lists"),
        (["sparsity=dense", "--index", "local"], "--index local: contradicts sparsity=dense"),
        (["sparsity=fixed", "--columns", "3"], "--columns 3: sparsity=fixed has its own keys"),
        (
            ["sparsity=vertical_slash", "sparsity.max_slashes=9", "--density", "50%"],
            "--density 0.5: contradicts sparsity.max_slashes=9; leave one of them out",
        ),
        (
            ["sparsity=fixed", "--index", "uniform"],
            "--index uniform: contradicts sparsity=fixed, which draws its own index",
        ),
        (
            ["topology.workers=4"],
            "topology.workers=4: --workers, --nodes",
        ),
        (["topology.device=cpu"], "topology.device=cpu: h200_1x8 has GPUs; allowed: auto, cuda"),
        (["topology.context_parallel=3"], "topology.context_parallel=3: must divide the 8 workers"),
        (
            ["topology.context_parallel=4"],
            "train.global_batch=1: must be a multiple of 2 = 2 context groups",
        ),
        (
            ["--layout", "zigzig"],
            "--layout zigzig: unknown; did you mean zigzag?; allowed: contiguous, zigzag, striped",
        ),
        (["--exchange", "rong"], "--exchange rong: unknown; did you mean ring?"),
        (
            ["--kernel", "flsh4"],
            "--kernel flsh4: unknown; did you mean flash4?; allowed: auto, reference, sdpa, "
            "triton, flash4",
        ),
        (["--cluster", "h200"], "--cluster h200: no such cluster"),
        (["--nodes", "0"], "--nodes=0: must be at least 1"),
        (["--workers", "9"], "--workers 9: h200_1x8 has 8 GPUs; allowed: 1 to 8"),
        (["--workers", "65"], "--workers 65: h200_1x8 has 8 GPUs; allowed: 1 to 8 on its one node"),
        (
            ["--workers", "65", "--cluster", "a100_4x8"],
            "--workers 65: a100_4x8 has 32 GPUs; allowed: 1 to 32, or more with --nodes 9",
        ),
        (
            ["--workers", "65", "cluster=a100_4x8", "--nodes", "9", "--recommend"],
            "--workers 65: a100_4x8 has nodes of 8 GPUs, and several nodes must be filled; "
            "allowed: 1 to 8, or multiples of 8 such as 64 or 72",
        ),
        (
            ["--sweep", "workers=65", "cluster=a100_4x8", "--nodes", "9"],
            "topology.workers=65: a100_4x8 has nodes of 8 GPUs",
        ),
        (
            ["cluster=a100_4x8", "--cluster", "h100_4x8"],
            "cluster=a100_4x8: --cluster h100_4x8 names another; give one of them",
        ),
        (["cluster=a100_4x9"], "--cluster a100_4x9: no such cluster; did you mean a100_4x8?"),
        (
            ["--index", "nothing"],
            "--index nothing: is neither a file nor a folder with index.npz; also allowed: dense, "
            "local,",
        ),
        (["--density", "0"], "--density 0: must be above 0 and at most 1"),
        (
            ["--density", "120%"],
            "--density 120%: must be above 0 and at most 1, such as 0.05 or 5%",
        ),
        (["--density", "few"], "--density few: must be above 0 and at most 1, such as 0.05 or 5%"),
        (
            ["--sweep", "density=5,20%"],
            "--sweep density=5,20%: density=5: must be above 0 and at most 1, such as 0.05 or 5%",
        ),
        (["--slow", "9=2"], "--slow 9=2: there is no rank 9; allowed: 0 to 7"),
        (["--slow", "fast"], "--slow fast: expected RANK=X, such as 3=1.5"),
        (["--jitter", "-1"], "--jitter -1: must be between 0 and 2"),
        (["--calibration", "no.json"], "--calibration no.json: no such file"),
        (
            ["seq=1k", "--cluster", "h100_4x8", "--layout", "striped"],
            "--workers 32: 1024 tokens in blocks of",
        ),
        (["model=huge"], "model=huge: no such model"),
        (["--exchange", "ulysses", "--cluster", "h100_4x8"], "--exchange ulysses: cannot share"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, message):
    before = sorted(tmp_path.iterdir())
    found = run(
        "simulate",
        *([] if any(w.startswith(("seq", "model")) for w in words) else ["model=tiny", "seq=16k"]),
        *words,
    )
    assert found.exit_code == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


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
        found = run("simulate", *shape, *more, "--index", str(path), "--json", "--no-files")
        assert found.exit_code == 2
        assert message.format(path) in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1
    good = run(
        "simulate",
        *shape,
        "model.num_layers=6",
        "train.micro_batch=2",
        "--workers",
        "4",
        "--index",
        str(path),
        "--json",
        "--no-files",
    )
    assert good.exit_code == 0, good.stderr
    assert all(
        entry["step"]["seconds"]["value"] > 0 for entry in json.loads(good.stdout)["predicted"]
    )


def test_an_index_of_another_shape_is_refused(tmp_path):
    path = record(tmp_path, "vertical_slash")
    found = run("simulate", "model=qwen3b", "seq=32k", "--index", str(path))
    assert found.exit_code == 2
    lines = found.stderr.strip().splitlines()
    assert f"seq=32768: --index {path} was recorded with {SEQ}; leave it out" in lines[0]
    assert any("model.num_heads=16" in line for line in lines)
    for option, value in (("--density", "0.03"), ("--columns", "0")):
        found = run("simulate", "--index", str(path), option, value)
        assert found.exit_code == 2
        assert (
            f"{option} {value}: --index {path} has its own pairs; leave one of them out"
            in found.stderr
        )
