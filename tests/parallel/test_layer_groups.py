"""Workers of a tensor group gather and add up rows, and those of an expert group trade rows."""

from __future__ import annotations

import time
import weakref
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel import layer_groups, nvtx_ranges
from mtrain_cli.parallel.layer_groups import (
    Message,
    TensorGroup,
    copies,
    gather_rows,
    make_expert_group,
    make_expert_mesh,
    make_tensor_group,
    own_region,
    staggered,
    sum_copied_gradients,
)
from mtrain_cli.parallel.mesh import SHARD, TENSOR, make_parameter_mesh
from mtrain_cli.parallel.recording import NOTHING
from mtrain_cli.parallel.transport import ExchangeError
from mtrain_cli.profiling.record_collector import RecordCollector
from mtrain_cli.records.record_files import WORDS
from mtrain_cli.records.record_sums import TensorWaits


def make(rank: int, world: int, tp: int, cp: int = 1) -> TensorGroup:
    group = make_tensor_group(rank, ParallelDims.of(world, cp=cp, tp=tp), torch.device("cpu"))
    assert group is not None
    return group


def exchanged(rank: int, world: int) -> dict[str, Any]:
    group = make(rank, world, 2, world // 2)
    rows = torch.arange(6.0).view(3, 2) + 10 * rank
    parts = torch.arange(8.0).view(4, 2) * (rank + 1)
    total = torch.tensor([float(rank)])
    group.sum(total)
    return {
        "place": (group.rank, group.size),
        "gathered": group.start_gather(rows).wait(),
        "scattered": group.start_scatter(parts).wait(),
        "sum": total,
    }


def test_only_workers_of_a_group_exchange_rows():
    """Ranks 0 and 1 are a group, and ranks 2 and 3."""
    found = gloo.run(4, exchanged)
    rows, parts = torch.arange(6.0).view(3, 2), torch.arange(8.0).view(4, 2)
    for rank, result in enumerate(found):
        first = rank // 2 * 2
        assert result["place"] == (rank % 2, 2)
        expected = torch.cat([rows + 10 * first, rows + 10 * (first + 1)])
        assert torch.equal(result["gathered"], expected)
        own = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
        assert torch.equal(result["scattered"], (parts * (2 * first + 3))[own])
        assert result["sum"].item() == 2 * first + 1


def gradient(rank: int, world: int) -> torch.Tensor:
    group = make(rank, world, world)
    own = torch.full((2, 3), float(rank), requires_grad=True)
    weights = torch.arange(2.0 * world).view(-1, 1) * (rank + 1)
    (gather_rows(own, group) * weights).sum().backward()
    assert own.grad is not None
    return own.grad


def test_the_gradient_of_gathered_rows_is_summed_over_the_workers():
    for rank, found in enumerate(gloo.run(2, gradient)):
        expected = torch.arange(4.0)[2 * rank : 2 * rank + 2].view(2, 1).expand(2, 3) * 3
        assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [6, 7, 1])
def test_own_tokens_are_consecutive_and_padded_at_the_end(tokens):
    numbers = torch.arange(tokens).view(1, tokens)
    groups = [TensorGroup(rank, 3, None) for rank in range(3)]  # type: ignore[arg-type]
    parts = [group.own(numbers, -100) for group in groups]
    assert {part.shape for part in parts} == {(1, groups[0].own_rows(tokens))}
    joined = torch.cat(parts, 1)[0]
    assert joined[:tokens].tolist() == list(range(tokens))
    assert set(joined[tokens:].tolist()) <= {-100}
    rows = groups[0].padded(torch.ones(tokens, 2))
    assert len(rows) == len(joined)
    assert rows.sum() == 2 * tokens


def test_a_worker_with_whole_layers_has_no_group():
    assert make_tensor_group(0, ParallelDims.of(1, cp=1), torch.device("cpu")) is None


def abandoned(rank: int, world: int) -> str:
    """Return the error of rank 0, which waits for a message that rank 1 never sends."""
    dims, limit = ParallelDims.of(world, cp=1, tp=2), timedelta(seconds=1)
    group = make_tensor_group(rank, dims, torch.device("cpu"), limit)
    assert group is not None
    if rank == 1:
        time.sleep(3)
        return ""
    try:
        group.start_gather(torch.ones(1, 1)).wait()
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_a_worker_that_does_not_answer_is_named_within_the_timeout():
    error = gloo.run(2, abandoned)[0]
    assert error.startswith("tensor parallelism: a message from rank 1 did not arrive (")


