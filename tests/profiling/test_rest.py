"""What a step computes beside attention: what is timed is what is counted, and the simulator takes the times."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from mtrain_cli.config.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, INDEX
from mtrain_cli.profiling import rest as measuring
from mtrain_cli.profiling.rest import RestTime, profile_rest, save_rest
from mtrain_cli.simulation.calibration import LOSS, Measured, RestPoint, load_calibration
from mtrain_cli.simulation.cluster import load_cluster
from mtrain_cli.simulation.rest import Rest
from mtrain_cli.simulation.scenario import Outcome, Pairs, Scenario, evaluate, plan_on
from mtrain_cli.training.flops import parameters

LENGTHS = (128, 256, 640)
H200 = load_cluster("h200_1x8")


@pytest.fixture(scope="module")
def configs():
    words = ["model=tiny", "sparsity=vertical_slash", "topology.workers=1", "topology.device=cpu"]
    return [compose([*words, f"seq={length}"]) for length in LENGTHS]


def test_what_is_timed_is_what_is_counted(configs, monkeypatch):
    """Products are seen where they run: as many FLOP as the simulator counts for the part, and none of attention."""
    from torch.utils.flop_counter import FlopCounterMode

    seen = []

    class Bench(measuring._Bench):
        def layer(self, tokens, repeats):
            with FlopCounterMode(display=False) as counter:
                found = super().layer(tokens, repeats)
            seen.append(counter.get_total_flops() / len(self.decoder.layers) / (repeats + measuring._UNCOUNTED))
            return found

        def loss(self, tokens, repeats):
            with FlopCounterMode(display=False) as counter:
                found = super().loss(tokens, repeats)
            assert len(self.decoder.layers) == self.config.model.num_layers
            seen.append(counter.get_total_flops() / (repeats + 2))
            return found

    monkeypatch.setattr(measuring, "_Bench", Bench)
    reported: list[RestTime] = []
    times = profile_rest(configs, 1, reported.append)
    assert times == reported
    assert [(t.part, t.tokens) for t in times] == [(part, n) for n in LENGTHS for part in (FORWARD, BACKWARD, LOSS, INDEX)]
    assert all(t.ms > 0 for t in times)
    for length, (layer, loss) in zip(LENGTHS, zip(seen[::2], seen[1::2], strict=True), strict=True):
        forward, backward, head, index = (
            next(t for t in times if (t.part, t.tokens) == (part, length)) for part in (FORWARD, BACKWARD, LOSS, INDEX)
        )
        assert layer == pytest.approx(forward.flop + backward.flop), length
        # The counter does not see addmm_, in which the loss forms the gradient of the LM head.
        assert loss + 2 * length * parameters(configs[0].model).embedding == pytest.approx(head.flop), length
        assert forward.flop == 2 * length * parameters(configs[0].model).layer_matmul
        assert index.flop == index.moved == 0


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
    assert {(t.tokens, t.rows) for t in profile_rest([configs[-1], tiled], 1, lambda _: None)} == {(640, 640), (640, 80)}


def test_a_file_of_times_is_a_calibration(configs, tmp_path):
    path = tmp_path / "rest.json"
    kinds = ((FORWARD, 1.0), (BACKWARD, 2.0), (LOSS, 4.0))
    times = [
        RestTime(part=part, tokens=tokens, rows=tokens // 2, ms=each * tokens, flop=1e6 * tokens, moved=1e3, heads=4)
        for part, each in kinds
        for tokens in (256, 1024)
    ]
    times += [RestTime(part=INDEX, tokens=n, rows=n, ms=1.5 + 0.25 * n, flop=0.0, moved=0.0, heads=4) for n in (100, 200, 400)]
    save_rest(times, path, "mtrain profile rest", configs[0], "cpu")
    found = load_calibration(path)
    assert found.curves == ()
    assert found.rest is not None
    assert found.rest.parts == {FORWARD, BACKWARD, LOSS, INDEX}
    # In between by what was measured, shorter as the shortest, longer by what a token takes; more heads take longer, fewer no less.
    assert [found.rest.index(n, 4, 1000.0) for n in (1, 150, 402)] == pytest.approx([26500.0, 39000.0, 103500.0])
    assert [found.rest.index(100, heads, 1000.0) for heads in (2, 12)] == pytest.approx([26500.0, 3 * 26500.0])
    # A layer by the rows of its tiles, a loss by its tokens; in between by the logarithm, outside as at the end.
    assert [found.rest.share(FORWARD, size, lambda _: 100.0) for size in (1, 128, 512, 10**6)] == [2560.0, 2560.0, 10240.0, 10240.0]
    assert found.rest.share(LOSS, 512, lambda _: 1000.0) == pytest.approx((1024 + 4096) / 2)
    document = json.loads(path.read_text())
    document["times"][0]["ms"] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="is damaged"):
        load_calibration(path)


def _step(rest: Measured | None, monkeypatch, **more) -> Outcome:
    from mtrain_cli.simulation import calibration

    monkeypatch.setattr(calibration, "_rest_of", lambda *_: rest)
    pairs = Pairs("uniform", 0.05, 2048)
    config = compose(["model=qwen3b", "seq=128k", *pairs.sparsity()])
    plan = plan_on(H200, config, workers=4, layout="striped", exchange="all_gather")
    return evaluate(H200, Scenario(config, pairs.problem(config)), plan, **more)


def test_steps_are_priced_by_what_was_measured(monkeypatch):
    """Parts that take 1.5 times as long as the constants say make the parts of a step so much longer, and no others."""
    flops, bytes_us = H200.gpu.gemm_tflops.value * 1e6, H200.gpu.hbm_gbps.value * 1e3

    def measured(longer: float) -> Measured:
        return Measured(
            tuple(RestPoint(part, 1000, longer * (1e9 / flops + 2e6 / bytes_us), 1e9, 2e6, 16) for part in (FORWARD, BACKWARD, LOSS))
        )

    by_constants, alike, longer = (_step(rest, monkeypatch).step for rest in (None, measured(1.0), measured(1.5)))
    assert alike.parts == pytest.approx(by_constants.parts)
    for part in ("matrices", "recomputed"):
        assert longer.parts[part] == pytest.approx(1.5 * alike.parts[part]), part
    for part in ("attention", "index", "optimizer", "links"):
        assert longer.parts[part] == alike.parts[part], part
    # Copies of weights are no part of it.
    for part in ("element-wise", "loss"):
        assert alike.parts[part] < longer.parts[part] < 1.5 * alike.parts[part], part
    assert alike.seconds.high - alike.seconds.low < by_constants.seconds.high - by_constants.seconds.low
    assert alike.seconds.low < alike.seconds.value < alike.seconds.high


@pytest.mark.parametrize(("tile_mib", "rows", "size"), [(0, 32768, 32768), (4096, 16384, 16384), (256, 1792, 4096)])
def test_small_tiles_are_not_taken_for_layers_of_as_few_tokens(tile_mib, rows, size):
    """A layer of few tokens waits for the host, once; the tiles of one do not each."""
    config = compose(["model=qwen3b", "seq=128k", f"train.tile_mib={tile_mib}"])
    rest = Rest.of(plan_on(H200, config, workers=4, layout="striped", exchange="all_gather"))
    assert (rest.tokens, rest.rows) == (32768, rows)
    assert rest.size(FORWARD) == rest.size(BACKWARD) == size
    assert rest.size(LOSS) == 32768
    few = Rest.of(plan_on(H200, compose(["model=qwen3b", "seq=4k"]), workers=4, layout="striped", exchange="all_gather"))
    assert few.size(FORWARD) == few.tokens == 1024


def test_an_index_costs_what_was_measured_by_its_heads(monkeypatch):
    points = tuple(RestPoint(INDEX, n, us, 0.0, 0.0, 8) for n, us in ((16384, 5000.0), (49152, 7000.0)))
    found = _step(Measured(points), monkeypatch, bounds=False).attention
    # 16 heads here, 8 there; of 32K tokens on each of four.
    assert found.passes[FORWARD].spent["index"] == pytest.approx(2 * 6.0)


def test_times_of_another_gpu_are_none():
    from mtrain_cli.simulation import calibration

    (h200,) = calibration.shipped()
    assert calibration._rest_of("NVIDIA H200", None) is h200.rest is not None
    assert calibration._rest_of("NVIDIA A100-SXM4-40GB", None) is None
    own = replace(h200, device="NVIDIA A100-SXM4-40GB", curves=())
    assert calibration._rest_of("NVIDIA A100-SXM4-40GB", own) is h200.rest
    # A file without kernels leaves those that ship.
    assert calibration.kernels_for("NVIDIA H200", 989e12, "flash4", "sparse", {"NVIDIA H200": 989e12}, replace(h200, curves=())).calibrated


def test_attention_is_left_out_and_gradients_pass():
    q, k, v = (torch.randn(1, 5, 2, 3, requires_grad=True) for _ in range(3))
    out = measuring._left_out(q, k, v, 0)
    assert torch.equal(out, q)
    out.sum().backward()
    assert torch.equal(q.grad, torch.ones_like(q))
    assert not k.grad.any()
    assert not v.grad.any()
