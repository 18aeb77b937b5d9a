"""Rows of several ranks: one clock, peer and late time of waits, work, and loads of experts."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import SlidingWindow
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.composition.compose import compose
from mtrain_cli.data.dataset import Sample
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import NOTHING, MessageTag, Span
from mtrain_cli.profiling import imbalance_benchmark, record_collector
from mtrain_cli.profiling.measurement import TRAINING, MeasurementPlan
from mtrain_cli.profiling.record_collector import (
    Estimated,
    estimated,
    merge_ranks,
    own_loads,
    own_rows,
    own_work,
)
from mtrain_cli.records.expert_loads import ROW as LOADS
from mtrain_cli.records.expert_loads import analyse_experts
from mtrain_cli.records.record_files import ROW, WORDS, open_records
from mtrain_cli.simulation.work_counts import StepWork
from mtrain_cli.training.batch import AttentionSetup, Batches, Layouts
from mtrain_cli.training.router_batches import OwnLoads


def span(
    kind: str,
    start: float,
    end: float,
    message: MessageTag = NOTHING,
    step: int = 0,
    direction: str = "forward",
) -> Span:
    return Span(kind, 0, 0, direction, step, message, start, end - start)


def hop(to: int, source: int, number: int = 0, shard: int = 0, leaving: int = 0) -> MessageTag:
    return MessageTag("inner", "kv", shard, leaving, to, source, 100, number)


def waits(*ranks: list[Span], offsets: tuple[float, ...] = ()) -> list[tuple[int, float]]:
    """Return (peer, late seconds) of every wait."""
    tables = [
        own_rows(spans, rank, (offsets or (0.0,) * len(ranks))[rank], {}, (1.0, 1.0))
        for rank, spans in enumerate(ranks)
    ]
    rows = merge_ranks(tables)
    mine = rows[rows["phase"] == WORDS["phase"].index("wait")]
    return [(int(row["peer"]), round(float(row["late_us"]) / 1e6, 6)) for row in mine]


def moved(message: MessageTag, posted: float, ended: float) -> list[Span]:
    return [span("send", posted, ended, message), span("receive", posted, ended, message)]


def test_late_is_the_time_before_the_sender_posts():
    # A ring of three. Rank 1 waits from 2 to 9 for rank 0, which posts only at 6.
    zero, one, two = hop(1, 2), hop(2, 0), hop(0, 1)
    found = waits(
        [*moved(zero, 6, 9), span("wait", 8, 9, zero, 1)],
        [*moved(one, 1, 9), span("wait", 2, 9, one, 1)],
        [*moved(two, 1, 9), span("wait", 3, 5, two, 1)],
    )
    # Rank 0 waits for rank 2, which posted long before. Rank 2 waits for rank 1, but rank 0 posts
    # the receive of its message even later, at 6.
    assert found == [(2, 0.0), (0, 4.0), (0, 2.0)]


def test_messages_between_two_ranks_match_in_order():
    a, b = (hop(1, 1, 0), hop(1, 1, 1)), (hop(0, 0, 0), hop(0, 0, 1))
    found = waits(
        [
            *moved(a[0], 0, 3),
            *moved(a[1], 5, 8),
            span("wait", 1, 3, a[0], 1),
            span("wait", 6, 8, a[1], 2),
        ],
        [
            *moved(b[0], 2, 3),
            *moved(b[1], 4, 8),
            span("wait", 2, 3, b[0], 1),
            span("wait", 4, 8, b[1], 2),
        ],
    )
    assert found == [(1, 1.0), (1, 0.0), (0, 0.0), (0, 1.0)]


@pytest.mark.parametrize("other", [{"layer": 1}, {"micro": 1}, {"direction": "backward"}])
def test_messages_of_different_passes_do_not_match(other):
    zero, one = hop(1, 1), hop(0, 0)

    def later(spans: list[Span]) -> list[Span]:
        return [replace(s, start=s.start + 100, **other) for s in spans]

    # In the first pass, rank 0 arrives 3 s after rank 1; in the second, both at once; then vice
    # versa.
    late = [*moved(zero, 4, 9)], [*moved(one, 0, 9), span("wait", 1, 9, one)]
    prompt = [*moved(zero, 0, 9)], [*moved(one, 0, 9), span("wait", 1, 9, one)]
    assert waits(late[0] + later(prompt[0]), late[1] + later(prompt[1])) == [(0, 3.0), (0, 0.0)]
    assert waits(prompt[0] + later(late[0]), prompt[1] + later(late[1])) == [(0, 0.0), (0, 3.0)]


def test_a_collective_waits_for_the_last_rank():
    def gather(peers: tuple[int, ...]) -> MessageTag:
        return MessageTag("inner", "kv", number=0, peers=peers)

    left, right = gather((0, 1)), gather((2, 3))
    found = waits(
        *(
            [*moved(message, posted, 9), span("wait", 1, 9, message)]
            for message, posted in ((left, 0), (left, 3), (right, 6), (right, 1))
        )
    )
    # Two separate nodes. The last to arrive waits for no other rank.
    assert found == [(1, 2.0), (-1, 2.0), (-1, 5.0), (2, 5.0)]


def test_rows_use_the_clock_of_the_first_rank():
    zero, one = hop(1, 1), hop(0, 0)
    # The second rank's clock is 100 s ahead.
    tables = [
        [*moved(zero, 4, 9), span("wait", 5, 9, zero)],
        [*moved(one, 102, 109), span("wait", 103, 109, one)],
    ]
    assert waits(*tables, offsets=(0.0, -100.0)) == [(1, 0.0), (0, 1.0)]
    rows = merge_ranks(
        [own_rows(spans, rank, -100.0 * rank, {}, (1.0, 1.0)) for rank, spans in enumerate(tables)]
    )
    assert sorted(set(rows["start_us"])) == pytest.approx(
        [0, 1e6, 2e6, 3e6]
    )  # from the earliest span


def test_rows_hold_messages_and_work():
    message = hop(1, 2, 0, shard=2, leaving=0)
    work = {
        (0, 0): {
            "forward": StepWork(
                "forward", np.array([[11, 22]]), np.array([[3, 4]]), np.array([5]), np.array([66])
            ),
            "backward": StepWork(
                "backward", np.array([[44, 55]]), np.array([[6, 7]]), np.array([5]), np.array([88])
            ),
        }
    }
    spans = [
        span("pass", 0, 9, step=-1),
        *moved(message, 0, 1),
        span("attention", 1, 2, step=0),
        span("columns", 2, 3, step=0),
        span("columns", 3, 4, step=1),
        span("attention", 4, 5, step=1),
        span("attention", 5, 6, step=1, direction="recompute"),
        span("attention", 6, 7, step=0, direction="backward"),
    ]
    rows = merge_ranks([own_rows(spans, 0, 0.0, work, (2.0, 5.0))])
    assert rows.dtype == ROW
    words = {name: [options[code] for code in rows[name]] for name, options in WORDS.items()}
    sent, received = rows[words["phase"].index("send")], rows[words["phase"].index("receive")]
    assert (sent["peer"], sent["shard"], sent["bytes"]) == (1, 0, 100)
    assert (received["peer"], received["shard"], received["bytes"]) == (2, 2, 100)
    computed = [i for i, phase in enumerate(words["phase"]) if phase in ("attention", "columns")]
    # Single columns count with their first kernel.
    assert [int(rows["pairs"][i]) for i in computed] == [11, 66, 0, 22, 22, 44]
    assert [int(rows["blocks"][i]) for i in computed] == [3, 0, 0, 4, 4, 6]
    assert [int(rows["columns"][i]) for i in computed] == [0, 5, 0, 0, 0, 0]
    assert [float(rows["flop"][i]) for i in computed] == [22, 132, 0, 44, 44, 220]


def aligned(rank: int, world: int) -> tuple[float, float, float]:
    """Align ranks as if on separate machines, with clocks 1000 s apart.

    Returns offset, uncertainty and the true offset.
    """
    real = time.perf_counter
    ahead = 1000.0 * rank
    record_collector._boot = lambda: f"machine {rank // 2}"
    ahead = 1000.0 * (rank // 2)
    record_collector.time.perf_counter = lambda: real() + ahead
    try:
        found = record_collector.align_clocks(
            rank, record_collector.boots_of_all(world, dist.group.WORLD), dist.group.WORLD
        )
    finally:
        record_collector.time.perf_counter = real
    return found.offset, found.uncertainty, -ahead


def test_clocks_of_other_machines_are_measured():
    found = gloo.run(3, aligned)
    assert found[0] == (0.0, 0.0, 0.0)
    assert found[1] == (0.0, 0.0, 0.0), "processes of one machine share its clock"
    offset, uncertainty, truth = found[2]
    assert 0 < uncertainty < 0.5
    assert abs(offset - truth) <= uncertainty


def test_a_wait_for_a_stage_is_late_until_its_pass_ends():
    """Rank 1 waits from 0 to 6 for the forward pass of rank 0, which ends at 5."""

    def passed(start: float, end: float, stage: int, direction: str) -> Span:
        return span("stage", start, end, NOTHING, stage, direction)

    def arrives(source: int, payload: str) -> MessageTag:
        return MessageTag("stage", payload, source=source, size=100)

    left = MessageTag("stage", "gradients", to=0, size=100)
    found = waits(
        [
            passed(1, 5, 0, "forward"),
            span("wait", 5, 13, arrives(1, "gradients"), 0, "backward"),
            passed(13, 14, 0, "backward"),
        ],
        [
            span("wait", 0, 6, arrives(0, "activations"), 1, "forward"),
            passed(6, 8, 1, "forward"),
            passed(8, 12, 1, "backward"),
            span("wait", 12, 13, left, 1, "backward"),
        ],
    )
    # The last wait is for a receiver, which never computes too long.
    assert found == [(1, 7.0), (0, 5.0), (0, 0.0)]


SEQ, BLOCK, HEADS = 64, 16, 2


def slashes(*chosen: int) -> VerticalSlash:
    on = torch.zeros(1, HEADS, SEQ // BLOCK, dtype=torch.bool)
    on[..., list(chosen)] = True
    return VerticalSlash(BLOCK, SEQ // BLOCK, on, torch.full((1, HEADS, 1), SEQ, dtype=torch.int32))


def test_every_layer_of_every_micro_batch_has_its_own_work():
    exchange = make_exchange(
        "all_gather", make_layout("striped", 1, SEQ, BLOCK, unit=BLOCK), ContextGroup()
    )
    causal = [SequenceMask.causal(SEQ, SEQ)]
    documents = [SequenceMask.from_documents(np.repeat([0, 1], SEQ // 2), SEQ)]
    indices = {0: slashes(0), 1: slashes(0, 1)}
    found = own_work(
        exchange,
        HEADS,
        range(2),
        [
            Estimated(exchange.layout, *computed)
            for computed in ((causal, indices), (documents, indices), (causal, None))
        ],
    )
    own, next_to_it = BLOCK * (BLOCK + 1) // 2, BLOCK * BLOCK
    wanted = {
        (0, 0): 4 * own,
        (0, 1): 4 * own + 3 * next_to_it,
        (1, 0): 4 * own,
        (1, 1): 4 * own + 2 * next_to_it,  # none between the documents
        (2, 0): SEQ * (SEQ + 1) // 2,
        (2, 1): SEQ * (SEQ + 1) // 2,
    }
    assert {key: int(work["forward"].pairs.sum()) for key, work in found.items()} == {
        key: HEADS * pairs for key, pairs in wanted.items()
    }


def test_each_kind_of_layer_has_the_work_of_its_masks():
    layout = make_layout("striped", 1, SEQ, BLOCK, unit=BLOCK)
    exchange = make_exchange("all_gather", layout, ContextGroup())
    rule = MaskRule(True, SlidingWindow(5, full_every=3))
    setups = AttentionSetup(SdpaKernel(), rule).by_kind(7)
    make = Batches(Layouts(exchange), setups, torch.device("cpu"), layers=7)
    documents = np.repeat(np.arange(2, dtype=np.int32), SEQ // 2)
    tokens = np.zeros(SEQ, np.int32)
    batches = [make([Sample(tokens, tokens, of)]) for of in (documents, np.zeros_like(documents))]
    found = own_work(
        exchange, HEADS, range(7), [estimated(b.attention.with_kept_indices()) for b in batches]
    )
    for micro, parts in enumerate((2, 1)):
        length = SEQ // parts
        full, window = length * (length + 1) // 2, 5 * length - 10
        pairs = [int(found[micro, layer]["forward"].pairs.sum()) for layer in range(7)]
        assert pairs == [
            HEADS * parts * (full if layer in (2, 5) else window) for layer in range(7)
        ]


def test_rows_name_layer_expert_and_rank():
    chosen = torch.zeros(4, 3, dtype=torch.float64)
    chosen[1], chosen[3] = torch.tensor([5.0, 1, 0]), torch.tensor([2.0, 2, 2])
    own = OwnLoads((1, 3), (chosen, chosen))
    rows = own_loads(own, 2, 7, 9)
    assert rows["layer"].tolist() == [1, 1, 1, 3, 3, 3]
    assert rows["expert"].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows["tokens"].tolist() == [10, 2, 0, 4, 4, 4]
    assert {name: set(rows[name].tolist()) for name in ("case", "step", "rank")} == {
        "case": {2},
        "step": {7},
        "rank": {9},
    }
    assert len(own_loads(None, 0, 1, 0)) == 0
    assert own_loads(None, 0, 1, 0).dtype == LOADS


def profiled(rank: int, world: int, folder: str) -> None:
    words = "model=tiny_moe seq=75 topology.block_size=16 model.moe.expert_size=20"
    words += " train.global_batch=2 train.micro_batch=1 model.num_layers=2 model.moe.dense_layers=1"
    words += " topology.expert_parallel=2 model.hidden_size=32"
    config = compose(words.split())
    plan = MeasurementPlan(TRAINING, [("a", config)], samples=1, warmup=0, quiet=True)
    plan.save(RunDir(Path(folder)))
    assert not imbalance_benchmark.train_and_record(
        config, RunDir(Path(folder)), gloo.environment(rank, world), False
    )


def test_a_profile_on_two_ranks_counts_every_token_once(tmp_path):
    gloo.run(2, profiled, str(tmp_path))
    recorded = open_records(tmp_path)
    (found,) = analyse_experts(recorded)
    assert (found.layers, found.ranks, found.experts) == ((1,), (0, 1), 8)
    assert found.parallel == 2
    assert found.worker == found.dealt[2]
    frame = recorded.frame()
    spans = frame[frame.phase == "experts"]
    assert set(spans.layer) == {1}
    assert set(zip(spans["rank"], spans.micro, spans.direction, strict=True)) == {
        (rank, micro, direction)
        for rank in (0, 1)
        for micro in (0, 1)
        for direction in ("forward", "recompute", "backward")
    }
    assert (spans.dur_us > 0).all()
    assert found.time is not None
    (result,) = recorded.summary["results"]
    assert result["experts"]["worker"]["mean"] == pytest.approx(found.worker.mean, abs=1e-4)
    assert np.isfinite(result["experts"]["time"]["worker"]["mean"])
