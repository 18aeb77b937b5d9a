"""The processes of another training loop that share a sequence, and the settings of attention."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_cli.launch.job import Job
from mtrain_cli.parallel.collectives import all_gather

LAYERS, KEPT = "model.num_layers", "train.activation_checkpoint"
_KEYS = {"layout": "topology.layout", "exchange": "topology.exchange", "kernel": "train.kernel"}
_SETTABLE = ("sparsity.", "mask.", "topology.")
# The caller's processes decide these.
_OF_PROCESSES = tuple(
    f"topology.{name}"
    for name in ("workers", "device", "context_parallel", "tensor_parallel", "pipeline_parallel",
                 "expert_parallel", "cluster")
)  # fmt: skip


@dataclass(frozen=True)
class Processes:
    """The processes of a job, from the view of one.

    groups: global ranks of each context group, ascending, all groups of the same size.
    group: communicator of this process's group; None for a single process.
    """

    rank: int
    groups: list[tuple[int, ...]]
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(given: dist.ProcessGroup | DeviceMesh | None) -> Processes:
        """Learn all context groups of the job. All processes call this together.

        given: this process's group; None for all processes.

        Raises ConfigError if a mesh has several dimensions, or the groups do not divide the job.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if given is not None:
                raise ConfigError("group: call torch.distributed.init_process_group before")
            if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
                warnings.warn(
                    f"WORLD_SIZE={processes}, but each process computes whole sequences alone; to "
                    "share them, call torch.distributed.init_process_group before",
                    stacklevel=4,
                )
            return Processes(0, [(0,)])
        if isinstance(given, DeviceMesh):
            if given.ndim != 1:
                names = ", ".join(given.mesh_dim_names or ()) or f"{given.ndim} dimensions"
                raise ConfigError(f'group: the mesh has {names}; give one, such as mesh["cp"]')
            given = given.get_group()
        group = dist.group.WORLD if given is None else given
        # `dist.new_group` returns another object to processes outside of the group.
        belongs = isinstance(group, dist.ProcessGroup)
        ranks = dist.get_process_group_ranks(group) if belongs else []
        world = dist.get_world_size()
        rows = _gather([*ranks, *[-1] * (world - len(ranks))], world)
        groups = sorted({tuple(rank for rank in row if rank >= 0) for row in rows} - {()})
        members = sorted(rank for of_group in groups for rank in of_group)
        alike = len({len(of_group) for of_group in groups}) == 1
        ascend = all(list(of_group) == sorted(of_group) for of_group in groups)
        if members != list(range(world)) or not alike or not ascend:
            shown = ", ".join(str(list(of_group)) for of_group in groups)
            raise ConfigError(
                f"group: {shown}: the groups must have the same size and ascending ranks, and each "
                f"of the {world} processes must be in one"
            )
        return Processes(dist.get_rank(), groups, group)

    @property
    def ranks(self) -> tuple[int, ...]:
        return next(group for group in self.groups if self.rank in group)

    @property
    def place(self) -> int:
        """The number of this process in its group."""
        return self.ranks.index(self.rank)

    def require_same(self, what: str, values: NDArray[np.integer]) -> None:
        """Raise ConfigError if the processes of this group, who call this together, differ."""
        own = zlib.crc32(values.tobytes())
        if self.group is not None and len(set(_gather([own], len(self.ranks), self.group))) > 1:
            raise ConfigError(
                f"{what}: differ between the processes {list(self.ranks)}, which share sequences; "
                "give the same to all of them"
            )

    def environment(self, config: Config) -> Environment:
        """Return the environment of this process's group alone, with its nodes."""
        ranks, world = self.ranks, sum(map(len, self.groups))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        nodes = [rank // local_size for rank in ranks]
        per_node = nodes.count(nodes[0])
        # A group with unequal parts of nodes is treated as one node.
        whole = len(ranks) % per_node == 0 and all(
            len(set(nodes[n : n + per_node])) == 1 for n in range(0, len(ranks), per_node)
        )
        sizes = self.place, len(ranks), self.place, per_node if whole else len(ranks)
        return resolve_environment(config, job=Job("torchrun", *sizes, "", 0))


def _gather(own: list[int], processes: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the numbers of each process of a group, in rank order."""
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    rows = all_gather(torch.tensor(own, device=device), processes, group)
    return [tuple(row) for row in rows.tolist()]


def compose_settings(size: int, overrides: Sequence[str], **arguments: str) -> Config:
    """Return the configuration of a context group of ``size`` processes.

    arguments: values of ``topology`` and ``train`` by the last part of their key, or of a group.

    Raises ConfigError for a wrong setting, or for one that does not belong to attention.
    """
    for word in overrides:
        key = word.partition("=")[0]
        if key in _OF_PROCESSES or not (key.startswith(_SETTABLE) or key in (LAYERS, KEPT)):
            raise ConfigError(
                f"{word}: does not belong to attention between the given processes; allowed: keys "
                f"under sparsity, mask and topology, {LAYERS} and {KEPT}"
            )
    words = [f"{_KEYS.get(name, name)}={value}" for name, value in arguments.items()]
    processes = [f"topology.workers={size}", "data.document_mask=true"]
    with named_as_arguments():
        config = compose([*words, *processes, *overrides])
    sparsity = config.sparsity
    if sparsity.dense_steps:
        raise ConfigError(
            f"sparsity.dense_steps={sparsity.dense_steps}: only `mtrain train` counts steps; begin "
            "with another context_parallel of sparsity=dense"
        )
    if (kept := config.train.activation_checkpoint) not in ("selective", "full"):
        raise ConfigError(
            f"{KEPT}={kept}: says only if checkpointed layers keep the output of attention; "
            "allowed: selective, full"
        )
    if sparsity.dense_layers and not any(word.startswith(f"{LAYERS}=") for word in overrides):
        raise ConfigError(
            f"sparsity.dense_layers={sparsity.dense_layers}: needs {LAYERS}=N, the model's layers"
        )
    if config.mask.is_mixed:
        raise ConfigError(
            f"mask.full_every={config.mask.full_every}, mask.full_first={config.mask.full_first}: "
            "the model says which layers have a window; give 0, and attention(..., window=N)"
        )
    return config


@contextmanager
def named_as_arguments() -> Iterator[None]:
    """Name the arguments of `api.context_parallel` in messages instead of their settings."""
    try:
        yield
    except ConfigError as error:
        lines: list[str] = list(error.problems)
        for name, key in _KEYS.items():
            lines = [line.replace(f"{key}=", f"{name}=") for line in lines]
        raise ConfigError(*lines) from None
