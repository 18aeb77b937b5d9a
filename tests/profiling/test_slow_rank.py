"""A real straggler is named as the cause, although its neighbours are the ones that wait."""

from __future__ import annotations

import time

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from parallel.ways import make_attention
from slow_cases import mostly_slow

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import make_context_group
from mtrain_cli.profiling.record_collector import Estimated, RecordCollector, own_work
from mtrain_cli.records.analysis import CaseAnalysis, analyse
from mtrain_cli.records.record_files import open_records, write_part, write_summary

WORKERS, SEQ, HEADS, SLOW, DELAY = 4, 256, 4, 2, 0.03


class Delayed(SdpaKernel):
    """Slow down like an overheated device."""

    def forward(self, *arguments):
        time.sleep(DELAY)
        return super().forward(*arguments)


def profiled(rank: int, world: int, slow: int | None, exchange_name: str) -> np.ndarray:
    """Record three iterations of two layers. Returns rows on the first rank."""
    group = make_context_group(
        rank, ParallelDims.of(world, cp=world), torch.device("cpu"), per_node=2
    )
    layout = make_layout("striped", world, SEQ, 16)
    exchange = make_exchange(exchange_name, layout, group)
    masks = [SequenceMask.causal(SEQ, layout.padded_seq)]
    attend = make_attention(exchange, Delayed() if rank == slow else SdpaKernel(), masks, "cpu")
    collector = RecordCollector(rank, world, torch.device("cpu"), dist.group.WORLD)
    q, k, v = (
        torch.randn(1, layout.tokens_per_worker, h, 16, requires_grad=True) for h in (HEADS, 2, 2)
    )
    found = []
    for iteration in range(4):
        dist.barrier()
        collector.start()
        exchange.set_recorder(collector.recorder)
        with collector.recorder.iteration():
            for layer in range(2):
                attend(q, k, v, layer).sum().backward()
        exchange.set_recorder(None)
        work = own_work(exchange, HEADS, range(2), [Estimated(layout, masks, None)])
        found.append(collector.collect(0, iteration, work, (64.0, 160.0)))
    return np.concatenate(found[1:])


def analysed(folder, slow: int | None, exchange: str = "ring") -> CaseAnalysis:
    rows = gloo.run(WORKERS, profiled, slow, exchange)[0]
    write_part(rows, folder, 1)
    facts = {
        "label": "a ring", "workers": WORKERS, "cp": WORKERS, "layers": 2, "layout": "striped",
        "steps": {"forward": WORKERS, "backward": WORKERS}, "exchange": exchange,
        "pattern": "dense", "kernel": "sdpa", "model": "tiny", "seq": SEQ, "micro_batch": 1,
        "per_node": 2, "heads": 1, "num_heads": HEADS, "num_kv_heads": 2, "head_dim": 16,
        "density": 1.0,
    }  # fmt: skip
    summary = {"complete": True, "workers": WORKERS, "samples_wanted": 3, "cases": [facts]}
    write_summary(folder, summary)
    (case,) = analyse(open_records(folder))
    return case


@mostly_slow("exchange", ["ring", "hierarchical_ring"], keep=(0,))
def test_a_straggler_is_the_first_cause(tmp_path, exchange):
    case = analysed(tmp_path, SLOW, exchange)
    first = case.causes[0]
    assert first.rank == SLOW, case.causes
    assert first.direction == "forward"
    assert f"for rank {SLOW}" in first.text
    assert "slow or disturbed device" in first.text
    # Work is balanced, time is not.
    assert case.passes["forward"].work.worker.mean < 1.2
    assert case.passes["forward"].time.worker.mean > 2
    # The delay shows in its own attention, and equally in the waits of the other ranks.
    attention = case.passes["forward"].attention.sum(1)
    assert attention[SLOW] == pytest.approx(1e3 * DELAY * WORKERS, rel=0.5)
    assert case.passes["forward"].late.sum(1)[SLOW] < 0.3 * case.passes["forward"].late.sum(1).max()
