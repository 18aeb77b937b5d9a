"""AdamW with float32 states, its schedule, and the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from mtrain_cli.config.schema import Config, OptimConfig

GIVEN_WEIGHTS_LR = 2e-5


def peak_learning_rate(config: Config) -> float:
    """optim.lr, or for ``auto`` a rate that suits the width: 2e-3 at width 128 falling as 1 / width, as hidden matrices want under Adam
    (Tensor Programs V, table 3); 2e-5 for the continued training of a given model (what the released scripts of MTraining use).
    """
    if isinstance(config.optim.lr, float):
        return config.optim.lr
    return GIVEN_WEIGHTS_LR if config.train.init_from else 0.256 / config.model.hidden_size


class ShardedAdamW(torch.optim.AdamW):
    """Fused AdamW whose steps see plain tensors: the part of each parameter that this worker holds.

    PyTorch's own asks for every `DTensor` of five lists how its operation is to be spread, 20 ms a step of Qwen2.5-3B on a host in which
    four H200s stood still. States are made, saved and loaded by PyTorch, as DTensors.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "a step is computed once"
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
    """Matrices and the rest in groups of their own; see `set_hyperparameters`."""
    matrices = [p for p in decoder.parameters() if p.ndim >= 2]
    vectors = [p for p in decoder.parameters() if p.ndim < 2]
    optimizer = ShardedAdamW(
        [{"params": group} for group in (matrices, vectors) if group], fused=True
    )
    set_hyperparameters(optimizer, optim)
    return optimizer


def set_hyperparameters(optimizer: torch.optim.Optimizer, optim: OptimConfig) -> None:
    """All but the learning rate. Weight decay acts on matrices only; norms and biases keep their scale."""
    for group in optimizer.param_groups:
        decays = group["params"][0].ndim >= 2
        group.update(
            weight_decay=optim.weight_decay if decays else 0.0, betas=optim.betas, eps=optim.eps
        )


WSD_DECAY = 0.2  # share of the steps behind the warm-up, where optim.decay_steps=auto


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate as a pure function of the step: linear warm-up, then as ``kind`` says. See `optim.schedule` and its neighbours.

    begin: the step, from 0, at which it begins. steps: that it spans; behind them the rate stays where it ended. decay: steps over which
    the rate falls from the peak to ``ratio`` of it, which for wsd are the last ones; 0 for constant.
    """

    kind: str
    peak: float
    ratio: float
    warmup: int
    begin: int
    steps: int
    decay: int

    @staticmethod
    def of(config: Config) -> LearningRateSchedule:
        optim, begin = config.optim, int(config.optim.rewarm)
        steps = (
            config.train.steps - begin
            if optim.schedule_steps == "auto"
            else int(optim.schedule_steps)
        )
        rest = max(1, steps - 1 - optim.warmup_steps)
        automatic = max(1, round(WSD_DECAY * rest)) if optim.schedule == "wsd" else rest
        constant = optim.schedule == "constant"
        peak = peak_learning_rate(config)
        return LearningRateSchedule(
            kind=optim.schedule,
            peak=peak,
            ratio=1.0 if constant else optim.min_lr_ratio,
            warmup=optim.warmup_steps,
            begin=begin,
            steps=steps,
            decay=0
            if constant
            else automatic
            if optim.decay_steps == "auto"
            else int(optim.decay_steps),
        )

    def rate(self, step: int) -> float:
        """That of step ``step``, 0 = the first of the run."""
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
        """The rate that stays when it has fallen."""
        return self.peak * self.ratio

    @property
    def _falls_from(self) -> int:
        """The last of its own steps, from 0, at the peak."""
        return max(self.warmup, self.steps - 1 - self.decay) if self.kind == "wsd" else self.warmup

    def describe(self, steps: int) -> str:
        """One line. steps: of the whole run; numbers of steps count from 1, as in what a run prints."""
        warm = (
            f"warm-up over {self.warmup} steps to a peak of {self.peak:.2e}"
            if self.warmup
            else f"a peak of {self.peak:.2e} at once"
        )
        first = f", from step {self.begin + 1}" if self.begin else ""
        if not self.decay:
            return f"{self.kind}{first}: {warm}, which stays"
        low, high = (
            self.begin + at + 1 for at in (self._falls_from, self._falls_from + self.decay)
        )
        fall = f"down to {self.end:.2e} from step {low} to step {high}"
        if high < steps:
            return f"{self.kind}{first}: {warm}, {fall}; the last {steps - high} of {steps} steps stay there"
        ended = (
            f"; train.steps={steps} ends it at {self.rate(steps - 1):.2e}" if high > steps else ""
        )
        return f"{self.kind}{first}: {warm}, {fall}{ended}"


@torch.no_grad()  # or every one would become a node of autograd
def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The parts of the gradients that this worker holds."""
    return _local(p.grad for p in parameters if p.grad is not None)


def squared_norm(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares, a float32 scalar on the device; summed over workers it is the square of the global norm."""
    filled = [g for g in gradients if g.numel()]
    if not filled:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(filled)).square().sum()
