"""On GPUs: kernels that move the rows of experts, and experts on two workers equal those of one."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu import through_host
from model.test_expert_parallel import Case, both_ways, moved, planned

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or more")
STEPS = 4
MODEL = (
    "model=tiny_moe", "model.head_dim=64", "model.num_layers=2", "model.moe.expert_size=64",
    "seq=2k", "topology.device=cuda", "topology.workers=2", "topology.exchange=ring",
    "data.document_mask=false", "train.compile=false", "train.balance_loss=0.3",
    f"train.steps={STEPS}", "optim.warmup_steps=1",
)  # fmt: skip
FLOAT32 = ("train.dtype=float32", "train.kernel=reference")


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.03)]
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("hidden", "width"), [(20, 12), (64, 32), (2048, 768)])
def test_kernels_do_what_separate_operations_do(dtype, limit, rank, hidden, width):
    apart, together = (moved(fused, dtype, hidden, width, rank, "cuda") for fused in (False, True))
    for expected, found in zip(apart, together, strict=True):
        assert found.dtype == expected.dtype
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit * scale)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tiles", [1, 3])
def test_a_gpu_plans_what_a_cpu_plans(rank, tiles):
    shares = torch.rand(5000, 128, generator=torch.Generator().manual_seed(6))
    shares[:, 3] += 2  # an expert of all tokens, and one of none
    shares[:, 70] -= 2
    chosen = shares.topk(8).indices
    (expected, _), (found, _) = (
        planned(each, rank, tiles, experts=128) for each in (chosen, chosen.cuda())
    )
    for on_cpu, on_gpu in zip(expected, found, strict=True):
        for name in ("send", "receive", "rows", "each", "begin", "end"):
            assert getattr(on_gpu, name) == getattr(on_cpu, name), name
        for name in ("slot_TP", "chosen_TK", "place_TK", "ends_L"):
            assert torch.equal(getattr(on_gpu, name).cpu(), getattr(on_cpu, name)), name


SIZES = [(False, 1, 2), (True, 1, 2), (True, 3, 2), (True, 2, 1), (True, 1, 8)]
CASES = [Case(again, *sizes) for sizes in SIZES for again in (False, True)]
TRAININGS = [
    ("train.activation_checkpoint=none",),
    ("train.activation_checkpoint=full", "topology.expert_chunks=3"),
    ("seq=16k", "train.activation_checkpoint=none", "topology.expert_chunks=2"),
    ("seq=16k", "train.activation_checkpoint=full"),
    ("model.moe.score=sigmoid", "model.moe.scale=2.5", "model.moe.top_k=3"),
    ("model.moe.normalize=false",),
    ("model.moe.shared_size=48", "model.moe.dense_layers=1", "seq=2003"),
    ("model.moe.expert_size=20", "model.hidden_size=132"),  # no multiples of 16 bytes
]
DTYPES = {"bfloat16": (), "float32": FLOAT32}
# torch's grouped products refuse the last one in bfloat16.
TRAINED = [("bfloat16", words) for words in TRAININGS[:-1]]
TRAINED += [("float32", words) for words in TRAININGS]
OF_PROCESS = 8  # trainings; each leaves communicators, which take GPU memory until the process ends


def run(folder: Path, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return, of each case and in rank order, function(rank, 2, *case), or the words of its error.

    All cases share two processes, each with a GPU if there are two: otherwise they share one.
    """
    mp.spawn(on_gpu, args=(str(folder), function, cases), nprocs=2, join=True)
    ranks = [
        torch.load(folder / f"{rank}.pt", map_location="cpu", weights_only=False)
        for rank in range(2)
    ]
    return list(zip(*ranks, strict=True))


def on_gpu(rank: int, folder: str, function: Callable[..., Any], cases: Sequence[Any]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    apart = torch.cuda.device_count() > 1
    device = torch.device("cuda", rank * apart)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if apart else "gloo", init_method=f"file://{folder}/store", rank=rank,
        world_size=2, device_id=device if apart else None,
    )  # fmt: skip
    if not apart:
        through_host.install()
    results: list[Any] = []
    for case in cases:
        try:
            results.append(function(rank, 2, *case))
        except Exception:
            results.append(traceback.format_exc())
    torch.save(results, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Return output and gradients of each of `CASES`, found and expected, of both ranks."""
    folder = tmp_path_factory.mktemp("layers")
    return run(folder, both_ways, [(case, "cuda") for case in CASES])


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_float64_experts_of_two_workers_equal_those_of_one(layers, number):
    for result in layers[number]:
        assert not isinstance(result, str), result
        found, expected = result
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


def trained(rank: int, world: int, *words: str) -> list[tuple[float, float]]:
    """Return loss and norm of the gradient of each step."""
    environment = replace(gloo.environment(rank, world), device="cuda")
    trainer = Trainer(compose([*MODEL, *words]), environment)
    steps = [trainer.train_step(False) for _ in range(STEPS)]
    found = [(float(step.loss), float(step.grad_norm)) for step in steps]
    trainer.close()
    return found


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Return, by dtype, words and degree, what `trained` returns on both ranks."""
    keys = [(dtype, words, degree) for dtype, words in TRAINED for degree in (1, 2)]
    cases = [
        (*words, *DTYPES[dtype], f"topology.expert_parallel={degree}")
        for dtype, words, degree in keys
    ]
    found: list[Any] = []
    for begin in range(0, len(cases), OF_PROCESS):
        folder = tmp_path_factory.mktemp("trainings")
        found += run(folder, trained, cases[begin : begin + OF_PROCESS])
    return dict(zip(keys, found, strict=True))


@two_gpus
@pytest.mark.parametrize(
    ("dtype", "words"), TRAINED, ids=lambda value: value if isinstance(value, str) else value[-1]
)
def test_losses_of_two_degrees_are_equal(trainings, words, dtype):
    # The first step: equal but for rounding. Later, a token may get another expert.
    first, later = (1e-5, 1e-3) if dtype == "float32" else (2e-3, 1e-2)
    results = []
    for degree in (1, 2):
        one, other = trainings[dtype, words, degree]
        assert not isinstance(one, str), one
        assert one == other
        results.append(one)
    for number, (expected, found) in enumerate(zip(*results, strict=True)):
        assert found[0] == pytest.approx(expected[0], rel=later if number else first)
        assert found[1] == pytest.approx(expected[1], rel=10 * (later if number else first))
    assert results[0][-1][0] < results[0][0][0], "training learns, so gradients count"
