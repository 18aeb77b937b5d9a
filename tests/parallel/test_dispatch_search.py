"""Costs stay exact over swaps, and the result never costs more than the best seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.mask_samples import local_mask, random_mask

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel.dispatch import (
    Assignment,
    ChunkWork,
    RowPrices,
    _by_node,
    best_assignment,
    seeds,
)
from mtrain_cli.parallel.traffic import (
    Nodes,
    count_traffic,
    needs_of_chunks,
    pairs_per_query,
    times_of_rows,
    to_bits,
)

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
def test_the_bound_of_a_swap_is_at_most_its_cost(problem):
    """Else the search would leave out swaps that it never counted."""
    assignment = problem.assignment()
    out, into = problem.swaps(assignment.owner)
    bound = assignment._bound(out, into, assignment.cost)
    assert (bound <= assignment.most_after(out, into, assignment.cost)).all()


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


def test_no_swap_is_made_beyond_the_limit():
    problem = Problem(3, 4, 4)
    found = best_assignment(problem.work, problem.nodes, problem.prices, 0)
    assert found.swaps == 0


@pytest.mark.parametrize(("chunks", "workers"), [(32, 2), (64, 4), (21, 3), (5, 5)])
def test_seeds_give_every_rank_the_same_number_of_chunks(chunks, workers):
    pairs = np.random.default_rng(0).integers(0, 100, chunks)
    made = dict(seeds(pairs, workers))
    assert {"contiguous", "striped"} <= made.keys()
    for owner in made.values():
        assert (np.bincount(owner, minlength=workers) == chunks // workers).all()


def test_seeds_are_the_layouts_of_their_names():
    made = dict(seeds(np.arange(16), 2))
    assert made["contiguous"].tolist() == [0] * 8 + [1] * 8
    assert made["zigzag"].tolist() == [0] * 4 + [1] * 8 + [0] * 4
    assert made["striped"].tolist() == [0, 1] * 8
    largest_first = made["longest first, 8 pieces per worker"]
    assert largest_first.tolist() == [0, 1, 1, 0] * 4
