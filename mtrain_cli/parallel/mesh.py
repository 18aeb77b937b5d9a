"""Process groups: the workers that share a sequence, and the workers that share parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.schedule import CONTEXT, GRADIENTS, HEADS, INNER, OUTER

if TYPE_CHECKING:
    from mtrain_cli.parallel.exchange_selection import ExchangeChoice

Channel = tuple[str, bool]  # (channel of a schedule, whether it carries gradients)
WHOLE: Channel = ("whole", False)


@dataclass(frozen=True)
class ContextGroup:
    """The workers that share one sequence, from the view of one worker; by default it is alone.

    channels: communicators. Each channel of the exchange has one communicator for data and one for
        gradients, so that neither queues behind the other.
    heads: number of ranks that trade tokens for heads (Ulysses) before keys move.
    exchange: the ranks that hold this rank's heads; None if all ranks of the group do.
    """

    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    per_node: int = 1
    channels: dict[Channel, dist.ProcessGroup] = field(default_factory=dict, repr=False)
    heads: int = 1
    exchange: ContextGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def whole(self) -> dist.ProcessGroup | None:
        """The communicator of all ranks of the group, for dynamic indices and their columns."""
        return self.channels.get(WHOLE)

    @property
    def same_heads(self) -> ContextGroup:
        """The ranks that hold this rank's heads. Keys or queries move among these ranks."""
        return self.exchange or self

    def channel(self, name: str, payload: str) -> dist.ProcessGroup:
        group = self if name == HEADS else self.same_heads
        return group.channels[name, payload in GRADIENTS]


def make_context_group(
    rank: int,
    dims: ParallelDims | Sequence[tuple[int, ...]],
    device: torch.device,
    timeout: timedelta | None = None,
    *,
    per_node: int | None = None,
    heads: int = 1,
    channels: Sequence[str] = (CONTEXT, INNER, OUTER),
) -> ContextGroup:
    """Make the communicators of all context groups and return this rank's group.

    All ranks must call this: `dist.new_group` is collective over the whole job.

    dims: also as the ranks of each context group, all of the same size.
    timeout: longest wait for one message, after which a peer counts as hung.
    """
    all_groups = dims.groups("cp") if isinstance(dims, ParallelDims) else dims
    ranks = next(group for group in all_groups if rank in group)
    cp, place = len(ranks), ranks.index(rank)
    per_node = min(per_node or cp, cp)

    def make(sets: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        of_ranks = [[group[place] for place in s] for group in all_groups for s in sets]
        own_group = new_group(rank, of_ranks, timeout)
        assert own_group is not None
        return own_group

    whole = {WHOLE: make([range(cp)])} if cp > 1 else {}
    if heads == 1:
        groups = _channels(make, [list(range(cp))], per_node, channels)
        group = ContextGroup(place, ranks, per_node, {**whole, **groups})
    else:
        # Rank p of every head group exchanges keys with rank p of the other head groups.
        counterparts = [list(range(p, cp, heads)) for p in range(heads)]
        groups_per_node = min(max(1, per_node // heads), cp // heads)
        groups = _channels(make, counterparts, groups_per_node, channels)
        if cp > heads:
            groups[WHOLE] = make(counterparts)
        same_heads = ranks[place % heads :: heads]
        exchange = ContextGroup(place // heads, same_heads, groups_per_node, groups)
        head_groups = {(HEADS, False): make([range(g, g + heads) for g in range(0, cp, heads)])}
        group = ContextGroup(place, ranks, per_node, {**whole, **head_groups}, heads, exchange)
    connect_all([*group.channels.values(), *(groups.values() if heads > 1 else ())], device)
    return group


class ContextGroups:
    """This rank's context groups. Exchanges with equal needs share one.

    Arguments and collective calls are those of `make_context_group`.
    """

    def __init__(
        self, rank: int, dims: ParallelDims | Sequence[tuple[int, ...]], timeout: timedelta
    ) -> None:
        self._rank, self._dims, self._timeout = rank, dims, timeout
        self._made: dict[tuple[object, ...], ContextGroup] = {}

    def of(self, choice: ExchangeChoice, device: torch.device) -> ContextGroup:
        needs = choice.per_node, choice.heads, choice.channels, device
        if needs not in self._made:
            self._made[needs] = make_context_group(
                self._rank, self._dims, device, self._timeout,
                per_node=choice.per_node, heads=choice.heads, channels=choice.channels,
            )  # fmt: skip
        return self._made[needs]


def connect_all(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Connect all ranks of each group at once. A communicator connects on its first message."""
    for group in groups:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def new_group(
    rank: int, sets: Iterable[Sequence[int]], timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """Make a communicator for each set of ranks. Return the one to which this rank belongs."""
    own_group: dist.ProcessGroup | None = None
    for members in sets:
        # Every rank must call new_group for every group, in the same order.
        made = dist.new_group(list(members), timeout=timeout)
        own_group = made if rank in members else own_group
    return own_group


def _channels(
    make: Callable[[Sequence[Sequence[int]]], dist.ProcessGroup],
    sets: Sequence[list[int]],
    per_node: int,
    names: Sequence[str],
) -> dict[Channel, dist.ProcessGroup]:
    """Make the communicators of the named channels within each set of ranks."""
    size = len(sets[0])
    whole_nodes = [members[n : n + per_node] for members in sets for n in range(0, size, per_node)]
    counterparts = [members[local::per_node] for members in sets for local in range(per_node)]
    among = {
        CONTEXT: (sets, size),
        INNER: (whole_nodes, per_node),
        OUTER: (counterparts, size // per_node),
    }
    return {
        (name, gradients): make(among[name][0])
        for name in names
        if among[name][1] > 1
        for gradients in (False, True)
    }


STAGE, SHARD, TENSOR = "stage", "shard", "tensor"  # dimensions of the parameter mesh


def make_parameter_mesh(dims: ParallelDims, device: str) -> DeviceMesh:
    """Make the mesh over the ranks of a stage that shards parameters, gradients and states.

    The mesh is flat without tensor parallelism, else [dp * cp, tp]. Without pipeline parallelism,
    all ranks are one stage.
    """
    sizes = {STAGE: dims.pp, SHARD: dims.dp * dims.cp, TENSOR: dims.tp}
    cut = [name for name in (STAGE, TENSOR) if sizes[name] > 1]
    names = tuple(name for name in sizes if name == SHARD or name in cut)
    mesh = init_device_mesh(device, tuple(sizes[name] for name in names), mesh_dim_names=names)
    return mesh if STAGE not in cut else mesh[names[1:]]
