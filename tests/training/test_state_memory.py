"""All ways to hold and send weights, gradients and states give the same steps and checkpoints."""

from __future__ import annotations

from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist
from test_trainer import make
from torch.utils._pytree import tree_iter

from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.state_memory import BYTES, StateMemory

WAYS: dict[str, tuple[str, ...]] = {
    "full": (),
    "gradients": ("train.shard=gradients",),
    "optimizer": ("train.shard=optimizer",),
    "full, offload": ("optim.offload=true",),
    "optimizer, offload": ("train.shard=optimizer", "optim.offload=true"),
    "full, offload, gradients": ("optim.offload=true", "optim.offload_gradients=true"),
    "optimizer, offload, gradients": (
        "train.shard=optimizer",
        "optim.offload=true",
        "optim.offload_gradients=true",
    ),
}
OFFLOADED_COLUMNS = (
    "model.num_layers=4", "train.steps=4", "seq=512", "train.global_batch=1",
    "data.document_mask=false", "train.offload_activations=true",
    "topology.exchange=ring", "topology.columns=once", "sparsity=vertical_slash",
    "sparsity.block=16", "sparsity.last_q=16",
    "sparsity.min_columns=128", "sparsity.max_columns=128",
)  # fmt: skip
BATCHES = ("model.num_layers=3", "train.steps=4")

