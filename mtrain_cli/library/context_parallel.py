"""Attention of any model over sequences that the processes of a group share.

`ContextParallel` holds what all batches share, and a `ContextBatch` the masks, layout and plans of
one batch. The recomputation of activation checkpointing runs in the backward pass, where another
batch may have become the current one. So whoever recomputes must pass the batch itself.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import Index
from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.keys import first_few
from mtrain_cli.config.mask_settings import MOST_INTERVALS
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.library.arguments import (
    Integers,
    documents_of,
    is_whole,
    kind_of,
    require,
    require_tensor,
)
from mtrain_cli.library.max_logits import max_logits as largest_logits
from mtrain_cli.library.settings import Processes, named_as_arguments
from mtrain_cli.library.slices import Slices, read_slices
from mtrain_cli.parallel.collectives import all_gather, average
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import Exchange, Plan, make_chosen_exchange
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroups
from mtrain_cli.sparsity.index_maps import FIRST_UPDATES
from mtrain_cli.sparsity.pattern import LearningPattern, Pattern, learning, make_pattern
from mtrain_cli.training.batch import unseen_labels
from mtrain_cli.training.flops import attention_kept
from mtrain_cli.training.layout_choice import choose_layout
from mtrain_cli.training.resolution import ResolvedRun, resolve_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mtrain_cli.library.profile import Profile

_MOST_WIDE = 256  # intervals of keys that a query may see under kernels without a list of them
_OF_LOSS = {"labels", "shift_labels", "num_items_in_batch"}
_WIDE_KERNELS = ("auto", "sdpa", "reference")
Masks = tuple[SequenceMask, ...]  # one per sequence


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
    """A kind of layers.

    mask: its name. dense: whether they have no index. keeps: whether activation checkpointing keeps
    their outputs.
    """

    engine: _Engine
    mask: str | None
    window: int | None
    dense: bool
    keeps: bool
    device: torch.device


class ContextParallel:
    """Attention among the processes of a group. Make it with `api.context_parallel`.

    All processes of the group call `batch`, `gather` and `attention` together.
    """

    def __init__(self, config: Config, processes: Processes) -> None:
        self.config, self.processes = config, processes
        processes.require_same("settings", np.frombuffer(repr(config).encode(), np.uint8))
        self.environment = processes.environment(config)
        self._rule = MaskRule.of(config)
        per_node = self.environment.context_per_node
        self._layout = choose_layout(config, len(processes.ranks), per_node)
        self._engines: dict[tuple[Any, ...], _Engine] = {}
        timeout = timedelta(seconds=config.topology.timeout_s)
        self._groups = ContextGroups(processes.rank, processes.groups, timeout)
        self._current: ContextBatch | None = None
        self._compared: set[str] = set()
        self.pattern = make_pattern(config.sparsity, config.seed)
        self._told = False
        self._taught: set[int] = set()  # layers that have learned
        self.kinds: dict[_Kind, None] = {}  # of the layers so far, which later batches have, too
        self.profiling: Profile | None = None
        self.model = "a model of another loop"  # for reports

    @property
    def seq(self) -> int:
        """Number of tokens of each sequence."""
        return self.config.seq

    @property
    def replicas(self) -> int:
        """Number of groups, to each of which a data loader deals other sequences."""
        return len(self.processes.groups)

    @property
    def replica(self) -> int:
        """Number of this process's group, from 0."""
        return self.processes.groups.index(self.processes.ranks)

    def batch(
        self, documents: Integers | None = None, *, cu_seqlens: Integers | None = None,
        position_ids: Integers | None = None, slices: Slices | None = None,
        masks: Mapping[str, Slices | None] | None = None, sequences: int = 1,
    ) -> ContextBatch:  # fmt: skip
        """Begin a batch, whose masks decide the layout. Give its documents in one way, or none.

        The processes compare the masks of the first batch. Later batches are planned here, without
        other processes, so that a loader's thread may call this while another batch is computed.

        Args:
            documents: document of each token, [sequences, seq] or [seq], never decreasing.
            cu_seqlens: where the documents of a single sequence begin, and its end.
            position_ids: positions that restart in each document, like documents. Wherever they do
                not rise by 1, a document begins.
            slices: whole masks instead of documents, for one sequence or a list with one each: int
                [slices, 5] of query start and stop, key start and stop, and `SliceKind`; a .npy
                file of it, or an .npz file with one per sequence; or a dict of MagiAttention's
                q_ranges, k_ranges and attn_type_map.
            masks: several masks by name, of which `attention` chooses one; each is slices, or None
                for the documents. A balanced layout balances their sum, each with equal weight.
            sequences: number of sequences if each is one document.

        Raises ConfigError for another length, for numbers that describe no documents, and for masks
        that a pattern cannot use.
        """
        require(f"sequences={sequences!r}", is_whole(sequences, 1), "a whole number, 1 or more")
        ways = {"documents": documents, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
        given = {name: value for name, value in ways.items() if value is not None}
        names = [*given, *(["slices"] if slices is not None else [])]
        names += ["masks"] if names[-1:] == ["slices"] and masks is not None else []
        if len(names) > 1:
            raise ConfigError(f"{', '.join(names)}: each describes the masks; give one of them")
        rows: Sequence[NDArray[np.int64] | None] = [None] * sequences
        for name, value in given.items():
            rows = documents_of(name, value, self.seq)
        by_name = self._masks(slices, masks, rows, counted=bool(given))
        each = [mask for of_name in by_name.values() for mask in of_name]
        self._compare("masks", lambda: np.concatenate([m.high - 2 * m.low for m in each]))
        known = rows if given else [None] * (len(each) // len(by_name))
        batch = self._current = ContextBatch(self, by_name, known, self._current)
        for kind in [*self.kinds]:
            batch.prepare(kind)
        return batch

    def shard(self, *tensors: Tensor, padding: float = 0) -> Any:
        """Return `ContextBatch.shard` of the batch that began last."""
        return self._batch("shard").shard(*tensors, padding=padding)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return `ContextBatch.gather` of the batch that began last."""
        return self._batch("gather").gather(tensor)

    def roll(self, labels: Tensor, shift: int) -> Tensor:
        """Return `ContextBatch.roll` of the batch that began last."""
        return self._batch("roll").roll(labels, shift)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, mask: str | None = None,
        window: int | None = None, sinks: Tensor | None = None, softcap: float | None = None,
        max_logits: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return `ContextBatch.attention` of the batch that began last.

        Raises ConfigError in a backward pass, which may belong to an earlier batch.
        """
        if _in_backward():
            raise ConfigError(
                "attention: a checkpointed layer is computed again in a backward pass, which may "
                "belong to an earlier batch; call the method of the batch that `batch` returned"
            )
        return self._batch("attention").attention(
            q, k, v, layer,
            mask=mask, window=window, sinks=sinks, softcap=softcap, max_logits=max_logits,
        )  # fmt: skip

    def inputs(
        self, input_ids: Tensor, labels: Tensor | None = None, *,
        attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        documents: Integers | None = None, cu_seqlens: Integers | None = None,
        slices: Slices | None = None, max_logits: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the keyword arguments of a transformers model for a batch of whole sequences.

        The loss of the model is this process's part of the mean over all labels: the sum over the
        processes of the group is the mean.

        Args:
            input_ids: [sequences, seq], the same on all processes of the group.
            labels: like input_ids, not shifted, with -100 for tokens without a loss.
            attention_mask: only ones; padding belongs to the labels and documents.
            position_ids: rotary positions; they also tell the documents apart, unless others do.
            documents, cu_seqlens, slices: see `batch`.
            max_logits: fill `ContextBatch.max_logits` of the batch, which is under "mtrain".
        """
        require_tensor("input_ids", input_ids, ("sequences", "seq"), whole=True)
        if labels is not None:
            require_tensor("labels", labels, ("sequences", "seq"), whole=True)
        if attention_mask is not None:
            require_tensor("attention_mask", attention_mask, ("sequences", "seq"))
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ConfigError(
                "attention_mask: hides tokens; leave it out, give padding its own documents, and "
                "labels of -100"
            )
        self._compare("input_ids", lambda: input_ids.cpu().numpy())
        known = any(way is not None for way in (documents, cu_seqlens, slices))
        batch = self.batch(
            documents, cu_seqlens=cu_seqlens, position_ids=None if known else position_ids,
            slices=slices, sequences=len(input_ids),
        )  # fmt: skip
        if slices is not None and position_ids is not None:  # labels end with their document
            batch.documents = documents_of("position_ids", position_ids, self.seq)
        batch.measures = max_logits
        if position_ids is None:
            position_ids = torch.arange(self.seq, device=input_ids.device).expand(
                len(input_ids), -1
            )
        ids, positions = batch.own(input_ids=input_ids, position_ids=position_ids)
        made = {"input_ids": ids, "position_ids": positions, "use_cache": False, "mtrain": batch}
        if labels is not None:
            self._compare("labels", lambda: labels.cpu().numpy())
            targets = batch.targets(labels.cpu())  # it looks at them there
            if batch.shows_later_keys and bool((targets == IGNORED).all()):
                raise ConfigError(
                    "labels: none counts, since the mask shows each token its next one; leave them "
                    "out, and compute a loss of your own from the model's logits"
                )
            own = to_device(batch.shard(targets, padding=IGNORED), labels.device)
            count = max(1, int((targets != IGNORED).sum()))
            made |= {"labels": own, "shift_labels": own, "num_items_in_batch": count}
        return made

    def logprobs(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return log-probabilities of the labels under a transformers model, with gradients.

        Return their sums and their numbers, [sequences], equal on all processes of the group, and
        the log-probability of the label of each of this process's tokens, [sequences, tokens], 0
        for none. Few logits exist at a time.

        model: with an LM head; it may be in DDP, FSDP2 or PEFT. inputs: of `inputs`, with labels.

        Raises ConfigError for other inputs, and for logits with a bias, scale, cap or adapter.
        """
        from mtrain_cli.model.transformers_models import logprobs

        known = isinstance(inputs, Mapping) and {"mtrain", "shift_labels"} <= inputs.keys()
        require("inputs", known, "what cp.inputs(input_ids, labels) returns")
        batch, labels = inputs["mtrain"], inputs["shift_labels"]
        require_tensor("shift_labels", labels, ("sequences", "tokens"), whole=True)
        batch._require("shift_labels", labels, batch.layout.tokens_per_worker, "a process's tokens")
        tokens = logprobs(model, {name: inputs[name] for name in inputs.keys() - _OF_LOSS}, labels)
        return batch.sum(tokens), batch.sum(labels != IGNORED), tokens

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

        later = self.config.mask.shows_later_keys
        later |= self._current is not None and self._current.shows_later_keys
        if found := problems(model, self.config, shows_later=later):
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

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the index has learned (`sparsity.score=learned`), by LAYER.NAME, else {}.

        Save it with the model, from one process.
        """
        return self.pattern.learned() if isinstance(self.pattern, LearningPattern) else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue with what `state_dict` returned, on every process.

        Raises ConfigError if it does not fit the settings.
        """
        if isinstance(self.pattern, LearningPattern) and self.config.sparsity.has_learned_state:
            self.pattern.load(state)
            self._taught.clear()
        elif state:
            raise ConfigError(
                f"load_state_dict: has {first_few(list(state))}, and this index learns nothing; "
                "give sparsity=block_topk and sparsity.score=learned"
            )

    def begins_to_learn(self, layer: int) -> bool:
        """Return whether the index of a layer must learn first, and say once how long it takes."""
        if not self.config.sparsity.has_learned_state:
            return False
        if layer in self._taught:
            return False
        if self.state_dict().get(f"{layer}.updates", 0):
            self._taught.add(layer)
            return False
        if torch.is_grad_enabled() and not self._told and self.processes.rank == 0:
            warnings.warn(
                f"sparsity.score=learned: the first batch makes {FIRST_UPDATES} updates of each "
                "layer's scores, so it takes longer than others",
                stacklevel=2,
            )
            self._told = True
        return True

    def average_learned(self) -> None:
        """Average what the index has learned over replicas. All processes call it after a step."""
        if len(self.processes.groups) > 1 and (learned := self.state_dict()):
            average(learned.values(), None)  # the processes of a group have the same

    def describe(self) -> str:
        """Return a line on the layout, and on exchange and kernel of each shape of heads so far."""
        layout = self._layout.layout
        parts = [f"{layout.name} over {with_count(layout.workers, 'worker')}"]
        for (heads, kv_heads, dim, dtype, *_, cap), engine in self._engines.items():
            moved, why = engine.reasons
            parts.append(
                f"{heads} heads, {kv_heads} of keys, {dim} wide, {str(dtype)[6:]}"
                f"{f', scores capped at {cap:g}' if cap else ''}: {moved}; kernel "
                f"{engine.kernel.name} ({why})"
            )
        return "; ".join(parts)

    def _masks(
        self,
        slices: Slices | None,
        masks: Mapping[str, Slices | None] | None,
        rows: Sequence[NDArray[np.int64] | None],
        *,
        counted: bool,
    ) -> dict[str | None, Masks]:
        """Return the masks of a batch by name. counted: whether rows tell how many sequences."""
        named: Mapping[Any, Slices | None] = {None: slices} if masks is None else masks
        if not named:
            raise ConfigError("masks: has no name; give a dict of names and slices, or None")
        tables: dict[str | None, list[IntArray] | None] = {}
        for name, value in named.items():
            label = "slices" if name is None else f"masks[{name!r}]"
            tables[name] = None if value is None else read_slices(label, value, self.seq)
        counts = {len(table) for table in tables.values() if table is not None}
        if counted or not counts:
            counts.add(len(rows))
        if len(counts) > 1:
            numbers = " and ".join(map(str, sorted(counts)))
            raise ConfigError(f"masks: are for {numbers} sequences; give all for the same number")
        (number,) = counts
        padded = self._layout.layout.padded_seq
        rows = rows if counted else [None] * number
        documents = tuple(self._rule(row, self.seq, padded) for row in rows)
        return {
            name: documents if table is None else self._from_slices(name, table)
            for name, table in tables.items()
        }

    def _from_slices(self, name: str | None, tables: Sequence[IntArray]) -> Masks:
        label = "slices" if name is None else f"masks[{name!r}]"
        padded, pattern = self._layout.layout.padded_seq, self.config.sparsity.pattern
        try:
            masks = tuple(
                SequenceMask.from_slices(one, self.seq, padded, _MOST_WIDE) for one in tables
            )
        except ValueError as error:
            raise ConfigError(f"{label}: {error}") from None
        if pattern != "dense" and not all(mask.is_causal_interval for mask in masks):
            raise ConfigError(
                f"{label}: sparsity={pattern} needs masks in which each query sees one range of "
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

    def layout_of(self, kinds: Sequence[Masks]) -> Layout:
        """Return the layout of a batch. A balanced one depends on the masks of each kind."""
        balancer = self._layout.balancer
        if balancer is None:
            return self._layout.layout
        return replace(balancer, layers=(1,) * len(kinds)).layout(kinds)

    def engine(self, q: Tensor, k: Tensor, intervals: int, softcap: float) -> _Engine:
        """Return how queries and keys like these are computed. The first call makes communicators.

        intervals: of keys that a query sees.

        Raises ConfigError if the kernel or the exchange cannot serve them.
        """
        kernel, wide = self.config.train.kernel, intervals > MOST_INTERVALS
        if wide and kernel not in _WIDE_KERNELS:
            raise ConfigError(
                f"kernel={kernel}: a query sees {intervals} separate intervals of keys; allowed: "
                f"at most {MOST_INTERVALS}. Merge slices, or give kernel=auto or sdpa for up to "
                f"{_MOST_WIDE}"
            )
        shape = q.shape[2], k.shape[2], q.shape[3], q.dtype, q.device, wide, softcap
        if shape not in self._engines:
            self._engines[shape] = self._resolve(shape)
        return self._engines[shape]

    def _resolve(self, shape: tuple[Any, ...]) -> _Engine:
        heads, kv_heads, dim, dtype, device, wide, softcap = shape
        config = self.config.changed(
            model={"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim},
            train={"dtype": str(dtype).removeprefix("torch.")},
            topology={"layout": self._layout.layout.name},
        )
        if wide and config.train.kernel == "auto":
            config = config.changed(train={"kernel": "sdpa"})
        if config.sparsity.pattern != "dense":  # windows are dense, too, so choose their kernel
            config = config.changed(sparsity={"dense_layers": 1})
        with named_as_arguments():
            environment = replace(self.environment, device=device.type)
            choices = resolve_run(config, environment, softcap=softcap)
        exchange = choices.exchange
        dense = choices.dense_kernel or (choices.kernel, "")
        return _Engine(
            make_chosen_exchange(exchange, self._layout.layout, self._groups.of(exchange, device)),
            choices.kernel,
            dense[0],
            self.pattern,
            (f"{exchange.label} ({exchange.reason})", choices.kernel_reason),
            config,
            choices,
        )

    def plan(
        self,
        engine: _Engine,
        pattern: Pattern | None,
        masks: Masks,
        layout: Layout,
        device: torch.device,
        keep: float,
    ) -> Plan:
        """Return a plan on the device."""
        request = None if pattern is None else pattern.request()
        plan = Plan.make(engine.exchange, masks, request, layout=layout, keep=keep)
        # Memory is pinned for the current device, which in a loader's thread is device 0.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return (plan.pinned() if device.type == "cuda" else plan).to(device)


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
        self._attention: dict[_Kind, ContextAttention] = {}
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
        elif layer in attend.kept and not _in_backward():
            del attend.kept[layer]
            self._repeated.add(layer)
            attend = self._attend(q, k, layer, mask, window, softcap or 0.0)
        if sinks is not None and sinks.shape != q.shape[2:3]:
            raise ConfigError(
                f"sinks: have the shape {list(sinks.shape)}; give one of each head, [{q.shape[2]}]"
            )
        with learning(self._owner.pattern if torch.is_grad_enabled() else None):
            out = attend(q, k, v, layer, sinks)
        if (max_logits or self.measures) and not _in_backward():
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
        kind = _Kind(engine, mask, window, dense, layer not in self._repeated, q.device)
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

    def prepare(self, kind: _Kind) -> None:
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


def _same(some: dict[str | None, Masks], others: dict[str | None, Masks]) -> bool:
    return some.keys() == others.keys() and all(
        len(masks) == len(others[name])
        and all(mask.same_as(other) for mask, other in zip(masks, others[name], strict=True))
        for name, masks in some.items()
    )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
