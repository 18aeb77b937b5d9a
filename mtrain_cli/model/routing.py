"""Which experts compute which tokens, the losses that balance them, and their loads.

What depends on several tokens covers the whole sequence, however workers share it. Shape suffixes:
B sequences of a micro-batch, T own tokens of all sequences, C hidden size, E experts, K chosen
experts of a token, S = T K pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain_cli.attention.partials import has_triton, high_product
from mtrain_cli.config.schema import SIGMOID, MoeConfig
from mtrain_cli.parallel import profiler_labels
from mtrain_cli.parallel.recording import Recorder

PADDING = -1  # slot of a token that pads a sequence
# Numbers of a layer that `Routing.loads` holds after the tokens of each expert.
BALANCE, Z, ENTROPY = range(3)
SUMS = 3


@dataclass(frozen=True)
class RouterOptions:
    """What training adds to the routing."""

    sequences: int  # of an optimizer step, over all workers
    balance_loss: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class SharingGroup:
    """Workers that share sequences. peer_errors: context that names the group if one is lost."""

    process_group: dist.ProcessGroup
    peer_errors: Callable[[], AbstractContextManager[None]]


class Decision(NamedTuple):
    """Which experts compute which tokens of a layer.

    order_S, place_S: pairs of token and expert, numbered token * K + k, by expert, and the place of
        each pair. Pairs of padding, which no expert computes, come last.
    ends_E: int32, number of pairs of this and all earlier experts.
    load_BE: tokens of a whole sequence that chose each expert / mean, float64; None without
        `Routing`.
    chunks: how rows travel between the workers that share the experts (`expert_parallel.Tile`).
    """

    chosen_TK: Tensor
    order_S: Tensor
    place_S: Tensor
    ends_E: Tensor
    load_BE: Tensor | None = None
    chunks: tuple[Any, ...] = ()


class Routing:
    """The sequences of a micro-batch, for the routers of all layers in training.

    loads: float64 [layers, E + SUMS], sums over this worker's tokens: tokens per expert, balance
        loss and z-loss without coefficients, and entropy of the scores in nats.
    decided: numbers of the layers whose routers decided on this worker.
    """

    def __init__(
        self,
        slots: Tensor,
        lengths: Sequence[int],
        padded_seq: int,
        moe: MoeConfig,
        layers: int,
        options: RouterOptions,
        groups: Sequence[SharingGroup] = (),
    ) -> None:
        """Prepare the routing of a micro-batch.

        slots: for each of this worker's tokens, sequence * padded_seq + position, or `PADDING`.
        lengths: number of tokens of each sequence, without padding.
        groups: the groups of workers that share these sequences, innermost first.
        """
        self.options, self.groups, self.moe = options, tuple(groups), moe
        slots_T = slots.flatten()
        self.is_real_T1 = (slots_T != PADDING)[:, None]
        self.sequence_T = slots_T.clamp(min=0) // padded_seq
        self._batch = len(lengths)
        self.lengths_B = torch.tensor(lengths, dtype=torch.float64).to(slots.device)
        numbers_B1 = torch.arange(len(lengths), device=slots.device)[:, None]
        self.members_BT = (self.sequence_T == numbers_B1) & self.is_real_T1.T
        self.loads = torch.zeros(
            layers, moe.experts + SUMS, dtype=torch.float64, device=slots.device
        )
        self.decided: set[int] = set()
        self.recorder: Recorder | None = None

    def decide(self, chosen_TK: Tensor, layer: int) -> Decision:
        """Return which experts compute which tokens, and count them. Workers call this together."""
        experts, top_k = self.moe.experts, self.moe.top_k
        self.decided.add(layer)
        keys_TK = chosen_TK * self._batch + self.sequence_T[:, None]
        keys_TK = keys_TK.masked_fill(~self.is_real_T1, experts * self._batch)
        order_S, ends = _grouped(keys_TK, experts * self._batch)
        counts_BE = ends.diff(prepend=ends.new_zeros(1)).view(experts, self._batch).T.contiguous()
        self.loads[layer, :experts] += counts_BE.sum(0)
        for group in self.groups:
            with group.peer_errors(), profiler_labels.label(profiler_labels.MESSAGE):
                dist.all_reduce(counts_BE, group=group.process_group)
        means_B = self.lengths_B * (top_k / experts)
        load_BE = counts_BE / means_B[:, None]
        return _decision(chosen_TK, order_S, ends[self._batch - 1 :: self._batch], load_BE)

    def loss(
        self, logits_TE: Tensor, scores_TE: Tensor, decision: Decision, layer: int, *, count: bool
    ) -> Tensor:
        """Return this worker's part of a layer's losses, means over the sequences of the step.

        Balance loss: sum over experts of f P (arXiv:2101.03961, equation 4): share of the chosen
            experts / mean, times mean share of the scores. z-loss: mean over tokens of
            logsumexp(logits)^2 (arXiv:2202.08906, equation 5). count: add the values to `loads`.
        """
        assert decision.load_BE is not None
        shares_TE = scores_TE
        if self.moe.score == SIGMOID:
            shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        weights_BT = (self.members_BT / self.lengths_B[:, None]).to(scores_TE.dtype)
        weights_T = weights_BT.sum(0)
        balance = (decision.load_BE.to(scores_TE.dtype) * (weights_BT @ shares_TE)).sum()
        options = self.options
        if not (options.z_loss or count):
            return options.balance_loss * balance / options.sequences
        # Without the loss, its value is only a metric, and autograd keeps nothing of it.
        z_logits_TE = logits_TE if options.z_loss else logits_TE.detach()
        z = (weights_T * z_logits_TE.logsumexp(-1).square()).sum()
        if count:
            with torch.no_grad():
                entropy = -torch.special.xlogy(shares_TE, shares_TE).sum(-1) * weights_T
                sums = torch.stack([balance, z, entropy.sum()]).detach()
                self.loads[layer, self.moe.experts : self.moe.experts + len(sums)] += sums
        return (options.balance_loss * balance + options.z_loss * z) / options.sequences


def choose(scores_TE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Return each token's experts with the highest scores + bias, ``[T, K]``; lowest of equals."""
    is_float = scores_TE.dtype == bias_E.dtype == torch.float32
    if scores_TE.is_cuda and is_float and has_triton():
        from mtrain_cli.kernels.triton import router

        return router.chosen_experts(scores_TE, bias_E, top_k)
    order_TE = (scores_TE + bias_E).sort(dim=-1, descending=True, stable=True).indices
    return order_TE[:, :top_k].contiguous()  # a view would keep the numbers of all experts


