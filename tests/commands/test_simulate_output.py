"""The tables and lines that `mtrain simulate` prints."""

from __future__ import annotations

import json

import pytest
from commands.typed_line import DENSE, SMALL, STRIPED, document, run, simulate


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_configuration_is_one_row_at_any_width(tmp_path):
    for columns in (40, 200):
        found = run("simulate", SMALL, "--no-files", columns=columns)
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


def test_the_second_line_names_the_kernel_of_every_command():
    words = "model=qwen3b seq=16k --layout zigzag --exchange ring --no-files"
    for command, more, kernels in (
        ("run", "sparsity=dense", "flash4"),
        ("run", "--density 5% --kernel triton", "triton"),
        ("run", "--attention-only", "flash4"),
        ("recommend", "train.kernel=sdpa", "sdpa"),
        ("sweep", "train.kernel=flash4,sdpa", "flash4, sdpa"),
    ):
        found = run("simulate", command, words, more, columns=200)
        assert found.exit_code == 0, found.stderr
        expected = f"kernel {kernels}, with all packages installed"
        assert found.stdout.splitlines()[1] == expected
    found = run("simulate", "run", words, "--json")
    content = json.loads(found.stdout)
    assert content["cases"][0]["kernel"] == content["predicted"][0]["step"]["kernel"] == "flash4"


@pytest.mark.slow
def test_without_sparsity_settings_it_predicts_dense_attention_and_says_so():
    words = "model=tiny seq=16k --layout zigzag --exchange ring --no-files"

    def first(*more: str, command: str = "run") -> str:
        found = run("simulate", command, words, *more, columns=200)
        assert found.exit_code == 0, found.stderr
        return found.stdout.splitlines()[0]

    dense = "pairs  dense: all causal pairs, each sequence one document"
    asks = ", the default of mtrain train; use sparsity=, --density or --index for fewer"
    assert first() == dense + asks
    assert first(command="recommend") == dense + asks
    assert first("--attention-only") == dense + asks
    window = "pairs  dense: all pairs of sliding_window, window 4,096, each sequence"
    assert first("mask=sliding_window").startswith(window)
    assert "full_every 2, each sequence" in first("mask=sliding_window", "mask.full_every=2")
    assert first("sparsity=dense") == first("--index dense") == dense
    assert first("seq=16k,32k", command="sweep") == dense + asks
    drawn = "each sequence one document; use --index for the pairs of a profile"
    assert first("density=5%,10%", command="sweep") == f"pairs  synthetic (clustered), {drawn}"
    for more, name, share, columns in (
        ("--density 5%", "(clustered)", "5%", "2,048"),
        ("--density 0.125 --columns 0", "(clustered)", "12.5%", "0"),
        ("--columns 64 --index local", "(local)", "5%", "64"),
        ("sparsity=vertical_slash", "(clustered) for sparsity=vertical_slash", "5%", "2,048"),
    ):
        asked = f"slashes on {share} of the blocks, plus {columns} columns per head"
        assert first(more) == f"pairs  synthetic {name}: {asked}, {drawn}"
    assert (
        first("sparsity=fixed") == "pairs  as drawn by sparsity=fixed, each sequence one document"
    )
    (default,), (typed,) = (
        json.loads(run("simulate", words, *more, "--json").stdout)["predicted"]
        for more in ((), ("sparsity=dense",))
    )
    assert default == typed
    assert default["step"]["mfu"] > 0
    # A recipe sets the sparsity as a typed setting does.
    recipe = run(
        "simulate recipe=stdlib_64k --workers 1 --layout striped --exchange ring --no-files",
        columns=200,
    )
    assert "for sparsity=vertical_slash" in recipe.stdout.splitlines()[0], recipe.stderr


def test_step_parts_and_training_cost_are_printed():
    words = (
        "simulate model=qwen3b seq=8k --density 5% --layout striped --exchange ring --no-files",
    )
    found = run(*words, "--tokens 1b --json")
    (entry,) = json.loads(found.stdout)["predicted"]
    step = entry["step"]
    assert sum(step["parts_s"].values()) == pytest.approx(step["seconds"]["value"], rel=1e-4)
    assert step["dollars"] is None
    assert step["days"]["value"] == pytest.approx(
        1e9 / 8 / step["tokens_per_second_per_gpu"]["value"] / 86400, rel=1e-4
    )
    dry = run(
        "train model=qwen3b seq=8k sparsity=vertical_slash",
        "sparsity.max_columns=2048 topology.exchange=ring topology.workers=8",
        "topology.device=cuda --dry-run",
    )
    total = next(line for line in dry.stdout.splitlines() if line.startswith("total"))
    assert f"{step['memory_bytes'] / 2**30:.2f} GiB" in total
    shown = run(*words, "--tokens 1b --price 2")
    assert (
        f"memory {step['memory_bytes'] / 2**30:.2f} GiB of 139.8 (132.8 usable) at its peak"
        in " ".join(shown.stdout.split())
    )
    assert "at $2 per GPU-hour" in " ".join(shown.stdout.split())
    unknown = run("simulate", SMALL, "--layout striped --exchange ring --no-files --tokens 1b")
    assert "cost unknown, give --price X" in " ".join(unknown.stdout.split())
    priced = run("simulate", SMALL, "--layout striped --exchange ring --no-files --price 2")
    assert "--price 2: has no effect without --tokens" in priced.stderr.replace("2.0", "2")


def test_mfu_is_shown_for_dense_attention_only():
    words = ("model=tiny seq=16k --workers 2", STRIPED)
    (dense,), (sparse,) = (
        document(*words, *more)["predicted"] for more in (("--index", "dense"), ("--columns", "64"))
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
        ("sweep", "model=tiny", "seq=1k,32k", "workers=2,16", "--cluster", "a100_4x8", STRIPED),
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
    assert "columns dropped to fit: " in result.stdout or "sweep" in words


def test_the_choice_of_auto_is_printed():
    words = (
        "model=qwen3b seq=128k --cluster h100_4x8 --layout striped --exchange",
        "all_gather --no-files --density 5%",
    )
    message = " ".join(simulate(*words, "train.memory=auto").stdout.split())
    assert "note train.memory=auto chooses train.shard=gradients" in message
    assert "auto takes" not in simulate(*words).stdout


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
    assert f"{rows['exposed']:.2f} + {rows['hidden']:.2f}" in shown
    assert "With expert parallelism, another wait is for rows of experts." in shown
    assert f"experts dealt over 4 workers: {rows['size'] / 2**30:.2f} GiB" in shown
    share = rows["exposed"] / entry["step"]["seconds"]["value"]
    assert f"waits for rows of experts {share:.1%}" in shown
    assert "4 ms per layer and micro-batch for the wait of the host" in shown
