"""Times of experts by layer, from traces made by hand. Times are in microseconds."""

from __future__ import annotations

from records.test_step_breakdown import BACKWARD, event, kernel, step, within

from mtrain_cli.records.step_breakdown import StepBreakdown, find_parts


def us(found: StepBreakdown) -> list[tuple[int, str, float, float, float]]:
    return [
        (e.layer, e.direction, e.router / 1e3, e.computing / 1e3, e.waiting / 1e3)
        for e in found.experts
    ]


def nccl(begin: float, end: float, at: float, tid: int = 100) -> list[dict]:
    return kernel("ncclDevKernel_SendRecv(x)", begin, end, at, tid)


def test_kernels_of_a_gpu_belong_to_the_layer_that_launches_them():
    events = [
        step(0, 100),
        within("mtrain.router/3/forward", 1, 3),
        *kernel("softmax", 10, 14, at=2),
        within("mtrain.experts/3/forward", 4, 9),
        *nccl(14, 30, at=5),
        *kernel("gemm", 20, 40, at=6),  # hides 10 of the 16 of the message
        *nccl(40, 45, at=8),
        *kernel("gemm of attention", 50, 60, at=9.5),
        *nccl(60, 65, at=9.6),  # of no layer
        within("mtrain.experts/3/backward", 70, 80, BACKWARD),
        *kernel("gemm", 75, 90, at=72, tid=BACKWARD),
    ]
    found = find_parts(events, gpu=True)
    assert us(found) == [(3, "backward", 0, 15, 0), (3, "forward", 4, 20, 6 + 5)]
    assert found.parts["router"] == 4000
    assert found.parts["experts"] == 35_000
    assert sum(found.parts.values()) == found.step


def test_on_a_cpu_waits_inside_the_experts_are_no_computation():
    events = [
        step(0, 100),
        within("mtrain.router/0/forward", 1, 11),
        within("mtrain.message", 4, 6),
        event("cpu_op", "aten::softmax", 2, 4),
        within("mtrain.experts/0/forward", 20, 50),
        event("cpu_op", "aten::mm", 21, 30),
        within("mtrain.message", 30, 45),
        within("mtrain.message", 60, 65),  # of no layer
        within("mtrain.experts/1/forward", 70, 71),
        event("cpu_op", "mtrain.experts/1/forward", 80, 90),  # no annotation
        within("mtrain.experts/1/forward", 110, 120),  # after the step
    ]
    found = find_parts(events, gpu=False)
    assert us(found) == [(0, "forward", 8, 15, 2 + 15), (1, "forward", 0, 1, 0)]
    assert found.parts["experts"] == 9000


def test_other_annotations_name_no_layer():
    events = [step(0, 10), within("mtrain.experts/x/forward", 1, 2), within("experts/1/x", 3, 4)]
    assert find_parts(events, gpu=False).experts == []
