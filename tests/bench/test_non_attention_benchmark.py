"""Steps without attention: timed work equals counted work, and the simulator uses the times."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, INDEX
from mtrain_cli.simulation.calibration import (
    LOSS,
    NonAttentionPoint,
    NonAttentionTimes,
    load_calibration,
)
from mtrain_cli.simulation.scenario import (
    PairSource,
    PredictedScenario,
    Scenario,
    evaluate,
    plan_on,
)
from mtrain_cli.training.flops import layer_matmul, parameters
from mtrain_cli.training.resolution import resolve_run
from mtrain_extras.bench import non_attention as measuring
from mtrain_extras.bench.non_attention import NonAttentionTime, profile_non_attention
from mtrain_extras.bench.timing import save_times

LENGTHS = (128, 256, 640)
H200 = load_cluster("h200_1x8")


@pytest.fixture(scope="module")
def configs():
    words = ["model=tiny", "sparsity=vertical_slash", "topology.workers=1", "topology.device=cpu"]
    return [compose([*words, f"seq={length}"]) for length in LENGTHS]


def test_what_is_timed_is_what_is_counted(configs, monkeypatch):
    """The products that run have the FLOP that the simulator counts, without attention."""
    from torch.utils.flop_counter import FlopCounterMode

    seen = []

    class Bench(measuring._Bench):
        def layer(self, tokens, repeats):
            with FlopCounterMode(display=False) as counter:
                found = super().layer(tokens, repeats)
            seen.append(
                counter.get_total_flops() / len(self.decoder.layers) / (repeats + measuring.WARM_UP)
            )
            return found

        def loss(self, tokens, repeats):
            with FlopCounterMode(display=False) as counter:
                found = super().loss(tokens, repeats)
            assert len(self.decoder.layers) == self.config.model.num_layers
            seen.append(counter.get_total_flops() / (repeats + 2))
            return found

    monkeypatch.setattr(measuring, "_Bench", Bench)
    times = list(profile_non_attention(configs, 1))
    assert [(t.part, t.tokens) for t in times] == [
        (part, n) for n in LENGTHS for part in (FORWARD, BACKWARD, LOSS, INDEX)
    ]
    assert all(t.ms > 0 for t in times)
    for length, (layer, loss) in zip(LENGTHS, zip(seen[::2], seen[1::2], strict=True), strict=True):
        forward, backward, head, index = (
            next(t for t in times if (t.part, t.tokens) == (part, length))
            for part in (FORWARD, BACKWARD, LOSS, INDEX)
        )
        assert layer == pytest.approx(forward.flop + backward.flop), length
        # The counter does not see addmm_, in which the loss forms the gradient of the LM head.
        assert loss + 2 * length * parameters(configs[0].model).embedding == pytest.approx(
            head.flop
        ), length
        assert forward.flop == 2 * length * layer_matmul(configs[0].model, experts=False)
        assert index.flop == index.moved == 0


def test_times_are_of_one_layer_forward_and_backward(configs, monkeypatch):
    """The clock advances 1 s per forward pass of all layers and 2 s per backward pass."""

    class Ticks:
        def __init__(self, _) -> None:
            self.at, self.steps = 0.0, itertools.cycle([0.0, 1.0, 2.0])

        def now(self) -> float:
            self.at += next(self.steps)
            return self.at

        def seconds(self, began: float, ended: float) -> float:
            return ended - began

    monkeypatch.setattr(measuring, "Recorder", Ticks)
    config = replace(
        configs[0], train=replace(configs[0].train, keep_mlp=True, loss_gradients="recompute")
    )
    bench = measuring._Bench(
        config, resolve_run(config, resolve_environment(config)), torch.device("cpu")
    )
    layers = len(bench.decoder.layers)
    assert layers > 1
    assert bench.layer(128, 3) == pytest.approx((1e3 / layers, 2e3 / layers))
    assert all(layer.execution.keep_products for layer in bench.decoder.layers)
    assert bench.decoder.loss.recompute


def test_every_estimate_of_an_index_is_made_anew(configs, monkeypatch):
    from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern

    made = []
    estimate = VerticalSlashPattern.estimate
    monkeypatch.setattr(
        VerticalSlashPattern, "estimate", lambda *arguments: made.append(1) or estimate(*arguments)
    )
    config = configs[0]
    measuring._Bench(
        config, resolve_run(config, resolve_environment(config)), torch.device("cpu")
    ).index(128, 3)
    assert len(made) == 2 + 3


def test_a_layer_is_told_by_the_rows_of_its_tiles(configs, monkeypatch):
    class Bench:
        def __init__(self, *_) -> None:
            pass

        def layer(self, *_):
            return 1.0, 2.0

        loss = index = lambda *_: 3.0

    monkeypatch.setattr(measuring, "_Bench", Bench)
    tiled = replace(configs[-1], train=replace(configs[-1].train, tile_mib=1))
    # A token of the MLP has 11 KiB of temporaries, and a tile is whole in the products' own.
    assert {(t.tokens, t.rows) for t in profile_non_attention([configs[-1], tiled], 1)} == {
        (640, 640),
        (640, 80),
    }


def test_a_file_of_times_is_a_calibration(configs, tmp_path):
    path = tmp_path / "non-attention.json"
    kinds = ((FORWARD, 1.0), (BACKWARD, 2.0), (LOSS, 4.0))
    times = [
        NonAttentionTime(
            part=part,
            tokens=tokens,
            rows=tokens // 2,
            ms=each * tokens,
            flop=1e6 * tokens,
            moved=1e3,
            heads=4,
        )
        for part, each in kinds
        for tokens in (256, 1024)
    ]
    times += [
        NonAttentionTime(
            part=INDEX, tokens=n, rows=n, ms=1.5 + 0.25 * n, flop=0.0, moved=0.0, heads=4
        )
        for n in (100, 200, 400)
    ]
    save_times(path, times, "mtrain profile non-attention", **measuring.about(configs[0], "cpu"))
    found = load_calibration(path)
    assert found.curves == ()
    assert found.non_attention is not None
    assert found.non_attention.parts == {FORWARD, BACKWARD, LOSS, INDEX}
    # Interpolates between measured lengths; below them, the shortest; above, time per token. More
    # heads lengthen all but the launches.
    assert [found.non_attention.index(n, 4, 1000.0) for n in (1, 150, 402)] == pytest.approx(
        [26500.0, 39000.0, 103500.0]
    )
    assert [
        found.non_attention.index(n, heads, 1000.0) for n, heads in ((100, 12), (150, 12), (150, 2))
    ] == pytest.approx([26500.0, 64000.0, 39000.0])
    document = json.loads(path.read_text())
    float32 = tmp_path / "float32.json"
    float32.write_text(json.dumps(document | {"dtype": "float16"}))
    with pytest.raises(
        ConfigError, match="dtype float16, but the first file was measured with dtype float32"
    ):
        load_calibration(path, float32)
    early = tmp_path / "early.json"
    early.write_text(json.dumps(document | {"times": document["times"][:2]}))
    with pytest.raises(
        ConfigError, match="it lacks times of backward and loss; the measurement ended early"
    ):
        load_calibration(early)
    # Of the same size in several files the median counts.
    assert load_calibration(path, path).non_attention.index(100, 4, 0.0) == 26500.0
    document["times"][0]["ms"] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="is damaged"):
        load_calibration(path)


def _step(non_attention: NonAttentionTimes | None, monkeypatch, **more) -> PredictedScenario:
    from mtrain_cli.simulation import calibration

    monkeypatch.setattr(calibration, "_non_attention_of", lambda *_: non_attention)
    pairs = PairSource("clustered", 0.05, 2048)
    config = compose(["model=qwen3b", "seq=128k", *pairs.sparsity()])
    plan = plan_on(H200, config, workers=4, layout="striped", exchange="all_gather")
    return evaluate(H200, Scenario(config, pairs.problem(config)), plan, **more)


def test_an_index_costs_the_measured_time_scaled_by_heads(monkeypatch):
    points = tuple(
        NonAttentionPoint(INDEX, n, us, 0.0, 0.0, 8) for n, us in ((16384, 5000.0), (49152, 7000.0))
    )
    found = _step(NonAttentionTimes(points), monkeypatch, bounds=False).attention
    # 16 heads here, 8 there, whose launches are the same; 32K tokens on each of four.
    assert found.passes[FORWARD].spent["index"] == pytest.approx(5.0 + 2 * 1.0)


def test_attention_is_skipped_and_gradients_pass():
    q, k, v = (torch.randn(1, 5, 2, 3, requires_grad=True) for _ in range(3))
    out = measuring._no_attention(q, k, v, 0)
    assert torch.equal(out, q)
    out.sum().backward()
    assert torch.equal(q.grad, torch.ones_like(q))
    assert not k.grad.any()
    assert not v.grad.any()
