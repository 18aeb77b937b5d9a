"""Loss and gradients of a sharded decoder equal those of one process, for every way to shard."""

from __future__ import annotations

from dataclasses import dataclass, replace

import gloo
import numpy as np
import pytest
import torch
from slow_cases import mostly_slow
from torch import nn

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.config.schema import ModelConfig, RopeConfig
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.parallelize import execute_layers, initialize
from mtrain_cli.model.tiling import LayerExecution
from mtrain_cli.parallel.dispatch import Balancer
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.fsdp import shard_parameters
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.mesh import make_context_group, make_parameter_mesh
from mtrain_cli.training.batch import AttentionSetup, Batches, Layouts

SEQ, BLOCK, VOCAB = 101, 8, 50
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
EXCHANGES = ("all_gather", "ring", "group_cast")
HEADS = ((4, 4), (4, 2), (4, 1))

MODEL = ModelConfig(
    name="test",
    family="qwen2",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    intermediate_size=48,
    qkv_bias=True,
    qk_norm=False,
    tie_word_embeddings=True,
    rms_norm_eps=1e-6,
    init_std=0.1,
    rope=RopeConfig(
        theta=1e4,
        scaling="yarn",
        factor=4.0,
        original_max_position=32,
        beta_fast=32.0,
        beta_slow=1.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
)


@dataclass(frozen=True)
class Sample:
    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    slices: None = None
    positions: None = None


def sample(documents: bool) -> Sample:
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, VOCAB, SEQ + 1).astype(np.int32)
    ids = (
        np.sort(rng.integers(0, 4, SEQ)).astype(np.int32) if documents else np.zeros(SEQ, np.int32)
    )
    labels = tokens[1:].copy()
    labels[np.flatnonzero(np.diff(ids))] = -100
    return Sample(tokens[:SEQ], labels, ids)


def make_decoder(kv_heads: int, tied: bool) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(
            replace(MODEL, num_kv_heads=kv_heads, tie_word_embeddings=tied),
            rope_factor=4.0,
            loss=LossOptions(chunk_bytes=4 * VOCAB * 7),
        )
    execute_layers(decoder, LayerExecution(recompute=True))
    return decoder


def alone(documents: bool, kv_heads: int, tied: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute the reference: one process, no sharding, the mask by definition, PyTorch's loss."""
    decoder = make_decoder(kv_heads, tied)
    decoder.to_empty(device="cpu")
    initialize(decoder, 0)
    one = sample(documents)
    ids, position = torch.from_numpy(one.documents), torch.arange(SEQ)
    seen = (position[:, None] >= position) & (ids[:, None] == ids)

    def attend(q, k, v, _layer):
        group = q.shape[2] // k.shape[2]
        q, k, v = (
            t.transpose(1, 2)
            for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
        )
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    logits = decoder.logits(torch.from_numpy(one.tokens).long()[None], position[None], attend)
    loss = nn.functional.cross_entropy(
        logits[0], torch.from_numpy(one.labels).long(), ignore_index=-100
    )
    loss.backward()
    return loss.item(), {name: p.grad for name, p in decoder.named_parameters()}


def cells(rank: int, world: int, heads: tuple[tuple[int, int], ...]) -> dict[str, float]:
    """Return the largest difference of loss and gradients from one process, for every case."""
    device = torch.device("cpu")
    group = make_context_group(rank, ParallelDims.of(world, cp=world), device)
    mesh = make_parameter_mesh(ParallelDims.of(world), "cpu")
    result = {}
    for _, kv_heads in heads:
        for documents in (False, True):
            expected_loss, expected = alone(documents, kv_heads, documents)
            decoder = make_decoder(kv_heads, documents)
            shard_parameters(decoder, mesh, torch.float32)
            decoder.to_empty(device="cpu")
            initialize(decoder, 0)
            for layout in LAYOUTS:
                balancer = Balancer(world, SEQ) if layout == "balanced" else None
                shape: Layout
                if balancer is None:
                    shape = make_layout(layout, world, SEQ, BLOCK)
                else:
                    shape = balancer.layout([[SequenceMask.causal(SEQ, SEQ)]])
                for exchange in EXCHANGES:
                    layouts = Layouts(make_exchange(exchange, shape, group), balancer)
                    setup = AttentionSetup(SdpaKernel(), MaskRule(document_mask=True))
                    batch = Batches(layouts, {"": setup}, device)([sample(documents)])
                    loss = decoder(
                        batch.tokens, batch.positions, batch.labels, batch.attend, 1.0 / batch.valid
                    )
                    loss.backward()
                    total = loss.detach().clone()
                    torch.distributed.all_reduce(total)
                    differences = [abs(total.item() - expected_loss)]
                    for name, parameter in decoder.named_parameters():
                        differences.append(
                            (parameter.grad.full_tensor() - expected[name]).abs().max().item()
                        )
                        assert expected[name].abs().max() > 1e-4, (
                            "a gradient of almost zero would prove nothing"
                        )
                        parameter.grad = None
                    result[
                        f"{layout}/{exchange}/4:{kv_heads}/{'docs' if documents else 'causal'}"
                    ] = max(differences)
    return result


@mostly_slow("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)], keep=(1,))
def test_loss_and_gradients_equal_those_of_one_process(world):
    for rank, differences in enumerate(gloo.run(world, cells, HEADS)):
        assert len(differences) == len(HEADS) * 2 * len(LAYOUTS) * len(EXCHANGES)
        bad = {cell: value for cell, value in differences.items() if not value < 5e-6}
        assert not bad, f"rank {rank}: {bad}"
