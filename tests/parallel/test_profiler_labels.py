"""Labels appear in a profile, innermost last, and are free without one."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from mtrain_cli.parallel import profiler_labels
from mtrain_cli.parallel.profiler_labels import ATTENTION, INDEX, PREFIX, label


def test_a_label_is_a_range_around_what_it_encloses():
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        with label(ATTENTION), label(INDEX):
            torch.ones(3).sum()
        torch.ones(3).prod()
    spans = {e.name: e.time_range for e in recorded.events()}
    outer, inner = spans[f"{PREFIX}{ATTENTION}"], spans[f"{PREFIX}{INDEX}"]
    assert outer.start <= inner.start <= spans["aten::sum"].start
    assert spans["aten::sum"].end <= inner.end <= outer.end < spans["aten::prod"].start


def test_labels_are_one_object_that_does_nothing_without_a_profiler():
    assert label(ATTENTION) is label(INDEX) is profiler_labels._NOTHING


def test_a_label_names_the_pass_of_a_layer():
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        entered = profiler_labels.of_layer(profiler_labels.EXPERTS, 12, "forward")
        with entered:
            torch.ones(3).sum()
    (name,) = (e.name for e in recorded.events() if e.name.startswith(PREFIX))
    assert name == "mtrain.experts/12/forward"
    assert profiler_labels.of_layer("router", 0, "forward") is profiler_labels._NOTHING
