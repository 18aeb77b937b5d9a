"""What the checkpoints of a run chose for the same inputs, and how much of it they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_bytes
from mtrain_cli.launch.environment import host_memory
from mtrain_cli.profiling.pattern_quality import Place
from mtrain_studies.attention.files import COLUMNS, KEYS, SLASHES, OverlapRow
from mtrain_studies.attention.overlap import key_overlap, line_overlap
from mtrain_studies.attention.top_keys import TopKeys

_HOST_SHARE = 0.5  # of host memory for the largest keys of all checkpoints


@dataclass
class Choices:
    """What every checkpoint chose, on the host.

    keys: the largest keys and the number of keys that each query sees.
    lines: slashes and columns by name of the pattern.
    """

    keys: dict[Place, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    lines: dict[Place, dict[str, VerticalSlash]] = field(default_factory=dict)

    def keep(self, place: Place, largest: TopKeys | None, indices: dict[str, Index]) -> None:
        """Keep what a layer chose. Indices other than slashes and columns are ignored."""
        if largest is not None:
            self.keys[place] = largest.keys.cpu(), largest.seen.cpu()
        self.lines[place] = {
            name: dataclasses.replace(
                index, slashes=index.slashes.cpu(), columns=index.columns.cpu()
            )
            for name, index in indices.items()
            if isinstance(index, VerticalSlash)
        }

    def overlap(self, counts: Sequence[int], device: torch.device) -> list[OverlapRow]:
        """Compare every two checkpoints. device: where to compare."""
        steps = sorted({place.step for place in self.lines})
        inputs = sorted({(place.sample, place.layer) for place in self.lines})
        rows: list[OverlapRow] = []
        for first, second in combinations(steps, 2):
            for sample, layer in inputs:
                one, other = Place(first, sample, layer), Place(second, sample, layer)
                rows += self._keys_between(one, other, counts, device)
                rows += self._lines_between(one, other)
        return rows

    def _keys_between(
        self, one: Place, other: Place, counts: Sequence[int], device: torch.device
    ) -> Iterator[OverlapRow]:
        if one not in self.keys:
            return
        (keys, seen), (others, _) = self.keys[one], self.keys[other]
        for k in counts:
            chosen = seen > k  # the k largest keys of other queries are all keys
            mine, theirs = (t[:, chosen, :k].to(device) for t in (keys, others))
            means = key_overlap(mine, theirs, k).mean(-1).tolist()
            yield from _rows(KEYS, k, "", one, other, means if chosen.any() else [None] * len(keys))

    def _lines_between(self, one: Place, other: Place) -> Iterator[OverlapRow]:
        for name, lines in self.lines[one].items():
            slashes, columns = line_overlap(lines, self.lines[other][name])
            yield from _rows(SLASHES, 0, name, one, other, slashes[0].tolist())
            yield from _rows(COLUMNS, 0, name, one, other, columns[0].tolist())


def _rows(
    kind: str, k: int, pattern: str, one: Place, other: Place, values: Sequence[float | None]
) -> Iterator[OverlapRow]:
    """Yield a row per head. values: Jaccard index of each head."""
    for head, value in enumerate(values):
        where = one.step, other.step, one.sample, one.layer, head
        yield OverlapRow(kind, k, pattern, *where, value)


def require_memory(config: Config, inputs: int, rows: int, counts: Sequence[int]) -> None:
    model = config.model
    size = 4 * inputs * model.num_layers * model.num_heads * rows * max(counts, default=0)
    if size > _HOST_SHARE * host_memory():
        raise ConfigError(
            f"--rows {rows}: the {max(counts)} largest keys of {rows} queries take "
            f"{format_bytes(size)} over all heads, samples and checkpoints; this machine has "
            f"{format_bytes(host_memory())}. Give fewer --rows, --samples or keys in --top-k"
        )
