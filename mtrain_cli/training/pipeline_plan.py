"""What a pipeline costs, from closed-form costs of its stages and from its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mtrain_cli.config.schema import Config
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.pipeline_schedule import Pipeline, Played, TimedPipeline
from mtrain_cli.training.flops import own_tiles
from mtrain_cli.training.stage_cut import head_cost, layer_costs, stage_layers

# FLOP of a backward pass divided by those of the forward pass, without and with recomputation.
_BACKWARD, _RECOMPUTED = 2, 3


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of a run, and what it costs.

    pipeline: the schedule of a training step.
    layers: number of layers of each virtual stage.
    hidden: bytes of the hidden states of a micro-batch on one worker: of one message.
    """

    config: Config
    pipeline: Pipeline
    layers: tuple[int, ...]
    hidden: int

    @staticmethod
    def of(config: Config, micro_batches: int, layout: Layout, dtype_bytes: int) -> PipelinePlan:
        """Plan the pipeline of a configuration.

        Args:
            micro_batches: number of micro-batches of a context group in a step.
            layout: layout of a context group.
            dtype_bytes: bytes of the compute dtype.
        """
        own, _ = own_tiles(config, layout, dtype_bytes)
        return PipelinePlan(
            config,
            Pipeline.of(config.topology, micro_batches),
            stage_layers(config),
            own * config.model.hidden_size * dtype_bytes,
        )

    @cached_property
    def costs(self) -> list[float]:
        """Forward FLOP per token of each virtual stage."""
        costs, begin = layer_costs(self.config), 0
        result = []
        for count in self.layers:
            result.append(sum(costs[begin : begin + count]))
            begin += count
        result[-1] += head_cost(self.config)
        return result

    @cached_property
    def played(self) -> Played:
        """The schedule with these costs and free messages. The unit of time is a FLOP per token."""
        recomputes = self.config.train.activation_checkpoint != "none"
        times = _RECOMPUTED if recomputes else _BACKWARD
        backward = tuple(times * cost for cost in self.costs)
        return TimedPipeline(self.pipeline, tuple(self.costs), backward).played

    @property
    def received(self) -> int:
        """Bytes of hidden states and of their gradients that reach a worker in the middle."""
        pipeline = self.pipeline
        return 2 * self.hidden * pipeline.micro_batches * pipeline.virtual_stages

    @property
    def stages_and_schedule(self) -> str:
        """The stages, their layers, and the schedule."""
        pipeline, layers = self.pipeline, self.layers
        each = f"{layers[0]} layers" if len(set(layers)) == 1 else f"{_listed(layers)} layers"
        virtual = f" x {pipeline.virtual_stages} virtual stages" * (pipeline.virtual_stages > 1)
        count = pipeline.micro_batches
        step = f"{count} micro-batch{'es' * (count != 1)}"
        return f"{pipeline.stages} stages{virtual} of {each}; {pipeline.schedule}, {step} per step"

    def describe(self) -> str:
        """Return `stages_and_schedule`, and the share of time in which stages idle."""
        return f"{self.stages_and_schedule}: stages idle {self.played.bubble:.0%} of the time"


def _listed(numbers: tuple[int, ...]) -> str:
    """Return numbers such as ``10, 9 and 7``; only the first and the last of many."""
    if len(numbers) > 8:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-2]} and {numbers[-1]}"
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}"
