"""Masks as words of bits, for FlashAttention-4.

On Hopper, FlashAttention-4 calls a mask function for each element. `WordMask` instead reads a word
for up to 32 elements of a thread, and applies its bits. Where FlashAttention-4 does not use this
class, it calls `in_query_words`, `in_key_words` or `in_columns_or_diagonal` as any other mask
function, with the same result.

Checked with flash-attn-4 4.0.0b36 on sm_90.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from flash_attn.cute import flash_bwd_sm90, flash_fwd_sm90, utils
from flash_attn.cute.mask import AttentionMask
from flash_attn.cute.utils import AuxData
from quack import layout_utils

_NO_DATA = AuxData()
_PARAMETERS = (
    "self", "acc_S", "batch_idx", "head_idx", "m_block", "n_block", "thr_mma", "mask_seqlen",
    "mask_causal", "mask_local", "mask_mod", "aux_data", "fastdiv_mods",
)  # fmt: skip


@cute.jit
def in_query_words(batch, head, query, key, seqlen, aux):  # noqa: ARG001
    """Return whether the query sees the key. ``aux`` holds the ids and the words of queries."""
    q = query[0]
    k = key[0]
    number = aux[0][batch[0], q >> 7, k >> 7]
    word = aux[1][number, q & 127, (k >> 1) & 3]
    bit = ((k & 127) >> 3) * 2 + (k & 1)
    seen = utils.scalar_to_ssa((word >> bit) & 1, cutlass.Int32)
    return seen >= utils.scalar_to_ssa(1, cutlass.Int32)


@cute.jit
def in_key_words(batch, head, query, key, seqlen, aux):  # noqa: ARG001
    """Return whether the query sees the key. ``aux`` holds the ids and the words of keys."""
    q = query[0]
    k = key[0]
    number = aux[0][batch[0], q >> 7, k >> 7]
    word = aux[1][number, k & 127, (q >> 1) & 3]
    bit = ((q & 127) >> 3) * 2 + (q & 1)
    seen = utils.scalar_to_ssa((word >> bit) & 1, cutlass.Int32)
    return seen >= utils.scalar_to_ssa(1, cutlass.Int32)


@cute.jit
def in_columns_or_diagonal(batch, head, query, key, seqlen, aux):  # noqa: ARG001
    """Return whether the query sees the key: a column in the front, or a key up to the query.

    ``aux`` holds words of bits, int32 [batch * heads, query blocks, tiles * 4], and int32 (key
    blocks in the front, heads). All queries of a block see the same columns.
    """
    q = query[0]
    k = key[0]
    block = k >> 7
    tile = block % (cute.size(aux[0], mode=[2]) // 4)
    word = aux[0][batch[0] * aux[1][1] + head[0], q >> 7, tile * 4 + ((k >> 1) & 3)]
    bit = ((k & 127) >> 3) * 2 + (k & 1)
    seen = (word >> bit) & 1
    if block >= aux[1][0]:
        seen = cutlass.Int32((q & 127) >= (k & 127))
    return utils.scalar_to_ssa(seen, cutlass.Int32) >= utils.scalar_to_ssa(1, cutlass.Int32)


@cute.jit
def _bits_below(count: Int32, lane: Int32) -> Uint32:
    """Return the bits of a thread's tokens among the first ``count`` of a block."""
    one = Uint32(1)
    groups = Uint32(2 * (count >> 3))
    rest = cutlass.min(cutlass.max((count & 7) - 2 * lane, 0), 2)
    last = utils.shl_u32(one, Uint32(rest)) - one
    return (utils.shl_u32(one, groups) - one) | utils.shl_u32(last, groups)


@cute.jit
def _apply_word(scores: cute.Tensor, word: Uint32):
    for i in cutlass.range_constexpr(cute.size(scores.shape)):
        seen = cutlass.Boolean(word & (Uint32(1) << i))
        scores[i] = scores[i] if seen else -Float32.inf


