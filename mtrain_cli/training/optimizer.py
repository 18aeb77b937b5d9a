"""AdamW with float32 states, the learning-rate schedule, and the norm of a worker's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from mtrain_cli.config.schema import Config, OptimConfig
from mtrain_cli.grouping import grouped
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.parallel.layer_groups import copies

GIVEN_WEIGHTS_LR = 2e-5
ADAPTERS_LR = 2e-4  # as in QLoRA (arXiv:2305.14314, table 9)


def peak_learning_rate(config: Config) -> float:
    """Return `optim.lr`, or for `auto` a learning rate that suits the initial weights.

    Random: 2e-3 at width 128, proportional to 1 / width, as Adam needs for hidden matrices (Tensor
    Programs V, table 3). Given: 2e-5, as in MTraining's scripts; 2e-4 for adapters.
    """
    if isinstance(config.optim.lr, float):
        return config.optim.lr
    given = ADAPTERS_LR if config.train.lora.rank else GIVEN_WEIGHTS_LR
    return given if config.train.init_from else 0.256 / config.model.hidden_size


class ShardedAdamW(torch.optim.AdamW):
    """Fused AdamW that steps plain tensors: this worker's shard of each parameter.

    PyTorch's AdamW on DTensors computes the sharding of each result again in every step: 20 ms of
    host time for Qwen2.5-3B, while four H200s idled.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        known = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(p not in self.state for p in known):
            super().step()
            return
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self.state[p] for p in parameters]
            beta1, beta2 = group["betas"]
            adamw(
                _local(parameters),
                _local([p.grad for p in parameters]),
                _local([state["exp_avg"] for state in states]),
                _local([state["exp_avg_sq"] for state in states]),
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def make_optimizer(decoder: nn.Module, optim: OptimConfig) -> ShardedAdamW:
    """Create the optimizer. Weight decay applies to matrices, not to norms or biases."""
    trained = [p for p in decoder.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    decays = (matrices, optim.weight_decay), (vectors, 0.0)
    groups = [{"params": group, "weight_decay": decay} for group, decay in decays if group]
    return ShardedAdamW(groups, betas=optim.betas, eps=optim.eps, fused=True)


class DeviceOptimizer:
    """Weights, gradients and AdamW states on the device. `OffloadedOptimizer` has the same methods.

    masters: the decoder that the optimizer steps and that checkpoints hold.
    last_micro_batch: whether the current backward pass is the last of its step.
    """

    def __init__(
        self, decoder: Decoder, optim: OptimConfig, copies: Callable[[torch.Tensor], int] = copies
    ) -> None:
        """Make the optimizer. copies: returns how many workers hold a parameter's same shard."""
        self.masters = decoder
        self.optimizer = make_optimizer(decoder, optim)
        self.last_micro_batch = True
        self._by_copies = grouped(decoder.parameters(), copies)

    def gradients(self) -> list[torch.Tensor]:
        return local_gradients(self.masters.parameters())

    def squared_norm(self) -> torch.Tensor:
        """Return this worker's part of the squared norm of the gradients, a float32 scalar.

        A shard that n workers hold counts 1/n, so that the sum over workers counts it once.
        """
        device = next(self.masters.parameters()).device
        if list(self._by_copies) == [1]:
            return squared_norm(self.gradients(), device)
        norms = [squared_norm(local_gradients(p), device) / n for n, p in self._by_copies.items()]
        return torch.stack(norms).sum()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, scale: float = 1.0) -> None:
        """Run AdamW with `scale` times the gradients."""
        if scale != 1.0:
            torch._foreach_mul_(self.gradients(), scale)
        self.optimizer.step()

    def send(self) -> None:
        """Do nothing: the masters are on the device already."""


WSD_DECAY = 0.2  # share of the steps after warm-up that decay if optim.decay_steps=auto


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate as a function of the step: linear warm-up, then a decay."""

    kind: str  # `optim.schedule`: cosine, linear, wsd (warmup-stable-decay) or constant
    peak: float  # after warm-up
    ratio: float  # learning rate after the decay / peak
    warmup: int
    begin: int  # first step of the schedule, counted from 0
    steps: int  # of the schedule, after which the rate stays constant
    decay: int  # steps over which the rate falls: in wsd, the last ones; 0 for constant

    @staticmethod
    def of(config: Config) -> LearningRateSchedule:
        optim, begin = config.optim, int(config.optim.rewarm)
        steps, decay = optim.schedule_steps, optim.decay_steps
        steps = config.train.steps - begin if steps == "auto" else int(steps)
        if decay == "auto":
            rest = max(1, steps - 1 - optim.warmup_steps)
            decay = max(1, round(WSD_DECAY * rest)) if optim.schedule == "wsd" else rest
        constant = optim.schedule == "constant"
        return LearningRateSchedule(
            kind=optim.schedule,
            peak=peak_learning_rate(config),
            ratio=1.0 if constant else optim.min_lr_ratio,
            warmup=optim.warmup_steps,
            begin=begin,
            steps=steps,
            decay=0 if constant else int(decay),
        )

    def rate(self, step: int) -> float:
        at = max(0, step - self.begin)
        if at < self.warmup:
            return self.peak * (at + 1) / self.warmup
        if not self.decay:
            return self.peak
        progress = min(1.0, max(0.0, (at - self._falls_from) / self.decay))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.peak * (self.ratio + (1 - self.ratio) * left)

    @property
    def end(self) -> float:
        return self.peak * self.ratio

    @property
    def _falls_from(self) -> int:
        """The last step at the peak rate, as an offset from `begin`."""
        return max(self.warmup, self.steps - 1 - self.decay) if self.kind == "wsd" else self.warmup

    def describe(self, steps: int) -> str:
        """Describe the schedule of a run of `steps` steps. The description counts steps from 1."""
        warm = f"warm up over {self.warmup} steps to" if self.warmup else "start at"
        first = f", from step {self.begin + 1}" if self.begin else ""
        text = f"{self.kind}{first}: {warm} a peak of {self.peak:.2e}"
        if not self.decay:
            return f"{text}, then constant"
        low = self.begin + self._falls_from + 1
        if steps > low:
            text += f", decay to {self.end:.2e} from step {low} to step {low + self.decay}"
        if low + self.decay > steps:
            text += f"; train.steps={steps} ends the run at {self.rate(steps - 1):.2e}"
        return text


@torch.no_grad()  # otherwise autograd records every shard
def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this worker's shards of the gradients as plain tensors."""
    return _local(p.grad for p in parameters if p.grad is not None)


def squared_norm(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of this worker's shards, a float32 scalar on `device`."""
    filled = [g for g in gradients if g.numel()]
    if not filled:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(filled)).square().sum()
