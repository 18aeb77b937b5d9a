"""An out-of-memory error names the largest tensors and what would help."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import gloo
import pytest
import torch
from training.test_loop import SMALL, place

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.failures import RunError, reporting_out_of_memory
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.model import decoder as decoders
from mtrain_cli.model import parallelize
from mtrain_cli.model.loss import chunked_losses
from mtrain_cli.training import out_of_memory
from mtrain_cli.training import trainer as trainers
from mtrain_cli.training.loop import train
from mtrain_cli.training.trainer import Trainer

CPU_WORDS = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 8 bytes."
)


def full(rank: int, world: int, folder: str, where: str) -> tuple[str, dict]:
    """Train until an allocation fails on this rank in step 2.

    It fails in the MLP of layer 1, in its backward pass, or in the loss.
    """
    config = compose(
        [
            *SMALL,
            "model.num_layers=2",
            "train.steps=3",
            "train.activation_checkpoint=none",
            "optim.warmup_steps=0",
        ]
    )
    step = Trainer.train_step

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, _gradient):
            raise RuntimeError(CPU_WORDS)

    def faulty(self, stop, save):
        if self.step == 1:
            finish = parallelize.finish

            def failing(layer, x_BNC, out_BNHD):
                if layer.index != 1:
                    return finish(layer, x_BNC, out_BNHD)
                scratch = x_BNC.new_zeros(1, 48, 777)  # noqa: F841, the error must name it
                if where == "forward":
                    raise RuntimeError(CPU_WORDS)
                return finish(layer, Backward.apply(x_BNC), out_BNHD)

            if where != "loss":
                patch.setattr(parallelize, "finish", failing)
        return step(self, stop, save)

    def no_room(*arguments, **options):
        if where == "loss" and progress_record.own_activity().training_step == 2:
            logits = torch.zeros(40, config.model.vocab_size)  # noqa: F841, the error must name it
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
            )
        return chunked_losses(*arguments, **options)

    tensors = out_of_memory._tensors
    Path(folder).mkdir(exist_ok=True)
    progress_record.start_record(Path(folder) / f"where-{rank}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainers, "gc", gc)  # garbage would hold the storage of others
        if where == "loss":  # the order in which garbage collection lists tensors is arbitrary
            patch.setattr(out_of_memory, "_tensors", lambda device: reversed([*tensors(device)]))
        patch.setattr(trainers.Trainer, "train_step", faulty)
        patch.setattr(decoders, "chunked_losses", no_room)
        with pytest.raises(RunError) as caught:
            train(config, RunDir(Path(folder)), place(rank, world), False)
    return str(caught.value), json.loads((Path(folder) / f"oom-rank-{rank}.json").read_text())


CASES = {
    "forward": "scratch in full.<locals>.faulty.<locals>.failing",
    "backward": None,
    "loss": "logits in full.<locals>.no_room",
}


def all_cases(rank: int, world: int, folder: str) -> dict[str, tuple[str, dict]]:
    return {where: full(rank, world, f"{folder}/{where}", where) for where in CASES}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (cases,) = gloo.run(1, all_cases, str(folder))
    return folder, cases


@pytest.mark.parametrize("where", CASES)
def test_the_error_names_the_location_and_the_largest_tensors(reports, where):
    folder, cases = reports
    text, report = cases[where]
    variable = CASES[where]
    first, *lines = text.splitlines()
    assert first.startswith("rank 0 ran out of memory in training step 2")
    if where == "loss":
        assert first.endswith(": it tried to allocate 2.00 GiB more")
    by_kind = {}
    for group in report["tensors"]:
        by_kind.setdefault(group["kind"], []).append(group)
    # The embedding, 264 x 32 in float32, and its two AdamW states, by name.
    (embedding,) = [group for group in by_kind["parameters"] if group["shape"] == [264, 32]]
    assert (embedding["name"], embedding["bytes"], embedding["dtype"]) == (
        "embed_tokens.weight",
        264 * 32 * 4,
        "float32",
    )
    states = [group for group in by_kind["optimizer states"] if group["shape"] == [264, 32]]
    assert sum(group["count"] for group in states) == 2
    assert states[0]["name"] in (
        "exp_avg of embed_tokens.weight",
        "exp_avg_sq of embed_tokens.weight",
    )
    up = [group for group in by_kind["parameters"] if group["shape"] == [48, 32]]
    assert [(group["count"], group["name"].split(".", 2)[2]) for group in up] == [
        (4, "mlp.gate_proj.weight")
    ]
    assert report["tensors"] == sorted(report["tensors"], key=lambda group: -group["bytes"])
    if variable is not None:
        (group,) = [group for group in report["tensors"] if group["name"] == variable]
        assert group["kind"] == "other"
    if where == "backward":
        assert {group["name"].split(" in ")[0] for group in by_kind["gradients"]}, (
            "gradients of the LM head and layer 1 exist already"
        )
    assert any(line.startswith("--dry-run estimates ") for line in lines)
    assert report["estimate"]["allocated"] > 0
    assert "To fit, try train.memory=auto, more memory or a shorter seq (now 96)" in lines
    assert lines[-1] == f"All tensors: {folder / where / 'oom-rank-0.json'}"


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError(CPU_WORDS), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("Connection closed by peer"), False),
    ],
)
def test_only_failed_allocations_count_as_out_of_memory(error, full):
    with pytest.raises(RunError if full else type(error)) as raised, reporting_out_of_memory(str):
        raise error
    assert isinstance(raised.value, RunError) == full
