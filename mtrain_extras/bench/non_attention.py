"""`mtrain profile non-attention`: time a training step without attention, on one device.

`simulation.non_attention_cost` counts the work of the same parts: a layer, the loss with LM head
and embedding, and the estimate of an index.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.parallelize import set_execution
from mtrain_cli.model.rope import rope_factor, rotation
from mtrain_cli.parallel.context_attention import DynamicIndex
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, INDEX, Recorder
from mtrain_cli.simulation.calibration import LOSS
from mtrain_cli.simulation.calibration_files import NON_ATTENTION_FILE
from mtrain_cli.simulation.non_attention_cost import ComputeCost, NonAttentionCost
from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.resolution import ResolvedRun, compute_dtype, resolve_run
from mtrain_cli.training.run_plan import RunPlan
from mtrain_extras.bench.timing import WARM_UP, median_ms


@dataclass(frozen=True, kw_only=True)
class NonAttentionTime:
    """Median time of one part of a step.

    part: forward or backward (with recomputation) of a layer without attention; loss: embedding,
        last norm, LM head and loss, both passes; index: estimate of one index.
    rows: tokens in a tile of the MLP.
    flop, moved: FLOP of matrix products, and bytes that element-wise kernels move, as the simulator
        counts them; 0 for an index.
    """

    part: str
    tokens: int
    rows: int
    ms: float
    flop: float
    moved: float
    heads: int


def profile_non_attention(configs: Sequence[Config], repeats: int) -> Iterator[NonAttentionTime]:
    """Yield the times of all parts. configs: of one worker, one per number of tokens."""
    for config in configs:
        torch.compiler.reset()  # each length compiles anew, and PyTorch caps recompilations
        environment = resolve_environment(config)
        choices = resolve_run(config, environment)
        plan = RunPlan.of(config, environment, Hardware.here(environment.device), choices)
        work = NonAttentionCost.of(plan)
        tokens = plan.layout.tokens_per_worker * config.train.micro_batch
        bench = _Bench(config, choices, torch.device(environment.device))
        forward, backward = bench.layer(tokens, repeats)
        parts = [
            (FORWARD, forward, work.forward),
            (BACKWARD, backward, work.backward + work.recomputed),
            (LOSS, bench.loss(tokens, repeats), work.loss),
        ]
        if choices.pattern is not None:
            parts.append((INDEX, bench.index(config.seq, repeats), ComputeCost()))
        heads = config.model.num_heads
        for part, ms, cost in parts:
            # Less FLOP than run in fp8: a time then serves runs with and without fp8.
            yield NonAttentionTime(
                part=part, tokens=tokens, rows=work.rows, ms=ms, flop=cost.timed_flop,
                moved=cost.moved, heads=heads,
            )  # fmt: skip


class _Bench:
    """The layers of a model on one device, with whole weights as after FSDP2's all-gather."""

    def __init__(self, config: Config, choices: ResolvedRun, device: torch.device) -> None:
        self.config, self.choices, self.device = config, choices, device
        with torch.device("meta"):
            decoder = Decoder(config.model, rope_factor(config.model.rope, config.seq))
        set_execution(decoder, config, compile=choices.compile)
        self.decoder = decoder.to(choices.dtype).to_empty(device=device)
        self.generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for parameter in self.decoder.parameters():
                parameter.normal_(0, 0.02, generator=self.generator)

    def layer(self, tokens: int, repeats: int) -> tuple[float, float]:
        """Return the ms of one layer, forward and backward."""
        decoder, recorder = self.decoder, Recorder(self.device)
        start = self._numbers(1, tokens, self.config.model.hidden_size).requires_grad_()
        gradient = self._numbers(*start.shape)
        rope = rotation(
            self._positions(tokens),
            decoder.inverse_frequencies_F.to(self.device),
            decoder.attention_factor,
        )
        moments = []
        for _ in range(WARM_UP + repeats):
            began, out = recorder.now(), start
            for layer in decoder.layers:
                out = layer(out, rope, _no_attention)
            between = recorder.now()
            out.backward(gradient)
            moments.append((began, between, recorder.now()))
            decoder.zero_grad(set_to_none=True)
            start.grad = None
            del out
        seconds = [
            [recorder.seconds(*pair) for pair in itertools.pairwise(of_step)]
            for of_step in moments[WARM_UP:]
        ]
        forward, backward = (statistics.median(of_pass) for of_pass in zip(*seconds, strict=True))
        return forward * 1e3 / len(decoder.layers), backward * 1e3 / len(decoder.layers)

    def loss(self, tokens: int, repeats: int) -> float:
        decoder, layers = self.decoder, self.decoder.layers
        drawn = torch.randint(
            self.config.model.vocab_size, (1, tokens), generator=self.generator, device=self.device
        )

        def both() -> None:
            decoder(drawn, self._positions(tokens), drawn, _no_attention, 1.0 / tokens).backward()
            decoder.zero_grad(set_to_none=True)

        decoder.layers = nn.ModuleList()
        try:
            return median_ms(both, self.device.type, repeats)
        finally:
            decoder.layers = layers

    def index(self, seq: int, repeats: int) -> float:
        model, pattern = self.config.model, self.choices.pattern
        assert pattern is not None
        queries, keys = (
            self._numbers(1, seq, heads, model.head_dim)
            for heads in (model.num_heads, model.num_kv_heads)
        )
        masks, request = [SequenceMask.causal(seq, seq)], pattern.request()
        masked = MaskedPositions.make(masks, request.block, bitmap=request.bitmap)
        estimates = DynamicIndex(pattern, masked.to(self.device))

        def estimate() -> None:
            estimates.kept.clear()
            estimates.records.clear()
            estimates.of(0, queries, keys)

        return median_ms(estimate, self.device.type, repeats)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(
            self.choices.dtype
        )

    def _positions(self, tokens: int) -> torch.Tensor:
        return torch.arange(tokens, device=self.device)[None]


class _NoAttention(torch.autograd.Function):
    """Returns the queries, and zero gradients for keys and values."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.shapes = k, v
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (dout,), (k, v) = grad_outputs, ctx.shapes
        return dout, torch.zeros_like(k), torch.zeros_like(v)


def _no_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int,  # noqa: ARG001
) -> torch.Tensor:
    return _NoAttention.apply(q, k, v)


def about(config: Config, device: str) -> dict[str, Any]:
    """Return what a file of times says about them."""
    return {
        "kind": NON_ATTENTION_FILE,
        "device": device,
        "dtype": compute_dtype(config, device),
        "model": config.model.name,
        "pattern": config.sparsity.pattern,
        "activation_checkpoint": config.train.activation_checkpoint,
        "keep_mlp": config.train.keep_mlp,
    }
