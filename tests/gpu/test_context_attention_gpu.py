"""Context-parallel attention of several ranks equals the float64 oracle on one GPU.

With two GPUs or more, keys move through NCCL. On one GPU four ranks share it, and keys move
through host memory.
"""

from __future__ import annotations

import faulthandler
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu import through_host
from parallel.ways import Way, make_attention

from mtrain_cli.attention.index import BlockBitmap, VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest, KernelRequest, Saved
from mtrain_cli.attention.kernel_registry import _KERNELS, survey
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group
from mtrain_cli.sparsity.fixed import fixed_index

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a GPU")]

SEQ, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 3000, 16, 4, 128, 128


WAYS = (
    Way("all_gather"),
    Way("all_gather", chunks=2),
    Way("hierarchical_all_gather", per_node=2),
    Way("hierarchical_all_gather", per_node=2, chunks=2),
    Way("all_gather", chunks=4),
    Way("hierarchical_all_gather", per_node=2, chunks=4),
    Way("group_cast"),
    Way("group_cast", chunks=2),
    Way("group_cast", heads=2),
    Way("hierarchical_group_cast", per_node=2, chunks=2),
    Way("ring"),
    Way("ring", prefetch=2, shared_columns=False),
    Way("ring", circulates="queries"),
    Way("hierarchical_ring", per_node=2),
    Way("hierarchical_ring", per_node=2, circulates="queries", shared_columns=False),
    Way("ring", heads=2),
    Way("all_gather", heads=4),
)


@dataclass(frozen=True)
class Given:
    """A pattern that returns an index which all workers know."""

    index: VerticalSlash | BlockBitmap

    def request(self) -> IndexRequest:
        return IndexRequest(BLOCK, bitmap=isinstance(self.index, BlockBitmap))

    def estimate(self, q, k, masked, layer):  # noqa: ARG002
        if isinstance(self.index, VerticalSlash):
            return self.index
        rows = masked.geometry.query_blocks
        return BlockBitmap(BLOCK, self.index.blocks, self.index.bits[:, :, rows.long()], rows)


def index_of(kind: str, blocks: int, device: torch.device) -> VerticalSlash | BlockBitmap | None:
    if kind == "dense":
        return None
    if kind == "bitmap":
        bits = torch.from_numpy(np.random.default_rng(4).random((1, HEADS, 64, 64)) < 0.4).tril()[
            ..., :blocks, :blocks
        ]
        return BlockBitmap.whole(BLOCK, bits.to(device))
    drawn = fixed_index(
        seed=3, batch=1, heads=HEADS, seq=SEQ, block=BLOCK, slashes=4, columns=70
    ).to(device)
    assert isinstance(drawn, VerticalSlash)
    # Empty places hold the number of padded positions, which differs between layouts.
    columns = torch.where(drawn.columns < SEQ, drawn.columns, blocks * BLOCK)
    slashes = torch.nn.functional.pad(drawn.slashes, (0, blocks - drawn.slashes.shape[-1]))
    slashes[:, 3] = False
    return VerticalSlash(BLOCK, blocks, slashes, columns)


def work(rank: int, world: int, store: str, kernel_name: str, kind: str) -> None:
    # A failed rank leaves the others in a collective. End with a traceback instead of hanging.
    faulthandler.dump_traceback_later(280, exit=True)
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    if GPUS > 1:
        dist.init_process_group(
            "nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device
        )
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        through_host.install()
    kernel = _KERNELS[kernel_name]()
    generator = torch.Generator(device).manual_seed(1)
    q, k, v, dout = (
        torch.randn(1, SEQ, h, HEAD_DIM, generator=generator, device=device, dtype=torch.bfloat16)
        for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    scale = HEAD_DIM**-0.5
    wrong: list[str] = []
    groups: dict[tuple[int, int], ContextGroup] = {}
    cells = 0
    for documents in (False, True):
        ids = np.sort(np.random.default_rng(2).integers(0, 5 if documents else 1, SEQ))
        positions = np.arange(SEQ)
        mask = SequenceMask.from_documents(ids, SEQ)
        tables = MaskTables.make([mask], BLOCK)
        whole = Tiles.between([mask], positions, positions, tables).to(device)
        if (index := index_of(kind, -(-SEQ // BLOCK), device)) is not None:
            whole = whole.with_index(index)
        exact = [t.double() for t in (q, k, v)]
        out, lse = ReferenceKernel().forward(*exact, whole, scale)
        expected = (
            out,
            *ReferenceKernel().backward(dout.double(), Saved(*exact, out, lse, None), whole, scale),
        )
        del exact, lse
        for layout_name in ("zigzag", "striped"):
            layout = make_layout(layout_name, world, SEQ, BLOCK, unit=BLOCK)
            own = layout.positions(rank)
            real = torch.from_numpy(own < SEQ).to(device)
            place = torch.from_numpy(np.minimum(own, SEQ - 1)).to(device)
            given = index_of(kind, layout.padded_seq // BLOCK, device)
            for way in WAYS:
                if not way.fits(world, KV_HEADS):
                    continue
                per_node = min(way.per_node, world)
                if (per_node, way.heads) not in groups:
                    groups[per_node, way.heads] = make_context_group(
                        rank,
                        ParallelDims.of(world, cp=world),
                        device,
                        per_node=per_node,
                        heads=way.heads,
                    )
                exchange = make_exchange(
                    way.exchange, layout, groups[per_node, way.heads], chunks=way.chunks,
                    prefetch=way.prefetch,
                    circulates=way.circulates, shared_columns=way.shared_columns,
                )  # fmt: skip
                masks = [SequenceMask.from_documents(ids, layout.padded_seq)]
                attend = make_attention(
                    exchange, kernel, masks, device, None if given is None else Given(given)
                )
                mine = [t[:, place].clone().requires_grad_() for t in (q, k, v)]
                got_out = attend(*mine, 0)
                got = (got_out, *torch.autograd.grad(got_out, mine, dout[:, place]))
                cells += 1
                for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
                    a, b = a[:, real].double(), b[:, place[real]]
                    error = ((a - b).norm() / b.norm()).item()
                    if not error < 1e-2:
                        wrong.append(
                            f"{kind} {layout_name} {way} documents={documents} {name}: {error:.2e}"
                        )
    answers: list[list[str] | None] = [None] * world
    dist.all_gather_object(answers, wrong)
    if rank == 0:
        print(f"{kernel_name}, {kind}: {cells} cells of {world} ranks on {GPUS} GPUs", flush=True)
    dist.destroy_process_group()
    assert not any(answers), (answers[rank] or [])[:8]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        *(("flash4", kind) for kind in ("dense", "vertical_slash", "bitmap")),
        *(("triton", kind) for kind in ("vertical_slash", "bitmap")),
        ("sdpa", "dense"),
    ],
)
def test_output_and_gradients_equal_the_oracle(kernel, kind, tmp_path):
    request = KernelRequest(
        "cuda", torch.cuda.get_device_capability(), "bfloat16", HEAD_DIM, HEADS, KV_HEADS
    )
    if kind != "dense":
        request = replace(request, index=IndexRequest(BLOCK, bitmap=True))
    missing = dict(survey(request))[kernel]
    if missing:
        pytest.skip(missing)
    world = min(GPUS, 4) if GPUS > 1 else 4
    mp.spawn(work, args=(world, str(tmp_path / "store"), kernel, kind), nprocs=world, join=True)
