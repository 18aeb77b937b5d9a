"""What a pattern learns trains with the model, survives in checkpoints, and serves evaluation."""

from __future__ import annotations

from pathlib import Path

import gloo
import pytest
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.model_source import open_source
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.conversion import export_checkpoint
from mtrain_cli.training.evaluation import evaluate
from mtrain_cli.training.trainer import Trainer

LEARNED = [
    "seq=160", "topology.block_size=16", "model.hidden_size=32", "model.num_layers=2",
    "model.head_dim=8", "model.intermediate_size=48", "optim.warmup_steps=2", "train.steps=6",
    "train.global_batch=4", "train.kernel=reference", "data.eval_sequences=2",
    "sparsity=block_topk", "sparsity.block=16", "sparsity.density=0.5", "sparsity.rank=4",
]  # fmt: skip
Degrees = dict[str, int]


def steps(
    rank: int, world: int, degrees: Degrees, words: list[str], count: int, run: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in a run's folder and save. Return losses, the last held-out, and what is learned."""
    config, folder = compose([*LEARNED, *words]), Path(run)
    if rank == 0:
        folder.mkdir(exist_ok=True)
        resolved_file.save(config, folder / "resolved.yaml")
    trainer = Trainer(config, gloo.environment(rank, world, **degrees))
    checkpointer = Checkpointer(folder / "checkpoints", 2)
    if checkpointer.latest() is not None:
        trainer.resume(checkpointer)
    losses = [trainer.train_step(False).loss for _ in range(count)]
    learned = {name: tensor.clone() for name, tensor in trainer.train_state.index.items()}
    losses.append(evaluate(trainer).loss)
    for name, tensor in trainer.train_state.index.items():
        assert torch.equal(tensor, learned[name]), f"an evaluation changed {name}"
    checkpointer.save(trainer.step, trainer.state(), asynchronous=False)
    trainer.close()
    return losses, learned


def assert_equal(index: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert index.keys() == other.keys()
    for name, tensor in index.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("words", [[], ["train.activation_checkpoint=none"]])
def test_an_interrupted_run_learns_as_an_uninterrupted_one(tmp_path, words):
    ((whole, index),) = gloo.run(1, steps, {}, words, 4, str(tmp_path / "whole"))
    ((first, _),) = gloo.run(1, steps, {}, words, 2, str(tmp_path / "cut"))
    ((second, again),) = gloo.run(1, steps, {}, words, 2, str(tmp_path / "cut"))
    assert first[:-1] + second == whole
    assert_equal(again, index)
    # 4 micro-batches in each of 4 steps, and recomputation learns nothing again.
    assert int(index["0.updates"]) == int(index["1.updates"]) == 256 + 2 * 15


def test_replicas_and_stages_share_what_they_learn_and_resume(tmp_path):
    for name, degrees, words in (
        ("dp", {"cp": 1}, []),
        ("pp", {"cp": 1, "pp": 2}, ["topology.pipeline_parallel=2"]),
    ):
        whole = gloo.run(2, steps, degrees, words, 3, str(tmp_path / f"{name}-whole"))
        first = gloo.run(2, steps, degrees, words, 1, str(tmp_path / name))
        second = gloo.run(2, steps, degrees, words, 2, str(tmp_path / name))
        for (losses, index), (begun, _), (ended, again) in zip(whole, first, second, strict=True):
            assert begun[:-1] + ended == losses, name
            assert_equal(again, index)
        if name == "dp":
            assert_equal(whole[0][1], whole[1][1])
        else:
            layers = [{key[0] for key in index} for _, index in whole]
            assert layers == [{"0"}, {"1"}]
        # One worker goes on with what two have saved.
        ((_, index),) = gloo.run(1, steps, {}, [], 0, str(tmp_path / name))
        merged = second[0][1] | second[1][1]
        assert_equal(index, merged)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned") / "run"
    gloo.run(1, steps, {}, [], 2, str(folder))
    return folder


def engine(path: Path, *words: str) -> Engine:
    source = open_source(path, ["topology.device=cpu", "train.kernel=reference", *words])
    return Engine(source, gloo.environment(0, 1))


def test_inference_reads_what_training_learned(run):
    loaded = engine(run)
    ids = [n * 7 % 251 for n in range(150)]
    losses = loaded.token_losses(ids)
    learned = loaded.choices.pattern.state(loaded.config.model, range(2), loaded.device)
    assert int(learned["1.updates"]) == 256 + 2 * 7
    stale = engine(run)
    for tensor in stale.choices.pattern.state(stale.config.model, range(2), stale.device).values():
        tensor.zero_()
    assert not torch.equal(stale.token_losses(ids), losses)


def test_other_patterns_ignore_what_was_learned(run, tmp_path):
    engine(run, "sparsity=dense")
    exported = export_checkpoint(run, tmp_path / "hf", dtype=torch.float32)
    assert "the learned index" in exported.tokenizer
    with pytest.raises(ConfigError, match=r"score=learned: .*Hugging Face folder.*score=exact"):
        engine(tmp_path / "hf", "sparsity=block_topk", "sparsity.block=16")


def resume_refused(rank: int, world: int, run: str) -> str:
    trainer = Trainer(compose(LEARNED), gloo.environment(rank, world))
    with pytest.raises(ConfigError) as refused:
        trainer.resume(Checkpointer(Path(run) / "checkpoints", 2))
    trainer.close()
    return str(refused.value)


def test_a_checkpoint_without_a_learned_index_is_refused_in_one_line(run, tmp_path):
    folder = tmp_path / "exact"
    gloo.run(1, steps, {}, ["sparsity.score=exact"], 1, str(folder))
    for line in gloo.run(2, resume_refused, str(folder)):
        assert "step-1: holds no learned index of layer 0" in line
        assert "sparsity.score=exact" in line
        assert "train.init_from" in line
        assert "\n" not in line
    with pytest.raises(ConfigError, match="step-1: holds no learned index of layer 0"):
        engine(folder, "sparsity.score=learned")
    with pytest.raises(ConfigError, match=r"layer 0 \(query\) has shape \[2, 16, 4\]"):
        engine(run, "sparsity.rank=8")
