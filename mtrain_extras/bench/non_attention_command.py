"""`mtrain profile non-attention`: time a training step without attention, for the simulator."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated

from mtrain_cli.commands.options import MOST_SAMPLES, Overrides, bounded, option, parse_items
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_extras.bench.calibration import CalibrationOut, calibrating


def non_attention(
    overrides: Overrides = None,
    seq: Annotated[str, option("N,...")] = "auto",
    repeats: Annotated[int, bounded(1, MOST_SAMPLES)] = 5,
    out: CalibrationOut = None,
) -> None:
    """Time a training step without attention on one device: layers, loss and index estimate.

    `mtrain simulate --calibration FILE` uses these times instead of the cluster's constants, for
    any number of workers. `mtrain simulate` predicts whole steps for GPUs only.

    [bold]Examples[/bold]

      [cyan]mtrain profile non-attention model=tiny[/cyan]
          Try the command on a CPU, in seconds
      [cyan]mtrain profile non-attention model=qwen3b sparsity=moba --out non-attention.json[/cyan]
          Write a calibration on a GPU, for 1k to 64k tokens per worker

    Args:
        overrides: As in `mtrain train`, such as model= and train.activation_checkpoint=. With
            sparsity=NAME, the index estimate is also timed.
        seq: Tokens per worker. auto = 1k to 64k on a GPU, 256 to 4k on a CPU.
        repeats: Samples per measured time.
    """
    from mtrain_cli.config.sizes import parse_size
    from mtrain_cli.console import Console
    from mtrain_cli.launch.environment import resolve_environment

    words = list(overrides or ())
    config = _single_worker(words, 1024)
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.reporting.table import Column, fixed, number
    from mtrain_extras.bench.non_attention import about, profile_non_attention

    device = resolve_environment(config).device
    usual = "1k,4k,16k,64k" if device == "cuda" else "256,1k,4k"
    lengths = parse_items("--seq", usual if seq == "auto" else seq, parse_size, "32k,128k")
    configs = [_single_worker(words, length) for length in dict.fromkeys(lengths)]
    columns = [
        Column("part", attrgetter("part"), words=True),
        Column("tokens", attrgetter("tokens")),
        Column("tile", attrgetter("rows")),
        Column("ms", attrgetter("ms"), fixed(3)),
        Column("TF", lambda time: time.flop / time.ms / 1e9 or None, number, missing=""),
    ]
    console = Console(highlight=False, soft_wrap=True)
    with calibrating(console, out, columns, **about(configs[0], device)) as add:
        for time in profile_non_attention(configs, repeats):
            add(time)
        console.print(
            "TF: TFLOP/s of the matrix products. backward includes recomputation. "
            "All times are without attention and messages."
        )


def _single_worker(words: list[str], length: int) -> Config:
    """Compose a configuration of one worker with ``length`` tokens and the timed layers."""
    from mtrain_cli.composition.compose import compose

    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if key in _FIXED:
            raise ConfigError(
                f"{word}: only one worker and one sequence on the device are timed; give lengths "
                "as --seq N,..."
            )
    config = compose([*words, f"seq={length}", "topology.workers=1", "train.offload_activations=0"])
    if config.train.memory == "auto":
        raise ConfigError(
            "train.memory=auto: the result of auto depends on the number of workers; use "
            "train.memory=manual, and set the memory keys to time"
        )
    return config.changed(model={"num_layers": min(config.model.num_layers, _LAYERS)})


_LAYERS = 3  # As in a model, the host queues the second and later layers ahead of the GPU.
# Settings of several workers or sequences.
_FIXED = (
    *("seq", "topology.workers", "train.micro_batch", "train.global_batch"),
    "train.offload_activations",
)
