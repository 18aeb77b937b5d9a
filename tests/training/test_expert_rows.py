"""The programs of a chunk are what the layer does with it; rows are counted by worker."""

from __future__ import annotations

import gloo
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain_cli.composition.compose import compose
from mtrain_cli.model import expert_parallel
from mtrain_cli.model.experts import Experts
from mtrain_cli.model.routing import decide_alone
from mtrain_cli.parallel.expert_group import ExpertGroup
from mtrain_cli.training.expert_rows import (
    FORWARD_CHUNK,
    IN,
    NEXT,
    OUT,
    ROWS,
    ROWS_BACK,
    SCORED,
    SCORED_BACK,
    WAIT,
    backward_chunk,
    message_bytes,
    pair_bytes,
    travelling,
)
from mtrain_cli.training.trainer import Trainer

HIDDEN, WIDTH, TOKENS = 20, 12, 7


class Message:
    def __init__(self, done: list[str], rows: torch.Tensor) -> None:
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
        return Message(DONE, rows)


DONE: list[str] = []


class Products(TorchDispatchMode):
    """Notes each kind of product once for all experts, by the width of the experts."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in str(function):
            sizes = {n for a in args if isinstance(a, torch.Tensor) for n in a.shape}
            DONE.append(IN if 2 * WIDTH in sizes else OUT)
        return function(*args, **(kwargs or {}))


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
        out = expert_parallel._SharedExperts.apply(
            x,
            scores,
            experts.gate_up,
            experts.down,
            tiles,
            group,
            checkpoint != "none",
            False,
        )
    assert tuple(DONE[1:]) == FORWARD_CHUNK
    DONE[:] = ["start"]
    with Products():
        out.sum().backward()
    assert tuple(DONE[1:]) == backward_chunk(checkpoint)


def test_bytes_of_a_pair():
    # Rows with scores have as many times 16 bytes, and 16 bytes for the score.
    assert message_bytes(100, 2) == {ROWS: 200, ROWS_BACK: 200, SCORED: 224, SCORED_BACK: 224}
    assert pair_bytes(100, 2, "none") == 2 * 200 + 2 * 224
    assert pair_bytes(100, 2, "selective") == 3 * 200 + 2 * 224
    assert message_bytes(2048, 2)[SCORED] == 2 * 2048 + 16


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
        patch.setattr(expert_parallel, "start_plan", noted)
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
    size = message_bytes(hidden, 4)
    program = FORWARD_CHUNK + backward_chunk(checkpoint)
    of_kind = {
        True: sum(size[word] for word in program if word in (ROWS, SCORED)),
        False: sum(size[word] for word in program if word in (ROWS_BACK, SCORED_BACK)),
    }
    expected = np.zeros(world, np.int64)
    for layer in range(2):
        there, back = travelling(np.stack([pairs[layer] for pairs, _ in found]))
        expected += there * of_kind[True] + back * of_kind[False]
    assert [received for _, received in found] == expected.tolist()
    assert len(set(expected.tolist())) > 1, "loads are uneven"
    assert sum(of_kind.values()) == pair_bytes(hidden, 4, checkpoint)
