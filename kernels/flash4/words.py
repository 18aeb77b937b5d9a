"""Masks as words of bits, for FlashAttention-4.

On Hopper, FlashAttention-4 calls a mask function for each element. `WordMask` instead reads a word
per row and thread, and applies its bits. Where FlashAttention-4 does not use this class, it calls
`in_words` as any other mask function, with the same result.

Checked with flash-attn-4 4.0.0b36 on sm_90.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr
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
def in_words(batch, head, query, key, seqlen, aux):  # noqa: ARG001
    """Return whether the query sees the key. ``aux`` holds the ids and words of a mask."""
    q = query[0]
    k = key[0]
    number = aux[0][batch[0], q >> 7, k >> 7]
    word = aux[1][number, q & 127, (k >> 1) & 3]
    bit = ((k & 127) >> 3) * 2 + (k & 1)
    seen = utils.scalar_to_ssa((word >> bit) & 1, cutlass.Int32)
    return seen >= utils.scalar_to_ssa(1, cutlass.Int32)


@cute.jit
def _apply_word(scores: cute.Tensor, word: Uint32):
    for i in cutlass.range_constexpr(cute.size(scores.shape)):
        seen = cutlass.Boolean(word & (Uint32(1) << i))
        scores[i] = scores[i] if seen else -Float32.inf


class WordMask(AttentionMask):
    """FlashAttention-4's masks on Hopper, with a fast path for `in_words`."""

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
        if const_expr(mask_mod is not in_words):
            AttentionMask.apply_mask(
                self, acc_S, batch_idx, head_idx, m_block, n_block, thr_mma, mask_seqlen,
                mask_causal, mask_local, mask_mod, aux_data, fastdiv_mods,
            )  # fmt: skip
        else:
            scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=self.swap_AB)
            shape = (self.tile_m, self.tile_n)
            places = cute.make_identity_tensor(shape if not self.swap_AB else shape[::-1])
            at = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(places), transpose=self.swap_AB)
            ROW = 0 if const_expr(not self.swap_AB) else 1
            COL = 1 if const_expr(not self.swap_AB) else 0
            ids = aux_data.tensors[0]
            words = aux_data.tensors[1]
            lane = (at[0][COL] // 2) % 4
            for r in cutlass.range_constexpr(cute.size(at.shape[0])):
                query = at[r, 0][ROW] + m_block * self.tile_m
                if const_expr(self.qhead_per_kvhead_packgqa != 1):
                    query = query // self.qhead_per_kvhead_packgqa
                number = ids[batch_idx, query // 128, n_block]
                word = Uint32(words[number, query % 128, lane])
                if const_expr(not self.swap_AB):
                    # The thread holds 32 keys of the row, in the order of the bits.
                    _apply_word(scores[r, None], word)
                else:
                    # The thread holds few keys of each of its rows.
                    for c in cutlass.range_constexpr(cute.size(at.shape[1])):
                        key = at[0, c][COL]
                        bit = Uint32(key // 8 * 2 + key % 2)
                        seen = cutlass.Boolean(utils.shr_u32(word, bit) & Uint32(1))
                        scores[r, c] = scores[r, c] if seen else -Float32.inf


# FlashAttention-4 keeps compiled kernels by the hash of the mask function alone.
in_words.__cute_hash__ = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
if tuple(inspect.signature(AttentionMask.apply_mask).parameters) == _PARAMETERS:
    flash_fwd_sm90.AttentionMask = WordMask
    flash_bwd_sm90.AttentionMask = WordMask
