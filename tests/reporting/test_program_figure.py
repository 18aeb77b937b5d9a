"""The figure of a program shows every operation of the program, on the ranks where it runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic_records import Play, facts_of, ring, rows_of, write

from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Compute, Wait
from mtrain_cli.reporting.program_figure import (
    DIRECTIONS,
    RANKS,
    DrawnExchange,
    place,
    program_figure,
    program_table,
    transfers,
)
from mtrain_cli.reporting.report_source import ReportSource, open_source

# (label of the exchange, schedule)
EXCHANGES = {
    "ring": ("ring", ring(4)),
    "queries": ("ring (queries circulate in backward)", ring(4, circulates="queries")),
    "hierarchical_ring": ("hierarchical_ring", ring(8, 4, "hierarchical_ring")),
    "all_gather": ("all_gather (2 parts of the heads)", ring(4, 0, "all_gather", chunks=2)),
    "group_cast": ("group_cast (2 parts of the heads)", ring(4, 0, "group_cast", chunks=2)),
    "two casts": ("hierarchical_group_cast", ring(4, 2, "hierarchical_group_cast")),
    "stages": (
        "hierarchical_group_cast (2 stages of received keys, 2 stages in backward)",
        ring(4, 2, "hierarchical_group_cast", stages=2, stages_backward=2),
    ),
    "ulysses": ("ulysses over 4", ring(4, 0, "all_gather", heads=4)),
}


def source_of(folder: Path, name: str) -> ReportSource:
    label, schedule = EXCHANGES[name]
    facts = facts_of(schedule, exchange=label, num_heads=8, num_kv_heads=4)
    return open_source(write(folder, [rows_of(Play(schedule))], [facts]))


def bars(data: list[dict], group: str, rank: int) -> list[int]:
    """Return the indices of a rank's bars in the traces of a legend entry."""
    (trace,) = [trace for trace in data if trace["name"] == group]
    return [i for i, y in enumerate(trace["y"]) if round(y) == rank]


@pytest.mark.parametrize("name", EXCHANGES)
def test_bars_are_the_operations_of_the_program(name, tmp_path):
    source = source_of(tmp_path, name)
    (case,) = source.cases
    exchange = DrawnExchange.of(source, case)
    assert exchange is not None
    schedule = EXCHANGES[name][1]
    figure = program_figure([(case.label, source, case)])
    assert [view.labels[1] for view in figure.views] == list(DIRECTIONS)
    for view in figure.views:
        backward = view.labels[1] == "backward"
        traces = {trace["name"]: trace for trace in view.data}
        for rank in range(schedule.workers):
            program = lower(schedule, rank, backward=backward)
            computes = [traces["compute"]["text"][i] for i in bars(view.data, "compute", rank)]
            steps = (schedule.backward if backward else schedule.forward)[rank]
            if schedule.stages:
                expected = [f"*{s.stage}" if s.stage else str(rank) for s in steps if s.queries]
            elif schedule.gathers:
                expected = ["*" for step in steps if step.queries]
            elif backward and schedule.queries_travel:
                expected = [str(step.queries[0]) for step in steps if step.queries]
            else:
                expected = [str(step.keys[0]) for step in steps if step.keys]
            assert computes == expected
            messages = [name for name in traces if name.startswith("message")]
            drawn = sum(len(bars(view.data, name, rank)) for name in messages)
            assert drawn == len(list(program.posts)) > 0
            waits = sum(isinstance(op, Wait) for op in program.operations)
            assert len(bars(view.data, "wait", rank)) == waits


