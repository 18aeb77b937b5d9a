"""Kernels of a sparse run with dense first steps."""

from __future__ import annotations

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.dry_run import kernel_rows
from mtrain_cli.training.run_plan import make_plan

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


def test_dense_steps_that_must_be_repeatable_run_on_triton():
    plan = make_plan(compose([*ELSEWHERE, "train.kernel=triton", "train.deterministic=true"]))
    assert kernel_rows(plan)[1][1].startswith("triton for the first 3 steps, which are dense: ")
