"""Score texts in a forward pass: the loss of each token, and whether it is the most likely one.

Greedy decoding begins with an answer exactly if each of its tokens has the largest logit. Under a
sparse pattern the rows of the answer are sparse, too; when a model generates, they are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.schema import Config
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.launch.environment import Environment
from mtrain_cli.model.decoder import Attend, Decoder
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.exchange import make_chosen_exchange
from mtrain_cli.parallel.layer_groups import TensorGroup
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroups
from mtrain_cli.training.batch import Batch, Batches, Layouts, attention_setups
from mtrain_cli.training.hardware import device_of
from mtrain_cli.training.resolution import ResolvedRun, resolve_run


class Scorer:
    """A decoder that scores texts. All workers call each method together.

    decoder: set it before the first call.
    tensor: the workers that share each layer; None if this worker computes whole layers.
    choices: those for a text of the model's training length; another length has its own.
    """

    decoder: Decoder

    def __init__(
        self, config: Config, environment: Environment, tensor: TensorGroup | None = None
    ) -> None:
        """Prepare communication. With several workers, the process group must exist.

        Raises ConfigError if no kernel supports the settings.
        """
        self.config, self.environment, self.tensor = config, environment, tensor
        self.device = device_of(environment)
        self.choices: ResolvedRun = resolve_run(config, environment)
        timeout = timedelta(seconds=config.topology.timeout_s)
        self._groups = ContextGroups(environment.rank, environment.dims, timeout)
        self.group = self._groups.of(self.choices.exchange, self.device)

    def _config_for(self, tokens: int) -> Config:
        """Return the configuration for a prompt of ``tokens``, which are at most a whole prefix."""
        return replace(self.config, seq=tokens, mask=self.config.mask.of_prompt(tokens))

    def _batch(
        self,
        ids: Sequence[int],
        labels: np.ndarray | None = None,
        documents: np.ndarray | None = None,
    ) -> tuple[Batch, Layout]:
        """Return a prompt as a batch of one sequence, and its layout."""
        config = self._config_for(len(ids))
        # The pattern does not depend on the length, and holds what it has learned.
        choices = replace(resolve_run(config, self.environment), pattern=self.choices.pattern)
        group = self._groups.of(choices.exchange, self.device)
        exchange = make_chosen_exchange(choices.exchange, choices.layout, group)
        rule = MaskRule.of(config)
        if documents is not None:
            rule = replace(rule, document_mask=True)
        make = Batches(
            Layouts(exchange, choices.balancer),
            attention_setups(config, choices, mask=rule),
            self.device,
            layers=self.config.model.num_layers,
            tensor=self.tensor,
        )
        tokens = np.asarray(ids, dtype=np.int32)
        if labels is None:
            labels = np.full_like(tokens, IGNORED)
        if documents is None:
            documents = np.zeros_like(tokens)
        host = make.on_host([Sample(tokens, labels, documents)])
        return make.to_device(host), host.layout

    def _of_place(self, own_1RW: Tensor, layout: Layout) -> Tensor:
        """Gather the rows of this worker's place in the layout, [1, tokens, W], from its part."""
        if self.tensor is None:
            return own_1RW
        return self.tensor.start_gather(own_1RW[0]).wait()[None, : layout.tokens_per_worker]

    def token_losses(self, ids: Sequence[int], documents: np.ndarray | None = None) -> Tensor:
        return self.token_scores(ids, documents)[0]

    @torch.no_grad()
    def token_scores(
        self,
        ids: Sequence[int],
        documents: np.ndarray | None = None,
        places: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each token but the first, and whether it is the most likely token.

        Attention has the model's pattern, as in a prompt.

        Args:
            documents: document of each token, int32 [tokens], to keep documents apart; None for
                one. The first token of a later document is predicted from the token before it.
            places: positions of the only tokens to score, from 1 and increasing; None for all.

        Returns:
            -log p(token | earlier tokens) in nats, float32, and bool, both [tokens - 1] or
            [places] and on the CPU. Among equally likely tokens, the lowest id counts as the most
            likely.
        """
        tokens = np.asarray(ids, dtype=np.int32)
        labels = np.append(tokens[1:], np.int32(IGNORED))
        # The label of a token stands one place before it.
        wanted = np.arange(len(ids) - 1) if places is None else np.asarray(places, np.int64) - 1
        if places is not None:
            labels = np.full_like(tokens, IGNORED)
            labels[wanted] = tokens[wanted + 1]
        batch, layout = self._batch(ids, labels, documents)
        is_greedy = torch.zeros_like(batch.labels, dtype=torch.bool)
        losses = self.decoder.token_losses(
            batch.tokens, batch.positions, batch.labels, attention_of(batch), is_greedy
        )
        own = torch.cat([losses, is_greedy.to(losses.dtype)])  # one message for both
        own = self._of_place(own.t()[None], layout)[0].t().contiguous()
        shards = own[None]
        if self.group.size > 1:
            shards = all_gather(own, self.group.size, self.group.whole)
        losses, hits = layout.to_sequence(shards).cpu()[:, torch.from_numpy(wanted)]
        return losses, hits > 0.5


def attention_of(
    batch: Batch, store: Callable[[int, Tensor, Tensor], None] | None = None
) -> Attend:
    """Return the attention of a batch without a backward pass. store: takes layer, k and v."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        if store is not None:
            store(layer, k, v)
        out = batch.attention(q, k, v, layer)
        batch.attend.release(layer)
        return out

    return attend