def decide_alone(chosen_TK: Tensor, experts: int) -> Decision:
    """Return the decision without `Routing`: the chosen experts compute all tokens."""
    return _decision(chosen_TK, *_grouped(chosen_TK, experts))


def part_of(decision: Decision, begin: int, end: int) -> Decision:
    """Return the decision on the tokens from ``begin`` to ``end``, whose pairs count from 0."""
    chosen_TK = decision.chosen_TK[begin:end]
    top_k = chosen_TK.shape[1]
    # Pairs that no expert computes get the number behind the last expert.
    experts_S = torch.searchsorted(
        decision.ends_E.long(), decision.place_S[begin * top_k : end * top_k], right=True
    )
    return _decision(chosen_TK, *_grouped(experts_S, len(decision.ends_E)))


def _grouped(keys_TK: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return the order of pairs by key, and the number of pairs up to each key below ``keys``."""
    # A GPU sorts two bytes in a quarter of the passes that eight bytes need.
    dtype = torch.int16 if keys <= torch.iinfo(torch.int16).max else torch.int32
    ordered, order_S = keys_TK.flatten().to(dtype).sort(stable=True)
    bounds = torch.arange(keys, dtype=dtype, device=keys_TK.device)
    return order_S, torch.searchsorted(ordered, bounds, right=True)


def _decision(
    chosen_TK: Tensor, order_S: Tensor, ends_E: Tensor, load_BE: Tensor | None = None
) -> Decision:
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return Decision(chosen_TK, order_S, place_S, ends_E.to(torch.int32).contiguous(), load_BE)


def router_logits(x_TC: Tensor, weight_EC: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in float32, or in float64 for float64 inputs, ``[T, E]``.

    Tensor cores multiply bfloat16 tokens exactly in float32, and autograd keeps only the inputs.
    """
    return _RouterLogits.apply(x_TC, weight_EC)


class _RouterLogits(torch.autograd.Function):
    """PyTorch has no derivative of a product whose result has another dtype."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_EC: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_EC)
        return high_product(x_TC, weight_EC.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TC, weight_EC = ctx.saved_tensors
        compute = _split_gradients if _on_tensor_cores(x_TC, weight_EC) else _gradients
        return compute(grad_TE, x_TC, weight_EC)


def _gradients(grad_TE: Tensor, x_TC: Tensor, weight_EC: Tensor) -> tuple[Tensor, Tensor]:
    high = grad_TE.dtype
    dx_TC = (grad_TE @ weight_EC.to(high)).to(x_TC.dtype)
    return dx_TC, (grad_TE.t() @ x_TC.to(high)).to(weight_EC.dtype)


def _split_gradients(grad_TE: Tensor, x_TC: Tensor, weight_EC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of tokens and weight with products of bfloat16 numbers."""
    # A float32 number is the sum of two bfloat16 numbers up to 2^-16, far below the rounding of the
    # results to bfloat16. So each product has two terms.
    low = x_TC.dtype
    first_TE = grad_TE.to(low)
    terms = torch.cat([first_TE, (grad_TE - first_TE).to(low)], 1)  # [T, 2 E]
    dx_TC = terms @ torch.cat([weight_EC, weight_EC])
    of_terms = high_product(terms.t(), x_TC).unflatten(0, (2, -1))
    return dx_TC, of_terms.sum(0).to(weight_EC.dtype)


def _on_tensor_cores(x_TC: Tensor, weight_EC: Tensor) -> bool:
    return x_TC.is_cuda and x_TC.dtype == weight_EC.dtype == torch.bfloat16
