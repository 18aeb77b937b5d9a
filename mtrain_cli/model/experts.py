"""A mixture of experts: many small MLPs in place of a layer's MLP. Each token uses a few of them.

See arXiv:2101.03961 and arXiv:2401.06066 (shared experts).

Shape suffixes: B batch, N local tokens, T = B N, C hidden size, E experts, K chosen experts of a
token, S = T K pairs of a token and an expert, ordered by expert, I width of an expert, W = 2 I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtrain_cli.config.schema import SIGMOID, ModelConfig
from mtrain_cli.model.expert_products import ChunkedExperts, ExpertExecution
from mtrain_cli.model.routing import Decision, Routing, choose, decide_alone, router_logits
from mtrain_cli.parallel import profiler_labels
from mtrain_cli.parallel.layer_groups import own_part
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE, Recorder

if TYPE_CHECKING:
    from mtrain_cli.model.decoder import SwiGLU
    from mtrain_cli.model.expert_parallel import ExpertSharing

BIAS = "selection_bias"  # name of the router's buffer


class Experts(nn.Module):
    """The weights of all experts of a layer.

    gate_up: the gate and the up projection of each expert, ``[E, 2 I, C]``.
    down: the down projection of each expert, ``[E, C, I]``.
    """

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
        self.sharing: ExpertSharing | None = None
        self.execution = ExpertExecution()
        self.gate = nn.Linear(model.hidden_size, model.moe.experts, bias=False)
        self.experts = Experts(model)
        self.shared = shared
        self.register_buffer(BIAS, torch.zeros(model.moe.experts, dtype=torch.float32))

    def forward(
        self, x_BNC: Tensor, routing: Routing | None = None, kept: list[Decision] | None = None
    ) -> Tensor:
        """Return the sum of the chosen experts' outputs, each times its score.

        Args:
            routing: the sequences of the tokens, for the losses of training. None if there are no
                losses, and no token is padding.
            kept: receives the decision, which the second forward pass of a checkpoint takes: other
                rounding would let some tokens have other experts.
        """
        x_TC, again = x_BNC.flatten(0, -2), bool(kept)
        direction = RECOMPUTE if again else FORWARD
        with profiler_labels.of_layer(profiler_labels.ROUTER, self.layer, direction):
            scores, decision, bounds = self._route(x_TC, routing, kept)
        logits_TE, scores_TE, scores_TK = scores
        compute = self.sharing.compute if self.sharing else partial(compute_experts, bounds=bounds)
        options = self.execution
        out_TC = record_experts(
            lambda x_TC: compute(
                x_TC, scores_TK, self.experts, decision, recompute=options.recompute,
                compile=options.compile, inputs_only=again,
            ),
            x_TC, None if routing is None else routing.recorder, self.layer, again=again,
        )  # fmt: skip
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
        degree = 1 if self.sharing is None else self.sharing.group.size
        bounds = self.execution.bounds(x_TC, self.moe, degree=degree)
        plan = None
        if not kept and self.sharing is not None:
            tokens = len(x_TC)
            if routing is None:
                bounds, tokens = self.sharing.agreed(bounds, x_TC.device)
            plan = self.sharing.start_plan(decision, bounds, tokens)
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
        return routing.decide(chosen_TK, scores_TE, self.layer)

    @torch.no_grad()
    def change_bias(self, counts_E: Tensor, step: float) -> None:
        """Raise the bias of experts with fewer tokens than the mean, and lower that of the others.

        counts_E: number of tokens of an optimizer step that chose each expert.
        """
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


def compute_experts(
    x_TC: Tensor,
    scores_TK: Tensor,
    experts: Experts,
    decision: Decision,
    *,
    bounds: list[int],
    recompute: bool,
    inputs_only: bool,
    compile: bool = False,
) -> Tensor:
    """Return the sum over a token's experts of score * down(silu(gate(x)) * up(x)), ``[T, C]``.

    The experts' outputs are not kept for backward: the scores multiply the inputs of the down
    projection instead.

    Args:
        bounds: first token of each chunk, and the number of tokens.
        recompute: let the backward pass compute gate and up again, if there are several chunks.
        inputs_only: compute only what backward needs, and return a placeholder not to be read.
    """
    weights = own_part(experts.gate_up), own_part(experts.down)
    return ChunkedExperts.apply(
        x_TC, scores_TK, *weights, decision, bounds, recompute, compile, inputs_only
    )


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
    span = _BackwardSpan(recorder, layer)
    x_TC = _End.apply(x_TC, span)
    with _pass(recorder, layer, RECOMPUTE if again else FORWARD):
        out_TC = compute(x_TC)
    return _Begin.apply(out_TC, span)


def _pass(recorder: Recorder | None, layer: int, direction: str) -> ExitStack:
    """Return an entered context that records one pass of a layer's experts."""
    with ExitStack() as entered:
        if recorder is not None:
            entered.enter_context(recorder.expert_pass(layer, direction))
        label = profiler_labels.of_layer(profiler_labels.EXPERTS, layer, direction)
        entered.enter_context(label)
        return entered.pop_all()


class _BackwardSpan:
    """The backward pass of the experts, which two nodes of the graph enclose."""

    def __init__(self, recorder: Recorder | None, layer: int) -> None:
        self._recorder, self._layer, self._open = recorder, layer, ExitStack()

    def begin(self) -> None:
        self._open = _pass(self._recorder, self._layer, BACKWARD)

    def end(self) -> None:
        self._open.close()


class _Begin(torch.autograd.Function):
    """Returns its argument. Backward begins the span."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, span: _BackwardSpan) -> Tensor:
        ctx.span = span
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Under a checkpoint, reading a saved tensor runs the second forward pass: not backward.
        _ = ctx.saved_tensors
        ctx.span.begin()
        return grad, None


class _End(torch.autograd.Function):
    """Returns its argument. Backward ends the span."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, span: _BackwardSpan) -> Tensor:
        ctx.span = span
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.span.end()
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
