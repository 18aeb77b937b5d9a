"""`mtrain simulate methods`: compare methods of parallelism, each used alone."""

from __future__ import annotations

from mtrain_cli.commands.options import with_options
from mtrain_cli.commands.simulate import SimulateOptions, single
from mtrain_cli.config.schema import ConfigError

_OF_PAIRS = ("index", "density", "columns", "layers", "calibration", "slow")
_OF_STEPS = ("layout", "exchange", "expert_loads", "out", "files")


@with_options(SimulateOptions, *_OF_PAIRS, *_OF_STEPS)
def methods(typed: SimulateOptions) -> None:
    """Compare methods of parallelism: memory, traffic, idle time and limits, each used alone.

    DP, ZeRO-1 to ZeRO-3, TP, TP with SP, PP, Ulysses, ring and zigzag ring each get the largest
    degree that the model and the GPUs allow.

    [bold]Examples[/bold]

      [cyan]mtrain simulate methods model=qwen7b seq=32k cluster=h100_4x8 nodes=1[/cyan]
          Compare on the eight GPUs of a node
    """
    job = single(typed)
    if unused := next((name for name in _OF_PAIRS if getattr(job.request, name)), None):
        raise ConfigError(f"{unused}: has no effect on the methods; leave it out")
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_extras.methods.table import show

    show(job)
