"""Attention of any model over sequences that the processes of a group share.

`ContextParallel` holds what all batches share, and a `ContextBatch` the masks, layout and plans of
one batch. The recomputation of activation checkpointing runs in the backward pass, where another
batch may have become the current one. So whoever recomputes must pass the batch itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.library.settings import Processes, named_as_arguments
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import Exchange, Plan, make_chosen_exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.training.batch import unseen_labels
from mtrain_cli.training.layout_choice import choose_layout
from mtrain_cli.training.resolution import ResolvedRun, resolve_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mtrain_cli.library.profile import Profile

Integers = Tensor | NDArray[np.integer] | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class _Engine:
    """How attention of one shape of heads is computed. dense_kernel: of layers without an index."""

    exchange: Exchange
    kernel: Kernel
    dense_kernel: Kernel
    pattern: Pattern | None
    reasons: tuple[str, str]  # for the exchange and the kernel
    config: Config
    choices: ResolvedRun


class _Kind(NamedTuple):
    """A kind of layers. dense: whether they have no index."""

    engine: _Engine
    window: int | None
    dense: bool
    device: torch.device


class ContextParallel:
    """Attention among the processes of a group. Make it with `api.context_parallel`.

    All processes of the group call `batch`, `gather` and `attention` together.
    """

    def __init__(self, config: Config, processes: Processes) -> None:
        self.config, self.processes = config, processes
        self.environment = processes.environment(config)
        self._rule = MaskRule.of(config)
        per_node = self.environment.context_per_node
        self._layout = choose_layout(config, len(processes.ranks), per_node)
        self._engines: dict[tuple[Any, ...], _Engine] = {}
        self._groups: dict[tuple[Any, ...], ContextGroup] = {}
        # Layouts and plans of sequences that are one document.
        self._undivided: dict[tuple[Any, ...], Any] = {}
        self._current: ContextBatch | None = None
        self._compared: set[str] = set()
        self.kinds: dict[_Kind, None] = {}  # of the layers so far, which later batches have, too
        self.profiling: Profile | None = None
        self.model = "a model of another loop"  # for reports

    @property
    def seq(self) -> int:
        """Number of tokens of each sequence."""
        return self.config.seq

    def batch(
        self,
        documents: Integers | None = None,
        *,
        cu_seqlens: Integers | None = None,
        position_ids: Integers | None = None,
        slices: Sequence[IntArray] | None = None,
        sequences: int = 1,
    ) -> ContextBatch:
        """Begin a batch, whose masks decide the layout. Give its documents in one way, or none.

        The processes compare the masks of the first batch. Later batches are planned here, without
        other processes, so that a loader's thread may call this while another batch is computed.

        Args:
            documents: document of each token, [sequences, seq] or [seq], never decreasing.
            cu_seqlens: where the documents of a single sequence begin, and its end.
            position_ids: positions that restart in each document, like documents.
            slices: whole masks instead of documents, one per sequence: int64 [slices, 5] of query
                start and stop, key start and stop, and `SliceKind`.
            sequences: number of sequences if each is one document.

        Raises ConfigError for another length, for numbers that describe no documents, and for masks
        that a pattern cannot use.
        """
        ways = {"documents": documents, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
        given = {name: value for name, value in ways.items() if value is not None}
        if len(given) + (slices is not None) > 1:
            names = ", ".join([*given, *(["slices"] if slices is not None else [])])
            raise ConfigError(f"{names}: each describes the masks; give one of them")
        rows: Sequence[NDArray[np.int64] | None] = [None] * sequences
        for name, value in given.items():
            rows = _documents(name, value, self.seq)
        if slices is None:
            padded = self._layout.layout.padded_seq
            masks = tuple(self._rule(row, self.seq, padded) for row in rows)
        else:
            rows, masks = [None] * len(slices), self._from_slices(slices)
        self._compare("masks", lambda: np.concatenate([m.high - 2 * m.low for m in masks]))
        batch = self._current = ContextBatch(self, masks, rows)
        for kind in [*self.kinds]:
            batch.prepare(kind)
        return batch

    def shard(self, *tensors: Tensor, padding: float = 0) -> Any:
        """Return `ContextBatch.shard` of the batch that began last."""
        return self._batch("shard").shard(*tensors, padding=padding)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return `ContextBatch.gather` of the batch that began last."""
        return self._batch("gather").gather(tensor)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return `ContextBatch.attention` of the batch that began last.

        Raises ConfigError in a backward pass, which may belong to an earlier batch.
        """
        if _in_backward():
            raise ConfigError(
                "attention: a checkpointed layer is computed again in a backward pass, which may "
                "belong to an earlier batch; call the method of the batch that `batch` returned"
            )
        return self._batch("attention").attention(q, k, v, layer, window=window, sinks=sinks)

    def inputs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        documents: Integers | None = None,
        cu_seqlens: Integers | None = None,
    ) -> dict[str, Any]:
        """Return the keyword arguments of a transformers model for a batch of whole sequences.

        The loss of the model is this process's part of the mean over all labels: the sum over the
        processes of the group is the mean.

        Args:
            input_ids: [sequences, seq], the same on all processes of the group.
            labels: like input_ids, not shifted, with -100 for tokens without a loss.
            attention_mask: only ones; padding belongs to the labels and documents.
            position_ids: rotary positions; they also tell the documents apart, unless others do.
            documents, cu_seqlens: see `batch`.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ConfigError(
                "attention_mask: hides tokens; leave it out, give padding its own documents, and "
                "labels of -100"
            )
        self._compare("input_ids", lambda: input_ids.cpu().numpy())
        known = documents is not None or cu_seqlens is not None
        batch = self.batch(
            documents, cu_seqlens=cu_seqlens, position_ids=None if known else position_ids,
            sequences=len(input_ids),
        )  # fmt: skip
        if position_ids is None:
            position_ids = torch.arange(self.seq, device=input_ids.device).expand(
                len(input_ids), -1
            )
        ids, positions = batch.shard(input_ids, position_ids)
        made = {"input_ids": ids, "position_ids": positions, "use_cache": False, "mtrain": batch}
        if labels is not None:
            targets = batch.targets(labels)
            own = batch.shard(targets, padding=IGNORED)
            count = max(1, int((targets != IGNORED).sum()))
            made |= {"labels": own, "shift_labels": own, "num_items_in_batch": count}
        return made

    @staticmethod
    def register() -> None:
        """Register ``attn_implementation="mtrain"`` in transformers.

        Raises ConfigError if another library has registered the name.
        """
        from mtrain_cli.model.transformers_models import register

        register()

    def check(self, model: PreTrainedModel) -> None:
        """Raise ConfigError, one line each, for all that would make a transformers model wrong.

        All processes that hold a part of the model call this together. It runs a few tokens.
        """
        from mtrain_cli.model.transformers_models import problems

        if found := problems(model, self.config):
            raise ConfigError(*found)
        self.model = type(model).__name__

    def profile(
        self, folder: str | os.PathLike[str], steps: Iterable[int] | None = None
    ) -> Profile:
        """Return a context manager that records training steps for `mtrain report`.

        All processes of the job enter and leave it together, and call its method ``step`` after
        each training step. A block without such a call is one step.

        Args:
            folder: a new or empty folder, for the records.
            steps: numbers of the steps to record, from 1; None for all.

        Raises ConfigError for other numbers and, on entry, for a folder that is not empty.
        """
        from mtrain_cli.library.profile import Profile

        return Profile(self, Path(folder), None if steps is None else frozenset(steps))

    def describe(self) -> str:
        """Return a line on the layout, and on exchange and kernel of each shape of heads so far."""
        layout = self._layout.layout
        parts = [f"{layout.name} over {with_count(layout.workers, 'worker')}"]
        for (heads, kv_heads, dim, dtype, _), engine in self._engines.items():
            moved, why = engine.reasons
            parts.append(
                f"{heads} heads, {kv_heads} of keys, {dim} wide, {str(dtype)[6:]}: {moved}; kernel "
                f"{engine.kernel.name} ({why})"
            )
        return "; ".join(parts)

    def _from_slices(self, slices: Sequence[IntArray]) -> tuple[SequenceMask, ...]:
        padded, pattern = self._layout.layout.padded_seq, self.config.sparsity.pattern
        try:
            masks = tuple(SequenceMask.from_slices(one, self.seq, padded) for one in slices)
        except ValueError as error:
            raise ConfigError(f"slices: {error}") from None
        if pattern != "dense" and not all(mask.is_causal_interval for mask in masks):
            raise ConfigError(
                f"slices: sparsity={pattern} needs masks in which each query sees one range of "
                "keys that ends at the query; give sparsity=dense"
            )
        return masks

    def _compare(self, what: str, values: Callable[[], NDArray[np.integer]]) -> None:
        """Compare what the processes of the group pass, the first time only."""
        if what not in self._compared:
            self._compared.add(what)
            self.processes.require_same(what, values())

    def _batch(self, name: str) -> ContextBatch:
        if self._current is None:
            raise ConfigError(f"{name}: no batch has begun; call batch(...) before")
        return self._current

    def layout_of(self, masks: Sequence[SequenceMask]) -> Layout:
        """Return the layout of a batch. A balanced one depends on its masks."""
        chosen = self._layout
        if chosen.balancer is None:
            return chosen.layout
        if not self.is_undivided(masks):
            return chosen.balancer.layout([masks])
        key = "layout", len(masks)
        if key not in self._undivided:
            self._undivided[key] = chosen.balancer.layout([masks])
        return self._undivided[key]

    def is_undivided(self, masks: Sequence[SequenceMask]) -> bool:
        """Return whether each sequence is one document."""
        undivided = self._rule.undivided(self.seq, self._layout.layout.padded_seq)
        return all(mask.same_as(undivided) for mask in masks)

    def engine(self, q: Tensor, k: Tensor) -> _Engine:
        """Return how queries and keys like these are computed. The first call makes communicators.

        Raises ConfigError if the kernel or the exchange cannot serve them.
        """
        shape = q.shape[2], k.shape[2], q.shape[3], q.dtype, q.device
        if shape not in self._engines:
            self._engines[shape] = self._resolve(*shape)
        return self._engines[shape]

    def _resolve(
        self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> _Engine:
        config = self.config.changed(
            model={"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim},
            train={"dtype": str(dtype).removeprefix("torch.")},
            topology={"layout": self._layout.layout.name},
        )
        if config.sparsity.pattern != "dense":  # windows are dense, too, so choose their kernel
            config = config.changed(sparsity={"dense_layers": 1})
        with named_as_arguments():
            choices = resolve_run(config, replace(self.environment, device=device.type))
        exchange = choices.exchange
        dense = choices.dense_kernel or (choices.kernel, "")
        return _Engine(
            make_chosen_exchange(exchange, self._layout.layout, self._group(exchange, device)),
            choices.kernel,
            dense[0],
            choices.pattern,
            (f"{exchange.label} ({exchange.reason})", choices.kernel_reason),
            config,
            choices,
        )

    def _group(self, exchange: ExchangeChoice, device: torch.device) -> ContextGroup:
        if len(self.processes.ranks) == 1:
            return ContextGroup.alone()
        key = exchange.per_node, exchange.heads, tuple(exchange.channels), device
        if key not in self._groups:
            self._groups[key] = make_context_group(
                self.processes.rank, self.processes.groups, device,
                timedelta(seconds=self.config.topology.timeout_s),
                per_node=exchange.per_node, heads=exchange.heads, channels=exchange.channels,
            )  # fmt: skip
        return self._groups[key]

    def plan(
        self,
        engine: _Engine,
        pattern: Pattern | None,
        masks: Sequence[SequenceMask],
        layout: Layout,
        device: torch.device,
    ) -> Plan:
        """Return a plan on the device. Sequences that are one document share theirs."""
        key = "plan", engine, pattern is None, len(masks)
        shared = self.is_undivided(masks)
        if shared and key in self._undivided:
            return self._undivided[key]
        request = None if pattern is None else pattern.request()
        plan = Plan.make(engine.exchange, masks, request, layout=layout)
        # Memory is pinned for the current device, which in a loader's thread is device 0.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            plan = (plan.pinned() if device.type == "cuda" else plan).to(device)
        if shared:
            self._undivided[key] = plan
        return plan


class ContextBatch:
    """One batch: this process's tokens, and attention under the batch's masks.

    masks: one per sequence. layout: which process holds which tokens, in ascending order.
    """

    def __init__(
        self,
        owner: ContextParallel,
        masks: tuple[SequenceMask, ...],
        documents: Sequence[NDArray[np.int64] | None],
    ) -> None:
        self._owner, self.masks, self._documents = owner, masks, documents
        self.layout = owner.layout_of(masks)
        self._attention: dict[_Kind, ContextAttention] = {}

    @property
    def positions(self) -> IntArray:
        """The position of each of this process's tokens in the sequence, padding included."""
        return self.layout.positions(self._owner.processes.place)

    def shard(self, *tensors: Tensor, padding: float = 0) -> Any:
        """Return this process's tokens of one or several tensors, [sequences, tokens, ...].

        tensors: whole sequences, [sequences, seq, ...], the same on all processes of the group.
            Their gradients hold those of this process's tokens.
        padding: value of the tokens beyond the sequence, if it does not divide.
        """
        dealt = []
        for tensor in tensors:
            self._require(tensor, self.layout.seq, "whole sequences")
            slots = torch.from_numpy(self.positions).to(tensor.device)
            missing = self.layout.padded_seq - self.layout.seq
            if missing:
                last = tensor.new_full((len(tensor), missing, *tensor.shape[2:]), padding)
                tensor = torch.cat([tensor, last], 1)
            dealt.append(tensor.index_select(1, slots))
        return dealt[0] if len(dealt) == 1 else tuple(dealt)

    @torch.no_grad()
    def gather(self, tensor: Tensor) -> Tensor:
        """Return whole sequences, [sequences, seq, ...], from all processes, without a gradient.

        tensor: this process's tokens, [sequences, tokens, ...].
        """
        self._require(tensor, self.layout.tokens_per_worker, "this process's tokens")
        shards, processes = tensor.contiguous()[None], self._owner.processes
        if self.layout.workers > 1:
            shards = all_gather(shards[0], self.layout.workers, processes.group)
        return self.layout.to_sequence(shards)[:, : self.layout.seq]

    def targets(self, labels: Tensor) -> Tensor:
        """Return the label that each token predicts, [sequences, seq], -100 for none.

        A document's last token predicts nothing, nor does one whose label the mask shows.
        labels: not shifted.
        """
        self._require(labels, self.layout.seq, "whole sequences")
        rows = []
        known = zip(labels.cpu().numpy(), self._documents, self.masks, strict=True)
        for row, documents, mask in known:
            shifted = np.append(row[1:], row.dtype.type(IGNORED))
            if documents is not None:
                shifted[:-1][np.diff(documents) != 0] = IGNORED
            rows.append(unseen_labels(shifted, mask))
        return torch.from_numpy(np.stack(rows)).to(labels.device)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention of this process's queries over the whole sequences, like q.

        Args:
            q: [sequences, tokens, heads, head_dim]; k, v: with fewer heads if several of q share
                one. Scores are divided by the square root of head_dim.
            layer: number of the layer, different in all calls of a batch. Its index stays from the
                forward to the backward pass.
            window: tokens that a query sees, itself included, under the mask; None for all. A
                window has no index.
            sinks: [heads], a learnable score of each head that takes a share of the softmax.

        Raises ConfigError for other shapes, and for a layer that is computed twice.
        """
        for tensor in (q, k, v):
            self._require(tensor, self.layout.tokens_per_worker, "this process's tokens")
        if q.shape[2] % k.shape[2] or k.shape != v.shape or q.shape[3] != k.shape[3]:
            raise ConfigError(
                f"q, k, v: have the shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; give "
                "k and v one shape, as wide as q, with heads that divide those of q"
            )
        attend = self._attend(q, k, layer, window)
        if attend.index is not None:
            self._require_once(layer, known=layer in attend.index.kept)
        if sinks is not None and attend.exchange.schedule.heads > 1:
            raise ConfigError(
                f"sinks: do not work with {attend.exchange.schedule.heads} processes that share "
                "heads; give another exchange than ulysses, and topology.ulysses=1"
            )
        out = attend(q, k, v, layer, sinks)
        if not torch.is_grad_enabled():
            attend.release(layer)
        return out

    def _attend(self, q: Tensor, k: Tensor, layer: int, window: int | None) -> ContextAttention:
        engine, config = self._owner.engine(q, k), self._owner.config
        dense = window is not None or layer in config.sparsity.dense_of(config.model.num_layers)
        kind = _Kind(engine, window, dense, q.device)
        if kind not in self._attention:
            self.prepare(kind)
            self._owner.kinds[kind] = None
        if (profile := self._owner.profiling) is not None:
            self._attention[kind] = profile.seen(self, kind, layer, self._attention[kind])
        return self._attention[kind]

    def prepare(self, kind: _Kind) -> None:
        """Plan attention of a kind of layers, without other processes."""
        engine, window, dense, device = kind
        masks = self.masks
        if window is not None:
            if window < 1 or any(mask.shows_later_keys().any() for mask in masks):
                raise ConfigError(
                    f"window={window}: must be at least 1 token, under a mask without later keys"
                )
            first = np.maximum(np.arange(masks[0].padded) - window + 1, 0)
            near = SequenceMask.from_first(first, self.layout.seq)
            masks = tuple(mask.intersect(near) for mask in masks)
        pattern = None if dense else engine.pattern
        plan = self._owner.plan(engine, pattern, masks, self.layout, device)
        kernel = engine.dense_kernel if dense else engine.kernel
        self._attention[kind] = ContextAttention.of(engine.exchange, kernel, plan, pattern)

    def _require(self, tensor: Tensor, tokens: int, what: str) -> None:
        if tensor.ndim < 2 or tensor.shape[:2] != (len(self.masks), tokens):
            raise ConfigError(
                f"a tensor of shape {list(tensor.shape)}: {what} have the shape "
                f"[{len(self.masks)}, {tokens}, ...] (seq={self.layout.seq})"
            )

    def _require_once(self, layer: int, *, known: bool) -> None:
        """Raise ConfigError unless recomputation, and it alone, finds the index of a layer."""
        if known and not _in_backward():
            raise ConfigError(
                f"layer={layer}: was computed before in this batch and has its index; number the "
                "layers of the model, and begin a batch for each forward pass"
            )
        if not known and _in_backward():
            raise ConfigError(
                f"layer={layer}: its index is gone in the backward pass; checkpoint with "
                "use_reentrant=False"
            )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _documents(name: str, value: Integers, seq: int) -> list[NDArray[np.int64]]:
    """Return the document of each token, for each sequence."""
    table = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    if table.dtype.kind not in "iu":
        raise ConfigError(f"{name}: must be whole numbers, not {table.dtype}")
    if name == "cu_seqlens":
        if table.ndim != 1 or (np.diff(table) < 0).any() or table[[0, -1]].tolist() != [0, seq]:
            raise ConfigError(
                f"cu_seqlens={np.array2string(table, threshold=8)}: must rise from 0 to seq={seq}"
            )
        return [np.repeat(np.arange(len(table) - 1), np.diff(table))]
    table = np.atleast_2d(table)
    if table.ndim != 2 or table.shape[1] != seq:
        raise ConfigError(
            f"{name}: has the shape {list(table.shape)}; give [sequences, {seq}] for seq={seq}"
        )
    if name == "position_ids":
        begins = np.diff(table, axis=1, prepend=table[:, :1] - 1) != 1
        return list(np.cumsum(begins, axis=1))
    if (np.diff(table, axis=1) < 0).any():
        raise ConfigError("documents: decrease along a sequence; give ids that never decrease")
    return list(table.astype(np.int64))
