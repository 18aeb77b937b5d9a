"""The part of a decoder that one stage of a pipeline holds.

Shape suffixes are those of `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model.decoder import Attend, Decoder
from mtrain_cli.model.routing import Routing


@dataclass(frozen=True)
class VirtualStage:
    """Consecutive layers that one worker computes without a message of the pipeline.

    first, last: whether the embedding, or the final norm and the LM head, belong to it.
    """

    number: int
    layers: range
    first: bool
    last: bool


def virtual_stages(layer_counts: Sequence[int]) -> tuple[VirtualStage, ...]:
    """Return all virtual stages. layer_counts: number of layers of each."""
    ends = [sum(layer_counts[: n + 1]) for n in range(len(layer_counts))]
    return tuple(
        VirtualStage(n, range(end - count, end), n == 0, n == len(ends) - 1)
        for n, (end, count) in enumerate(zip(ends, layer_counts, strict=True))
    )


class StageDecoder(Decoder):
    """The virtual stages of one worker. Layers and parameters keep their names in the whole model.

    Tied embeddings are on the first and on the last stage.
    """

    def __init__(
        self, model: ModelConfig, rope_factor: float, stages: Sequence[VirtualStage]
    ) -> None:
        super().__init__(model, rope_factor)
        self.stages = {stage.number: stage for stage in stages}
        first, last = (any(getattr(s, end) for s in stages) for end in ("first", "last"))
        layers, self.layers = self.layers, nn.ModuleList()
        for number in sorted(n for stage in stages for n in stage.layers):
            self.layers.add_module(str(number), layers[number])
        if not first and not (last and model.tie_word_embeddings):
            del self.embed_tokens
        if not last:
            del self.norm
        if not last and not model.tie_word_embeddings:
            del self.lm_head

    def run_stage(
        self,
        number: int,
        x_BNC: Tensor | None,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        labels_BN: Tensor,
        attend: Attend,
        loss_scale: float | None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return the hidden states after a virtual stage, or the loss after the last one.

        Args:
            x_BNC: hidden states after the previous virtual stage; None for the first.
            loss_scale: as in `Decoder.forward`. None returns the loss of every token instead, as
                `Decoder.token_losses` does.
            routing: as in `Decoder.forward`.
        """
        stage = self.stages[number]
        with torch.set_grad_enabled(loss_scale is not None):
            rope = self.rotation(positions_BN)
            if x_BNC is None:
                x_BNC = self.embed_tokens(tokens_BN)
            for layer in stage.layers:
                x_BNC = self.layers.get_submodule(str(layer))(x_BNC, rope, attend, routing)
            assert x_BNC is not None
            if not stage.last:
                return x_BNC
            normed_BNC = self.norm(x_BNC)
            if loss_scale is None:
                return self.token_losses_of(normed_BNC, labels_BN)
            return self.loss_of(normed_BNC, labels_BN, loss_scale)
