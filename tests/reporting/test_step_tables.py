"""Tables and the figure of a recorded step."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain_cli.reporting.step_tables import (
    NAME,
    RANKS,
    lines,
    messages_table,
    short_name,
    step_figure,
)


def test_lines_name_their_rank_and_quantity():
    rank = {
        "parts": {"links": 1.0, "waits": 0.0, "idle": 0.0, "host": 2.0},
        "links_hidden_ms": 0.0,
        "recorded_ms": 100.0,
        "plain_ms": 80.0,
    }
    slow = rank | {"plain_ms": 90.0, "recorded_ms": 99.0}
    plain = {
        "steps": 1,
        "tokens_per_second_per_gpu": 10.0,
        "density": 1.0,
        "mfu_model": None,
        "mfu_executed": None,
        "peak_memory_gib": None,
    }
    on_cpu = lines({"ranks": [rank, slow], "gpu": False, "plain": plain})
    assert on_cpu[0].startswith(
        "step      slowest rank 100 ms; without recording 90 ms (the step before): +11.1%"
    )
    assert on_cpu[1] == "speed     10 tokens/s/worker, without recording"
    gpu = {
        "launches": 1,
        "launching_ms": 1.0,
        "syncs": 0,
        "syncing_ms": 0.0,
        "ahead_us": None,
        "unmatched": 3.0,
    }
    of_gpu = lines(
        {
            "ranks": [rank | gpu, slow | gpu],
            "gpu": True,
            "plain": plain | {"steps": 2, "density": 0.5, "mfu_model": 0.3},
        }
    )
    assert "80 ms (median" not in of_gpu[0]
    assert "90 ms (median of 2 steps before)" in of_gpu[0]
    assert of_gpu[1] == "speed     10 tokens/s/GPU, MFU 30.0%, density 50.0%, without recording"
    assert of_gpu[2].endswith("1 ms exposed; 3 messages, not found on other ranks, count as links")
    assert of_gpu[4].endswith("GPU idle 0 ms")
    idle = rank | gpu | {"parts": {"links": 1.0, "waits": 15.0, "idle": 25.0}}
    (*_, last) = lines({"ranks": [idle], "gpu": True, "plain": plain})
    assert last.endswith("GPU idle 25 ms; of idle and waits, up to 50% come from recording")
    (*_, last) = lines({"ranks": [idle | {"plain_ms": 50.0}], "gpu": True, "plain": plain})
    assert last.endswith("of idle and waits, up to 100% come from recording")
    (*_, last) = lines({"ranks": [idle | {"plain_ms": 97.0}], "gpu": True, "plain": plain})
    assert last.endswith("GPU idle 25 ms")


def test_the_table_of_messages_says_how_much_is_exposed():
    rows = [
        {"name": "all_to_all", "part": "experts", "calls": 4, "ms": 8.0, "waits_ms": 1.0,
         "exposed_ms": 2.0},
        {"name": "barrier", "part": "other", "calls": 1, "ms": 0.0, "waits_ms": 0.0,
         "exposed_ms": 0.0},
    ]  # fmt: skip
    of_gpu, of_cpu = messages_table(rows, gpu=True), messages_table(rows, gpu=False)
    names = ["message", "sent by", "calls", "ms", "waits", "exposed", "of ms"]
    assert [column.name for column in of_gpu.columns] == names
    assert [column.name for column in of_cpu.columns] == [
        name for name in names if name not in ("sent by", "waits")
    ]
    assert [column.value(rows[0]) for column in of_gpu.columns] == [
        "all_to_all", "experts", 4, 8.0, 1.0, 2.0, 0.25,
    ]  # fmt: skip
    assert of_gpu.columns[-1].value(rows[1]) is None
    kernel = {"name": "void ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"}
    assert of_gpu.columns[0].value(kernel) == "ncclDevKernel_SendRecv", "PyTorch did not name it"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NTN", "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NTN"),
        (
            "nvjet_sm90_tss_192x192_64x3_1x2_h_badd_coopB_NTN",
            "nvjet_tss_192x192_64x3_1x2_h_badd_coopB_NTN",
        ),
        (
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul> >(int)",
            "vectorized_elementwise_ker.. CUDAFunctor_add",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 1>(float*)",
            "CatArrayBatchedCopy",
        ),
        (
            "void at::native::elementwise_kernel<128, 4, "
            "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
            "elementwise_kernel direct_copy_kernel_cuda",
        ),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at_"
            "_tensor0000o11101213_tensorptrf32_gmem",
            "FlashAttentionForwardSm90",
        ),
        (
            "kernel_cutlass_a_name_without_the_object_that_it_is_a_method_of_tensor0000o11101213",
            "kernel_cutlass_a_name_withou..r0000o11101213",
        ),
    ],
)
def test_kernel_names_are_shortened_in_their_least_informative_part(name, short):
    assert short_name(name) == short
    assert len(short) <= NAME


def parts(ranks: int, scale: float = 1.0) -> dict[str, Any]:
    own = [{"attention": scale * (r + 1), "loss": scale, "host": 0.0} for r in range(ranks)]
    return {"ranks": [{"rank": rank, "parts": values} for rank, values in enumerate(own)]}


def bars(view) -> dict[str, list[float]]:
    return {trace["name"]: list(trace["x"]) for trace in view.data}


def test_a_step_has_a_bar_of_every_part_and_rank_and_runs_are_compared_by_means():
    (view,) = step_figure([("run", parts(2))]).views
    assert bars(view) == {"attention": [1, 2], "loss": [1, 1]}, "parts without time have no bar"
    first, *others = step_figure([("<a>", parts(3)), ("b", parts(1, 10.0))]).views
    assert first.labels == ("all runs",)
    assert bars(first) == {"attention": [2, 10], "loss": [1, 10]}
    assert list(first.data[0]["y"]) == ["&lt;a&gt;", "b"]
    assert [view.labels for view in others] == [("<a>",), ("b",)]


@pytest.mark.parametrize(("ranks", "every"), [(RANKS, 1), (RANKS + 1, 2), (3 * RANKS, 3)])
def test_ranks_are_thinned_evenly(ranks, every):
    (view,) = step_figure([("run", parts(ranks))]).views
    assert list(view.data[0]["y"]) == [f"rank {n}" for n in range(0, ranks, every)]
