"""Prices of expert-parallel degrees equal a calculation by hand, with round rates."""

from __future__ import annotations

from math import comb
from types import SimpleNamespace

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.traffic import Rates
from mtrain_cli.step.program import Compute, Message, Post, work
from mtrain_cli.training import expert_traffic
from mtrain_cli.training.expert_traffic import ExpertRun, chunks_of_tokens

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
WEIGHTS = 3 * EXPERTS * WIDTH * HIDDEN
HOST = 2.5e-3
LEAVE = 1 - comb(64, 8) / comb(128, 8)  # of the tokens in degree 2
ROUND = Rates(
    flops=1e12, inner=1e9, outer=1e8, memory=1e10, inner_latency=1e-3, outer_latency=2e-3,
    inner_share=0.25, outer_share=0.5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets rates. Before its first call they are round."""

    def set_rates(**changes: float) -> None:
        found = ROUND._replace(**changes)
        monkeypatch.setattr(expert_traffic, "Rates", SimpleNamespace(on=lambda _: found))

    set_rates()
    return set_rates


def run(seq: str, per_node: int, *words: str, degree: int | str = 2, **dims: int):
    """Return a run of the workers of ``dims``, 2 by default."""
    dims = dims or {"cp": 2}
    given = ["model=qwen3_30b_a3b", "model.num_layers=8", f"seq={seq}", *words]
    config = compose([*given, f"topology.expert_parallel={degree}"])
    layout = make_layout("contiguous", dims.get("cp", 1), config.seq, 128)
    return ExpertRun(config, ParallelDims(**dims), layout, 2, per_node)


def seconds_of_messages(tokens: float, latency: float, bandwidth: float) -> list[float]:
    """Return the seconds of rows, of rows with scores, and of rows with their gradients."""
    # There, a pair has a score and a place of four bytes each; back, one gradient.
    sizes = HIDDEN * 2, HIDDEN * 2 + TOP_K * 8, HIDDEN * 2 + TOP_K * 4
    return [latency + LEAVE * tokens * size / bandwidth for size in sizes]


INSIDE, BETWEEN = (1e-3, 1e9, 0.25), (2e-3, 1e8, 0.5)


@pytest.mark.parametrize(
    ("words", "dims", "tokens", "micro_batches"),
    [
        ((), {"cp": 2}, 1024, 1),
        (("train.global_batch=3",), {"cp": 2}, 1024, 3),
        (("train.global_batch=4", "train.micro_batch=2"), {"cp": 2}, 2048, 2),
        (("train.global_batch=4",), {"dp": 2, "cp": 2}, 1024, 2),
        (("topology.tensor_parallel=2", "topology.layout=contiguous"), {"tp": 2}, 1024, 1),
    ],
    ids=["one", "three micro-batches", "two sequences", "replicas", "tensor parallel"],
)
@pytest.mark.parametrize(("per_node", "link"), [(2, INSIDE), (1, BETWEEN)])
def test_products_hide_all_messages_but_those_at_the_ends(
    rates, words, dims, tokens, micro_batches, per_node, link
):
    rates(flops=1e10)
    latency, bandwidth, share = link
    rows, scored, back = seconds_of_messages(tokens, latency, bandwidth)
    # Forward, a message there and one back. In backward, the first rows; the others travel
    # during products, from which they take a share of the GPU.
    waits = HOST + (scored + rows) + rows + share * (rows + back)
    # A token is read for each message there, and written if it leaves: one in forward, two in
    # backward. In both passes, sums are written here and there, and read when they return.
    copied = (1 + 2) * (1 + LEAVE) + (2 + 2) * (1 + LEAVE)
    copies = copied * tokens * HIDDEN * 2 / 1e10
    found = run("2k", per_node, *words, **dims).row_seconds()
    assert found == pytest.approx(micro_batches * (waits + copies))


@pytest.mark.parametrize("kind", ["none", "full"])
def test_short_products_hide_little(rates, kind):
    rates(flops=1e15)
    rows, scored, back = seconds_of_messages(1024, 1e-3, 1e9)
    product = 2 * 1024 * TOP_K * HIDDEN * WIDTH / 1e15
    # With checkpointing the rows travel twice, and two more of eight products run. Between the
    # last rows and the message back lie three products, and three run during that message.
    exposed = 2 * rows + back - 5 * product if kind == "full" else rows + back - 3 * product
    hidden = (2 if kind == "full" else 1) * rows + back - exposed
    waits = HOST + scored + rows + exposed + 0.25 * hidden
    copied = 7 if kind == "full" else 6
    copies = copied * (1 + LEAVE) * 1024 * HIDDEN * 2 / 1e10
    found = run("2k", 2, f"train.activation_checkpoint={kind}").row_seconds()
    assert found == pytest.approx(waits + copies)


@pytest.mark.parametrize(
    ("chunks", "units", "sums"),
    [
        ("auto", 1, 0),
        (2, 2, 2 * 3),  # one addition of two chunks
        (3, 3, 3 * (8 + 2 * 2) + 4 + 2),  # three chunks are added up in float32
    ],
)
def test_each_chunk_has_its_messages(monkeypatch, chunks, units, sums):
    """A worker has 16K tokens."""
    passes = []

    def clocks(program, products, cost):
        posts = {op.message: cost(op) for op in program if isinstance(op, Post)}
        us = {message: found.us for message, found in posts.items() if found is not None}
        part = next(op.rows for op in program if isinstance(op, Compute) and "experts" in op.part)
        passes.append((1 / part, us, sum(work(program, products).values())))
        return SimpleNamespace(exposed=3e6, hidden=8e6, span=5e6)

    monkeypatch.setattr(expert_traffic, "time", clocks)
    given = run("32k", 2, f"topology.expert_chunks={chunks}", "train.tile_mib=0")
    rows, scored, scored_back = seconds_of_messages(16_384 / units, 1e-3, 1e9)
    found = given.row_seconds()
    product = 2e6 * 16_384 * TOP_K * HIDDEN * WIDTH / 1e12
    to_experts = {Message.SCORED: 1e6 * scored, Message.ROWS_BACK: 1e6 * rows}
    back = {Message.ROWS: 1e6 * rows, Message.SCORED_BACK: 1e6 * scored_back}
    for (found_units, us, computing), messages, products in zip(
        passes, (to_experts, back), (3, 8), strict=True
    ):
        assert found_units == pytest.approx(units)
        assert us == pytest.approx(messages)
        assert computing == pytest.approx(products * product)
    copies = (7 * (1 + LEAVE) * 16_384 * HIDDEN * 2 + sums * WEIGHTS / 2) / 1e10
    assert found == pytest.approx(HOST + 2 * (3 + 0.25 * 8) + copies)


def test_a_group_that_does_not_divide_a_node_sends_rows_between_nodes():
    inside, across, apart = (
        run("6k", per_node, degree=4, cp=12).row_seconds() for per_node in (4, 6, 1)
    )
    assert across == apart > 2 * inside


def hidden_and_exposed(seconds: float, overlapping: float, share: float) -> float:
    """Return the seconds that a message costs which travels during a computation."""
    if seconds > overlapping:
        return seconds - overlapping + share * overlapping
    return share * seconds


FULL, GRADIENTS, OPTIMIZER = (f"train.shard={kind}" for kind in ("full", "gradients", "optimizer"))


@pytest.mark.parametrize("per_node", [16, 8])
@pytest.mark.parametrize(
    ("words", "micro_batches", "gathers", "reductions"),
    [
        ((FULL,), 1, (1, 1), 1),
        ((FULL, "train.global_batch=4"), 4, (1, 1), 1),
        ((GRADIENTS,), 1, (1, 0), 1),
        ((GRADIENTS, "train.global_batch=4"), 4, (1 / 4, 0), 1),
        ((OPTIMIZER, "train.global_batch=4"), 4, (1 / 4, 0), 1 / 4),
        ((OPTIMIZER, "train.global_batch=4", "train.micro_batch=2"), 2, (1 / 2, 0), 1 / 2),
    ],
    ids=["full", "full, 4", "gradients", "gradients, 4", "optimizer, 4", "optimizer, 2 of 2"],
)
@pytest.mark.parametrize("degree", [1, 2])
def test_weights_wait_where_computation_is_shorter(
    monkeypatch, rates, degree, words, micro_batches, gathers, reductions, per_node
):
    """A layer computes for 4 s. Experts run for 0.5 s in forward, and rows cost 0.2 s."""
    rates(inner=2e9, outer=1e9)
    monkeypatch.setattr(ExpertRun, "computing", lambda _: 4.0)
    if degree > 1:
        monkeypatch.setattr(ExpertRun, "rows", lambda *_: (0.2, 0.5))
    latency, bandwidth, share = (1e-3, 2e9, 0.25) if per_node == 16 else (2e-3, 1e9, 0.5)
    own = WEIGHTS / degree
    others = own * (1 - degree / 16)
    # A gather reads and writes bfloat16. A reduction reads bfloat16 and writes float32.
    copies = own * ((2 + 2) * sum(gathers) + (2 + 4) * reductions) / 1e10
    forward = gathers[0] * (latency + 2 * others / bandwidth)
    backward = gathers[1] * (latency + 2 * others / bandwidth)
    backward += reductions * (latency + 4 * others / bandwidth)
    # A quarter of the computation is the forward pass. With rows, only experts hide weights there.
    waits = hidden_and_exposed(forward, 1.0 if degree == 1 else 0.5, share)
    waits += hidden_and_exposed(backward, 3.0, share)
    rows = 0.2 * (degree > 1)
    found = run("2k", per_node, *words, degree=degree, cp=16).price(degree).seconds
    assert found == pytest.approx(micro_batches * (4.0 + rows + copies + waits))


@pytest.mark.parametrize(
    "dims", [{"cp": 4}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}], ids=lambda dims: "-".join(dims)
)
def test_all_workers_of_a_stage_share_the_weights(monkeypatch, dims):
    """Four workers of a node, of which each waits for three quarters of the weights."""
    monkeypatch.setattr(ExpertRun, "computing", lambda _: 0.0)
    words = [f"topology.tensor_parallel={dims.get('tp', 1)}", "topology.layout=contiguous"]
    found = run("2k", 4, *words, "train.global_batch=2", degree=1, **dims).price(1).seconds
    # Two gathers in bfloat16 and a reduction in float32, of the others' weights.
    waits = 3e-3 + (2 + 2 + 4) * WEIGHTS * 3 / 4 / 1e9
    copies = ((2 + 2) * 2 + (2 + 4)) * WEIGHTS / 1e10
    assert found == pytest.approx(2 // dims.get("dp", 1) * (waits + copies))


def test_one_worker_of_an_expert_waits_for_no_weights(monkeypatch):
    monkeypatch.setattr(ExpertRun, "computing", lambda _: 0.0)
    monkeypatch.setattr(ExpertRun, "rows", lambda *_: (0.2, 0.5))
    copies = WEIGHTS / 2 * (2 * 2 * 2 + 2 + 4) / 1e10
    assert run("2k", 2).price(2).seconds == pytest.approx(0.2 + copies)


def test_experts_run_as_long_as_their_products_and_messages(monkeypatch):
    """In forward of one chunk: two messages around three products."""
    hidden = []
    monkeypatch.setattr(
        ExpertRun, "weights", lambda _run, _degree, forward, _: hidden.append(forward) or 0.0
    )
    run("2k", 2).price(2)
    rows, scored, _ = seconds_of_messages(1024, 1e-3, 1e9)
    products = 3 * 2 * 1024 * TOP_K * HIDDEN * WIDTH / 1e12
    assert hidden == [pytest.approx(rows + scored + products)]


def computing(seq: str, *words: str, **dims: int) -> float:
    return run(seq, 2, *words, **dims).computing()


def test_workers_share_the_computation_of_a_micro_batch():
    words = "train.global_batch=4", "train.activation_checkpoint=none"
    once = computing("64k", *words, cp=2)
    assert computing("64k", *words, "train.micro_batch=2", cp=2) == pytest.approx(2 * once)
    assert computing("64k", *words, cp=4) == pytest.approx(once / 2)
    assert computing("64k", *words, dp=2, cp=2) == pytest.approx(once)
    assert computing("64k", *words, cp=2, tp=2) == pytest.approx(once / 2)


def test_products_that_are_repeated_cost_time_and_pairs_that_are_skipped_do_not():
    plain, again = (
        computing("8k", f"train.activation_checkpoint={kind}") for kind in ("none", "full")
    )
    assert 1.1 * plain < again < 4 / 3 * plain
    assert computing("256k", "sparsity=vertical_slash") < 0.4 * computing("256k")


def test_tiles_bound_the_chunks_whose_gradients_are_summed():
    """In backward, a pair has two rows and seven tensors of the expert's width, in bfloat16."""
    token = 2 * TOP_K * (2 * HIDDEN + 7 * WIDTH)
    mib = 1024 * token / 2**20
    assert mib == pytest.approx(148)
    config = run("2k", 2, "train.tile_mib=50").config
    assert chunks_of_tokens(config, 1024, 2, 2) == 3


def test_many_tokens_travel_in_two_chunks():
    config = run("32k", 2, "train.tile_mib=0").config
    found = [chunks_of_tokens(config, tokens, 2, 2) for tokens in (32_767, 32_768, 10**6)]
    assert found == [1, 2, 2]
    assert chunks_of_tokens(config, 32_768, 2, 1) == 1


def test_a_given_degree_is_taken_and_rows_of_an_open_one_have_no_price():
    for degree in (1, 2):
        assert run("2k", 2, degree=degree).degree == degree
    assert run("2k", 2, degree="auto").row_seconds() == 0.0
