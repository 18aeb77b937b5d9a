"""`mtrain profile imbalance` of models whose layers have different masks or patterns."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command import mtrain
from commands.replay import replayed
from commands.typed_line import split
from masked_documents import masked_store
from slow_cases import mostly_slow

from mtrain_cli.records.index_file import load_indices
from mtrain_cli.records.record_files import open_records

SHAPE = "topology.device=cpu topology.block_size=32 model.num_layers=2"
MIXED = (
    "mask=sliding_window mask.window=50 mask.full_every=2 topology.workers=2 model.num_layers=3",
    "topology.device=cpu topology.block_size=32 --layout zigzag,balanced --exchange ring",
)
SPARSE_KINDS = (
    "model=tiny", "model.num_layers=3", "seq=512", "topology.exchange=ring",
    "sparsity=vertical_slash", "sparsity.last_q=32", "sparsity.max_slashes=2",
    "sparsity.min_slashes=2", "sparsity.max_columns=64", "sparsity.dense_layers=1",
)  # fmt: skip


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return mtrain(folder, "profile", "imbalance", *split(*words))


def counted(folder: Path, case: int, iteration: int) -> dict[int, int]:
    """Return the recorded pairs of the forward pass of each layer."""
    frame = open_records(folder).frame()
    mine = frame[(frame.case == case) & (frame.iteration == iteration)]
    mine = mine[(mine.direction == "forward") & (mine.layer >= 0)]
    return {int(layer): int(rows.pairs.sum()) for layer, rows in mine.groupby("layer")}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """One step of three layers. The second layer is full, the others have a window."""
    folder = tmp_path_factory.mktemp("mixed")
    documents = (json.dumps({"text": "abcdef" * (10 + 7 * (i % 5))}) for i in range(200))
    (folder / "documents.jsonl").write_text("\n".join(documents) + "\n")
    words = [*MIXED, "data=text", f"data.path={folder / 'documents.jsonl'}", "seq=500"]
    result = run(folder, *words, "--steps 1 run.name=one")
    assert result.returncode == 0, result.stderr
    (folder / "stdout").write_text(result.stdout)
    return folder / "measurements/one"


def test_each_kind_of_layer_has_the_pairs_of_its_mask(mixed):
    indices = load_indices(mixed / "index.npz")
    assert indices.full is not None
    assert (indices.full.layers, indices.full.of) == ({1}, 3)
    # The start of each query's document is where the full mask starts.
    starts = indices.full.masks[0].first[:500]
    assert len(set(starts)) > 1, "several documents"
    earlier = np.arange(500) - starts + 1
    full, window = 4 * int(earlier.sum()), 4 * int(np.minimum(earlier, 50).sum())
    for case in (0, 1):
        assert counted(mixed, case, 2) == {0: window, 1: full, 2: window}


def test_tables_and_files_name_the_kind_of_layer(mixed):
    recorded = open_records(mixed)
    for facts in recorded.summary["cases"]:
        assert facts["layer_kinds"] == {"window": [0, 2], "full": [1]}
    events = json.loads((mixed / "trace.json").read_text())["traceEvents"]
    slices = [e["args"] for e in events if e["ph"] == "X"]
    assert {(args["layer"], args.get("layer_kind")) for args in slices} == {
        (-1, None), (0, "window"), (1, "full"), (2, "window"),
    }  # fmt: skip


def test_both_kinds_of_layers_are_replayed(mixed, tmp_path):
    assert len(replayed(mixed)["cases"]) == 2
    layouts = ["--layout", "zigzag,balanced", "--exchange", "ring,group_cast", "--json"]
    result = mtrain(tmp_path, "profile", "what-if", str(mixed), *layouts)
    assert result.returncode == 0, result.stderr
    for case in json.loads(result.stdout)["cases"]:
        assert sum(case["forward"]["pairs"]) == sum(counted(mixed, 0, 2).values())


@pytest.mark.slow
def test_attention_alone_measures_a_layer_of_each_kind(tmp_path):
    result = run(tmp_path, *MIXED, "--attention-only --steps 1 --seq 500,700 run.name=one")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "measurements/one"
    cases = open_records(folder).summary["cases"]
    assert sorted(facts["seq"] for facts in cases) == [500, 500, 700, 700], "two layouts each"
    for number, facts in enumerate(cases):
        seq, of_kinds = facts["seq"], facts["kinds"]
        assert counted(folder, number, 1) == {
            0: 4 * (50 * seq - 50 * 49 // 2),
            1: 4 * seq * (seq + 1) // 2,
        }
        assert list(of_kinds) == ["window", "full"]
        mean = sum(times["forward_ms"] for times in of_kinds.values()) / 2
        assert facts["forward_ms"] == pytest.approx(mean)
        assert of_kinds["full"]["density"] == 1
    replayed(folder)
    result = mtrain(tmp_path, "report", str(folder))
    assert result.returncode == 0, result.stderr
    with (folder / "tables/layers.csv").open() as file:
        measured = [row["layer"] for row in csv.DictReader(file)]
    assert measured == ["0", "1"] * 2 * 4, "both layers in both directions of four cases"


def test_a_dense_first_layer_is_recorded_and_predicted(tmp_path):
    words = [*SPARSE_KINDS, "sparsity.dense_layers=[0]", "--attention-only --steps 1 run.name=one"]
    result = run(tmp_path, *words)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "measurements/one"
    (facts,) = open_records(folder).summary["cases"]
    assert facts["layer_kinds"] == {"sparse": [1, 2], "dense": [0]}
    found = counted(folder, 0, 1)
    assert found[0] == 4 * (512 * 513 // 2) > found[1]
    replayed(folder)
    words = ["model=tiny model.num_layers=3 --workers 2 --json --no-files", f"--index {folder}"]
    predicted = mtrain(tmp_path, "simulate", *split(*words))
    assert predicted.returncode == 0, predicted.stderr
    assert json.loads(predicted.stdout)["cases"][0]["layer_kinds"] == facts["layer_kinds"]


@mostly_slow("alone", [False, True], keep=(1,))
def test_sparse_and_dense_layers_are_recorded_and_replayed(tmp_path, alone):
    words = ["--attention-only"] if alone else ["data.document_mask=false"]
    result = run(tmp_path, *SPARSE_KINDS, *words, "--steps 1 run.name=one")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "measurements/one"
    (facts,) = open_records(folder).summary["cases"]
    assert facts["layer_kinds"] == {"sparse": [0, 1], "dense": [2]}
    found = counted(folder, 0, 1 if alone else 2)
    assert found[2] == 4 * (512 * 513 // 2) > found[0]
    assert set(found) == ({0, 2} if alone else {0, 1, 2})
    if alone:
        sparse, dense = facts["kinds"]["sparse"], facts["kinds"]["dense"]
        assert dense["density"] == pytest.approx(1)
        assert sparse["density"] == pytest.approx(found[0] / found[2])
    replayed(folder)


@pytest.mark.parametrize("only", [pytest.param(True, marks=pytest.mark.slow), False])
def test_masks_of_the_data_are_measured(tmp_path, only):
    store = masked_store(tmp_path / "masked")
    words = [f"data=tokens data.path={store} data.mask_key=mask data.positions_key=at seq=150"]
    words += ["--attention-only"] if only else ["data.eval_sequences=0"]
    result = run(tmp_path, *words, SHAPE, "topology.workers=2 --steps 1 run.name=one")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "measurements/one"
    (mask,) = load_indices(folder / "index.npz").masks
    assert mask.intervals == 2
    pairs = counted(folder, 0, 1 if only else 2)
    assert set(pairs.values()) == {4 * mask.pairs}
    if only:
        # Each sequence has questions of 10 tokens with 4 answers of 6; the last one is cut.
        alone = question_pairs(10, 4, 6)
        whole, rest = divmod(150, 34)
        assert mask.pairs == whole * alone + question_pairs(10, 0, 6) + rest_of(rest - 10)


def question_pairs(first: int, answers: int, length: int) -> int:
    return first * (first + 1) // 2 + answers * (length * first + length * (length + 1) // 2)


def rest_of(tokens: int) -> int:
    """Return the pairs of the answers within this number of tokens, after a question of 10."""
    return sum(10 + number % 6 + 1 for number in range(tokens))
