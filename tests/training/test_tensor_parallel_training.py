"""Tensor-parallel training equals that of one worker: loss, every gradient, norm and steps."""

from __future__ import annotations

from typing import Any

import gloo
import numpy as np
import pytest
import torch
from slow_cases import mostly_slow

from mtrain_cli.composition.compose import compose
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
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.intermediate_size=44",
    "model.qkv_bias=true",
    "data.document_mask=true",
    "train.global_batch=2",
    "optim.warmup_steps=2",
    "train.steps=12",
)
Gradients = dict[str, np.ndarray]


def make(rank: int, world: int, tp: int, cp: int, overrides: tuple[str, ...]) -> Trainer:
    config = compose([*SMALL, *overrides, f"topology.tensor_parallel={tp}"])
    nodes = config.topology.gpus_per_node
    per_node = nodes if isinstance(nodes, int) else None
    return Trainer(config, gloo.environment(rank, world, cp, per_node, tp))


def shards(
    rank: int, world: int, tp: int, cp: int, overrides: tuple[str, ...]
) -> tuple[float, float, dict[str, tuple[Any, ...]]]:
    """Return loss, squared norm, and for each gradient its shape, region and shard."""
    trainer = make(rank, world, tp, cp, overrides)
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
    gradients = {}
    for name, (shape, _, _) in parts[0][2].items():
        joined = np.full(shape, np.nan, np.float32)
        for _, _, found in parts:
            region = tuple(slice(*ends) for ends in found[name][1])
            old = joined[region]
            assert np.array_equal(old[~np.isnan(old)], found[name][2][~np.isnan(old)]), name
            joined[region] = found[name][2]
        assert not np.isnan(joined).any(), f"{name}: no rank has some elements"
        gradients[name] = joined
    return sum(p[0] for p in parts), sum(p[1] for p in parts), gradients


_ALONE: dict[tuple[str, ...], tuple[float, float, Gradients]] = {}


def alone(overrides: tuple[str, ...]) -> tuple[float, float, Gradients]:
    if overrides not in _ALONE:
        _ALONE[overrides] = whole(gloo.run(1, shards, 1, 1, overrides))
    return _ALONE[overrides]


def differences(world: int, tp: int, cp: int, model: tuple[str, ...], run: tuple[str, ...]) -> dict:
    """Return relative differences of loss, norm and gradients from one worker."""
    expected, found = alone(model), whole(gloo.run(world, shards, tp, cp, (*model, *run)))
    assert found[2].keys() == expected[2].keys()
    result = {
        "loss": abs(found[0] / expected[0] - 1),
        "squared norm": abs(found[1] / expected[1] - 1),
    }
    for name, gradient in expected[2].items():
        assert np.abs(gradient).max() > 1e-6, f"{name}: a zero gradient would prove nothing"
        result[name] = np.linalg.norm(found[2][name] - gradient) / np.linalg.norm(gradient)
    return result


MHA = ("model.num_kv_heads=4",)
WIDE = ("model.num_heads=8", "model.num_kv_heads=4", "model.qk_norm=true", "seq=151")
UNTIED = ("model.tie_word_embeddings=false", "model.qkv_bias=false", "train.z_loss=0.001")
SLASHES = (
    "seq=256", "sparsity=vertical_slash", "sparsity.block=16", "sparsity.last_q=16",
    "sparsity.min_slashes=2", "sparsity.max_slashes=5", "sparsity.min_columns=4",
    "sparsity.max_columns=12", "sparsity.dense_steps=0",
)  # fmt: skip
MOBA = (
    "seq=256", "sparsity=moba", "sparsity.block=16", "sparsity.chunk=32", "sparsity.top_k=2",
    "sparsity.dense_steps=0",
)  # fmt: skip
FIXED = (
    "seq=256", "sparsity=fixed", "sparsity.block=16", "sparsity.slashes=3", "sparsity.columns=8",
    "sparsity.dense_steps=0",
)  # fmt: skip
RING, ULYSSES = "topology.exchange=ring", "topology.exchange=ulysses"
TILES = ("train.tile_mib=1", "model.intermediate_size=2048", "seq=310")


