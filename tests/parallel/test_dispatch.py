"""Dispatches balance pairs and rows, give ranks equal shares, and are the same everywhere."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.mask_samples import documents, local_mask, random_mask, sliding_window

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.parallel import dispatch
from mtrain_cli.parallel.cast_rows import CastRows
from mtrain_cli.parallel.dispatch import (
    Assignment,
    Balancer,
    ChunkWork,
    Dispatch,
    RowPrices,
    _by_node,
    balance,
    best_assignment,
    chunk_tokens,
    seeds,
)
from mtrain_cli.parallel.layout import Balanced, make_layout
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.parallel.traffic import (
    Nodes,
    count_traffic,
    needs_of_chunks,
    pairs_per_query,
    times_of_rows,
    to_bits,
)

TESTS = Path(__file__).parents[1]


def layout_of(dispatch: Dispatch) -> Balanced:
    seq = len(dispatch.owner) * dispatch.chunk
    return Balanced.of(dispatch.owner, dispatch.traffic.workers, seq, dispatch.chunk)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    workers=st.sampled_from([(1, 1), (3, 3), (4, 2), (8, 4), (5, 1)]),
    chunk=st.sampled_from([1, 6, 8]),
)
def test_a_dispatch_is_counted_as_its_shards_are(seed, workers, chunk):
    rng, (workers, per_node) = np.random.default_rng(seed), workers
    padded = workers * chunk * int(rng.integers(1, 5))
    masks = [random_mask(rng, padded, 2), local_mask(rng, padded)]
    kinds = [masks, masks[:1]]
    dispatch = balance(kinds, workers, chunk, per_node=per_node, layers=[2, 1])
    shards = [layout_of(dispatch).positions(rank) for rank in range(workers)]
    assert all(len(s) == padded // workers and (np.diff(s) > 0).all() for s in shards)
    assert sorted(np.concatenate(shards).tolist()) == list(range(padded))
    block = int(np.gcd(chunk, 128))
    counted = count_traffic(kinds, shards, per_node=per_node, block=block, layers=[2, 1])
    assert dispatch.traffic.pairs.tolist() == counted.pairs.tolist()
    for field in ("inner", "outer"):
        mine, theirs = getattr(dispatch.traffic, field), getattr(counted, field)
        assert mine.sent.tolist() == theirs.sent.tolist()
        assert mine.received.tolist() == theirs.received.tolist()
    assert dispatch.cost.tolist() == counted.cost(250, 1500).tolist()


@pytest.mark.parametrize(("workers", "seed", "mean"), [(4, 1, 8192), (8, 2, 2048), (8, 1, 8192)])
def test_documents_are_balanced(workers, seed, mean):
    mask = documents(1 << 19, mean, seed)
    dispatch = balance([[mask]], workers, chunk_tokens(1 << 19, workers))
    assert dispatch.traffic.imbalance <= 1.03
    assert dispatch.traffic.share_moved(1 << 19) <= 0.25
    zigzag = make_layout("zigzag", workers, 1 << 19, 128)
    shards = [zigzag.positions(rank) for rank in range(workers)]
    assert count_traffic([[mask]], shards).imbalance > 1.3


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("window", [1024, 4096, 32768])
def test_sliding_windows_are_balanced_and_move_their_edges(workers, window):
    mask = sliding_window(1 << 19, window)
    dispatch = balance([[mask]], workers, chunk_tokens(1 << 19, workers))
    assert dispatch.traffic.imbalance <= 1.03
    if window <= 4096:
        assert dispatch.traffic.received.max() <= 2 * window


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize(
    "mask",
    [documents(1 << 16, 2048, 1), documents(1 << 16, 8192, 2), sliding_window(1 << 16, 4096)],
    ids=["documents of 2K", "documents of 8K", "window of 4K"],
)
def test_short_sequences_balance_the_cost_and_the_pairs_if_rows_are_cheap(mask, workers):
    chunk = chunk_tokens(1 << 16, workers)
    priced = balance([[mask]], workers, chunk)
    assert priced.cost.max() <= 1.03 * priced.cost.mean()
    cheap = balance([[mask]], workers, chunk, prices=RowPrices(16, 16))
    assert cheap.traffic.imbalance <= 1.03
    assert priced.traffic.received.sum() <= cheap.traffic.received.sum()


def test_over_nodes_few_rows_enter_a_node():
    mask, chunk = documents(1 << 17, 1024, 2), chunk_tokens(1 << 17, 8)
    aware = balance([[mask]], 8, chunk, per_node=4)
    unaware = layout_of(balance([[mask]], 8, chunk)).positions
    counted = count_traffic([[mask]], [unaware(rank) for rank in range(8)], per_node=4)
    assert aware.cost.max() < counted.cost(250, 1500).max()
    assert aware.traffic.outer.sent.sum() < counted.outer.sent.sum() / 2


def test_over_nodes_two_levels_save_a_fifth_of_the_cost(monkeypatch):
    """Compared with contiguous shards inside the same nodes, and with all seeds of one level."""
    mask, chunk = documents(1 << 17, 2048, 1), chunk_tokens(1 << 17, 16)
    aware = balance([[mask]], 16, chunk, per_node=4)

    def contiguous(_, node, *__) -> np.ndarray:
        return np.arange(len(node)) * 16 // len(node)

    monkeypatch.setattr(dispatch, "_inside_nodes", contiguous)
    one_level = balance([[mask]], 16, chunk, per_node=4)
    assert aware.cost.max() < 0.8 * one_level.cost.max()


def test_over_nodes_all_ranks_relay_the_edge_of_a_window():
    mask = sliding_window(1 << 18, 4096)
    dispatch = balance([[mask]], 16, chunk_tokens(1 << 18, 16), per_node=8)
    assert dispatch.traffic.outer.sent.sum() == 4096
    assert dispatch.traffic.outer.received.max() == 512


def test_two_layers_of_a_kind_equal_two_kinds():
    masks = [documents(4096, 512, 1)], [sliding_window(4096, 700)]
    twice = balance(masks, 4, 128, layers=[2, 1])
    listed = balance([masks[0], *masks], 4, 128)
    assert twice.owner.tolist() == listed.owner.tolist()
    assert twice.cost.tolist() == listed.cost.tolist()


@pytest.mark.parametrize(("workers", "per_node"), [(4, 4), (8, 4), (6, 2)])
@pytest.mark.parametrize("sequences", [1, 2])
def test_group_casts_send_the_rows_that_the_dispatch_counts(workers, per_node, sequences):
    rng, seq = np.random.default_rng(0), workers * 128 * 24
    masks = [
        SequenceMask.from_documents(np.sort(rng.integers(0, 12, seq - 37)), seq)
        for _ in range(sequences)
    ]
    chunk = 3 * 128
    dispatch = balance([masks], workers, chunk, per_node=per_node)
    name = "hierarchical_group_cast" if per_node < workers else "group_cast"
    schedule = make_schedule(name, ScheduleOptions(workers, per_node))
    sent = {"outer": np.zeros((workers, workers), int), "inner": np.zeros((workers, workers), int)}
    for rank in range(workers):
        node = rank // per_node * per_node
        peers = {"inner": range(node, node + per_node)}
        if per_node < workers:
            peers = {"outer": range(rank % per_node, workers, per_node)} | peers
        rows, _ = CastRows.make(layout_of(dispatch), masks, rank, schedule)
        for (level, among), cast in zip(peers.items(), rows.casts, strict=True):
            sent[level][rank, list(among)] = sequences * np.array(cast.sent)
    for level, moved in (("inner", dispatch.traffic.inner), ("outer", dispatch.traffic.outer)):
        assert sent[level].sum(1).tolist() == moved.sent.tolist()
        assert sent[level].sum(0).tolist() == moved.received.tolist()
    assert sent["inner"].any()


def test_padding_costs_nothing():
    mask = SequenceMask.causal(5000, 8192)
    dispatch = balance([[mask]], 4, 128)
    assert dispatch.traffic.pairs.sum() == 5000 * 5001 // 2


def test_every_process_finds_the_same_dispatch():
    code = (
        "from parallel.mask_samples import documents\n"
        "from mtrain_cli.parallel.dispatch import balance\n"
        "print(*balance([[documents(1 << 15, 1024, 5)]], 8, 256, per_node=4).owner)"
    )
    run = [sys.executable, "-c", code]
    answer = subprocess.run(run, cwd=TESTS, capture_output=True, text=True, check=True).stdout
    here = balance([[documents(1 << 15, 1024, 5)]], 8, 256, per_node=4)
    assert answer.split() == [str(rank) for rank in here.owner]


def test_the_script_counts_every_layout_for_eleven_masks():
    script = [sys.executable, TESTS.parent / "profiles/dispatch_balance.py"]
    run = [*script, "--seq", "16384", "--workers", "4", "--per-node", "2"]
    table = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(table) == 2 + 11
    widths = {line.count("|") for line in table}
    assert widths == {8}
    for line in table[2:]:
        costs = [float(cell.split(" / ")[2]) for cell in line.split("|")[2:7]]
        assert costs[-1] <= min(costs) * 1.02
    refused = subprocess.run([*script, "--seq", "1000"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--seq 1000: must be a multiple of 1024 x --workers 8" in refused.stderr


def test_bad_sizes_are_refused():
    mask = sliding_window(1024, 10)
    with pytest.raises(ValueError, match="Pad the masks to a multiple of 384"):
        balance([[mask]], 3, 128)
    with pytest.raises(ValueError, match="gpus_per_node=3: does not divide 4 workers"):
        balance([[mask]], 4, 128, per_node=3)


@settings(deadline=None)
@given(st.integers(1, 1 << 20), st.integers(1, 64), st.sampled_from([1, 16, 64, 128, 256]))
def test_chunks_are_equal_and_need_little_padding(seq, workers, unit):
    chunk = chunk_tokens(seq, workers, unit)
    each = -(-seq // workers)
    assert chunk % unit == 0
    long = each >= 8 * 128
    assert chunk % 128 == 0 or not long
    per_worker = -(-each // chunk)
    assert per_worker <= 64
    assert per_worker * chunk - each < max(chunk, 1)
    if long and unit <= 128:
        assert per_worker >= 4
        assert 2 * chunk >= min(512, each // 8)


@pytest.mark.parametrize(("workers", "heads", "seq"), [(4, 1, 5000), (8, 2, 8000), (6, 3, 999)])
def test_a_balancer_makes_layouts_of_one_shape(workers, heads, seq):
    balancer = Balancer(workers, seq, heads=heads, per_node=workers)
    found = []
    for seed in (1, 2):
        mask = documents(seq, 300, seed)
        layout = balancer.layout([[mask]])
        shards = [layout.positions(rank) for rank in range(workers)]
        assert layout.padded_seq == balancer.padded_seq >= seq
        assert {len(held) for held in shards} == {layout.padded_seq // workers}
        assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(layout.padded_seq))
        # The ranks that share heads hold together what the dispatch gives their group.
        dispatch = balancer.dispatch([[mask]])
        for group in range(workers // heads):
            members = shards[group * heads : (group + 1) * heads]
            assert np.array_equal(np.concatenate(members), layout_of(dispatch).positions(group))
        found.append(layout)
    assert found[0] != found[1]


def test_a_balancer_hands_on_nodes_prices_and_layers():
    seq, masks = 1024, [[sliding_window(1024, 256)], [SequenceMask.causal(1024, 1024)]]
    given = {"prices": RowPrices(7, 11), "layers": (5, 1)}
    balancer = Balancer(8, seq, heads=2, per_node=4, **given)
    found = balancer.dispatch(masks)
    wanted = balance(masks, 4, balancer.chunk, per_node=2, **given)
    assert found.prices == (7, 11)
    assert found.owner.tolist() == wanted.owner.tolist()
    assert found.cost.tolist() == wanted.cost.tolist()
    assert found.traffic.outer.received.tolist() == wanted.traffic.outer.received.tolist()
    assert wanted.traffic.outer.received.any()
    # A node smaller than a group of heads counts as one.
    assert Balancer(8, seq, heads=4, per_node=2).groups_per_node == 1


def test_chunks_hold_whole_units_and_are_even_in_number_where_padding_is_equal():
    assert chunk_tokens(1 << 19, 8, 48) % math.lcm(48, 128) == 0
    assert chunk_tokens(9 * 512 * 4, 4) == 768  # 6 chunks of 768, not 9 of 512


def test_prices_follow_the_cluster():
    assert RowPrices.on(None, 16, 2) == pytest.approx(RowPrices(), rel=0.02)
    cluster = load_cluster("a100_4x8")
    slow = RowPrices.on(cluster, 16, 2)
    inner, outer = (of.collective_bandwidth_gbps.value for of in (cluster.inner, cluster.outer))
    assert slow.outer / slow.inner == pytest.approx(inner / outer, rel=0.02)
    few, many = (RowPrices.on(None, 16, kv_heads).inner for kv_heads in (2, 4))
    assert many == pytest.approx(2 * few, abs=1)


def test_a_given_chunk_replaces_the_chosen_one():
    mask = documents(1 << 14, 1024, 3)
    for chunk in (128, 512, 2048, 3000):
        layout = Balancer(4, 1 << 14, given_chunk=chunk).layout([[mask]])
        assert layout.block_size == chunk
        assert layout.padded_seq % (4 * chunk) == 0
        starts = layout.positions(1).reshape(-1, chunk)
        assert (starts % chunk == np.arange(chunk)).all()


BLOCK = 4
NODES = [(3, 3), (4, 4), (4, 2), (6, 2), (6, 3), (8, 2)]


class Problem:
    """A random batch of masks, cut into chunks."""

    def __init__(self, seed: int, workers: int, per_node: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.nodes = Nodes(workers, per_node)
        self.chunk = BLOCK * int(rng.integers(1, 3))
        self.chunks = workers * int(rng.integers(1, 5))
        padded = self.chunk * self.chunks
        make = [lambda: random_mask(rng, padded, 2), lambda: local_mask(rng, padded)]
        self.masks: list[list[SequenceMask]] = [
            [make[int(rng.integers(2))]() for _ in range(int(rng.integers(1, 3)))]
            for _ in range(int(rng.integers(1, 3)))
        ]
        self.layers = rng.integers(1, 3, len(self.masks)).tolist()
        self.row_prices = rng.integers(0, padded // 2 + 1, 2).tolist()
        self.prices = RowPrices(*(BLOCK * price for price in self.row_prices))
        held = np.repeat(np.eye(self.chunks, dtype=bool), self.chunk // BLOCK, axis=1)
        self.work = ChunkWork(
            pairs_per_query(self.masks, self.layers).reshape(self.chunks, self.chunk).sum(1),
            needs_of_chunks(self.masks, self.chunk, BLOCK),
            to_bits(np.repeat(held[:, None], len(self.masks), axis=1)),
            times_of_rows(self.masks, self.layers),
        )

    def assignment(self) -> Assignment:
        owner = self.rng.permutation(np.arange(self.chunks) % self.nodes.workers)
        return Assignment(self.work, owner, self.nodes, self.prices)

    def counted(self, owner: np.ndarray) -> list[int]:
        """Count the costs from the masks, without the search's state."""
        rank = np.repeat(owner, self.chunk)
        traffic = count_traffic(
            self.masks,
            [np.flatnonzero(rank == r) for r in range(self.nodes.workers)],
            per_node=self.nodes.per_node,
            block=BLOCK,
            layers=self.layers,
        )
        return traffic.cost(*self.row_prices).tolist()

    def swaps(self, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return all pairs of chunks of two ranks of a node."""
        a, b = np.triu_indices(self.chunks, 1)
        node = owner // self.nodes.per_node
        allowed = (owner[a] != owner[b]) & (node[a] == node[b])
        return a[allowed], b[allowed]


problems = st.builds(
    lambda seed, nodes: Problem(seed, *nodes), st.integers(0, 10**6), st.sampled_from(NODES)
)


@settings(max_examples=40, deadline=None)
@given(problems)
def test_costs_stay_exact_over_swaps(problem):
    assignment = problem.assignment()
    assert assignment.cost.tolist() == problem.counted(assignment.owner)
    for _ in range(4):
        a, b = problem.swaps(assignment.owner)
        at = int(problem.rng.integers(len(a)))
        assignment.swap(int(a[at]), int(b[at]))
        assert assignment.cost.tolist() == problem.counted(assignment.owner)
        fresh = Assignment(problem.work, assignment.owner, problem.nodes, problem.prices)
        assert np.array_equal(assignment.needs, fresh.needs)
        assert np.array_equal(assignment.held(), fresh.held())


@settings(max_examples=40, deadline=None)
@given(problems)
def test_the_predicted_cost_of_every_swap_is_its_cost(problem):
    """Also for a swap that follows another one, which leaves nothing outdated."""
    assignment = problem.assignment()
    a, b = problem.swaps(assignment.owner)
    assignment.swap(int(a[0]), int(b[0]))
    a, b = problem.swaps(assignment.owner)
    predicted = assignment.most_after(a, b, assignment.cost)
    before, per_node = assignment.owner, problem.nodes.per_node
    for i in problem.rng.permutation(len(a))[:12]:
        owner = before.copy()
        owner[[a[i], b[i]]] = owner[[b[i], a[i]]]
        changed = [
            rank
            for chunk in (a[i], b[i])
            for rank in range(before[chunk] % per_node, problem.nodes.workers, per_node)
        ]
        assert predicted[i] == max(problem.counted(owner)[rank] for rank in changed)


@settings(max_examples=60, deadline=None)
@given(problems)
def test_the_best_swap_is_the_best_of_all_swaps(problem):
    assignment = problem.assignment()
    cost, per_node = assignment.cost, problem.nodes.per_node
    top = int(np.argmax(cost))
    a, b = problem.swaps(assignment.owner)
    local = assignment.owner % per_node
    changes_top = (local[a] == top % per_node) | (local[b] == top % per_node)
    after = assignment.most_after(a, b, cost)[changes_top]
    limit = cost[top] - cost[top] // 10_000
    found = assignment.best_swap()
    if found is None:
        assert not (after < limit).any()
    else:
        pair = (np.array([chunk]) for chunk in found)
        assert assignment.most_after(*pair, cost)[0] == after.min() < limit


@settings(max_examples=40, deadline=None)
@given(problems)
def test_nodes_cost_at_most_the_best_seed_of_nodes(problem):
    """Pairs of a node, and a price for each block that enters it."""
    nodes, prices = problem.nodes, problem.prices
    owner = _by_node(problem.work, nodes, prices, 100).reshape(-1, nodes.per_node)
    assert (owner == owner[:, :1]).all(), "a node gets as many neighboring chunks as it has ranks"
    merged, single = problem.work.merged(nodes.per_node), Nodes(nodes.count, nodes.count)

    def cost(of_node: np.ndarray) -> int:
        price = RowPrices(prices.outer, 0)
        return int(Assignment(merged, of_node, single, price).cost.max())

    seeded = [cost(of_node) for _, of_node in seeds(merged.pairs, nodes.count)]
    assert cost(owner[:, 0]) <= min(seeded)


@settings(max_examples=60, deadline=None)
@given(problems)
def test_the_result_costs_at_most_the_best_seed(problem):
    found = best_assignment(problem.work, problem.nodes, problem.prices, 100)
    seeded = [
        max(problem.counted(owner)) for _, owner in seeds(problem.work.pairs, problem.nodes.workers)
    ]
    assert max(problem.counted(found.owner)) <= min(seeded)
    counts = np.bincount(found.owner, minlength=problem.nodes.workers)
    assert (counts == problem.chunks // problem.nodes.workers).all()


def test_seeds_are_the_layouts_of_their_names():
    made = dict(seeds(np.arange(16), 2))
    assert made["contiguous"].tolist() == [0] * 8 + [1] * 8
    assert made["zigzag"].tolist() == [0] * 4 + [1] * 8 + [0] * 4
    assert made["striped"].tolist() == [0, 1] * 8
    largest_first = made["longest first, 8 pieces per worker"]
    assert largest_first.tolist() == [0, 1, 1, 0] * 4
