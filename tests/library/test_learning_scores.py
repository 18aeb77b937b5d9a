"""Learned scores of `block_topk` in the library: taught as in training, saved and loaded."""

from __future__ import annotations

import io
import warnings

import gloo
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mtrain_cli import api
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.library.context_parallel import ContextParallel
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import Plan, make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.pattern import learning, make_pattern

# One layer: the first batch makes 128 updates of each.
SEQ, HEADS, KV_HEADS, DIM, LAYERS, RANK = 160, 4, 2, 16, 1, 4
WORDS = (
    "topology.block_size=16", "sparsity.block=16", "sparsity.score=learned",
    f"sparsity.rank={RANK}", "sparsity.density=0.45",
)  # fmt: skip


def made(*words: str, group=None, **arguments) -> ContextParallel:
    return api.context_parallel(
        group, *WORDS, *words, seq=SEQ, sparsity="block_topk", layout="contiguous", **arguments
    )


def batches(number: int = 3, first: int = 0) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(11)
    heads = HEADS, KV_HEADS, KV_HEADS
    drawn = [
        tuple(2 * torch.randn(1, SEQ, n, DIM, generator=generator) for n in heads)
        for _ in range(first + number)
    ]
    return drawn[first:]


def taught(cp: ContextParallel, steps: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Outputs of all steps and layers, with activation checkpointing."""
    outs = []
    for step in steps:
        batch = cp.batch()
        q, k, v = (tensor.requires_grad_() for tensor in batch.shard(*step))
        for layer in range(LAYERS):
            out = checkpoint(batch.attention, q, k, v, layer, use_reentrant=False)
            out.square().sum().backward()
            outs.append(batch.gather(out))
    return outs


def state_and_outputs(_rank: int, _world: int, exchange: str):
    cp = made(exchange=exchange)
    outs = taught(cp, batches(2))
    return cp.state_dict(), outs


def as_the_trainer_teaches() -> dict[str, torch.Tensor]:
    """What a trainer's pattern has learned after the same steps."""
    cp = made()
    pattern = make_pattern(cp.config.sparsity, cp.config.seed)
    layout = make_layout("contiguous", 1, SEQ, 16, unit=16)
    exchange = make_exchange("ring", layout, ContextGroup())
    for q, k, v in batches():
        plan = Plan.make(exchange, cp.batch().masks, pattern.request())
        attend = ContextAttention.of(exchange, SdpaKernel(), plan, pattern)
        with learning(pattern):
            for layer in range(LAYERS):
                attend(q, k, v, layer)
    return pattern.learned()


def test_steps_teach_what_they_teach_in_training():
    cp = made()
    with pytest.warns(
        UserWarning, match="the first batch makes 128 updates of each layer's"
    ) as told:
        taught(cp, batches())
    assert len(told) == 1
    state, expected = cp.state_dict(), as_the_trainer_teaches()
    assert int(state["0.updates"]) == 128 + 8 + 8
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.filterwarnings("ignore:sparsity.score=learned")
@pytest.mark.parametrize(
    ("world", "exchange"),
    [
        pytest.param(2, "ring", marks=pytest.mark.slow),
        pytest.param(2, "ulysses", marks=pytest.mark.slow),
        pytest.param(3, "all_gather", marks=pytest.mark.slow),
    ],
)
def test_the_number_of_processes_does_not_matter(world, exchange):
    state, outs = state_and_outputs(0, 1, "auto")
    for found, tensors in gloo.run(world, state_and_outputs, exchange):
        for name, tensor in state.items():
            torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=0)
        for got, expected in zip(tensors, outs, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:sparsity.score=learned")
def test_a_state_is_saved_and_continued():
    whole = made()
    taught(whole, batches(2))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    outs = taught(whole, batches(2, first=2))
    file.seek(0)
    again = made()
    again.load_state_dict(torch.load(file, weights_only=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = taught(again, batches(2, first=2))
    assert all(map(torch.equal, found, outs))
    assert all(torch.equal(again.state_dict()[name], t) for name, t in whole.state_dict().items())


def test_learning_leaves_the_loaded_tensors_as_they_are():
    state = a_state(query=torch.randn(KV_HEADS, 2 * DIM, RANK))
    before = {name: tensor.clone() for name, tensor in state.items()}
    cp = made()
    cp.load_state_dict(state)
    taught(cp, batches(1))
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert all(not torch.equal(cp.state_dict()[name], t) for name, t in before.items())


@pytest.mark.filterwarnings("ignore:sparsity.score=learned")
def test_evaluation_teaches_nothing_and_is_dense_before_the_first_step():
    cp, dense = made(), api.context_parallel(seq=SEQ, layout="contiguous")
    (step,) = batches(1)
    with torch.no_grad():
        before = cp.batch().attention(*step, 0)
        expected = dense.batch().attention(*step, 0)
    assert torch.equal(before, expected)
    assert cp.state_dict() == {}
    taught(cp, [step])
    state = {name: tensor.clone() for name, tensor in cp.state_dict().items()}
    with torch.no_grad():
        after = cp.batch().attention(*step, 0)
    assert (after - expected).abs().max() > 0.01
    assert all(torch.equal(state[name], tensor) for name, tensor in cp.state_dict().items())


def in_replicas(rank: int, _world: int) -> tuple[dict[str, torch.Tensor], ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = made(group=mesh["cp"])
    taught(cp, batches(1, first=rank // 2))
    before = {name: tensor.clone() for name, tensor in cp.state_dict().items()}
    cp.average_learned()
    dist.barrier()
    return before, cp.state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sparsity.score=learned")
def test_replicas_average_what_they_learned():
    (own, mean), _, (other, other_mean), _ = gloo.run(4, in_replicas)
    assert (own["0.query"] - other["0.query"]).abs().max() > 1e-3
    for name, tensor in mean.items():
        assert torch.equal(tensor, other_mean[name])
        expected = own[name] if name.endswith("updates") else (own[name] + other[name]) / 2
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)


def a_state(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    query, key = torch.zeros(KV_HEADS, 2 * DIM, RANK), torch.zeros(KV_HEADS, DIM, RANK)
    tensors = {
        "query": query, "key": key, "query_mean": query, "query_square": query, "key_mean": key,
        "key_square": key, "updates": torch.tensor(128),
    }  # fmt: skip
    return {f"0.{name}": tensor for name, tensor in (tensors | changed).items()}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({}, "load_state_dict: needs query, key, query_mean, query_square, key_mean, key_square, "
             "updates of each layer, as 0.query; has nothing"),
        ({"0.query": torch.zeros(1)}, "load_state_dict: needs query, key, query_mean"),
        (a_state(key=torch.zeros(KV_HEADS, DIM, 8)),
         "load_state_dict: layer 0 has the shapes [[2, 32, 4], [2, 16, 8], "),
        (a_state(query=torch.zeros(KV_HEADS, 2 * DIM, 8)),
         "load_state_dict: layer 0 has the shapes [[2, 32, 8], [2, 16, 4], "),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused(state, problem):
    cp = made()
    with pytest.raises(api.ConfigError) as raised:
        cp.load_state_dict(state)
    assert str(raised.value).startswith(problem)
    assert "\n" not in str(raised.value)
    assert cp.state_dict() == {}


def test_a_state_of_another_model_is_refused():
    cp, (step,) = made(), batches(1)
    cp.load_state_dict(a_state())
    with pytest.raises(api.ConfigError, match=r"holds no layer 1, which .*; it holds 0$"):
        cp.batch().attention(*step, 1)
    narrow = tuple(tensor[..., :8] for tensor in step)
    with pytest.raises(api.ConfigError, match=r"layer 0 has \[2, 16\] heads and dim.*\[2, 8\]"):
        cp.batch().attention(*narrow, 0)
    dense = api.context_parallel(seq=SEQ)
    dense.load_state_dict(dense.state_dict())
    with pytest.raises(
        api.ConfigError, match="this index learns nothing; give sparsity=block_topk"
    ):
        dense.load_state_dict(a_state())
