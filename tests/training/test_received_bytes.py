"""Bytes that reach a worker, for each kind of parallelism."""

from __future__ import annotations

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.run_plan import ReceivedBytes

WORDS = [
    "seq=4k", "model.num_layers=4", "model.hidden_size=64", "model.vocab_size=264",
    "topology.device=cpu", "topology.exchange=all_gather", "train.global_batch=4",
]  # fmt: skip


def received(*words: str) -> ReceivedBytes:
    return make_plan(compose([*WORDS, *words])).received


def test_one_worker_receives_nothing():
    assert received("topology.workers=1") == ReceivedBytes(forward=0, backward=0, weights=0)


def test_an_all_gather_brings_the_keys_of_the_other_workers_and_their_gradients():
    found, model = received("topology.workers=4"), compose(WORDS).model
    kv = 2 * 4 * model.num_kv_heads * model.head_dim * 4096
    assert found.forward == kv * 3 // 4
    assert found.backward == 2 * found.forward


def test_a_stage_gathers_the_weights_of_its_own_layers():
    untied = "model.tie_word_embeddings=false"
    words = "topology.workers=4", "topology.pipeline_parallel=2", "topology.context_parallel=2"
    staged = received(*words, "topology.stage_layers=[2,2]", untied)
    alone = received("topology.workers=2", "model.num_layers=2", untied)
    # The last stage has a norm and a head, but no embedding.
    assert 0.8 < staged.weights / alone.weights < 1
    assert (staged.forward, staged.backward) == (alone.forward, alone.backward)
