"""Evaluations continue where they stopped, and give equal results on 1 to 4 workers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gloo
import pytest
import torch
from evaluation.evaluated_runs import configs_of, request_of, runner_of, small_run, text_file
from inference.small_models import source

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import NIAH, PERPLEXITY, ConfigError
from mtrain_cli.evaluation.measurement import Cell
from mtrain_cli.evaluation.request import NeedleOptions, PerplexityOptions
from mtrain_cli.evaluation.results import Result, read_results
from mtrain_cli.evaluation.runner import (
    Evaluation,
    Runner,
    StoppedError,
    evaluate,
    pattern_text,
    score_text,
)
from mtrain_cli.evaluation.runner import run as work
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.run_dir import RunDir

BOTH = ("dense", "vertical_slash")


@pytest.fixture
def run(tmp_path) -> Path:
    return small_run(tmp_path)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def texts(run: Path, **changes) -> PerplexityOptions:
    return PerplexityOptions(str(text_file(run.parent)), **changes)


def needles(run: Path) -> NeedleOptions:
    return NeedleOptions(haystack=str(text_file(run.parent)), needles=3)


def scores(folder: Path) -> dict:
    return {(r.task, r.length, r.attention): r.score for r in read_results(folder)}


def test_every_attention_and_length_gets_a_result(run):
    request = request_of(
        run, PERPLEXITY, attentions=BOTH, lengths=(256, 512), perplexity=texts(run)
    )
    runner_of(run, request).run()
    found = read_results(run)
    assert {(r.length, r.attention, r.samples, r.step) for r in found} == {
        (length, name, 3, 3) for length in (256, 512) for name in BOTH
    }
    # The sparse index leaves something out, and both are near the entropy of random weights.
    own = scores(run)
    assert own["perplexity", 512, "dense"] != own["perplexity", 512, "vertical_slash"]
    assert all(result.error is not None and result.error > 0 for result in found)


def test_a_stopped_evaluation_continues_after_its_samples(run, monkeypatch):
    request = request_of(run, NIAH)
    asked = iter([False, False, True])
    with pytest.raises(StoppedError):
        runner_of(run, request, stop=lambda: next(asked)).run()
    before = rows(run / "evaluation")
    assert [row["index"] for row in before] == [0, 1]
    assert read_results(run) == []
    measured = []
    from mtrain_cli.evaluation.retrieval import Retrieval

    whole = Retrieval.measure
    monkeypatch.setattr(Retrieval, "measure", lambda *a: measured.append(len(a[3])) or whole(*a))
    runner_of(run, request).run()
    assert measured == [1]
    assert rows(run / "evaluation")[:2] == before
    (result,) = read_results(run)
    assert result.samples == 3
    fresh = dataclasses.replace(request, out=str(run.parent / "fresh"))
    runner_of(run, fresh).run()
    assert rows(run.parent / "fresh") == rows(run / "evaluation")


def test_more_samples_add_to_those_there(run):
    request = request_of(run, NIAH, samples=2)
    runner_of(run, request).run()
    runner_of(run, dataclasses.replace(request, samples=4)).run()
    assert [row["index"] for row in rows(run / "evaluation")] == [0, 1, 2, 3]
    assert [result.samples for result in read_results(run)] == [4]
    runner_of(run, dataclasses.replace(request, samples=3)).run()
    assert [result.samples for result in read_results(run)] == [3]
    assert len(rows(run / "evaluation")) == 4


def test_changed_text_is_measured_again(run):
    request = request_of(run, PERPLEXITY, perplexity=texts(run))
    runner_of(run, request).run()
    before = scores(run)
    path = Path(request.perplexity.text or "")
    text = path.read_text()
    path.write_text(text[:700] + "#" + text[701:])  # the second sequence of 512 tokens
    runner_of(run, request).run()
    found = rows(run / "evaluation")
    assert [row["index"] for row in found] == [0, 1, 2, 1]
    last = {row["index"]: row["score"] for row in found}
    ((_, score),) = scores(run).items()
    assert score == pytest.approx(sum(last.values()) / 3)
    assert score not in before.values()


def test_a_damaged_result_is_named_and_written_again(run, capsys):
    request = request_of(run, NIAH, samples=1, niah=needles(run))
    runner_of(run, request).run()
    file = run / "evaluation/results.jsonl"
    before = file.read_text()
    file.write_text(before[:-9] + "\n")
    capsys.readouterr()
    runner_of(run, request).run()
    assert f"mtrain: warning: {file}: line 1 is damaged; removed" in capsys.readouterr().err
    assert json.loads(file.read_text())["score"] == json.loads(before)["score"]


def test_a_complete_evaluation_changes_nothing(run, capsys):
    request = request_of(run, NIAH, samples=2, niah=needles(run))
    runner_of(run, request).run()
    file = run / "evaluation/results.jsonl"
    before = file.read_text()
    capsys.readouterr()
    runner_of(run, request, stop=lambda: True).run()  # nothing is left to stop
    assert file.read_text() == before
    assert "%" not in capsys.readouterr().err
    (result,) = read_results(run)
    assert {"sentences", "seed 1", "dtype float32"} <= set(result.settings)


def test_samples_of_a_gpu_and_a_cpu_do_not_mix(run):
    request, (config,) = request_of(run, NIAH), configs_of(run)
    assert config.train.dtype == "auto"

    def origin(device: str, dtype: str = "auto") -> str:
        own = config.changed(train={"dtype": dtype})
        environment = dataclasses.replace(resolve_environment(config), device=device)
        return Evaluation(request, [own], environment).settings[0].origin

    assert origin("cpu") == origin("cpu", "float32") == origin("cuda", "float32")
    assert origin("cuda") == origin("cuda", "bfloat16") == origin("cpu", "bfloat16")
    assert origin("cpu") != origin("cuda")


def test_damaged_rows_are_measured_again(run, capsys):
    request = request_of(run, NIAH, samples=4, niah=needles(run))
    runner_of(run, request).run()
    file = run / "evaluation/samples.jsonl"
    first, second, third, fourth = whole = file.read_text().splitlines()
    for damaged in (
        [first, second[:40], third, fourth],
        [first, json.dumps({"key": json.loads(second)["key"], "index": 1}), third, fourth],
        [first, second.replace('"hits": [[', '"hits": [["x", '), third, fourth],
        [first, second.replace('"hits": [[', '"hits": [[Infinity, 1], ['), third, fourth],
        [first, json.dumps({**json.loads(second), "score": 10**400}), third, fourth],
    ):
        file.write_text("\n".join(damaged) + "\n")
        capsys.readouterr()
        runner_of(run, dataclasses.replace(request, samples=3)).run()
        assert "up to" in capsys.readouterr().err
        last = {row["index"]: row for row in rows(run / "evaluation")}
        assert [last[n] for n in range(3)] == list(map(json.loads, whole[:3]))


def test_ids_beyond_the_vocabulary_are_refused(run, monkeypatch):
    request = request_of(run, NIAH, niah=needles(run))
    own = runner_of(run, request)
    items = own._measurement.items

    def other(cell: Cell):
        for number, item in enumerate(items(cell)):
            yield {**item, "ids": [*item["ids"][:-1], 264]} if number == 1 else item

    monkeypatch.setattr(own._measurement, "items", other)
    message = (
        r"step-3: its tokenizer gives the id 264 for niah 512, but the model's 264 ids are 0 to"
    )
    with pytest.raises(ConfigError, match=message):
        own.run()
    assert len(rows(run / "evaluation")) == 1


def test_the_first_attention_chooses_the_key_tokens(run, monkeypatch):
    from mtrain_cli.evaluation import perplexity

    # Random weights gain nothing from context, so that the thresholds would leave no token.
    monkeypatch.setattr(perplexity, "LEAST_GAIN", 0.1)
    monkeypatch.setattr(perplexity, "LEAST_LOG_P", -50.0)
    request = request_of(run, PERPLEXITY, attentions=BOTH, perplexity=texts(run, short=64))
    runner_of(run, request).run()
    found = rows(run / "evaluation")
    by_index: dict[int, list] = {}
    for row in found:
        by_index.setdefault(row["index"], []).append(row["keys"])
    assert all(keys and keys == again for keys, again in by_index.values())
    dense, sparse = read_results(run)
    assert dense.key_tokens is not None
    assert sparse.key_tokens is not None
    assert dense.key_tokens.count == sparse.key_tokens.count > 0
    assert dense.key_tokens.score != sparse.key_tokens.score


def on_workers(rank: int, world: int, folder: str, kind: str) -> dict:
    run = Path(folder)
    request = request_of(
        run, kind, out=f"{folder}/on-{world}", attentions=BOTH, lengths=(256, 512), samples=2,
        perplexity=texts(run, short=64),
    )  # fmt: skip
    if kind == NIAH:
        request = dataclasses.replace(request, lengths=(512,))
    Runner.run(runner_of(run, request, gloo.environment(rank, world)))
    if rank:
        return {}
    return {
        **scores(Path(request.out)),
        "parts": [r.parts for r in read_results(Path(request.out))],
    }


@pytest.mark.parametrize("kind", [PERPLEXITY, pytest.param(NIAH, marks=pytest.mark.slow)])
def test_one_two_and_four_workers_give_equal_results(run, kind):
    text_file(run.parent)
    alone = on_workers(0, 1, str(run), kind)
    assert len(alone) > 2
    for world in (2, 4):
        found = gloo.run(world, on_workers, str(run), kind)[0]
        assert found.keys() == alone.keys()
        for name in alone.keys() - {"parts"}:
            assert found[name] == pytest.approx(alone[name], rel=1e-5)
        for mine, theirs in zip(found["parts"], alone["parts"], strict=True):
            assert [p.score for p in mine] == pytest.approx([p.score for p in theirs], rel=1e-5)


def test_names_and_scores_for_the_user():
    result = Result("k", "niah", 65536, "dense", "", 3, 2, 97.53, 1.234, "%")
    assert (str(Cell("niah", 65536)), str(Cell("file:mine", 0))) == ("niah 64k", "file:mine")
    assert score_text(result) == "97.5 ± 1.2 %"
    assert score_text(dataclasses.replace(result, score=None)) == "not finite"
    nats = dataclasses.replace(result, score=2.34567, error=None, unit="nats")
    assert score_text(nats) == "2.3457 nats"


def test_results_name_the_dense_layers_of_a_pattern():
    words = ["sparsity=moba", "model.num_layers=4"]
    alone, with_dense = (
        pattern_text(compose([*words, f"sparsity.dense_layers={n}"])) for n in (0, 2)
    )
    assert with_dense == f"{alone}; the last 2 layers dense"
    assert pattern_text(compose(["sparsity=dense"])) == ""


def worker(run, tmp_path, *, stopped: bool) -> bool:
    folder = tmp_path / "worker"
    folder.mkdir()
    request_of(run, NIAH, samples=1).save(folder, configs_of(run))
    run_dir = RunDir(folder)
    if stopped:
        run_dir.stop_request.touch()
    config = source(run).config
    return work(config, run_dir, resolve_environment(config), False)


def test_a_worker_leaves_results(run, tmp_path):
    assert worker(run, tmp_path, stopped=False) is False
    assert len(read_results(run)) == 1


def test_a_worker_stops_when_asked(run, tmp_path):
    assert worker(run, tmp_path, stopped=True) is True
    assert read_results(run) == []


def test_lack_of_memory_gets_a_line(run, monkeypatch):
    own = runner_of(run, request_of(run, NIAH))

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(own, "run", fail)
    with pytest.raises(RunError, match=r"smaller --length or more topology\.workers"):
        evaluate(own, resolve_environment(source(run).config))
