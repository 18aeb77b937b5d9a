"""A resumed run goes on under the schedule that it had, unless it asks for another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from mtrain_cli.config import validate
from mtrain_cli.config.compose import compose, load, resume, save
from mtrain_cli.config.resumed_schedule import with_its_schedule
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.training.optimizer import LearningRateSchedule

BEGUN = ["train.steps=100", "optim.lr=1e-3"]


def resumed(saved: Config, *words: str, step: int = 100, again: bool = False) -> Config:
    return with_its_schedule(saved, resume(saved, words), words, step, again=again)


def rates(config: Config) -> list[float]:
    return [LearningRateSchedule.of(config).rate(step) for step in range(config.train.steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("step", [40, 100])
def test_more_steps_go_on_at_the_rate_where_the_schedule_ended(kind: str, step: int) -> None:
    saved = compose([*BEGUN, f"optim.schedule={kind}"])
    longer = resumed(saved, "train.steps=250", step=step)
    assert rates(longer)[:100] == rates(saved)
    assert rates(longer)[100:] == [rates(saved)[-1]] * 150
    # A resume of the resume, with or without more steps, and a run that its job starts again.
    assert rates(resumed(longer, "train.steps=300", step=120))[:250] == rates(longer)
    assert resumed(longer, step=120) == resumed(longer, "train.steps=250", step=120) == longer


def test_fewer_steps_end_in_the_middle_of_the_schedule() -> None:
    saved = compose(BEGUN)
    assert rates(resumed(saved, "train.steps=60", step=40)) == rates(saved)[:60]


@pytest.mark.parametrize(
    "word",
    ["optim.schedule=cosine", "optim.schedule_steps=auto", "optim.decay_steps=auto", "optim=adamw"],
)
def test_a_word_on_the_schedule_asks_for_one_of_the_new_length(word: str) -> None:
    lengthened = resumed(compose(BEGUN), "train.steps=150")
    new = resumed(lengthened, "optim.lr=1e-3", word, "train.steps=200", step=150)
    assert rates(new) == rates(compose(["train.steps=200", "optim.lr=1e-3"]))


def test_a_length_can_be_given() -> None:
    found = resumed(compose(BEGUN), "train.steps=200", "optim.schedule_steps=150")
    assert rates(found)[:150] == rates(compose(["train.steps=150", "optim.lr=1e-3"]))
    assert found.optim.schedule_steps == 150


def test_rewarming_begins_anew_at_the_checkpoint_and_once(tmp_path: Path) -> None:
    saved = compose(BEGUN)
    found = resumed(saved, "train.steps=250", "optim.rewarm=true")
    assert rates(found)[100:] == rates(compose(["train.steps=150", "optim.lr=1e-3"]))
    save(found, tmp_path / "resolved.yaml")
    found = load(tmp_path / "resolved.yaml")
    assert found.optim.rewarm == 100
    # Restarts, resumes without a word, and the same line that a job starts again do not warm up once more.
    assert resumed(found, step=130) == found
    assert resumed(found, "train.steps=250", "optim.rewarm=true", step=130, again=True) == found
    assert resumed(found, "train.steps=250", "optim.rewarm=true", step=130).optim.rewarm == 130
    assert rates(resumed(found, "train.steps=300", step=250))[:250] == rates(found)
    assert "from step 101: warm up over 10 steps" in LearningRateSchedule.of(found).describe(250)


def test_runs_of_earlier_versions_keep_their_schedule_too(tmp_path: Path) -> None:
    saved = compose(BEGUN)
    save(saved, tmp_path / "resolved.yaml")
    document = yaml.safe_load((tmp_path / "resolved.yaml").read_text())
    for key in ("decay_steps", "schedule_steps", "rewarm"):
        del document["optim"][key]
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(document))
    old = load(tmp_path / "resolved.yaml")
    assert old == saved
    assert rates(resumed(old, "train.steps=250"))[100:] == [rates(saved)[-1]] * 150


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["optim.rewarm=true"],
            "optim.rewarm=true: is for --resume RUN; a new run warms up anyway. Leave it out",
        ),
        (
            ["optim.rewarm=50"],
            "optim.rewarm=50: is for --resume RUN; a new run warms up anyway. Leave it out",
        ),
        (
            ["optim.schedule=constant", "optim.decay_steps=5"],
            "optim.decay_steps=5: optim.schedule=constant never falls; give optim.decay_steps=auto, or optim.schedule=",
        ),
        (
            ["optim.schedule=wsd", "optim.decay_steps=90", "train.steps=100"],
            "optim.decay_steps=90: the schedule has 100 steps, 10 of them warm-up (optim.warmup_steps); allowed: 1 to 89",
        ),
        (["optim.decay_steps=0"], "optim.decay_steps=0: must be at least 1"),
        (
            ["optim.schedule_steps=10"],
            "optim.schedule_steps=10: must be above optim.warmup_steps=10, or the rate falls to its end at once",
        ),
        (["optim.schedule_steps=-3"], "optim.schedule_steps=-3: must be at least 1"),
        (["optim.schedule=cosin"], "optim.schedule=cosin: "),
    ],
)
def test_schedules_that_cannot_be_are_one_line(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    (found,) = caught.value.problems
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["optim.rewarm=true"],
            "optim.rewarm=true: the run is at step 100, its last; give more with train.steps=",
        ),
        (
            ["optim.rewarm=7"],
            "optim.rewarm=7: give true, by which the schedule begins anew at the checkpoint, or false",
        ),
        (
            ["optim.rewarm=true", "train.steps=120", "optim.schedule=wsd", "optim.decay_steps=15"],
            "optim.decay_steps=15: the schedule has 20 steps, 10 of them warm-up (optim.warmup_steps); allowed: 1 to 9",
        ),
    ],
)
def test_resumes_that_cannot_be_are_one_line(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed(compose(BEGUN), *words)
    assert caught.value.problems == (line,) or list(caught.value.problems) == [line]


@pytest.mark.parametrize(
    ("warmup", "steps", "more"), [(10, 5, 1000), (10, 10, 100), (100, 100, 300)]
)
def test_a_trial_that_ended_in_its_warm_up_spans_the_new_steps(
    warmup: int, steps: int, more: int
) -> None:
    """No rate had fallen, and none falls to its end within a step."""
    words = ["optim.lr=1e-3", f"optim.warmup_steps={warmup}"]
    found = resumed(compose([*words, f"train.steps={steps}"]), f"train.steps={more}", step=steps)
    assert rates(found) == rates(compose([*words, f"train.steps={more}"]))


@pytest.mark.parametrize("pattern", ["dense", "vertical_slash", "xattention", "moba", "fixed"])
def test_configurations_of_earlier_versions_load_as_they_were(pattern: str) -> None:
    """resolved/ holds what a version wrote that lacked the keys of today."""
    old = load(Path(__file__).parent / "resolved" / f"{pattern}.yaml")
    assert not list(validate.problems(old))
    now = compose(
        [f"sparsity={pattern}", "seq=64k", *(["sparsity.gate=block"] if pattern == "moba" else [])]
    )
    assert dataclasses.replace(old, run=now.run) == now
