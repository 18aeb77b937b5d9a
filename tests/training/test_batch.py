"""Batches share one causal mask, but every batch has its own index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from attention.mask_definitions import question

from mtrain_cli.attention.kernel import by_definition, per_query_head
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import SlidingWindow
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.config.mask_settings import MASKS, MaskSettings
from mtrain_cli.parallel.dispatch import Balancer
from mtrain_cli.parallel.exchange import Exchange, Plan, make_exchange
from mtrain_cli.parallel.layout import Balanced, make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.training.batch import AttentionSetup, Batches, Layouts

SEQ = 64


@dataclass(frozen=True)
class Sample:
    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    slices: np.ndarray | None = None
    positions: np.ndarray | None = None


def batches(
    exchange: Exchange,
    mask: MaskRule,
    pattern: Pattern | None = None,
    *,
    balancer: Balancer | None = None,
    layers: int = 0,
    dense_layers: frozenset[int] = frozenset(),
) -> Batches:
    setups = AttentionSetup(SdpaKernel(), mask, pattern).by_kind(layers, dense_layers)
    return Batches(Layouts(exchange, balancer), setups, torch.device("cpu"), layers=layers)


def test_batches_share_the_causal_mask_but_not_the_index():
    layout = make_layout("striped", 1, SEQ, 1)
    exchange = make_exchange("all_gather", layout, ContextGroup())
    pattern = FixedPattern(block=16, slashes=2, columns=4, density=0.0, seed=0)
    make = batches(exchange, MaskRule(document_mask=False), pattern)
    samples = [Sample(*(np.arange(SEQ, dtype=np.int32) for _ in range(3)))] * 2
    first, second = make(samples).attend, make(samples).attend
    assert second.plan is first.plan
    q, k, v = (torch.randn(2, SEQ, heads, 8) for heads in (4, 2, 2))
    first(q, k, v, 0)
    assert (len(first.index.records), len(first.index.kept)) == (1, 1)
    third = make(samples).attend
    assert [(attend.index.records, attend.index.kept) for attend in (second, third)] == [
        ([], {})
    ] * 2


def test_dense_layers_equal_dense_attention_and_the_others_the_pattern():
    """Also if the batch was prepared for the dense first steps of the run."""
    exchange = make_exchange("all_gather", make_layout("striped", 1, SEQ, 16), ContextGroup())
    pattern = FixedPattern(block=16, slashes=2, columns=4, density=0.0, seed=0)
    mixed = batches(exchange, MaskRule(True), pattern, dense_layers=frozenset({2}), layers=3)
    dense = batches(exchange, MaskRule(True))
    tokens = np.arange(SEQ, dtype=np.int32)
    samples = [Sample(tokens, tokens, np.zeros(SEQ, np.int32))]
    q, k, v = (torch.randn(1, SEQ, heads, 8) for heads in (4, 2, 2))
    (mask,), places = mixed(samples).masks, np.arange(SEQ)
    seen = torch.from_numpy(mask.spans(places, places).seen())
    index = pattern.draw(1, 1, 4, SEQ).allowed(torch.arange(SEQ), torch.arange(SEQ))
    assert not bool((index & seen == seen).all())
    for batch in (mixed(samples), mixed.to_device(dense.on_host(samples))):
        for layer, allowed in ((1, index & seen), (2, seen[None, None])):
            expected, _ = by_definition(*per_query_head(q, k, v), allowed, 8**-0.5)
            out = batch.attention(q, k, v, layer).transpose(1, 2)
            assert torch.allclose(out.double(), expected, atol=1e-5)
        assert [record.layer for record in batch.attend.index.records] == [1]
        assert batch.pairs == mask.pairs


def test_the_plan_is_made_with_the_host_batch(monkeypatch):
    """The training thread only moves it, unless another maker takes the batch."""
    exchange = make_exchange("all_gather", make_layout("striped", 1, SEQ, 16), ContextGroup())
    pattern = FixedPattern(block=16, slashes=2, columns=4, density=0.0, seed=0)
    mask = MaskRule(document_mask=True)
    sparse, dense = batches(exchange, mask, pattern), batches(exchange, mask)
    documents = np.repeat(np.arange(4, dtype=np.int32), SEQ // 4)
    tokens = np.arange(SEQ, dtype=np.int32)
    hosts = [sparse.on_host([Sample(tokens, tokens, documents)]) for _ in range(2)]
    made, make = [], Plan.make

    def counted(*args, **kwargs):
        made.append(1)
        return make(*args, **kwargs)

    monkeypatch.setattr(Plan, "make", counted)
    assert sparse.to_device(hosts[0]).attend.index is not None
    assert not made
    assert dense.to_device(hosts[1]).attend.plan.masked is None
    assert made == [1]
    assert sparse.to_device(hosts[1]).pairs == 4 * (SEQ // 4) * (SEQ // 4 + 1) // 2


def test_batches_with_other_documents_have_plans_of_their_own():
    """Only whole causal sequences share a plan, also when one of them comes first."""
    exchange = make_exchange("all_gather", make_layout("striped", 1, SEQ, 16), ContextGroup())
    make = batches(exchange, MaskRule(document_mask=True))
    tokens = np.arange(SEQ, dtype=np.int32)

    def pairs(*lengths: int) -> tuple[int, float]:
        documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        batch = make([Sample(tokens, tokens, documents)])
        return batch.pairs, batch.attend.plan.pairs

    for lengths in ((SEQ,), (16, 48), (32, 32), (SEQ,), (16, 48)):
        expected = sum(length * (length + 1) // 2 for length in lengths)
        assert pairs(*lengths) == (expected, expected)


def test_a_sequence_that_ends_early_has_a_plan_of_its_own():
    """Its mask leaves out the padding, even if it starts with one document."""
    exchange = make_exchange("all_gather", make_layout("striped", 1, SEQ, 16), ContextGroup())
    make = batches(exchange, MaskRule(document_mask=True))
    tokens = np.arange(SEQ, dtype=np.int32)
    for length in (SEQ, 40, SEQ):
        batch = make([Sample(tokens, tokens, np.zeros(length, dtype=np.int32))])
        assert batch.pairs == length * (length + 1) // 2


class Shuffled:
    """Gives every batch a layout of its own, instead of a balanced one."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def layout(self, _masks) -> Balanced:
        return Balanced.of(self.rng.permutation(8) % 2, 2, SEQ, 8)


