"""`api.context_parallel` over real processes equals one process and the float64 definition."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from slow_cases import mostly_slow
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mtrain_cli import api
from mtrain_cli.library.context_batch import ContextBatch
from mtrain_cli.library.context_parallel import ContextParallel
from mtrain_cli.library.max_logits import max_logits as largest_logits
from mtrain_cli.library.settings import Processes, compose_settings
from mtrain_cli.parallel.exchange import Exchange

SEQ, HEADS, KV_HEADS, DIM = 250, 4, 2, 8
DOCUMENTS = np.repeat([0, 1, 2], [70, 110, 70])
SETTINGS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "vertical_slash": ("sparsity.min_columns=4", "sparsity.max_columns=8", "sparsity.p_s=0.3"),
    "block_topk": ("sparsity.score=exact", "sparsity.density=0.45"),
}
WAYS = (
    ("zigzag", "ring"),
    ("striped", "all_gather"),
    ("striped", "hierarchical_ring"),
    ("contiguous", "ulysses"),
    ("balanced", "group_cast"),
    ("balanced", "ring"),
)


def whole_tensors() -> list[torch.Tensor]:
    """q, k, v and dout, float64, equal on all processes."""
    generator = torch.Generator().manual_seed(5)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, SEQ, n, DIM, generator=generator, dtype=torch.float64) for n in heads]


def made(sparsity: str = "dense", *words: str, group=None, **arguments) -> ContextParallel:
    small = ("topology.block_size=16",)
    if sparsity != "dense":
        small = (*small, "sparsity.block=16", *SETTINGS[sparsity])
    return api.context_parallel(group, *small, *words, seq=SEQ, sparsity=sparsity, **arguments)


def results(batch: ContextBatch, **options) -> list[torch.Tensor]:
    """out, dq, dk and dv of whole sequences, through a float32 kernel."""
    *qkv, dout = batch.shard(*(tensor.float() for tensor in whole_tensors()))
    for tensor in qkv:
        tensor.requires_grad_()
    out = batch.attention(*qkv, **{"layer": 0, **options})
    out.backward(dout)
    return [batch.gather(tensor.detach()) for tensor in (out, *(t.grad for t in qkv))]


def by_definition(
    seen: torch.Tensor, sinks: torch.Tensor | None = None, softcap: float | None = None
) -> list[torch.Tensor]:
    """The same in float64 by autograd, and dsinks. seen: bool [1, heads or 1, SEQ, SEQ]."""
    *qkv, dout = whole_tensors()
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 2) for tensor in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(1, -1, SEQ, 1)
        scores = torch.cat([scores, column], -1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :SEQ], v)
    leaves = qkv if sinks is None else [*qkv, sinks]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def seen_by_documents(window: int = SEQ, chunk: int = SEQ) -> torch.Tensor:
    at, document = torch.arange(SEQ), torch.from_numpy(DOCUMENTS)
    away, start = at[:, None] - at, torch.searchsorted(document, document)
    same = document * SEQ + (at - start) // chunk
    return ((same[:, None] == same) & (away >= 0) & (away < window))[None, None]


def seen_under(sparsity: str, mask: str = "causal") -> torch.Tensor:
    """The pairs that documents, a mask and a pattern's index allow."""
    seen = seen_by_documents(chunk=45 if mask == "chunked" else SEQ)
    if sparsity == "dense":
        return seen
    batch = made(sparsity, *MASKS[mask], mask=mask).batch(DOCUMENTS)
    q, k, v, _ = batch.shard(*(tensor.float() for tensor in whole_tensors()))
    batch.attention(q.requires_grad_(), k, v, 0)
    (attend,) = batch._attention.values()
    (pair,) = attend.plan.tiles.tiles
    chosen = attend.narrowed[0][0].for_pair(*pair).seen()[:, :, :SEQ, :SEQ]
    assert not (chosen & ~seen).any()
    assert chosen.sum() < 0.9 * HEADS * seen.sum()
    return chosen


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for tensor, other in zip(found, expected, strict=True):
        assert (tensor.double() - other).abs().max() < 2e-6 * (1 + other.abs().max())


MASKS: dict[str, tuple[str, ...]] = {"causal": (), "chunked": ("mask.chunk=45",)}


def in_all_ways(
    _rank: int, world: int, sparsity: str, mask: str
) -> dict[tuple[str, str], list[torch.Tensor]]:
    virtual = ("topology.gpus_per_node=1",)
    return {
        (layout, exchange): results(
            made(
                sparsity, *MASKS[mask], *(virtual if "hierarchical" in exchange else ()),
                layout=layout, exchange=exchange, mask=mask,
            ).batch(DOCUMENTS)
        )
        for layout, exchange in WAYS
        if exchange != "ulysses" or HEADS % world == 0
    }  # fmt: skip


