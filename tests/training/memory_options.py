"""How far gradients with each memory option deviate from those without."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from parallel.ways import Way

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.config.schema import ModelConfig, RopeConfig
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.parallelize import execute_layers, initialize
from mtrain_cli.model.tiling import LayerExecution
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.fsdp import shard_parameters
from mtrain_cli.parallel.layout import early_queries, make_layout
from mtrain_cli.parallel.mesh import make_context_group, make_parameter_mesh
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern
from mtrain_cli.training.batch import AttentionSetup, Batches, Layouts

SEQ, BLOCK, VOCAB = 250, 16, 50
ROPE = RopeConfig(
    theta=1e4, scaling="none", factor=1.0, original_max_position=32, beta_fast=32.0, beta_slow=1.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)  # fmt: skip
MODEL = ModelConfig(
    name="test", family="qwen3", vocab_size=VOCAB, hidden_size=32, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8,
    intermediate_size=48, qkv_bias=True, qk_norm=True, tie_word_embeddings=True, rms_norm_eps=1e-6,
    init_std=0.1, rope=ROPE,
)  # fmt: skip
LAYERS = MODEL.num_layers


@dataclass(frozen=True)
class Option:
    """One way to save memory: settings of the decoder and its attention."""

    checkpoint: str = "none"
    keep: float = 0.0
    offload: bool | int = False
    tile_bytes: int = 0
    loss_gradients: str = "forward"
    keep_mlp: bool | int = False


TILE = (
    4 * 40 * (6 * MODEL.intermediate_size + 4 * MODEL.hidden_size)
)  # 40 tokens, which divide nothing here
OPTIONS = {
    "selective": Option("selective", 1.0),
    "selective, offloaded": Option("selective", 1.0, offload=True),
    "sequence_selective, half kept": Option("sequence_selective", 0.5),
    "sequence_selective, a quarter kept, offloaded": Option(
        "sequence_selective", 0.25, offload=True
    ),
    "full": Option("full"),
    "full, offloaded": Option("full", offload=True),
    "full, one layer offloaded": Option("full", offload=1),
    "tiles": Option(tile_bytes=TILE),
    "sequence_selective, tiles, offloaded": Option(
        "sequence_selective", 0.5, offload=True, tile_bytes=TILE
    ),
    "selective, MLP of two layers kept": Option("selective", 1.0, keep_mlp=2),
    "full, MLP kept, tiles, offloaded": Option(
        "full", offload=True, keep_mlp=True, tile_bytes=TILE
    ),
    "tiles, MLP kept": Option(tile_bytes=TILE, keep_mlp=True),
    "loss by recomputation": Option(loss_gradients="recompute"),
}
WAYS = {
    1: (Way("all_gather"),),
    2: (
        Way("all_gather"),
        Way("all_gather", chunks=2),
        Way("ring"),
        Way("ring", circulates="queries"),
        Way("all_gather", heads=2),
    ),
    4: (
        Way("hierarchical_ring", per_node=2),
        Way("ring", heads=2),
        Way("hierarchical_all_gather", per_node=2),
    ),
}


@dataclass(frozen=True)
class Sample:
    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    slices: None = None
    positions: None = None


def sample(seed: int) -> Sample:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, SEQ + 1).astype(np.int32)
    ids = np.sort(rng.integers(0, 3, SEQ)).astype(np.int32)
    labels = tokens[1:].copy()
    labels[np.flatnonzero(np.diff(ids))] = -100
    return Sample(tokens[:SEQ], labels, ids)


@dataclass
class CountingKernel(SdpaKernel):
    """Count the query-key pairs of the mask and the calls, forward and backward."""

    pairs: int = 0
    backward_pairs: int = 0

    def forward(self, q, k, v, tiles, scale):
        self.pairs += tiles.pairs
        return super().forward(q, k, v, tiles, scale)

    def backward(self, dout, saved, tiles, scale):
        self.backward_pairs += tiles.pairs
        return super().backward(dout, saved, tiles, scale)


@dataclass(frozen=True, kw_only=True)
class CountingPattern(VerticalSlashPattern):
    estimates: list[int] = field(default_factory=list, compare=False)

    def estimate(self, q, k, masked, layer):
        self.estimates.append(layer)
        return super().estimate(q, k, masked, layer)


def pattern() -> CountingPattern:
    return CountingPattern(
        block=BLOCK, last_q=16, windows=1, p_v=0.4, p_s=0.4, joint=False, sink_tokens=2,
        min_columns=2, max_columns=20,
        min_slashes=1, max_slashes=0, index_per="query_head",
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One step: loss, gradients of this worker's shards by name, and the work done for them."""

    loss: float
    gradients: dict[str, torch.Tensor]
    pairs: int
    backward_pairs: int
    estimates: int
    offloaded: int


