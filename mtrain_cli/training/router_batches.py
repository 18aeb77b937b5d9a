"""The routing of training: a description of each batch, and the loads of the experts in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.config.parallel_checks import balance_loss
from mtrain_cli.config.schema import Config, MoeConfig
from mtrain_cli.launch import progress_record
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.experts import expert_layers
from mtrain_cli.model.routing import (
    BALANCE,
    ENTROPY,
    PADDING,
    RouterOptions,
    Routing,
    SharingGroup,
    Z,
)
from mtrain_cli.parallel.layer_groups import MessageObserver, TensorGroup
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.transport import explain_peer_loss

_Contexts = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class RouterBatches:
    """Describes batches to the routers of a model with experts."""

    moe: MoeConfig
    layers: int  # of the model
    options: RouterOptions
    context: ContextGroup
    tensor: TensorGroup | None = None
    # Watches the waits for the loads of other workers.
    observer: MessageObserver = field(default_factory=MessageObserver, compare=False)

    @staticmethod
    def make(
        config: Config, context: ContextGroup, tensor: TensorGroup | None
    ) -> RouterBatches | None:
        """Return the routing of a run; None if its model has no experts."""
        model, train = config.model, config.train
        if not model.moe.experts:
            return None
        options = RouterOptions(
            sequences=train.global_batch,
            balance_loss=balance_loss(config),
            z_loss=train.router_z_loss,
        )
        return RouterBatches(model.moe, model.num_layers, options, context, tensor)

    def of(self, layout: Layout, lengths: Sequence[int], device: torch.device) -> Routing:
        """Return the routing of a micro-batch. lengths: tokens per sequence, without padding."""
        positions = torch.from_numpy(layout.positions(self.context.rank)).long()
        starts = torch.arange(len(lengths))[:, None] * layout.padded_seq
        is_real = positions < torch.tensor(lengths)[:, None]
        slots = torch.where(is_real, starts + positions, PADDING).to(device)
        if self.tensor is not None:
            slots = self.tensor.own(slots, PADDING)
        shape = layout.padded_seq, self.moe, self.layers
        return Routing(slots, lengths, *shape, self.options, self._groups())

    def _groups(self) -> list[SharingGroup]:
        groups = []
        if (tensor := self.tensor) is not None:
            errors = self._observed(tensor.peer_errors)
            groups.append(SharingGroup(tensor.process_group, errors))
        context = self.context
        if context.size > 1:
            assert context.whole is not None
            errors = self._observed(partial(_peer_errors, context))
            groups.append(SharingGroup(context.whole, errors))
        return groups

    def _observed(self, peer_errors: _Contexts) -> _Contexts:
        @contextmanager
        def waiting() -> Iterator[None]:
            with peer_errors(), self.observer.waiting():
                yield

        return waiting


def _peer_errors(context: ContextGroup) -> AbstractContextManager[None]:
    others = ", ".join(str(r) for place, r in enumerate(context.ranks) if place != context.rank)
    loads = f"the loads of rank{'s' * (context.size > 2)} {others}"
    several = progress_record.SEVERAL
    return explain_peer_loss("router", f"waits for {loads}", f"{loads} did not arrive", several)


@dataclass(frozen=True)
class OwnLoads:
    """The loads of the experts by this worker's tokens, as [layers of the model, E]."""

    layers: tuple[int, ...]  # those with experts that this worker computes
    chosen: tuple[torch.Tensor, ...]  # tokens that chose each expert, by micro-batch

    @staticmethod
    def of(routings: Sequence[Routing]) -> OwnLoads | None:
        if not routings:
            return None
        layers = sorted(set().union(*(routing.decided for routing in routings)))
        chosen = tuple(routing.loads[:, : routing.moe.experts] for routing in routings)
        return OwnLoads(tuple(layers), chosen)

    def counts(self) -> np.ndarray:
        """Return the tokens that each expert computes, int64 [layers, E]."""
        total = torch.stack(self.chosen).sum(0)[list(self.layers)]
        return total.round().long().cpu().numpy()


@dataclass(frozen=True)
class RoutingMetrics:
    """The routing of an optimizer step, with means over sequences and layers."""

    counts: torch.Tensor  # tokens of each expert, float64 [layers with experts, E] on the host
    balance: float  # balance loss, without coefficient; 1 is perfect
    z: float  # mean logsumexp(logits)^2
    entropy: float  # of the scores, in nats
    own: OwnLoads | None = None  # the other fields are equal on all workers

    def metrics(self) -> dict[str, Any]:
        # The tokens of the expert with the most, divided by the mean.
        loads = (self.counts.amax(1) / self.counts.mean(1)).tolist()
        return {
            "balance_loss": self.balance,
            "router_z": self.z,
            "expert_load": max(loads),
            "expert_load_by_layer": loads,
            "router_entropy": self.entropy,
        }

    def change_biases(self, decoder: Decoder, step: float) -> None:
        """Change the biases of this worker's routers by ``step`` (``train.balance_bias``)."""
        first = decoder.model_config.moe.dense_layers
        for mlp in expert_layers(decoder.layers) if step else ():
            mlp.change_bias(self.counts[mlp.layer - first], step)


def routing_metrics(
    routings: Sequence[Routing],
    config: Config,
    all_reduce: Callable[[torch.Tensor], object] = dist.all_reduce,
) -> RoutingMetrics | None:
    """Add up the loads of a step over micro-batches and workers; None without experts."""
    if not routings:
        return None
    total = torch.stack([routing.loads for routing in routings]).sum(0)
    all_reduce(total)
    model, options = config.model, routings[0].options
    loads = total[model.moe.dense_layers :].cpu()
    counts, sums = loads.split([model.moe.experts, loads.shape[1] - model.moe.experts], dim=1)
    return RoutingMetrics(
        counts=counts,
        balance=float(sums[:, BALANCE].mean()) / options.sequences,
        z=float(sums[:, Z].mean()) / options.sequences,
        entropy=float(sums[:, ENTROPY].mean()) / options.sequences,
        own=OwnLoads.of(routings),
    )
