"""Time the parts of a layer of experts, each alone, on one GPU. Used by `expert_speed.py`.

Shape suffixes are those of `model/experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from expert_layers import Sizes, guarded, host_seconds_of, mtrain_layer, routing, seconds_of
from torch import Tensor
from torch.nn import functional

from mtrain_cli.model import expert_kernels
from mtrain_cli.model.expert_products import by_place, grouped_rows, grouped_rows_back, grouped_sums
from mtrain_cli.model.experts import MixtureOfExperts, compute_experts
from mtrain_cli.model.routing import Decision, choose, part_of, router_logits

FORWARD, BACKWARD, INSTEAD = "forward", "backward", "instead"


@dataclass(frozen=True)
class Part:
    """A part of the layer.

    group: pass to which it belongs, or `INSTEAD` if the layer does not run it.
    flop, moved: FLOP, and bytes that it must read and write. The rate is that of the FLOP, if any.
    """

    group: str
    name: str
    run: Callable[[], object]
    flop: float = 0.0
    moved: float = 0.0

    def row(self, device: str) -> str:
        """Time the part and return the end of its row."""
        seconds = seconds_of([self.run], device)
        rate = f"{self.flop / seconds / 1e12:.0f} TFLOP/s" if self.flop else ""
        if not rate and self.moved:
            rate = f"{self.moved / seconds / 1e12:.2f} TB/s"
        return f"{1e3 * seconds:.3f} | {rate} |"


@dataclass
class Bench:
    """The layer, its inputs, and the intermediate results from which its parts start."""

    sizes: Sizes
    tokens: int
    module: MixtureOfExperts = field(init=False)
    chunks: list[tuple[slice, Decision]] = field(init=False)

    def __post_init__(self) -> None:
        sizes, moe = self.sizes, self.sizes.model.moe
        self.compile = sizes.device == "cuda"
        self.weights = sizes.weights()
        _, module = mtrain_layer(sizes, self.weights, self.tokens, compile=self.compile)
        assert isinstance(module, MixtureOfExperts)
        self.module, self.routing = module, routing(sizes, self.tokens)
        self.x_TC = sizes.random(self.tokens, sizes.model.hidden_size)
        self.grad_TC = sizes.random(self.tokens, sizes.model.hidden_size)
        self.logits_TE = router_logits(self.x_TC, self.weights[0])
        self.scores_TE = self.logits_TE.softmax(-1)
        chosen = self.scores_TE.topk(moe.top_k)
        self.scores_TK, self.chosen_TK = chosen.values, chosen.indices
        self.decision = self.routing.decide(self.chosen_TK, self.scores_TE, 0)
        self.bounds = module.execution.bounds(self.x_TC, moe, degree=1)
        self.chunks = list(self.cut())

    def cut(self) -> Iterator[tuple[slice, Decision]]:
        """Yield the tokens and the decision of each chunk, as the layer does."""
        if len(self.bounds) == 2:
            yield slice(None), self.decision
            return
        for begin, end in pairwise(self.bounds):
            yield slice(begin, end), part_of(self.decision, begin, end)

    def of_router(self) -> Iterator[Part]:
        """Yield the parts of the router, forward and backward."""
        x, gate, moe = self.x_TC, self.weights[0], self.sizes.model.moe
        logits, scores, tokens = self.logits_TE, self.scores_TE, self.tokens
        flop, in_scores = 2.0 * x.numel() * moe.experts, 4.0 * scores.numel()
        read = float(x.element_size() * x.numel())
        high = torch.promote_types(x.dtype, torch.float32)
        yield Part(FORWARD, "router: product", lambda: router_logits(x, gate), flop)
        yield Part(
            INSTEAD, "router: product of float32 copies",
            lambda: functional.linear(x.to(high), gate.to(high)), flop,
        )  # fmt: skip
        yield Part(FORWARD, "router: softmax", lambda: logits.softmax(-1), 0, 2 * in_scores)
        bias = self.module.selection_bias
        chosen = partial(choose, scores, bias, moe.top_k)
        yield Part(FORWARD, "router: choice of experts", chosen, 0, in_scores)
        yield Part(INSTEAD, "torch.topk", lambda: (scores + bias).topk(moe.top_k), 0, in_scores)
        yield Part(
            FORWARD, "router: order of the pairs, loads",
            lambda: self.routing.decide(self.chosen_TK, scores, 0), 0, 24.0 * tokens * moe.top_k,
        )  # fmt: skip
        yield Part(FORWARD, "router: scores of the chosen", self._chosen_scores)
        yield Part(
            FORWARD, "router: losses and metrics",
            lambda: self.routing.loss(logits, scores, self.decision, 0, count=True),
            0, 2 * in_scores,
        )  # fmt: skip
        if len(self.bounds) > 2:
            name = f"router: decisions of {len(self.bounds) - 1} chunks"
            yield Part(FORWARD, name, lambda: list(self.cut()))
        x_grad, gate_grad = (each.detach().clone().requires_grad_() for each in (x, gate))
        out, grad = router_logits(x_grad, gate_grad), torch.randn_like(logits) * 1e-4
        back = partial(torch.autograd.grad, out, (x_grad, gate_grad), grad, retain_graph=True)
        yield Part(BACKWARD, "router: product", back, 2 * flop)
        copied, weight = x.to(high), gate.to(high)
        yield Part(
            INSTEAD, "router: product, backward, float32",
            lambda: ((grad @ weight).to(x.dtype), grad.t() @ copied), 2 * flop,
        )  # fmt: skip
        leaf = logits.detach().clone().requires_grad_()
        again = leaf.softmax(-1)
        loss = self.routing.loss(leaf, again, self.decision, 0, count=False)
        both = loss, again.gather(1, self.chosen_TK)
        given = torch.ones_like(loss), torch.randn_like(both[1])
        yield Part(
            BACKWARD, "router: losses, softmax",
            lambda: torch.autograd.grad(both, leaf, given, retain_graph=True), 0, 4 * in_scores,
        )  # fmt: skip
        yield Part(INSTEAD, "a copy of the tokens", x.clone, 0, 2 * read)

    def _chosen_scores(self) -> Tensor:
        scores_TK = self.scores_TE.gather(1, self.decision.chosen_TK)
        return scores_TK / scores_TK.sum(-1, keepdim=True)

    def of_experts(self) -> Iterator[Part]:
        """Yield the parts of the experts' forward pass, each over all chunks."""
        x, (_, gate_up, down) = self.x_TC, self.weights
        e, hidden = x.element_size(), x.shape[1]
        top_k, width = self.sizes.model.moe.top_k, self.sizes.model.moe.expert_size
        pairs, flop = self.tokens * top_k, 2.0 * self.tokens * top_k * hidden * width
        ends = [part.ends_E for _, part in self.chunks]
        places = [part.place_S for _, part in self.chunks]
        kernels = expert_kernels

        def dispatched() -> list[Tensor]:
            return [kernels.taken(x[own], part.order_S, top_k) for own, part in self.chunks]

        rows = dispatched()
        wide = [grouped_rows(row, gate_up, end) for row, end in zip(rows, ends, strict=True)]
        scores = [by_place(self.scores_TK[own], part) for own, part in self.chunks]
        inner = [kernels.gated(*each) for each in zip(wide, scores, strict=True)]
        out_TC = torch.empty_like(x)

        def combined() -> None:
            for row, place, end, (own, _) in zip(rows, places, ends, self.chunks, strict=True):
                sums = kernels.summed(row, place, end, top_k)
                if len(self.chunks) > 1:
                    out_TC[own] = sums

        def products(left: list[Tensor], weight: Tensor) -> Callable[[], object]:
            return lambda: [grouped_rows(a, weight, b) for a, b in zip(left, ends, strict=True)]

        of_rows, of_tokens = float(e * pairs * hidden), float(e * self.tokens * hidden)
        yield Part(FORWARD, "experts: dispatch", dispatched, 0, 2 * of_rows)
        yield Part(
            INSTEAD, "dispatch with index_select",
            lambda: [
                x[own].index_select(0, part.order_S // top_k) for own, part in self.chunks
            ], 0, 2 * of_rows,
        )  # fmt: skip
        yield Part(FORWARD, "experts: gate and up", products(rows, gate_up), 2 * flop)
        yield Part(
            FORWARD, "experts: activation",
            lambda: [kernels.gated(*each) for each in zip(wide, scores, strict=True)],
            0, 3.0 * e * pairs * width,
        )  # fmt: skip
        yield Part(FORWARD, "experts: down", products(inner, down), flop)
        yield Part(FORWARD, "experts: sum", combined, 0, of_rows + of_tokens)
        yield from self._backward(rows, wide, inner, scores, ends)

    def _backward(
        self,
        rows: list[Tensor],
        wide: list[Tensor],
        inner: list[Tensor],
        scores: list[Tensor],
        ends: list[Tensor],
    ) -> Iterator[Part]:
        """Yield the products and the activation of the experts' backward pass."""
        _, gate_up, down = self.weights
        pairs, hidden = self.tokens * self.sizes.model.moe.top_k, self.x_TC.shape[1]
        width, e = self.sizes.model.moe.expert_size, self.x_TC.element_size()
        flop = 2.0 * pairs * hidden * width

        def each(function: Callable[..., object], *lists: list[Tensor]) -> Callable[[], object]:
            return lambda: [function(*given) for given in zip(*lists, strict=True)]

        def through(weight: Tensor) -> Callable[..., object]:
            return lambda row, end: grouped_rows_back(row, weight, end)

        yield Part(BACKWARD, "experts: down, input", each(through(down), rows, ends), flop)
        yield Part(
            BACKWARD, "experts: activation",
            each(expert_kernels.gate_backward, wide, inner, scores, ends),
            0, 6.0 * e * pairs * width,
        )  # fmt: skip
        yield Part(BACKWARD, "experts: down, weight", each(grouped_sums, rows, inner, ends), flop)
        yield Part(
            BACKWARD, "experts: gate and up, weight", each(grouped_sums, wide, rows, ends), 2 * flop
        )
        yield Part(
            BACKWARD, "experts: gate and up, input", each(through(gate_up), wide, ends), 2 * flop
        )

    def wholes(self) -> Iterator[Part]:
        """Yield the whole layer, and the experts in one chunk."""
        flop = self.sizes.layer_flop(self.tokens)
        run = torch.no_grad()(lambda: self.module(self.x_TC, self.routing))
        yield Part("", f"layer, forward, chunks: {len(self.bounds) - 1}", run, flop)
        alone = torch.no_grad()(
            lambda: compute_experts(
                self.x_TC, self.scores_TK, self.module.experts, self.decision,
                bounds=[0, self.tokens], recompute=False, inputs_only=False, compile=self.compile,
            )
        )  # fmt: skip
        if len(self.bounds) > 2:
            torch.compiler.reset()  # for this number of tokens only
            yield Part(INSTEAD, "experts, forward, in one chunk", alone, flop)


def parts(sizes: Sizes, tokens: int) -> Iterator[str]:
    """Yield a row for each part of the layer, and for the whole layer."""
    torch.compiler.reset()
    yield "| pass | part | ms | rate |"
    yield "|---" * 4 + "|"
    bench = Bench(sizes, tokens)
    for some in (bench.of_router, bench.of_experts, bench.wholes):
        for part in some():
            yield guarded(f"| {part.group} | {part.name} |", partial(part.row, sizes.device))
        if sizes.device == "cuda":
            torch.cuda.empty_cache()
    host = host_seconds_of(
        torch.no_grad()(lambda: bench.module(bench.x_TC, bench.routing)), sizes.device
    )
    yield f"| | layer, forward: time to queue it on the host | {1e3 * host:.3f} | |"