def test_a_plan_has_the_layout_of_its_batch():
    """Under a window of 1, packed documents and one document have the same mask."""
    group = ContextGroup(1, (0, 1))
    balancer: Any = Shuffled()
    exchange = make_exchange("group_cast", balancer.layout(()), group)
    mask = MaskRule(True, SlidingWindow(1, full_every=2))
    tokens = np.arange(SEQ, dtype=np.int32)
    make = batches(exchange, mask, layers=2, balancer=balancer)
    rule = MaskRule(document_mask=True)
    first, then = (batches(exchange, rule, balancer=balancer) for _ in range(2))
    layouts = []
    for lengths in ((16, 48), (32, 32), (8, 56)):
        documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        host = make.on_host([Sample(tokens, tokens, documents)])
        layouts.append(host.layout)
        of_kinds = [plan.placement.layout for plan in host.plans.values()]
        assert of_kinds == [host.layout] * 2
        assert host.numbers[1, 0].tolist() == host.layout.positions(1).tolist()
        # A host batch keeps its layout when another maker takes it.
        host = first.on_host([Sample(tokens, tokens, documents)])
        assert then.to_device(host).attend.plan.placement.layout == host.layout
    assert len(set(layouts)) == 3


def maker(mask: MaskSettings, *, document_mask: bool = True) -> Batches:
    exchange = make_exchange("all_gather", make_layout("striped", 1, SEQ, 16), ContextGroup())
    rule = MaskRule(document_mask=document_mask, mask=mask)
    return batches(exchange, rule)


