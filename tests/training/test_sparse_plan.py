"""Kernels of a sparse run with dense first steps."""

from __future__ import annotations

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.dry_run import describe_sparsity, kernel_rows
from mtrain_cli.training.planning import make_plan

ELSEWHERE = [
    "topology.device=cuda",
    "topology.workers=2",
    "seq=8k",
    "sparsity=vertical_slash",
    "sparsity.dense_steps=3",
    "model=qwen3b",
]


def test_the_kernel_of_dense_steps_is_shown_with_its_reason():
    sparse, dense = kernel_rows(make_plan(compose([*ELSEWHERE, "train.kernel=triton"])))
    assert sparse[1].startswith("triton: as configured")
    assert dense[1].startswith("flash4 for the first 3 steps, which are dense: ")
    assert len(kernel_rows(make_plan(compose([*ELSEWHERE, "sparsity.dense_steps=0"])))) == 1


def test_the_kernel_of_dense_layers_is_shown_with_its_reason():
    words = ["train.kernel=triton", "sparsity.dense_layers=2"]
    plan = make_plan(compose([*ELSEWHERE, *words]))
    (_, (_, dense)) = kernel_rows(plan)
    expected = "flash4 for the first 3 steps and the last 2 layers, which are dense: "
    assert dense.startswith(expected)
    assert describe_sparsity(plan).endswith("; the first 3 steps and the last 2 layers dense")
    only = make_plan(compose([*ELSEWHERE, *words, "sparsity.dense_steps=0"]))
    assert kernel_rows(only)[1][1].startswith("flash4 for the last 2 layers, which are dense: ")
    one = make_plan(compose([*ELSEWHERE, "sparsity.dense_layers=1", "sparsity.dense_steps=0"]))
    assert kernel_rows(one)[1][1].startswith("flash4 for the last layer, which are dense: ")
    assert describe_sparsity(one).endswith("; the last layer dense")


def test_dense_layers_keep_no_index():
    layers = compose(ELSEWHERE).model.num_layers
    plans = [
        make_plan(compose([*ELSEWHERE, f"sparsity.dense_layers={n}"])) for n in (0, layers // 2)
    ]
    whole, half = (max(m.parts["index"] for m in plan.memory.moments) for plan in plans)
    assert 0 < half < 0.6 * whole


def test_dense_steps_that_must_be_repeatable_run_on_triton():
    plan = make_plan(compose([*ELSEWHERE, "train.kernel=triton", "train.deterministic=true"]))
    assert kernel_rows(plan)[1][1].startswith("triton for the first 3 steps, which are dense: ")
