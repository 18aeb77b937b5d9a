"""Tasks measured during training have the scores of `mtrain eval` of the same step's checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gloo
import pytest
from command import mtrain

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.in_training import TaskEvaluations, require_tasks
from mtrain_cli.evaluation.request import EvaluationRequest, Weights
from mtrain_cli.evaluation.results import ResultsFolder, read_results
from mtrain_cli.evaluation.runner import Runner
from mtrain_cli.inference.model_source import open_source
from mtrain_cli.launch.run_dir import RunDir, RunLock
from mtrain_cli.reporting.evaluations import evaluation_tables
from mtrain_cli.reporting.report_source import open_source as open_report
from mtrain_cli.training.loop import train

SMALL = [
    "seq=1408", "model.hidden_size=32", "model.num_layers=2", "model.head_dim=16",
    "model.intermediate_size=48", "model.num_heads=4", "model.num_kv_heads=2", "train.kernel=sdpa",
    "optim.warmup_steps=2", "optim.lr=0.01", "train.steps=4", "train.checkpoint_every=2",
    "train.keep_checkpoints=9", "train.eval_every=2", "topology.block_size=16",
    "train.eval_tasks=[niah]", "eval.length=[1344,1408]", "eval.samples=2",
]  # fmt: skip
SPARSE = ["sparsity=vertical_slash", "sparsity.block=16", "sparsity.last_q=16"]
LEARNED = ["sparsity=block_topk", "sparsity.block=16", "sparsity.rank=4", "train.kernel=reference"]
BOTH = ["train.eval_tasks=[niah,perplexity]", "data.eval_sequences=4"]


def whole(
    rank: int, world: int, folder: str, words: list[str], resume: bool, degrees: dict[str, int]
) -> None:
    """Train in a run's folder on one of ``world`` processes."""
    config = compose([*SMALL, *words])
    run_dir = RunDir(Path(folder))
    if rank == 0:
        run_dir.path.mkdir(exist_ok=True)
        resolved_file.save(config, run_dir.path / "resolved.yaml")
    environment = gloo.environment(rank, world, **degrees)
    train(config, run_dir, environment, resume, [TaskEvaluations])


def trained(world: int, run: Path, *words: str, resume: bool = False, **degrees: int) -> None:
    gloo.run(world, whole, str(run), list(words), resume, degrees)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train once, for the tests that continue from the same run."""
    run = tmp_path_factory.mktemp("once") / "run"
    trained(1, run)
    return run


@pytest.fixture
def run(trained_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_once, tmp_path / "run"))


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def alone(run: Path, kind: str, step: int, out: Path) -> list[dict]:
    """Evaluate a checkpoint on this process, as `mtrain eval` does. Return the samples' rows."""
    config = open_source(run, ["topology.device=cpu", "train.kernel=sdpa"]).config
    request = EvaluationRequest(
        kind=kind,
        out=str(out),
        model=str(run),
        weights=(Weights.of_checkpoint(run / "checkpoints" / f"step-{step}"),),
        attentions=(config.sparsity.pattern,),
        lengths=(1344, 1408),
        samples=2,
    )
    Runner(request, [config], gloo.environment(0, 1)).run()
    return rows(out)


def numbers(row: dict) -> list[float]:
    """Return all losses of a sample: of its answers or of its ranges of context."""
    return row["nats"] if "nats" in row else [*(one[3] for one in row["buckets"]), row["score"]]


def require_equal(run: Path, kind: str, step: int, out: Path) -> None:
    found = [row for row in rows(run / "evaluation") if (row["task"], row["step"]) == (kind, step)]
    expected = alone(run, kind, step, out)
    assert len(expected) == 4
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("task", "length", "attention", "index"):
            assert mine[name] == theirs[name]
        assert mine.get("hits") == theirs.get("hits")
        assert mine.get("text") == theirs.get("text")
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=2e-5)


