"""How layers run: tokens of a tile of the sequence, and layers that keep their MLP products.

`feed_forward.py` computes the second half of a layer tile by tile. Planning reads the same numbers,
so this module does not import PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtrain_cli.config.schema import MoeConfig

if TYPE_CHECKING:
    from mtrain_cli.parallel.activation_offload import ActivationOffload
    from mtrain_cli.parallel.layer_groups import TensorGroup

_PRODUCT_ROWS = 128
# topology.tensor_chunks=auto: at most four chunks, which leave a quarter of the messages of the MLP
# exposed, and none with fewer rows than keep matrix products fast.
_CHUNKS, _CHUNK_ROWS = 4, 2048
# Each chunk of experts reads the weights, and adds up their gradients: 0.6 ms in bfloat16 for half
# of the experts of Qwen3-30B-A3B at 3 TB/s. A second chunk hides about half of the two messages of
# a forward pass and of the first one of backward: as much for 32,768 own tokens in degree 2 at 300
# GB/s, and for fewer in larger degrees, whose workers have fewer weights and more rows. More chunks
# would add in float32.
_CHUNKED_TOKENS = 65_536  # of all workers that share the experts
ONE_ADDITION = 2  # chunks of experts whose gradients of weights one addition sums
_ALIGNMENT = 16  # bytes that a GPU reads at once: rows of a message begin at a multiple


@dataclass(frozen=True)
class LayerExecution:
    """How a layer runs.

    recompute: checkpoint the layer: backward runs a second forward pass, which repeats `project`,
        reuses what attention kept, and computes the inputs of `feed_forward`.
    any_length: let the compiled code serve any number of tokens. Otherwise each number compiles
        faster code of its own, and after eight of them nothing is compiled.
    tile_bytes: maximum bytes of temporary tensors after attention; 0 for no limit.
    keep_products: keep the matrix products of `feed_forward` for the backward pass.
    fp8: which products are in fp8, as `train.fp8` (`mlp_products.Fp8Products`).
    offload: host memory for the layer's input until the backward pass. Requires ``recompute``.
    tensor: the workers that share each layer. A layer then takes and returns the worker's own
        tokens ``[1, own tokens, C]``, whatever the batch.
    """

    recompute: bool = False
    compile: bool = False
    any_length: bool = False
    tile_bytes: int = 0
    keep_products: bool = False
    fp8: str = "none"
    offload: ActivationOffload | None = None
    tensor: TensorGroup | None = None
    tensor_chunks: int | str = "auto"
    expert_chunks: int | str = "auto"

    def __post_init__(self) -> None:
        assert self.offload is None or self.recompute, (
            "offload needs recompute=True: the second forward pass reads what it moves"
        )


def tile_rows(tokens: int, hidden: int, intermediate: int, itemsize: int, tile_bytes: int) -> int:
    """Return the number of tokens per tile. tile_bytes: limit of temporary tensors; 0 for none.

    Code is compiled once if all tiles have the same size, so prefer a number of tiles that divides
    the tokens, unless it exceeds the smallest possible number by more than a quarter (or 1): each
    tile of 1,024 tokens adds half a millisecond per pass on an H200 (profiles/notes.md).
    """
    # At the MLP's gate, a token has six tensors of the intermediate size and four of the hidden
    # size.
    row = itemsize * (6 * intermediate + 4 * hidden)
    if not tile_bytes or tokens * row <= tile_bytes:
        return tokens
    min_tiles = min(tokens, -(-tokens * row // max(tile_bytes, row)))
    tiles = next(
        (n for n in range(min_tiles, min_tiles + max(1, min_tiles // 4) + 1) if tokens % n == 0),
        min_tiles,
    )
    rows = min(-(-tokens // tiles), max(1, tile_bytes // row))
    # Matrix products are fastest if the rows are a multiple of their kernel's tile size.
    aligned_rows = -(-rows // _PRODUCT_ROWS) * _PRODUCT_ROWS
    return aligned_rows if aligned_rows * row <= tile_bytes else rows


def shared_tile_rows(
    own_tokens: int, hidden: int, intermediate: int, itemsize: int, tile_bytes: int, workers:
    int, chunks: int | str,
) -> int:  # fmt: skip
    """Return the number of a worker's own tokens per tile if several workers share a layer.

    Messages of one tile overlap with the computation of others. Sizes are those of the whole layer.
    """
    rows = tile_rows(own_tokens, hidden * workers, intermediate, itemsize, tile_bytes)
    if workers == 1:
        return rows
    if isinstance(chunks, str):
        chunks = max(1, min(_CHUNKS, own_tokens * workers // _CHUNK_ROWS))
    return min(rows, -(-own_tokens // chunks))


def expert_chunks(
    own_tokens: int, hidden: int, moe: MoeConfig, itemsize: int, tile_bytes: int, *, degree:
    int, chunks: int | str,
) -> int:  # fmt: skip
    """Return the number of chunks of a worker's own tokens in a layer with experts.

    Chunks bound the temporary tensors. If the experts have several workers, rows of one chunk also
    travel while others are computed.
    """
    if not isinstance(chunks, str):
        return max(1, min(chunks, own_tokens))
    # In the backward pass, a pair of a token and an expert has two rows and seven tensors of the
    # expert's width, if scores are float32 and the rest is bfloat16 (`experts.py`).
    token = itemsize * moe.top_k * (2 * hidden + 7 * moe.expert_size)
    in_memory = -(-own_tokens * token // tile_bytes) if tile_bytes else 1
    travelling = ONE_ADDITION if degree > 1 and own_tokens * degree >= _CHUNKED_TOKENS else 1
    return max(1, min(own_tokens, max(in_memory, travelling)))


def scored_row(hidden: int, itemsize: int, numbers: int) -> int:
    """Return the elements of a row of a hidden state that ends with numbers of a router's dtype."""
    if not numbers:
        return hidden
    each = _ALIGNMENT // itemsize
    behind = -(-numbers * max(4, itemsize) // _ALIGNMENT)
    return (-(-hidden // each) + behind) * each


def layers_with_products(keep: bool | int, layers: int) -> int:
    """Return how many layers, counted from the last, keep their MLP products (train.keep_mlp)."""
    return layers if keep is True else min(int(keep), layers)
