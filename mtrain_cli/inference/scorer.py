"""Score texts: the loss of each token, and whether it is the most likely one, in a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.schema import Config
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.inference.cache import StoringAttention
from mtrain_cli.launch.environment import Environment
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.exchange import make_chosen_exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group
from mtrain_cli.parallel.tensor_group import TensorGroup
from mtrain_cli.training.batch import Batch, Batches, Layouts, attention_setups
from mtrain_cli.training.resolution import ResolvedRun, resolve_run


@dataclass(frozen=True)
class _Prompt:
    """A prompt as `Batches` takes it. See `batch.PackedSample`."""

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    slices: IntArray | None = None
    positions: np.ndarray | None = None
    real: int | None = None


class Scorer:
    """A decoder that scores texts. All workers call each method together.

    A text may have another length than the sequences of training. Its layout and exchange are those
    of its own length.

    decoder: set it before the first call. Only `Decoder.token_losses` of it is used here.
    tensor: the workers that share each layer; None if this worker computes whole layers.
    choices: kernel, layout, exchange and pattern for a text of the model's training length.
    """

    decoder: Decoder

    def __init__(
        self, config: Config, environment: Environment, tensor: TensorGroup | None = None
    ) -> None:
        """Prepare communication. With several workers, the process group must exist.

        Raises:
            ConfigError: no kernel supports the settings.
        """
        self.config, self.environment, self.tensor = config, environment, tensor
        self.device = device_of(environment)
        self.choices: ResolvedRun = resolve_run(config, environment)
        self._groups: dict[tuple[int, int, tuple[str, ...]], ContextGroup] = {}
        self.group = self._context_group(self.choices.exchange)

    def _context_group(self, exchange: ExchangeChoice) -> ContextGroup:
        """Return the communicators of an exchange. Exchanges with equal needs share them."""
        dims = self.environment.dims
        if dims.workers == 1:
            return ContextGroup.alone()
        key = exchange.per_node, exchange.heads, tuple(exchange.channels)
        if key not in self._groups:
            self._groups[key] = make_context_group(
                self.environment.rank,
                dims,
                self.device,
                timedelta(seconds=self.config.topology.timeout_s),
                per_node=exchange.per_node,
                heads=exchange.heads,
                channels=exchange.channels,
            )
        return self._groups[key]

    def _config_for(self, tokens: int) -> Config:
        """Return the configuration for a prompt of ``tokens``, which are at most a whole prefix."""
        return replace(self.config, seq=tokens, mask=self.config.mask.of_prompt(tokens))

    def _batch(
        self,
        ids: Sequence[int],
        labels: np.ndarray | None = None,
        documents: np.ndarray | None = None,
    ) -> tuple[Batch, Layout]:
        """Return a prompt as a batch of one sequence, and its layout.

        documents: int32 [tokens], to keep the tokens of each document apart; None for one document.
        """
        config = self._config_for(len(ids))
        choices = resolve_run(config, self.environment)
        group = self._context_group(choices.exchange)
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
        host = make.on_host([_Prompt(tokens, labels, documents)])
        return make.to_device(host), host.layout

    def _of_place(self, own_1RW: Tensor, layout: Layout) -> Tensor:
        """Return the rows of all tokens of this worker's place in the layout, [1, tokens, W].

        own_1RW: this worker's part of them. With whole layers, the part is all of them.
        """
        if self.tensor is None:
            return own_1RW
        return self.tensor.start_gather(own_1RW[0]).wait()[None, : layout.tokens_per_worker]

    def token_losses(self, ids: Sequence[int], documents: np.ndarray | None = None) -> Tensor:
        """Return the losses of `token_scores`."""
        return self.token_scores(ids, documents)[0]

    @torch.no_grad()
    def token_scores(
        self,
        ids: Sequence[int],
        documents: np.ndarray | None = None,
        places: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each token but the first, and whether it is the most likely token.

        The loss is -log p(token | earlier tokens) in nats, float32 [tokens - 1]. The second result
        is bool [tokens - 1]. Both come from one forward pass and are on the CPU. Attention has the
        model's pattern, as in a prompt.

        Args:
            documents: as in `hidden`. The first token of a later document follows the token before
                it, which belongs to another document.
            places: positions of the tokens to score, from 1; None for all. The other tokens get
                loss 0 and False.
        """
        tokens = np.asarray(ids, dtype=np.int32)
        labels = np.append(tokens[1:], np.int32(IGNORED))
        if places is not None:
            wanted = np.asarray(places) - 1  # the label of a token stands one place before it
            labels = np.full_like(tokens, IGNORED)
            labels[wanted] = tokens[wanted + 1]
        batch, layout = self._batch(ids, labels, documents)
        attend = StoringAttention(batch.attention, batch.attend.release)
        is_greedy = torch.zeros_like(batch.labels, dtype=torch.bool)
        losses = self.decoder.token_losses(
            batch.tokens, batch.positions, batch.labels, attend, is_greedy
        )
        own = torch.cat([losses, is_greedy.to(losses.dtype)])  # one message for both
        own = self._of_place(own.t()[None], layout)[0].t().contiguous()
        shards = own[None]
        if self.group.size > 1:
            shards = all_gather(own, self.group.size, self.group.whole)
        losses, hits = layout.to_sequence(shards)[:, : len(ids) - 1].cpu()
        return losses, hits > 0.5


def device_of(environment: Environment) -> torch.device:
    """Return the device of this worker."""
    if environment.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
