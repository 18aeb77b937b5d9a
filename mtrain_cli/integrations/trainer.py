"""Context parallelism in the Trainer of transformers, and in trainers that derive from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from mtrain_cli.attention.device_copy import map_tensors, to_device
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.library.context_parallel import ContextParallel

# Packing collators describe the documents in these, too; the position ids have them.
_REDUNDANT = {
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    "num_items_in_batch",
}  # fmt: skip
INDEX = "mtrain_index.safetensors"  # in the folder of a model, what its index has learned


class ContextParallelMixin:
    """Base class to put before `transformers.Trainer`, `trl.SFTTrainer`, or another of its kind.

    The processes of a context group get the same rows, and each its tokens of them. Loss, gradient
    and logged loss are those of one process. Rows shorter than a sequence are padded at the end.
    """

    args: Any
    accelerator: Any
    model: nn.Module

    def __init__(self, *args: Any, cp: ContextParallel, **kwargs: Any) -> None:
        """Make the trainer and check its model.

        cp: made by `api.context_parallel`, after the training arguments, which start the processes.

        Raises ConfigError for settings of the trainer with which its loss would be wrong.
        """
        self.cp = cp
        super().__init__(*args, **kwargs)
        if found := list(self._problems()):
            raise ConfigError(*found)
        cp.check(self.model)  # type: ignore[arg-type]
        if cp.config.sparsity.has_learned_state:
            self._average_after_steps()

    def _average_after_steps(self) -> None:
        from transformers import TrainerCallback

        cp, trainer = self.cp, cast(Any, self)

        class AverageLearned(TrainerCallback):
            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                cp.average_learned()

        trainer.add_callback(AverageLearned())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and beside it what the index has learned."""
        if self.cp.config.sparsity.has_learned_state and self.args.should_save:
            learned = self.cp.state_dict()
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in learned.items()}
            save_file(tensors, folder / INDEX)
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what a checkpoint has besides the model."""
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self._load_learned(checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        self._load_learned(self.state.best_model_checkpoint)  # type: ignore[attr-defined]

    def _load_learned(self, checkpoint: str) -> None:
        """Raise ConfigError if a checkpoint does not have what the index needs."""
        if not self.cp.config.sparsity.has_learned_state:
            return
        file = Path(checkpoint, INDEX)
        try:
            state = load_file(file)
        except (OSError, SafetensorError) as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
            raise ConfigError(
                f"{file}: {reason}; resume from a checkpoint that a Trainer saved with "
                "sparsity.score=learned, or give sparsity.score=exact"
            ) from None
        self.cp.load_state_dict(state)

    def _problems(self) -> Iterator[str]:
        trainer: Any = self
        arguments, world = self.args, sum(map(len, self.cp.processes.groups))
        if arguments.world_size != world:
            yield (
                f"cp: its number of processes is {world}, the trainer's {arguments.world_size}; "
                "call context_parallel after TrainingArguments(...), with use_cpu=True without GPUs"
            )
        if not arguments.average_tokens_across_devices:
            yield "average_tokens_across_devices=False: processes have unequal labels; give True"
        if arguments.label_smoothing_factor:
            yield (
                f"label_smoothing_factor={arguments.label_smoothing_factor}: would shift the labels"
                " of a process again; give 0"
            )
        if arguments.train_sampling_strategy == "batch_rebalance":
            yield "train_sampling_strategy=batch_rebalance: deals rows by process; give random"
        for name in ("compute_metrics", "compute_loss_func"):
            if getattr(trainer, name, None) is not None:
                yield f"{name}: would see the logits of one process's tokens; give None"
        if not trainer.model_accepts_loss_kwargs:
            yield f"{type(self.model).__name__}: does not take num_items_in_batch"
        others = {"cp": trainer.get_cp_size(), "sp": trainer.get_sp_size()}
        for name, size in {**others, "tp": trainer.get_tp_size()}.items():
            if size > 1:
                yield f"parallelism_config.{name}_size={size}: does not work with mtrain; give 1"

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """Give the processes of a context group the same rows."""
        loader = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        loader.device = None  # `_dealt` looks at the batches, and moves what it deals
        if self.args.world_size > 1:
            iterated = isinstance(loader.dataset, IterableDataset)
            shard = loader.dataset if iterated else loader.batch_sampler
            if not hasattr(shard, "num_processes"):
                raise ConfigError(
                    "accelerator_config.dispatch_batches: deals rows by process; give False"
                )
            shard.num_processes, shard.process_index = self.cp.replicas, self.cp.replica
            # One replica fills no batch with the first rows, as one process does not.
            shard.even_batches = self.cp.replicas > 1
            # Else the last batch would count only for the first processes.
            loader._drop_last = True
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Deal the tokens of the next batches, then count the labels."""
        trainer: Any = super()
        batches, _ = trainer.get_batch_samples(epoch_iterator, num_batches, device)
        dealt = [self._dealt(batch) for batch in batches]
        return dealt, self._count(dealt)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,  # noqa: ARG002
        ignore_keys: list[str] | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, None, None]:
        """Return the loss of a batch, without logits, which no process has completely."""
        trainer: Any = self
        dealt = trainer._prepare_inputs(self._dealt(inputs))
        with torch.no_grad(), trainer.compute_loss_context_manager():
            count = self._count([dealt])
            loss = trainer.compute_loss(model, dealt, num_items_in_batch=count).detach()
        processes, rows = self.cp.processes, len(inputs["input_ids"])
        if self.cp.replicas == 1:
            # All processes have this loss. The Trainer repeats it for the rows of a full batch.
            trainer.gather_function = lambda losses: losses[:rows]
        if len(processes.ranks) > 1:
            dist.all_reduce(loss, group=processes.group)
        return loss / len(processes.ranks), None, None

    def _count(self, dealt: list[dict[str, Any]]) -> Tensor | int | None:
        trainer: Any = self
        return trainer._get_num_items_in_batch(dealt, self.args.device)

    def _dealt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return `ContextParallel.inputs` of a collator's batch."""
        given = {name: value for name, value in batch.items() if name not in _REDUNDANT}
        ids, labels = given.pop("input_ids"), given.pop("labels", None)
        mask, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
        if given or labels is None:
            raise ConfigError(
                f"the batch has {', '.join(sorted(batch))}; give input_ids and labels, and no more "
                "than attention_mask and position_ids with them"
            )
        length, seq = ids.shape[1], self.cp.seq
        if length > seq:
            raise ConfigError(
                f"a batch has {length} tokens a row; give at most seq={seq}, or a larger seq"
            )
        at = torch.arange(seq, device=ids.device)
        ends = torch.full((len(ids), 1), length, device=ids.device)
        if mask is not None:
            ends = mask.bool().sum(1, keepdim=True)  # packers number the documents
            if not torch.equal(mask.bool(), at[:length] < ends):
                raise ConfigError("attention_mask: hides tokens before the end; pad on the right")
        padding = at >= ends
        missing = seq - length
        ids = nn.functional.pad(ids, (0, missing))
        labels = nn.functional.pad(labels, (0, missing)).masked_fill(padding, IGNORED)
        if positions is not None or bool(padding.any()):
            if positions is None:
                positions = at[:length].expand_as(ids[:, :length])
            # Padding is a document of its own.
            positions = torch.where(padding, at - ends, nn.functional.pad(positions, (0, missing)))
        made = self.cp.inputs(ids, labels, position_ids=positions)
        del made["num_items_in_batch"]  # which the trainer counts over all processes
        return map_tensors(made, lambda tensor: to_device(tensor, self.args.device))
