"""A mixture of experts: many small MLPs in place of a layer's MLP. Each token uses a few of them.

See arXiv:2101.03961 and arXiv:2401.06066 (shared experts).

Shape suffixes: B batch, N local tokens, T = B N, C hidden size, E experts, K chosen experts of a
token, S = T K pairs of a token and an expert, ordered by expert, I width of an expert, W = 2 I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtrain_cli.config.schema import SIGMOID, ModelConfig
from mtrain_cli.model.expert_parallel import SharedExperts, agreed, start_plan
from mtrain_cli.model.expert_products import ChunkedExperts, token_bounds
from mtrain_cli.model.routing import Decision, Routing, choose, decide_alone, router_logits
from mtrain_cli.model.tiling import LayerExecution
from mtrain_cli.parallel import profiler_labels
from mtrain_cli.parallel.layer_groups import own_part
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE, Recorder

if TYPE_CHECKING:
    from mtrain_cli.model.decoder import SwiGLU
    from mtrain_cli.parallel.layer_groups import ExpertGroup

BIAS = "selection_bias"  # name of the router's buffer


class Experts(nn.Module):
    """The weights of all experts of a layer: gate and up ``[E, 2 I, C]``, down ``[E, C, I]``."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        experts, width, hidden = model.moe.experts, model.moe.expert_size, model.hidden_size
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, body: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return the result of the layer's body, for which FSDP gathers these weights.

        The second forward pass of a checkpoint is inside, so it does not gather them again.
        """
        return body(*arguments)


class MixtureOfExperts(nn.Module):
    """The router, the experts and the shared expert of one layer.

    sharing: the workers that share the experts; None if this worker computes all of them.
    selection_bias: float32 [E], added to the scores for the choice of experts only
        (arXiv:2408.15664); `train.balance_bias` changes it after each update.
    """

    selection_bias: Tensor

    def __init__(self, model: ModelConfig, layer: int, shared: SwiGLU | None) -> None:
        super().__init__()
        self.moe, self.layer = model.moe, layer
        self.sharing: ExpertGroup | None = None
        self.execution = LayerExecution()
        self.gate = nn.Linear(model.hidden_size, model.moe.experts, bias=False)
        self.experts = Experts(model)
        self.shared = shared
        self.register_buffer(BIAS, torch.zeros(model.moe.experts, dtype=torch.float32))

    def forward(
        self, x_BNC: Tensor, routing: Routing | None = None, kept: list[Decision] | None = None
    ) -> Tensor:
        """Return the sum of the chosen experts' outputs, each times its score.

        routing: the sequences of the tokens, for the losses of training; None if there are neither
            losses nor padding.
        kept: stores the routing decision so that recomputation reuses it; with different rounding,
            some tokens would choose other experts.
        """
        x_TC, again = x_BNC.flatten(0, -2), bool(kept)
        direction = RECOMPUTE if again else FORWARD
        with profiler_labels.of_layer(profiler_labels.ROUTER, self.layer, direction):
            scores, decision, bounds = self._route(x_TC, routing, kept)
        logits_TE, scores_TE, scores_TK = scores
        weights = own_part(self.experts.gate_up), own_part(self.experts.down)
        options, group = self.execution, self.sharing

        def compute(x_TC: Tensor) -> Tensor:
            if group is None:
                more = bounds, options.recompute, options.compile, again
                return ChunkedExperts.apply(x_TC, scores_TK, *weights, decision, *more)
            # Workers with popular experts take longer, so the time of all is not compared.
            with group.observer.waiting():
                travel = decision.chunks, group, options.recompute, again
                return SharedExperts.apply(x_TC, scores_TK, *weights, *travel)

        recorder = None if routing is None else routing.recorder
        out_TC = record_experts(compute, x_TC, recorder, self.layer, again=again)
        if self.shared is not None:
            out_TC = out_TC + _shared(x_TC, self.shared)
        if routing is not None:
            loss = routing.loss(logits_TE, scores_TE, decision, self.layer, count=not again)
            out_TC = _WithLoss.apply(out_TC, loss)
        return out_TC.view_as(x_BNC)

    def _route(
        self, x_TC: Tensor, routing: Routing | None, kept: list[Decision] | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Decision, list[int]]:
        """Score the experts, and decide unless ``kept`` has the decision."""
        logits_TE = router_logits(x_TC, own_part(self.gate.weight))
        is_sigmoid = self.moe.score == SIGMOID
        scores_TE = logits_TE.sigmoid() if is_sigmoid else logits_TE.softmax(-1)
        decision = kept[0] if kept else self._decide(scores_TE.detach(), routing)
        group = self.sharing
        degree = 1 if group is None else group.size
        bounds = token_bounds(x_TC, self.moe, self.execution, degree=degree)
        plan = None
        if not kept and group is not None:
            if routing is None:
                bounds = agreed(bounds, group, x_TC.device)
            plan = start_plan(decision, group, bounds)
        scores_TK = scores_TE.gather(1, decision.chosen_TK)
        if self.moe.normalize:
            least = 1e-20 if is_sigmoid else 0.0  # sigmoids may all round to 0
            scores_TK = scores_TK / (scores_TK.sum(-1, keepdim=True) + least)
        if self.moe.scale != 1.0:
            scores_TK = scores_TK * self.moe.scale
        if plan is not None:
            decision = decision._replace(chunks=plan())
        if kept is not None and not kept:
            kept.append(decision)
        return (logits_TE, scores_TE, scores_TK), decision, bounds

    @torch.no_grad()
    def _decide(self, scores_TE: Tensor, routing: Routing | None) -> Decision:
        chosen_TK = choose(scores_TE, self.selection_bias, self.moe.top_k)
        if routing is None:
            return decide_alone(chosen_TK, self.moe.experts)
        return routing.decide(chosen_TK, self.layer)

    @torch.no_grad()
    def change_bias(self, counts_E: Tensor, step: float) -> None:
        """Raise the bias of experts that fewer tokens chose than the mean; lower the others."""
        counts_E = counts_E.to(self.selection_bias.device, torch.float64)
        self.selection_bias += (step * (counts_E.mean() - counts_E).sign()).float()


def expert_layers(layers: Sequence[nn.Module] | nn.ModuleList) -> list[MixtureOfExperts]:
    found = (getattr(layer, "mlp", None) for layer in layers)
    return [mlp for mlp in found if isinstance(mlp, MixtureOfExperts)]


@torch.no_grad()
def reset_biases(decoder: nn.Module, device: torch.device | None = None) -> None:
    """Set the routers' biases to 0 in float32. device: by default where they are."""
    for module in decoder.modules():
        if isinstance(module, MixtureOfExperts):
            module.selection_bias = torch.zeros_like(
                module.selection_bias, dtype=torch.float32, device=device
            )