@mostly_slow(
    ("world", "sparsity", "mask"),
    [
        *((world, sparsity, "causal") for world in (2, 3) for sparsity in SETTINGS),
        (2, "vertical_slash", "chunked"), (3, "block_topk", "chunked"),
    ], keep=(0,1,5,6),
)  # fmt: skip
def test_processes_compute_what_one_does_and_the_definition_says(world, sparsity, mask):
    expected = results(made(sparsity, *MASKS[mask], mask=mask).batch(DOCUMENTS))
    seen = seen_under(sparsity, mask)
    assert_close(expected, by_definition(seen))
    for found in gloo.run(world, in_all_ways, sparsity, mask):
        assert len(found) >= 5
        for tensors in found.values():
            assert_close(tensors, by_definition(seen))


def in_groups(rank: int, world: int, names: tuple[str, str]) -> list[list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
    group = mesh["cp"] if rank % 2 else mesh["cp"].get_group()
    cps = [made(group=group, exchange=name) for name in ("ring", "ulysses")]
    assert [cp.processes.groups for cp in cps] == 2 * [sorted(cps[0].processes.groups)]
    return [results(cp.batch(DOCUMENTS)) for cp in cps]


@pytest.mark.parametrize("names", [("dp", "cp"), ("cp", "dp")])
def test_groups_of_a_mesh_attend_apart(names):
    expected = by_definition(seen_by_documents())
    for both in gloo.run(4, in_groups, names):
        for tensors in both:
            assert_close(tensors, expected)


def messages(rank: int, world: int) -> list[str]:
    """The errors of groups that do not divide three processes."""
    pair, rest = dist.new_group([0, 1]), dist.new_group([2])
    overlapping = dist.new_group([1, 2])
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    found = []
    # The third is no group of process 2, to which `dist.new_group` returned a stand-in.
    groups = (rest if rank == 2 else pair, overlapping if rank == 2 else pair, pair, mesh)
    for group in groups:
        with pytest.raises(api.ConfigError) as raised:
            made(group=group)
        found.append(str(raised.value))
    with pytest.raises(api.ConfigError) as raised:
        results(made(exchange="ulysses").batch())
    return [*found, str(raised.value)]


def test_groups_must_divide_the_processes_and_the_heads():
    rule = (
        "the groups must have the same size and ascending ranks, and each of the 3 processes must "
        "be in one"
    )
    for found in gloo.run(3, messages):
        assert found == [
            f"group: [0, 1], [2]: {rule}",
            f"group: [0, 1], [1, 2]: {rule}",
            f"group: [0, 1]: {rule}",
            'group: the mesh has dp, cp; give one, such as mesh["cp"]',
            "exchange=ulysses: cannot share 4 query heads and 2 key-value heads among 3 workers in "
            "nodes of 3; allowed for topology.ulysses: 1",
        ]


def sinks_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([-20.0, 0.0, 0.7, 3.0], dtype=dtype).requires_grad_()


def with_sinks(_rank: int, world: int, sparsity: str) -> list[list[torch.Tensor]]:
    """Under caps, too, on three processes."""
    ways = [("zigzag", "ring", 1), ("striped", "all_gather", 1), ("balanced", "group_cast", 1)]
    if HEADS % world == 0:
        ways = [("contiguous", "ulysses", 1), ("striped", "ring", 2), ("balanced", "group_cast", 2)]
    found = []
    for layout, exchange, sharing in ways:
        sinks = sinks_of(torch.float32)
        words = () if exchange == "ulysses" else (f"topology.ulysses={sharing}",)
        cp = made(sparsity, *words, layout=layout, exchange=exchange)
        more = {"softcap": 2.0} if world == 3 else {}
        tensors = results(cp.batch(DOCUMENTS), sinks=sinks, **more)
        assert sinks.grad is not None
        dist.all_reduce(sinks.grad)
        found.append([*tensors, sinks.grad])
    return found


@mostly_slow("world", [3, 4], keep=(0,))
@pytest.mark.parametrize("sparsity", list(SETTINGS))
def test_sinks_take_a_share_of_the_softmax(world, sparsity):
    softcap = 2.0 if world == 3 else None
    expected = by_definition(seen_under(sparsity), sinks_of(torch.float64), softcap)
    assert all(gradient.abs() > 0.01 for gradient in expected[-1][1:])
    for found in gloo.run(world, with_sinks, sparsity):
        for tensors in found:
            assert_close(tensors, expected)


@pytest.mark.parametrize("window", [None, 30])
def test_caps_and_sinks_work_under_windows(window):
    sinks = sinks_of(torch.float32)
    cp = made("vertical_slash", "sparsity.dense_layers=1", "model.num_layers=2")
    found = results(cp.batch(DOCUMENTS), layer=1, window=window, sinks=sinks, softcap=1.5)
    expected = by_definition(seen_by_documents(window or SEQ), sinks_of(torch.float64), 1.5)
    assert_close([*found, sinks.grad], expected)
    assert "scores capped at 1.5: " in cp.describe()


# Two documents without causality, of which the second also sees a prefix of the first, and a
# causal rest; the kinds are those of docs/masks.md.
SLICES = np.array(
    [(0, 90, 0, 90, 0), (90, 160, 90, 160, 0), (90, 160, 0, 20, 0), (160, SEQ, 100, SEQ, 1)]
)


def seen_by_slices() -> torch.Tensor:
    seen, at = torch.zeros(SEQ, SEQ, dtype=torch.bool), torch.arange(SEQ)
    seen[:90, :90] = seen[90:160, 90:160] = seen[90:160, :20] = True
    seen[160:] = (at >= 100) & (at <= at[160:, None])
    return seen[None, None]


def under_slices(_rank: int, _world: int) -> list[list[torch.Tensor]]:
    ways = (("zigzag", "ring"), ("balanced", "group_cast"))
    cps = [made(layout=layout, exchange=exchange) for layout, exchange in ways]
    return [results(cp.batch(slices=[SLICES])) for cp in cps]


def test_slices_replace_mask_and_documents():
    for both in gloo.run(2, under_slices):
        for tensors in both:
            assert_close(tensors, by_definition(seen_by_slices()))


def other_documents(rank: int, _world: int) -> str:
    with pytest.raises(api.ConfigError) as raised:
        made().batch(np.maximum(DOCUMENTS, np.arange(SEQ) >= 60 + rank))
    assert made().batch(DOCUMENTS).masks
    return str(raised.value)


def test_processes_compare_the_masks_of_the_first_batch():
    assert gloo.run(2, other_documents) == 2 * [
        "masks: differ between the processes [0, 1], which share sequences; give the same to "
        "all of them"
    ]


def other_settings(rank: int, _world: int) -> str:
    with pytest.raises(api.ConfigError) as raised:
        made(layout=("zigzag", "striped")[rank])
    return str(raised.value)


def test_processes_compare_their_settings():
    for message in gloo.run(2, other_settings):
        assert message.startswith("settings: differ between the processes [0, 1]")


@pytest.mark.parametrize("name", ["documents", "cu_seqlens"])
def test_unsigned_integers_are_read_as_integers(name):
    table = np.array([0, 70, 40, SEQ] if name == "cu_seqlens" else [5] * 100 + [3] * 150, np.uint8)
    problem = "must rise" if name == "cu_seqlens" else "decrease along a sequence"
    with pytest.raises(api.ConfigError, match=problem):
        made().batch(**{name: table})


def test_a_sink_that_takes_nothing_leaves_rows_without_keys_empty():
    batch = made().batch(slices=np.array([(0, 100, 0, 100, 1)]))
    q, k, v, dout = batch.shard(*(tensor.float() for tensor in whole_tensors()))
    sinks = torch.full((HEADS,), -torch.inf).requires_grad_()
    out = batch.attention(q.requires_grad_(), k, v, 0, sinks=sinks)
    out.backward(dout)
    assert torch.isfinite(out).all()
    assert torch.isfinite(q.grad).all()
    assert (sinks.grad == 0).all()


def test_documents_in_three_ways_give_the_same_masks():
    cp = made()
    restarting = np.concatenate([np.arange(70), np.arange(110), np.arange(70)])
    masks = [
        cp.batch(DOCUMENTS).masks,
        cp.batch(torch.from_numpy(DOCUMENTS)[None]).masks,
        cp.batch(cu_seqlens=[0, 70, 180, 250]).masks,
        cp.batch(position_ids=torch.from_numpy(restarting)[None]).masks,
    ]
    assert all(mask.same_as(masks[0][0]) for (mask,) in masks)
    assert masks[0][0].pairs == int(seen_by_documents().sum())
    (first, second) = cp.batch(np.stack([DOCUMENTS, np.zeros_like(DOCUMENTS)])).masks
    assert first.same_as(masks[0][0])
    assert second.same_as(cp.batch(sequences=2).masks[1])


def test_a_balanced_layout_follows_the_documents():
    processes = Processes(0, [(0, 1)])
    cp = ContextParallel(compose_settings(2, (), seq=str(SEQ), layout="balanced"), processes)
    whole, also_whole, packed = (cp.batch(ids) for ids in (None, None, DOCUMENTS))
    assert whole.layout is also_whole.layout
    assert whole.positions.tolist() != packed.positions.tolist()


@pytest.mark.parametrize(
    ("local_size", "ranks", "per_node"),
    [(4, (0, 1, 2, 3), 4), (4, (0, 2, 4, 6), 2), (1, (0, 1, 2), 1), (2, (0, 1, 2), 3)],
)
def test_the_nodes_of_a_group_follow_from_its_ranks(monkeypatch, local_size, ranks, per_node):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
    config = compose_settings(len(ranks), (), seq="1k")
    environment = Processes(ranks[1], [ranks]).environment(config)
    assert (environment.context_per_node, environment.rank) == (per_node, 1)


@pytest.mark.parametrize("sparsity", ["dense", "vertical_slash"])
def test_a_window_has_no_index(sparsity):
    found = results(made(sparsity).batch(DOCUMENTS), window=30)
    assert_close(found, by_definition(seen_by_documents(30)))


def test_the_last_layers_may_be_dense():
    cp = made("vertical_slash", "sparsity.dense_layers=1", "model.num_layers=3")
    dense, _, _, _ = by_definition(seen_by_documents())
    batch = cp.batch(DOCUMENTS)
    q, k, v, _ = batch.shard(*(tensor.float() for tensor in whole_tensors()))
    with torch.no_grad():
        sparse, last = (batch.attention(q, k, v, layer) for layer in (1, 2))
    assert_close([cp.gather(last)], [dense])
    assert (cp.gather(sparse) - dense).abs().max() > 0.01


def test_batches_of_single_documents_share_a_plan():
    cp = made()
    plans = []
    for sequences in (1, 1, 2):
        batch = cp.batch(sequences=sequences)
        whole = (tensor.float().expand(sequences, -1, -1, -1) for tensor in whole_tensors())
        q, k, v, _ = batch.shard(*whole)
        batch.attention(q, k, v, 0)
        (attend,) = batch._attention.values()
        plans.append(attend.plan.tiles)
    assert plans[0] is plans[1]
    assert len({id(plan) for plan in plans}) == 2


def layers_of(batch: ContextBatch, x: torch.Tensor, *, reentrant: bool = False) -> torch.Tensor:
    """Two checkpointed layers: q, k and v are views of x and of the first layer's output."""

    def layer(x: torch.Tensor, number: int) -> torch.Tensor:
        return x + batch.attention(x, x[:, :, :KV_HEADS], x[:, :, :KV_HEADS], number)

    for number in range(2):
        x = checkpoint(layer, x, number, use_reentrant=reentrant)
    return x


def in_flight(_rank: int, _world: int, sparsity: str, same: bool) -> list[torch.Tensor]:
    """Gradients of two batches, of the same documents or not; the first is computed again last."""
    cp, (x, *_) = made(sparsity), whole_tensors()
    batches = [cp.batch(ids) for ids in (DOCUMENTS, DOCUMENTS if same else 0 * DOCUMENTS)]
    signs = (1, 0.5) if same else (1, 1)
    tokens = [
        batch.shard(sign * x.float()).requires_grad_()
        for batch, sign in zip(batches, signs, strict=True)
    ]
    outs = [layers_of(batch, own) for batch, own in zip(batches, tokens, strict=True)]
    for out in reversed(outs):
        out.square().sum().backward()
    return [b.gather(own.grad) for b, own in zip(batches, tokens, strict=True)]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("sparsity", ["dense", "vertical_slash"])
def test_recomputation_uses_the_plan_and_index_of_its_own_batch(sparsity, same):
    alone = in_flight(0, 1, sparsity, same)
    assert (alone[0] - alone[1]).abs().max() > 0.1
    for found in gloo.run(2, in_flight, sparsity, same):
        assert_close(found, [tensor.double() for tensor in alone])


def checkpointed(
    _rank: int, _world: int, kept: str, exchange: str, sparsity: str
) -> tuple[int, list[torch.Tensor]]:
    """How often attention ran forward, and the gradients of x and of sinks."""
    cp = made(sparsity, f"train.activation_checkpoint={kept}", exchange=exchange)
    x, calls, forward = whole_tensors()[0], 0, Exchange.forward
    batch = cp.batch(DOCUMENTS)
    x = batch.shard(x.float()).requires_grad_()
    sinks = torch.linspace(-1, 1, HEADS).requires_grad_()

    def counted(*args):
        nonlocal calls
        calls += 1
        return forward(*args)

    def layer(x: torch.Tensor, number: int) -> torch.Tensor:
        keys = x[:, :, :KV_HEADS]
        return x + batch.attention(x, keys, keys, number, sinks=sinks if number else None)

    Exchange.forward = counted
    try:
        out = x
        for number in range(2):
            out = checkpoint(layer, out, number, use_reentrant=False)
        out.square().sum().backward()
    finally:
        Exchange.forward = forward
    return calls, [batch.gather(x.grad), sinks.grad]


@mostly_slow("sparsity", ["dense", "vertical_slash"], keep=(1,))
@pytest.mark.parametrize("exchange", ["ring", "all_gather", "ulysses"])
def test_checkpointing_keeps_the_output_of_attention(exchange, sparsity):
    results = {
        kept: gloo.run(2, checkpointed, kept, exchange, sparsity) for kept in ("selective", "full")
    }
    assert [results[kept][0][0] for kept in results] == [2, 4]
    for (_, tensors), (_, expected) in zip(*results.values(), strict=True):
        assert_close(tensors, [tensor.double() for tensor in expected])


def test_recomputation_is_right_for_a_batch_that_is_computed_twice():
    cp, (x, other, *_) = made("dense"), whole_tensors()
    inputs = [x.float(), torch.cat([other, other], 2).float()[:, :, :HEADS] * 0.5]

    def gradients(batches: list[ContextBatch]) -> list[torch.Tensor]:
        own = [b.shard(x).requires_grad_() for b, x in zip(batches, inputs, strict=True)]
        outs = [layers_of(b, x) for b, x in zip(batches, own, strict=True)]
        sum(out.square().sum() for out in outs).backward()
        return [x.grad for x in own]

    once = gradients([cp.batch(DOCUMENTS), cp.batch(DOCUMENTS)])
    twice = gradients([cp.batch(DOCUMENTS)] * 2)
    for tensor, expected in zip(twice, once, strict=True):
        torch.testing.assert_close(tensor, expected)


def test_recomputation_needs_its_own_batch_and_index():
    cp, (x, *_) = made("vertical_slash"), whole_tensors()
    x = cp.batch().shard(x.float()).requires_grad_()
    with pytest.raises(api.ConfigError, match="its index is gone in the backward pass; checkpoint"):
        layers_of(cp.batch(), x, reentrant=True).sum().backward()
    cp.batch()

    def attend(x: torch.Tensor) -> torch.Tensor:
        return cp.attention(x, x, x, 0)

    with pytest.raises(api.ConfigError, match="call the method of the batch that `batch` returned"):
        checkpoint(attend, x, use_reentrant=False).sum().backward()


def test_a_layer_is_computed_once_with_gradients_and_often_without():
    batch = made("vertical_slash").batch()
    q, k, v, _ = batch.shard(*(tensor.float().requires_grad_() for tensor in whole_tensors()))
    with torch.no_grad():
        first, second = (batch.attention(q, k, v, 0) for _ in range(2))
    assert torch.equal(first, second)
    batch.attention(q, k, v, 0)
    with pytest.raises(api.ConfigError, match="layer=0: was computed before in this batch"):
        batch.attention(q, k, v, 0)


def planned_ahead(_rank: int, _world: int) -> list[torch.Tensor]:
    cp = made("vertical_slash", layout="balanced")
    results(cp.batch(), window=30)
    with ThreadPoolExecutor() as loader:
        batch = loader.submit(cp.batch, DOCUMENTS).result()
    (planned,) = batch._attention.values()
    tensors = results(batch, window=30)
    assert [*batch._attention.values()] == [planned]
    return tensors


def test_later_batches_are_planned_on_any_thread():
    for found in gloo.run(2, planned_ahead):
        assert_close(found, by_definition(seen_by_documents(30)))


def by_turns(_rank: int, _world: int) -> list[list[torch.Tensor]]:
    """Two objects with other documents at once, layers out of order, and a failure between."""
    cps = made(layout="zigzag", exchange="ring"), made("block_topk", exchange="all_gather")
    batches = [cp.batch(ids) for cp, ids in zip(cps, (DOCUMENTS, DOCUMENTS), strict=True)]
    pending = []
    for layer in (3, 0, 1):
        for batch in batches:
            *qkv, dout = batch.shard(*(tensor.float() for tensor in whole_tensors()))
            for tensor in qkv:
                tensor.requires_grad_()
            pending.append((batch, qkv, batch.attention(*qkv, layer), dout))
        with pytest.raises(api.ConfigError, match="softcap=0: must be a positive number"):
            batches[1].attention(*qkv, 9, softcap=0)
        batches[1].attention(*qkv, 10 + layer)  # as if the model had failed before its end
    found = []
    for batch, qkv, out, dout in [pending[n] for n in (2, 5, 0, 1, 4, 3)]:
        out.backward(dout)
        found.append([batch.gather(t.detach()) for t in (out, *(x.grad for x in qkv))])
    return [*found, results(cps[0].batch(DOCUMENTS)), results(cps[1].batch(DOCUMENTS))]


def test_objects_and_layers_take_turns_and_survive_failures():
    dense, sparse = (by_definition(seen_under(name)) for name in ("dense", "block_topk"))
    for found in gloo.run(2, by_turns):
        for number, tensors in zip((2, 5, 0, 1, 4, 3, 0, 1), found, strict=True):
            assert_close(tensors, sparse if number % 2 else dense)


def in_low_precision(_rank: int, _world: int, sparsity: str) -> list[torch.Tensor]:
    batch = made(sparsity, layout="striped", exchange="ring").batch(DOCUMENTS)
    *qkv, dout = batch.shard(*(tensor.bfloat16() for tensor in whole_tensors()))
    for tensor in qkv:
        tensor.requires_grad_()
    out = batch.attention(*qkv, 0)
    out.backward(dout)
    assert out.dtype == qkv[0].grad.dtype == torch.bfloat16
    return [batch.gather(tensor.detach().float()) for tensor in (out, *(x.grad for x in qkv))]


def test_bfloat16_is_as_exact_as_its_rounding():
    expected = by_definition(seen_by_documents())
    for found in gloo.run(2, in_low_precision, "dense"):
        for tensor, other in zip(found, expected, strict=True):
            error = (tensor.double() - other).norm() / other.norm()
            assert 1e-4 < error < 1e-2
    alone = in_low_precision(0, 1, "block_topk")
    for found in gloo.run(2, in_low_precision, "block_topk"):
        for tensor, other in zip(found, alone, strict=True):
            assert (tensor - other).norm() / other.norm() < 1e-2


def test_values_may_be_narrower_than_keys():
    batch = made().batch(DOCUMENTS)
    q, k, v, _ = batch.shard(*(tensor.float() for tensor in whole_tensors()))
    out = batch.attention(q, k, v[..., :3], 0)
    expected, *_ = by_definition(seen_by_documents())
    assert_close([batch.gather(out)], [expected[..., :3].detach()])


def largest(_rank: int, _world: int, sparsity: str, window: int | None) -> list[torch.Tensor]:
    found = []
    for layout, exchange in (("striped", "ring"), ("balanced", "group_cast")):
        batch = made(sparsity, layout=layout, exchange=exchange).batch(DOCUMENTS)
        results(batch, window=window, max_logits=True, softcap=0.5)
        found.append(batch.max_logits.pop(0))
        assert not batch.max_logits
    return found


@pytest.mark.parametrize(
    ("sparsity", "window"),
    [("dense", None), ("dense", 30), ("vertical_slash", None), ("block_topk", None)],
)
def test_the_largest_logits_are_exact_over_all_processes(monkeypatch, sparsity, window):
    q, k, _, _ = whole_tensors()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / DIM**0.5
    seen = seen_by_documents(window) if window else seen_under(sparsity)
    expected = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3)).float()
    for found in gloo.run(3, largest, sparsity, window):
        for of_heads in found:
            torch.testing.assert_close(of_heads, expected, atol=1e-6, rtol=0)
    monkeypatch.setattr("mtrain_cli.library.max_logits._SCORE_BYTES", 7 * 16 * SEQ)
    for of_heads in largest(0, 1, sparsity, window):
        torch.testing.assert_close(of_heads, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("sparsity", ["dense", "vertical_slash"])
@pytest.mark.parametrize("kept", ["selective", "full"])
def test_recomputation_measures_no_logits_again(monkeypatch, sparsity, kept):
    measured = []

    def counted(*args):
        measured.append(1)
        return largest_logits(*args)

    monkeypatch.setattr("mtrain_cli.library.context_batch.largest_logits", counted)
    batch = made(sparsity, f"train.activation_checkpoint={kept}").batch(DOCUMENTS)
    batch.measures = True
    x = batch.shard(whole_tensors()[0].float()).requires_grad_()
    keys = x[:, :, :KV_HEADS]

    def squared(x: torch.Tensor, number: int) -> torch.Tensor:
        # The square needs the output of attention, so recomputation does not stop before it ends.
        return batch.attention(x, keys, keys, number).square()

    out = x
    for number in range(2):
        out = checkpoint(squared, out, number, use_reentrant=False)
    before = dict(batch.max_logits)
    out.sum().backward()
    assert len(measured) == 2
    assert batch.max_logits == before  # the same tensors


def test_labels_some_tokens_ahead_stay_in_their_document():
    cp = made()
    cp.batch(DOCUMENTS)
    labels = torch.arange(SEQ)[None] + 1000
    for ahead in (1, 2, 5):
        expected = [
            1000 + at + ahead
            if at + ahead < SEQ and DOCUMENTS[at + ahead] == DOCUMENTS[at]
            else -100
            for at in range(SEQ)
        ]
        assert cp.roll(labels, -ahead)[0].tolist() == expected
    assert torch.equal(cp.batch().roll(labels, -2)[0, :-2], labels[0, 2:])
    # Queries of a document without causality show the labels of its later tokens.
    shown = cp.batch(slices=[SLICES]).roll(labels, -3)[0]
    assert (shown[:89] == -100).all()
    assert shown[200] == 1203


X = torch.zeros(1, SEQ, 2, DIM)
IDS = torch.ones(1, SEQ, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda cp: cp.shard(X), "shard: no batch has begun; call batch(...) before"),
        (lambda cp: cp.roll(IDS, -1), "roll: no batch has begun; call batch(...) before"),
        (lambda cp: cp.batch().roll(IDS, 2),
         "shift=2: -1 gives the next token; allowed: -249 to -1"),
        (lambda cp: cp.gather(X), "gather: no batch has begun; call batch(...) before"),
        (lambda cp: cp.attention(X, X, X, 0),
         "attention: no batch has begun; call batch(...) before"),
        (lambda cp: cp.batch().shard(X[:, 1:]),
         "tensor: has the shape [1, 249, 2, 8]; whole sequences have the shape [1, 250, ...] "
         "(seq=250)"),
        (lambda cp: cp.batch(sequences=2).attention(X, X, X, 0),
         "q: has the shape [1, 250, 2, 8]; this process's tokens have the shape [2, 250, ...] "
         "(seq=250)"),
        (lambda cp: cp.batch().attention(X, X[:, :, :1], X, 0),
         "q, k, v: have the shapes [1, 250, 2, 8], [1, 250, 1, 8], [1, 250, 2, 8]; give k and v "
         "the same heads, which divide those of q, k as wide as q, and v no wider"),
        (lambda cp: cp.batch().attention(X, X, torch.zeros(1, SEQ, 2, 9), 0),
         "q, k, v: have the shapes [1, 250, 2, 8], [1, 250, 2, 8], [1, 250, 2, 9]; give k and v "),
        (lambda cp: cp.batch().attention(X, X[:, :, :0], X[:, :, :0], 0),
         "q, k, v: have the shapes [1, 250, 2, 8], [1, 250, 0, 8], [1, 250, 0, 8]; give k and v "),
        (lambda cp: cp.batch().attention(torch.cat([X, X], 2)[:, :, :3], X, X, 0),
         "q, k, v: have the shapes [1, 250, 3, 8], [1, 250, 2, 8], [1, 250, 2, 8]; give k and v "),
        (lambda cp: cp.batch().attention(X.tolist(), X, X, 0),
         "q: is of the type list; give a tensor of floating-point numbers, [sequences, tokens, "
         "heads, head_dim]"),
        (lambda cp: cp.batch().attention(X, X.numpy(), X, 0),
         "k: is of the type ndarray; give a tensor of floating-point numbers, ["),
        (lambda cp: cp.batch().attention(X, X, X.long(), 0),
         "v: has the shape [1, 250, 2, 8] and is int64 on cpu; give a tensor of floating-point "),
        (lambda cp: cp.batch().attention(X, X.bfloat16(), X.bfloat16(), 0),
         "k: is bfloat16 on cpu, and q is float32 on cpu; give q, k and v the same type, on the "
         "same device"),
        (lambda cp: cp.batch().attention(X, X, X.to("meta"), 0),
         "v: is float32 on meta, and q is float32 on cpu; give q, k and v the same type, on"),
        (lambda cp: cp.batch().attention(X[0], X[0], X[0], 0),
         "q: has the shape [250, 2, 8] and is float32 on cpu; give a tensor of floating-point "),
        (lambda cp: cp.batch().attention(X[:, 1:], X[:, 1:], X[:, 1:], 0),
         "q: has the shape [1, 249, 2, 8]; this process's tokens have the shape [1, 250, ...] "),
        (lambda cp: cp.batch().attention(X, X, X[:, 1:], 0),
         "v: has the shape [1, 249, 2, 8]; this process's tokens have the shape [1, 250, ...] "),
        (lambda cp: cp.batch().attention(X, X, X, 0, sinks=[0.0, 0.0]),
         "sinks: is of the type list; give a tensor of floating-point numbers, [heads]"),
        (lambda cp: cp.batch().shard(X, X.numpy()),
         "tensors[1]: is of the type ndarray; give a tensor, [sequences, tokens, ...]"),
        (lambda cp: cp.batch().gather(X.tolist()),
         "tensor: is of the type list; give a tensor, [sequences, tokens, ...]"),
        (lambda cp: cp.batch().gather(X[0]),
         "tensor: has the shape [250, 2, 8]; this process's tokens have the shape [1, 250, ...]"),
        (lambda cp: cp.batch().roll(DOCUMENTS[None], -1),
         "labels: is of the type ndarray; give a tensor of int16, int32 or int64, [sequences, seq"),
        (lambda cp: cp.batch().roll(IDS.byte(), -1),
         "labels: has the shape [1, 250] and is uint8 on cpu; give a tensor of int16, int32 or "),
        (lambda cp: cp.batch().roll(IDS[:, 1:], -1),
         "labels: has the shape [1, 249]; whole sequences have the shape [1, 250, ...] (seq=250)"),
        (lambda cp: cp.inputs(IDS.tolist()), "input_ids: is of the type list; give a tensor of i"),
        (lambda cp: cp.inputs(X[..., 0, 0]),
         "input_ids: has the shape [1, 250] and is float32 on cpu; give a tensor of int16, int32 "),
        (lambda cp: cp.inputs(IDS[0]),
         "input_ids: has the shape [250] and is int64 on cpu; give a tensor of int16, int32 or"),
        (lambda cp: cp.inputs(IDS[:, 1:]),
         "input_ids: has the shape [1, 249]; whole sequences have the shape [1, 250, ...]"),
        (lambda cp: cp.inputs(IDS, IDS[:, 1:]), "labels: has the shape [1, 249]; whole sequences"),
        (lambda cp: cp.inputs(IDS, IDS.float()), "labels: has the shape [1, 250] and is float32"),
        (lambda cp: cp.inputs(IDS, attention_mask=[1] * SEQ),
         "attention_mask: is of the type list; give a tensor, [sequences, seq]"),
        (lambda cp: cp.inputs(IDS, position_ids=IDS.tolist()),
         "position_ids: is of the type list; give a tensor, [sequences, tokens, ...]"),
        (lambda cp: cp.batch(DOCUMENTS[1:]),
         "documents: has the shape [1, 249]; give [sequences, 250] for seq=250"),
        (lambda cp: cp.batch(DOCUMENTS[::-1].copy()),
         "documents: decrease along a sequence; give ids that never decrease"),
        (lambda cp: cp.batch(DOCUMENTS / 2), "documents: must be whole numbers, not float64"),
        (lambda cp: cp.batch(cu_seqlens=[0, 70, 249]),
         "cu_seqlens=[  0  70 249]: must rise from 0 to seq=250"),
        (lambda cp: cp.batch(DOCUMENTS, cu_seqlens=[0, 250]),
         "documents, cu_seqlens: each describes the masks; give one of them"),
        (lambda cp: cp.batch(slices=[[(0, 9, 0, 300, 0)]]),
         "slices: The slice [0, 9, 0, 300, 0] of (query start, query stop, key start, key stop, "),
        (lambda _: made("vertical_slash").batch(slices=[SLICES]),
         "slices: sparsity=vertical_slash needs masks in which each query sees one range of keys "
         "that ends at the query; give sparsity=dense"),
        (lambda _: results(made().batch(), softcap=-1.0),
         "softcap=-1.0: must be a positive number, or None for no cap"),
        (lambda _: results(made(kernel="sdpa").batch(), softcap=2.0),
         "kernel=sdpa: does not cap scores (softcap=2); usable here: "),
        (lambda _: results(made().batch(), sinks=torch.zeros(2)),
         "sinks: have the shape [2]; give one of each head, [4]"),
        (lambda _: results(made().batch(), window=1.5),
         "window=1.5: must be a whole number, or None"),
        (lambda _: results(made().batch(), softcap="5"),
         "softcap=5: must be a positive number, or None for no cap"),
        (lambda _: results(made().batch(), layer=-1),
         "layer=-1: must be a whole number, 0 or more"),
        (lambda _: results(made().batch(), layer="0"),
         "layer='0': must be a whole number, 0 or more"),
        (lambda _: made().batch(sequences=0), "sequences=0: must be a whole number, 1 or more"),
        (lambda _: made().batch(documents=[[0] * SEQ, [0]]),
         f"documents: its rows differ in length; give [sequences, {SEQ}]"),
        (lambda _: results(made().batch(), window=0),
         "window=0: must be at least 1 token, under a mask without later keys"),
        (lambda _: results(made(mask="full").batch(), window=9),
         "window=9: must be at least 1 token, under a mask without later keys"),
        (lambda _: made(layout="spiral"),
         "layout=spiral: expected one of auto, contiguous, zigzag, striped, balanced"),
        (lambda _: results(made(kernel="flash4").batch()),
         "kernel=flash4: needs a CUDA GPU; usable here: sdpa"),
        (lambda _: made("dense", "optim.lr=1"),
         "optim.lr=1: does not belong to attention between the given processes; allowed: keys "
         "under sparsity, mask and topology, model.num_layers and train.activation_checkpoint"),
        (lambda _: made("dense", "topology.workers=2"),
         "topology.workers=2: does not belong to attention between the given processes; allowed: "
         "keys under sparsity, mask and topology, model.num_layers and train.activation_chec"),
        (lambda _: made("dense", "train.activation_checkpoint=none"),
         "train.activation_checkpoint=none: says only if checkpointed layers keep the output of "
         "attention; allowed: selective, full"),
        (lambda _: made("vertical_slash", "sparsity.dense_steps=3"),
         "sparsity.dense_steps=3: only `mtrain train` counts steps; begin with another "
         "context_parallel of sparsity=dense"),
        (lambda _: made("vertical_slash", "sparsity.dense_layers=3"),
         "sparsity.dense_layers=3: needs model.num_layers=N, the model's layers"),
        (lambda _: made("dense", "mask.window=9", "mask.full_every=2", mask="sliding_window"),
         "mask.full_every=2, mask.full_first=0: the model says which layers have a window; give "
         "0, and attention(..., window=N)"),
        (lambda _: api.context_parallel("world", seq=SEQ),
         "group: call torch.distributed.init_process_group before"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(call, problem):
    with pytest.raises(api.ConfigError) as raised:
        call(made(layout="contiguous"))
    assert str(raised.value).startswith(problem)
    assert "\n" not in str(raised.value)


def test_autocast_computes_attention_in_its_type():
    """Rotary embeddings leave q and k in float32, and v has the type of autocast."""
    batch = made().batch(DOCUMENTS)
    q, k, v, _ = batch.shard(*(tensor.float() for tensor in whole_tensors()))
    wide = batch.attention(q, k, v, layer=0)
    with torch.autocast("cpu", torch.bfloat16):
        out = batch.attention(q, k, v.bfloat16(), layer=1)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wide, atol=0.05, rtol=0)


def test_processes_without_a_group_are_told_that_they_compute_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="WORLD_SIZE=2, but each process computes whole sequences"):
        assert Processes.of(None) == Processes(0, [(0,)])