@mostly_slow(
    ("tp", "cp", "dp", "model", "run"),
    [
        pytest.param(2, 1, 1, (), ("train.activation_checkpoint=none",), marks=pytest.mark.slow),
        (2, 1, 1, WIDE, ("train.activation_checkpoint=full", "train.keep_mlp=1")),
        (4, 1, 1, WIDE, ("train.micro_batch=2", "train.activation_checkpoint=sequence_selective")),
        (2, 2, 1, MHA, (RING, "train.shard=gradients")),
        (2, 1, 2, UNTIED, ("train.shard=optimizer", "train.loss_gradients=recompute")),
        (2, 2, 1, SLASHES, (RING, "train.activation_checkpoint=full")),
        (2, 2, 1, MOBA, ()),
        (2, 1, 1, FIXED, ("train.shard=optimizer",)),
        (2, 2, 1, WIDE, ("train.offload_activations=true", RING, "train.keep_mlp=1")),
        pytest.param(
            2,
            2,
            1,
            (),
            (ULYSSES, "train.keep_mlp=true", "train.micro_batch=2"),
            marks=pytest.mark.slow,
        ),
        (2, 1, 1, TILES, ("train.keep_mlp=1",)),
        (2, 2, 1, WIDE, ("topology.tensor_chunks=5", "train.keep_mlp=1")),
        pytest.param(
            4,
            1,
            1,
            WIDE,
            ("topology.tensor_chunks=7", "train.activation_checkpoint=none"),
            marks=pytest.mark.slow,
        ),
        (2, 2, 2, (*UNTIED, "train.global_batch=4"), (RING, "topology.layout=zigzag")),
        pytest.param(
            2,
            3,
            1,
            WIDE,
            ("topology.layout=contiguous", "train.activation_checkpoint=none"),
            marks=pytest.mark.slow,
        ),
        pytest.param(2, 1, 1, WIDE, ("train.compile=true",), marks=pytest.mark.slow),
        pytest.param(
            2,
            2,
            1,
            (),
            ("topology.exchange=group_cast", "topology.layout=balanced"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            4,
            1,
            (),
            ("topology.exchange=hierarchical_ring", "topology.gpus_per_node=4"),
            marks=pytest.mark.slow,
        ),
    ],
    keep=(1, 2, 3, 8),
)
def test_loss_and_gradients_equal_those_of_one_worker(tp, cp, dp, model, run):
    found = differences(tp * cp * dp, tp, cp, model, run)
    bad = {name: value for name, value in found.items() if not value <= 1e-5}
    assert not bad, bad
    print(f"{max(found.values()):.2e}")


@mostly_slow("kind", ["mlp", "all"], keep=(1,))
def test_fp8_errs_as_much_in_a_tensor_group_as_on_one_worker(kind):
    model = ("model.intermediate_size=96", "train.dtype=bfloat16", f"train.fp8={kind}")
    model += ("model.head_dim=16",)
    found = differences(4, 2, 2, model, ("train.keep_mlp=1",))
    # Each worker has scales of its own part of the weights, and sums two rounded parts.
    assert found["layers.0.mlp.gate_proj.weight"] > 1e-4
    bad = {name: value for name, value in found.items() if not value <= 0.1}
    assert not bad, bad


def steps(
    rank: int,
    world: int,
    tp: int,
    cp: int,
    overrides: tuple[str, ...],
    count: int,
    folder: str | None = None,
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of ``count`` steps. A folder resumes and gets a checkpoint."""
    trainer = make(rank, world, tp, cp, overrides)
    checkpointer = Checkpointer(folder, 2) if folder else None
    if checkpointer and checkpointer.latest() is not None:
        trainer.resume(checkpointer)
    result = []
    for _ in range(count):
        done = trainer.train_step(False)
        result.append((done.loss, done.grad_norm))
    if checkpointer:
        checkpointer.save(trainer.step, trainer.state(), asynchronous=False)
    trainer.close()
    return result


CLIPPED = ("optim.clip_norm=0.5", *UNTIED)


@pytest.fixture(scope="module")
def curve() -> list[tuple[float, float]]:
    return gloo.run(1, steps, 1, 1, CLIPPED, 10)[0]


@pytest.mark.slow
def test_ten_clipped_steps_equal_those_of_one_worker(curve):
    assert all(norm > 0.5 for _, norm in curve), "clipping must change every step"
    assert curve[-1][0] < curve[0][0] - 0.1
    for rank, found in enumerate(gloo.run(4, steps, 2, 2, CLIPPED, 10)):
        np.testing.assert_allclose(found, curve, rtol=2e-5, err_msg=f"rank {rank}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2, 1), (1, 1, 1)),
        pytest.param((3, 1, 3), (4, 2, 1), marks=pytest.mark.slow),
        pytest.param((4, 4, 1), (4, 2, 2), marks=pytest.mark.slow),
        pytest.param((2, 1, 2), (2, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_one_mesh_resumes_on_another(tmp_path, before, after):
    """before, after: workers, tensor-parallel and context-parallel degree."""
    model = (*CLIPPED, "model.num_kv_heads=4", "train.global_batch=6")
    expected = gloo.run(1, steps, 1, 1, model, 6)[0]
    first = gloo.run(before[0], steps, *before[1:], model, 3, str(tmp_path))[0]
    second = gloo.run(after[0], steps, *after[1:], model, 3, str(tmp_path))[0]
    np.testing.assert_allclose(first + second, expected, rtol=2e-5)


@pytest.mark.slow
def test_resuming_on_the_same_mesh_is_bitwise_the_uninterrupted_run(tmp_path):
    whole_run = gloo.run(2, steps, 2, 1, (), 4)
    first = gloo.run(2, steps, 2, 1, (), 2, str(tmp_path))
    second = gloo.run(2, steps, 2, 1, (), 2, str(tmp_path))
    assert [a + b for a, b in zip(first, second, strict=True)] == whole_run


def test_a_hugging_face_folder_goes_in_and_out(tmp_path):
    """Steps from a folder's weights equal those of one worker, and so does the saved model."""
    model = compose([*SMALL, "model.num_kv_heads=4"]).model
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device="cpu")
    initialize(decoder, 7)
    weights = dict(decoder.named_parameters())
    folder = tmp_path / "hf"
    huggingface.write_folder(
        folder,
        model,
        lambda names: {name: weights[name].detach() for name in names},
        rope_factor=1.0,
        seq=150,
        dtype=torch.float32,
    )
    run = (f"train.init_from={folder}", "model.num_kv_heads=4", "optim.lr=0.01")
    expected = gloo.run(1, steps, 1, 1, run, 2, str(tmp_path / "alone"))[0]
    found = gloo.run(4, steps, 4, 1, run, 2, str(tmp_path / "shared"))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    saved = [load_model_state(tmp_path / name)[1] for name in ("alone", "shared")]
    assert saved[0].keys() == saved[1].keys() == weights.keys()
    for name, weight in saved[0].items():
        torch.testing.assert_close(saved[1][name], weight, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(weight, weights[name], atol=1e-3), f"{name} did not change"


def held_out(rank: int, world: int, tp: int, cp: int) -> list[tuple[int, float | None]]:
    """Return tokens and loss of each bucket of the held-out sequences."""
    trainer = make(rank, world, tp, cp, ("data.eval_sequences=3", "seq=301"))
    found = evaluate(trainer)
    trainer.close()
    return [(bucket.tokens, bucket.loss) for bucket in found.buckets]


@pytest.mark.slow
def test_the_held_out_loss_by_context_equals_that_of_one_worker():
    expected = gloo.run(1, held_out, 1, 1)[0]
    assert sum(tokens > 0 for tokens, _ in expected) > 1
    for world, tp, cp in ((2, 2, 1), (8, 2, 2)):
        for found in gloo.run(world, held_out, tp, cp):
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            np.testing.assert_allclose(
                [loss for _, loss in found if loss], [loss for _, loss in expected if loss], 1e-5
            )
