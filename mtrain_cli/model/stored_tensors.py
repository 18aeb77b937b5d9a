"""The tensors of a Hugging Face folder, and which part of a decoder's parameter each one is.

Most parameters are one tensor with the parameter's name. The weights of all experts of a layer are
one parameter, but a folder has tensors for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from mtrain_cli.config.schema import ModelConfig

Region = tuple[slice, ...]

_LAYER = re.compile(r"layers\.\d+\.mlp\.")
# The module that has the router and the experts, and an expert's gate, up and down projection.
_EXPERT_NAMES = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}


class StoredPart(NamedTuple):
    """A tensor of a folder.

    name: its name in the folder.
    expert: number of the expert; None for a whole parameter.
    start: first row of the tensor in the expert's matrix.
    shape: shape of the tensor.
    """

    name: str
    expert: int | None
    start: int
    shape: tuple[int, ...]

    def overlap(self, region: Region) -> tuple[Region, Region] | None:
        """Return the region of this tensor that a region of the parameter covers.

        The second region is the same one in the given region. Return None if they do not overlap.
        """
        if self.expert is None:
            return region, tuple(slice(0, one.stop - one.start) for one in region)
        experts, rows, *columns = region
        begin = max(rows.start - self.start, 0)
        end = min(rows.stop - self.start, self.shape[0])
        if not (experts.start <= self.expert < experts.stop and begin < end):
            return None
        at, place = self.start + begin - rows.start, self.expert - experts.start
        whole = (slice(0, one.stop - one.start) for one in columns)
        inside = slice(place, place + 1), slice(at, at + end - begin), *whole
        return (slice(begin, end), *columns), inside


def stored_parts(name: str, shape: tuple[int, ...], model: ModelConfig) -> list[StoredPart]:
    """Return the tensors of a Hugging Face folder that make up a decoder's parameter.

    Args:
        name: name of the parameter.
        shape: shape of the parameter.
    """
    stored = name if name.startswith("lm_head.") else f"model.{name}"
    layer = _LAYER.match(name)
    if layer is None or model.family not in _EXPERT_NAMES:
        return [StoredPart(stored, None, 0, shape)]
    module, (gate, up, down) = _EXPERT_NAMES[model.family]
    kind = name[layer.end() :]
    prefix = f"model.{layer.group().replace('mlp', module)}"
    if kind == "gate.weight":
        return [StoredPart(prefix + kind, None, 0, shape)]
    width, hidden = model.moe.expert_size, model.hidden_size
    if kind == "experts.gate_up":
        matrices = [(gate, 0, (width, hidden)), (up, width, (width, hidden))]
    elif kind == "experts.down":
        matrices = [(down, 0, (hidden, width))]
    else:  # the MLP of a layer without experts
        return [StoredPart(stored, None, 0, shape)]
    return [
        StoredPart(f"{prefix}experts.{expert}.{matrix}.weight", expert, start, part)
        for expert in range(shape[0])
        for matrix, start, part in matrices
    ]


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region of a whole parameter."""
    return tuple(slice(0, size) for size in shape)


def overlaps(parts: list[StoredPart], region: Region) -> Iterator[tuple[str, Region, Region]]:
    """Yield the name of each tensor that a region of a parameter covers, with `overlap`."""
    for part in parts:
        if (found := part.overlap(region)) is not None:
            yield part.name, *found
