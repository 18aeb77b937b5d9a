"""Pipeline-parallel training equals that of one worker: loss, every gradient, norm and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gloo
import numpy as np
import pytest
import torch
from slow_cases import mostly_slow

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model import huggingface
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.parallelize import initialize
from mtrain_cli.parallel.layer_groups import own_region
from mtrain_cli.training.checkpointer import Checkpointer, load_model_state
from mtrain_cli.training.evaluation import evaluate
from mtrain_cli.training.trainer import Trainer

SMALL = (
    "seq=150",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.intermediate_size=44",
    "model.qkv_bias=true",
    "data.document_mask=true",
    "train.global_batch=4",
    "optim.warmup_steps=2",
    "train.steps=12",
)
Gradients = dict[str, np.ndarray]
# (pipeline, context and tensor degree)
Degrees = tuple[int, int, int]
ALONE: Degrees = (1, 1, 1)


def make(rank: int, world: int, degrees: Degrees, overrides: tuple[str, ...]) -> Trainer:
    pp, cp, tp = degrees
    keys = (f"topology.pipeline_parallel={pp}", f"topology.tensor_parallel={tp}")
    config = compose([*SMALL, *overrides, *keys])
    return Trainer(config, gloo.environment(rank, world, cp, None, tp, pp))


def shards(
    rank: int, world: int, degrees: Degrees, overrides: tuple[str, ...]
) -> tuple[float, float, dict[str, tuple[Any, ...]]]:
    """Return loss, squared norm, and for each gradient its shape, region and shard."""
    trainer = make(rank, world, degrees, overrides)
    batches, _ = trainer.next_batches()
    valid, _ = trainer.run_step.totals(batches)
    attends = [trainer.attention_of(batch) for batch in batches]
    loss = trainer.run_step.forward_backward(batches, attends, valid)
    found = {
        name: (p.shape, [(s.start, s.stop) for s in own_region(p)], p.grad.to_local().numpy())
        for name, p in trainer.decoder.named_parameters()
    }
    return float(loss), float(trainer.states.squared_norm()), found


def whole(parts: list[tuple[float, float, dict[str, Any]]]) -> tuple[float, float, Gradients]:
    """Sum losses and squared norms over ranks, and join the shards of each gradient."""
    gradients: Gradients = {}
    for _, _, found in parts:
        for name, (shape, region, shard) in found.items():
            joined = gradients.setdefault(name, np.full(shape, np.nan, np.float32))
            place = tuple(slice(*ends) for ends in region)
            old = joined[place]
            assert np.array_equal(old[~np.isnan(old)], shard[~np.isnan(old)]), name
            joined[place] = shard
    for name, gradient in gradients.items():
        assert not np.isnan(gradient).any(), f"{name}: no rank has some elements"
    return sum(p[0] for p in parts), sum(p[1] for p in parts), gradients


_ALONE: dict[tuple[str, ...], tuple[float, float, Gradients]] = {}


def alone(overrides: tuple[str, ...]) -> tuple[float, float, Gradients]:
    if overrides not in _ALONE:
        _ALONE[overrides] = whole(gloo.run(1, shards, ALONE, overrides))
    return _ALONE[overrides]


def differences(
    world: int, degrees: Degrees, model: tuple[str, ...], run: tuple[str, ...]
) -> dict[str, float]:
    """Return relative differences of loss, norm and gradients from one worker."""
    expected, found = alone(model), whole(gloo.run(world, shards, degrees, (*model, *run)))
    assert found[2].keys() == expected[2].keys()
    result = {
        "loss": abs(found[0] / expected[0] - 1),
        "squared norm": abs(found[1] / expected[1] - 1),
    }
    for name, gradient in expected[2].items():
        assert np.abs(gradient).max() > 1e-6, f"{name}: a zero gradient would prove nothing"
        result[name] = float(np.linalg.norm(found[2][name] - gradient) / np.linalg.norm(gradient))
    return result


UNTIED = ("model.tie_word_embeddings=false", "model.qkv_bias=false")
WIDE = ("model.num_heads=8", "model.num_kv_heads=4", "model.qk_norm=true", "seq=151")
MHA = ("model.num_kv_heads=4",)
SLASHES = (
    "seq=256", "sparsity=vertical_slash", "sparsity.block=16", "sparsity.last_q=16",
    "sparsity.min_slashes=2", "sparsity.max_slashes=5", "sparsity.min_columns=4",
    "sparsity.max_columns=12", "sparsity.dense_steps=0",
)  # fmt: skip
MOBA = (
    "seq=256", "sparsity=moba", "sparsity.block=16", "sparsity.chunk=32", "sparsity.top_k=2",
    "sparsity.dense_steps=0",
)  # fmt: skip
DENSE_END = (*SLASHES, "sparsity.dense_layers=2")
DENSE_LIST = (*SLASHES, "sparsity.dense_layers=[0,3]")
WINDOWS = ("seq=256", "mask=sliding_window", "mask.window=40", "mask.full_every=2")
RING, ULYSSES = "topology.exchange=ring", "topology.exchange=ulysses"
GPIPE, VIRTUAL = "topology.schedule=gpipe", "topology.virtual_stages=2"
NONE, FULL = "train.activation_checkpoint=none", "train.activation_checkpoint=full"


@mostly_slow(
    ("world", "degrees", "model", "run"),
    [
        (2, (2, 1, 1), UNTIED, ()),
        (2, (2, 1, 1), (), (NONE, "topology.stage_layers=[1,3]")),
        (4, (4, 1, 1), (), ("train.micro_batch=2", "train.keep_mlp=1")),
        (2, (2, 1, 1), (), (VIRTUAL, "train.shard=optimizer", FULL)),
        (4, (2, 2, 1), MHA, (ULYSSES, VIRTUAL, "train.shard=gradients")),
        (4, (2, 2, 1), (), ("topology.exchange=group_cast", "topology.layout=balanced")),
        pytest.param(4, (2, 1, 1), (*UNTIED, "train.z_loss=0.001"), (), marks=pytest.mark.slow),
        (4, (2, 1, 2), WIDE, (VIRTUAL, "train.shard=gradients", FULL)),
        (4, (2, 2, 1), SLASHES, (RING, FULL)),
        (4, (2, 2, 1), MOBA, (VIRTUAL,)),
        (2, (2, 1, 1), WINDOWS, (VIRTUAL,)),
        # Two sparse layers and a dense one; only a dense one.
        (2, (2, 1, 1), DENSE_END, ("topology.stage_layers=[3,1]",)),
        (4, (2, 2, 1), (*MOBA, "sparsity.dense_layers=2"), (VIRTUAL,)),
        # A dense layer below a sparse one, and one above.
        (2, (2, 1, 1), DENSE_LIST, ("topology.stage_layers=[2,2]",)),
        (8, (2, 2, 2), (*SLASHES, "seed=1"), (RING,)),
        pytest.param(2, (2, 1, 1), (), ("train.compile=true",), marks=pytest.mark.slow),
        (2, (2, 1, 1), (*UNTIED, "train.dtype=bfloat16"), (VIRTUAL,)),
    ],
    keep=(1, 2, 3, 4, 5, 6, 10, 15, 16),
)
def test_loss_and_gradients_equal_those_of_one_worker(world, degrees, model, run):
    found = differences(world, degrees, model, run)
    bad = {name: value for name, value in found.items() if not value <= 1e-5}
    assert not bad, bad
    print(f"loss {found['loss']:.1e}, gradients {max(found.values()):.1e}")


def steps(
    rank: int,
    world: int,
    degrees: Degrees,
    overrides: tuple[str, ...],
    count: int,
    folder: str | None = None,
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of ``count`` steps. A folder resumes and gets a checkpoint."""
    trainer = make(rank, world, degrees, overrides)
    checkpointer = Checkpointer(folder, 2) if folder else None
    if checkpointer and checkpointer.latest() is not None:
        trainer.resume(checkpointer)
    results = [trainer.train_step(False) for _ in range(count)]
    if checkpointer:
        checkpointer.save(trainer.step, trainer.state(), asynchronous=False)
    trainer.close()
    return [(result.loss, result.grad_norm) for result in results]