class WordMask(AttentionMask):
    """FlashAttention-4's masks on Hopper, with fast paths for words of queries and of keys.

    In the forward pass a thread holds 32 keys of a query. In the backward pass, whose scores are
    transposed (swap_AB), it holds a quarter of the tile's queries for a key. Both are in the order
    of the bits (`attention.block_lists.word_and_bit`).
    """

    @cute.jit
    def apply_mask(
        self,
        acc_S: cute.Tensor,
        batch_idx: cutlass.Int32,
        head_idx: cutlass.Int32,
        m_block: cutlass.Int32,
        n_block: cutlass.Int32,
        thr_mma: cute.TiledMma,
        mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool],
        mask_local: cutlass.Constexpr[bool] = False,
        mask_mod: cutlass.Constexpr[Any] = None,
        aux_data: AuxData = _NO_DATA,
        fastdiv_mods=(None, None),
    ) -> None:
        """Mask the scores of a tile. Bits of queries and keys beyond the end are 0."""
        scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=self.swap_AB)
        shape = (self.tile_m, self.tile_n)
        places = cute.make_identity_tensor(shape if not self.swap_AB else shape[::-1])
        at = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(places), transpose=self.swap_AB)
        lane = at[0][1] // 2
        if const_expr(mask_mod is in_query_words and not self.swap_AB):
            ids = aux_data.tensors[0]
            words = aux_data.tensors[1]
            for r in cutlass.range_constexpr(cute.size(at.shape[0])):
                query = at[r, 0][0] + m_block * self.tile_m
                if const_expr(self.qhead_per_kvhead_packgqa != 1):
                    query = query // self.qhead_per_kvhead_packgqa
                number = ids[batch_idx, query // 128, n_block]
                _apply_word(scores[r, None], Uint32(words[number, query % 128, lane]))
        elif const_expr(mask_mod is in_key_words and self.swap_AB):
            ids = aux_data.tensors[0]
            words = aux_data.tensors[1]
            first = m_block * self.tile_m
            number = ids[batch_idx, first // 128, n_block]
            shift = Uint32((first % 128) // 4)
            for c in cutlass.range_constexpr(cute.size(at.shape[1])):
                word = Uint32(words[number, at[0, c][0], lane])
                _apply_word(scores[None, c], utils.shr_u32(word, shift))
        elif const_expr(mask_mod is in_columns_or_diagonal):
            words = aux_data.tensors[0]
            sizes = aux_data.tensors[1]
            first = m_block * self.tile_m
            row = batch_idx * sizes[1] + head_idx
            tile = n_block % (cute.size(words, mode=[2]) // 4)
            of_block = words[row, first // 128, None]
            if const_expr(not self.swap_AB):
                loaded = Uint32(of_block[tile * 4 + lane])
                for r in cutlass.range_constexpr(cute.size(at.shape[0])):
                    word = _bits_below((at[r, 0][0] + first) % 128 + 1, lane)
                    _apply_word(scores[r, None], loaded if n_block < sizes[0] else word)
            else:
                shift = Uint32((first % 128) // 4)
                for c in cutlass.range_constexpr(cute.size(at.shape[1])):
                    key = at[0, c][0]
                    bit = Uint32((key >> 3) * 2 + (key & 1))
                    loaded = utils.shr_u32(Uint32(of_block[tile * 4 + ((key >> 1) & 3)]), bit)
                    column = Uint32(0) - (loaded & Uint32(1))
                    later = _bits_below(key, lane) ^ Uint32(0xFFFFFFFF)
                    word = utils.shr_u32(later, shift)
                    _apply_word(scores[None, c], column if n_block < sizes[0] else word)
        else:
            AttentionMask.apply_mask(
                self, acc_S, batch_idx, head_idx, m_block, n_block, thr_mma, mask_seqlen,
                mask_causal, mask_local, mask_mod, aux_data, fastdiv_mods,
            )  # fmt: skip


# FlashAttention-4 keeps compiled kernels by the hash of the mask function alone.
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
in_query_words.__cute_hash__ = f"query words {_SOURCE}"
in_key_words.__cute_hash__ = f"key words {_SOURCE}"
in_columns_or_diagonal.__cute_hash__ = f"columns or diagonal {_SOURCE}"
INSTALLED = tuple(inspect.signature(AttentionMask.apply_mask).parameters) == _PARAMETERS
if INSTALLED:
    flash_fwd_sm90.AttentionMask = WordMask
    flash_bwd_sm90.AttentionMask = WordMask
