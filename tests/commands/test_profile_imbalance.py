"""`mtrain profile imbalance` on CPU processes: cases, consistent files, and refused options."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import mtrain
from commands.replay import replayed
from commands.typed_line import split
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.commands.profile_imbalance import _cases
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.recording import COMPUTING
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.records.index_file import load_indices
from mtrain_cli.records.record_files import open_records

SHAPE = "topology.device=cpu topology.block_size=32 model.num_layers=2"
SMALL = ("seq=512", SHAPE)
SPARSE = (
    "sparsity.block=32 sparsity.last_q=32 sparsity.min_slashes=3",
    "sparsity.max_slashes=3 sparsity.max_columns=64",
)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return mtrain(folder, "profile", "imbalance", *split(*words))


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    """Two layouts and two patterns on three workers, two steps."""
    folder = tmp_path_factory.mktemp("profile")
    words = [
        "--layout zigzag,striped --pattern dense,vertical_slash --steps 2",
        "topology.workers=3 topology.exchange=ring",
    ]
    result = run(folder, *words, *SMALL, *SPARSE, "run.name=one")
    assert result.returncode == 0, result.stderr
    (folder / "stdout").write_text(result.stdout)
    return folder / "measurements/one"


def test_all_cases_are_measured_on_the_same_steps(profile):
    recorded = open_records(profile)
    assert recorded.complete
    assert recorded.summary["mode"] == "training"
    frame = recorded.frame()
    labels = [case["label"] for case in recorded.summary["cases"]]
    assert labels == [
        f"{p} {layout} ring"
        for p in ("dense", "vertical_slash")
        for layout in ("zigzag", "striped")
    ]
    for case in range(4):
        mine = frame[frame.case == case]
        assert set(mine["rank"]) == {0, 1, 2}
        assert set(mine.iteration) == {2, 3}  # the first step of the training is a warm-up
        assert set(mine.layer) == {-1, 0, 1}
        attention = mine[mine.phase == "attention"]
        for direction in ("forward", "backward"):
            assert set(attention.step[attention.direction == direction]) == {0, 1, 2}
        assert bool((mine.phase == "index").any()) == labels[case].startswith("vertical")
    # Layouts see the same tokens and weights, so the same indices and the same total work.
    forward = frame[frame.direction == "forward"].groupby(["case", "iteration", "layer"])
    work = forward.pairs.sum().unstack("case")
    assert (work[0] == work[1]).all()
    assert (work[2] == work[3]).all()
    assert (work[2] < 0.8 * work[0]).all()


def test_every_moment_of_every_pass_has_one_reason(profile):
    frame = open_records(profile).frame()
    key = ["case", "iteration", "rank", "layer", "direction"]
    parts = frame[frame.phase.isin(COMPUTING)].groupby(key, observed=True).dur_us.sum()
    whole = frame[frame.phase == "pass"].groupby(key, observed=True).dur_us.sum()
    assert len(whole) == 4 * 2 * 3 * 2 * 2
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    of_rank = ["case", "iteration", "rank"]
    iteration = frame[frame.phase == "iteration"].groupby(of_rank).dur_us.sum()
    assert (whole.groupby(of_rank).sum() < iteration).all()


def test_recorded_work_equals_the_schedules(profile):
    """The recorded counts equal those of a ring's steps, counted here from the layouts alone."""
    recorded = open_records(profile)
    frame = recorded.frame()
    schedule = make_schedule("ring", ScheduleOptions(3, 3))
    for case, layout in ((0, "zigzag"), (1, "striped")):
        indices = load_indices(profile / "index.npz")
        first = indices.masks[0].first
        held = make_layout(layout, 3, 512, 32)
        mine = frame[
            (frame.case == case)
            & (frame.iteration == 3)
            & (frame.layer == 1)
            & (frame.direction == "forward")
        ]
        for rank in range(3):
            for step, planned in enumerate(schedule.forward[rank]):
                q, k = held.positions(rank), held.positions(planned.keys[0])
                q = q[q < 512]
                start = np.array([first[p] for p in q])
                allowed = ((k[None] <= q[:, None]) & (k[None] >= start[:, None])).sum()
                row = mine[
                    (mine["rank"] == rank) & (mine.step == step) & (mine.phase == "attention")
                ]
                assert int(row.pairs.sum()) == 4 * allowed, (layout, rank, step)
                assert float(row.flop.sum()) == 4 * 32 * 4 * allowed
        backward = frame[
            (frame.case == case) & (frame.direction == "backward") & (frame.phase == "attention")
        ]
        assert (backward.flop == 10 * 32 * backward.pairs).all()


