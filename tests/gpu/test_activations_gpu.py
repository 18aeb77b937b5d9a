"""Activation offload on a GPU frees device memory, changes no bit and never makes the host wait."""

from __future__ import annotations

import os

import pytest
import torch
from parallel.ways import make_attention

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.config.schema import ModelConfig, RopeConfig
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.parallelize import execute_layers, initialize
from mtrain_cli.model.tiling import LayerExecution
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.pinned_memory import ARENA, PinnedMemory, register, unregister

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # required for deterministic products; read once per process
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SEQ, LAYERS, HIDDEN = 16384, 8, 1024
KEPT = 2 * SEQ * (HIDDEN + HIDDEN) + 4 * SEQ * 8  # bytes of a layer with selective checkpointing
ROPE = RopeConfig(
    theta=1e4, scaling="none", factor=1.0, original_max_position=4096, beta_fast=32.0,
    beta_slow=1.0, low_freq_factor=1.0,
    high_freq_factor=4.0,
)  # fmt: skip
MODEL = ModelConfig(
    name="test", family="qwen2", vocab_size=512, hidden_size=HIDDEN, num_layers=LAYERS, num_heads=8,
    num_kv_heads=2, head_dim=128,
    intermediate_size=2816, qkv_bias=True, qk_norm=False, tie_word_embeddings=True,
    rms_norm_eps=1e-6, init_std=0.05, rope=ROPE,
)  # fmt: skip


class Steps:
    """A decoder and its forward and backward passes on one sequence."""

    def __init__(
        self,
        checkpoint: str,
        keep: float,
        *,
        offload: bool | int = False,
        tile_mib: int = 0,
        compile: bool = False,
        seq: int = SEQ,
        exact: bool = False,
    ) -> None:
        """exact: compute in float32, with the oracle for attention."""
        device = torch.device("cuda")
        self.offload = ActivationOffload(LAYERS, device, offload) if offload else None
        with torch.device("meta"):
            loss = LossOptions(chunk_bytes=16 << 20, compile=compile)
            self.decoder = Decoder(MODEL, loss=loss)
        execution = LayerExecution(
            recompute=checkpoint != "none",
            compile=compile,
            tile_bytes=tile_mib << 20,
            offload=self.offload,
        )
        execute_layers(self.decoder, execution)
        self.decoder.to_empty(device=device)
        initialize(self.decoder, 0)
        self.decoder.to(torch.float32 if exact else torch.bfloat16)
        exchange = make_exchange("all_gather", make_layout("striped", 1, seq, 128), ContextGroup())
        masks = [SequenceMask.causal(seq, seq)]
        kernel = ReferenceKernel() if exact else SdpaKernel()
        self.attend = make_attention(
            exchange, kernel, masks, device, keep=keep, offload=self.offload
        )
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(512, (1, seq), generator=generator).to(device)
        self.positions = torch.arange(seq, device=device)[None]
        self.between = 0  # bytes allocated after the forward pass

    def __call__(self, *, keep_gradients: bool = False) -> torch.Tensor:
        if not keep_gradients:
            self.decoder.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        loss = self.decoder(
            self.tokens, self.positions, self.tokens, self.attend, 1 / self.tokens.shape[1]
        )
        self.between = torch.cuda.memory_allocated() - before
        loss.backward()
        return loss.detach()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.decoder.named_parameters()]

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.decoder.parameters()]


