"""`mtrain profile non-attention`: what a training step computes beside attention, for the simulator."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli.commands.completion import complete_overrides
from mtrain_cli.commands.options import MOST_SAMPLES, MOST_THREADS, warn_of_unused_settings
from mtrain_cli.commands.profile import (
    app,
    check_output,
    is_calibration,
    saving_partial_results,
    parse_numbers,
    reporting_out_of_memory,
)
from mtrain_cli.config.schema import Config, ConfigError

if TYPE_CHECKING:
    from mtrain_cli.profiling.non_attention_benchmark import NonAttentionTime


@app.command("non-attention")
def non_attention(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="As in `mtrain train`: model=, train.activation_checkpoint= and so on; with sparsity=NAME its estimate is timed, too.",
            autocompletion=complete_overrides,
            show_default=False,
        ),
    ] = None,
    seq: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Tokens of one worker. auto: 1k to 64k on a GPU, 256 to 4k on a CPU.",
        ),
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Threads on a CPU, as workers have them: cores / workers.",
            min=1,
            max=MOST_THREADS,
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_SAMPLES)] = 5,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Calibration to write, as JSON.", show_default=False),
    ] = None,
) -> None:
    """Time what a training step computes beside attention: layers without it, the loss, the estimate of an index, on one device.

    `mtrain simulate --calibration FILE` takes these times in place of the constants of the cluster, for any number of workers. Whole steps
    are predicted of GPUs only.

    [bold]Examples[/bold]

      [cyan]mtrain profile non-attention model=tiny[/cyan]
          seconds on a CPU
      [cyan]mtrain profile non-attention model=qwen3b sparsity=vertical_slash --out non-attention.json[/cyan]
          on a GPU; 1k to 64k tokens of one worker
      [cyan]mtrain simulate model=qwen3b seq=512k --calibration non-attention.json[/cyan]
          whole steps, priced by it
    """
    import torch

    from mtrain_cli.config.sizes import parse_size
    from mtrain_cli.console import Console
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.profiling.non_attention_benchmark import (
        profile_non_attention,
        save_non_attention,
    )
    from mtrain_cli.simulation.calibration import NON_ATTENTION_FILE

    words = list(overrides or ())
    device = resolve_environment(_alone(words, 1024)).device
    warn_of_unused_settings(words)
    lengths = parse_numbers(
        "--seq",
        ("1k,4k,16k,64k" if device == "cuda" else "256,1k,4k") if seq == "auto" else seq,
        parse_size,
    )
    configs = [_alone(words, length) for length in dict.fromkeys(lengths)]
    if threads is not None:
        if device == "cuda":
            raise ConfigError(f"--threads {threads}: is for CPUs; leave it out")
        torch.set_num_threads(threads)
    replaced = (
        ""
        if out is None
        else check_output(out, lambda file: is_calibration(file, NON_ATTENTION_FILE), "calibration")
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(_HEADER)
    command = " ".join(["mtrain", *sys.argv[1:]])
    with (
        reporting_out_of_memory(),
        saving_partial_results(
            out, lambda times, file: save_non_attention(times, file, command, configs[0], device)
        ) as keep,
    ):

        def found(time: NonAttentionTime) -> None:
            console.print(_line(time))
            keep(time)

        times = profile_non_attention(configs, repeats, found)
    console.print(
        "TF: TFLOP/s of the matrix products; backward with what is computed again; all without attention and messages"
    )
    if out is not None:
        console.print(f"{len(times)} times in {out}{replaced}")


def _alone(words: list[str], length: int) -> Config:
    """The configuration of one worker that has all tokens, with no more layers than are timed."""
    from mtrain_cli.config.compose import compose
    from mtrain_cli.profiling.non_attention_benchmark import LAYERS

    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if key in (
            "seq",
            "topology.workers",
            "train.micro_batch",
            "train.global_batch",
            "train.offload_activations",
        ):
            raise ConfigError(
                f"{word}: one worker and one sequence are timed, on the device alone; lengths are given as --seq N,..."
            )
    config = compose([*words, f"seq={length}", "topology.workers=1", "train.offload_activations=0"])
    if config.train.memory == "auto":
        raise ConfigError(
            "train.memory=auto: what it chooses depends on the number of workers; give the settings to time"
        )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=min(config.model.num_layers, LAYERS)),
    )


_HEADER = f"{'part':<10} {'tokens':>8} {'a tile':>8} {'ms':>10} {'TF':>7}"


def _line(found: NonAttentionTime) -> str:
    tflops = f"{found.flop / found.ms / 1e9:>7.3g}" if found.flop else ""
    return f"{found.part:<10} {found.tokens:>8} {found.rows:>8} {found.ms:>10.3f} {tflops}".rstrip()
