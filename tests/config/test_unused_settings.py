import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.unused_settings import unused_keys

RING = ["topology.exchange=ring", "topology.device=cuda"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["train.checkpoint_keep=0.3"], "only train.activation_checkpoint=sequence_selective"),
        (["topology.prefetch=2", "topology.exchange=all_gather"], "is not a ring"),
        (["topology.circulates=kv", "topology.exchange=all_gather"], "is not a ring"),
        (["topology.gradient_dtype=bfloat16", "topology.exchange=ulysses"], "as computed"),
        (["topology.columns=once", *RING], "sparsity.pattern=dense chooses no columns"),
        (["data.text_key=body"], "data.kind=stdlib; only data.kind=text uses it"),
        (["optim.warmup_steps=9", "train.steps=5"], "train.steps=5 ends first"),
        (["topology.gpu_memory_gib=80", "topology.device=cpu"], "workers on a CPU share"),
        (["topology.block_size=64", "topology.layout=zigzag"], "the layout is zigzag"),
        (["topology.tensor_chunks=2"], "topology.tensor_parallel=1 does not use it"),
        (["optim.schedule_steps=50", "optim.schedule=constant"], "optim.schedule=constant does"),
        (["train.checkpoint_every=6", "train.steps=5"], "train.steps=5 ends first"),
        (["train.rollback.sigma=9"], "train.rollback.limit=0 does not use it"),
        (["model.rope.beta_fast=16", "model.rope.scaling=none"], "model.rope.scaling=none; only"),
        (["eval.samples=4"], "train.eval_tasks=[] names no task"),
    ],
)
def test_an_unused_setting_is_one_line(words, reason):
    (line,) = unused_keys(words, compose(words))
    assert line.startswith(f"{words[0]}: has no effect, ")
    assert reason in line


@pytest.mark.parametrize(
    "words",
    [
        [],  # unused defaults are not reported
        ["recipe=stdlib_8k"],
        ["train.checkpoint_keep=0.3", "train.activation_checkpoint=sequence_selective"],
        ["topology.prefetch=2", *RING],
        ["train.steps=5", "optim.warmup_steps=5", "train.checkpoint_every=5"],
        ["topology.columns=once", "sparsity=vertical_slash", "seq=4k", *RING],
        ["topology.prefetch=2"],  # auto may choose a ring
        ["topology.gpu_memory_gib=80"],  # auto may find a GPU
        ["topology.circulates=queries", "topology.exchange=all_gather"],  # refused elsewhere
    ],
)
def test_settings_that_may_have_an_effect_are_not_reported(words):
    assert unused_keys(words, compose(words)) == []
