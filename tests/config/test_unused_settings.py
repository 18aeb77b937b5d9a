import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.unused_settings import (
    repeated_keys,
    unused_after_auto,
    unused_by_model,
    unused_keys,
)

RING = ["topology.exchange=ring", "topology.device=cuda"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.checkpoint_keep=0.3"],
            "train.checkpoint_keep=0.3: has no effect, train.activation_checkpoint=selective; only",
        ),
        (
            ["topology.prefetch=2", "topology.exchange=all_gather"],
            "topology.prefetch=2: has no effect, topology.exchange=all_gather is no",
        ),
        (
            ["topology.columns=once", *RING],
            "topology.columns=once: has no effect, sparsity.pattern=dense chooses no columns",
        ),
        (
            ["topology.workers=2", "topology.ulysses=2", "topology.exchange=group_cast"],
            "topology.exchange=group_cast: has no effect, topology.ulysses=2 leaves no workers to",
        ),
        (
            ["data.text_key=body"],
            "data.text_key=body: has no effect, data.kind=stdlib; only data.kind=text",
        ),
        (
            ["optim.warmup_steps=9", "train.steps=5"],
            "optim.warmup_steps=9: train.steps=5 ends first; the learning rate never",
        ),
        (
            ["topology.gpu_memory_gib=80", "topology.device=cpu"],
            "topology.gpu_memory_gib=80: has no effect, workers on a CPU share",
        ),
        (
            ["data.token_dtype=uint32"],
            "data.token_dtype=uint32: has no effect, data.kind=stdlib; only data.kind=tokens",
        ),
        (
            ["topology.block_size=64", "topology.layout=zigzag"],
            "topology.block_size=64: has no effect, the layout is zigzag",
        ),
        (
            ["topology.tensor_chunks=2"],
            "topology.tensor_chunks=2: has no effect, topology.tensor_parallel=1; a worker",
        ),
        (
            ["optim.schedule_steps=50", "optim.schedule=constant"],
            "optim.schedule_steps=50: has no effect, optim.schedule=constant does",
        ),
        (
            ["train.checkpoint_every=9", "train.steps=5"],
            "train.checkpoint_every=9: has no effect, train.steps=5 ends first",
        ),
        (
            ["data.text_key=body", "data=text", f"data.path={__file__}"],
            "data.text_key=body: has no effect, data.path=",
        ),
        (
            ["model.rope.beta_fast=16", "model.rope.scaling=none"],
            "model.rope.beta_fast=16: has no effect, model.rope.scaling=none; only",
        ),
    ],
)
def test_an_unused_setting_is_one_line(words, message):
    (line,) = unused_keys(words, compose(words))
    assert line.startswith(message)


@pytest.mark.parametrize(
    "words",
    [
        [],  # unused defaults are not reported
        ["recipe=stdlib_8k"],
        ["train.checkpoint_keep=0.3", "train.activation_checkpoint=sequence_selective"],
        ["topology.prefetch=2", *RING],
        ["train.checkpoint_every=5", "train.steps=5"],
        ["topology.columns=once", "sparsity=vertical_slash", "seq=4k", *RING],
        ["topology.prefetch=2"],  # auto may choose a ring
        ["topology.gpu_memory_gib=80"],  # auto may find a GPU
    ],
)
def test_settings_that_may_have_an_effect_are_not_reported(words):
    assert unused_keys(words, compose(words)) == []


def test_settings_made_useless_by_auto_are_reported():
    words = ["topology.prefetch=2"]
    config = compose(words)
    (line,) = unused_after_auto(words, config, "all_gather", "striped")
    assert line == (
        "topology.prefetch=2: has no effect, topology.exchange=all_gather (chosen by auto) is not "
        "a ring"
    )
    assert unused_after_auto(words, config, "ring", "striped") == []
    chosen = compose([*words, "topology.exchange=all_gather"])
    assert unused_after_auto(words, chosen, "all_gather", "striped") == [], (
        "the launcher reports it already"
    )
    assert len(unused_keys(["topology.gpu_memory_gib=80"], compose(), device="cpu")) == 1


def test_a_chunk_is_reported_where_auto_takes_a_layout_without_chunks():
    words = ["topology.balanced_chunk=512"]
    config = compose(words)
    assert unused_keys(words, config) == []
    assert unused_after_auto(words, config, "ring", "balanced") == []
    line = (
        "topology.balanced_chunk=512: has no effect, topology.layout=striped (chosen by auto) has "
        "no chunks"
    )
    assert unused_after_auto(words, config, "ring", "striped") == [line]
    assert unused_keys(words, config, layout="striped") == [line]
    words = ["topology.balanced_chunk=auto"]
    assert unused_after_auto(words, compose(words), "ring", "striped") == []


def test_a_key_or_group_given_twice_is_reported():
    assert repeated_keys(["seq=4k", "model=tiny", "seq=8k", "train.steps=3"]) == [
        "seq=4k: has no effect, since seq=8k follows; give seq once"
    ]
    assert len(repeated_keys(["model=tiny", "model=qwen3b"])) == 1
    assert repeated_keys(["model=tiny", "model.num_layers=3"]) == []


def test_a_setting_that_the_exchange_refuses_is_not_also_called_unused():
    words = ["topology.circulates=queries", "topology.exchange=all_gather"]
    assert unused_keys(words, compose(words)) == []
    words = ["topology.circulates=kv", "topology.exchange=all_gather"]
    [line] = unused_keys(words, compose(words))
    assert line.startswith("topology.circulates=kv: has no effect, topology.exchange=all_gather")


def test_a_model_on_one_worker_needs_no_layout():
    words = ["topology.layout=striped", "topology.exchange=ring", "topology.host_memory_gib=4"]
    device = "topology.device=cpu"
    alone, two = (compose([*words, device, f"topology.workers={n}"]) for n in (1, 2))
    lines = unused_by_model(words, [alone])
    assert [line.partition(":")[0] for line in lines] == words[:2]
    assert unused_by_model(words, [two]) == []
    assert unused_by_model(words, [alone, two]) == []


def test_a_setting_that_reaches_the_last_step_has_an_effect():
    words = ["train.steps=5", "optim.warmup_steps=5", "train.checkpoint_every=5"]
    assert unused_keys(words, compose(words)) == []
    later = ["train.steps=5", "optim.warmup_steps=6", "train.checkpoint_every=6"]
    assert [line.partition("=")[0] for line in unused_keys(later, compose(later))] == [
        "train.checkpoint_every", "optim.warmup_steps",
    ]  # fmt: skip
