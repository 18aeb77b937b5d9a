"""The stages of a pipeline hold the parameters of the whole decoder, under the same names."""

from __future__ import annotations

import pytest
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.model.decoder import Decoder, StageDecoder, virtual_stages
from mtrain_cli.model.init import initialize

WORDS = ["model.num_layers=5", "model.hidden_size=32", "model.num_heads=4", "model.num_kv_heads=2"]


def parts(counts: tuple[int, ...], stages: int, *words: str) -> tuple[Decoder, list[StageDecoder]]:
    """Return the whole decoder and that of each stage, with the same weights."""
    model = compose([*WORDS, *words]).model
    every = virtual_stages(counts)
    whole = Decoder(model)
    own = [StageDecoder(model, 1.0, every[stage::stages]) for stage in range(stages)]
    for decoder in (whole, *own):
        initialize(decoder, 3)
    return whole, own


def test_virtual_stages_number_the_layers_of_the_whole_model():
    first, second, third = virtual_stages((2, 2, 1))
    assert [list(stage.layers) for stage in (first, second, third)] == [[0, 1], [2, 3], [4]]
    assert [(s.first, s.last) for s in (first, second, third)] == [
        (True, False),
        (False, False),
        (False, True),
    ]


@pytest.mark.parametrize("tied", ["true", "false"])
def test_the_stages_together_hold_each_parameter_once_except_a_tied_embedding(tied):
    whole, own = parts((2, 2, 1), 3, f"model.tie_word_embeddings={tied}")
    names = [name for decoder in own for name, _ in decoder.named_parameters()]
    expected = dict(whole.named_parameters())
    assert set(names) == set(expected)
    twice = {name for name in names if names.count(name) > 1}
    assert twice == ({"embed_tokens.weight"} if tied == "true" else set())
    for decoder in own:
        for name, parameter in decoder.named_parameters():
            assert torch.equal(parameter, expected[name]), name
    # Layers keep their numbers: attention and indices are found by them.
    assert [layer.index for layer in own[1].layers] == [2, 3]


def attend(q, k, v, layer):
    """Stand-in for attention that depends on the layer."""
    return q * (layer + 1) + torch.cat([k, v], 2)


@pytest.mark.parametrize("counts", [(5,), (2, 3), (1, 1, 2, 1)])
def test_virtual_stages_in_turn_compute_the_loss_of_the_whole_decoder(counts):
    stages = 2 if len(counts) % 2 == 0 else 1
    whole, own = parts(counts, stages)
    draw = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 264, (1, 12), generator=draw) for _ in range(2))
    positions = torch.arange(12)[None]
    for scale in (0.1, None):
        x = None
        for number in range(len(counts)):
            decoder = own[number % stages]
            x = decoder.run_stage(number, x, tokens, positions, labels, attend, scale)
        if scale is None:
            expected = whole.token_losses(tokens, positions, labels, attend)
        else:
            expected = whole(tokens, positions, labels, attend, scale)
        assert torch.equal(x, expected)
        assert x.requires_grad == (scale is not None)
