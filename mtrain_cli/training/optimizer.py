"""AdamW with float32 states, its learning rate as a pure function of the step, and the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

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
    optimizer = ShardedAdamW([{"params": group} for group in (matrices, vectors) if group], fused=True)
    set_hyperparameters(optimizer, optim)
    return optimizer


def set_hyperparameters(optimizer: torch.optim.Optimizer, optim: OptimConfig) -> None:
    """All but the learning rate. Weight decay acts on matrices only; norms and biases keep their scale."""
    for group in optimizer.param_groups:
        decays = group["params"][0].ndim >= 2
        group.update(weight_decay=optim.weight_decay if decays else 0.0, betas=optim.betas, eps=optim.eps)


def learning_rate(step: int, steps: int, peak: float, optim: OptimConfig) -> float:
    """Learning rate of step `step` (0 = first) of `steps`: linear warm-up to `peak`, then constant or a cosine to peak * min_lr_ratio."""
    if step < optim.warmup_steps:
        return peak * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return peak
    progress = (step - optim.warmup_steps) / max(1, steps - 1 - optim.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * cosine)


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
