"""A layer sends the messages of tensor parallelism in the order of its program."""

from __future__ import annotations

from typing import ClassVar

import gloo
import pytest
import torch
from slow_cases import mostly_slow
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain_cli.composition.compose import compose
from mtrain_cli.model import feed_forward
from mtrain_cli.model.tiling import LayerExecution
from mtrain_cli.parallel import layer_groups
from mtrain_cli.parallel.layer_groups import TensorGroup
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.step.program import (
    BACKWARD_TILE,
    FORWARD_TILE,
    KEPT_BACKWARD_TILE,
    NEXT,
    SEND,
    WAIT,
    Compute,
)
from mtrain_cli.training.run_plan import message_bytes, tensor_messages
from mtrain_cli.training.trainer import Trainer

RUN = (
    "seq=254",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=3",
    "model.intermediate_size=1024",
    "train.global_batch=4",
    "train.micro_batch=2",
    "topology.tensor_parallel=2",
)
EXPERTS = ("model.moe.experts=4", "model.moe.expert_size=16", "model.moe.top_k=2")
DENSE_FIRST = "model.moe.dense_layers=1"


def counted(rank: int, world: int, cp: int, overrides: tuple[str, ...]) -> tuple[int, int, int]:
    """Return the bytes that a rank receives in a step, the formula, and the number of calls."""
    trainer = Trainer(compose([*RUN, *overrides]), gloo.environment(rank, world, cp, tp=2))
    received, calls = 0, 0
    gather, scatter = layer_groups.start_all_gather, layer_groups.start_reduce_scatter

    def counting_gather(own, workers, group):
        nonlocal received, calls
        received, calls = received + (workers - 1) * own.nbytes, calls + 1
        return gather(own, workers, group)

    def counting_scatter(shards, group):
        nonlocal received, calls
        received, calls = received + (len(shards) - 1) * shards[0].nbytes, calls + 1
        return scatter(shards, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_groups, "start_all_gather", counting_gather)
        patch.setattr(layer_groups, "start_reduce_scatter", counting_scatter)
        trainer.train_step(False)
    config, plan = trainer.config, trainer.plan
    message = message_bytes(config, plan.layout, plan.dtype_bytes)
    forward, backward = tensor_messages(config)
    assert plan.received.tensor_forward == forward * message // config.model.num_layers
    trainer.close()
    return received, plan.micro_batches * (forward + backward) * message, calls


@mostly_slow(
    ("world", "cp", "overrides", "messages"),
    [
        (2, 1, ("train.activation_checkpoint=none",), 10),
        (2, 1, ("train.activation_checkpoint=none", "train.keep_mlp=true"), 9),
        (2, 1, ("train.activation_checkpoint=full",), 11),
        (4, 2, ("train.activation_checkpoint=selective", "train.keep_mlp=true"), 10),
        (4, 2, ("topology.exchange=ring", "train.tile_mib=1"), None),
        (2, 1, ("topology.tensor_chunks=3",), None),
        (2, 1, (*EXPERTS, "train.activation_checkpoint=none"), 4),
        (2, 1, (*EXPERTS, "train.activation_checkpoint=full", DENSE_FIRST), (6 + 6 + 11) / 3),
    ],
    keep=(0, 3),
)
def test_a_worker_receives_the_bytes_of_the_formula(world, cp, overrides, messages):
    """messages: number of messages of a layer in one tile; None with several tiles."""
    for received, formula, calls in gloo.run(world, counted, cp, overrides):
        assert received == formula > 0
        micro_batches = 4 // 2
        if messages is None:
            assert calls > 11 * 3 * micro_batches, "several tiles send more messages"
        else:
            assert calls == messages * 3 * micro_batches


def test_each_layer_that_keeps_its_products_saves_a_message():
    config = compose(["train.keep_mlp=2", "model.num_layers=5"])
    assert tensor_messages(config) == (5 * 4, 5 * 7 - 2)


def test_one_worker_alone_receives_nothing():
    config = compose(["seq=256"])
    assert message_bytes(config, make_layout("contiguous", 1, 256, 16), 4) == 0


class _Products(TorchDispatchMode):
    """Notes each matrix product by the weight with whose sizes it computes.

    sizes: the width of each weight's own dimension, which no other dimension has.
    """

    def __init__(self, done: list[object], sizes: dict[int, str]) -> None:
        super().__init__()
        self.done, self.sizes = done, sizes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            dimensions = {*args[0].shape, *args[1].shape}
            self.done.append(next(name for n, name in self.sizes.items() if n in dimensions))
        return function(*args, **(kwargs or {}))


class _Message:
    def __init__(self, done: list[object], received: torch.Tensor) -> None:
        self.done, self.received = done, received
        done.append(SEND)

    def wait(self) -> torch.Tensor:
        self.done.append(WAIT)
        return self.received


class _Group(TensorGroup):
    """A group of two workers, of which the other has equal rows. Notes what the worker does."""

    done: ClassVar[list[object]] = []

    def start_gather(self, own_RW):
        return _Message(self.done, torch.cat([own_RW, own_RW]))

    def start_scatter(self, parts_SW):
        return _Message(self.done, parts_SW[: len(parts_SW) // 2].clone())


@pytest.mark.parametrize("keep", [False, True])
def test_the_program_of_a_tile_is_what_the_layer_does(keep, monkeypatch):
    """Gate and up have equal sizes, so both count as gate."""
    done: ClassVar[list[object]] = []
    group = _Group(0, 2, None)  # type: ignore[arg-type]
    monkeypatch.setattr(_Group, "done", done)

    def noted(tiles):
        for tile in tiles:
            for _ in tile:
                done.append(NEXT)

    monkeypatch.setattr(feed_forward, "staggered", noted)
    rows, hidden, heads, width = 3, 5, 7, 11
    shapes = (hidden, heads), (hidden,), (width, hidden), (width, hidden), (hidden, width)
    weights = feed_forward.FeedForwardWeights(
        *(torch.randn(shape, requires_grad=True) for shape in shapes)
    )
    x = torch.randn(1, rows, hidden, requires_grad=True)
    out = torch.randn(1, 2 * rows, 1, heads, requires_grad=True)
    execution = LayerExecution(tensor=group)
    options = feed_forward.FeedForwardOptions(execution, 1e-6, rows, keep_products=keep)
    sizes = {heads: "o", width: "mlp"}

    def alike(program):
        parts = [op.part if isinstance(op, Compute) else op for op in program]
        return ["mlp" if part in ("gate", "up", "down") else part for part in parts]

    with _Products(done, sizes):
        result = feed_forward.feed_forward(x, out, weights, options)
    assert done == alike(FORWARD_TILE)
    done.clear()
    with _Products(done, sizes):
        result.backward(torch.ones_like(result))
    assert done == alike(KEPT_BACKWARD_TILE if keep else BACKWARD_TILE)
