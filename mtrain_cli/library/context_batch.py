"""One batch of sequences that processes share: tokens of this process, masks, and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.config.keys import first_few
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.schema import Config
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.library.arguments import (
    is_whole,
    kind_of,
    require,
    require_tensor,
)
from mtrain_cli.library.max_logits import max_logits as largest_logits
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.sparsity.pattern import Pattern, learning
from mtrain_cli.training.batch import unseen_labels
from mtrain_cli.training.flops import attention_kept
from mtrain_cli.training.resolution import ResolvedRun

if TYPE_CHECKING:
    from mtrain_cli.library.context_parallel import ContextParallel

Masks = tuple[SequenceMask, ...]  # one per sequence


@dataclass(frozen=True, eq=False)
class Engine:
    """How attention of one shape of heads is computed. dense_kernel: of layers without an index."""

    exchange: Exchange
    kernel: Kernel
    dense_kernel: Kernel
    pattern: Pattern | None
    reasons: tuple[str, str]  # for the exchange and the kernel
    config: Config
    choices: ResolvedRun


class Kind(NamedTuple):
    """A kind of layers.

    mask: its name. dense: whether they have no index. keeps: whether activation checkpointing keeps
    their outputs.
    """

    engine: Engine
    mask: str | None
    window: int | None
    dense: bool
    keeps: bool
    device: torch.device


class ContextBatch:
    """One batch: this process's tokens, and attention under the batch's masks.

    masks: one per sequence, the first of `by_name`.
    by_name: all masks; the key is None for the mask of a batch that has only one.
    layout: which process holds which tokens, in ascending order.
    last: the batch before, whose layout and plans serve this one if it has the same masks.
    max_logits: the largest score of each head of a layer over all processes, before a soft cap,
        float32 [heads], where `attention` measured it. measures: whether all layers do.
    """

    def __init__(
        self,
        owner: ContextParallel,
        by_name: dict[str | None, Masks],
        documents: Sequence[NDArray[np.int64] | None],
        last: ContextBatch | None,
    ) -> None:
        self._owner, self.by_name, self.documents = owner, by_name, documents
        self.masks = next(iter(by_name.values()))
        self._attention: dict[Kind, ContextAttention] = {}
        self.max_logits: dict[int, Tensor] = {}
        self.measures = False
        # Dense layers that ran twice: checkpointing cannot tell which output it kept.
        self._repeated: set[int] = set()
        self.layout: Layout
        if last is not None and _same(by_name, last.by_name):
            self.layout = last.layout
            planned = [*last._attention.items()]  # another thread may add to them
            self._attention = {kind: attend.for_next_batch() for kind, attend in planned}
        else:
            self.layout = owner.layout_of([*by_name.values()])

    @property
    def positions(self) -> IntArray:
        """The position of each of this process's tokens in the sequence, padding included."""
        return self.layout.positions(self._owner.processes.place)

    @cached_property
    def shows_later_keys(self) -> bool:
        """Whether a query may see a later key."""
        every = (mask for masks in self.by_name.values() for mask in masks)
        return any(mask.shows_later_keys().any() for mask in every)

    def shard(self, *tensors: Tensor, padding: float = 0) -> Any:
        """Return this process's tokens of one or several tensors, [sequences, tokens, ...].

        tensors: whole sequences, [sequences, seq, ...], the same on all processes of the group.
            Their gradients hold those of this process's tokens.
        padding: value of the tokens beyond the sequence, if it does not divide.
        """
        names = [f"tensors[{n}]" if len(tensors) > 1 else "tensor" for n in range(len(tensors))]
        dealt = self.own(padding, **dict(zip(names, tensors, strict=True)))
        return dealt[0] if len(dealt) == 1 else tuple(dealt)

    def own(self, padding: float = 0, **tensors: Tensor) -> list[Tensor]:
        """Return the tokens of tensors whose names messages show."""
        dealt = []
        for name, tensor in tensors.items():
            self._require(name, tensor, self.layout.seq, "whole sequences")
            slots = torch.from_numpy(self.positions).to(tensor.device)
            missing = self.layout.padded_seq - self.layout.seq
            if missing:
                last = tensor.new_full((len(tensor), missing, *tensor.shape[2:]), padding)
                tensor = torch.cat([tensor, last], 1)
            dealt.append(tensor.index_select(1, slots))
        return dealt

    @torch.no_grad()
    def gather(self, tensor: Tensor) -> Tensor:
        """Return whole sequences, [sequences, seq, ...], from all processes, without a gradient.

        tensor: this process's tokens, [sequences, tokens, ...].
        """
        self._require("tensor", tensor, self.layout.tokens_per_worker, "this process's tokens")
        shards, processes = tensor.contiguous()[None], self._owner.processes
        if self.layout.workers > 1:
            shards = all_gather(shards[0], self.layout.workers, processes.group)
        return self.layout.to_sequence(shards)[:, : self.layout.seq]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over each sequence, [sequences, ...], equal on all processes of the group.

        values: of this process's tokens, [sequences, tokens, ...]; 0 for padding. They alone have
            gradients, so sum those of parameters over the group, as with any loss of the library.
        """
        self._require("values", values, self.layout.tokens_per_worker, "this process's tokens")
        own, group = values.sum(1), self._owner.processes.group
        total = own.detach().clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total + (own - own.detach())

    def targets(self, labels: Tensor) -> Tensor:
        """Return the label that each token predicts, [sequences, seq]: `roll` by -1."""
        return self.roll(labels, -1)

    def roll(self, labels: Tensor, shift: int) -> Tensor:
        """Return the label some tokens ahead of each token, [sequences, seq], -100 for none.

        None are labels of other documents and beyond the sequence, and those that the mask shows.

        labels: whole sequences, not shifted. shift: minus the tokens ahead, as in `torch.roll`.
        """
        require_tensor("labels", labels, ("sequences", "seq"), whole=True)
        self._require("labels", labels, self.layout.seq, "whole sequences")
        ahead = -shift
        if not 0 < ahead < self.layout.seq:
            raise ConfigError(
                f"shift={shift}: -1 gives the next token; allowed: {1 - self.layout.seq} to -1"
            )
        rows = []
        by_sequence = zip(*self.by_name.values(), strict=True)
        known = zip(labels.cpu().numpy(), self.documents, by_sequence, strict=True)
        for row, documents, masks in known:
            shifted = np.append(row[ahead:], np.full(ahead, IGNORED, row.dtype))
            if documents is not None:
                shifted[:-ahead][documents[ahead:] != documents[:-ahead]] = IGNORED
            for mask in masks:
                shifted = unseen_labels(shifted, mask)
            rows.append(shifted)
        return torch.from_numpy(np.stack(rows)).to(labels.device)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, mask: str | None = None,
        window: int | None = None, sinks: Tensor | None = None, softcap: float | None = None,
        max_logits: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return attention of this process's queries over the whole sequences, as wide as v.

        Args:
            q: [sequences, tokens, heads, head_dim]; k, v: with fewer heads if several of q share
                one, and v narrower, too. Scores are divided by the square root of head_dim.
            layer: number of the layer, different in all calls of a batch. Its index stays from the
                forward to the backward pass.
            mask: name of one of the batch's `masks`.
            window: tokens that a query sees, itself included, under the mask; None for all. A
                window has no index.
            sinks: [heads], a learnable score of each head that takes a share of the softmax.
            softcap: a score s becomes softcap * tanh(s / softcap); None for no cap. An index is
                estimated from scores without the cap.
            max_logits: fill ``max_logits[layer]`` by a second pass over the pairs of the mask.

        Raises ConfigError for other shapes and types, and for a layer that is computed twice.
        """
        for name, tensor in {"q": q, "k": k, "v": v}.items():
            require_tensor(name, tensor, ("sequences", "tokens", "heads", "head_dim"), whole=False)
        if torch.is_autocast_enabled(q.device.type):  # rotary embeddings may be wider than values
            q, k, v = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (q, k, v))
        named = {"q": q, "k": k, "v": v}
        for name, tensor in named.items():
            if (tensor.dtype, tensor.device) != (q.dtype, q.device):
                raise ConfigError(
                    f"{name}: is {kind_of(tensor)}, and q is {kind_of(q)}; give q, k and v the "
                    "same type, on the same device"
                )
        if k.shape[1] != q.shape[1]:
            raise ConfigError(
                f"k, v: have {k.shape[1]} tokens, q has {q.shape[1]}; put keys from elsewhere into "
                "the sequence and say by slices who sees them (docs/library.md)"
            )
        for name, tensor in named.items():
            self._require(name, tensor, self.layout.tokens_per_worker, "this process's tokens")
        dim, width = k.shape[3], v.shape[3]
        if (
            not k.shape[2]
            or q.shape[2] % k.shape[2]
            or k.shape[:3] != v.shape[:3]
            or q.shape[3] != dim
            or width > dim
        ):
            raise ConfigError(
                f"q, k, v: have the shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; give "
                "k and v the same heads, which divide those of q, k as wide as q, and v no wider"
            )
        if width < dim:  # latent attention
            v = torch.nn.functional.pad(v, (0, dim - width))
        if softcap is not None:
            known = isinstance(softcap, int | float) and 0 < softcap < math.inf
            require(f"softcap={softcap}", known, "a positive number, or None for no cap")
        require(f"layer={layer!r}", is_whole(layer, 0), "a whole number, 0 or more")
        if window is not None:
            require(f"window={window!r}", isinstance(window, int), "a whole number, or None")
        if sinks is not None:
            require_tensor("sinks", sinks, ("heads",), whole=False)
        attend = self._attend(q, k, layer, mask, window, softcap or 0.0)
        if attend.index is not None:
            self._require_once(layer, known=layer in attend.index.kept)
        elif layer in attend.kept and not in_backward():
            del attend.kept[layer]
            self._repeated.add(layer)
            attend = self._attend(q, k, layer, mask, window, softcap or 0.0)
        if sinks is not None and sinks.shape != q.shape[2:3]:
            raise ConfigError(
                f"sinks: have the shape {list(sinks.shape)}; give one of each head, [{q.shape[2]}]"
            )
        with learning(self._owner.pattern if torch.is_grad_enabled() else None):
            out = attend(q, k, v, layer, sinks)
        if (max_logits or self.measures) and not in_backward():
            index = None if attend.index is None else attend.index.kept[layer]
            self._measure(q, k, layer, self._masks_under(mask, window), index)
        if not torch.is_grad_enabled():
            attend.release(layer)
        return out[..., :width]

    def _attend(
        self, q: Tensor, k: Tensor, layer: int, mask: str | None, window: int | None, softcap: float
    ) -> ContextAttention:
        if mask not in self.by_name:
            names = first_few([str(name) for name in self.by_name])
            raise ConfigError(
                f"mask={mask}: "
                + ("the batch has one mask; leave it out" if None in self.by_name
                   else f"is not in the batch; give one of {names}")
            )  # fmt: skip
        config = self._owner.config
        intervals = max(one.intervals for one in self.by_name[mask])
        engine = self._owner.engine(q, k, intervals, softcap)
        dense = window is not None or layer in config.sparsity.dense_of(config.model.num_layers)
        if not dense and self._owner.begins_to_learn(layer):
            dense = not torch.is_grad_enabled()  # as in evaluations of `mtrain train`
        kind = Kind(engine, mask, window, dense, layer not in self._repeated, q.device)
        self.prepare(kind)
        self._owner.kinds[kind] = None
        if (profile := self._owner.profiling) is not None:
            self._attention[kind] = profile.seen(self, kind, layer, self._attention[kind])
        return self._attention[kind]

    def _measure(self, q: Tensor, k: Tensor, layer: int, masks: Masks, index: Index | None) -> None:
        processes = self._owner.processes
        own = largest_logits(q.detach(), self.gather(k.detach()), self.positions, masks, index)
        if processes.group is not None:
            dist.all_reduce(own, dist.ReduceOp.MAX, group=processes.group)
        self.max_logits[layer] = own

    def _masks_under(self, name: str | None, window: int | None) -> Masks:
        masks = self.by_name[name]
        if window is None:
            return masks
        if window < 1 or any(mask.shows_later_keys().any() for mask in masks):
            raise ConfigError(
                f"window={window}: must be at least 1 token, under a mask without later keys"
            )
        first = np.maximum(np.arange(masks[0].padded) - window + 1, 0)
        near = SequenceMask.from_first(first, self.layout.seq)
        return tuple(mask.intersect(near) for mask in masks)

    def prepare(self, kind: Kind) -> None:
        """Plan a kind of layers, if the batch has its mask, without other processes."""
        engine, name, window, dense, keeps, device = kind
        if name not in self.by_name or kind in self._attention:
            return
        masks = self._masks_under(name, window)
        pattern = None if dense else engine.pattern
        keep = attention_kept(self._owner.config.train) if keeps else 0.0
        plan = self._owner.plan(engine, pattern, masks, self.layout, device, keep)
        kernel = engine.dense_kernel if dense else engine.kernel
        self._attention[kind] = ContextAttention.of(engine.exchange, kernel, plan, pattern)

    def _require(self, name: str, tensor: Tensor, tokens: int, what: str) -> None:
        require_tensor(name, tensor, ("sequences", "tokens", "..."))
        if tensor.ndim < 2 or tensor.shape[:2] != (len(self.masks), tokens):
            raise ConfigError(
                f"{name}: has the shape {list(tensor.shape)}; {what} have the shape "
                f"[{len(self.masks)}, {tokens}, ...] (seq={self.layout.seq})"
            )

    def _require_once(self, layer: int, *, known: bool) -> None:
        """Raise ConfigError unless recomputation, and it alone, finds the index of a layer."""
        if known and not in_backward():
            raise ConfigError(
                f"layer={layer}: was computed before in this batch and has its index; number the "
                "layers of the model, and begin a batch for each forward pass"
            )
        if not known and in_backward():
            raise ConfigError(
                f"layer={layer}: its index is gone in the backward pass; checkpoint with "
                "use_reentrant=False"
            )


def _same(some: dict[str | None, Masks], others: dict[str | None, Masks]) -> bool:
    return some.keys() == others.keys() and all(
        len(masks) == len(others[name])
        and all(mask.same_as(other) for mask, other in zip(masks, others[name], strict=True))
        for name, masks in some.items()
    )


def in_backward() -> bool:
    """Return whether the thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1
