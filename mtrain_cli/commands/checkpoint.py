"""`mtrain checkpoint`: weights between mtrain and Hugging Face, and a check that both compute the same."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mtrain_cli.commands.options import LARGEST_TOLERANCE, MOST_COMPARED
from mtrain_cli.printable import printable

app = typer.Typer(
    help="Bring weights in from Hugging Face folders and out to them, and check them.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    epilog="Example: [cyan]mtrain checkpoint export runs/latest my-model-hf[/cyan]",
)


class Dtype(StrEnum):
    """Number formats of exported weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@app.command("import")
def import_weights(
    hf_folder: Annotated[
        Path,
        typer.Argument(
            metavar="HF_FOLDER",
            help="config.json and safetensors of a qwen2, qwen3, llama or mistral model.",
            show_default=False,
        ),
    ],
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder to make; its checkpoint step-0 gets the weights.",
            show_default=False,
        ),
    ],
) -> None:
    """Make a run whose checkpoint holds the weights of a Hugging Face folder, in float32.

    To train from a Hugging Face folder no import is needed: mtrain train train.init_from=HF_FOLDER.

    [bold]Examples[/bold]

      [cyan]mtrain checkpoint import Qwen2.5-3B runs/qwen3b-start[/cyan]
    """
    from mtrain_cli.model.huggingface_config import remarks
    from mtrain_cli.training.conversion import import_folder

    config = import_folder(hf_folder, run)
    for line in remarks(hf_folder):
        _warn(line)
    _say(
        f"Wrote {run / 'checkpoints' / 'step-0'}: {config.model.family}, {config.model.num_layers} layers, weights of {hf_folder}"
    )


@app.command("export")
def export_weights(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="A run (its newest checkpoint) or one of its step-N.",
            show_default=False,
        ),
    ],
    hf_folder: Annotated[
        Path,
        typer.Argument(
            metavar="HF_FOLDER", help="Folder to make, new or empty.", show_default=False
        ),
    ],
    dtype: Annotated[Dtype, typer.Option(help="Format of the exported weights.")] = Dtype.bfloat16,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Copy the tokenizer files, and the token ids of config.json, of this folder, instead of the run's own tokenizer.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a model that mtrain trained, with its tokenizer, as a folder that transformers and inference servers open.

    [bold]Examples[/bold]

      [cyan]mtrain checkpoint export runs/latest my-model-hf[/cyan]
      [cyan]mtrain checkpoint export runs/long/checkpoints/step-200 my-model-hf --dtype float32[/cyan]
      [cyan]mtrain checkpoint export runs/long my-model-hf --tokenizer Qwen2.5-3B[/cyan]
    """
    import torch

    from mtrain_cli.training.conversion import export_checkpoint

    exported = export_checkpoint(
        source, hf_folder, dtype=getattr(torch, dtype.value), tokenizer=tokenizer, report=_warn
    )
    size = sum(file.stat().st_size for file in hf_folder.glob("*.safetensors"))
    family = exported.config.model.family
    _say(
        f"Wrote {hf_folder}: step {exported.step}, {family}, {dtype.value}, {size / 2**20:,.1f} MiB of weights"
    )
    _say(f"  {exported.tokenizer}")


@app.command("verify")
def verify_weights(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="HF_FOLDER_OR_RUN",
            help="A Hugging Face folder, a run, or one of its step-N.",
            show_default=False,
        ),
    ],
    tokens: Annotated[
        int,
        typer.Option(min=1, max=MOST_COMPARED, metavar="N", help="Random tokens to compare on."),
    ] = 256,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=LARGEST_TOLERANCE,
            metavar="X",
            help="Largest difference of a logit that counts as agreement.",
        ),
    ] = 1e-3,
) -> None:
    """Compare the logits of mtrain's decoder with those of transformers, in float32 on the CPU; exit code 1 if they disagree.

    A run is compared by way of an export to a temporary folder, so that this checks the export too.

    [bold]Examples[/bold]

      [cyan]mtrain checkpoint verify Qwen2.5-3B[/cyan]
      [cyan]mtrain checkpoint verify runs/latest --tokens 1024[/cyan]
    """
    import torch

    from mtrain_cli.launch.temporary_folders import private_folder
    from mtrain_cli.model.verify import require_transformers, verify

    version = require_transformers()
    what = str(source)
    if (source / "config.json").is_file():
        agreement = verify(source, tokens, _tell)
    else:
        from mtrain_cli.training.conversion import export_checkpoint, find_source

        find_source(source)  # a mistake is told before anything is begun
        with private_folder() as folder:
            exported = folder / "hf"
            _tell(f"exporting {source} to a temporary folder")
            what = f"{source}, step {export_checkpoint(source, exported, dtype=torch.float32, report=_warn).step},"
            agreement = verify(exported, tokens, _tell)
    agrees = agreement.largest_difference <= tolerance  # false for NaN
    _say(f"{what} in float32 on {tokens:,} random tokens, mtrain against transformers {version}")
    _say(
        f"  largest difference of a logit {agreement.largest_difference:.2e}  (largest logit {agreement.largest_logit:.2f})"
    )
    _say(f"  mean KL divergence            {agreement.mean_kl:.2e} nats")
    _say(f"  {'agrees' if agrees else 'DISAGREES'} at tolerance {tolerance:g}")
    if not agrees:
        raise typer.Exit(1)


def _tell(line: str) -> None:
    """What is under way, beside the result."""
    print(printable(line), file=sys.stderr, flush=True)


def _warn(line: str) -> None:
    _tell(f"warning: {line}")


def _say(line: str) -> None:
    from mtrain_cli.console import Console

    Console(soft_wrap=True, highlight=False).print(line, markup=False)
