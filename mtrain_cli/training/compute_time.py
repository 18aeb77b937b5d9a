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
        # Times on a CPU, events on a GPU.
        self._began: dict[int, Any] = {}
        self._spans: dict[int, tuple[Any, Any]] = {}
        self._waits: list[tuple[Any, Any]] = []  # of timed layers, for their tensor group
        self._running = False  # whether a timed layer runs the timed part
        for index in self._chosen:
            layers[index].register_forward_hook(self._layer_hook(index))

    def before_step(self) -> None:
        """Read the times of the previous step. The device must have finished that step."""
        complete = len(self._spans) == len(self._chosen)
        timed = sum(map(_seconds, self._spans.values())) - sum(map(_seconds, self._waits))
        self.seconds = timed if complete else 0.0
        self._began, self._spans, self._waits, self._running = {}, {}, [], False

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
            self._waits.append((began, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wrap_attention(self, _batch: Batch, attend: Attend) -> Attend:
        """Return a function that calls `attend` and marks the end of a timed layer's attention."""

        def timed(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            out = attend(q, k, v, layer)
            # Later micro-batches and recomputation call attention again. Time only the first call.
            if layer not in self._began and layer in self._chosen:
                self._began[layer], self._running = self._now(), True
            return out

        return timed

    def _layer_hook(self, index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if index in self._began and index not in self._spans:
                self._running = False
                self._spans[index] = self._began[index], self._now()

        return hook


def _seconds(span: tuple[Any, Any]) -> float:
    began, ended = span
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000