def test_a_complete_message_returns_its_tensor():
    tensor = torch.ones(2)
    assert Message(tensor).wait() is tensor


def test_staggered_tiles_start_messages_while_older_tiles_compute():
    done: list[tuple[int, str]] = []

    def tile(number: int):
        for part in "abc":
            done.append((number, part))
            if part != "c":
                yield

    staggered(tile(number) for number in range(3))
    assert done == [
        (0, "a"),
        *[(1, "a"), (0, "b")],
        *[(2, "a"), (1, "b"), (0, "c")],
        *[(2, "b"), (1, "c")],
        (2, "c"),
    ]


def recorded(rank: int, world: int) -> tuple[Any, list[str]]:
    """Send a message without a recorder, and two with one. Rank 1 starts the last one late.

    Return the rows of all ranks (on rank 0), and the NVTX ranges.
    """
    group = make(rank, world, 2, world // 2)
    collector = RecordCollector(rank, world, torch.device("cpu"), dist.new_group(backend="gloo"))
    ranges: list[str] = []

    def noted(kind, direction, link, step):  # noqa: ARG001
        ranges.append(nvtx_ranges.name(kind, direction, link))
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvtx_ranges, "span", noted)
        own = torch.ones(3, 2)
        group.start_gather(own).wait()
        group.observer.set_recorder(collector.recorder)
        dist.barrier()
        collector.start()
        group.start_gather(own).wait()
        dist.barrier()
        time.sleep(0.3 * (rank == 1))
        group.start_scatter(torch.ones(4, 2)).wait()
    return collector.collect(0, 0, {}, (1.0, 1.0)), ranges


def test_recorded_messages_name_the_worker_that_starts_late():
    found = gloo.run(4, recorded)
    for _, ranges in found:
        # A recorder makes the range of a wait itself.
        assert ranges == ["post.tensor", "wait.tensor", *2 * ["post.tensor", "wait.tensor"]]
    rows = found[0][0]
    assert set(rows["link"]) == {WORDS["link"].index("tensor")}
    assert set(rows["payload"]) == {WORDS["payload"].index("hidden")}
    waits = rows[rows["phase"] == WORDS["phase"].index("wait")]
    assert len(waits) == 8
    # Three rows of two numbers, then two rows, of the one other worker.
    assert sorted(waits["bytes"]) == 4 * [16] + 4 * [24]
    late = {(int(r["rank"]), int(r["peer"])) for r in waits if r["late_us"] > 2e5}
    assert late == {(0, 1)}, "rank 0 waits for rank 1; ranks 2 and 3 are another group"
    sums = TensorWaits.none(4)
    sums.add({name: rows[name] for name in rows.dtype.names})
    assert 200 < sums.late[0, 1] < 3000
    assert sums.late[2:].max() < 200


def test_a_wait_is_observed():
    entered: list[str] = []

    @contextmanager
    def waiting():
        entered.append("begin")
        yield
        entered.append("end")

    class Work:
        def wait(self) -> None:
            entered.append("wait")

    group = TensorGroup(0, 2, None)  # type: ignore[arg-type]
    group.observer.waiting = waiting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorGroup, "_ranks", (0, 1))
        Message(torch.ones(1), Work(), lambda: group.waits(NOTHING)).wait()
    assert entered == ["begin", "wait", "end"]


def leaving(rank: int, world: int) -> list[tuple[bool, bool]]:
    """Whether what leaves is alive before and after each wait, if the work does not hold it."""
    group, found = make(rank, world, 2), []
    start_all_gather, start_reduce_scatter = (
        lambda own, workers, _: (own.new_empty(workers, *own.shape), Mock()),
        lambda shards, _: (torch.empty_like(shards[0]), Mock()),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_groups, "start_all_gather", start_all_gather)
        patch.setattr(layer_groups, "start_reduce_scatter", start_reduce_scatter)
        for start in (group.start_gather, group.start_scatter):
            rows = torch.ones(4, 2)
            storage = weakref.ref(rows.untyped_storage())
            message = start(rows)
            del rows
            before = storage() is not None
            message.wait()
            found.append((before, storage() is None))
    return found


def test_what_leaves_lives_until_the_message_has_been_waited_for():
    """A recorder's stream that waits for a work takes the work's reference away."""
    assert gloo.run(2, leaving) == [[(True, True)] * 2] * 2


SHAPES = {"by_output": (10, 3), "by_input": (5, 8), "copied": (7,)}
KINDS = {"by_output": Shard(0), "by_input": Shard(1), "copied": Replicate()}


