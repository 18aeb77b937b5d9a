"""The programs of a chunk are what the layer does with it; rows are counted by worker."""

from __future__ import annotations

from math import comb

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain_cli.composition.compose import compose
from mtrain_cli.model import expert_parallel, experts
from mtrain_cli.model.experts import Experts
from mtrain_cli.model.routing import decide_alone
from mtrain_cli.model.tiling import LayerExecution
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
from mtrain_cli.training.expert_traffic import (
    expert_traffic,
    message_bytes,
    reached,
    rows_per_token,
)
from mtrain_cli.training.layer_memory import ExpertMemory
from mtrain_cli.training.planning import make_plan
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
    tiles = expert_parallel.start_plan(decision, group, [0, TOKENS])()
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


def test_bytes_of_a_row():
    # Rows with numbers have as many times 16 bytes, and so have their numbers of 4 bytes: there a
    # score and a place for each of 3 choices, back the gradients of the scores.
    model = compose(["model=tiny_moe", "model.hidden_size=100", "model.moe.top_k=3"]).model
    sizes = message_bytes(model, 2)
    assert (sizes[Message.ROWS], sizes[Message.ROWS_BACK]) == (200, 200)
    assert (sizes[Message.SCORED], sizes[Message.SCORED_BACK]) == (208 + 32, 208 + 16)
    assert received(False, sizes) == 2 * 200 + 240 + 224
    assert received(True, sizes) == 3 * 200 + 240 + 224
    qwen = message_bytes(compose(["model=qwen3_30b_a3b"]).model, 2)
    assert (qwen[Message.SCORED], qwen[Message.SCORED_BACK]) == (2 * 2048 + 64, 2 * 2048 + 32)