@pytest.mark.parametrize(
    ("world", "words", "degrees"),
    [
        pytest.param(1, SPARSE, {}, marks=pytest.mark.slow),
        pytest.param(2, [], {}, marks=pytest.mark.slow),
        pytest.param(1, LEARNED, {}, marks=pytest.mark.slow),
        pytest.param(
            2,
            [*SPARSE, "topology.layout=zigzag", "topology.exchange=ring"],
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ["train.global_batch=2"], {"cp": 1}, marks=pytest.mark.slow),
        pytest.param(2, ["topology.tensor_parallel=2"], {"cp": 1, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=["alone", "two", "learned", "sparse", "replicas", "tensor"],
)
def test_samples_score_as_in_an_evaluation_of_the_checkpoint(tmp_path, world, words, degrees):
    run = tmp_path / "run"
    trained(world, run, *BOTH, *words, **degrees)
    for kind, step in (("niah", 2), ("perplexity", 4)):
        require_equal(run, kind, step, tmp_path / f"{kind}-{step}")
    # Before the first step, learned scores have not learned yet.
    assert {r.step for r in read_results(run)} == ({2, 4} if words is LEARNED else {0, 2, 4})
    # Weights of other steps score otherwise, so the steps are not mixed up.
    first = {row["step"]: numbers(row) for row in reversed(rows(run / "evaluation"))}
    assert first[2] != pytest.approx(first[4], rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_evaluating_does_not_change_the_training(tmp_path, world):
    trained(world, tmp_path / "plain", "train.eval_tasks=[]", "train.eval_every=0")
    trained(world, tmp_path / "tasks")
    plain, tasks = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "tasks")
    )
    assert [row["loss"] for row in plain] == [row["loss"] for row in tasks]
    assert [row["grad_norm"] for row in plain] == [row["grad_norm"] for row in tasks]


def test_a_resumed_run_scores_no_step_twice(run):
    file = run / "evaluation" / "samples.jsonl"
    before = file.read_text().replace('"in_training": true', '"in_training": true, "first": 1')
    file.write_text(before)  # another measurement would not write "first"
    trained(1, run, "train.steps=6", resume=True)
    assert file.read_text().startswith(before)
    found = [(row["step"], row["length"], row["index"]) for row in rows(run / "evaluation")]
    assert len(found) == len(set(found)) == 4 * 4
    # Nothing is left to train, and all is measured.
    trained(1, run, "train.steps=6", resume=True)
    assert len(rows(run / "evaluation")) == 4 * 4


@pytest.mark.slow
def test_steps_that_are_trained_again_are_measured_again(run, tmp_path):
    (run / "checkpoints" / "step-4").rename(tmp_path / "gone")
    trained(1, run, "optim.lr=0.001", resume=True)
    require_equal(run, "niah", 4, tmp_path / "out")
    assert len(rows(run / "evaluation")) == 3 * 4
    assert len(read_results(run)) == 3 * 2


def test_an_interrupted_evaluation_continues(run, tmp_path):
    place = run / "evaluation"
    lines = (place / "samples.jsonl").read_text().splitlines(keepends=True)
    results = (place / "results.jsonl").read_text().splitlines(keepends=True)
    # As if the run had ended in the last evaluation, while it wrote a sample.
    (place / "samples.jsonl").write_text("".join(lines[:-2]) + lines[-2][:20])
    (place / "results.jsonl").write_text("".join(results[:-1]))
    trained(1, run, resume=True)
    assert (place / "samples.jsonl").read_text().splitlines()[:-2] == [
        line.strip() for line in lines[:-2]
    ]
    require_equal(run, "niah", 4, tmp_path / "out")
    assert len(read_results(run)) == 6


def test_a_later_evaluation_of_the_checkpoint_reuses_the_samples(run, tmp_path):
    before = rows(run / "evaluation")
    options = "--length", "1408", "--samples", "3", "--checkpoints", "2,4"
    result = mtrain(tmp_path, "eval", "niah", "run", *options)
    assert result.returncode == 0, result.stderr
    after = rows(run / "evaluation")
    assert after[: len(before)] == before
    assert [(row["step"], row["index"]) for row in after[len(before) :]] == [(2, 2), (4, 2)]
    tables = evaluation_tables(open_report(run).results)
    heads = [[column.name for column in table.shown] for table in tables]
    assert ["length", "dense", "samples"] in heads
    assert all(len(set(head)) == len(head) for head in heads)


def locked(rank: int, world: int, folder: str) -> list[str]:
    """Train while another process evaluates the run, then on a full disk. Return the warnings."""
    run, said = Path(folder), []
    (run / "evaluation").mkdir(parents=True)
    lock = RunLock(run / "evaluation")
    add = ResultsFolder.add_sample

    class Unlocking(TaskEvaluations):
        def __init__(self, trainer, run_dir, _message):
            super().__init__(trainer, run_dir, lambda line, **_: said.append(line))

        def after_step(self, step):
            lock.release()
            ResultsFolder.add_sample = fail if step.metrics.step < 4 else add
            super().after_step(step)

    def fail(_folder, _row):
        raise OSError(28, "No space left on device")

    config = compose(SMALL)
    resolved_file.save(config, run / "resolved.yaml")
    train(config, RunDir(run), gloo.environment(rank, world), False, [Unlocking])
    return said


def test_a_folder_in_use_and_a_full_disk_do_not_end_training(tmp_path):
    run = tmp_path / "run"
    (said,) = gloo.run(1, locked, str(run))
    assert said[0] == (
        f"step 0: no task is evaluated (another `mtrain eval` writes to {run}/evaluation; wait for "
        "it or give another folder)"
    )
    failed = f"{run}/evaluation: could not be written (No space left on device); training goes on"
    assert failed in said
    assert {row["step"] for row in rows(run / "evaluation")} == {4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval.length=8k"], "eval.length=8k: the model has 4,096 positions; give at most 4k"),
        (["eval.length=64"], "eval.length=64: too few tokens for 10 needles"),
        (["mask=full"], "mask full: train.eval_tasks needs the loss of each token"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(words, message):
    with pytest.raises(ConfigError) as caught:
        require_tasks(compose(["train.eval_tasks=[niah]", *words]))
    assert caught.value.problems[0].startswith(message)
