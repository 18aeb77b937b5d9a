"""Expert-parallel training equals that of one worker: loss, every gradient, steps, checkpoints."""

from __future__ import annotations

from typing import Any

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from slow_cases import mostly_slow
from torch.utils._python_dispatch import TorchDispatchMode
from training import test_pipeline as pipelines
from training.test_router_batches import BIASED, MOE, SHARED, SIGMOID, exchange, same
from training.test_router_batches import steps as router_steps
from training.test_tensor_parallel_training import SLASHES, differences, held_out, make, steps
from training.test_tensor_parallel_training import SMALL as TENSOR_SMALL

from mtrain_cli.composition.compose import compose
from mtrain_cli.model import huggingface
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.experts import expert_layers
from mtrain_cli.model.parallelize import initialize
from mtrain_cli.parallel.layer_groups import own_region
from mtrain_cli.training.checkpointer import Checkpointer, load_model_state
from mtrain_cli.training.expert_traffic import expert_traffic

NONE, FULL = "train.activation_checkpoint=none", "train.activation_checkpoint=full"
DEALT = "topology.expert_parallel"
# Two workers hold the same experts. 33 rows of the down projection cannot be cut in two.
NARROW = (*MOE, "model.hidden_size=33")


def dealt(degree: int, *more: str) -> tuple[str, ...]:
    return (f"{DEALT}={degree}", *more)


slow = pytest.mark.slow


@mostly_slow(
    ("tp", "cp", "dp", "model", "run"),
    [
        (1, 2, 1, MOE, dealt(2, exchange("ring"), NONE)),
        (1, 2, 1, SHARED, dealt(2, FULL, "topology.expert_chunks=3")),
        (1, 2, 2, MOE, dealt(2, "train.shard=gradients")),
        (1, 2, 2, SIGMOID, dealt(4, "train.shard=optimizer")),
        (2, 2, 1, SHARED, dealt(4, "topology.expert_chunks=2")),
        (2, 1, 1, MOE, dealt(2, "train.micro_batch=2")),
        (1, 2, 1, MOE, dealt(2, "train.offload_activations=true", "topology.expert_chunks=2")),
        (1, 2, 2, NARROW, dealt(2)),
        (1, 2, 1, (*MOE, *SLASHES), dealt(2, exchange("ring"), FULL)),
        pytest.param(1, 2, 1, MOE, dealt(2, "train.compile=true"), marks=slow),
        (1, 2, 1, SIGMOID, (FULL, "topology.expert_chunks=3", "train.micro_batch=2")),
        pytest.param(2, 2, 2, (*MOE, "train.global_batch=4"), dealt(8), marks=slow),
        pytest.param(1, 8, 1, (*SHARED, "topology.block_size=16"), dealt(4), marks=slow),
    ],
    keep=(0, 2, 3, 4, 6),
)
def test_loss_and_gradients_equal_those_of_one_worker(tp, cp, dp, model, run):
    found = differences(tp * cp * dp, tp, cp, model, run)
    bad = {name: value for name, value in found.items() if not value <= 1e-5}
    assert not bad, bad
    assert found["loss"] <= 1e-6


def test_stages_of_a_pipeline_deal_their_own_experts():
    degrees = (2, 2, 1)
    found = pipelines.differences(4, degrees, MOE, dealt(2, "topology.virtual_stages=2"))
    bad = {name: value for name, value in found.items() if not value <= 1e-5}
    assert not bad, bad


def test_drops_biases_and_metrics_equal_those_of_one_worker():
    expected = gloo.run(1, router_steps, 1, 1, BIASED, 3, "")[0]
    for found in gloo.run(2, router_steps, 1, 2, (*BIASED, *dealt(2)), 3, ""):
        same(found, expected)


def one_expert(rank: int, world: int, degree: int) -> tuple[float, int]:
    """Return the loss of a step in which expert 0 computes every token, and its received bytes."""
    words = (*MOE, f"{DEALT}={degree}", "model.moe.top_k=1", "model.moe.normalize=false")
    trainer = make(rank, world, 1, world, words)
    for mlp in expert_layers(trainer.decoder.layers):
        mlp.selection_bias[0] = 100.0
    loss = trainer.train_step(False).loss
    received = 0 if trainer.experts is None else trainer.experts.received[0]
    trainer.close()
    return loss, received


