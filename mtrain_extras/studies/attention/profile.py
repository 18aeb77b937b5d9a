"""The options of `mtrain profile sparsity` on attention itself. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mtrain_cli.commands.options import bounded, flag, option, parse_items, parse_whole_number
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_extras.studies.attention.request import CELLS, AttentionRequest

if TYPE_CHECKING:
    from mtrain_extras.studies.attention.analysis import AttentionAnalyzer

MOST_CELLS = 4096  # per side: such a map of float32 takes 64 MiB


@dataclass(frozen=True)
class Options:
    """Options on attention.

    top_k: Measure the share of attention that the K largest keys of each sampled query hold, per
        layer and head.
    maps: Draw the whole attention matrix of some heads, and its gradient.
    cells: Largest number of cells along a side of a map, 512 by default.
    rope: Compare the mean score at each distance with the prediction of rotary embedding, and
        divide the variance of scores into slashes and columns.
    """

    top_k: Annotated[str | None, option("K,...")] = None
    maps: Annotated[str | None, option("LAYER:HEAD,...")] = None
    cells: Annotated[int | None, bounded(2, MOST_CELLS)] = None
    rope: Annotated[bool, flag("--rope")] = False


def parse(options: Options) -> AttentionRequest:
    """Parse the options on attention."""
    from mtrain_cli.config.sizes import parse_size

    counts, heads = list[int](), list[tuple[int, int]]()
    if options.top_k is not None:
        counts = parse_items("--top-k", options.top_k, parse_size, "64,1k")
        if (least := min(counts)) < 1:
            raise ConfigError(f"--top-k {least}: must be at least 1")
    if options.maps is not None:
        heads = [_parse_head(item.strip()) for item in options.maps.split(",")]
    elif options.cells is not None:
        raise ConfigError(f"--cells {options.cells}: only with --maps LAYER:HEAD,...")
    return AttentionRequest(
        tuple(sorted(set(counts))),
        tuple(dict.fromkeys(heads)),
        options.cells or CELLS,
        options.rope,
    )


def _parse_head(text: str) -> tuple[int, int]:
    layer, _, head = text.partition(":")
    try:
        return parse_whole_number(layer), parse_whole_number(head)
    except ValueError:
        raise ConfigError(f"--maps {text}: give LAYER:HEAD,..., such as 0:3,11:0") from None


def open_analyzer(
    request: AttentionRequest, config: Config, rows: int
) -> tuple[AttentionAnalyzer, str]:
    """Return the analyzer of a request, and a line on its cost, "" without any."""
    from mtrain_cli.evaluation.cost import format_flop
    from mtrain_extras.studies.attention.analysis import AttentionAnalyzer

    flop = format_flop(request.flop(config, rows))
    cost = f"attention analysis: about {flop} per sequence and measured step"
    return AttentionAnalyzer(request), cost if request else ""
