"""Attention of any model over sequences that the processes of a group share.

`ContextParallel` holds what all batches share, and a `ContextBatch` the masks, layout and plans of
one batch. The recomputation of activation checkpointing runs in the backward pass, where another
batch may have become the current one. So whoever recomputes must pass the batch itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mtrain_cli.attention.device_copy import to_device
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
    require,
    require_tensor,
)
from mtrain_cli.library.context_batch import ContextBatch, Engine, Kind, Masks, in_backward
from mtrain_cli.library.settings import Processes, named_as_arguments
from mtrain_cli.library.slices import Slices, read_slices
from mtrain_cli.parallel.collectives import average
from mtrain_cli.parallel.exchange import Plan, make_chosen_exchange
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroups
from mtrain_cli.sparsity.index_maps import FIRST_UPDATES
from mtrain_cli.sparsity.pattern import LearningPattern, Pattern, make_pattern
from mtrain_cli.training.layout_choice import choose_layout
from mtrain_cli.training.resolution import resolve_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mtrain_cli.library.profile import Profile

_MOST_WIDE = 256  # intervals of keys that a query may see under kernels without a list of them
_OF_LOSS = {"labels", "shift_labels", "num_items_in_batch"}
_WIDE_KERNELS = ("auto", "sdpa", "reference")


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
        self._engines: dict[tuple[Any, ...], Engine] = {}
        timeout = timedelta(seconds=config.topology.timeout_s)
        self._groups = ContextGroups(processes.rank, processes.groups, timeout)
        self._current: ContextBatch | None = None
        self._compared: set[str] = set()
        self.pattern = make_pattern(config.sparsity, config.seed)
        self._told = False
        self._taught: set[int] = set()  # layers that have learned
        self.kinds: dict[Kind, None] = {}  # of the layers so far, which later batches have, too
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
        if in_backward():
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

    def engine(self, q: Tensor, k: Tensor, intervals: int, softcap: float) -> Engine:
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

    def _resolve(self, shape: tuple[Any, ...]) -> Engine:
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
        return Engine(
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
        engine: Engine,
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
