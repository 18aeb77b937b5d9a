"""The bytes that a plan sends over the links of its nodes in a step.

The messages are those of the programs that the ranks run (`lower`), of the rows that the masks need
(`CastRows`) and of FSDP (`StateMemory.sent`). A collective of n ranks takes one of two routes:

- direct: each rank sends each peer its part, as the plan counts it. A sum sends each part twice.
- gloo: a gather and a sum go around a ring in the order of the ranks, and a reduce-scatter sums
  everything, which sends twice as much as the plan has. Only a rank at the end of its node then
  sends to another node.

Messages to one rank and all-to-alls are direct in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.cast_rows import CastRows
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import KEYS, Post
from mtrain_cli.parallel.schedule import GROUP_CAST, GROUP_REDUCE, SUM, make_schedule
from mtrain_cli.step.program import Message, traffic, weight_messages
from mtrain_cli.training.attention_memory import shard_sizes
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.state_memory import largest_states

Matrix = NDArray[np.float64]  # bytes from rank to rank
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Links:
    """Bytes of a step that leave each node and that reach it: [nodes].

    attention: KV, its gradients, and what else an exchange sends.
    weights: weights and gradients of FSDP.
    """

    attention: tuple[NDArray[np.float64], NDArray[np.float64]]
    weights: tuple[NDArray[np.float64], NDArray[np.float64]]

    @property
    def total(self) -> NDArray[np.float64]:
        """Bytes that leave and reach each node, [2, nodes]."""
        return np.array(self.attention) + np.array(self.weights)


def planned(words: Sequence[str], nodes: int, per_node: int, *, gloo: bool) -> Links:
    """Return the bytes of a step of `mtrain train WORDS`, whose masks are equal in all steps."""
    topology = [f"topology.workers={nodes * per_node}", f"topology.gpus_per_node={per_node}"]
    plan = make_plan(compose([*words, *topology], plan=True))
    assert not plan.config.data.document_mask
    workers = plan.dims.cp
    assert workers == nodes * per_node, "one context group, without other dimensions"
    attention = np.zeros((workers, workers))
    for rank in range(workers):
        for post, rows in _posts(plan, rank):
            _send(attention, rank, post, _bytes(plan, post), rows, gloo=gloo)
    attention *= plan.config.model.num_layers * plan.micro_batches
    weights = _weights(plan, gloo=gloo)
    return Links(_between(attention, per_node), _between(weights, per_node))


def _posts(plan: RunPlan, rank: int) -> Iterator[tuple[Post, tuple[int, ...]]]:
    """Yield a rank's messages in a layer, with the rows to each peer of a group cast."""
    exchange, layout = plan.exchange, plan.layout
    schedule = make_schedule(exchange.name, exchange.options(layout.workers))
    forward, backward = (lower(schedule, rank, backward=b) for b in (False, True))
    rows = None
    if schedule.traits.by_mask and schedule.groups > 1:
        assert schedule.heads == 1
        mask = MaskRule.of(plan.config).undivided(layout.seq, layout.padded_seq)
        masks = [mask] * plan.config.train.micro_batch
        rows = CastRows.make(layout, masks, rank, schedule)
    for program in (forward, backward, forward.recomputed(plan.recompute)):
        for post in program.posts:
            kind = post.transfer.kind
            if kind in (GROUP_CAST, GROUP_REDUCE):
                assert rows is not None
                cast = rows[program is backward].casts[post.cast]
                yield post, cast.sent if kind == GROUP_CAST else cast.received
            else:
                yield post, ()


def _bytes(plan: RunPlan, post: Post) -> float:
    """Return the bytes of the tensor that a rank posts, or of one row of a group cast."""
    sizes = shard_sizes(plan.config.of_worker, plan.layout, plan.exchange, plan.dtype_bytes)
    if post.transfer.kind in (GROUP_CAST, GROUP_REDUCE):
        width = plan.dtype_bytes if post.transfer.kind == GROUP_CAST else _GRADIENT_BYTES
        return float(sizes.count(KEYS, 1)) / sizes.tokens * width / post.piece[1]
    return post.payload.of(sizes, plan.exchange.heads) * post.transfer.shards


def _send(
    matrix: Matrix, rank: int, post: Post, size: float, rows: Sequence[int], *, gloo: bool
) -> None:
    """Add what this rank sends to the others in one message."""
    t = post.transfer
    if t.kind == "p2p":
        matrix[rank, t.to] += size
    elif t.kind in (GROUP_CAST, GROUP_REDUCE):
        for peer, count in zip(t.peers, rows, strict=True):
            matrix[rank, peer] += size * count
    elif t.kind == "all_to_all":
        _direct(matrix, rank, t.peers, size / len(t.peers))
    elif t.kind == "all_gather":
        _collective(matrix, rank, t.peers, size, times=1, gloo=gloo)
    else:
        times = 2 if gloo or t.kind == SUM else 1
        _collective(matrix, rank, t.peers, size / len(t.peers), times=times, gloo=gloo)


def _direct(matrix: Matrix, rank: int, peers: Sequence[int], part: float) -> None:
    for peer in peers:
        matrix[rank, peer] += part * (peer != rank)


def _collective(
    matrix: Matrix, rank: int, peers: Sequence[int], part: float, *, times: int, gloo: bool
) -> None:
    if not gloo:
        _direct(matrix, rank, peers, times * part)
    elif len(peers) > 1:
        after = dict(pairwise([*peers, peers[0]]))
        matrix[rank, after[rank]] += times * part * (len(peers) - 1)


def _weights(plan: RunPlan, *, gloo: bool) -> Matrix:
    config, workers, e = plan.config, plan.dims.workers, plan.dtype_bytes
    states = largest_states(config, workers, plan.micro_batches, e)
    messages = weight_messages(config.train.shard, plan.micro_batches)
    gathered = states.of_layers * traffic(
        messages, {Message.GATHER: e, Message.GATHER_AGAIN: e}
    ) + states.root_shard * traffic(messages, {Message.GATHER: e})
    reduced = states.shard * traffic(messages, {Message.REDUCE: states.r})
    assert (workers - 1) * (gathered + reduced) == plan.received.weights
    matrix, ranks = np.zeros((workers, workers)), range(workers)
    for rank in ranks:
        _collective(matrix, rank, ranks, gathered, times=1, gloo=gloo)
        _collective(matrix, rank, ranks, reduced, times=2 if gloo else 1, gloo=gloo)
    return matrix


def _between(matrix: Matrix, per_node: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what leaves and what reaches each node."""
    nodes = len(matrix) // per_node
    by_node = matrix.reshape(nodes, per_node, nodes, per_node).sum((1, 3))
    np.fill_diagonal(by_node, 0)
    return by_node.sum(1), by_node.sum(0)