@pytest.mark.parametrize("name", EXCHANGES)
def test_held_bytes_and_messages_follow_the_program(name, tmp_path):
    source = source_of(tmp_path, name)
    exchange = DrawnExchange.of(source, source.cases[0])
    assert exchange is not None
    for direction in DIRECTIONS:
        programs = exchange.programs(direction, RANKS)
        lanes, begins = place(programs, exchange.sizes)
        for program, lane in zip(programs, lanes, strict=True):
            held = [
                sum(program.sizes[b].of(exchange.sizes, program.sharing) for b in live)
                for _, live in program.live()
            ]
            assert [sum(p.held.values()) for p in lane] == pytest.approx(held)
            for post, begin, end in transfers(lane):
                assert end.operation.number == post.transfer.number
                assert begin.end < end.end
            starts = [p.begin for p in lane if isinstance(p.operation, Compute)]
            assert starts == sorted(starts)
            assert all(p.begin >= begins[p.operation.step] for p in lane)


def test_hover_texts_name_peers_shards_and_sizes(tmp_path):
    source = source_of(tmp_path, "ring")
    view = program_figure([("ring", source, source.cases[0])]).views[0]
    (messages,) = [trace for trace in view.data if trace["name"] == "message, context"]
    # 1,024 tokens of 4 KV heads of 32 numbers, keys and values, 4 bytes
    assert messages["customdata"][0] == (
        "step 0, send kv 0, 1.0 MiB, to rank 1, receive 3 from 3, on channel context"
    )
    (held,) = [trace for trace in view.data if trace["name"] == "bytes held"]
    assert "kv 0: 1.0 MiB" in held["customdata"][1]


def test_sizes_count_the_padding_and_the_gathered_columns(tmp_path):
    schedule = ring(4)
    facts = facts_of(schedule, padded_seq=8192, column_width=128, columns=True)
    source = open_source(write(tmp_path, [rows_of(Play(schedule))], [facts]))
    exchange = DrawnExchange.of(source, source.cases[0])
    assert exchange is not None
    assert (exchange.sizes.tokens, exchange.sizes.column_width) == (2048, 128)
    (lane,), _ = place(exchange.programs("forward", 1), exchange.sizes)
    most = {name: size for p in lane for name, size in p.held.items()}
    # Keys and values, 4 bytes: of 2 KV heads of 32 numbers, and of columns for each of 4 heads.
    assert most["kv 0"] == 2 * 2048 * 2 * 32 * 4
    assert most["columns"] == 2 * 128 * 4 * 32 * 4


def test_the_terminal_lists_what_rank_0_sends_while_it_computes(tmp_path):
    source = source_of(tmp_path, "ring")
    table = program_table(source, source.cases[0])
    assert table is not None
    columns = list(zip(*table.cells(), strict=True))
    assert list(columns[2]) == [f"keys of {shard}" for shard in (0, 3, 2, 1, 1, 2, 3, 0)]
    assert columns[3][0] == "send kv 0, 1.0 MiB, to rank 1"
    assert columns[3][3] == ""
    large = ring(16)
    rows = write(tmp_path / "large", [rows_of(Play(large))], [facts_of(large)])
    source = open_source(rows)
    assert program_table(source, source.cases[0]) is None


def test_equal_exchanges_show_once_and_large_groups_show_eight_ranks(tmp_path):
    schedule = ring(16)
    facts = [facts_of(schedule, label=label) for label in ("a", "b")]
    rows = [rows_of(Play(schedule)), rows_of(Play(schedule))]
    rows[1]["case"] = 1
    source = open_source(write(tmp_path, [np.concatenate(rows)], facts))
    figure = program_figure([(case.label, source, case) for case in source.cases])
    assert [view.labels for view in figure.views] == [("a", "forward"), ("a", "backward")]
    assert all(len(view.layout["yaxis"]["tickvals"]) == RANKS for view in figure.views)


def test_one_worker_or_an_unknown_exchange_has_no_figure(tmp_path):
    for name, schedule, label in (("one", ring(1), "ring"), ("new", ring(2), "carrier pigeons")):
        facts = facts_of(schedule, exchange=label)
        source = open_source(write(tmp_path / name, [rows_of(Play(schedule))], [facts]))
        assert program_figure([(case.label, source, case) for case in source.cases]).views == []
