"""Time a part of the step in which no worker waits for another worker, to find stragglers.

Workers wait for one another many times in a step, so every worker's step takes as long as the
straggler's. In the part of a layer after attention (output projection, norm, MLP), all workers
compute the same number of tokens. Left out are waits for other workers, and the experts: a worker
with popular experts computes more rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mtrain_cli.training.callback import Callback

if TYPE_CHECKING:
    from mtrain_cli.model.decoder import Attend
    from mtrain_cli.training.batch import Batch

LAYERS = 8  # number of layers timed, evenly spread


class ComputeTimer(Callback):
    """Times the part after attention in some layers of one worker, once per step.

    A GPU records two events per layer, which are read one step later, so that the host never waits.

    seconds: of the previous step, summed over the timed layers; 0 if not measured.
    """

    seconds = 0.0

    def __init__(
        self, layers: Mapping[int, nn.Module], device: torch.device, most: int = LAYERS
    ) -> None:
        """Add a forward hook to each timed layer.

        layers: by number, already sharded by FSDP, so that these hooks run after those of FSDP.
        most: number of layers of the worker with the fewest. All workers time as many.
        """
        self._cuda = device.type == "cuda"
        count, numbers = min(LAYERS, len(layers), most), list(layers)
        self._chosen = sorted({numbers[len(layers) * n // count] for n in range(count)})
        self._attention_ended: dict[int, Any] = {}
        self._durations: dict[int, float | tuple[Any, Any]] = {}
        self._waits: list[float | tuple[Any, Any]] = []  # of timed layers, for their tensor group
        self._running = False  # whether a timed layer runs the timed part
        self._events = {n: (_event(), _event()) for n in self._chosen} if self._cuda else {}
        for index in self._chosen:
            layers[index].register_forward_hook(self._layer_hook(index))

    def before_step(self) -> None:
        """Read the times of the previous step. The device must have finished that step."""
        durations, self._durations, self._attention_ended = self._durations, {}, {}
        waits, self._waits, self._running = self._waits, [], False
        complete = len(durations) == len(self._chosen)
        timed = sum(map(_seconds, durations.values())) - sum(map(_seconds, waits))
        self.seconds = timed if complete else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the ``with`` block, a wait for other workers, out of the time of a layer."""
        if not self._running:
            yield
            return
        began = self._now()
        try:
            yield
        finally:
            ended = self._now()
            self._waits.append((began, ended) if self._cuda else ended - began)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = _event()
        event.record()
        return event

    def wrap_attention(self, _batch: Batch, attend: Attend) -> Attend:
        """Return a function that calls `attend` and marks the end of a timed layer's attention."""

        def timed(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            out = attend(q, k, v, layer)
            self._mark_attention(layer)
            return out

        return timed

    def _mark_attention(self, layer: int) -> None:
        # Later micro-batches and recomputation call attention again. Time only the first call.
        if layer not in self._attention_ended and layer in self._chosen:
            if self._cuda:
                self._events[layer][0].record()
            self._attention_ended[layer] = time.perf_counter()
            self._running = True

    def _layer_hook(self, index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if index in self._attention_ended and index not in self._durations:
                self._running = False
                if self._cuda:
                    self._events[index][1].record()
                    self._durations[index] = self._events[index]
                else:
                    self._durations[index] = time.perf_counter() - self._attention_ended[index]

        return hook


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _seconds(duration: float | tuple[Any, Any]) -> float:
    if isinstance(duration, float):
        return duration
    began, ended = duration
    return began.elapsed_time(ended) / 1000
