"""Which requests the Triton kernel serves, its reasons for refusing others, and its tile plan."""

import pytest
import torch
from attention.sparse_problems import make_problem
from mtrain_cli.kernels.triton import sparse

from mtrain_cli.attention.kernel import IndexRequest, KernelRequest
from mtrain_cli.attention.kernel_registry import choose, survey
from mtrain_cli.attention.triton_kernel import TritonKernel, make_tile_plan
from mtrain_cli.config.schema import ConfigError


def request(**changed) -> KernelRequest:
    default = {
        "device": "cuda", "capability": (8, 0), "dtype": "bfloat16", "head_dim": 128,
        "num_heads": 16, "num_kv_heads": 2,
        "index": IndexRequest(128, bitmap=False),
    }  # fmt: skip
    return KernelRequest(**{**default, **changed})


def test_it_serves_ampere_and_later_even_if_deterministic():
    assert TritonKernel().unsupported_reason(request()) is None
    assert TritonKernel().unsupported_reason(request(deterministic=True, capability=(9, 0))) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"dtype": "float16"}, "computes bfloat16 or float32, not float16"),
        ({"head_dim": 96}, "head_dim 96 is none of 16, 32, 64, 128"),
        ({"head_dim": 256}, "head_dim 256 is none of 16, 32, 64, 128"),
        ({"index": IndexRequest(256, bitmap=True)}, "sparsity.block 256 is none of"),
    ],
)
def test_it_gives_the_reason_why_it_is_unusable(changed, reason):
    assert reason in TritonKernel().unsupported_reason(request(**changed))


def test_without_a_gpu_it_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert (
        TritonKernel().unsupported_reason(request(device="cpu", capability=None, dtype="float32"))
        == "needs a CUDA GPU"
    )


def test_an_index_is_never_computed_densely_on_a_gpu():
    reasons = dict(survey(request(capability=(8, 0))))
    assert reasons["triton"] is None
    assert reasons["sdpa"] == "FlashAttention-2 in PyTorch computes dense attention only"
    kernel, why = choose("auto", request(capability=(8, 0)))
    assert kernel.name == "triton"
    assert "flash4: needs compute capability 9.0" in why
    with pytest.raises(
        ConfigError, match=r"train\.kernel=sdpa: FlashAttention-2 .* usable here: triton, reference"
    ):
        choose("sdpa", request(capability=(8, 0)))


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert TritonKernel().missing_package(request()).startswith("triton is not installed")
    assert TritonKernel().unsupported_reason(request()) is None


@pytest.mark.parametrize("kind", ["bitmap", "local bitmap"])
@pytest.mark.parametrize("where", ["whole", "striped", "later queries"])
def test_lists_hold_the_blocks_that_index_and_mask_leave(kind, where):
    p = make_problem(
        3, kind, seq=1609, block=16, heads=4, kv_heads=2, dim=16, documents=True, where=where
    )
    index, geometry = p.tiles.index, p.tiles.geometry
    plan = make_tile_plan(p.tiles, backward=True)
    assert make_tile_plan(p.tiles).entries_t is None
    queries, keys = geometry.query_blocks.long(), geometry.key_blocks.long()
    touched = (keys <= queries[:, None]) & (
        (keys + 1) * 16 > geometry.tables.first_min[:, queries][..., None]
    )
    want = (index.chosen(queries, keys) & touched[:, None]).flatten(0, 1)
    for entries, counts, chosen, numbers in (
        (plan.entries, plan.counts, want, keys),
        (plan.entries_t, plan.counts_t, want.transpose(-1, -2), queries),
    ):
        assert entries.dtype == torch.int16
        assert torch.equal(counts.long(), chosen.sum(-1))
        ends = counts.flatten().tolist()
        for row, end, on in zip(entries.flatten(0, 1), ends, chosen.flatten(0, 1), strict=True):
            assert row[:end].tolist() == numbers[on].tolist()


def test_lists_of_many_blocks_use_int32():
    blocks, ends = 40_000, torch.tensor([39_998, 39_999], dtype=torch.int32)
    bits = torch.zeros(1, 1, 2, blocks, dtype=torch.bool)
    bits[0, 0, 0, [3, 600, 39_990]] = True
    slots = torch.full((blocks,), -1, dtype=torch.int32)
    slots[39_998:] = torch.arange(2, dtype=torch.int32)
    first = torch.zeros(1, blocks, dtype=torch.int32)
    entries, counts = sparse.list_blocks(
        bits, slots, ends, torch.arange(blocks, dtype=torch.int32), first, 16, transposed=False
    )
    assert (entries.dtype, entries[0, 0, :3].tolist(), counts.tolist()) == (
        torch.int32,
        [3, 600, 39_990],
        [[3, 0]],
    )
