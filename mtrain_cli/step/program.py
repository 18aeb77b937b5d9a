"""A training step except attention as a list of operations, and what interpreters read from it.

A program names weights and messages, and counts rows. Their sizes come with the interpretation, so
that one program serves every model and cluster: of a message that no worker needs, the size is 0.

`model.feed_forward` runs the program of a tile of the MLP, `model.expert_parallel` that of a chunk
of the experts. Tests compare both. With expert parallelism, a token has a row for each worker that
has some of its experts. It travels there, and back, with the scores of the pairs or their
gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.layer_groups import staggered
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE

Program = Sequence["Operation"]


class Link(Enum):
    """A communicator, whose messages keep their order."""

    TENSOR, EXPERTS, WEIGHTS = "tensor", "experts", "weights"


class Message(Enum):
    """What travels, and on which link. `SCORED`: rows, each with numbers of its pairs."""

    HIDDEN = Link.TENSOR, "hidden states"
    ROWS, SCORED = (Link.EXPERTS, "rows"), (Link.EXPERTS, "scored rows")
    ROWS_BACK, SCORED_BACK = (Link.EXPERTS, "rows back"), (Link.EXPERTS, "scored rows back")
    GATHER = Link.WEIGHTS, "weights"
    GATHER_AGAIN = Link.WEIGHTS, "weights for backward"
    REDUCE = Link.WEIGHTS, "gradients"

    @property
    def link(self) -> Link:
        return self.value[0]


@dataclass(frozen=True, slots=True)
class Compute:
    """A matrix product. part: its weight, as in `flops.layer_shapes`. direction: its pass."""

    part: str
    direction: str = FORWARD
    rows: float = 1

    @property
    def again(self) -> Compute:
        return replace(self, direction=RECOMPUTE)

    @property
    def backward(self) -> Compute:
        return replace(self, direction=BACKWARD)


@dataclass(frozen=True, slots=True)
class Post:
    """Start a message. number: shared with its `Wait`; later messages may have it again."""

    message: Message
    rows: float = 1
    number: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the message of this number."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class Next:
    """Let the other units of a pass go on. Programs of whole passes have none."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Do the same several times."""

    times: int
    body: Program


Operation = Compute | Post | Wait | Next | Repeat


def in_turns(unit: Program, rows: Sequence[float]) -> list[Operation]:
    """Return the program of a pass whose units run in the order of `layer_groups.staggered`.

    unit: program of a unit for one row. Each `Wait` is for its oldest message.
    """
    program: list[Operation] = []

    def run(number: int, rows: float) -> Iterator[None]:
        posted = waited = number * len(unit)
        for op in unit:
            match op:
                case Next():
                    yield
                case Compute():
                    program.append(replace(op, rows=rows))
                case Post():
                    program.append(replace(op, rows=rows, number=posted))
                    posted += 1
                case Wait():
                    program.append(Wait(waited))
                    waited += 1

    staggered(run(number, rows) for number, rows in enumerate(rows))
    return program


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
    units: number of chunks of tokens that the experts compute.
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
    """Return the kinds of layers of a model, each with the number of such layers."""
    dense = model.num_layers - model.expert_layers
    # Tiles are recomputed even without checkpointing.
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
    """
    gather, reduce = Post(Message.GATHER), Post(Message.REDUCE)
    if shard == "full":
        return [Repeat(micro_batches, (gather, Post(Message.GATHER_AGAIN), reduce))]
    if micro_batches == 1:
        return [Repeat(1, (gather, reduce))]
    early = (reduce,) if shard == "gradients" else ()
    between = [Repeat(micro_batches - 2, early)] if micro_batches > 2 else []
    return [Repeat(1, (gather, *early)), *between, Repeat(1, (reduce,))]


def traffic(program: Program, sizes: Mapping[Message, Any]) -> Any:
    """Return the bytes that a worker receives.

    sizes: bytes per row of each message, numbers or arrays [ranks]; other messages are not counted.
    """
    received: Any = 0
    for op in program:
        match op:
            case Post():
                received += op.rows * sizes.get(op.message, 0)
            case Repeat():
                received += op.times * traffic(op.body, sizes)
    return received


def work(program: Program, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the work of matrix products by direction.

    parts: work of one row with each weight, numbers or arrays, such as its elements (half of the
        FLOP) or a time; other products are not counted.
    """
    amounts: defaultdict[str, Any] = defaultdict(int)
    for op in program:
        match op:
            case Compute():
                amounts[op.direction] += op.rows * parts.get(op.part, 0)
            case Repeat():
                for direction, amount in work(op.body, parts).items():
                    amounts[direction] += op.times * amount
    return amounts


class MessageCost(NamedTuple):
    """Microseconds of a message, those for which it occupies the link, and mean bytes received.

    outer: whether it crosses nodes.
    """

    us: float
    busy: float
    size: float = 0.0
    outer: bool = False


class PassTime(NamedTuple):
    """The time of a program, in microseconds.

    span: time of the slowest worker.
    exposed, late: times for which the worker with the most work waits for messages, and, in the
        mean, a worker for that one.
    hidden: time of messages that overlaps with computation.
    busy: time for which messages occupy their links.
    size: mean number of bytes that a worker receives.
    """

    span: float
    exposed: float
    late: float
    hidden: float
    busy: float
    size: float

    @staticmethod
    def mean(times: Sequence[PassTime], shares: Sequence[float] | None = None) -> PassTime:
        """Return the mean of programs, such as those of a model's layers."""
        return PassTime(*np.average(times, axis=0, weights=shares).tolist())


def time(
    program: Program,
    parts: Mapping[str, float],
    cost: Callable[[Post], MessageCost | None],
    computing: Any = None,
) -> PassTime:
    """Run a program on the clocks of its workers, and on one of each link.

    A message begins when the last worker starts it and its link is free. It arrives everywhere at
    the same time.

    parts: time of one row with each weight, as in `work`, or its share in ``computing``.
    cost: returns the cost of a message; None if it is not sent.
    computing: time of all products, a number or an array [ranks]. Default: that of ``parts``.
    """
    total = sum(work(program, parts).values())
    computing = total if computing is None else computing
    share = computing / total
    now, free, arrived = computing * 0.0, dict.fromkeys(Link, 0.0), dict[int, float]()
    sending = busy = size = 0.0
    for op in program:
        match op:
            case Compute():
                now = now + share * (op.rows * parts.get(op.part, 0))
            case Post():
                if (sent := cost(op)) is not None:
                    link = op.message.link
                    free[link] = max(float(np.max(now)), free[link]) + sent.us
                    arrived[op.number] = free[link]
                    sending, busy, size = sending + sent.us, busy + sent.busy, size + sent.size
            case Wait():
                now = np.maximum(now, arrived.get(op.number, 0.0))
    span, most = float(np.max(now)), float(np.max(computing))
    exposed, late = max(0.0, span - most), most - float(np.mean(computing))
    return PassTime(span, exposed, late, max(0.0, sending - exposed), busy, size)
