"""The analysis of a real training step equals autograd and definitions; curves keep their means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.model.rope import rotate, rotation
from mtrain_cli.profiling.pattern_quality import Measurement, Place, worker_alone
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_extras.studies.attention.analysis import AttentionAnalyzer, _rope_rows
from mtrain_extras.studies.attention.request import AttentionRequest
from mtrain_extras.studies.attention.rope_analysis import RopeAnalysis
from mtrain_extras.studies.attention.score_variance import VarianceShares

SEQ, LAYERS, HEADS = 128, 2, 4
SMALL = (
    f"seq={SEQ} topology.workers=1 topology.block_size=16 model.hidden_size=32 "
    f"model.num_layers={LAYERS} model.head_dim=8 model.intermediate_size=48 train.dtype=float32"
).split()
PATTERN = FixedPattern(16, 2, 6, 0.0, 0)


class Recorded:
    """Plain attention that keeps q, k and the scores of each layer, with their gradients."""

    def __init__(self, batch) -> None:
        self.first = torch.from_numpy(batch.masks[0].first)
        self.inputs: dict[int, tuple] = {}

    def __call__(self, q, k, v, layer):
        at = torch.arange(SEQ)
        seen = (at <= at[:, None]) & (at >= self.first[:, None])
        k_all, v_all = (t.repeat_interleave(2, 2) for t in (k, v))
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k_all) * q.shape[-1] ** -0.5
        if layer not in self.inputs:  # recomputation calls again
            scores.retain_grad()
            p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            self.inputs[layer] = (q.detach(), k.detach(), scores, p.detach()[0], seen)
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("bhnm,bmhd->bnhd", p, v_all)


@pytest.fixture(scope="module")
def analyzed():
    """A step of a small model through its real backward pass, and what the analysis found."""
    request = AttentionRequest(top_k=(4, 20), maps=((0, 1), (1, 3)), cells=16, rope=True)
    analyzer = AttentionAnalyzer(request)
    with worker_alone(compose([*SMALL, "train.activation_checkpoint=none"])) as trainer:
        measurement = Measurement(trainer, [PATTERN], 40, analyzer)
        make = trainer.next_batch_maker()
        batch = make.to_device(make.on_host([trainer.dataset[3]]))
        recorded = Recorded(batch)
        measurement.start(7)
        attend = measurement.wrap_attention(batch, recorded)
        trainer.run_step.forward_backward([batch], [attend], batch.valid)
        decoder = trainer.decoder
        frequencies = decoder.inverse_frequencies_F.double(), decoder.attention_factor
    return analyzer.files, recorded, frequencies, batch.positions[0]


def test_maps_are_of_the_real_gradient(analyzed):
    files, recorded, *_ = analyzed
    assert {(m.step, m.sample, m.layer, m.head) for m in files.maps} == {(7, 0, 0, 1), (7, 0, 1, 3)}
    for each in files.maps:
        _, _, scores, p, seen = recorded.inputs[each.layer]
        gradient = scores.grad[0, each.head].abs()
        assert gradient.max() > 0
        for found, whole in ((each.attention, p[each.head]), (each.gradient, gradient)):
            cells = whole.double().mul(seen).reshape(16, 8, 16, 8).sum((1, 3))
            pairs = seen.double().reshape(16, 8, 16, 8).sum((1, 3))
            np.testing.assert_allclose(found, cells / pairs, rtol=1e-3, atol=1e-12)


def test_rows_of_largest_keys_are_of_queries_that_see_more(analyzed):
    files, recorded, *_ = analyzed
    assert len(files.top_keys) == LAYERS * HEADS * 2
    queries = {row.k: row.queries for row in files.top_keys}
    assert len(queries[4]) > len(queries[20]) > 0
    for row in files.top_keys:
        p = recorded.inputs[row.layer][3][row.head]
        expected = [float(p[at].topk(row.k).values.sum()) for at in row.queries]
        assert row.mass == pytest.approx(expected, rel=1e-4)
        assert row.mean == pytest.approx(np.mean(expected), rel=1e-4)
        assert row.worst == pytest.approx(min(expected), rel=1e-4)
        seen = [at - int(recorded.first[at]) + 1 for at in row.queries]
        assert min(seen) > row.k
        assert row.uniform == pytest.approx(np.mean([row.k / count for count in seen]))


def test_rope_rows_use_the_frequencies_of_the_run(analyzed):
    """The prediction equals the score of unrotated means that are rotated to each distance."""
    files, recorded, (theta, factor), positions = analyzed
    for row in files.rope:
        q, k, scores, _, seen = recorded.inputs[row.layer]
        at = row.distances.index(9)  # bins of single distances come first
        turned = rotation(positions[None], theta, 1 / factor)
        mean_q, mean_k = (
            rotate(t.float(), turned.cos_BN1F, -turned.sin_BN1F).mean(1, keepdim=True)
            for t in (q[:, :, [row.head]], k[:, :, [row.head // 2]])
        )
        nine = rotation(torch.tensor([[9]]), theta, factor)
        zero = rotation(torch.tensor([[0]]), theta, factor)
        predicted = (
            rotate(mean_q, nine.cos_BN1F, nine.sin_BN1F)
            * rotate(mean_k, zero.cos_BN1F, zero.sin_BN1F)
        ).sum() / 8**0.5
        assert row.predicted[at] == pytest.approx(float(predicted), rel=1e-3, abs=1e-7)
        diagonal = scores.detach()[0, row.head].diagonal(-9)[seen.diagonal(-9)]
        assert row.measured[at] == pytest.approx(float(diagonal.mean()), rel=1e-3, abs=1e-7)


def test_without_a_backward_pass_there_are_no_maps():
    """An evaluation has no gradient, and must not fail."""
    request = AttentionRequest(maps=((0, 0),), cells=4)
    analyzer = AttentionAnalyzer(request)
    with worker_alone(compose(SMALL)) as trainer, torch.no_grad():
        measurement = Measurement(trainer, [PATTERN], 4, analyzer)
        make = trainer.next_batch_maker()
        batch = make.to_device(make.on_host([trainer.dataset[0]]))
        measurement.start(1)
        attend = measurement.wrap_attention(batch, batch.attention)
        trainer.decoder.token_losses(batch.tokens, batch.positions, batch.labels, attend)
    assert not analyzer.files
    assert len(measurement.records) == LAYERS * HEADS


def test_bins_of_curves_weight_distances_by_pairs():
    distances = 3000
    pairs = torch.arange(distances, 0, -1)
    pairs[2000:] = 0  # no pair is that far apart
    measured = torch.rand(2, distances).double()
    shares = VarianceShares(*torch.rand(3, 2).double())
    measured[:, 2000:] = float("nan")
    r2 = torch.tensor([0.5, float("nan")])
    analysis = RopeAnalysis(measured, measured * 2, pairs, r2, shares)
    one, other = _rope_rows(analysis, Place(1, 0, 3))
    assert (one.layer, one.head, one.r2) == (3, 0, 0.5)
    assert (other.head, other.r2) == (1, None)
    assert one.distances[:5] == [0, 1, 2, 3, 4]
    assert len(one.distances) <= 256
    starts = [*one.distances, 2000]
    for at in (0, 40, len(one.distances) - 1):
        part = slice(starts[at], starts[at + 1])
        expected = np.average(measured[0, part], weights=pairs[part])
        assert one.measured[at] == pytest.approx(expected)
        assert one.predicted[at] == pytest.approx(2 * expected)