def _shared(x_TC: Tensor, mlp: SwiGLU) -> Tensor:
    """Return the output of the shared expert, of whose weights each worker has the whole."""
    gate, up, down = (own_part(p.weight) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    inner = functional.silu(functional.linear(x_TC, gate)) * functional.linear(x_TC, up)
    return functional.linear(inner, down)


def record_experts(
    compute: Callable[[Tensor], Tensor],
    x_TC: Tensor,
    recorder: Recorder | None,
    layer: int,
    *,
    again: bool,
) -> Tensor:
    """Return ``compute(x_TC)``; tell the recorder and a profiler of both its passes."""
    if recorder is None and not profiler_labels.listening():
        return compute(x_TC)
    backward = ExitStack()  # enclosed by two nodes of the graph
    x_TC = _InBackward.apply(x_TC, backward.close)
    with _pass(recorder, layer, RECOMPUTE if again else FORWARD):
        out_TC = compute(x_TC)
    return _InBackward.apply(
        out_TC, lambda: backward.enter_context(_pass(recorder, layer, BACKWARD))
    )


@contextmanager
def _pass(recorder: Recorder | None, layer: int, direction: str) -> Iterator[None]:
    recorded = nullcontext() if recorder is None else recorder.expert_pass(layer, direction)
    with recorded, profiler_labels.of_layer(profiler_labels.EXPERTS, layer, direction):
        yield


class _InBackward(torch.autograd.Function):
    """Returns its first argument. Backward calls the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], Any]) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Under a checkpoint, reading a saved tensor runs the second forward pass: not backward.
        _ = ctx.saved_tensors
        ctx.call()
        return grad, None


class _WithLoss(torch.autograd.Function):
    """Returns its first argument. Backward gives the second, a loss, the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)
