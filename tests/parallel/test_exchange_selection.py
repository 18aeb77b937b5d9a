"""`auto` gathers if memory allows, uses a ring if not, and hierarchical forms across nodes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError, TopologyConfig
from mtrain_cli.parallel.exchange_selection import (
    ExchangeNeeds,
    choose_exchange,
    gathered_bytes,
    parse_label,
    ring_backward_bytes,
)
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import ShardSizes
from mtrain_cli.parallel.schedule import CONTEXT, Schedule, ScheduleOptions, make_schedule

AUTO = compose([]).topology
SIZES = {"heads": 16, "kv_heads": 2, "head_dim": 128, "dtype_bytes": 2, "device_memory": 8 << 30}
NEEDS = ExchangeNeeds(workers=4, per_node=4, tokens=1 << 17, **SIZES)


def asked(**keys) -> TopologyConfig:
    return replace(AUTO, **keys)


def test_gathered_bytes_count_kv_gradients_and_float32_sums():
    numbers = 2 * 1000 * 2 * 128  # keys and values
    needs = replace(NEEDS, tokens=1000)
    assert gathered_bytes(needs) == numbers * (2 + 2 + 4)
    # For a part: its own and the next part's KV, its gradients and their sums.
    assert gathered_bytes(needs, chunks=2) == numbers // 2 * (2 + 2 + 2 + 4)
    # Two ranks that share heads have one key-value head each.
    assert gathered_bytes(needs, heads=2) == numbers // 2 * (2 + 2 + 4)
    # Of four ranks, two have the same one.
    four = replace(needs, workers=8)
    assert gathered_bytes(four, heads=4) == numbers // 2 * (2 + 2 + 4)


@pytest.mark.parametrize(("kv_heads", "chunks"), [(1, 1), (2, 2), (3, 3), (8, 8)])
def test_auto_takes_the_ring_once_a_gather_exceeds_its_share_of_memory(kv_heads, chunks):
    needs = replace(NEEDS, heads=24, kv_heads=kv_heads)
    fits = int(0.1 * (8 << 30)) // gathered_bytes(replace(needs, tokens=1), 1, chunks)
    chosen = choose_exchange(AUTO, replace(needs, tokens=fits))
    assert (chosen.name, chosen.chunks) == ("all_gather", chunks)
    chosen = choose_exchange(AUTO, replace(needs, tokens=fits + 1))
    assert (chosen.name, chosen.chunks) == ("ring", 1)
    assert "at once, over 10% of 8 GiB" in chosen.reason


def test_a_large_gather_takes_two_parts_and_more_if_memory_is_short():
    needs = replace(NEEDS, heads=32, kv_heads=8)
    of_two = gathered_bytes(replace(needs, tokens=1), 1, 2)
    for tokens, chunks in (
        (1 << 14, 1),
        (1 << 16, 2),
        (int(0.05 * (80 << 30)) // of_two, 2),
        (int(0.05 * (80 << 30)) // of_two + 1, 4),
    ):
        chosen = choose_exchange(AUTO, replace(needs, tokens=tokens, device_memory=80 << 30))
        assert (chosen.name, chosen.chunks) == ("all_gather", chunks), tokens
    odd = replace(needs, kv_heads=3, heads=3, tokens=1 << 17, device_memory=80 << 30)
    assert choose_exchange(AUTO, odd).chunks == 1, "nothing asks for three"
    large = replace(needs, tokens=1 << 21, device_memory=1 << 40)
    assert choose_exchange(asked(chunks=2), large).chunks == 2


def test_one_worker_takes_parts_if_its_float32_query_gradients_are_large():
    alone = replace(
        NEEDS, workers=1, per_node=1, heads=32, kv_heads=8, head_dim=128, device_memory=80 << 30
    )
    fits = int(0.05 * (80 << 30)) // (4 * 32 * 128)
    for tokens, parts in ((fits, 1), (fits + 1, 2), (2 * fits + 2, 4), (64 * fits, 8)):
        chosen = choose_exchange(AUTO, replace(alone, tokens=tokens))
        assert (chosen.name, chosen.chunks) == ("all_gather", parts)
        calls = f"; one kernel call for each of {parts} parts of the heads" if parts > 1 else ""
        assert chosen.reason.endswith(f"nothing moves{calls}")
    assert choose_exchange(asked(chunks=8), replace(alone, tokens=fits)).chunks == 8
    assert choose_exchange(asked(exchange="ring"), replace(alone, tokens=64 * fits)).chunks == 1
    eight = replace(alone, workers=8, per_node=8, tokens=512 * fits)
    assert choose_exchange(asked(exchange="ulysses"), eight).chunks == 1


def test_a_given_number_of_parts_is_used_in_the_choice():
    needs = replace(NEEDS, heads=32, kv_heads=8, device_memory=80 << 30, tokens=1 << 20)
    whole, of_two = gathered_bytes(needs), gathered_bytes(needs, chunks=2)
    assert of_two > 0.1 * (80 << 30)
    assert choose_exchange(AUTO, needs).chunks == 8
    one = choose_exchange(asked(chunks=1), needs)
    assert (one.name, f"would take {whole / 2**30:.1f} GiB at once" in one.reason) == ("ring", True)
    # Asking for two parts means asking for a gather.
    two = choose_exchange(asked(chunks=2), needs)
    assert (two.name, two.chunks) == ("all_gather", 2)
    assert f"2 parts of the heads; gathered KV and dKV take {of_two / 2**30:.1f} GiB" in two.reason


def test_parts_divide_the_heads_that_a_rank_has_left():
    needs = replace(NEEDS, heads=32, kv_heads=8, workers=8, per_node=8, device_memory=80 << 30)
    needs = replace(needs, tokens=1 << 21)
    chosen = choose_exchange(asked(ulysses=4), needs)
    assert (chosen.name, chosen.heads, chosen.chunks) == ("all_gather", 4, 2)
    assert f"{gathered_bytes(needs, 4, 2) / 2**30:.1f} GiB at once" in chosen.reason
    assert choose_exchange(asked(ulysses=8), needs).chunks == 1, "nothing is gathered"


def test_several_nodes_use_hierarchical_exchanges():
    nodes = replace(NEEDS, workers=8, per_node=4)
    assert choose_exchange(AUTO, nodes).name == "hierarchical_all_gather"
    assert choose_exchange(AUTO, replace(nodes, tokens=1 << 24)).name == "hierarchical_ring"
    assert choose_exchange(AUTO, replace(nodes, per_node=1)).name == "all_gather", (
        "one worker a node: there is nothing inside"
    )
    assert choose_exchange(asked(ulysses=2), replace(nodes, per_node=2)).name == "all_gather", (
        "a node is one group"
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "circulates"),
    [(16, 2, "kv"), (16, 16, "queries"), (20, 16, "queries"), (32, 16, "kv")],
)
def test_the_smaller_payload_circulates(heads, kv_heads, circulates):
    needs = replace(NEEDS, heads=heads, kv_heads=kv_heads)
    assert choose_exchange(asked(exchange="ring"), needs).circulates == circulates
    queries, keys = (ring_backward_bytes(needs, what) for what in ("queries", "kv"))
    assert (queries < keys) == (circulates == "queries")
    assert choose_exchange(asked(exchange="ring"), needs).reason == "as configured"
    assert choose_exchange(asked(exchange="all_gather"), needs).circulates == "kv"
    bitmap = replace(needs, index=IndexRequest(128, bitmap=True))
    assert choose_exchange(asked(exchange="ring"), bitmap).circulates == "kv", (
        "rows of a bitmap stay with their queries"
    )


@pytest.mark.parametrize("exchange", ["ring", "hierarchical_ring", "all_gather", "group_cast"])
def test_gradients_in_bfloat16_are_in_the_label_and_send_fewer_bytes(exchange):
    needs, keys = replace(NEEDS, per_node=2, kv_heads=16), {"exchange": exchange}
    rounded = choose_exchange(asked(**keys, gradient_dtype="bfloat16"), needs)
    assert "gradients in bfloat16" in rounded.label
    assert parse_label(rounded.label, 4, 2) == (exchange, rounded.options(4))
    shares = ((Fraction(1), Fraction(1)),) * 3
    sizes = replace(needs.sizes(needs.shard), casts=shares)
    made = (make_schedule(exchange, replace(rounded.options(4), rounds=r)) for r in (False, True))
    exact, less = (lower(schedule, 0, backward=True).sent(sizes) for schedule in made)
    if rounded.queries_travel:
        assert 0.7 < less / exact < 0.8  # 6 of 8 bytes, and statistics of rows
    else:
        assert less / exact == pytest.approx(2 / 3, abs=0.09)
    alone = choose_exchange(asked(gradient_dtype="bfloat16"), replace(needs, workers=1, per_node=1))
    assert not alone.rounds, "nothing travels"


def test_without_grouped_heads_circulating_queries_sends_a_third_less_in_backward():
    """1M tokens, 32 heads of 128, 32 workers (BurstEngine, section 3.1); delta travels, not out."""
    sizes = ShardSizes((1 << 20) // 32, 32, 32, 128, 2)
    keys, queries = (
        lower(
            make_schedule("ring", ScheduleOptions(32, 8, circulates=what)),
            0,
            backward=True,
        ).sent(sizes)
        / 2**30
        for what in ("kv", "queries")
    )
    assert (round(keys, 1), round(queries, 1)) == (46.5, 31.2)


@pytest.mark.parametrize(
    "exchange", ["ring", "all_gather", "hierarchical_ring", "hierarchical_all_gather"]
)
@pytest.mark.parametrize("kv_heads", [2, 16])
def test_bytes_of_a_program_by_hand(exchange, kv_heads):
    """Each of four workers sends KV to three others, and float32 gradients."""
    tokens, heads, dim, e = NEEDS.shard, NEEDS.heads, NEEDS.head_dim, NEEDS.dtype_bytes
    sizes = ShardSizes(tokens, heads, kv_heads, dim, e)

    def sent(schedule: Schedule, rank: int = 0) -> tuple[int, ...]:
        return tuple(lower(schedule, rank, backward=b).sent(sizes) for b in (False, True))

    schedule = make_schedule(exchange, ScheduleOptions(4, 4))
    keys = 3 * tokens * 2 * kv_heads * dim
    for rank in range(4):
        assert sent(schedule, rank) == (keys * e, keys * (e + 4))
    if exchange == "ring":
        queries = make_schedule(exchange, ScheduleOptions(4, 4, circulates="queries"))
        row = heads * dim
        assert sent(queries)[1] == 3 * tokens * (2 * row * e + 2 * 4 * heads + row * 4)
        trading = make_schedule("all_gather", ScheduleOptions(4, 4, heads=4))
        # Three quarters of 16 query heads there and back, and of keys and values there: 16 heads
        # each, or 4, as 2 are repeated for 4 workers.
        traded = {2: 30, 16: 48}[kv_heads] * (1 << 17) // 4 * 128 * 2
        assert sent(trading) == (traded, traded)


def test_ulysses_shares_heads_among_all_workers_or_the_given_number():
    whole = choose_exchange(asked(exchange="ulysses"), NEEDS)
    assert (whole.name, whole.heads, whole.channels) == ("all_gather", 4, ())
    assert "ulysses over 4" in whole.label
    both = choose_exchange(asked(exchange="ring", ulysses=2), NEEDS)
    assert (both.name, both.heads, both.channels) == ("ring", 2, (CONTEXT,))
    assert both.label == "ulysses over 2, then ring"


def test_columns_are_gathered_once_if_they_are_smaller_than_the_keys():
    assert choose_exchange(AUTO, replace(NEEDS, columns=2048)).shared_columns
    assert not choose_exchange(AUTO, replace(NEEDS, columns=20_000)).shared_columns
    assert not choose_exchange(AUTO, replace(NEEDS, columns=None)).shared_columns
    assert choose_exchange(asked(columns="once"), replace(NEEDS, columns=None)).shared_columns
    assert not choose_exchange(asked(columns="in_steps"), replace(NEEDS, columns=1)).shared_columns


@pytest.mark.parametrize(
    ("keys", "needs", "message"),
    [
        (
            {"exchange": "ulysses"},
            {"workers": 3, "per_node": 3},
            "cannot share 16 query heads and 2 key-value heads among 3 workers",
        ),
        ({"ulysses": 8}, {}, "allowed for topology.ulysses: 1, 2, 4"),
        ({"exchange": "ulysses", "ulysses": 2}, {}, "always splits the heads among all 4 workers"),
        ({"ulysses": 2}, {"workers": 6, "per_node": 3}, "nodes of 3"),
        ({"exchange": "ring", "chunks": 2}, {}, "topology.chunks=2: works only with all_gather"),
        (
            {"exchange": "all_gather", "chunks": 3},
            {},
            "does not divide the 2 key-value heads of a worker; allowed: 1, 2",
        ),
        (
            {"exchange": "ulysses", "circulates": "queries"},
            {},
            r"^topology\.circulates=queries: works only with ring and hierarchical_ring, not with "
            r"topology\.exchange=ulysses\. ",
        ),
        (
            {"exchange": "ring", "stages": 2},
            {},
            "topology.stages=2: works only with group_cast and hierarchical_group_cast, not with "
            "topology.exchange=ring. Set topology.stages=auto",
        ),
        (
            {"stages": 2},
            {"tokens": 1 << 12},
            r"not with topology.exchange=auto \(here: all_gather\)",
        ),
    ],
)
def test_invalid_settings_are_refused_with_the_allowed_values(keys, needs, message):
    with pytest.raises(ConfigError, match=message):
        choose_exchange(asked(**keys), replace(NEEDS, **needs))


@pytest.mark.parametrize(
    ("keys", "needs", "stages"),
    [
        ({"exchange": "group_cast"}, {}, 0),
        ({"exchange": "group_cast", "stages": 2}, {}, 2),
        ({"exchange": "group_cast", "stages": 16, "stages_backward": 1}, {}, 3),
        ({"exchange": "group_cast", "stages": 2}, {"workers": 1, "per_node": 1}, 0),
        ({"exchange": "group_cast", "stages": 2, "ulysses": 4}, {}, 0),
        ({"exchange": "group_cast", "stages": 2, "ulysses": 2}, {}, 1),
        ({"exchange": "hierarchical_group_cast", "stages": 3}, {"per_node": 2}, 2),
        ({"exchange": "hierarchical_group_cast", "stages": 3}, {}, 3),
        ({"exchange": "ring", "stages": 0}, {}, 0),
    ],
)
def test_a_group_cast_has_the_stages_that_its_workers_allow(keys, needs, stages):
    needs = replace(NEEDS, tokens=1 << 12, **needs)
    choice = choose_exchange(asked(**keys), needs)
    backward = keys.get("stages_backward", 0)
    assert (choice.stages, choice.stages_backward) == (stages, backward)
    given = keys.get("stages", 0)
    less = f"; topology.stages={given} means {stages}, the most for these workers"
    assert (less in choice.reason) == (given != stages)
    assert "topology.stages_backward=" not in choice.reason
    assert (f"{stages} stages of received keys" in choice.label) == (stages > 0)
    assert (f"{backward} stages in backward" in choice.label) == (backward > 0)
    schedule = make_schedule(choice.name, choice.options(needs.workers))
    assert (schedule.stages, schedule.stages_backward) == (stages, backward)
    if choice.channels:
        parsed = parse_label(choice.label, needs.workers, choice.per_node)
        assert parsed == (choice.name, choice.options(needs.workers))


@pytest.mark.parametrize(
    ("exchange", "hops"), [("ring", 3), ("hierarchical_ring", 3), ("all_gather", 1), ("ulysses", 1)]
)
def test_only_rings_post_hops_ahead(exchange, hops):
    needs = replace(NEEDS, per_node=2, kv_heads=16)
    found = choose_exchange(asked(exchange=exchange, prefetch=3), needs)
    assert found.prefetch == hops
    assert ("hops ahead" in found.label) == (hops > 1)
