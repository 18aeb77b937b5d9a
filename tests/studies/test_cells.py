"""Settings of cells, and what keeps a finished cell from being computed again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from studies.finished_cell import write_results

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.results import PERCENT, RESULTS, SAMPLES, Result, ResultsFolder
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.run_dir import RunLock
from mtrain_cli.model import huggingface
from mtrain_cli.sparsity.fixed import make_pattern
from mtrain_extras.studies import cells
from mtrain_extras.studies.cells import (
    DONE,
    EVALUATION,
    Done,
    Study,
    estimated_flop,
    training_words,
)
from mtrain_extras.studies.tiers import (
    AGAIN,
    DENSE,
    EQUAL_TIME,
    FIXED,
    TIERS,
    UNTRAINED,
    Cell,
    digest,
)

TINY = TIERS["tiny"]
SPARSE = "vertical_slash-0.6"


def finish(study: Study, cell: Cell, **changes) -> None:
    values = {
        "digest": digest(study.tier, cell), "corpus": "texts", "steps": 12, "seconds": 24.0,
        "step_seconds": 2.0, "density": 1.0, **changes,
    }  # fmt: skip
    study.path(cell).mkdir(parents=True, exist_ok=True)
    (study.path(cell) / DONE).write_text(json.dumps(asdict(Done(**values))))
    write_results(study, cell)


def cell(name: str, seed: int = 0) -> Cell:
    return Cell(seed, TINY.variant(name))


def test_cells_of_one_seed_share_base_and_order(tmp_path):
    study = Study(tmp_path, TINY)
    dense, sparse, again = (training_words(study, cell(n, 1)) for n in (DENSE, SPARSE, AGAIN))
    assert sorted(set(sparse) - set(dense))[2:] == sorted(TINY.variant(SPARSE).words)
    (seed,) = (word for word in again if word.startswith("seed="))
    assert "seed=1" in dense
    assert seed not in dense
    (base,) = {word for word in dense if word.startswith("train.init_from=")}
    assert base == f"train.init_from={tmp_path}/base/seed-1/hf"
    assert base in again
    assert "sparsity" not in " ".join(dense)


@pytest.mark.parametrize(
    ("control", "like", "whole"),  # whole: the density with the last of two layers dense
    [(FIXED, SPARSE, 0.4), (f"{FIXED}-dense-layers", f"{SPARSE}-dense-layers", 0.7)],
)
def test_the_control_computes_as_many_pairs(tmp_path, control, like, whole):
    study = Study(tmp_path, TINY)
    finish(study, cell(like), density=whole)
    words = [word for word in training_words(study, cell(control)) if "sparsity" in word]
    assert ("sparsity.dense_layers=1" in words) == (control != FIXED)
    sparsity = compose([f"seq={TINY.long_seq}", "topology.workers=1", *words]).sparsity
    assert sparsity.block == 32
    seq, places = TINY.long_seq, torch.arange(TINY.long_seq)
    causal = (places <= places[:, None]).double()
    allowed = make_pattern(sparsity, 0).draw(0, 1, 32, seq).allowed(places, places)
    density = (allowed * causal).sum((-1, -2)).mean() / causal.sum()
    assert float(density) == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize("name", [DENSE, SPARSE])
def test_all_cells_but_dense_are_measured_on_the_key_tokens_of_dense(tmp_path, monkeypatch, name):
    study, calls = Study(tmp_path, TINY), []
    config = compose(["sparsity=vertical_slash"] if name == SPARSE else ["sparsity=dense"])
    source = SimpleNamespace(config=compose(["sparsity=dense"]), path=tmp_path)
    monkeypatch.setattr(cells, "_source", lambda *_: source)
    monkeypatch.setattr(cells.resolved_file, "load", lambda _: config)
    monkeypatch.setattr(cells, "_evaluate", lambda *given: calls.append(given))
    cells.measure(study, cell(name))
    keys = [] if name == DENSE else [study.path(cell(DENSE)) / "evaluation"]
    (_, _, text, _, attentions, _, *found), (_, _, needles, *_) = calls
    assert [each for each in found if each is not None] == keys
    assert (text, needles) == ("perplexity", "niah")
    assert list(attentions) == ([DENSE] if name == DENSE else [DENSE, "vertical_slash"])


def test_the_untrained_cell_writes_lost_stretched_weights_again(tmp_path, monkeypatch):
    study, written = Study(tmp_path, TINY), []
    source = SimpleNamespace(config=compose([]), path=tmp_path)
    monkeypatch.setattr(cells, "_source", lambda *_: source)
    monkeypatch.setattr(cells, "_evaluate", lambda *_: None)
    monkeypatch.setattr(cells, "export_base", lambda _, base: written.append(base))
    cells.measure(study, cell(UNTRAINED))
    assert written == [Cell(0)]


@pytest.mark.parametrize(
    ("workers", "micro", "shared"),  # of a batch of 4; shared: workers of a sequence
    [(1, 4, 1), (2, 2, 1), (4, 1, 1), (3, 4, 3), (6, 2, 3), (8, 1, 2)],
)
def test_workers_share_the_sequences_of_a_step(tmp_path, workers, micro, shared):
    tier = replace(TINY, machine=("topology.device=cpu", f"topology.workers={workers}"))
    study = Study(tmp_path, tier)
    words = training_words(study, Cell(0))
    assert {"train.global_batch=4", f"train.micro_batch={micro}"} < set(words)
    context = [word for word in words if "context_parallel" in word]
    assert context == [f"topology.context_parallel={shared}"]
    sizes = [word for word in words if word.startswith(("topology.", "train."))]
    resolve_environment(compose(sizes))  # the sizes divide
    long = training_words(study, cell(DENSE))
    assert "train.micro_batch=1" in long
    assert "context_parallel" not in " ".join(long)


def test_the_estimate_of_a_base_counts_the_workers_that_deal_its_sequences():
    one, four = (
        replace(TINY, machine=("topology.device=cpu", f"topology.workers={n}")) for n in (1, 4)
    )
    training, measuring = estimated_flop(one, Cell(0))
    assert cells.estimated_seconds(one, Cell(0)) * one.base_flops == training + measuring
    assert cells.estimated_seconds(four, Cell(0)) * one.base_flops == training / 4 + measuring
    dense = cell(DENSE)
    assert cells.estimated_seconds(four, dense) == cells.estimated_seconds(one, dense)


def test_a_control_has_at_least_one_column(tmp_path):
    study = Study(tmp_path, TINY)
    finish(study, cell(f"{SPARSE}-dense-layers"), density=0.5002)  # half of the layers is dense
    assert "sparsity.columns=1" in training_words(study, cell(f"{FIXED}-dense-layers"))


def test_equal_time_takes_as_many_seconds(tmp_path):
    study = Study(tmp_path, TINY)
    finish(study, cell(DENSE), steps=12, step_seconds=2.0)
    finish(study, cell(SPARSE), step_seconds=0.5)
    assert "train.steps=48" in training_words(study, cell(EQUAL_TIME))
    assert f"train.steps={TINY.steps}" in training_words(study, cell(SPARSE))
    finish(study, cell(SPARSE), step_seconds=0.7)  # 34.3 steps
    assert "train.steps=34" in training_words(study, cell(EQUAL_TIME))
    finish(study, cell(SPARSE), step_seconds=0.69)  # 34.8 steps
    assert "train.steps=35" in training_words(study, cell(EQUAL_TIME))


def test_a_finished_cell_must_be_of_the_same_settings(tmp_path):
    study = Study(tmp_path, TINY, "texts")
    assert study.done(cell(DENSE)) is None
    finish(study, cell(DENSE))
    assert study.done(cell(DENSE)).steps == 12
    finish(study, cell(DENSE), digest="other")
    with pytest.raises(ConfigError, match=r"holds dense/seed-0 of other settings of tier tiny"):
        study.done(cell(DENSE))
    finish(study, cell(DENSE), corpus="others")
    with pytest.raises(ConfigError, match=r"dense/seed-0 was trained on other texts"):
        study.done(cell(DENSE))


@pytest.mark.parametrize("content", [b'{"digest": 1}', b"{", b"[]", b"\xff"])
def test_a_damaged_cell_is_named_with_its_repair(tmp_path, content):
    study = Study(tmp_path, TINY)
    for damaged, lost in ((cell(DENSE), ""), (Cell(0), f"/{DONE}")):
        finish(study, damaged)
        (study.path(damaged) / DONE).write_bytes(content)
        with pytest.raises(cells.DamagedCellError) as caught:
            study.done(damaged)
        (line,) = caught.value.problems
        assert line.startswith(f"{study.path(damaged) / DONE}: damaged (")
        assert line.endswith(f"Delete {study.path(damaged)}{lost} and run the study again")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_finished_cell_without_results_is_named_with_its_repair(tmp_path, is_folder):
    study = Study(tmp_path, TINY)
    for lost, to_delete in ((cell(DENSE), ""), (Cell(0), f"/{DONE}")):
        finish(study, lost)
        results = study.path(lost) / EVALUATION / RESULTS
        results.unlink()
        if is_folder:
            results.mkdir()
        with pytest.raises(cells.DamagedCellError) as caught:
            study.done(lost)
        assert caught.value.problems == (
            f"{results}: missing, so {lost.key} does not count as finished. Delete "
            f"{study.path(lost)}{to_delete} and run the study again",
        )


def test_a_finished_cell_with_damaged_results_or_without_samples_is_named(tmp_path):
    study = Study(tmp_path, TINY)
    for damaged, to_delete in ((cell(SPARSE), ""), (cell(DENSE), ""), (Cell(0), f"/{DONE}")):
        finish(study, damaged)
        folder = study.path(damaged) / EVALUATION
        results, samples = folder / RESULTS, folder / SAMPLES
        whole, rows = results.read_text(), samples.read_text()
        one_lost = whole.replace('"dense"', "dense", 1 + (damaged == Cell(0)))
        for content in ("", "nonsense", one_lost):
            results.write_text(content)
            with pytest.raises(cells.DamagedCellError) as caught:
                study.done(damaged)
            assert caught.value.problems == (
                f"{results}: damaged, so {damaged.key} does not count as finished. Delete "
                f"{study.path(damaged)}{to_delete} and run the study again",
            )
        results.write_text(whole)
        samples.unlink()
        if damaged.variant is None:  # nothing reads them
            assert study.done(damaged) is not None
            continue
        with pytest.raises(cells.DamagedCellError, match=f"^{samples}: missing, so "):
            study.done(damaged)
        samples.write_text(rows)
        assert study.done(damaged) is not None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", r"study\.json: damaged \(line 1, column 2: .* --out "),
        ("[]", r"study\.json: damaged \(it is not a JSON object\)"),
        ('{"study": "learning", "tier": "tiny"}', r"study\.json: damaged \(base_steps=None"),
        ('{"study": "learning", "tier": "huge"}', r"study\.json: tier=huge: no such tier; allowed"),
    ],
)
def test_a_damaged_study_is_named(tmp_path, content, why):
    Study(tmp_path, TINY).save()
    assert Study.open(tmp_path) == Study(tmp_path, TINY)
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(ConfigError, match=why):
        Study.open(tmp_path)
    (tmp_path / "study.json").write_text('{"study": "of mine"}')
    assert Study.open(tmp_path) is None
    assert Study.open(tmp_path / "nowhere") is None


def test_a_study_without_its_mark_is_named(tmp_path):
    (tmp_path / "corpus").mkdir()
    assert Study.open(tmp_path) is None
    (tmp_path / "base").mkdir()
    with pytest.raises(
        ConfigError, match=r"study\.json: missing\. The command of the study writes"
    ):
        Study.open(tmp_path)


def test_estimates_grow_with_the_work():
    a = TIERS["a"]
    dense, untrained = Cell(0, a.variant(DENSE)), Cell(0, a.variant("untrained"))
    training, measurement = estimated_flop(a, dense)
    assert training > 6 * 24.1e6 * a.steps * a.long_seq
    assert estimated_flop(a, untrained)[0] == 0 < estimated_flop(a, untrained)[1] < measurement
    # A sparse cell is measured with dense attention, too.
    sparse = Cell(0, a.variant(SPARSE))
    assert estimated_flop(a, sparse)[1] == 2 * estimated_flop(a, untrained)[1]


def test_a_damaged_step_of_a_training_counts_as_a_median_step(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": n, "seconds": 9.0 if n < 3 else 2.0, "density": 0.5} for n in range(1, 7)]
    lines = [json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(lines))
    assert cells._trained(tmp_path, 6) == (26.0, 2.0, 0.5)
    for damaged in ("{nonsense\n", '{"step": 4}\n'):
        file.write_text("".join([*lines[:3], damaged, *lines[4:]]))
        assert cells._trained(tmp_path, 6) == (26.0, 2.0, 0.5)
    file.write_text("nonsense\n")
    with pytest.raises(ConfigError, match=f"^{file}: no step can be read$"):
        cells._trained(tmp_path, 6)


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ([9.0, 8.0, 2.0], (19.0, 2.0)),  # only the third step is after the warm-up
        ([9.0, 8.0], (17.0, 8.0)),
        ([9.0, 9.0, 1.0, 2.0, 6.0], (27.0, 2.0)),
    ],
)
def test_the_pace_is_the_median_after_the_warm_up_or_the_last_step(tmp_path, seconds, found):
    rows = [{"step": n, "seconds": each, "density": 1.0} for n, each in enumerate(seconds, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cells._trained(tmp_path, len(seconds))[:2] == found


@pytest.mark.parametrize("score", [95.0, 94.9])
def test_a_base_passes_a_gate_that_it_just_reaches(tmp_path, monkeypatch, score):
    study = Study(tmp_path, replace(TINY, gate=95.0))
    monkeypatch.setattr(cells, "_source", lambda *_: SimpleNamespace(config=None))
    monkeypatch.setattr(cells, "_evaluate", lambda *_: None)
    folder = ResultsFolder.open(study.path(Cell(0)) / "evaluation", "..")
    folder.add_result(Result("k", "niah", 256, DENSE, "", 1, 8, score, None, PERCENT))
    assert cells._measure_base(study, Cell(0), below_gate=True) == score
    if score >= 95.0:
        assert cells._measure_base(study, Cell(0), below_gate=False) == score
    else:
        with pytest.raises(ConfigError, match=r"the base finds 94\.9 % .* the gate is 95 %"):
            cells._measure_base(study, Cell(0), below_gate=False)


def test_a_run_that_cannot_be_resumed_begins_again(tmp_path, monkeypatch):
    """A study can move without the checkpoints of an unfinished cell, or with them."""
    run, elsewhere = tmp_path / "run", tmp_path / "moved"
    config = compose(["topology.workers=1", f"run.dir={run}"])
    for folder in (run, elsewhere):
        folder.mkdir()
        resolved_file.save(config, folder / "resolved.yaml")
    monkeypatch.setattr(cells.RunDir, "last_step", lambda _: 8)
    cells._drop_lost_run(run)
    assert run.exists()
    (tmp_path / "beside").mkdir()
    cells._drop_lost_run(tmp_path / "beside" / ".." / run.relative_to(tmp_path))
    assert run.exists(), "the same folder in other words"
    cells._drop_lost_run(elsewhere)
    assert not elsewhere.exists()
    monkeypatch.setattr(cells.RunDir, "last_step", lambda _: None)
    cells._drop_lost_run(run)
    assert not run.exists()
    cells._drop_lost_run(run)
    (run / "checkpoints").mkdir(parents=True)
    cells._drop_lost_run(run)
    assert not run.exists(), "what an interrupted deletion has left"


def test_two_processes_do_not_compute_a_cell_at_the_same_time(tmp_path):
    study, base = Study(tmp_path, TINY, "texts"), Cell(0)
    study.path(base).mkdir(parents=True)
    trained: list[list[str]] = []
    lock = RunLock(study.path(base))
    with pytest.raises(ConfigError) as refused:
        cells.compute(study, base, trained.append)
    lock.release()
    (line,) = refused.value.problems
    assert line.startswith(f"--out {tmp_path}: base/seed-0: in use by process {os.getpid()} on ")
    assert line.endswith("Wait until it has finished, stop it, or name other cells with --only")
    finish(study, base)
    write_weights(study, 0)
    assert cells.compute(study, base, trained.append) == study.done(base), "finished meanwhile"
    assert trained == []
    RunLock(study.path(base)).release()


def test_a_base_that_is_gone_is_not_trained_again_if_cells_began_with_it(tmp_path):
    study, base, dense = Study(tmp_path, TINY), Cell(0), cell(DENSE)
    finish(study, dense)
    for wanted in ([base], [base, dense, cell(SPARSE)]):
        with pytest.raises(ConfigError, match="has no weights, and dense/seed-0 began with them"):
            cells.unfinished(study, wanted)
    write_weights(study, 0)
    assert cells.unfinished(study, [base]) == [base], "only its measurement is gone"


def test_a_base_without_weights_is_trained_again_if_a_cell_needs_it(tmp_path, monkeypatch):
    study, trained = Study(tmp_path, TINY, "texts"), []
    base, dense, sparse = Cell(0), cell(DENSE), cell(SPARSE)
    assert cells.unfinished(study, [base, dense]) == [base, dense], "nothing is there"
    finish(study, base)
    assert cells.unfinished(study, [base]) == [], "nothing begins with it"
    assert cells.unfinished(study, [base, dense, sparse]) == [base, dense, sparse]
    finish(study, dense)
    assert cells.unfinished(study, [base, dense]) == []
    with pytest.raises(ConfigError) as refused:
        cells.unfinished(study, [base, dense, sparse])
    (line,) = refused.value.problems
    assert line == (
        f"{tmp_path}/base/seed-0/hf: has no weights, and dense/seed-0 began with them. Put them "
        f"back, or delete {tmp_path}/*/seed-0 to compute the seed again"
    )
    old = study.path(base) / EVALUATION / "old"
    old.touch()

    def train(words: list[str]) -> None:
        assert not old.exists(), "results of the lost weights"
        (folder,) = (word for word in words if word.startswith("run.dir="))
        Path(folder.removeprefix("run.dir=")).mkdir(parents=True, exist_ok=True)
        trained.append(words)

    def export(study: Study, cell: Cell) -> None:
        (study.path(cell) / cells.HF).mkdir(parents=True)
        write_weights(study, len(trained))

    monkeypatch.setattr(cells, "_trained", lambda *_: (24.0, 2.0, 1.0))
    monkeypatch.setattr(cells, "export_base", export)
    monkeypatch.setattr(
        cells, "_measure_base", lambda *given, **_: (write_results(*given), 100.0)[1]
    )
    monkeypatch.setattr(cells, "measure", write_results)
    assert cells.compute(study, base, train).base == ""
    assert cells.unfinished(study, [base, dense, sparse]) == [sparse]
    first = cells.compute(study, sparse, train).base
    assert len(first) == 64
    write_weights(study, 99)
    (study.path(sparse) / DONE).unlink()
    assert cells.compute(study, sparse, train).base != first


def test_the_stretched_base_has_its_own_positions_and_checksums(tmp_path):
    study = Study(tmp_path, TINY)
    config = compose(["model=tiny", "seq=512", "model.rope.original_max_position=512"])
    (tmp_path / "base/seed-0/run").mkdir(parents=True)
    resolved_file.save(config, tmp_path / "base/seed-0/run/resolved.yaml")
    hf, stretched = (tmp_path / "base/seed-0" / name for name in (cells.HF, cells.STRETCHED))
    with huggingface.writing(hf) as folder:
        (folder / "config.json").write_text(json.dumps({"vocab_size": 264}))
        (folder / "model.safetensors").write_bytes(b"weights")
    cells.export_base(study, Cell(0))
    huggingface.verify_sums(hf)
    huggingface.verify_sums(stretched)
    assert (stretched / "model.safetensors").samefile(hf / "model.safetensors")
    new = json.loads((stretched / "config.json").read_text())
    assert (new["vocab_size"], new["max_position_embeddings"]) == (264, TINY.long_seq)
    assert "model.safetensors" in (stretched / huggingface.SUMS).read_text()


def write_weights(study: Study, value: int, folder: str = cells.HF) -> Path:
    file = study.path(Cell(0)) / folder / "model.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.array([value])}, file)
    return file


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_damaged_weights_of_a_base_are_named_with_what_to_do(tmp_path):
    study, base, dense, sparse = Study(tmp_path, TINY), Cell(0), cell(DENSE), cell(SPARSE)

    def said() -> str:
        with pytest.raises(ConfigError) as refused:
            cells.unfinished(study, [base, dense, sparse])
        (line,) = refused.value.problems
        return line

    hf, stretched = (write_weights(study, 0, name) for name in (cells.HF, cells.STRETCHED))
    assert cells.unfinished(study, [base, dense, sparse]) == [base, dense, sparse]
    truncate(hf)
    assert said().startswith(f"{hf}: truncated or damaged (")
    with pytest.raises(ConfigError, match="truncated or damaged"):
        cells.unfinished(study, [base])
    both = f"{hf.parent} and {stretched.parent}"  # they share their files
    again = f"). Delete {both} and run the same command again, which"
    assert said().endswith(f"{again} writes the weights again")
    finish(study, base)
    assert said().endswith(f"{again} trains base/seed-0 again")
    finish(study, dense)
    assert said().endswith(
        f"), and dense/seed-0 began with these weights. Put the file back, or delete {tmp_path}/*/"
        "seed-0 and run the same command again, which computes the seed again"
    )
    write_weights(study, 0)
    truncate(stretched)
    assert said().endswith(
        f"). Delete {stretched.parent} and run the same command again, which writes the weights "
        "again"
    )
    (study.path(dense) / DONE).unlink()
    hf.unlink()
    assert cells.unfinished(study, [base, dense]) == [base, dense], "all are written again"
    write_weights(study, 0)
    finish(study, dense)
    finish(study, sparse)
    assert cells.unfinished(study, [base, dense, sparse]) == [], "nothing reads the weights"
