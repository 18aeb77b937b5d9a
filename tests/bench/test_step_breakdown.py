"""Step breakdowns of hand-made traces with sums counted by hand, and names of real kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mtrain_extras.bench.step_breakdown import (
    MessageTotals,
    OperationTotals,
    claim,
    find_parts,
    kernel_part,
    messages,
    operator_part,
    range_part,
    shortest,
)

MAIN, BACKWARD = 100, 101  # threads


def event(
    category: str, name: str, begin: float, end: float, tid: int = MAIN, **args: Any
) -> dict[str, Any]:
    """Make an event; times in microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def within(name: str, begin: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    return event("user_annotation", name, begin, end, tid)


def step(begin: float, end: float) -> dict[str, Any]:
    return within("mtrain.step", begin, end)


_number = iter(range(1, 10**6))


def kernel(
    name: str,
    begin: float,
    end: float,
    at: float = 0.5,
    tid: int = MAIN,
    call: str = "cudaLaunchKernel",
) -> list[dict[str, Any]]:
    """Make a kernel and its launch at time ``at``."""
    number = next(_number)
    category = (
        "gpu_memcpy"
        if name.startswith("Memcpy")
        else "gpu_memset"
        if name.startswith("Memset")
        else "kernel"
    )
    driver = "cuda_driver" if call.startswith("cuL") else "cuda_runtime"
    return [
        {**event(category, name, begin, end, 7, correlation=number), "pid": 0},
        event(driver, call, at, at + 0.25, tid, correlation=number),
    ]


def ms(found) -> dict[str, float]:
    """Return microseconds of the nonzero parts."""
    assert sum(found.parts.values()) == found.step
    return {name: ns / 1e3 for name, ns in found.parts.items() if ns}


def test_each_instant_belongs_to_one_part():
    events = [
        step(0, 100),
        *kernel("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NTN", 10, 30),
        *kernel(
            "triton_poi_fused_mul_silu_0", 20, 40
        ),  # overlaps the product: 10 of its own remain
        *kernel("Memcpy HtoD (Pinned -> Device)", 35, 50),  # 10 not overlapped
        *kernel(
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 25, 70
        ),  # 20 after all of these
        *kernel("something_else", 80, 85),
    ]
    found = find_parts(events, gpu=True)
    assert ms(found) == {
        "products": 20,
        "element-wise": 10,
        "copies": 10,
        "links": 20,
        "other": 5,
        "idle": 35,
    }
    assert found.hidden == 25_000
    assert found.launches == 4
    assert found.launching == 5 * 250  # a copy is started by a call of the same name here
    assert found.kinds[0] == OperationTotals(
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "links", 1, 45_000
    )
    assert {(k.name, k.ns) for k in found.kinds if k.part == "element-wise"} == {
        ("triton_poi_fused_mul_silu_0", 20_000)
    }


SIZE = {"Process Group Ranks": "[0, 1]", "Group size": 2, "Out msg nelems": 8, "dtype": "Float"}


def message(
    begin: float,
    end: float,
    name: str = "allreduce",
    elements: int = 8,
    group: str = "0",
    **others: Any,
) -> dict[str, Any]:
    """Make an NCCL kernel as PyTorch's profiler describes it."""
    args = {
        **SIZE,
        "Process Group Name": group,
        "Collective name": name,
        "In msg nelems": elements,
        **others,
    }
    return {**event("kernel", "ncclDevKernel_" + name, begin, end, 9, **args), "pid": 0}


def split(*ranks: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the parts of every rank, with the messages of the others known."""
    events = [[step(0, 100), *of] for of in ranks]
    least = shortest([messages(of) for of in events])
    return [ms(find_parts(of, gpu=True, least=least)) for of in events]


def test_the_last_rank_transfers_and_the_others_wait():
    # Their clocks differ by 3.
    early = [*kernel("gemm", 0, 10), message(10, 40), *kernel("gemm", 40, 60), message(60, 65)]
    late = [*kernel("gemm", 3, 37), message(37, 43), *kernel("gemm", 43, 50), message(50, 68)]
    first, second = split(early, late)
    assert first == {"products": 30, "waits": 24, "links": 11, "idle": 35}
    assert second == {"products": 41, "waits": 13, "links": 11, "idle": 35}


def sent(at: float, begin: float, end: float, name: str) -> list[dict[str, Any]]:
    """Make an NCCL message and its launch at time ``at``."""
    device, launch = kernel("ncclDevKernel", begin, end, at)
    described = message(begin, end, name)
    return [{**described, "args": {**described["args"], **device["args"]}}, launch]


def test_messages_are_told_by_collective_and_by_the_part_that_sent_them():
    mine = [
        step(0, 100),
        within("mtrain.experts", 1, 3),
        within("FSDP::all_gather (layers.1)", 4, 6),
        *sent(2, 10, 40, "all_to_all"),
        *sent(2.5, 35, 50, "all_to_all"),  # overlaps the first one for 5
        *kernel("gemm", 20, 30),
        *kernel("Memcpy DtoD", 45, 47),
        *sent(5, 55, 65, "_allgather_base"),
        *sent(7, 70, 75, "_allgather_base"),  # outside of all ranges
    ]
    last = [step(0, 100), message(20, 32, "all_to_all"), message(33, 43, "all_to_all")]
    last += [message(50, 60, "_allgather_base"), message(70, 73, "_allgather_base")]
    found = find_parts(mine, gpu=True, least=shortest([messages(mine), messages(last)]))
    assert found.messages == [
        MessageTotals("all_to_all", "experts", 2, 45_000, 45_000 - 22_000, 40_000 - 10_000 - 2_000),
        MessageTotals("allgather_base", "weights", 1, 10_000, 0, 10_000),
        MessageTotals("allgather_base", "other", 1, 5_000, 2_000, 5_000),
    ]
    assert sum(m.exposed for m in found.messages) == found.parts["links"] + found.parts["waits"]


def test_overlapped_waits_are_hidden_and_transfers_precede_waits():
    # The message of another group transfers while the first one waits.
    early = [message(0, 50), message(20, 40, group="1"), *kernel("gemm", 5, 15)]
    late = [message(40, 50), message(20, 40, group="1")]
    first, second = split(early, late)
    assert first == {"products": 10, "waits": 10, "links": 30, "idle": 50}
    assert second == {"links": 30, "idle": 70}
    events = [step(0, 100), *early]
    least = shortest([messages(events), messages([step(0, 100), *late])])
    assert find_parts(events, gpu=True, least=least).hidden == 10_000
    # One kernel is launched, with its whole length.
    assert [
        (k.part, k.calls, k.ns)
        for k in find_parts(events, gpu=True, least=least).kinds
        if "nccl" in k.name
    ] == [("links", 2, 70_000)]


def test_unmatched_messages_count_as_transfer():
    long, short = [message(0, 50)], [message(0, 10)]
    assert [p.get("waits") for p in split(long, short)] == [40, None]
    # One rank of three or of two is missing; one sent more messages; other messages; traces with
    # no or few descriptions.
    three = {"Process Group Ranks": "[0, 1, 2]", "Group size": 3}
    assert split([message(0, 50, **three)], [message(0, 10, **three)])[0] == {
        "links": 50,
        "idle": 50,
    }
    assert split(long) == [{"links": 50, "idle": 50}]
    assert find_parts([step(0, 100), *long], gpu=True).unmatched == 1
    twice = [*short, message(20, 25)]
    assert split(long, twice) == [{"links": 50, "idle": 50}, {"links": 15, "idle": 85}]
    for other in (
        {"elements": 4},
        {"group": "1"},
        {"name": "allgather"},
        {"dtype": "Half"},
        {"Process Group Ranks": "[2, 3]"},
        {"Out msg nelems": 16},
    ):
        assert split(long, [message(0, 10, **other)])[0] == {"links": 50, "idle": 50}, other
    bare = [
        kernel("ncclDevKernel_AllGather", 0, 50)[0],
        kernel("ncclDevKernel_AllGather", 50, 60)[0],
    ]
    assert split(bare, bare) == [{"links": 60, "idle": 40}] * 2
    assert messages([step(0, 100), *bare]) == {}
    assert messages([step(0, 100), {**long[0], "name": "gemm"}]) == {}


def test_messages_are_numbered_within_the_steps_whatever_the_order_of_the_trace():
    first = [message(60, 80), message(10, 30), message(-20, -5)]  # and one before the step
    second = [message(25, 30), message(70, 80)]
    assert [p.get("waits") for p in split(first, second)] == [15 + 10, None]


def test_a_kernel_belongs_to_the_innermost_range_of_its_launch_on_any_thread():
    events = [
        step(0, 100),
        within("mtrain.attention", 10, 20),
        within("mtrain.index", 12, 14),
        within("mtrain.attention", 40, 50, BACKWARD),
        within("FSDP::post_backward_reduce (layers.3)", 52, 54, BACKWARD),
        within("mtrain.loss", 30, 35),
        within("mtrain.optimizer", 60, 70),
        within("another", 61, 69),
        event("cpu_op", "aten::mm", 45, 46, BACKWARD),
        *kernel(
            "_output", 20, 23, at=11, call="cuLaunchKernelEx"
        ),  # runs much later: the launch counts
        *kernel("triton_poi_fused_0", 23, 25, at=13),
        *kernel("gemm", 25, 26, at=15),
        *kernel("Memcpy DtoD (Device -> Device)", 26, 27, at=16),
        *kernel("ncclDevKernel_SendRecv(x)", 27, 31, at=17),
        *kernel("nvjet_loss", 36, 41, at=31),
        *kernel("_key_gradient", 50, 56, at=41, tid=BACKWARD, call="cuLaunchKernel"),
        *kernel("unnamed", 56, 57, at=41, tid=MAIN),  # a range of another thread does not apply
        *kernel("chunk_cat", 57, 59, at=53, tid=BACKWARD),
        *kernel("scale", 65, 68, at=62),
        *kernel("unnamed", 68, 69, at=70),  # a range has ended at its end
    ]
    found = find_parts(events, gpu=True)
    expected = {
        "attention": 3 + 1 + 1 + 6,
        "index": 2,
        "loss": 5,
        "links": 4,
        "weights": 2,
        "optimizer": 3,
        "other": 2,
    }
    assert ms(found) == {**expected, "idle": 100 - sum(expected.values())}
    assert {(k.name, k.part, k.calls) for k in found.kinds if k.name == "unnamed"} == {
        ("unnamed", "other", 2)
    }


def test_without_a_launch_the_operator_around_it_gives_the_range():
    events = [
        step(0, 10),
        within("mtrain.loss", 1, 3),
        event("cpu_op", "aten::mm", 1, 2, **{"External id": 5}),
        {**event("kernel", "odd", 4, 6, 7, correlation=1, **{"External id": 5}), "pid": 0},
        event(
            "cuda_runtime", "cudaLaunchKernel", 1, 2, 99, correlation=2
        ),  # by a thread without other events
        {**event("kernel", "odd", 6, 9, 7, correlation=2, **{"External id": 5}), "pid": 0},
    ]
    assert ms(find_parts(events, gpu=True)) == {"loss": 5, "idle": 5}


def test_syncs_launches_and_lead_of_the_host():
    events = [
        step(0, 100),
        *kernel("a", 10, 11, at=1),  # 8.75 after the end of its launch
        *kernel("b", 20, 21, at=2),  # 17.75
        *kernel("c", 60, 61, at=3),  # 56.75
        *kernel("ncclDevKernel_AllReduce(x)", 90, 91, at=4),
        event("cuda_runtime", "cudaStreamSynchronize", 40, 45),
        event("cuda_runtime", "cudaEventSynchronize", 46, 48),
        event("cuda_runtime", "cudaDeviceSynchronize", 95, 99),
        within("mtrain.closing", 94, 100),  # the wait of the benchmark itself
        event("cuda_runtime", "cudaStreamSynchronize", 101, 105),  # after the step
        *kernel("d", 120, 130, at=110),
    ]
    found = find_parts(events, gpu=True)
    assert (found.launches, found.launching) == (4, 1000)
    assert (found.syncs, found.syncing) == (2, 7000)
    assert found.ahead == 17_750
    assert ms(found) == {"other": 3, "links": 1, "idle": 96}


def test_a_launch_by_the_runtime_through_the_driver_counts_once():
    kernel_of_it, inner = kernel("a", 10, 11, at=2, call="cuLaunchKernel")
    outer = {**event("cuda_runtime", "cudaLaunchKernel", 1, 5), "args": inner["args"]}
    events = [step(0, 20), within("mtrain.loss", 0.5, 1.5), kernel_of_it, inner, outer]
    for order in (events, events[::-1]):
        found = find_parts(order, gpu=True)
        assert (found.launches, found.launching, found.ahead) == (1, 4000, 5000)
        assert ms(found) == {"loss": 1, "idle": 19}


def test_steps_add_up_without_the_time_between_them():
    events = [
        step(0, 10),
        step(20, 30),
        *kernel("gemm", 5, 9),
        *kernel("gemm", 12, 18),
        *kernel("gemm", 22, 24),
        *kernel("nccl", 23, 28),
    ]
    found = find_parts(events, gpu=True)
    assert (found.steps, found.step) == (2, 20_000)
    assert ms(found) == {"products": 6, "links": 4, "idle": 10}
    assert found.launches == 3


def test_on_a_cpu_time_belongs_to_the_innermost_operator():
    events = [
        step(0, 100),
        within("mtrain.attention", 10, 40),
        event("cpu_op", "_Attend", 11, 39),  # Python
        event("cpu_op", "aten::scaled_dot_product_attention", 12, 30),
        event("cpu_op", "aten::copy_", 15, 20),  # in it
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 50, 60),
        event("cpu_op", "aten::mm", 52, 58),
        event("cpu_op", "aten::fill_", 53, 54),
        event("cpu_op", "aten::mul", 61, 64),
        event("cpu_op", "aten::gather", 64, 65),
        event("cpu_op", "fsdp::chunk_cat", 66, 68),
        event("cpu_op", "c10d::send", 68, 69),
        within("gloo:send", 55, 75),  # same thread, not inside an operator
        within("gloo:all_gather", 30, 45, tid=7),
        within("gloo:barrier", -5, -1, tid=7),  # between steps
        event("cpu_op", "aten::copy_", 80, 90, tid=7),  # another thread
        within("mtrain.optimizer", 91, 99),
        within("Optimizer.step#AdamW.step", 92, 98),
        event("cpu_op", "aten::_fused_adamw_", 93, 97),
    ]
    found = find_parts(events, gpu=False)
    expected = {
        "attention": 18,
        "products": 5,
        "copies": 1,
        "element-wise": 3,
        "other": 1,
        "weights": 2,
        "optimizer": 4,
    }
    # gloo: 30 to 45 exposed, and the part of 55 to 75 that no operator overlaps.
    expected["links"] = 15 + 20 - (3 + 3 + 1 + 2)
    assert ms(found) == {**expected, "host": 100 - sum(expected.values())}
    assert found.hidden == 9000
    assert [(m.part, m.calls, m.ns, m.waits, m.exposed) for m in found.messages] == [
        ("other", 1, 20_000, 0, 11_000), ("other", 1, 15_000, 0, 15_000),
    ]  # fmt: skip
    assert {(k.name, k.part): k.ns for k in found.kinds}["aten::copy_", "attention"] == 5000
    assert {(k.name, k.part): k.ns for k in found.kinds}["aten::mm", "products"] == 5000


def test_rounded_times_still_add_up():
    """A callee may end a nanosecond after its caller."""
    events = [
        step(0, 10),
        event("cpu_op", "aten::linear", 1.0, 4.0),
        event("cpu_op", "aten::addmm", 2.0, 4.001),
        event("cpu_op", "aten::mul", 4.001, 5.0),
    ]
    assert ms(find_parts(events, gpu=False)) == {
        "products": 3.0,
        "element-wise": 0.999,
        "host": 6.001,
    }


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match=r"no annotation mtrain\.step"):
        find_parts(kernel("gemm", 0, 1), gpu=True)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NTN", "products"),
        (
            "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass:"
            ":gemm::kernel::GemmUniversal<int> > >(int)",
            "products",
        ),
        (
            "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4,"
            " false>(float)",
            "products",
        ),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "links"),
        ("triton_poi_fused_add_mul_silu_3", "element-wise"),
        ("_gate_back", "element-wise"),
        ("_cast_tile", "element-wise"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
            " 3ul>(int)",
            "element-wise",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float,"
            " at::native::NormTwoOps<float> > >(int)",
            "element-wise",
        ),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at_"
            "_tensor",
            "attention",
        ),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4,"
            " cutlass::bfloat16_t> >(int)",
            "attention",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128_4x1x1"
            "_kernel0_0",
            "attention",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
            "at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>,"
            " at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4> >(int)",
            "optimizer",
        ),
        (
            "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned"
            " int, 2, 2, -2, true>(int)",
            "other",
        ),
    ],
)
def test_kernels_outside_ranges_are_classified_by_name(name, part):
    assert kernel_part(name) == part


def test_names_of_operators_and_ranges():
    assert operator_part("aten::addmm") == operator_part("aten::_linear_pointwise") == "products"
    assert operator_part("aten::_to_copy") == operator_part("aten::cat") == "copies"
    assert (
        operator_part("aten::add_")
        == operator_part("aten::rsqrt")
        == operator_part("## Call CompiledFxGraph x ##")
        == "element-wise"
    )
    assert operator_part("aten::scatter_") == operator_part("aten::view") == "other"
    assert operator_part("fsdp::all_gather_copy_in") == "weights"
    assert {
        operator_part(n)
        for n in (
            "_Attend",
            "MulBackward0",
            "torch::autograd::AccumulateGrad",
            "c10d::recv_",
            "detach",
        )
    } == {None}
    assert range_part("mtrain.attention") == "attention"
    assert range_part("mtrain.experts/3/backward") == "experts"
    assert range_part("FSDP::all_gather (layers.0)") == "weights"
    assert range_part("Optimizer.step#AdamW.step") == "optimizer"
    assert range_part("mtrain.step") is range_part("## Call") is None


def test_parts_of_random_kernels_match_a_count_of_every_nanosecond():
    draw = random.Random(3)
    for _ in range(200):
        free = [(0, 40), (60, 100)]
        wanted = sorted(
            (b := draw.randrange(110), b + draw.randrange(1, 25), draw.choice("xyz"))
            for _ in range(draw.randrange(12))
        )
        parts = dict.fromkeys("xyz", 0)
        left = claim(free, wanted, parts)
        painted = {t: "" for begin, end in free for t in range(begin, end)}
        for begin, end, word in wanted:
            for t in range(begin, end):
                if painted.get(t) == "":
                    painted[t] = word
        assert parts == {word: list(painted.values()).count(word) for word in "xyz"}
        assert [t for begin, end in left for t in range(begin, end)] == [
            t for t, word in painted.items() if not word
        ]
        assert all(begin < end for begin, end in left)
