"""The operations of a step. Lowerings write them in order, interpreters read only them.

A program names weights and messages, and counts rows. Their sizes come with the interpretation, so
that one program serves every model and cluster: of a message that no worker needs, the size is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.parallel.tensor_group import staggered

Program = Sequence["Operation"]


class Link(Enum):
    """A communicator, whose messages keep their order."""

    TENSOR, EXPERTS, WEIGHTS = "tensor", "experts", "weights"


class Message(Enum):
    """What travels, and on which link. `SCORED`: rows, each with the score of its pair."""

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
    """Return the program of a pass whose units run in the order of `tensor_group.staggered`.

    Args:
        unit: program of a unit for one row. Each `Wait` is for its oldest message.
        rows: number of rows of each unit.
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
