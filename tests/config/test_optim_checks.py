"""A resumed run keeps its schedule unless the resume asks for another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from mtrain_cli.composition.compose import compose, resume
from mtrain_cli.config import validate
from mtrain_cli.config.resolved_file import load, save
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.validate import keep_schedule
from mtrain_cli.training.optimizer import LearningRateSchedule

STARTED = ["train.steps=100", "optim.lr=1e-3"]


def resumed(saved: Config, *words: str, step: int = 100, again: bool = False) -> Config:
    return keep_schedule(saved, resume(saved, words), words, step, again=again)


def rates(config: Config) -> list[float]:
    return [LearningRateSchedule.of(config).rate(step) for step in range(config.train.steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("step", [40, 100])
def test_more_steps_continue_at_the_final_rate(kind: str, step: int) -> None:
    saved = compose([*STARTED, f"optim.schedule={kind}"])
    longer = resumed(saved, "train.steps=250", step=step)
    assert rates(longer)[:100] == rates(saved)
    assert rates(longer)[100:] == [rates(saved)[-1]] * 150
    # Resume again, with and without more steps, and restart the job.
    assert rates(resumed(longer, "train.steps=300", step=120))[:250] == rates(longer)
    assert resumed(longer, step=120) == resumed(longer, "train.steps=250", step=120) == longer


def test_fewer_steps_stop_within_the_schedule() -> None:
    saved = compose(STARTED)
    assert rates(resumed(saved, "train.steps=60", step=40)) == rates(saved)[:60]


@pytest.mark.parametrize(
    "word",
    ["optim.schedule=cosine", "optim.schedule_steps=auto", "optim.decay_steps=auto", "optim=adamw"],
)
def test_a_schedule_key_starts_a_schedule_of_the_new_length(word: str) -> None:
    lengthened = resumed(compose(STARTED), "train.steps=150")
    new = resumed(lengthened, "optim.lr=1e-3", word, "train.steps=200", step=150)
    assert rates(new) == rates(compose(["train.steps=200", "optim.lr=1e-3"]))


def test_schedule_steps_sets_the_length() -> None:
    config = resumed(compose(STARTED), "train.steps=200", "optim.schedule_steps=150")
    assert rates(config)[:150] == rates(compose(["train.steps=150", "optim.lr=1e-3"]))
    assert config.optim.schedule_steps == 150


def test_rewarm_restarts_the_schedule_once_at_the_checkpoint(tmp_path: Path) -> None:
    saved = compose(STARTED)
    config = resumed(saved, "train.steps=250", "optim.rewarm=true")
    assert rates(config)[100:] == rates(compose(["train.steps=150", "optim.lr=1e-3"]))
    save(config, tmp_path / "resolved.yaml")
    config = load(tmp_path / "resolved.yaml")
    assert config.optim.rewarm == 100
    # Restarts and further resumes do not warm up again.
    assert resumed(config, step=130) == config
    assert resumed(config, "train.steps=250", "optim.rewarm=true", step=130, again=True) == config
    assert resumed(config, "train.steps=250", "optim.rewarm=true", step=130).optim.rewarm == 130
    assert rates(resumed(config, "train.steps=300", step=250))[:250] == rates(config)
    assert "from step 101: warm up over 10 steps" in LearningRateSchedule.of(config).describe(250)


def test_runs_of_earlier_versions_keep_their_schedule(tmp_path: Path) -> None:
    saved = compose(STARTED)
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
            "optim.rewarm=true: the run is at its last step, 100; raise train.steps",
        ),
        (
            ["optim.rewarm=7"],
            "optim.rewarm=7: give true to restart the schedule at the checkpoint, or false to keep "
            "it",
        ),
        (
            ["optim.rewarm=true", "train.steps=120", "optim.schedule=wsd", "optim.decay_steps=15"],
            "optim.decay_steps=15: the schedule has 20 steps with optim.warmup_steps=10; "
            "allowed: 1 to 9, which leaves at least 1 at the peak rate",
        ),
    ],
)
def test_an_invalid_resume_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed(compose(STARTED), *words)
    assert caught.value.problems == (line,) or list(caught.value.problems) == [line]


@pytest.mark.parametrize(
    ("warmup", "steps", "more"), [(10, 5, 1000), (10, 10, 100), (100, 100, 300)]
)
def test_a_run_that_stopped_in_its_warm_up_takes_the_new_length(
    warmup: int, steps: int, more: int
) -> None:
    """Nothing had decayed yet, so the rate must not drop to its end at once."""
    words = ["optim.lr=1e-3", f"optim.warmup_steps={warmup}"]
    config = resumed(compose([*words, f"train.steps={steps}"]), f"train.steps={more}", step=steps)
    assert rates(config) == rates(compose([*words, f"train.steps={more}"]))


@pytest.mark.parametrize("pattern", ["dense", "vertical_slash", "xattention", "moba", "fixed"])
def test_configurations_of_earlier_versions_load_unchanged(pattern: str) -> None:
    """resolved/ holds files of a version that lacked newer keys."""
    old = load(Path(__file__).parent / "resolved" / f"{pattern}.yaml")
    assert not list(validate.problems(old))
    defaults = {"moba": ["sparsity.gate=block"], "vertical_slash": ["sparsity.last_q=64"]}
    now = compose([f"sparsity={pattern}", "seq=64k", *defaults.get(pattern, [])])
    assert dataclasses.replace(old, run=now.run) == now
