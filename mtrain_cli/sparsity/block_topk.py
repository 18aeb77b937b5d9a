"""Choose key blocks for each block of queries by the attention of the query that needs them most.

One question among the queries of a block is enough to choose the block that answers it. A sum or a
mean over the queries, as `xattention` and `moba` take it, would let the other queries outvote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from mtrain_cli.attention.index import StartBitmap
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.partials import Pair, accumulation_dtype, has_triton, high_product
from mtrain_cli.config.keys import first_few
from mtrain_cli.config.pattern_settings import BlockTopkSettings
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.sparsity.index_maps import IndexMaps
from mtrain_cli.sparsity.pattern import NO_ROWS, MaskedPositions


class BlockTopkPattern(BlockTopkSettings):
    """Rank blocks by the maximum over their queries of the largest score minus the query's lse.

    lse is the log-sum-exp over all blocks that a query sees, of its largest score in each. As the
    log-sum-exp over all keys is no less, the attention that a query gives to a key is at most exp
    of this rank. Queries whose attention is spread rank low, and leave the density to those that
    look at few keys.

    A query sees a chosen block only from the first query of its block on that ranks it so high:
    what later queries look for would tell the model what the next tokens are. With a density, the
    level that a rank must reach, one number per layer, and the row cap still depend on all queries.
    What is learned from a sequence serves the next ones; only the first one chooses with it.

    learns: whether `estimate` updates the maps of ``score=learned``, and counts ``cut``.
    cut: int64 [2], of the last estimate: this worker's blocks besides the forced ones that reached
        the level, and those of them that the row cap cut. None without a cap.
    """

    learns = False
    cut: Tensor | None = None

    def __init__(self, seed: int = 0, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.seed = seed
        self._maps: dict[int, IndexMaps] = {}
        self._loaded = False

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=True, starts=True)

    def describe(self) -> str:
        size = (
            f"every block with a pair above {self.threshold:g}"
            if self.threshold
            else f"{100 * self.density:g}% of the pairs"
        )
        owner = "KV head" if self.index_per == "kv_group" else "query head"
        scores = f"learned scores of {self.rank} dimensions"
        return (
            f"{size} for every {owner} and block of queries, by "
            f"{scores if self.score == 'learned' else 'exact scores'}"
        )

    def probed_rows(self, length: int) -> Tensor:
        return NO_ROWS

    def state(
        self, model: ModelConfig, layers: Sequence[int], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the maps that are learned, by ``LAYER.NAME``; {} with exact scores."""
        if self.score != "learned":
            return {}
        for layer in layers:
            self._maps_of(layer, model.num_heads, model.num_kv_heads, model.head_dim, device)
        return self.learned(layers)

    def learned(self, layers: Iterable[int] | None = None) -> dict[str, Tensor]:
        return {
            f"{layer}.{field.name}": getattr(self._maps[layer], field.name)
            for layer in (sorted(self._maps) if layers is None else layers)
            for field in fields(IndexMaps)
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        names = [field.name for field in fields(IndexMaps)]
        layers = {name.partition(".")[0] for name in state}
        expected = {f"{layer}.{name}" for layer in layers for name in names}
        if not layers or set(state) != expected or not all(layer.isdecimal() for layer in layers):
            raise ConfigError(
                f"load_state_dict: needs {', '.join(names)} of each layer, as 0.query; has "
                f"{first_few(sorted(state)) or 'nothing'}"
            )
        maps = {}
        for layer in layers:
            tensors = [state[f"{layer}.{name}"].clone() for name in names]
            shapes = [list(tensor.shape) for tensor in tensors]
            q, k = shapes[:2]
            rank = [min([self.rank, *k[1:2]])]  # no more than head_dim
            if not q[-1:] == k[-1:] == rank or shapes != [q, k, q, q, k, k, []]:
                raise ConfigError(
                    f"load_state_dict: layer {layer} has the shapes {shapes}, which do not fit "
                    f"sparsity.rank={self.rank}"
                )
            maps[int(layer)] = IndexMaps(*tensors)
        self._maps, self._loaded = maps, True

    def _maps_of(
        self, layer: int, heads: int, kv_heads: int, dim: int, device: torch.device
    ) -> IndexMaps:
        if layer not in self._maps:
            if self._loaded:
                raise ConfigError(
                    f"load_state_dict: holds no layer {layer}, which sparsity.score=learned needs; "
                    f"it holds {first_few([str(n) for n in sorted(self._maps)])}"
                )
            seed = self.seed * 100_003 + layer
            self._maps[layer] = IndexMaps.make(heads, kv_heads, dim, self.rank, seed, device)
        maps = self._maps[layer]
        if self._loaded and list(maps.key.shape[:2]) != [kv_heads, dim]:
            raise ConfigError(
                f"load_state_dict: layer {layer} has {list(maps.key.shape[:2])} heads and "
                f"dimensions of keys, and the model [{kv_heads}, {dim}]"
            )
        if maps.key.device != device:  # loaded to the CPU
            on_device = {f.name: getattr(maps, f.name).to(device) for f in fields(maps)[:-1]}
            maps = self._maps[layer] = replace(maps, **on_device)
        return maps

    def estimate(self, q: Tensor, k: Tensor, masked: MaskedPositions, layer: int) -> StartBitmap:
        """Return the index. Workers gather the keys that scores need, and count scores together."""
        heads, kv_heads, dim = q.shape[2], k.shape[2], q.shape[3]
        blocks_of = [masked.in_blocks(t[b], b) for t in (q, k) for b in range(len(q))]
        queries, keys = torch.stack(blocks_of[: len(q)]), torch.stack(blocks_of[len(q) :])
        scale = dim**-0.5
        if self.score == "learned":
            maps = self._maps_of(layer, heads, kv_heads, dim, q.device)
            whole, is_first = (queries, keys), not maps.updates
            if self.learns and is_first:
                self._learn(maps, whole, masked, layer)
            (queries, keys), scale = maps.project(queries, keys), 1.0
            if self.learns and not is_first:
                # Only now: a sequence must not choose with what its later tokens have taught.
                self._learn(maps, whole, masked, layer)
        everyone = masked.gather_blocks(keys)  # [batch, keys, kv_heads, dim]
        groups = kv_heads if self.index_per == "kv_group" else queries.shape[3]
        bits, starts = [], []
        for b in range(len(q)):
            scores = (queries[b].contiguous(), everyone[b].contiguous(), scale, masked, b)
            lse, ranks = self._ranks(*scores)
            forced = self._forced(masked, b)
            chosen, level = self._choose(
                ranks.unflatten(0, (groups, -1)).amax(1), forced, masked, b
            )
            first_rows = self._first_rows(*scores, lse, chosen, level)
            first_rows = first_rows.unflatten(0, (groups, -1)).amin(1)
            bits.append(chosen)
            starts.append(first_rows.masked_fill_(forced | ~chosen, 0))
        geometry = masked.geometry
        return StartBitmap(
            self.block, geometry.blocks, torch.stack(bits), geometry.query_blocks,
            torch.stack(starts), heads // groups,
        )  # fmt: skip

    def _learn(self, maps: IndexMaps, tokens: Pair, masked: MaskedPositions, layer: int) -> None:
        queries, keys = tokens
        for _ in range(maps.due):
            b = int(maps.updates) % len(queries)
            maps.learn(queries[b], keys[b], masked, b, self.seed * 100_003 + layer)

    def _ranks(self, q: Tensor, k: Tensor, scale: float, masked: MaskedPositions, b: int) -> Pair:
        """Return each query's log-sum-exp over its largest scores, and the ranks of blocks.

        q: [local blocks, block, heads, dim]. k: [keys, kv_heads, dim], of the whole sequence.

        Returns:
            [heads, local blocks, block], +inf for a query that sees no key; and [heads, local
            blocks, blocks], -inf where no query sees an earlier key.
        """
        if fused_scores_usable(q, self.block):
            from mtrain_cli.kernels.triton import block_scores

            first = masked.tables.first[b].view(masked.geometry.blocks, -1)
            numbers = masked.geometry.query_blocks
            return block_scores.ranks(q, k, first, numbers, scale, self.block)
        sums, ranks = [], []
        for i in range(len(q)):
            largest = self._largest(q[i], k, scale, masked, b, i)
            lse = largest.logsumexp(-1)
            sums.append(lse.masked_fill_(lse.isneginf(), math.inf))
            of_block = (largest - sums[-1][..., None]).amax(1)
            of_block[:, int(masked.numbers[i]) :] = -math.inf
            ranks.append(of_block)
        return torch.stack(sums, 1), torch.stack(ranks, 1)

    def _first_rows(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        masked: MaskedPositions,
        b: int,
        lse: Tensor,
        chosen: Tensor,
        level: Tensor,
    ) -> Tensor:
        """Return the first query of each block that ranks a chosen block as high as the level.

        Arguments are those of `_ranks` and its sums, and those of `_choose`'s result.

        Returns:
            uint8 [heads, local blocks, blocks]; the last query if no query does.
        """
        if fused_scores_usable(q, self.block):
            from mtrain_cli.kernels.triton import block_scores

            first = masked.tables.first[b].view(masked.geometry.blocks, -1)
            numbers = masked.geometry.query_blocks
            return block_scores.first_rows(
                q, k, lse, first, numbers, chosen, level, scale, self.block
            )
        results = []
        for i in range(len(q)):
            ranks = self._largest(q[i], k, scale, masked, b, i) - lse[:, i, :, None]
            reached = (ranks.float() >= level).to(torch.int32)
            results.append(torch.where(reached.any(1), reached.argmax(1), self.block - 1))
        return torch.stack(results, 1).to(torch.uint8)

    def _largest(
        self, q: Tensor, k: Tensor, scale: float, masked: MaskedPositions, b: int, slot: int
    ) -> Tensor:
        """Return the largest score of each query of a block with each key block's visible keys.

        q: [block, heads, dim]. Returns [heads, block, blocks], -inf where a query sees no key.
        """
        kv_heads, blocks = k.shape[1], masked.geometry.blocks
        # The shapes of these products do not depend on the number of workers, nor does rounding.
        queries = q.permute(1, 0, 2).unflatten(0, (kv_heads, -1)).flatten(1, 2)
        scores = high_product(queries, k.permute(1, 2, 0)).view(q.shape[1], len(q), -1)
        scores = scores.to(accumulation_dtype(q.dtype)).mul_(scale)
        row = masked.positions.view(-1, self.block)[slot]
        first, key = masked.tables.first[b][row], torch.arange(len(k), device=q.device)
        scores.masked_fill_((key < first[:, None]) | (key > row[:, None]), -math.inf)
        return scores.unflatten(-1, (blocks, -1)).amax(-1)

    def _forced(self, masked: MaskedPositions, b: int) -> Tensor:
        """Return the first block, the own one and the one before, bool [local, blocks]."""
        numbers = masked.geometry.query_blocks.long()[:, None]
        block = torch.arange(masked.geometry.blocks, device=numbers.device)
        forced = (block == numbers) | (block == numbers - 1) | (block == 0)
        return forced & (masked.tables.per_block[b] > 0)

    def _choose(self, scores: Tensor, forced: Tensor, masked: MaskedPositions, b: int) -> Pair:
        """Return the chosen blocks, bool [heads, local, blocks], and their least rank.

        scores: [heads, local, blocks].
        """
        if self.threshold:
            level = scores.new_full((), math.log(self.threshold), dtype=torch.float32)
            return forced | (scores.float() >= level), level
        pairs = masked.tables.per_block[b]
        numbers = masked.geometry.query_blocks.long()[:, None]
        allowed = self.row_cap * self.density * (numbers + 1)
        cap = (allowed.ceil().long() - forced.sum(-1, keepdim=True)).clamp(min=1)
        whole = _ordered(scores.float().masked_fill_(forced, -math.inf))
        ranks = _capped(whole, cap)
        sums = torch.stack([pairs.sum(dtype=torch.int64), (pairs * forced).sum(dtype=torch.int64)])
        total, used = masked.group.sum(sums)
        room = len(scores) * (self.density * total.double() - used) / self.block**2
        level = _level(ranks, room.floor().long().clamp(min=0), masked.group.sum)
        if self.learns:
            reached = (whole >= level).sum()
            counts = torch.stack([reached, reached - (ranks >= level).sum()])
            self.cut = counts if b == 0 or self.cut is None else self.cut + counts
        return forced | (ranks >= level), _score_of(level)


def fused_scores_usable(q: Tensor, block: int) -> bool:
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or block < 16:
        return False
    return q.shape[-1] in (16, 32, 64, 128) and has_triton()


_HIGHEST = 0x7F800000  # of the score 0


def _ordered(scores: Tensor) -> Tensor:
    """Return int32 numbers in the order of float32 scores <= 0: 0 for -inf, more for all others."""
    bits = scores.clamp(max=0).abs_().view(torch.int32)
    return (_HIGHEST - bits).clamp_(min=0)


def _score_of(rank: Tensor) -> Tensor:
    """Return the float32 score with this `_ordered` number; more than 0 if it is none."""
    score = -(_HIGHEST - rank).clamp(min=0).to(torch.int32).view(torch.float32)
    return torch.where(rank > _HIGHEST, torch.inf, score)


def _capped(ranks: Tensor, cap: Tensor) -> Tensor:
    """Return the largest ranks of each row, at most ``cap`` of them, and 0 for the others.

    Of equal ranks at the border, none remains. ranks: [heads, rows, blocks]. cap: [rows, 1].
    """
    if ranks.is_cuda and has_triton():
        from mtrain_cli.kernels.triton import block_scores

        return block_scores.capped(ranks, cap)
    best = torch.nn.functional.pad(ranks.sort(-1, descending=True).values, (0, 1))
    beyond = best.gather(-1, cap.clamp(max=ranks.shape[-1]).expand(len(ranks), -1, -1))
    return ranks.masked_fill(ranks <= beyond, 0)


def _level(ranks: Tensor, room: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the least level above 0 that at most ``room`` ranks of all workers reach.

    Each digit of the level takes a histogram of the ranks that agree with the digits before.
    """
    level, above = torch.zeros_like(room), torch.zeros_like(room)
    for shift in (24, 16, 8, 0):
        counts = add(_digit_counts(ranks, level, shift))
        reached = above + counts.flip(0).cumsum(0).flip(0)
        # The largest digit that still more than `room` ranks reach.
        digit = ((reached > room).sum() - 1).clamp(min=0)
        above = (reached - counts).index_select(0, digit[None])[0]
        level = level | (digit << shift)
    return level + 1


def _digit_counts(ranks: Tensor, level: Tensor, shift: int) -> Tensor:
    """Count ranks that begin like ``level`` by their next 8 bits, those from ``shift`` on."""
    if ranks.is_cuda and has_triton():
        from mtrain_cli.kernels.triton import block_scores

        return block_scores.digit_counts(ranks, level, shift)
    # Shifted twice, as a shift of 32 bits is undefined.
    alike = ranks[ranks >> shift >> 8 == level >> shift >> 8]
    return torch.bincount(alike >> shift & 0xFF, minlength=256)


def make_pattern(settings: BlockTopkSettings, seed: int) -> BlockTopkPattern:
    return BlockTopkPattern(seed, **vars(settings))