def test_saved_indices_match_the_recorded_steps(profile):
    indices = load_indices(profile / "index.npz")
    assert indices.patterns == ("dense", "vertical_slash")
    assert indices.layers("vertical_slash") == (0, 1)
    assert indices.index("dense", 0) is None
    index = indices.index("vertical_slash", 1)
    assert index.block == 32
    assert int(index.slashes.sum(-1).max()) <= 3 + 1
    assert indices.setup.workers == 3
    assert indices.masks[0].length == 512


def test_attention_alone_at_several_lengths(tmp_path):
    words = [
        "--attention-only --layout striped --exchange ring,all_gather --seq 512,1k",
        "--steps 2",
    ]
    result = run(tmp_path, *words, "topology.workers=2", SHAPE, "run.name=one")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum("dense striped" in line and "%" in line for line in lines) >= 4
    recorded = open_records(tmp_path / "measurements/one")
    assert recorded.complete
    assert recorded.summary["mode"] == "attention"
    for case in recorded.summary["cases"]:
        assert case["forward_ms"] > 0
        assert case["backward_ms"] > 0
        assert case["density"] == pytest.approx(1.0)
    frame = recorded.frame()
    assert set(frame.layer) == {-1, 0}
    flop = frame.groupby("direction").flop.sum()
    assert flop["backward"] == pytest.approx(2.5 * flop["forward"])  # five products against two
    assert [case["seq"] for case in recorded.summary["cases"]] == [512, 512, 1024, 1024]


def test_json_serves_scripts(tmp_path):
    words = ["--layout contiguous,striped --exchange all_gather --steps 1 --json"]
    words += ["data.document_mask=false"]
    result = run(tmp_path, *words, "topology.workers=2", *SMALL)
    # Contiguous: the second of two workers has three quarters of the pairs.
    assert result.returncode == 0
    summary = json.loads(result.stdout)
    assert [round(r["work"]["worker"]["mean"], 2) for r in summary["results"]] == [1.5, 1.06]


TWO_RINGS = ["dense zigzag ring", "vertical_slash zigzag ring"]


def compared(words: str, **options: list[str]) -> tuple[list[str], str, list[Any]]:
    """Return the labels of the cases, the remark for the user, and the configurations."""
    typed = {f"--{name}": options.get(name, []) for name in ("exchange", "pattern", "seq")}
    cases, remark = _cases(words.split(), {"--layout": ["zigzag"], **typed})
    return [label for label, _ in cases], remark, [config for _, config in cases]


def test_without_exchange_and_pattern_a_sparse_ring_is_compared_with_a_dense_one():
    labels, remark, (_, sparse) = compared("topology.device=cpu")
    assert labels == TWO_RINGS
    settings = sparse.sparsity
    assert (sparse.seq, settings.block) == (1024, 16)
    assert (settings.max_slashes, settings.max_columns) == (4, 64)
    # The printed words give the same cases, so a user can start from them.
    words = remark.partition("one: ")[2].partition(". To")[0].split()
    options = dict(zip(words[0:4:2], words[1:4:2], strict=True))
    assert [word for word in words[4:] if "=" not in word] == []
    same = compared(
        " ".join(["topology.device=cpu", *words[4:]]),
        exchange=[options["--exchange"]],
        pattern=options["--pattern"].split(","),
    )
    assert same[0] == labels
    assert [case.sparsity for case in same[2]] == [case.sparsity for case in compared("")[2]]
    assert [case.seq for case in same[2]] == [1024, 1024]