def test_all_tokens_on_one_expert_train_and_the_other_worker_takes_part():
    ((expected, _),) = gloo.run(1, one_expert, 1)
    (first, much), (second, little) = gloo.run(2, one_expert, 2)
    assert first == second == pytest.approx(expected, rel=1e-6)
    assert much > little > 0, "the worker of expert 0 receives rows, the other gets results back"


class Counted(TorchDispatchMode):
    """Bytes that reach this worker from others: rows, and weights and gradients of experts."""

    def __init__(self, experts: dist.ProcessGroup, sharing: tuple[int, ...]) -> None:
        """Count rows in the group ``experts``, and weights among the workers ``sharing``.

        The latter hold the same experts.
        """
        super().__init__()
        self.experts, self.sharing = experts.group_name, sharing
        self.rows = self.weights = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if name.startswith("c10d.") and ("base" in name or "recv_" in name):
            boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            if "recv_" in name:
                own = group.group_name == self.experts
                self.rows += own * sum(arriving.nbytes for arriving in args[0])
            elif tuple(dist.get_process_group_ranks(group)) == self.sharing:
                part = min(args[0].nbytes, args[1].nbytes)
                self.weights += (len(self.sharing) - 1) * part
        return function(*args, **(kwargs or {}))


def received(rank: int, world: int, words: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Return bytes of rows and of weights in a step, counted in messages and by the formula."""
    trainer = make(rank, world, 1, world, words)
    group = trainer.experts
    assert group is not None
    with Counted(group.process_group, tuple(range(rank % 2, world, 2))) as counted:
        trainer.train_step(False)
    assert counted.rows == group.received[0]
    dims, layout = trainer.environment.dims, trainer.choices.layout
    formula = expert_traffic(trainer.config, dims, layout, 4, group.size)
    layers = len(expert_layers(trainer.decoder.layers))
    trainer.close()
    expected = [layers * formula.rows, layers * formula.weights]
    return [counted.rows, counted.weights], expected


@mostly_slow(
    ("world", "run"),
    [
        (2, (NONE,)),
        (4, (FULL, "topology.expert_chunks=3")),
        (4, ("train.shard=optimizer", "train.micro_batch=1")),
    ],
    keep=(0,),
)
def test_a_step_receives_the_bytes_of_the_formula(world, run):
    """The formula assumes balance, so each token chooses all experts."""
    words = (*MOE, *dealt(2), *run, "seq=256", "topology.block_size=16", "model.moe.top_k=8")
    for counted, formula in gloo.run(world, received, words):
        assert counted == pytest.approx(formula, rel=1e-6)
        assert (world > 2) == (counted[1] > 0)


def trained(
    rank: int, world: int, cp: int, tp: int, words: tuple[str, ...], count: int, folder: str
) -> list[tuple[float, float]]:
    return steps(rank, world, tp, cp, words, count, folder)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2, 1, dealt(2)), (1, 1, 1, ())),
        pytest.param((1, 1, 1, ()), (4, 2, 2, dealt(4)), marks=slow),
        pytest.param((4, 4, 1, dealt(2)), (4, 4, 1, dealt(4)), marks=slow),
    ],
)
def test_a_checkpoint_of_one_mesh_resumes_on_another(tmp_path, before, after):
    """before, after: workers, context-parallel and tensor-parallel degree, and overrides."""
    model = (*SHARED, "optim.clip_norm=0.5")
    expected = gloo.run(1, trained, 1, 1, model, 4, None)[0]
    parts = []
    for world, cp, tp, more in (before, after):
        parts += gloo.run(world, trained, cp, tp, (*model, *more), 2, str(tmp_path))[0]
    np.testing.assert_allclose(parts, expected, rtol=2e-5)
    assert all(norm > 0.5 for _, norm in expected), "clipping must change every step"


def stored(
    rank: int, world: int, tp: int, cp: int, words: tuple[str, ...], folder: str
) -> dict[str, Any]:
    """Return weights and AdamW states: after a step that is saved, or after loading them."""
    trainer = make(rank, world, tp, cp, words)
    checkpointer = Checkpointer(folder, 2)
    if checkpointer.latest() is None:
        trainer.train_step(False)
        checkpointer.save(trainer.step, trainer.state(), asynchronous=False)
    else:
        trainer.resume(checkpointer)
    found: dict[str, Any] = {"step": trainer.step}
    for name, weight in trainer.decoder.named_parameters():
        state = trainer.optimizer.state[weight]
        for key, tensor in (("weight", weight), *state.items()):
            if key != "step":
                region = [(s.start, s.stop) for s in own_region(weight)]
                found[f"{name} {key}"] = weight.shape, region, tensor.to_local().detach().numpy()
    trainer.close()
    return found


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    result = {"step": parts[0].pop("step")}
    for name, (shape, _, _) in parts[0].items():
        result[name] = np.full(shape, np.nan, np.float32)
        for part in parts:
            result[name][tuple(slice(*ends) for ends in part[name][1])] = part[name][2]
    return result


@pytest.mark.slow
def test_a_checkpoint_of_dealt_experts_loads_bitwise_on_other_meshes(tmp_path):
    saved = joined(gloo.run(2, stored, 1, 2, (*SHARED, *dealt(2)), str(tmp_path)))
    assert saved["step"] == 1
    for world, tp, cp, more in ((1, 1, 1, ()), (2, 2, 1, ())):
        found = joined(gloo.run(world, stored, tp, cp, (*SHARED, *more), str(tmp_path)))
        assert found.keys() == saved.keys()
        for name, value in saved.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name}, {more}")


def test_a_hugging_face_folder_goes_in_and_out(tmp_path):
    """Steps from a folder's weights equal those of one worker, and so does the saved model."""
    words = (*MOE, "model.qkv_bias=false")
    model = compose([*TENSOR_SMALL, *words]).model
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device="cpu")
    initialize(decoder, 7)
    weights = {name: weight.detach() for name, weight in decoder.named_parameters()}
    folder = tmp_path / "hf"
    huggingface.write_folder(
        folder,
        model,
        lambda names: {name: weights[name] for name in names},
        rope_factor=1.0,
        seq=150,
        dtype=torch.float32,
    )
    run = (*words, f"train.init_from={folder}", "optim.lr=0.01")
    expected = gloo.run(1, trained, 1, 1, run, 1, str(tmp_path / "alone"))[0]
    found = gloo.run(2, trained, 2, 1, (*run, *dealt(2)), 1, str(tmp_path / "dealt"))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    saved = [load_model_state(tmp_path / name)[1] for name in ("alone", "dealt")]
    for name, weight in weights.items():
        torch.testing.assert_close(saved[1][name], saved[0][name], rtol=1e-4, atol=1e-4)
        assert not torch.equal(saved[0][name], weight), f"{name} did not change"


