"""Checkpoints of FSDP shards on gloo processes: resharding, shared verification, a failing rank."""

from __future__ import annotations

import contextlib
import fractions
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import gloo
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mtrain_cli.launch.failures import RunError
from mtrain_cli.training import checkpointer as checkpointer_module
from mtrain_cli.training.checkpointer import Checkpointer, CheckpointError, load_model_state


def sharded_training(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return state dicts after one step; 5 rows on 2 or 3 ranks make uneven shards."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    model(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    return get_state_dict(model, optimizer)


def whole(state: Any) -> Any:
    """Gather every shard of `state`, and encode strings as bytes, for comparison."""
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    if isinstance(state, str):
        return list(state.encode())
    return (
        state.full_tensor().clone()
        if isinstance(state, DTensor)
        else state.clone()
        if isinstance(state, torch.Tensor)
        else state
    )


def save_two_steps(rank: int, world: int, directory: Path) -> dict[str, Any]:
    """Save steps 1 and 2, overwriting the tensors meanwhile; load and return step 2."""
    del world
    checkpointer = Checkpointer(directory, keep=2)
    model, optimizer = sharded_training(seed=1)
    state = {
        "model": model,
        "optimizer": optimizer,
        "trainer": {"step": 2},
        "rng": {"cpu": torch.tensor([rank], dtype=torch.uint8)},
    }
    before = whole(state)
    checkpointer.save(1, state)
    checkpointer.save(2, state)
    for tensor in model.values():
        tensor.to_local().fill_(99)
    state["rng"]["cpu"].fill_(99)
    checkpointer.wait()
    assert checkpointer.load(state) == 2
    torch.testing.assert_close(whole(state), before, rtol=0, atol=0)
    return before


def load(rank: int, world: int, directory: Path) -> tuple[int, list[str], dict[str, Any]]:
    del world
    reports: list[str] = []
    model, optimizer = sharded_training(seed=5)
    state = {
        "model": model,
        "optimizer": optimizer,
        "trainer": {},
        "rng": {"cpu": torch.tensor([77 + rank], dtype=torch.uint8)},
    }
    step = Checkpointer(directory, keep=2, report=reports.append).load(state)
    return step, reports, whole(state)


def test_a_checkpoint_of_three_ranks_loads_on_two_and_one_with_its_optimizer(tmp_path):
    first, *_ = gloo.run(3, save_two_steps, tmp_path)
    assert {path.name for path in (tmp_path / "step-2").iterdir()} == {
        *(f"__{rank}_0.distcp" for rank in range(3)),
        ".metadata",
        "manifest.json",
    }
    with (tmp_path / "step-2" / "__1_0.distcp").open("r+b") as file:
        file.seek(200)
        byte = file.read(1)
        file.seek(200)
        file.write(bytes([byte[0] ^ 255]))
    for rank, (step, reports, state) in enumerate(gloo.run(2, load, tmp_path)):
        assert step == 1
        name = tmp_path / "step-2"
        line = (
            f"{name}: __1_0.distcp was altered (its checksum differs); "
            "using the previous checkpoint instead"
        )
        assert reports == ([line] if rank == 0 else [])
        assert (
            state["rng"]["cpu"].item() == 77 + rank
        )  # written by a different number of ranks: unchanged
        for part in ("model", "optimizer", "trainer"):
            torch.testing.assert_close(state[part], first[part], rtol=0, atol=0)
    alone = {part: _zeros_like(first[part]) for part in ("model", "optimizer")}
    assert Checkpointer(tmp_path, keep=2, report=lambda _: None).load(alone) == 1
    torch.testing.assert_close(whole(alone), {part: first[part] for part in alone}, rtol=0, atol=0)
    torch.testing.assert_close(load_model_state(tmp_path)[1], first["model"], rtol=0, atol=0)


def _zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _zeros_like(value) for name, value in state.items()}
    if isinstance(state, list):
        return [_zeros_like(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else type(state)()


def save_with_a_failing_rank(rank: int, world: int, directory: Path) -> list[str]:
    """Rank 1 fails two saves (asynchronous, synchronous), then succeeds; return all errors."""
    del world
    errors = []
    checkpointer = Checkpointer(directory, keep=1)
    model, optimizer = sharded_training(seed=1)
    state = {"model": model, "optimizer": optimizer, "trainer": {"step": 1}}
    checkpointer.save(1, state, asynchronous=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    for asynchronous in (True, False):
        try:
            checkpointer.save(2, state, asynchronous)
            dist.barrier()  # training goes on meanwhile
            checkpointer.wait()
        except CheckpointError as error:
            errors.append(str(error))
        errors.append(",".join(sorted(os.listdir(directory))))
        dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpointer.save(3, state)
    checkpointer.wait()
    return [*errors, ",".join(sorted(os.listdir(directory)))]


def test_all_ranks_learn_that_one_cannot_write_and_go_on(tmp_path):
    line = (
        f"{tmp_path / 'step-2'}: the checkpoint of step 2 was not saved (rank 1: File too large); "
        "the previous checkpoint is intact"
    )
    for errors in gloo.run(2, save_with_a_failing_rank, tmp_path):
        assert errors == [line, "step-1", line, "step-1", "step-3"]


class Unsendable(Exception):
    """An error that no pickle can carry, as libraries for stores raise them."""

    def __init__(self, lock: object, store: object) -> None:
        super().__init__(f"{store} is away")
        self.lock = lock


def fail(*_: Any, **__: Any) -> None:
    raise Unsendable(threading.Lock(), "the store")


STEPS_OF_A_SAVE = [
    (1, "filesystem.FileSystem.mkdir"),
    (1, "default_planner.create_default_local_save_plan"),
    (0, "default_planner.create_default_global_save_plan"),
    (1, "filesystem._write_item"),
    (0, "filesystem.FileSystem.rename"),
]


def save_where_one_rank_raises_what_no_pickle_carries(
    rank: int, world: int, directory: Path
) -> list[str]:
    """Let one rank fail in each step of a save, then save. Return the errors."""
    del world
    checkpointer, errors = Checkpointer(directory, keep=1), []
    model, optimizer = sharded_training(seed=1)
    state = {"model": model, "optimizer": optimizer, "trainer": {"step": 1}}
    for failing, name in STEPS_OF_A_SAVE:
        broken = mock.patch(f"torch.distributed.checkpoint.{name}", fail)
        with broken if rank == failing else contextlib.nullcontext():
            try:
                checkpointer.save(1, state, asynchronous=False)
            except CheckpointError as error:
                errors.append(str(error))
    checkpointer.save(2, state, asynchronous=False)
    return [*errors, ",".join(sorted(os.listdir(directory)))]


@pytest.mark.timeout(60)
def test_an_error_that_cannot_be_sent_reaches_all_ranks(tmp_path):
    lines = [
        f"{tmp_path / 'step-1'}: the checkpoint of step 1 was not saved (rank {rank}: RuntimeError:"
        " Unsendable: the store is away); there is no earlier checkpoint"
        for rank, _ in STEPS_OF_A_SAVE
    ]
    for errors in gloo.run(2, save_where_one_rank_raises_what_no_pickle_carries, tmp_path):
        assert errors == [*lines, "step-2"]


def save_what_rank_0_refuses(rank: int, world: int, directory: Path) -> tuple[str, float]:
    """Let rank 1 send a plan with a class that rank 0 does not load. Return its error."""
    del world
    checkpointer = Checkpointer(directory, keep=1)
    model, optimizer = sharded_training(seed=1)
    state = {"model": model, "optimizer": optimizer, "trainer": {"step": 1}}
    foreign = mock.patch.object(
        checkpointer_module._CheckpointWriter,
        "prepare_local_plan",
        return_value=fractions.Fraction(1, 2),
    )
    began = time.monotonic()
    with foreign if rank == 1 else contextlib.nullcontext() as planned:
        checkpointer.save(1, state)
        if rank == 0:
            with pytest.raises(RunError) as caught:
                checkpointer.wait()
            return str(caught.value), time.monotonic() - began
        while not planned.called:  # by the thread that saves
            time.sleep(0.01)
    return "", 0.0


@pytest.mark.timeout(60)
def test_a_rank_that_alone_cannot_save_ends_the_job_instead_of_waiting(tmp_path):
    (line, seconds), _ = gloo.run(2, save_what_rank_0_refuses, tmp_path)
    assert line.endswith(
        "step-1.tmp-1: rank 0 cannot save together with the other ranks (RefusedError: names "
        "fractions.Fraction, which mtrain does not load)"
    )
    assert seconds < 10


def make_a_checkpointer_where_none_can_be(rank: int, world: int, path: Path) -> None:
    del rank, world
    with pytest.raises(CheckpointError, match=r"cannot hold checkpoints: rank 0: .*: "):
        Checkpointer(path, keep=1)


@pytest.mark.slow
def test_a_folder_that_cannot_be_created_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    gloo.run(2, make_a_checkpointer_where_none_can_be, tmp_path / "file" / "checkpoints")