@pytest.mark.parametrize(
    ("words", "seq", "block"),
    [("seq=2k", 2048, 16), ("seq=32k", 32768, 128), ("model=qwen3b", 4096, 16)],
)
def test_a_named_length_is_kept_and_gets_blocks_that_it_can_leave_out(words, seq, block):
    labels, _, (_, sparse) = compared(words)
    assert labels == TWO_RINGS
    assert (sparse.seq, sparse.sparsity.block) == (seq, block)
    kept = sparse.sparsity.max_slashes * block / seq + sparse.sparsity.max_columns / seq
    assert kept <= 1 / 8


@pytest.mark.parametrize(
    ("words", "options", "labels"),
    [
        ("", {"exchange": ["auto"]}, ["dense zigzag auto"]),
        ("", {"pattern": ["moba"]}, ["moba zigzag auto"]),
        ("topology.exchange=auto", {}, ["dense zigzag auto"]),
        ("topology=ulysses", {}, ["dense zigzag ulysses"]),
        ("topology.chunks=2", {}, ["dense zigzag auto"]),
        ("sparsity=moba", {}, ["moba zigzag auto"]),
        ("sparsity.pattern=dense", {}, ["dense zigzag auto"]),
        ("recipe=stdlib_8k", {}, ["vertical_slash zigzag auto"]),
        # Masks that a sparse index does not allow, and a sequence shorter than its probe.
        ("mask=full", {}, ["dense zigzag auto"]),
        ("mask=sliding_window mask.full_every=2", {}, ["dense zigzag auto"]),
        ("seq=12", {}, ["dense zigzag auto"]),
    ],
)
def test_what_the_user_chose_is_measured_as_it_is(words, options, labels):
    assert compared(words, **options)[:2] == (labels, "")


def test_the_mask_of_a_sparse_ring_is_the_users():
    labels, _, (dense, _) = compared("mask=sliding_window mask.window=64")
    assert labels == TWO_RINGS
    assert dense.mask.window == 64


def test_profile_balance_is_the_same_command():
    runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"})
    pages = [
        runner.invoke(app, [*words, "--help"], prog_name="mtrain").output
        for words in (["profile-balance"], ["profile", "imbalance"])
    ]
    assert "Usage: mtrain profile-balance " in pages[0]
    balance, imbalance = (page.partition("Measure how")[2] for page in pages)
    assert balance == imbalance != ""
    assert "profile-balance" in runner.invoke(app, ["--help"], prog_name="mtrain").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout zigzig"], "--layout zigzig: no such layout (did you mean zigzag?); allowed:"),
        (["--pattern vertical"], "--pattern vertical: no such pattern (did you mean"),
        (["--layout ,"], "--layout ',': names nothing"),
        (["--layout zigzag topology.layout=zigzag"], "topology.layout=zigzag: --layout zigzag"),
        (["--pattern moba sparsity=moba"], "sparsity=moba: --pattern moba already compares this"),
        (["--pattern dense sparsity.p_v=0.5"], "sparsity.p_v=0.5: none of the patterns dense has"),
        (["--seq 512,1k"], "--seq 512,1k: only with --attention-only; otherwise give one length"),
        (["--peer seq=512"], "--peer: compares one layer's attention; add --attention-only"),
        (
            ["--peer --attention-only seq=512"],
            "--peer: PyTorch's context parallelism with cuDNN needs",
        ),
        (["--seq 512,x --attention-only"], "--seq x: expected"),
        (["--steps 0"], "--steps 0: must be at least 1"),
        (["--exchange all_gather,ring topology.chunks=2"], "topology.chunks=2: works only with"),
        (["recipe=shared_question data.path=nosuch"], "data.path=nosuch: no such file or folder"),
        (
            ["--attention-only recipe=shared_question data.path=nosuch"],
            "data.path=nosuch: no such file or folder",
        ),
    ],
)
def test_invalid_comparisons_are_one_line(tmp_path, words, message):
    result = run(tmp_path, *words, "topology.workers=2 topology.device=cpu")
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_simulator_counts_what_was_recorded(profile):
    """Real training steps with the indices of their last iteration: work must match exactly."""
    document = replayed(profile)
    assert document["not_predicted"] == []
    assert [case["case"] for case in document["cases"]] == [
        case["label"] for case in open_records(profile).summary["cases"]
    ]
    for case in document["cases"]:
        assert set(case["passes"]) == {"forward", "backward"}
        for of_pass in case["passes"].values():
            # 3 workers: pairs of 3 steps and of columns, blocks of 3 steps.
            assert of_pass["work_cells"] == 3 * (3 + 1 + 3)
            if case["case"].startswith("dense"):
                assert of_pass["work_cells_equal"] == of_pass["work_cells"]


