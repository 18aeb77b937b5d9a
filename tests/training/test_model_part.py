"""What one worker holds of a model, and how many micro-batches it keeps."""

from __future__ import annotations

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.pipeline_plan import ModelPart, model_parts

WORDS = ["model.num_layers=6", "topology.pipeline_parallel=3", "topology.stage_layers=[3,2,1]"]


def parts(*words: str, micro_batches: int = 6) -> tuple[ModelPart, ...]:
    return model_parts(compose([*WORDS, *words]), micro_batches)


def test_without_a_pipeline_each_worker_has_the_whole_model():
    config = compose(["model.num_layers=6"])
    (whole,) = model_parts(config, 4)
    assert whole == ModelPart.whole(config.model)
    assert whole.current == range(6)
    assert list(whole.others) == []
    assert (whole.messages, whole.channels, whole.other_losses) == (0, 0, 0)
    assert set(whole.root_shapes(config.model)) == {"embedding", "norm"}


def test_1f1b_keeps_fewer_micro_batches_on_later_stages():
    first, middle, last = parts()
    assert [part.in_flight for part in (first, middle, last)] == [(3,), (2,), (1,)]
    assert list(first.others) == [range(3)] * 2
    assert middle.layers == (range(3, 5),)
    # A stage between others receives two kinds of messages ahead, and keeps two sends of each kind.
    assert [part.messages for part in (first, middle, last)] == [1 + 2, 2 + 4, 1 + 2]
    assert [part.channels for part in (first, middle, last)] == [2 + 1, 4, 2 + 1]
    untied = parts("model.tie_word_embeddings=false")
    assert [part.channels for part in untied] == [2, 4, 2]


def test_a_worker_keeps_no_more_sends_than_micro_batches():
    assert [part.messages for part in parts(micro_batches=1)] == [1 + 1, 2 + 2, 1 + 1]


def test_gpipe_keeps_the_losses_of_all_micro_batches():
    assert [part.other_losses for part in parts()] == [0, 0, 0]
    gpipe = parts("topology.schedule=gpipe")
    assert [part.in_flight for part in gpipe] == [(6,)] * 3
    assert [part.other_losses for part in gpipe] == [0, 0, 5]


def test_each_end_has_its_weights_and_both_have_a_tied_embedding():
    for words, ends in (
        ((), ({"embedding"}, set(), {"norm", "embedding"})),
        (("model.tie_word_embeddings=false",), ({"embedding"}, set(), {"norm", "lm head"})),
    ):
        model = compose([*WORDS, *words]).model
        assert tuple(set(part.root_shapes(model)) for part in parts(*words)) == ends


def test_virtual_stages_keep_more_of_the_first_part():
    config = compose(
        ["model.num_layers=4", "topology.pipeline_parallel=2", "topology.virtual_stages=2"]
    )
    first, last = model_parts(config, 4)
    assert first.layers == (range(1), range(2, 3))
    assert first.number_of_layers == 2
    assert sum(first.in_flight) == 5
    assert first.current == range(2, 3)
    assert len(list(first.others)) == 4
    assert (first.first, first.last, last.first, last.last) == (True, False, False, True)


def test_virtual_stages_are_parts_of_their_own():
    config = compose(
        ["model.num_layers=4", "topology.pipeline_parallel=2", "topology.virtual_stages=2"]
    )
    begin, end = model_parts(config, 4)[1].virtual_stages
    assert (begin.every_layer, end.every_layer) == ([1], [3])
    assert [(part.first, part.last) for part in (begin, end)] == [(False, False), (False, True)]
    begin, end = model_parts(config, 4)[0].virtual_stages
    assert [(part.first, part.last) for part in (begin, end)] == [(True, False), (False, False)]


def test_a_virtual_stage_with_many_layers_is_heaviest_when_the_last_one_is_empty():
    words = "topology.virtual_stages=2", "topology.stage_layers=[1,3,1,1]"
    config = compose(["model.num_layers=6", "topology.pipeline_parallel=2", *words])
    first, last = model_parts(config, 4)
    assert (first.in_flight, last.in_flight) == ((3, 2), (3, 0))
    assert last.layers == (range(1, 4), range(5, 6))
    assert last.current == range(1, 4)
    assert list(last.others) == [range(1, 4)] * 2
    assert last.other_losses == 0
    # Alone, a virtual stage is the part of a worker that keeps at least one micro-batch.
    assert [part.in_flight for part in last.virtual_stages] == [(3,), (1,)]
