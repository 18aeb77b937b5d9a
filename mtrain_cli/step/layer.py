"""Lowerings: a layer except attention, and the collectives of FSDP2, as operations in order.

`model.feed_forward` runs the program of a tile of the MLP, `model.expert_parallel` that of a part
of the experts. Tests compare both. Every message of tensor parallelism gathers or adds up rows of
the residual stream. With expert parallelism, each pair of a token and an expert has a row, which
travels to the worker of the expert, and back. In the forward pass the score of the pair travels
with it, and in the backward pass the gradient of the score.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.step.program import (
    Compute,
    Message,
    Next,
    Operation,
    Post,
    Program,
    Repeat,
    Wait,
    in_turns,
)

EXPERTS_IN, EXPERTS_OUT = "experts gate and up", "experts down"
SEND, NEXT, WAIT = Post(Message.HIDDEN), Next(), Wait()
ROWS, SCORED, ROWS_BACK, SCORED_BACK = (
    Post(message)
    for message in (Message.ROWS, Message.SCORED, Message.ROWS_BACK, Message.SCORED_BACK)
)
OUTPUT, GATE, UP, DOWN = (Compute(part) for part in ("o", "gate", "up", "down"))
IN, OUT = Compute(EXPERTS_IN), Compute(EXPERTS_OUT)
_QKV = tuple(Compute(part) for part in ("q", "k", "v"))
_BESIDE_EXPERTS = tuple(
    Compute(part) for part in ("router", "shared gate", "shared up", "shared down")
)


def _again(program: Program) -> tuple[Operation, ...]:
    return tuple(op.again if isinstance(op, Compute) else op for op in program)


def _gradients(program: Iterable[Compute]) -> tuple[Compute, ...]:
    """Each product has two in backward: for the gradients of its input and of its weight."""
    return tuple(op.backward for op in program) * 2


_MESSAGE: Program = (SEND, WAIT)
_SUM: Program = (SEND, NEXT, WAIT)
_TO_EXPERTS: Program = (*_MESSAGE, *_QKV, OUTPUT, *_MESSAGE, *_BESIDE_EXPERTS)
_TO_GATE: Program = (OUTPUT, *_SUM, *_SUM)
_FROM_GATE = (*_gradients([DOWN]), *_gradients([GATE, UP]), *_SUM, *_SUM, *_gradients([OUTPUT]))
FORWARD_TILE = (*_TO_GATE, GATE, UP, DOWN, *_SUM)
BACKWARD_TILE: Program = (*_again(_TO_GATE), SEND, GATE.again, UP.again, WAIT, *_FROM_GATE)
KEPT_BACKWARD_TILE: Program = (SEND, SEND, NEXT, WAIT, WAIT, *_FROM_GATE)

FORWARD_CHUNK = (SCORED, NEXT, WAIT, IN, OUT, ROWS_BACK, NEXT, WAIT)
_OF_EXPERTS = (OUT.backward, IN.backward, SCORED_BACK, OUT.backward, IN.backward, NEXT, WAIT)
KEPT_BACKWARD_CHUNK: Program = (ROWS, NEXT, WAIT, *_OF_EXPERTS)
# With activation checkpointing, the rows travel again, and gate and up are computed again. Scores
# are kept.
BACKWARD_CHUNK: Program = (ROWS, ROWS, NEXT, WAIT, IN.again, WAIT, *_OF_EXPERTS)


@dataclass(frozen=True)
class Layer:
    """A layer, and how a worker computes it.

    experts: whether it has experts instead of one MLP.
    checkpointed: whether backward repeats the forward pass, except its last product.
    keeps: whether backward repeats no product of o, gate and up, as `train.keep_mlp` selects.
    tiles: own rows of each tile of the MLP.
    units: number of parts of the experts, in all chunks of tokens.
    """

    experts: bool = False
    checkpointed: bool = True
    keeps: bool = False
    tiles: tuple[int, ...] = (1,)
    units: int = 1

    def forward(self) -> Program:
        if not self.experts:
            return self._whole(*_MESSAGE, *_QKV) + in_turns(FORWARD_TILE, self.tiles)
        return self._whole(*_TO_EXPERTS) + self._of_experts(FORWARD_CHUNK)

    def backward(self) -> Program:
        to_input = self._whole(*_gradients(_QKV), *_MESSAGE)
        if not self.experts:
            again = self._whole(*_MESSAGE, *_again(_QKV)) if self.checkpointed else []
            tile = KEPT_BACKWARD_TILE if self.keeps else BACKWARD_TILE
            return again + in_turns(tile, self.tiles) + to_input
        again = self._whole(*_again(_TO_EXPERTS)) if self.checkpointed else []
        again += self._of_experts(BACKWARD_CHUNK if self.checkpointed else KEPT_BACKWARD_CHUNK)
        between = self._whole(*_gradients(_BESIDE_EXPERTS), *_MESSAGE, *_gradients([OUTPUT]))
        return again + between + to_input

    def _whole(self, *operations: Operation) -> list[Operation]:
        return in_turns(operations, [sum(self.tiles)])

    def _of_experts(self, chunk: Program) -> list[Operation]:
        return in_turns(chunk, [sum(self.tiles) / self.units] * self.units)


def layers(
    model: ModelConfig, *, checkpointed: bool, tiled: bool, keep_mlp: bool | int
) -> list[tuple[int, Layer]]:
    """Return the kinds of layers of a model, each with the number of such layers.

    tiled: whether the MLP runs in tiles. Tiles are recomputed even without checkpointing.
    """
    dense = model.num_layers - model.expert_layers
    kept = layers_with_products(keep_mlp, dense) if checkpointed or tiled else dense
    numbers = (
        (dense - kept, Layer(checkpointed=checkpointed)),
        (kept, Layer(checkpointed=checkpointed, keeps=True)),
        (model.expert_layers, Layer(True, checkpointed)),
    )
    return [(number, layer) for number, layer in numbers if number]


def weight_messages(shard: str, micro_batches: int) -> list[Repeat]:
    """Return the micro-batches of a step, grouped by their collectives for a unit of FSDP2.

    `fsdp.begin_micro_batch` decides on the same collectives in a run. `Message.GATHER_AGAIN` exists
    only for layers: the weights outside them stay gathered during the micro-batch.

    shard: value of ``train.shard``.
    """
    gather, reduce = Post(Message.GATHER), Post(Message.REDUCE)
    if shard == "full":
        return [Repeat(micro_batches, (gather, Post(Message.GATHER_AGAIN), reduce))]
    if micro_batches == 1:
        return [Repeat(1, (gather, reduce))]
    early = (reduce,) if shard == "gradients" else ()
    between = [Repeat(micro_batches - 2, early)] if micro_batches > 2 else []
    return [Repeat(1, (gather, *early)), *between, Repeat(1, (reduce,))]