@pytest.fixture
def deterministic():
    """Without this, attention's backward adds to query gradients in any order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("checkpoint", "keep", "offload"),
    [
        ("selective", 1.0, True),
        ("sequence_selective", 0.5, True),
        ("full", 0.0, True),
        ("selective", 1.0, 3),
    ],
)
def test_offloading_changes_no_bit_and_the_host_never_waits(checkpoint, keep, offload):
    plain, offloaded = Steps(checkpoint, keep), Steps(checkpoint, keep, offload=offload)
    for steps in (plain, offloaded):
        steps()  # allocate buffers, events and workspaces
    assert offloaded.offload is not None
    allocated = offloaded.offload.allocated
    for _ in range(3):
        expected = plain()
        gradients = [gradient.clone() for gradient in plain.gradients()]
        plain()
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain.gradients(), strict=True)), (
            "steps must be repeatable"
        )
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = offloaded()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(loss, expected)
        assert all(torch.equal(a, b) for a, b in zip(offloaded.gradients(), gradients, strict=True))
    assert offloaded.offload.allocated == allocated > 0, "host buffers are reused"
    assert offloaded.offload.waiting == 0


@pytest.mark.parametrize(("offload", "freed", "away"), [(True, LAYERS - 2, LAYERS - 1), (3, 3, 3)])
def test_offloading_frees_the_layers_memory_except_for_two(offload, freed, away):
    plain, offloaded = Steps("selective", 1.0), Steps("selective", 1.0, offload=offload)
    peaks = []
    for steps in (plain, offloaded):
        steps()
    for steps in (plain, offloaded):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps(keep_gradients=True)  # new buffers would move the peak
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert plain.between - offloaded.between == pytest.approx(freed * KEPT, rel=0.02)
    assert peaks[0] - peaks[1] > (freed - 1) * KEPT
    assert offloaded.offload is not None
    assert offloaded.offload.allocated == away * KEPT


@pytest.mark.parametrize("compile", [False, True])
def test_recomputation_and_tiles_are_as_accurate_as_autograd(compile):
    """Compare with float32 arithmetic on the same weights, as autograd in bfloat16 is."""
    exact, plain = Steps("none", 0.0, seq=2048, exact=True), Steps("none", 0.0, seq=2048)
    for ours, theirs in zip(exact.decoder.parameters(), plain.decoder.parameters(), strict=True):
        ours.data.copy_(theirs.data)
    loss = exact()
    plain()
    far = dict(zip(plain.names, distances(plain, exact), strict=True))
    assert all(0 < distance < 0.3 for name, distance in far.items() if "k_proj.bias" not in name), (
        far
    )
    for checkpoint, keep in [
        ("selective", 1.0),
        ("sequence_selective", 0.25),
        ("full", 0.0),
        ("none", 0.0),
    ]:
        steps = Steps(checkpoint, keep, seq=2048, tile_mib=8, compile=compile)
        torch.testing.assert_close(steps(), loss, rtol=1e-3, atol=0)
        for name, distance in zip(steps.names, distances(steps, exact), strict=True):
            if "k_proj.bias" in name:
                continue  # its gradient is only rounding: softmax ignores what all keys share
            assert distance < 1.3 * far[name] + 1e-3, (checkpoint, name, distance, far[name])


def distances(steps: Steps, exact: Steps) -> list[float]:
    """Return the relative distance of every parameter's gradient."""
    pairs = zip(steps.gradients(), exact.gradients(), strict=True)
    return [float((ours.float() - theirs).norm() / theirs.norm()) for ours, theirs in pairs]


def test_host_blocks_are_pinned_and_exceed_the_estimate_by_at_most_two_arenas():
    store = ActivationOffload(2, torch.device("cuda"))
    tensor = torch.randn(73 << 20, device="cuda")  # 292 MiB: 18 full blocks, and one of 4
    kept = store.put(0, tensor)
    stays = store.put(1, tensor)
    assert store.allocated == 292 << 20
    assert kept.host is not None
    assert all(block.is_pinned() for block in kept.host)
    assert store._memory.registers
    assert store._memory.mapped == 3 * ARENA
    assert torch.equal(stays.get(), tensor)
    assert torch.equal(kept.get(), tensor)


def test_pinned_memory_is_released_and_a_failed_pin_leaves_no_error():
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    memory = PinnedMemory(device)
    tensor = memory.tensor((1000, 1000), torch.float32)
    address = tensor.untyped_storage().data_ptr()
    assert not register(address, ARENA, device), "it must be pinned already"
    assert torch.ones(3, device=device).sum() == 3
    plain = torch.ones(1 << 20)
    assert register(plain.data_ptr(), plain.nbytes, device)
    assert plain.is_pinned()
    unregister(plain.data_ptr(), device)
    assert not plain.is_pinned()
    tensor.copy_(torch.full((1000, 1000), 7.0, device=device), non_blocking=True)
    del memory, tensor  # while the copy may still run
    assert torch.ones(3, device=device).sum() == 3
