"""NVTX ranges have few names, and cost nothing without a profiler."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from parallel.test_recording import HEAD_DIM, HEADS, KV_HEADS, SEQ
from parallel.ways import make_attention, qkv

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import SlidingWindow
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.data.dataset import Sample
from mtrain_cli.parallel import nvtx_ranges
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import Recorder
from mtrain_cli.training.batch import AttentionSetup, Batches, Layouts


class Domain:
    """A fake NVTX domain with a listener."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int] | None] = []
        self.made = 0

    def get_event_attributes(self, message, color, category, payload):
        assert color
        assert category
        self.made += 1
        return message, payload

    def push_range(self, attributes):
        self.said.append(attributes)

    def pop_range(self):
        self.said.append(None)


@pytest.mark.parametrize("recording_too", [False, True])
def test_nvtx_ranges_have_few_names_and_the_step_as_payload(monkeypatch, recording_too):
    domain = Domain()
    ranges = nvtx_ranges.NvtxRanges(domain)
    monkeypatch.setattr(nvtx_ranges, "listener", lambda: ranges)
    layout = make_layout("striped", 1, SEQ, 4)
    exchange = make_exchange("all_gather", layout, ContextGroup())
    attend = make_attention(
        exchange, SdpaKernel(), [SequenceMask.causal(SEQ, layout.padded_seq)], "cpu"
    )
    recorder = Recorder(torch.device("cpu"))
    if recording_too:
        exchange.set_recorder(recorder)
        recorder.start()
    q, k, v = qkv(SEQ, HEADS, KV_HEADS, HEAD_DIM)
    for layer in range(3):
        attend(q, k, v, layer).sum().backward()
    depth = list(itertools.accumulate(1 if said else -1 for said in domain.said))
    assert min(depth) == 0 == depth[-1], "every range ends"
    names: dict[str, set[int]] = defaultdict(set)
    for said in filter(None, domain.said):
        names[said[0]].add(said[1])
    wanted = {"attention.forward", "attention.backward", "arrange.forward", "arrange.backward"}
    assert set(names) == wanted | ({"pass.forward", "pass.backward"} if recording_too else set())
    assert names["attention.forward"] == {0}
    assert domain.made == len(names), "what a range says is made once"


def test_layers_with_different_masks_have_a_range_of_their_kind(monkeypatch):
    domain = Domain()
    ranges = nvtx_ranges.NvtxRanges(domain)
    monkeypatch.setattr(nvtx_ranges, "listener", lambda: ranges)
    layout = make_layout("striped", 1, SEQ, 4)
    exchange = make_exchange("all_gather", layout, ContextGroup())
    mask = MaskRule(False, SlidingWindow(3, full_every=2))
    setups = AttentionSetup(SdpaKernel(), mask).by_kind(3)
    make = Batches(Layouts(exchange), setups, torch.device("cpu"), layers=3)
    attend = make([Sample(*np.zeros((3, SEQ), np.int32))]).attention
    q, k, v = qkv(SEQ, HEADS, KV_HEADS, HEAD_DIM)
    for layer in range(3):
        attend(q, k, v, layer).sum().backward()
    of_layers = [said for said in domain.said if said and " layer." in said[0]]
    assert of_layers == [
        (f"{kind} layer.{direction}", layer)
        for layer, kind in enumerate(("window", "full", "window"))
        for direction in ("forward", "backward")
    ]
    # The ranges of the passes lie inside.
    assert domain.said[0] == of_layers[0]
    assert domain.said[-1] is None
    assert domain.said[1] == ("attention.forward", 0) or domain.said[1][0] == "arrange.forward"


def test_range_names():
    assert nvtx_ranges.name("wait", "forward", "inner") == "wait.inner"
    assert nvtx_ranges.name("index", "forward", "") == "index"
    assert nvtx_ranges.name("attention", "backward", "") == "attention.backward"


def test_there_is_no_listener_by_default():
    assert nvtx_ranges.listener() is None
    with nvtx_ranges.span("attention", "forward", "", 0):
        pass
