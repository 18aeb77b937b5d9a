"""On a GPU: decode kernels equal the oracle, and a CUDA graph replays the steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attention.test_decode import SCALE, oracle
from command import mtrain
from inference.small_models import tokens, write_hf
from model.tiny_models import PLAIN

from mtrain_cli.attention.partials import merge_parts, pack_part
from mtrain_cli.attention.triton_kernel import TritonKernel
from mtrain_cli.inference.engine import DecodeStep, Engine, KvCache
from mtrain_cli.inference.model_source import open_source
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.model.parallelize import ExecutedLayer
from mtrain_cli.model.rope import inverse_frequencies, rotate, rotation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
USED = (0, 1, 127, 128, 4999, 5000)
NEW = 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (8, 8), (28, 4), (5, 5)])
@pytest.mark.parametrize("dim", [64, 128])
def test_decode_equals_the_oracle(heads, kv_heads, dim, dtype):
    torch.manual_seed(0)
    q = torch.randn(len(USED), 1, heads, dim, device="cuda", dtype=dtype)
    k, v = (
        torch.randn(len(USED), 5000, kv_heads, dim, device="cuda", dtype=dtype) for _ in range(2)
    )
    used = torch.tensor(USED, dtype=torch.int32, device="cuda")
    out, lse = TritonKernel().decode(q, k, v, used, SCALE)
    want_out, want_lse = oracle(*(t.cpu() for t in (q, k, v, used)))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.double().cpu(), want_out, atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=5e-3, rtol=1e-3)
    assert bool(lse[0].isneginf().all())
    assert not bool(out[0].any())


@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (2, 128), (5, 80)])
def test_one_kernel_rotates_like_the_operations_of_training(heads, dim):
    torch.manual_seed(0)
    x = torch.randn(3, 1, heads, dim, device="cuda", dtype=torch.bfloat16)
    frequencies = inverse_frequencies(PLAIN, dim, 1.0).cuda()
    positions = torch.tensor([[0], [131_071], [1_000_003]], device="cuda")
    angles = rotation(positions, frequencies, 1.0)
    with_gradients = rotate(x, angles.cos_BN1F, angles.sin_BN1F)
    with torch.no_grad():
        fused = rotate(x, angles.cos_BN1F, angles.sin_BN1F)
    # The kernel may round a product and a sum once, not twice. Where both products nearly cancel,
    # the difference is small beside them, not beside the result.
    torch.testing.assert_close(fused, with_gradients, atol=2**-11, rtol=2**-8)


def test_parts_of_workers_merge_to_the_whole():
    torch.manual_seed(0)
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 900, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    used = torch.tensor([900, 300], dtype=torch.int32, device="cuda")
    cut = 512
    first = TritonKernel().decode(q, k, v, used.clamp(max=cut), SCALE)
    rest = (t[:, cut:].contiguous() for t in (k, v))
    last = TritonKernel().decode(q, *rest, (used - cut).clamp(min=0), SCALE)
    out, lse = merge_parts(torch.stack([pack_part(*first), pack_part(*last)]))
    want_out, want_lse = oracle(*(t.cpu() for t in (q, k, v, used)))
    torch.testing.assert_close(out.double().cpu(), want_out, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double().cpu(), want_lse, atol=5e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Engine:
    folder: Path = write_hf(tmp_path_factory.mktemp("model") / "hf")
    source = open_source(folder, ["topology.device=cuda", "topology.workers=1"])
    return Engine(source, resolve_environment(source.config))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9, 40, seed=3)])
def test_a_graph_gives_the_tokens_of_single_steps(loaded, sampling, monkeypatch):
    prompts = [tokens(300), tokens(7), tokens(1000)]
    replayed = [c.ids for c in loaded.generate(prompts, NEW, sampling)]
    monkeypatch.setattr(DecodeStep, "capture", lambda _: None)
    loaded._kept = None  # it has a graph
    assert replayed == [c.ids for c in loaded.generate(prompts, NEW, sampling)]
    assert {len(ids) for ids in replayed} == {NEW}


def test_a_text_ends_at_its_end_token_while_the_next_step_runs(loaded):
    prompts = [tokens(300), tokens(7)]
    whole = [c.ids for c in loaded.generate(prompts, NEW, Sampling())]
    end = whole[0][NEW // 2]
    found = loaded.generate(prompts, NEW, Sampling(), frozenset({end}))
    for ids, completion in zip(whole, found, strict=True):
        assert completion.ids == (ids[: ids.index(end)] if end in ids else ids)


def test_a_smaller_batch_replays_the_graph_of_a_larger_one(loaded, monkeypatch):
    loaded._kept = None
    prompts = [tokens(300), tokens(310), tokens(290)]
    list(loaded.generate(prompts, NEW, Sampling()))
    kept = loaded._kept

    def again(_) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr(DecodeStep, "capture", again)
    found = [c.ids for c in loaded.generate(prompts[:2], NEW, Sampling())]
    assert loaded._kept is kept
    assert [len(ids) for ids in found] == [NEW, NEW]
    loaded._kept = None


def test_a_replay_runs_no_python(loaded, monkeypatch):
    cache = KvCache(loaded.config.model, 1, 400, loaded.choices.dtype, loaded.device)
    kernel, group = loaded.choices.kernel, loaded.group
    step = DecodeStep(loaded.decoder, cache, kernel, group, Sampling(), NEW)
    step.capture()
    ids = tokens(300)
    step.begin(loaded.prefill(ids, cache, 0), [300], [Sampling().uniforms(0, NEW)])
    monkeypatch.setattr(ExecutedLayer, "forward", None)
    for _ in range(NEW - 1):
        step.run()
    assert cache.used.tolist() == [300 + NEW - 1]
    assert step.positions.tolist() == [[300 + NEW - 1]]


def test_cached_logits_are_near_those_of_a_whole_forward_pass(loaded):
    cache = KvCache(loaded.config.model, 1, 400, loaded.choices.dtype, loaded.device)
    kernel, group = loaded.choices.kernel, loaded.group
    step = DecodeStep(loaded.decoder, cache, kernel, group, Sampling(), NEW)
    step.capture()
    whole = tokens(300)
    logits = [loaded.prefill(whole, cache, 0)]
    step.begin(logits[0], [300], [Sampling().uniforms(0, NEW)])
    for _ in range(NEW - 1):
        whole.append(int(step.tokens))
        step.run()
        assert step.logits is not None
        logits.append(step.logits.clone())
    x_1NC, _ = loaded.hidden(whole)
    expected = loaded.decoder.head(x_1NC[:, 299 : len(whole)])[0]
    error = (torch.cat(logits).float() - expected.float()).abs().max()
    assert error < 0.05 * expected.float().abs().max()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_two_gpus_give_the_text_of_one(tmp_path, kv_heads):
    """The graph contains the messages between the workers."""
    write_hf(tmp_path / "hf", num_kv_heads=kv_heads)
    rows = [{"ids": tokens(700)}, {"ids": tokens(3)}]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for workers in (1, 2):
        result = mtrain(
            tmp_path, "generate", "hf", "train.dtype=float32", "train.kernel=triton",
            f"topology.workers={workers}", "--prompt-file", "ids.jsonl", "--max-new", "20",
            "--json",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        found.append([json.loads(line)["ids"] for line in result.stdout.splitlines()])
    assert found[0] == found[1]