@pytest.mark.parametrize(
    ("mask", "counted"),
    [
        (MASKS["causal"](), range(SEQ)),
        (SlidingWindow(5), range(SEQ)),
        (MASKS["prefix_lm"](prefix=20), range(19, SEQ)),
        (MASKS["block_causal"](block=16), range(15, SEQ, 16)),
        (MASKS["full"](), range(SEQ - 1, SEQ)),
    ],
)
def test_a_label_that_the_mask_shows_is_ignored(mask, counted):
    tokens, one = np.arange(SEQ, dtype=np.int32), np.zeros(SEQ, dtype=np.int32)
    host = maker(mask).on_host([Sample(tokens, tokens, one)])
    labels = host.numbers[2, 0].numpy()
    assert np.flatnonzero(labels >= 0).tolist() == list(counted)
    assert host.valid == len(counted)
    # A document ends the reach of its queries.
    halves = np.repeat(np.arange(2, dtype=np.int32), SEQ // 2)
    host = maker(MASKS["full"]()).on_host([Sample(tokens, tokens, halves)])
    assert np.flatnonzero(host.numbers[2, 0].numpy() >= 0).tolist() == [SEQ // 2 - 1, SEQ - 1]


def test_contexts_start_at_documents_whatever_the_window():
    tokens = np.arange(SEQ, dtype=np.int32)
    halves = np.repeat(np.arange(2, dtype=np.int32), SEQ // 2)
    for mask in (MASKS["causal"](), SlidingWindow(3), MASKS["full"]()):
        for document_mask, middle in ((True, SEQ // 2), (False, 0)):
            make = maker(mask, document_mask=document_mask)
            earlier = make.on_host([Sample(tokens, tokens, halves)]).earlier
            expected = np.arange(SEQ) - np.repeat([0, middle], SEQ // 2)
            assert earlier.tolist() == [expected.tolist()]


def test_batches_of_one_document_share_the_plan_of_any_mask():
    make = maker(MASKS["prefix_lm"](prefix=20))
    tokens, one = np.arange(SEQ, dtype=np.int32), np.zeros(SEQ, dtype=np.int32)
    first, second = (make([Sample(tokens, tokens, one)]) for _ in range(2))
    assert first.attend.plan is second.attend.plan
    assert first.pairs == SEQ * (SEQ + 1) // 2 + 20 * 19 // 2


def test_slices_and_positions_of_a_sample_replace_those_of_the_sequence():
    layout = make_layout("zigzag", 2, SEQ, 4)
    tokens, one = np.arange(SEQ, dtype=np.int32), np.zeros(SEQ, dtype=np.int32)
    restarting = np.concatenate([np.arange(16), *[np.arange(16, 40)] * 2]).astype(np.int32)
    exchange = make_exchange("all_gather", layout, ContextGroup(rank=1, ranks=(0, 1)))
    make = batches(exchange, MaskRule(True))
    host = make.on_host([Sample(tokens, tokens, one, question(16, 2, 24), restarting)] * 2)
    own = layout.positions(1)
    assert host.numbers[1].tolist() == [restarting[own].tolist()] * 2
    assert host.earlier.tolist() == [own.tolist()] * 2
    (plan,) = host.plans.values()
    (mask, _), pairs = plan.masks, 16 * 17 // 2 + 2 * (24 * 16 + 24 * 25 // 2)
    assert (mask.pairs, mask.intervals) == (pairs, 2)
    assert host.valid == 2 * SEQ


def test_a_label_that_slices_show_is_ignored():
    tokens, one = np.arange(SEQ, dtype=np.int32), np.zeros(SEQ, dtype=np.int32)
    slices = np.array([[0, 20, 0, 20, 0], [20, SEQ, 0, SEQ, 1]])
    host = maker(MASKS["causal"]()).on_host([Sample(tokens, tokens, one, slices)])
    labels = host.numbers[2, 0].numpy()
    assert np.flatnonzero(labels >= 0).tolist() == list(range(19, SEQ))