CLIPPED = ("optim.clip_norm=0.5", "model.num_kv_heads=4", "train.global_batch=4")


@pytest.fixture(scope="module")
def curve() -> list[tuple[float, float]]:
    return gloo.run(1, steps, ALONE, CLIPPED, 10)[0]


@mostly_slow(
    ("world", "degrees", "run"),
    [
        (2, (2, 1, 1), ()),
        pytest.param(4, (2, 1, 2), (VIRTUAL, "train.shard=gradients"), marks=pytest.mark.slow),
        (4, (2, 2, 1), (GPIPE,)),
    ],
    keep=(0,),
)
def test_ten_clipped_steps_equal_those_of_one_worker(curve, world, degrees, run):
    assert all(norm > 0.5 for _, norm in curve), "clipping must change every step"
    assert curve[-1][0] < curve[0][0] - 0.1
    for rank, found in enumerate(gloo.run(world, steps, degrees, (*CLIPPED, *run), 10)):
        np.testing.assert_allclose(found, curve, rtol=2e-5, err_msg=f"rank {rank}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, (2, 1, 1), ()), (1, ALONE, ())),
        pytest.param((1, ALONE, ()), (2, (2, 1, 1), (VIRTUAL,)), marks=pytest.mark.slow),
        pytest.param((4, (2, 1, 2), (VIRTUAL,)), (4, (2, 2, 1), (GPIPE,)), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_one_mesh_resumes_on_another(tmp_path, curve, before, after):
    """before, after: workers, degrees and further settings."""
    found = []
    for (world, degrees, run), count in ((before, 4), (after, 6)):
        found += gloo.run(world, steps, degrees, (*CLIPPED, *run), count, str(tmp_path))[0]
    np.testing.assert_allclose(found, curve, rtol=2e-5)


@pytest.mark.slow
def test_resuming_on_the_same_mesh_is_bitwise_the_uninterrupted_run(tmp_path):
    run: tuple[Any, ...] = ((2, 1, 1), (VIRTUAL,))
    whole_run = gloo.run(2, steps, *run, 4)
    first = gloo.run(2, steps, *run, 2, str(tmp_path))
    second = gloo.run(2, steps, *run, 2, str(tmp_path))
    assert [a + b for a, b in zip(first, second, strict=True)] == whole_run


def saved(rank: int, world: int, degrees: Degrees) -> list[str]:
    """Return what a checkpoint holds of the optimizer."""
    trainer = make(rank, world, degrees, ())
    trainer.close()
    return list(trainer.state()["optimizer"])


def test_a_checkpoint_of_stages_holds_no_groups_of_parameters():
    """Each stage has other groups, and a file could hold those of one stage only."""
    assert gloo.run(2, saved, (2, 1, 1)) == [["state"]] * 2
    assert gloo.run(1, saved, ALONE) == [["state", "param_groups"]]


def tied(rank: int, world: int, folder: str) -> np.ndarray | None:
    """Return the shard of the tied embedding after three steps and a resumption."""
    for _ in range(2):
        steps(rank, world, (3, 1, 1), CLIPPED, 3, folder)
    trainer = make(rank, world, (3, 1, 1), CLIPPED)
    trainer.resume(Checkpointer(folder, 2))
    weights = {n: p.to_local().detach().numpy() for n, p in trainer.decoder.named_parameters()}
    return weights.get("embed_tokens.weight")


def test_both_ends_keep_the_same_tied_embedding(tmp_path):
    first, middle, last = gloo.run(3, tied, str(tmp_path))
    assert middle is None
    np.testing.assert_array_equal(first, last)


@pytest.mark.slow
def test_a_hugging_face_folder_goes_in_and_out(tmp_path):
    """Steps from a folder's weights equal those of one worker, and so does the saved model."""
    words = ("model.tie_word_embeddings=false", "optim.lr=0.01")
    weights = written_folder(tmp_path / "hf", compose([*SMALL, *words]).model)
    run = (f"train.init_from={tmp_path / 'hf'}", *words)
    expected = gloo.run(1, steps, ALONE, run, 2, str(tmp_path / "alone"))[0]
    found = gloo.run(4, steps, (4, 1, 1), run, 2, str(tmp_path / "shared"))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    saved = [load_model_state(tmp_path / name)[1] for name in ("alone", "shared")]
    assert saved[0].keys() == saved[1].keys() == weights.keys()
    for name, weight in saved[0].items():
        torch.testing.assert_close(saved[1][name], weight, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(weight, weights[name], atol=1e-3), f"{name} did not change"


def written_folder(folder: Path, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Write a Hugging Face folder with random weights. Return them by name."""
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device="cpu")
    initialize(decoder, 7)
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    about = {"rope_factor": 1.0, "seq": 150, "dtype": torch.float32}
    huggingface.write_folder(folder, model, lambda names: {n: weights[n] for n in names}, **about)
    return weights


def held_out(
    rank: int, world: int, degrees: Degrees, run: tuple[str, ...]
) -> list[tuple[int, float | None]]:
    """Return tokens and loss of each bucket of the held-out sequences."""
    trainer = make(rank, world, degrees, ("data.eval_sequences=3", "seq=301", *run))
    found = evaluate(trainer)
    trainer.close()
    return [(bucket.tokens, bucket.loss) for bucket in found.buckets]


def test_the_held_out_loss_by_context_equals_that_of_one_worker():
    expected = gloo.run(1, held_out, ALONE, ())[0]
    assert sum(tokens > 0 for tokens, _ in expected) > 1
    for world, degrees, run in ((2, (2, 1, 1), (VIRTUAL,)), (4, (2, 1, 1), ()), (8, (2, 2, 2), ())):
        for found in gloo.run(world, held_out, degrees, run):
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            np.testing.assert_allclose(
                [loss for _, loss in found if loss], [loss for _, loss in expected if loss], 1e-5
            )


def sparse_metrics(
    rank: int, world: int, degrees: Degrees, overrides: tuple[str, ...] = SLASHES
) -> list[float]:
    """Return pairs, density, slashes and columns of a sparse step, and its densities by layer."""
    trainer = make(rank, world, degrees, overrides)
    result = trainer.train_step(False)
    trainer.close()
    index = result.index
    each = index.density_by_layer
    return [result.pairs, index.density, index.slashes, index.columns, *each]


def test_metrics_of_a_sparse_step_equal_those_of_one_worker():
    expected = gloo.run(1, sparse_metrics, ALONE)[0]
    for found in gloo.run(4, sparse_metrics, (2, 2, 1)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@mostly_slow(
    ("words", "dense", "stage_layers"),
    [(DENSE_END, (2, 3), "[2,2]"), (DENSE_LIST, (0, 3), "[1,3]")],
    keep=(1,),
)
def test_a_stage_of_only_dense_layers_reports_the_metrics_of_all(words, dense, stage_layers):
    expected = gloo.run(1, sparse_metrics, ALONE, words)[0]
    density = expected[-4:]
    assert {layer for layer in range(4) if density[layer] == max(density)} == {*dense}
    stages = (*words, f"topology.stage_layers={stage_layers}")
    for found in gloo.run(2, sparse_metrics, (2, 1, 1), stages):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
