"""The summary has the density of all cases, and the cost of recording on the slowest worker."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.profiling.measurement import ATTENTION_ONLY, TRAINING, MeasurementPlan
from mtrain_cli.profiling.profile_writer import ProfileWriter, _in_parts
from mtrain_cli.profiling.record_collector import Estimated
from mtrain_cli.records.record_files import ROW, SUMMARY, WORDS

SEQ = 64
CONFIG = compose([f"seq={SEQ}", "train.micro_batch=2", "train.global_batch=8"])
PAIRS = SEQ * (SEQ + 1) // 2


def writer_of(folder, mode: str = TRAINING, gathered: Any = None) -> ProfileWriter:
    """Return a writer of two cases. gathered: the values of all workers that `finish` sees."""
    cases = [
        SimpleNamespace(
            number=n,
            config=CONFIG,
            facts=lambda _, n=n: {"label": f"case {n}"},
            single_layers=[0],
            layers=None,
        )
        for n in (0, 1)
    ]
    bench = SimpleNamespace(
        run_dir=SimpleNamespace(path=folder),
        first=True,
        facts=lambda: {"command": ["mtrain"]},
        environment=SimpleNamespace(dims=SimpleNamespace(workers=4, dp=2), rank=0),
        collector=SimpleNamespace(uncertainty=1e-6),
        gather=lambda mine: [mine] if gathered is None else gathered,
    )
    plan = MeasurementPlan(mode, [], samples=2)
    return ProfileWriter(plan, bench, cases)  # type: ignore[arg-type]


def summary(folder) -> dict[str, Any]:
    return json.loads((folder / SUMMARY).read_text())


@pytest.mark.parametrize("mode", [TRAINING, ATTENTION_ONLY])
def test_all_causal_pairs_have_a_density_of_1(tmp_path, mode):
    """A step has eight sequences in every layer; a sample of attention has two per group."""
    writer, model = writer_of(tmp_path, mode), CONFIG.model
    layers, sequences = (1, 4) if mode == ATTENTION_ONLY else (model.num_layers, 8)
    rows = np.zeros(3, ROW)
    rows["case"] = [0, 1, 0]
    rows["direction"] = [WORDS["direction"].index(d) for d in ("forward", "forward", "backward")]
    rows["pairs"] = model.num_heads * layers * sequences * PAIRS
    rows["pairs"][1] //= 2
    writer._waiting.append(rows)
    writer.sampled(0, 1)
    assert [case["density"] for case in summary(tmp_path)["cases"]] == [1.0, 0.5]
    assert not summary(tmp_path)["complete"]


def test_the_cost_of_recording_is_the_median_over_iterations_of_the_slowest_worker(tmp_path):
    mine = {0: [(1.0, 1.1), (2.0, 2.0), (1.0, 1.5)], 1: []}
    other = {0: [(0.5, 1.2), (1.0, 2.6), (2.0, 1.0)], 1: []}
    writer = writer_of(tmp_path, gathered=[(mine, 2e-6), (other, 5e-6)])
    writer.samples = 2
    writer.finish(analysed=False)
    document = summary(tmp_path)
    # The slowest: 1.0, 2.0, 2.0 s without and 1.2, 2.6, 1.5 s with recording.
    assert document["cases"][0]["iteration_ms"] == [1000, 2000, 2000]
    assert document["cases"][0]["recorded_ms"] == [1200, 2600, 1500]
    assert document["overhead"] == document["cases"][0]["overhead"] == pytest.approx(0.2)
    assert document["clock"]["uncertainty_us"] == pytest.approx(5)
    assert document["complete"]


@pytest.mark.parametrize(("rows", "in_parts"), [(4, False), (3, True)])
def test_an_index_with_the_rows_of_one_worker_is_gathered(rows, in_parts):
    bits, held = torch.ones(1, 1, rows, 4, dtype=torch.bool), torch.arange(rows)
    assert _in_parts(BlockBitmap(16, 4, bits, held)) is in_parts


@pytest.mark.parametrize(("rank", "kept"), [(0, True), (1, True), (2, False)])
def test_only_the_first_context_group_saves_its_index(tmp_path, rank, kept):
    """Two context groups of two workers estimate indices of different sequences."""
    writer = writer_of(tmp_path)
    whole = BlockBitmap(16, 4, torch.ones(1, 1, 4, 4, dtype=torch.bool), torch.arange(4))
    dims = ParallelDims.of(4, cp=2)
    writer.bench.environment = SimpleNamespace(dims=dims, rank=rank)  # type: ignore[assignment]
    writer._last = {0: [Estimated(make_layout("zigzag", 2, SEQ, 16), (), {0: whole})]}
    found = list(writer._parts_of_indices(writer.cases[:1]))
    assert found == ([(CONFIG.sparsity.pattern, 0, whole)] if kept else [])
