"""The first worker leads, answers are kept, and equal on one worker and two. No lm-eval needed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import gloo
import pytest
from evaluation.evaluated_runs import configs_of, request_of, small_run
from harness.harness_fakes import GREEDY, SAMPLED, FakeTasks
from inference.small_models import engine, source

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.results import read_results
from mtrain_cli.evaluation.runner import StoppedError
from mtrain_cli.inference.text import open_codec
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_extras.lm_eval.requests import Pair, Plan, Score
from mtrain_extras.lm_eval.runner import EngineAnswers, HarnessRunner, plan_flop


@pytest.fixture
def run(tmp_path) -> Path:
    return small_run(tmp_path)


def runner(run: Path, tasks: FakeTasks, environment: Environment | None = None, **changes):
    stop = changes.pop("stop", lambda: False)
    request = request_of(run, "lm-eval", lengths=(0,), samples=0, **changes)
    configs = configs_of(run, request.attentions)
    environment = environment or resolve_environment(configs[0])
    return HarnessRunner(request, configs, environment, stop, tasks)  # type: ignore[arg-type]


def answers(run: Path, plan: Plan | None = None) -> EngineAnswers:
    return EngineAnswers(engine(run), open_codec(source(run)), plan)


def on_workers(rank: int, world: int, run: str) -> tuple:
    tasks = FakeTasks()
    environment = gloo.environment(rank, world)
    led = runner(Path(run), tasks, environment)
    led.run()
    return tasks.asked, led.calls


def test_two_workers_give_the_answers_of_one(run, tmp_path):
    alone = FakeTasks()
    runner(run, alone, out=str(tmp_path / "alone")).run()
    (first, calls), (second, followed) = gloo.run(2, on_workers, str(run))
    assert second == []  # only the first worker runs lm-eval
    assert calls == followed == 3
    (expected,), (found,) = alone.asked, first
    assert found[1:] == expected[1:]
    for (mine, greedy), (other, greedy_too) in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
        assert greedy == greedy_too
    (result,) = read_results(run)
    assert (result.task, result.samples, result.step) == ("lm-eval:choices:acc", 4, 3)


def test_answers_are_those_of_the_model_alone(run):
    tasks = FakeTasks()
    runner(run, tasks).run()
    ((scores, texts, sampled),) = tasks.asked
    codec, model = open_codec(source(run)), engine(run)
    losses, _ = model.token_scores(codec.encode("Line 2 says no, no"))
    assert scores[5][0] == pytest.approx(-float(losses[-len(" no, no") :].sum()), abs=1e-4)
    own = answers(run)
    assert texts == own.texts([codec.encode(f"Line {n} says") for n in (0, 1, 2, 3, 0)], GREEDY)
    assert len(set(sampled)) > 1  # samples of one prompt differ
    assert len(own.texts([[3]], SAMPLED)) == 1


def test_a_text_ends_as_soon_as_its_ending_is_there(run, monkeypatch):
    own = answers(run)
    seen: list[int] = []
    monkeypatch.setattr(
        "mtrain_cli.inference.text.TextCodec.decode_plain",
        lambda _self, ids: (seen.append(len(ids)), "xya")[1] if len(ids) > 1 else "x",
    )
    assert own.texts([[3, 4]], GREEDY) == ["xy"]
    assert seen == [2, 2]  # two of six tokens, decoded once more at the end


def test_a_stopped_evaluation_asks_only_for_what_is_missing(run):
    asked = iter([False, True])
    with pytest.raises(StoppedError):
        runner(run, FakeTasks(), stop=lambda: next(asked)).run()
    assert read_results(run) == []
    file = run / "evaluation/answers.jsonl"
    kept = file.read_text().splitlines()
    assert len(kept) == 8
    file.write_text("\n".join(kept) + '\n{"cut sho')  # a crash while it wrote
    again, tasks = runner(run, FakeTasks()), FakeTasks()
    again.run()
    assert again.calls == 2
    third = runner(run, tasks)
    third.run()
    assert third.calls == 0
    rows = (run / "evaluation/samples.jsonl").read_text().splitlines()
    assert [json.loads(row)["index"] for row in rows] == [0, 1, 2, 3]
    assert len(read_results(run)) == 1


def test_a_changed_task_replaces_samples_and_results(run):
    runner(run, FakeTasks()).run()
    (before,) = read_results(run)
    again = runner(run, FakeTasks(target=1))
    again.run()
    assert again.calls == 0  # the model answers the same questions
    (result,) = read_results(run)
    assert (result.samples, result.score) == (4, 100.0 - before.score)
    rows = [json.loads(row) for row in (run / "evaluation/samples.jsonl").read_text().splitlines()]
    assert [(row["index"], row["target"]) for row in rows] == [(n, 1) for n in range(4)]


def test_another_result_of_the_same_samples_is_replaced_and_an_equal_one_kept(run):
    runner(run, FakeTasks()).run()
    file = run / "evaluation/results.jsonl"
    before = file.read_text()
    runner(run, FakeTasks()).run()
    assert file.read_text() == before
    file.write_text(json.dumps({**json.loads(before), "score": 1.0}) + "\n")
    runner(run, FakeTasks()).run()
    (result,) = read_results(run)
    assert result.score == json.loads(before)["score"] != 1.0


def test_fewer_samples_keep_those_there(run):
    runner(run, FakeTasks()).run()
    runner(run, FakeTasks(count=2)).run()
    assert [result.samples for result in read_results(run)] == [2]
    assert len((run / "evaluation/samples.jsonl").read_text().splitlines()) == 4
    runner(run, FakeTasks(target=1, count=2)).run()  # another task
    assert len((run / "evaluation/samples.jsonl").read_text().splitlines()) == 2


def test_damaged_answers_are_named_and_computed_again(run, capsys):
    tasks, again = FakeTasks(), FakeTasks()
    runner(run, tasks).run()
    file = run / "evaluation/answers.jsonl"
    rows = list(map(json.loads, file.read_text().splitlines()))
    del rows[0]["request"]
    del rows[1]["answer"]
    rows[2]["answer"] = [1.5]
    rows[3]["answer"] = [1.5, "x"]
    rows[9]["answer"] = ["a"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    led = runner(run, again)
    led.run()
    assert led.calls == 2
    assert f"{file}: lines 1, 2, 3, 4, 10 are damaged; removed" in " ".join(
        capsys.readouterr().err.split()
    )
    for mine, other in zip(again.asked[0][0], tasks.asked[0][0], strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
    assert again.asked[0][1:] == tasks.asked[0][1:]


def test_an_infinite_score_is_computed_again(run, monkeypatch):
    def infinite(_: EngineAnswers, pairs: Sequence[Pair]) -> list[Score]:
        return [(-math.inf, False) for _ in pairs]

    with monkeypatch.context() as patch:
        patch.setattr(EngineAnswers, "scores", infinite)
        runner(run, FakeTasks()).run()
    lines = (run / "evaluation/answers.jsonl").read_text().splitlines()
    assert lines
    assert all(type(json.loads(line)["answer"]) is str for line in lines)
    tasks = FakeTasks()
    runner(run, tasks).run()
    assert all(math.isfinite(score) for score, _ in tasks.asked[0][0])


def test_a_sample_does_not_depend_on_the_other_requests(run):
    own = answers(run)
    prompts = [[3, 4, 5], [6, 7], [3, 4, 5]]
    first, second, third = own.texts(prompts, SAMPLED)
    assert own.texts(prompts[1:2], SAMPLED) == [second]
    assert own.texts([[8], *prompts[:1], [9, 8], [3, 4, 5]], SAMPLED)[1::2] == [first, third]
    assert first != third


def test_each_attention_has_answers_of_its_own(run):
    tasks = FakeTasks()
    led = runner(run, tasks, attentions=("dense", "vertical_slash"))
    led.run()
    assert len(tasks.asked) == 2
    assert {result.attention for result in read_results(run)} == {"dense", "vertical_slash"}
    assert led.calls > 6  # sparse sequences hold one text


def test_requests_that_are_too_long_are_refused(run):
    own = answers(run, Plan(positions=8, vocabulary=264))
    with pytest.raises(ConfigError, match="a request has 12 tokens, more than the 8 positions"):
        own.scores([([1] * 6, [2] * 6)])
    with pytest.raises(ConfigError, match="4 tokens and 6 new ones"):
        own.texts([[1] * 4], GREEDY)


def test_the_cost_counts_every_request(run):
    config, plan = source(run).config, Plan(100, 264)
    plan.scores([([1] * 6, [2] * 6)] * 2)
    twice = plan_flop(plan, config)
    plan.texts([[1] * 6], GREEDY)
    assert plan_flop(plan, config) == pytest.approx(1.5 * twice)