def step(option: Option, world: int, exchange, sparse: bool) -> Outcome:
    """Run two micro-batches of two sequences, accumulating gradients."""
    device = torch.device("cpu")
    offload = ActivationOffload(LAYERS, device, option.offload) if option.offload else None
    with torch.device("meta"):
        decoder = Decoder(
            MODEL,
            loss=LossOptions(
                4 * VOCAB * 37, z_loss=1e-3, recompute=option.loss_gradients == "recompute"
            ),
        )
    execution = LayerExecution(
        recompute=option.checkpoint != "none", tile_bytes=option.tile_bytes, offload=offload
    )
    execute_layers(decoder, execution, keep_mlp=option.keep_mlp)
    shard_parameters(decoder, make_parameter_mesh(ParallelDims.of(world), "cpu"), torch.float32)
    decoder.to_empty(device="cpu")
    initialize(decoder, 0)
    kernel, chosen = CountingKernel(), pattern() if sparse else None
    setup = AttentionSetup(kernel, MaskRule(document_mask=True), chosen, option.keep)
    make = Batches(Layouts(exchange), {"": setup}, device, offload=offload)
    loss = torch.zeros(())
    for number in range(2):
        batch = make([sample(2 * number), sample(2 * number + 1)])
        part = decoder(batch.tokens, batch.positions, batch.labels, batch.attend, 1.0 / batch.valid)
        part.backward()
        loss += part.detach()
        assert not batch.attend.kept, "backward must free everything that was kept"
    gradients = {
        name: parameter.grad.to_local().clone() for name, parameter in decoder.named_parameters()
    }
    if offload is not None:
        assert not offload.waiting, "everything offloaded must have come back"
    estimates = 0 if chosen is None else len(chosen.estimates)
    return Outcome(
        loss.item(),
        gradients,
        kernel.pairs,
        kernel.backward_pairs,
        estimates,
        0 if offload is None else offload.allocated,
    )


def outcomes(
    rank: int, world: int, names: list[str], ways: tuple[Way, ...], layout_name: str = "striped"
) -> list[dict]:
    """Compare the plain outcome with each option's, for each exchange, dense and sparse."""
    comparisons = []
    for exchange_case in ways:
        layout = make_layout(layout_name, world, SEQ, BLOCK, unit=BLOCK)
        group = make_context_group(
            rank,
            ParallelDims.of(world, cp=world),
            torch.device("cpu"),
            per_node=min(exchange_case.per_node, world),
            heads=exchange_case.heads,
        )
        for sparse in (False, True):
            exchange = make_exchange(
                exchange_case.exchange, layout, group, chunks=exchange_case.chunks,
                prefetch=exchange_case.prefetch,
                circulates=exchange_case.circulates,
                shared_columns=exchange_case.shared_columns,
            )  # fmt: skip
            plain = step(Option(), world, exchange, sparse)
            for name in names:
                one = step(OPTIONS[name], world, exchange, sparse)
                early = early_share(exchange, OPTIONS[name], sparse)
                comparisons.append(
                    {
                        "way": str(exchange_case),
                        "sparse": sparse,
                        "option": name,
                        "early": early,
                        **compared(plain, one),
                    }
                )
    return comparisons


def early_share(exchange, option: Option, sparse: bool) -> float:
    """Return the share of allowed pairs whose queries are recomputed, over all workers."""
    layout = exchange.inside  # ranks that share heads hold one shard together
    early = early_queries(layout.tokens_per_worker, option.keep, BLOCK if sparse else None)
    every, again = 0, 0
    for number in range(4):
        ids = sample(number).documents
        of_query = np.zeros(layout.padded_seq, dtype=np.int64)
        of_query[:SEQ] = [np.count_nonzero(ids[: at + 1] == ids[at]) for at in range(SEQ)]
        for worker in range(layout.workers):
            pairs = of_query[layout.positions(worker)]
            every, again = every + int(pairs.sum()), again + int(pairs[:early].sum())
    return again / every


def compared(plain: Outcome, one: Outcome) -> dict:
    """Compare two outcomes.

    gradient: largest difference, relative to the largest element of the parameter on all workers.
    pairs: of the masks, in a forward pass; repeated: those computed more than once.
    estimates: index estimates in addition to those without the option.
    """
    largest = torch.stack(
        [g.abs().max() if g.numel() else torch.zeros(()) for g in plain.gradients.values()]
    )
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # each worker has a shard
    differences = [
        (one.gradients[name] - gradient).abs().max().item() / most
        for (name, gradient), most in zip(plain.gradients.items(), largest.tolist(), strict=True)
        if gradient.numel() and most > 1e-6
    ]
    assert len(differences) > 10
    return {
        "gradient": max(differences),
        "loss": abs(one.loss - plain.loss),
        "pairs": plain.pairs,
        "repeated": one.pairs - plain.pairs,
        "backward": one.backward_pairs - plain.backward_pairs,
        "estimates": one.estimates - plain.estimates,
        "offloaded": one.offloaded,
    }
