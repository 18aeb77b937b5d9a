"""What a pattern learns in training is averaged, saved, resumed, and used by an evaluation."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import gloo
import pytest
import torch
import typer
from training.test_trainer import SMALL
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.commands.train import train
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.inference.engine import Engine
from mtrain_cli.inference.model_source import open_source
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.sparsity.index_maps import FIRST_UPDATES
from mtrain_cli.training.checkpointer import (
    LEARNED,
    Checkpointer,
    load_model_state,
    write_model_state,
)
from mtrain_cli.training.evaluation import read_evaluations
from mtrain_cli.training.trainer import Trainer

LEARNED_INDEX = (
    "sparsity=block_topk", "sparsity.block=16", "sparsity.density=0.7", "sparsity.rank=4",
    "sparsity.row_cap=100", "topology.layout=striped", "topology.exchange=ring",
)  # fmt: skip


def make(rank: int, world: int, cp: int, words: tuple[str, ...], pp: int = 1) -> Trainer:
    return Trainer(compose([*SMALL, *words]), gloo.environment(rank, world, cp, pp=pp))


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state().get(LEARNED, {}).items()}


def learn(
    rank: int, world: int, cp: int, count: int, folder: str, pp: int = 1, *words: str
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses, and what was learned when training began and ended."""
    stages = f"topology.pipeline_parallel={pp}"
    trainer = make(rank, world, cp, (*LEARNED_INDEX, stages, *words), pp)
    checkpointer = Checkpointer(folder, 2)
    if checkpointer.latest() is not None:
        trainer.resume(checkpointer)
    began = state(trainer)
    losses = [trainer.train_step(False).loss for _ in range(count)]
    checkpointer.save(trainer.step, trainer.state())
    checkpointer.wait()
    return losses, began, state(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 1])
def test_training_resumes_bitwise_with_what_it_has_learned(tmp_path, cp):
    whole = gloo.run(2, learn, cp, 4, str(tmp_path / "whole"))
    first = gloo.run(2, learn, cp, 2, str(tmp_path / "parts"))
    second = gloo.run(2, learn, cp, 2, str(tmp_path / "parts"))
    assert first[0][0] + second[0][0] == whole[0][0]
    for rank in range(2):  # replicas average what they learn, workers of a sequence learn the same
        for name, tensor in whole[rank][2].items():
            assert torch.equal(tensor, whole[0][2][name])
            assert torch.equal(tensor, second[rank][2][name])
            assert torch.equal(second[rank][1][name], first[rank][2][name])
    assert int(whole[0][2]["0.updates"]) > FIRST_UPDATES
    assert not torch.equal(whole[0][2]["1.query"], whole[0][1]["1.query"])


def test_stages_keep_their_layers(tmp_path):
    first = gloo.run(2, learn, 1, 1, str(tmp_path), 2)
    assert [{name.split(".")[0] for name in part[2]} for part in first] == [{"0"}, {"1"}]
    (again,) = gloo.run(1, learn, 1, 1, str(tmp_path))
    for _, _, ended in first:
        assert all(torch.equal(again[1][name], tensor) for name, tensor in ended.items())


@pytest.mark.slow
def test_training_with_a_dense_first_layer_resumes_bitwise(tmp_path):
    words = "model.num_layers=3", "sparsity.dense_layers=[0]"
    stages = 2, "topology.stage_layers=[1,2]", *words
    (whole,) = gloo.run(1, learn, 1, 4, str(tmp_path / "whole"), 1, *words)
    for workers, pp, *settings in ((2, *stages), (1, 1, *words)):
        parts = gloo.run(workers, learn, 1, 2, str(tmp_path / "parts"), pp, *settings)
    assert parts[0][0] == pytest.approx(whole[0][2:])
    assert {name.split(".")[0] for name in parts[0][2]} == {"1", "2"}


def resumed_without(rank: int, world: int, folder: str) -> str:
    """Return why a run does not resume from a checkpoint of exact scores."""
    checkpointer = Checkpointer(folder, 2)
    exact = make(rank, world, 1, (*LEARNED_INDEX, "sparsity.score=exact"))
    assert LEARNED not in exact.state()
    checkpointer.save(1, exact.state(), asynchronous=False)
    words = (*LEARNED_INDEX, f"topology.pipeline_parallel={world}", "sparsity.dense_layers=1")
    with pytest.raises(ConfigError) as error:
        make(rank, world, 1, words, world).resume(checkpointer)
    return str(error.value)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_without_a_learned_index_is_refused_on_all_workers(tmp_path, workers):
    checkpointer = Checkpointer(tmp_path, 3)
    weights = {"model": {"weight": torch.zeros(3)}, LEARNED: {"0.query": torch.zeros(2)}}
    checkpointer.save(0, weights, asynchronous=False)  # not this older one, which has an index
    # The second of two stages has only the dense layer, but must not wait for the first.
    for problem in gloo.run(workers, resumed_without, str(tmp_path)):
        assert "step-1: holds no learned index of layer 0, which sparsity.score=learned" in problem
        assert "train.init_from" in problem
        assert "\n" not in problem