class Module(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            whole = torch.arange(float(np.prod(shape))).view(shape) + 1000 * number
            part = distribute_tensor(whole, mesh, [KINDS[name]], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(part))


def regions(rank: int, world: int, tp: int) -> dict[str, Any]:
    dims = ParallelDims.of(world, cp=1, tp=tp)
    mesh = make_parameter_mesh(dims, "cpu")
    module = fully_shard(Module(mesh[TENSOR]), mesh=mesh[SHARD])
    found = {
        name: (p.to_local().detach().numpy(), own_region(p), copies(p))
        for name, p in module.named_parameters()
    }
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
    tensor = make_tensor_group(rank, dims, torch.device("cpu"))
    assert tensor is not None
    sum_copied_gradients(module.parameters(), tensor)
    gradients = {
        name: p.grad.to_local().flatten().tolist() for name, p in module.named_parameters()
    }
    return {"parts": found, "gradients": gradients}


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (6, 2), (4, 2)])
def test_regions_are_the_shards_and_cover_each_parameter(world, tp):
    results = gloo.run(world, regions, tp)
    for number, (name, shape) in enumerate(SHAPES.items()):
        whole = np.arange(np.prod(shape)).reshape(shape) + 1000 * number
        count = np.zeros(shape, int)
        for result in results:
            shard, region, number_of_copies = result["parts"][name]
            np.testing.assert_array_equal(shard, whole[region])
            count[region] += 1
            assert number_of_copies == (tp if name == "copied" else 1)
        assert (count == (tp if name == "copied" else 1)).all()


def test_only_gradients_of_copied_parameters_are_summed_over_the_tensor_group():
    for rank, result in enumerate(gloo.run(4, regions, 2)):
        group = rank // 2 * 2
        for name, values in result["gradients"].items():
            assert set(values) == {float(2 * group + 1 if name == "copied" else rank)}, name


def test_a_plain_parameter_has_no_other_copy():
    assert copies(nn.Parameter(torch.ones(3))) == 1


def exchanged_by_experts(rank: int, world: int) -> tuple:
    dims = ParallelDims.of(world, cp=2, tp=1)
    group = make_expert_group(rank, dims, 2, torch.device("cpu"))
    assert group is not None
    assert make_expert_group(rank, dims, 1, torch.device("cpu")) is None
    counts = group.gather_counts(torch.tensor([rank, 10 + rank]))
    # Rank 0 of a group sends nothing, rank 1 sends one row to itself and two to rank 0.
    send = [[0, 0], [2, 1]][group.rank]
    receive = [[0, 2], [0, 1]][group.rank]
    rows = 100.0 * rank + torch.arange(2.0 * sum(send)).view(-1, 2)
    found = group.start(rows, send, receive).wait()
    into = torch.zeros(4, 2)
    group.start(rows, send, receive, into=into[1 : 1 + len(found)]).wait()
    assert into[1 : 1 + len(found)].tolist() == found.tolist()
    assert group.most([rank - group.rank, group.rank], rows.device) == [rank - group.rank, 1]
    mesh = make_expert_mesh(dims, 2, "cpu")
    return group.rank, counts.tolist(), found.tolist(), group.received[0], mesh.mesh.tolist()


def test_consecutive_workers_exchange_rows_in_rank_order():
    results = gloo.run(4, exchanged_by_experts)
    for rank, (place, counts, found, received, mesh) in enumerate(results):
        first = rank - place
        assert place == rank % 2
        assert counts == [[first, 10 + first], [first + 1, 11 + first]]
        sent = 100.0 * (first + 1)
        rows = [[sent + 2 * n, sent + 2 * n + 1] for n in range(3)]
        assert found == (rows[:2] if place == 0 else rows[2:])
        assert received == (2 * 2 * 2 * 4 if place == 0 else 0), "own rows do not count"
        assert mesh == [[0, 1], [2, 3]]


def test_the_loss_of_a_worker_names_the_group():
    with pytest.raises(RuntimeError, match="rows from rank 1 did not arrive"):
        raise gloo.run(2, lost_expert)[0]


def lost_expert(rank: int, world: int) -> Exception | None:
    group = make_expert_group(rank, ParallelDims.of(world, cp=2), 2, torch.device("cpu"))
    assert group is not None
    try:
        with group.peer_errors():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    except RuntimeError as error:
        return RuntimeError(str(error)) if rank == 0 else None
    return None