@pytest.mark.parametrize(
    ("degree", "pairs", "rows"), [(2, 4.0, 1.0), (4, 6.0, 2.7), (8, 7.0, 4.7), (128, 7.94, 7.94)]
)
def test_how_often_a_token_leaves(degree, pairs, rows):
    """Of 128 experts, a token chooses 8 at random. Before, each pair had a row of its own."""
    moe = compose(["model=qwen3_30b_a3b"]).model.moe
    assert rows_per_token(moe, degree) == pytest.approx(rows, abs=0.06)
    assert 8 * (degree - 1) / degree == pytest.approx(pairs, abs=0.01)
    without = comb(128 - 128 // degree, 8) / comb(128, 8)
    assert rows_per_token(moe, degree) == pytest.approx((degree - 1) * (1 - without))
    one = compose(["model=qwen3_30b_a3b", "model.moe.top_k=1"]).model.moe
    assert rows_per_token(one, degree) == pytest.approx((degree - 1) / degree)


def test_tokens_that_reach_a_worker_with_uneven_loads():
    moe = compose(["model=tiny_moe", "model.moe.top_k=2"]).model.moe
    # All tokens choose expert 0, and no token an expert of the second worker of three.
    loads = np.array([[1.0, 0.0], [0.0, 0.0], [0.6, 0.4]])
    assert reached(loads, moe)[:2].tolist() == [1.0, 0.0]
    assert 0.6 < reached(loads, moe)[2] < 1.0
    assert reached(np.array([[0.01, 0.0]]), moe).tolist() == [0.01]
    # As many as choices that are drawn in proportion to loads.
    loads = np.array([[0.5, 0.2, 0.1, 0.2], [0.4, 0.1, 0.4, 0.1]])
    draw = np.random.default_rng(0).exponential(size=(20_000, 8)) / loads.flatten()
    chosen = draw.argsort(1)[:, :2] // 4
    drawn = [(chosen == worker).any(1).mean() for worker in range(2)]
    assert reached(loads, moe) == pytest.approx(drawn, abs=0.05)


def test_each_worker_receives_the_rows_of_its_experts_from_the_others():
    there, back = travelling(np.array([[3, 7], [30, 70]]))
    assert there.tolist() == [30, 7]
    assert back.tolist() == [7, 30]


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_estimate_of_a_decision_is_what_a_layer_keeps(chunks):
    """Every token chooses all experts, so all tokens travel."""
    words = ["model=tiny_moe", "model.moe.top_k=8", "train.activation_checkpoint=full"]
    config = compose([*words, "topology.expert_parallel=2", f"topology.expert_chunks={chunks}"])
    memory = ExpertMemory.of(config, 64, 4)
    loads = 4 * 8 * (1 + memory.sequences)
    # Beside it, numbers of pairs for each expert.
    for kept in gloo.run(2, kept_bytes, config.model, chunks):
        assert memory.decision - loads <= kept <= memory.decision


def kept_bytes(rank: int, world: int, model, chunks: int) -> int:
    module = experts.MixtureOfExperts(model, 0, None)
    for name, weight in list(module.experts.named_parameters()):
        own = torch.nn.init.normal_(weight.detach()[: len(weight) // world].clone())
        module.experts.register_parameter(name, torch.nn.Parameter(own))
    module.sharing = ExpertGroup(rank, world, dist.group.WORLD)
    module.execution = LayerExecution(expert_chunks=chunks, recompute=True)
    kept: list = []
    module(torch.randn(1, 64, model.hidden_size, requires_grad=True), kept=kept)
    tiles = [value for tile in kept[0].chunks for value in vars(tile).values()]
    arrived = [each for value in tiles if isinstance(value, dict) for each in value.values()]
    tensors = [each for each in [*kept[0], *tiles, *arrived] if isinstance(each, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


RUN = ("model=tiny_moe", "model.num_layers=2", "seq=128", "topology.block_size=16")


def counted(rank: int, world: int, words: tuple[str, ...]) -> tuple[list[list[int]], int]:
    """Return this worker's tokens for each worker, for each layer, and the bytes it received."""
    config = compose([*RUN, "train.dtype=float32", f"topology.expert_parallel={world}", *words])
    trainer = Trainer(config, gloo.environment(rank, world, world))
    tokens, plan = [], expert_parallel.start_plan
    each = config.model.moe.experts // world

    def noted(decision, *rest):
        workers = [set(experts) for experts in (decision.chosen_TK // each).tolist()]
        tokens.append([sum(worker in chosen for chosen in workers) for worker in range(world)])
        return plan(decision, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "start_plan", noted)
        trainer.train_step(False)
    assert trainer.experts is not None
    received = trainer.experts.received[0]
    trainer.close()
    return tokens, received


@pytest.mark.parametrize(
    ("world", "checkpoint", "top_k"),
    [(2, "full", 2), (4, "none", 8), pytest.param(4, "none", 3, marks=pytest.mark.slow)],
)
def test_each_worker_of_a_run_receives_the_bytes_of_its_loads(world, checkpoint, top_k):
    """Exact for each worker: the loads of a real step are uneven, unless tokens choose all."""
    words = (f"train.activation_checkpoint={checkpoint}", f"model.moe.top_k={top_k}")
    found = gloo.run(world, counted, words)
    config = compose([*RUN, *words])
    expected = np.zeros(world)
    for layer in range(2):
        there, back = travelling(np.array([tokens[layer] for tokens, _ in found]))
        sizes = {
            message: size * (there if message in (Message.ROWS, Message.SCORED) else back)
            for message, size in message_bytes(config.model, 4).items()
        }
        expected += received(checkpoint == "full", sizes)
    assert [counted for _, counted in found] == expected.tolist()
    assert (len(set(expected.tolist())) > 1) == (top_k < 8), "loads are uneven"
    if top_k == 8:  # what a plan expects of random choices
        plan = make_plan(compose([*RUN, *words, f"topology.workers={world}"]))
        formula = expert_traffic(plan.config, plan.dims, plan.layout, 4, world)
        assert expected.tolist() == [2 * formula.rows] * world
