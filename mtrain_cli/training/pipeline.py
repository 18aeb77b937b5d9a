"""A worker's stage of a pipeline in training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment
from mtrain_cli.model.decoder import Attend, Decoder, VirtualStage, virtual_stages
from mtrain_cli.parallel.fsdp import begin_micro_batch
from mtrain_cli.parallel.layer_groups import copies
from mtrain_cli.parallel.pipeline_group import PipelineExecutor, PipelineGroup, make_pipeline_group
from mtrain_cli.parallel.pipeline_schedule import Pipeline, play
from mtrain_cli.parallel.recording import Recorder
from mtrain_cli.training.pipeline_plan import stage_layers

if TYPE_CHECKING:
    from mtrain_cli.training.batch import Batch


@dataclass(frozen=True)
class PipelineStage:
    """A worker's stage: its virtual stages, its communicators and the schedule of a step.

    dtype: of the hidden states.
    """

    config: Config
    pipeline: Pipeline
    group: PipelineGroup
    stages: tuple[VirtualStage, ...]
    dtype: torch.dtype

    @property
    def fewest_layers(self) -> int:
        counts, stages = stage_layers(self.config), self.pipeline.stages
        return min(sum(counts[stage::stages]) for stage in range(stages))

    def copies(self, decoder: Decoder) -> Callable[[Tensor], int]:
        """Return a function that counts the workers which hold the same shard of a parameter."""
        shared = decoder.embed_tokens.weight if self.group.ends is not None else None
        return lambda parameter: copies(parameter) * (2 if parameter is shared else 1)

    def forward_backward(
        self,
        decoder: Decoder,
        batches: Sequence[Batch],
        attends: Sequence[Attend],
        valid: int,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """Accumulate the gradients of a step. Return this worker's part of the mean loss.

        valid: number of labels in the whole step that count toward the loss.
        """
        passes = _TrainingPasses(self, decoder, batches, attends, 1.0 / max(1, valid))
        executor = PipelineExecutor(self.group, self.pipeline, recorder)
        with nullcontext() if recorder is None else recorder.iteration():
            executor.run(self.pipeline.actions(self.group.stage), passes)
            if self.group.ends is not None:
                # Both ends have a gradient of the tied embedding: look-up and LM head.
                gradient = decoder.embed_tokens.weight.grad
                assert isinstance(gradient, DTensor), "every micro-batch gives a gradient"
                self.group.sum_over_ends(gradient.to_local())
        return passes.loss

    def token_losses(
        self,
        decoder: Decoder,
        rounds: int,
        batch: Callable[[int], Batch],
        count: Callable[[int, Tensor | None], None],
    ) -> None:
        """Compute the loss of every token of ``rounds`` micro-batches, without gradients.

        batch: makes a micro-batch from its number.
        count: called with the number of a micro-batch, and its losses on the last stage.
        """
        pipeline = replace(self.pipeline, micro_batches=rounds)
        passes = _EvaluationPasses(self, decoder, batch, count)
        actions = pipeline.forward_actions(self.group.stage)
        PipelineExecutor(self.group, pipeline).run(actions, passes)


def make_stage(
    config: Config,
    environment: Environment,
    device: torch.device,
    dtype: torch.dtype,
    timeout: timedelta | None,
) -> PipelineStage | None:
    """Make the communicators of all stages. Return this worker's, None for one stage.

    All ranks must call this. timeout: longest wait for one message; None for torch's default.
    """
    dims, train = environment.dims, config.train
    if dims.pp == 1:
        return None
    pipeline = Pipeline.of(config.topology, train.global_batch // (train.micro_batch * dims.dp))
    play(pipeline)  # a schedule that cannot end fails here, not in the middle of a step
    tied = config.model.tie_word_embeddings
    group = make_pipeline_group(environment.rank, dims, pipeline, device, timeout, tied=tied)
    every = virtual_stages(stage_layers(config))
    own = tuple(every[number] for number in pipeline.own(group.stage))
    return PipelineStage(config, pipeline, group, own, dtype)


@dataclass
class _Passes:
    stage: PipelineStage
    decoder: Decoder

    def empty_like(self, batch: Batch) -> Tensor:
        """Return an uninitialized tensor for the hidden states of a micro-batch."""
        shape = (*batch.tokens.shape, self.stage.config.model.hidden_size)
        return torch.empty(shape, dtype=self.stage.dtype, device=batch.tokens.device)


@dataclass
class _TrainingPasses(_Passes):
    """Forward and backward passes of a training step. scale: factor of the summed losses."""

    batches: Sequence[Batch]
    attends: Sequence[Attend]
    scale: float
    # Input and result of each forward pass until its backward pass. Of the result, only its place
    # in autograd's graph: nothing reads its values once they are sent.
    _inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _results: dict[tuple[int, int], GradientEdge] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loss = torch.zeros((), device=self.batches[0].tokens.device)

    def received_like(self, micro_batch: int) -> Tensor:
        return self.empty_like(self.batches[micro_batch])

    def forward(self, virtual_stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        batch, key = self.batches[micro_batch], (virtual_stage, micro_batch)
        if received is not None:
            self._inputs[key] = received.requires_grad_()
        inputs = received, batch.tokens, batch.positions, batch.labels, self.attends[micro_batch]
        result = self.decoder.run_stage(virtual_stage, *inputs, self.scale, batch.routing)
        if self.decoder.stages[virtual_stage].last:
            self.loss += result.detach()
        self._results[key] = get_gradient_edge(result)
        return result

    def backward(
        self, virtual_stage: int, micro_batch: int, gradient: Tensor | None
    ) -> Tensor | None:
        key, stage = (virtual_stage, micro_batch), self.decoder.stages[virtual_stage]
        # The last of this worker's virtual stages in a backward pass is its first in the model.
        finishes = virtual_stage == min(self.decoder.stages)
        # Which weights this pass frees, and which gradients it reduces.
        shard, last = self.stage.config.train.shard, micro_batch == len(self.batches) - 1
        begin_micro_batch(self.decoder, shard, last=last, layers=stage.layers)
        begin_micro_batch(self.decoder, shard, last=last and finishes, layers=())
        if gradient is None:
            gradient = torch.ones_like(self.loss)
        torch.autograd.backward((self._results.pop(key),), (gradient,))
        index = self.batches[micro_batch].attend.index
        if finishes and index is not None:
            index.count()
        received = self._inputs.pop(key, None)
        return None if received is None else received.grad


@dataclass
class _EvaluationPasses(_Passes):
    """Forward passes without gradients. A micro-batch is made when the stage first needs it."""

    batch: Callable[[int], Batch]
    count: Callable[[int, Tensor | None], None]
    _made: dict[int, Batch] = field(default_factory=dict)

    def received_like(self, micro_batch: int) -> Tensor:
        return self.empty_like(self._batch(micro_batch))

    def forward(self, virtual_stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        batch, stage = self._batch(micro_batch), self.decoder.stages[virtual_stage]
        inputs = received, batch.tokens, batch.positions, batch.labels, batch.attention
        result = self.decoder.run_stage(virtual_stage, *inputs, None)
        if virtual_stage == max(self.decoder.stages):
            del self._made[micro_batch]
            self.count(micro_batch, result if stage.last else None)
        return result

    def backward(self, *action: object) -> Tensor | None:
        raise AssertionError(f"an evaluation has no backward pass: {action}")

    def _batch(self, number: int) -> Batch:
        if number not in self._made:
            self._made[number] = self.batch(number)
        return self._made[number]