# By name, as FSDP2 calls its collectives: the names changed after torch 2.11.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(rank: int, world: int, cp: int, words: tuple[str, ...], folder: str) -> dict[str, Any]:
    """Take two steps and, after a resume from another setting, a third one, for each setting."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    names = list(WAYS)
    for name, setting in WAYS.items():
        trainer = make(rank, world, cp, (*words, *setting))
        done = [trainer.train_step(False) for _ in range(2)]
        weights = {key: whole(value).clone() for key, value in trainer.state()["model"].items()}
        Checkpointer(f"{folder}/{name}", 2).save(trainer.step, trainer.state(), asynchronous=False)
        before[name] = ([(step.loss, step.grad_norm) for step in done], weights)
    for number, name in enumerate(names):
        trainer = make(rank, world, cp, (*words, *WAYS[name]))
        trainer.resume(Checkpointer(f"{folder}/{names[number - 2]}", 2))
        step = trainer.train_step(False)
        after[name] = (trainer.step, step.loss, step.grad_norm)
    return {"before": before, "after": after}


@pytest.mark.parametrize(
    ("world", "cp", "words"),
    [
        # Three workers: rows do not divide, so shards and packed gradients are padded. Clipped.
        pytest.param(3, 3, (*BATCHES, "optim.clip_norm=0.5"), marks=pytest.mark.slow),
        pytest.param(1, 1, BATCHES, marks=pytest.mark.slow),
        pytest.param(
            2, 2, (*BATCHES, "train.global_batch=1", "optim.clip_norm=0.5"), marks=pytest.mark.slow
        ),
        pytest.param(4, 2, (*BATCHES, "model.tie_word_embeddings=false"), marks=pytest.mark.slow),
        pytest.param(2, 1, (*BATCHES, "train.dtype=bfloat16"), marks=pytest.mark.slow),
    ],
)
def test_every_state_setting_takes_the_same_steps_and_resumes_from_any_other(
    world, cp, words, tmp_path
):
    results = gloo.run(world, trained, cp, words, str(tmp_path))[0]
    expected, weights = results["before"]["full"]
    # Unsharded bfloat16 gradients accumulate before the reduction: a different order of sums.
    loose = 10 if "train.dtype=bfloat16" in words else 1
    for name, (steps, gradients) in results["before"].items():
        assert steps == [pytest.approx(step, rel=2e-6 * loose) for step in expected], name
        for key, value in gradients.items():
            torch.testing.assert_close(
                value, weights[key], rtol=2e-5 * loose, atol=2e-6 * loose, msg=f"{name}: {key}"
            )
    assert results["after"]["full"][0] == 3
    for name, step in results["after"].items():
        assert step == pytest.approx(results["after"]["full"], rel=1e-5 * loose), name


def sent(rank: int, world: int) -> list[tuple[str, int, int, int]]:
    """Return (setting, bytes received, bytes by the closed form, reductions) of two steps.

    The first step has two micro-batches, the second one.
    """
    results = []
    for batches in (2, 1):
        for words in (
            *((f"train.shard={shard}",) for shard in ("full", "gradients", "optimizer")),
            ("train.reduce_dtype=bfloat16",),
            ("optim.offload=true", "train.shard=optimizer"),
        ):
            overrides = (
                *BATCHES,
                *words,
                f"train.global_batch={batches * world}",
                "train.dtype=bfloat16",
            )
            trainer = make(rank, world, 1, overrides)
            received: list[int] = []
            reduced: list[int] = []
            gather, scatter = getattr(dist, GATHER), getattr(dist, SCATTER)

            def gathered(*args, gather=gather, received=received, **kwargs):
                # (output, input); FSDP2 passes both by name or neither.
                received.append((args[1] if args else kwargs["input_tensor"]).nbytes * (world - 1))
                return gather(*args, **kwargs)

            def scattered(*args, scatter=scatter, reduced=reduced, **kwargs):
                reduced.append((args[0] if args else kwargs["output"]).nbytes * (world - 1))
                return scatter(*args, **kwargs)

            compute = trainer.run_step.forward_backward

            def counted(*args, compute=compute, gathered=gathered, scattered=scattered):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(dist, GATHER, gathered)
                    patch.setattr(dist, SCATTER, scattered)
                    return compute(*args)

            trainer.run_step.forward_backward = counted  # type: ignore[method-assign]
            trainer.train_step(False)
            form = StateMemory(trainer.config, world, batches, BYTES["bfloat16"]).sent()
            results.append((" ".join(overrides), sum(received) + sum(reduced), form, len(reduced)))
    return results


@pytest.mark.slow
def test_traffic_of_weights_and_gradients_equals_the_closed_form():
    results = gloo.run(2, sent)[0]
    for words, counted, form, _ in results:
        assert counted == form, words
    two, one = results[:5], results[5:]
    assert two[2][1] == one[2][1] == one[1][1], (
        "with shard=optimizer, accumulation sends nothing more"
    )
    assert [reductions for *_, reductions in two] == [8, 8, 4, 8, 4], "three layers and the rest"


def on_host(rank: int, world: int) -> tuple[int, int, int, int, int, int]:
    trainer = make(rank, world, world, OFFLOADED_COLUMNS)
    trainer.train_step(False)
    columns: list[int] = []
    put = trainer.offload.put

    def counted(layer, tensor):
        if (
            tensor.ndim == 5
            and tensor.shape[2] == trainer.config.model.num_heads
            and tensor.shape[3] == 128
        ):
            columns.append(tensor.nbytes)
        return put(layer, tensor)

    trainer.offload.put = counted  # type: ignore[method-assign]
    trainer.train_step(False)
    memory = trainer.plan.memory
    tensors = [
        t
        for t in tree_iter([trainer.state()["model"], trainer.state()["optimizer"]])
        if isinstance(t, torch.Tensor) and t.ndim
    ]
    saved = sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)
    return (
        memory.host,
        trainer.offload.allocated,
        memory.moments[0].index,
        sum(columns),
        saved,
        memory.saving,
    )


def test_gathered_columns_are_offloaded_and_a_checkpoint_copies_the_states():
    host, allocated, index, columns, saved, saving = gloo.run(2, on_host)[0]
    assert host == allocated
    # At the loss, two of four layers are on the device, with their columns and index numbers.
    heads, blocks = 4, 512 // 16
    assert columns > 0
    assert index == 4 * heads * (blocks + 4 * 128) + columns // 4 * 2
    assert saved == saving
