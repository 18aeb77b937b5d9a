"""`mtrain checkpoint`: import, export and verify weights in Hugging Face folders."""

from __future__ import annotations

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mtrain_cli.commands.options import (
    LARGEST_TOLERANCE,
    MOST_COMPARED,
    argument,
    bounded,
    flag,
    option,
)
from mtrain_cli.config import plugins
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import adapter_hint
from mtrain_cli.printable import one_line, printable

app = typer.Typer(
    help="Import weights from Hugging Face folders, export them, and verify them.",
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
    hf_folder: Annotated[Path, argument("HF_FOLDER")], run: Annotated[Path, argument("RUN")]
) -> None:
    """Create a run whose checkpoint holds the weights of a Hugging Face folder, in float32.

    Training from a Hugging Face folder needs no import: mtrain train train.init_from=HF_FOLDER.

    [bold]Examples[/bold]

      [cyan]mtrain checkpoint import Qwen2.5-3B runs/qwen3b-start[/cyan]
          Create runs/qwen3b-start, which you can resume

    Args:
        hf_folder: Folder with config.json and safetensors of a qwen2, qwen3, llama, mistral,
            qwen3_moe or mixtral model.
        run: Run folder to create; the weights become its checkpoint step-0.
    """
    from mtrain_cli.model.huggingface_config import read_config

    read_config(hf_folder)  # report a mistake before torch is imported
    from mtrain_cli.training.conversion import import_folder

    config = import_folder(hf_folder, run)
    model = config.model
    _print_result(
        f"Wrote {run / 'checkpoints' / 'step-0'}: {model.family}, {model.num_layers} layers, "
        f"weights of {hf_folder}"
    )


@app.command("export")
def export_weights(
    source: Annotated[Path, argument("RUN_OR_CHECKPOINT")],
    hf_folder: Annotated[str, argument("HF_FOLDER")],
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the exported weights.")] = Dtype.bfloat16,
    tokenizer: Annotated[Path | None, option("DIR")] = None,
    adapter: Annotated[bool, flag("--adapter")] = False,
    push: Annotated[str | None, option("ORG/NAME")] = None,
    private: Annotated[bool, flag("--private")] = False,
) -> None:
    """Export a checkpoint and its tokenizer to a folder for transformers and inference servers.

    [bold]Examples[/bold]

      [cyan]mtrain checkpoint export runs/latest my-model-hf[/cyan]
          Export the newest checkpoint of the last run
      [cyan]mtrain checkpoint export runs/x/checkpoints/step-20 hf --dtype float32[/cyan]
          Export the checkpoint of step 20 in float32
      [cyan]mtrain checkpoint export runs/long my-model-hf --tokenizer Qwen2.5-3B[/cyan]
          Use the tokenizer of another folder
      [cyan]mtrain checkpoint export runs/lora my-adapter --adapter[/cyan]
          Export trained adapters for peft

    Args:
        source: A run, to export its newest checkpoint, or a step-N folder of a run.
        hf_folder: Folder to create; new or empty. Or its URL, such as s3://bucket/my-model.
        tokenizer: Folder with a tokenizer to export instead of the run's. Its files are copied, and
            so are the token ids in its config.json.
        adapter: Export the adapters of train.lora as a PEFT folder. Without it, they are merged
            into the weights of train.init_from.
        push: Push the folder, with a model card, to this repository of the Hugging Face Hub, too.
        private: Make the repository of --push a private one, if it is new.
    """
    from mtrain_cli.launch.run_dir import find_source
    from mtrain_cli.model.huggingface_config import require_new_folder
    from mtrain_cli.model.tokenizer_files import of_folder

    require_new_folder(Path(hf_folder))
    source = find_source(source)
    if tokenizer is not None:
        of_folder(tokenizer)
    delivery: contextlib.AbstractContextManager[Path] = contextlib.nullcontext(Path(hf_folder))
    for places in plugins.places():
        delivery = places.delivery(source, hf_folder, push, private)
    with delivery as folder:
        # Imported late: it takes seconds, and mistakes are reported above.
        import torch

        from mtrain_cli.training.conversion import export_checkpoint

        kind = getattr(torch, dtype.value)
        options: Any = {"dtype": kind, "tokenizer": tokenizer, "adapter": adapter, "report": _warn}
        exported = export_checkpoint(source, folder, **options)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    family = exported.config.model.family
    _print_result(
        f"Wrote {hf_folder}: step {exported.step}, {family}, {dtype.value}, "
        f"{size / 2**20:,.1f} MiB of weights\n  {exported.tokenizer}"
    )


@app.command("verify")
def verify_weights(
    source: Annotated[Path, argument("HF_FOLDER_OR_RUN")],
    tokens: Annotated[int, bounded(1, MOST_COMPARED)] = 256,
    tolerance: Annotated[float, option("X", least=0.0, most=LARGEST_TOLERANCE)] = 1e-3,
) -> None:
    """Compare mtrain's logits with transformers'. The exit code is 1 if they differ.

    mtrain and transformers compute in float32 on the CPU. A run is first exported to a temporary
    folder, so the command also checks the export.

    [bold]Examples[/bold]

      [cyan]mtrain checkpoint verify Qwen2.5-3B[/cyan]
          Check mtrain's decoder on released weights
      [cyan]mtrain checkpoint verify runs/latest --tokens 1024[/cyan]
          Check the export of the last run on more tokens

    Args:
        source: A Hugging Face folder, a run, or a step-N folder of a run.
        tokens: Number of random tokens.
        tolerance: Largest logit difference that counts as agreement.
    """
    from mtrain_cli.launch.run_dir import NotARunError, find_source

    from_run = not (source / "config.json").is_file()
    if from_run:
        try:
            source = find_source(source)
        except NotARunError as error:
            raise ConfigError(
                f"{error.problems[0]} Or give a Hugging Face folder, with config.json and "
                f"safetensors{adapter_hint(source)}"
            ) from None
    # Imported late: it takes seconds, and mistakes are reported above.
    import torch

    from mtrain_cli.launch.temporary_folders import private_folder
    from mtrain_cli.model.verify import require_transformers, verify

    version = require_transformers()
    subject, learned = str(source), ""
    if not from_run:
        agreement = verify(source, tokens, _report)
    else:
        from mtrain_cli.training.conversion import describe_learned, export_checkpoint

        with private_folder() as folder:
            exported = folder / "hf"
            _report(f"exporting {source} to a temporary folder")
            checkpoint = export_checkpoint(source, exported, dtype=torch.float32, report=_warn)
            subject = f"{source}, step {checkpoint.step},"
            learned = describe_learned(source, checkpoint.step)
            agreement = verify(exported, tokens, _report)
    agrees = agreement.largest_difference <= tolerance  # false for NaN
    _print_result(
        f"{subject} in float32 on {tokens:,} random tokens, mtrain against transformers {version}\n"
        f"  largest logit difference {agreement.largest_difference:.2e}  "
        f"(largest logit {agreement.largest_logit:.2f})\n"
        f"  mean KL divergence       {agreement.mean_kl:.2e} nats\n"
        f"  {'agrees' if agrees else 'DISAGREES'} at tolerance {tolerance:g}"
        f"{learned}"
    )
    if not agrees:
        raise typer.Exit(1)


def _report(line: str) -> None:
    """Print a line of progress on stderr; the result goes to stdout."""
    print(printable(line), file=sys.stderr, flush=True)


def _warn(line: str) -> None:
    _report(f"warning: {one_line(line)}")


def _print_result(line: str) -> None:
    from mtrain_cli.console import Console

    Console(soft_wrap=True, highlight=False).print(line)