@pytest.mark.slow
def test_resuming_on_the_same_mesh_is_bitwise_the_uninterrupted_run(tmp_path):
    words = (*MOE, *dealt(2))
    whole = gloo.run(2, trained, 2, 1, words, 3, None)
    first = gloo.run(2, trained, 2, 1, words, 1, str(tmp_path))
    second = gloo.run(2, trained, 2, 1, words, 2, str(tmp_path))
    assert [a + b for a, b in zip(first, second, strict=True)] == whole


def dealt_held_out(rank: int, world: int, words: tuple[str, ...]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.test_tensor_parallel_training.SMALL", (*SMALL, *words))
        return held_out(rank, world, 1, world)


SMALL = (
    *("seq=150", "topology.block_size=16", "train.global_batch=2", "optim.warmup_steps=2"),
    *("train.steps=12", *MOE),
)


def test_the_held_out_loss_equals_that_of_one_worker():
    expected = gloo.run(1, dealt_held_out, ())[0]
    for found in gloo.run(2, dealt_held_out, dealt(2)):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        losses = [[loss for _, loss in each if loss] for each in (found, expected)]
        np.testing.assert_allclose(*losses, rtol=1e-5)


def parts(
    rank: int, world: int, model: tuple[str, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    trainer = make(rank, world, 1, world, (*model, *dealt(2)))
    found = [
        (tuple(weight.shape), tuple(weight.to_local().shape))
        for mlp in expert_layers(trainer.decoder.layers)
        for weight in mlp.experts.parameters()
    ]
    trainer.close()
    return found


def test_a_worker_holds_its_part_of_the_experts():
    for model, dimensions in ((MOE, [1, 1]), (NARROW, [1, 2])):
        for found in gloo.run(4, parts, model):
            for (whole, own), dimension in zip(found, dimensions * 2, strict=True):
                assert own[0] == whole[0] // 2, "experts are dealt over two workers"
                assert np.prod(own) == np.prod(whole) // 4, "and shared by the other two"
                assert own[dimension] == whole[dimension] // 2