@pytest.mark.slow
def test_a_replay_is_compared_with_the_micro_batch_that_it_repeats(tmp_path):
    documents = (json.dumps({"text": "abcdef" * (3 + 7 * i % 41)}) for i in range(300))
    (tmp_path / "documents.jsonl").write_text("\n".join(documents))
    words = "data=text data.path=documents.jsonl train.global_batch=2 topology.workers=2"
    ways = "topology.device=cpu --layout zigzag,balanced --exchange group_cast --steps 2"
    result = run(tmp_path, words, ways, "run.name=one")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "measurements/one"
    frame = open_records(folder).frame()
    sums = frame[frame.case == 0].groupby(["iteration", "micro"]).pairs.sum()
    assert sums.nunique() == len(sums) == 4, "documents differ"
    for case in replayed(folder)["cases"]:
        assert sum("the first micro-batch of the last" in line for line in case["remarks"]) == 1


@pytest.mark.slow
def test_tensor_groups_are_profiled_and_replayed(tmp_path):
    """Four ranks: two tensor groups. The replay counts the pairs of the first worker's heads."""
    words = ["topology.workers=4 topology.tensor_parallel=2 topology.exchange=ring --steps 1"]
    result = run(tmp_path, *words, "--pattern dense,vertical_slash", *SMALL, *SPARSE, "run.name=tp")
    assert result.returncode == 0, result.stderr
    recorded = open_records(tmp_path / "measurements/tp")
    frame, (dense, _) = recorded.frame(), recorded.summary["cases"]
    assert (dense["workers"], dense["cp"], dense["tp"], dense["num_heads"]) == (4, 2, 2, 2)
    assert dense["density"] == pytest.approx(1)
    waits = frame[(frame.phase == "wait") & (frame.link == "tensor")]
    assert set(waits["rank"]) == {0, 1, 2, 3}
    # Workers of a tensor group compute other heads of the same tokens.
    pairs = frame[(frame.case == 0) & (frame.phase == "attention")].groupby("rank").pairs.sum()
    assert pairs[0] == pairs[1]
    assert pairs[2] == pairs[3]
    found = recorded.summary["results"][0]
    assert (found["workers"], found["groups"], found["tokens"]) == (2, 2, 512)
    assert len(found["tensor_ms"]["exposed"]) == 4
    replayed(tmp_path / "measurements/tp")


def test_attention_alone_needs_whole_layers(tmp_path):
    result = run(tmp_path, "--attention-only topology.tensor_parallel=2", *SMALL)
    assert result.returncode == 2
    assert "topology.tensor_parallel=2" in result.stderr


@pytest.mark.slow
def test_stages_of_a_pipeline_are_profiled_and_replayed(tmp_path):
    """Four ranks: two stages of two. The replay counts the pairs of each stage's layers."""
    words = ["topology.workers=4 topology.pipeline_parallel=2 topology.exchange=ring --steps 1"]
    words += ["train.global_batch=2"]
    result = run(tmp_path, *words, "--pattern dense,vertical_slash", *SMALL, *SPARSE, "run.name=pp")
    assert result.returncode == 0, result.stderr
    recorded = open_records(tmp_path / "measurements/pp")
    assert recorded.summary["cases"][0]["density"] == pytest.approx(1)
    for found in recorded.summary["results"]:
        assert (found["workers"], found["groups"]) == (2, 2)
        assert found["pipeline"]["formula"] == pytest.approx(1 / 3, rel=1e-4)
        assert len(found["pipeline"]["work_ms"]) == 2
    replayed(tmp_path / "measurements/pp")
