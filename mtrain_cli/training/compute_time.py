"""How long a worker takes for what is the same work on every worker and waits for none: the measure by which a slow one is found.

Whole steps are no such measure: workers wait for each other many times in one, so that all take as long as the slowest. What is timed here
are the parts behind attention (output projection, norm, MLP) of some layers in the first forward pass of a step: every worker has as many
tokens, and there is no communication inside. On a GPU two events a layer, read a step later; no synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 8  # that are timed, evenly spread


class ComputeTimer:
    """Of one worker. Layers call it by a hook after their forward pass, attention by `around`."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        """layers: of a decoder, sharded already: the hook has to come after those that communicate."""
        self._cuda = device.type == "cuda"
        count = min(LAYERS, len(layers))
        self._chosen = sorted({len(layers) * n // count for n in range(count)})
        self._attention_ended: dict[int, Any] = {}
        self._durations: dict[int, float | tuple[Any, Any]] = {}
        self._events = {n: (_event(), _event()) for n in self._chosen} if self._cuda else {}
        for index in self._chosen:
            layers[index].register_forward_hook(self._layer_hook(index))

    def start_step(self) -> float:
        """A step begins -> seconds of the one before, 0 where there was none. The device has done that one."""
        durations, self._durations, self._attention_ended = self._durations, {}, {}
        if len(durations) < len(self._chosen):
            return 0.0
        return sum(
            t if isinstance(t, float) else t[0].elapsed_time(t[1]) / 1000 for t in durations.values()
        )

    def wrap_attention(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``attend``, with the time at which it is through."""
        return _TimedAttention(attend, self._mark_attention)

    def _mark_attention(self, layer: int) -> None:
        # A recomputed layer attends once more; only its forward pass counts.
        if layer not in self._attention_ended and layer in self._chosen:
            if self._cuda:
                self._events[layer][0].record()
            self._attention_ended[layer] = time.perf_counter()

    def _layer_hook(self, index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if index in self._attention_ended and index not in self._durations:
                if self._cuda:
                    self._events[index][1].record()
                    self._durations[index] = self._events[index]
                else:
                    self._durations[index] = time.perf_counter() - self._attention_ended[index]

        return hook


class _TimedAttention:
    """An attention that is otherwise as it was."""

    def __init__(self, attend: Callable[..., Tensor], mark: Callable[[int], None]) -> None:
        self._attend, self._mark_attention = attend, mark

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        out = self._attend(q, k, v, layer)
        self._mark_attention(layer)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attend, name)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)
