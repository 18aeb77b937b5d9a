"""The times of router, experts and their messages, by layer, from a `torch.profiler` trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain_cli.parallel.profiler_labels import EXPERTS, MESSAGE, PREFIX, ROUTER, layer_of
from mtrain_cli.records.trace_spans import NCCL, Span, claim, innermost, inside, launched_in

_OTHER = ""


@dataclass(frozen=True)
class ExpertTime:
    """The time of one pass of a layer with experts, in all recorded steps of one rank.

    layer, direction: number of the layer, and ``forward``, ``recompute`` or ``backward``.
    router: nanoseconds of the router, without its backward pass.
    computing: nanoseconds of the products and element-wise kernels of the experts.
    waiting: nanoseconds of messages of router and experts that do not overlap with computation.
    """

    layer: int
    direction: str
    router: int
    computing: int
    waiting: int


def device_times(
    device: Sequence[Span],
    launches: Mapping[Any, Span],
    spans: Sequence[Span],
    steps: Sequence[Span],
) -> Iterator[tuple[str, bool, int]]:
    """Yield (annotation, whether a wait, nanoseconds) of the work of layers with experts."""
    labels = launched_in(device, launches, spans, _expert_label)
    if not any(labels):
        return
    messages: list[tuple[int, int, str]] = []
    others: list[tuple[int, int, str]] = []
    for span, label in zip(device, labels, strict=True):
        is_message = span.category == "kernel" and NCCL.search(span.name)
        if not is_message:
            others.append((span.begin, span.end, _OTHER))
            if label is not None:
                yield label, False, span.end - span.begin
        elif label is not None:
            messages.append((span.begin, span.end, label))
    free = claim([(s.begin, s.end) for s in steps], others, {_OTHER: 0})
    exposed = dict.fromkeys((label for *_, label in messages), 0)
    claim(free, messages, exposed)
    for label, ns in exposed.items():
        yield label, True, ns


def _expert_label(name: str) -> str | None:
    return name if layer_of(name) is not None else None


def expert_times(times: Iterable[tuple[str, bool, int]]) -> list[ExpertTime]:
    """Add up (annotation, whether a wait, nanoseconds) by layer and direction."""
    sums: dict[tuple[int, str], dict[str, int]] = defaultdict(Counter)
    for annotation, is_wait, ns in times:
        found = layer_of(annotation)
        assert found is not None
        name, layer, direction = found
        sums[layer, direction]["waiting" if is_wait else name] += ns
    return [
        ExpertTime(*key, found[ROUTER], found[EXPERTS], found["waiting"])
        for key, found in sorted(sums.items())
    ]


def thread_times(spans: Sequence[Span], steps: Sequence[Span]) -> Iterator[tuple[str, bool, int]]:
    """Yield (annotation, whether a wait, nanoseconds) of layers with experts.

    The whole time of an annotation counts, except waits for messages inside it.
    """
    own = [s for s in spans if s.category == "user_annotation" and s.name.startswith(PREFIX)]
    own = inside(own, steps)
    waits = [s for s in own if s.name == PREFIX + MESSAGE]
    ranges = [(s, s.name) for s in own if _expert_label(s.name) is not None]
    around = innermost(ranges, [(s.thread, s.begin) for s in waits])
    for span, name in ranges:
        yield name, False, span.end - span.begin
    for span, label in zip(waits, around, strict=True):
        if label is not None:
            yield label, False, span.begin - span.end
            yield label, True, span.end - span.begin
