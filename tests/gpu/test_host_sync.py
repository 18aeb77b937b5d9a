"""The host never waits for the GPU between micro-batches, however weights and states are held."""

from __future__ import annotations

import dataclasses
import gc
import os
import tempfile

import gloo
import pytest
import torch
import torch.distributed as dist

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.optimizer_offload import OffloadedOptimizer
from mtrain_cli.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SMALL = [
    "topology.device=cuda",
    "topology.workers=1",
    "seq=4k",
    "model.head_dim=64",
    "model.num_layers=3",
    "train.steps=9",
    "train.global_batch=3",
    "train.compile=false",
    "data.document_mask=false",
]


@pytest.fixture(scope="module", autouse=True)
def group():
    """A group of one worker."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.cuda.set_device(0)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        yield
        dist.destroy_process_group()


def make(*overrides: str) -> Trainer:
    alone = dataclasses.replace(gloo.environment(0, 1), device="cuda")
    return Trainer(compose([*SMALL, *overrides]), alone)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.activation_checkpoint=full", "train.shard=optimizer"),
        ("train.shard=gradients", "optim.offload=true"),
        ("optim.offload=true", "optim.offload_gradients=true"),
        ("sparsity=vertical_slash", "sparsity.windows=2"),
        ("data.document_mask=true",),
    ],
)
def test_the_host_does_not_wait_in_the_loop_over_micro_batches(overrides):
    trainer = make(*overrides)
    trainer.train_step(False)  # allocate lasting tables and buffers, compile kernels
    compute = trainer.run_step.forward_backward

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return compute(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.run_step.forward_backward = watched  # type: ignore[method-assign]
    losses = [trainer.train_step(False).loss for _ in range(2)]
    assert all(0 < loss < 20 for loss in losses)


def test_offloaded_states_train_alike_and_free_gpu_memory():
    """A transfer that nothing waits for would show in the losses of later steps."""
    wide = ("model.hidden_size=512", "model.intermediate_size=2048", "optim.clip_norm=0.1")
    trainer = make(*wide)
    drawn = {
        name: parameter.detach().to_local().cpu()
        for name, parameter in trainer.decoder.named_parameters()
    }
    expected = [trainer.train_step(False).loss for _ in range(4)]
    states = sum(12 * tensor.numel() for tensor in drawn.values())
    held = torch.cuda.memory_allocated()
    del trainer
    offload = ("optim.offload=true",)
    for overrides in (
        offload,
        (*offload, "train.shard=optimizer"),
        (*offload, "optim.offload_gradients=true"),
    ):
        gc.collect()
        before = torch.cuda.memory_allocated()
        trainer = make(*wide, *overrides)
        assert isinstance(trainer.states, OffloadedOptimizer)
        masters = trainer.states.masters.named_parameters()
        assert all(
            torch.equal(parameter.detach().to_local(), drawn[name]) for name, parameter in masters
        ), "the GPU must still draw the weights"
        assert [trainer.train_step(False).loss for _ in range(4)] == pytest.approx(
            expected, rel=1e-2
        )
        assert torch.cuda.memory_allocated() - before < held - 0.7 * states
        del trainer


def test_offloaded_gradients_are_off_the_gpu_after_backward():
    overrides = (
        "seq=16k",
        "model.hidden_size=1024",
        "model.intermediate_size=4096",
        "model.num_layers=8",
        "train.global_batch=1",
        "optim.offload=true",
    )
    held, losses = [], []
    for more in ((), ("optim.offload_gradients=true",)):
        gc.collect()  # reference cycles in FSDP2 keep the first trainer's weights
        before = torch.cuda.memory_allocated()
        trainer = make(*overrides, *more)
        losses.append([trainer.train_step(False).loss for _ in range(3)])
        compute = trainer.run_step.forward_backward

        def watched(*args, compute=compute, before=before):
            loss = compute(*args)
            held.append(torch.cuda.memory_allocated() - before)
            return loss

        trainer.run_step.forward_backward = watched  # type: ignore[method-assign]
        trainer.train_step(False)
        layers = [
            parameter for name, parameter in trainer.decoder.named_parameters() if "layers" in name
        ]
        gradients = sum(4 * parameter.numel() for parameter in layers)
        del trainer, compute, watched
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert held[0] - held[1] > 0.9 * gradients