def resumed_import(rank: int, world: int, folder: str) -> str:
    trainer = make(rank, world, 1, LEARNED_INDEX)
    write_model_state(folder, 0, trainer.state()["model"])
    with pytest.raises(ConfigError) as error:
        trainer.resume(Checkpointer(folder, 2))
    return str(error.value)


def test_imported_weights_hold_no_learned_index(tmp_path):
    assert "holds no learned index" in gloo.run(1, resumed_import, str(tmp_path))[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned") / "run"
    words = ["seq=160", "train.steps=2", "topology.workers=1", f"run.dir={folder}", *LEARNED_INDEX]
    words += [word for word in SMALL if word.startswith("model.")]
    with pytest.raises(typer.Exit) as end:
        train(words)
    assert end.value.exit_code == 0
    return folder


def engine(run: Path, *words: str) -> Engine:
    source = open_source(run, ["topology.workers=1", *words])
    return Engine(source, resolve_environment(source.config))


def test_an_evaluation_uses_what_the_run_has_learned(run):
    loaded = engine(run)
    maps = loaded.choices.pattern.state(loaded.config.model, [0], loaded.device)
    assert int(maps["0.updates"]) > FIRST_UPDATES
    ids = list(range(60, 220))
    before = {name: tensor.clone() for name, tensor in maps.items()}
    learned = loaded.token_losses(ids)
    assert all(torch.equal(tensor, before[name]) for name, tensor in maps.items())
    maps["0.key"].neg_()
    maps["1.key"] = maps["0.key"]
    other = loaded.token_losses(ids)
    assert not torch.equal(learned, other), "the loaded maps choose"
    assert torch.isfinite(engine(run, "sparsity=dense").token_losses(ids)).all()


@pytest.mark.slow
def test_an_index_that_has_not_learned_chooses_nothing(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(typer.Exit):
        train([
            "seq=160", "train.steps=3", "topology.workers=1", f"run.dir={folder}", *LEARNED_INDEX,
            "sparsity.dense_steps=2", "data.eval_sequences=1", "train.eval_every=1",
            "train.checkpoint_every=1", "train.keep_checkpoints=3",
            *(word for word in SMALL if word.startswith("model.")), "model.num_layers=1",
        ])  # fmt: skip
    attention = {row.step: row.attention for row in read_evaluations(folder)[0]}
    # After the second step, the next one is sparse, but nothing has learned yet.
    assert attention == {0: "dense", 1: "dense", 2: "dense", 3: "block_topk"}
    log = (folder / "log.txt").read_text()
    assert re.findall(r"step \d begins with \d+ updates", log) == [
        f"step 3 begins with {FIRST_UPDATES} updates"
    ]
    early = folder / "checkpoints" / "step-2"
    line = f"{early}: until the checkpoint of step 2, sparsity.dense_steps=2 made all steps dense"
    with pytest.raises(ConfigError, match=re.escape(line)):
        engine(early)
    engine(early, "sparsity=dense")
    engine(early, "sparsity.score=exact")
    engine(folder)
    words = ["eval", "perplexity", str(folder), "--checkpoints", "all", "--length", "128", "--json"]
    done = CliRunner().invoke(app, [*words, "--samples", "1", "--text", __file__])
    assert done.exit_code == 0, done.output
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["step"] for one in results] == [3]
    for step in (1, 2):
        assert f"step {step}: sparsity.dense_steps=2 made all steps until then dense" in done.stderr


def test_an_evaluation_needs_the_index_of_its_own_step_and_shape(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    model = load_model_state(copy)[1]
    write_model_state(copy / "checkpoints", 5, model)
    with pytest.raises(ConfigError, match="step-5: holds no learned index of layer 0"):
        engine(copy)
    line = r"step-2: the learned index of layer 0 \(query\) has sparsity.rank=4, not 8; give the"
    with pytest.raises(ConfigError, match=line):
        engine(run, "sparsity.rank=8")


def test_only_sparse_layers_have_a_learned_index(run):
    pattern = engine(run, "sparsity.dense_layers=1").choices.pattern
    assert set(pattern._maps) == {0}


def test_a_verified_checkpoint_names_its_learned_index(run):
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(run), "--tokens", "8"])
    assert result.exit_code == 0, result.output
    loaded = engine(run)
    model, layers = loaded.config.model, range(loaded.config.model.num_layers)
    state = loaded.choices.pattern.state(model, layers, loaded.device)
    numbers = sum(tensor.numel() for tensor in state.values())
    line = f"learned index            {len(layers)} layers, {numbers:,} numbers; not compared"
    assert line in result.stdout


def test_a_folder_of_weights_holds_no_learned_index(run, tmp_path):
    from mtrain_cli.training.conversion import export_checkpoint

    exported = export_checkpoint(run, tmp_path / "hf", dtype=torch.bfloat16)
    assert "the learned index stays in the checkpoint" in exported.tokenizer
    words = [word for word in LEARNED_INDEX if word.startswith("sparsity")]
    line = f"sparsity.score=learned: {tmp_path / 'hf'} holds no learned index; give the run"
    with pytest.raises(ConfigError, match=re.escape(line)):
        open_source(tmp_path / "hf", words)
