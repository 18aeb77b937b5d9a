"""The programs of a chunk are what the layer does with it; rows are counted by worker."""

from __future__ import annotations

import gloo
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain_cli.composition.compose import compose
from mtrain_cli.model import expert_parallel, experts
from mtrain_cli.model.experts import Experts
from mtrain_cli.model.routing import decide_alone
from mtrain_cli.parallel.layer_groups import ExpertGroup
from mtrain_cli.simulation.expert_cost import travelling
from mtrain_cli.step.program import (
    BACKWARD_CHUNK,
    EXPERTS_IN,
    EXPERTS_OUT,
    FORWARD_CHUNK,
    KEPT_BACKWARD_CHUNK,
    NEXT,
    ROWS,
    ROWS_BACK,
    SCORED,
    SCORED_BACK,
    WAIT,
    Compute,
    Layer,
    Message,
    traffic,
)
from mtrain_cli.training.expert_traffic import message_bytes
from mtrain_cli.training.trainer import Trainer

HIDDEN, WIDTH, TOKENS = 20, 12, 7


class Arriving:
    def __init__(self, done: list[object], rows: torch.Tensor) -> None:
        self.done, self.rows = done, rows

    def wait(self) -> torch.Tensor:
        self.done.append(WAIT)
        return self.rows


class Group(ExpertGroup):
    """A group of one worker, to which no row travels. Notes what the worker does."""

    def gather_counts(self, counts_E):
        return counts_E[None]

    def start(self, rows, send, receive, into=None):  # noqa: ARG002
        scored = rows.shape[1] > HIDDEN
        DONE.append(
            # The first messages go to the experts. After a product, they go back.
            (SCORED_BACK if scored else ROWS_BACK)
            if DONE[-1] not in (ROWS, SCORED, NEXT, "start")
            else (SCORED if scored else ROWS)
        )
        return Arriving(DONE, rows)


DONE: list[object] = []


class Products(TorchDispatchMode):
    """Notes each kind of product once for all experts, by the width of the experts."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in str(function):
            sizes = {n for a in args if isinstance(a, torch.Tensor) for n in a.shape}
            DONE.append(EXPERTS_IN if 2 * WIDTH in sizes else EXPERTS_OUT)
        return function(*args, **(kwargs or {}))


def named(program) -> list[object]:
    return [op.part if isinstance(op, Compute) else op for op in program]


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_the_programs_of_a_chunk_are_what_the_layer_does(checkpoint, monkeypatch):
    def noted(tiles):
        for tile in tiles:
            for _ in tile:
                DONE.append(NEXT)

    monkeypatch.setattr(expert_parallel, "staggered", noted)
    sizes = ("experts=1", "top_k=1", f"expert_size={WIDTH}", "dense_layers=0")
    words = [f"model.moe.{size}" for size in sizes]
    experts = Experts(compose(["model=tiny_moe", f"model.hidden_size={HIDDEN}", *words]).model)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    group = Group(0, 1, None)  # type: ignore[arg-type]
    x, scores = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, 1)
    scores.requires_grad_(True)
    decision = decide_alone(torch.zeros(TOKENS, 1, dtype=torch.int64), 1)
    tiles = expert_parallel.start_plan(decision, group, [0, TOKENS], TOKENS)()
    DONE[:] = ["start"]
    with Products():
        out = expert_parallel.SharedExperts.apply(
            x, scores, experts.gate_up, experts.down, tiles, group, checkpoint != "none", False
        )
    assert DONE[1:] == named(FORWARD_CHUNK)
    DONE[:] = ["start"]
    with Products():
        out.sum().backward()
    assert DONE[1:] == named(BACKWARD_CHUNK if checkpoint == "full" else KEPT_BACKWARD_CHUNK)


def received(checkpointed: bool, sizes: dict):
    """Return the bytes of a layer's rows in both passes."""
    layer = Layer(experts=True, checkpointed=checkpointed)
    return traffic([*layer.forward(), *layer.backward()], sizes)


def test_bytes_of_a_pair():
    # Rows with scores have as many times 16 bytes, and 16 bytes for the score.
    sizes = message_bytes(100, 2)
    assert (sizes[Message.ROWS], sizes[Message.ROWS_BACK]) == (200, 200)
    assert (sizes[Message.SCORED], sizes[Message.SCORED_BACK]) == (224, 224)
    assert received(False, sizes) == 2 * 200 + 2 * 224
    assert received(True, sizes) == 3 * 200 + 2 * 224
    assert message_bytes(2048, 2)[Message.SCORED] == 2 * 2048 + 16


def test_each_worker_receives_the_rows_of_its_experts_from_the_others():
    # Worker 0 holds experts 0 and 1, worker 1 experts 2 and 3.
    there, back = travelling(np.array([[1, 2, 3, 4], [10, 20, 30, 40]]))
    assert there.tolist() == [30, 7]
    assert back.tolist() == [7, 30]


RUN = ("model=tiny_moe", "model.num_layers=2", "seq=128", "topology.block_size=16")


def counted(rank: int, world: int, words: tuple[str, ...]) -> tuple[list[np.ndarray], int]:
    """Return the pairs of this worker by expert, for each layer, and the bytes it received."""
    config = compose([*RUN, "train.dtype=float32", f"topology.expert_parallel={world}", *words])
    trainer = Trainer(config, gloo.environment(rank, world, world))
    pairs, plan = [], expert_parallel.start_plan

    def noted(decision, *rest):
        pairs.append(np.diff(decision.ends_E.numpy(), prepend=0))
        return plan(decision, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "start_plan", noted)
        trainer.train_step(False)
    assert trainer.experts is not None
    received = trainer.experts.received[0]
    trainer.close()
    return pairs, received


@pytest.mark.parametrize(
    ("world", "checkpoint"), [(2, "full"), pytest.param(4, "none", marks=pytest.mark.slow)]
)
def test_each_worker_of_a_run_receives_the_bytes_of_its_loads(world, checkpoint):
    """Exact for each worker: the loads of a real step are uneven."""
    found = gloo.run(world, counted, (f"train.activation_checkpoint={checkpoint}",))
    hidden = compose(list(RUN)).model.hidden_size
    expected = np.zeros(world)
    for layer in range(2):
        there, back = travelling(np.stack([pairs[layer] for pairs, _ in found]))
        sizes = {
            message: size * (there if message in (Message.ROWS, Message.SCORED) else back)
            for message, size in message_bytes(hidden, 4).items()
        }
        expected += received(checkpoint == "full", sizes)
    assert [counted for _, counted in found] == expected.tolist()
    assert len(set(expected.tolist())) > 1, "loads are uneven"
