"""`mtrain generate`: let a model continue prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_models, complete_overrides
from mtrain_cli.commands.options import MOST_IDS, MOST_TOKENS, argument, bounded, flag, option, warn
from mtrain_cli.config.documents import json_object
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mtrain_cli.launch.run_dir import RunDir

STDIN, JSONL = "-", ".jsonl"


def generate(
    model: Annotated[Path, argument("MODEL", complete_models)],
    overrides: Annotated[list[str] | None, argument("OVERRIDES", complete_overrides)] = None,
    prompt: Annotated[list[str] | None, option("TEXT")] = None,
    prompt_file: Annotated[str | None, option("FILE")] = None,
    max_new: Annotated[int, bounded(1, MOST_TOKENS)] = 128,
    temperature: Annotated[float, option("X")] = 0.0,
    top_p: Annotated[float, option("X")] = 1.0,
    top_k: Annotated[int, bounded(None, MOST_IDS)] = 0,
    seed: Annotated[int, bounded()] = 0,
    ignore_end: Annotated[bool, flag("--ignore-end")] = False,
    beyond: Annotated[bool, flag("--beyond")] = False,
    tokenizer: Annotated[Path | None, option("DIR")] = None,
    as_json: Annotated[bool, flag("--json")] = False,
) -> None:
    """Continue prompts with a model, with the attention pattern of its training.

    The prompt is computed like a training sequence: with the run's pattern, and shared by several
    workers. New tokens attend to all earlier tokens. The text goes to stdout, everything else to
    stderr.

    [bold]Examples[/bold]

      [cyan]mtrain generate runs/latest --prompt "def main():"[/cyan]
          Continue a line with the newest checkpoint of the last run
      [cyan]mtrain generate Qwen2.5-3B --prompt-file book.txt --max-new 400[/cyan]
          Continue a long text with a Hugging Face model
      [cyan]mtrain generate runs/latest sparsity=dense topology.workers=2 --prompt Hi[/cyan]
          Compute the prompt with dense attention, on two workers
      [cyan]mtrain generate runs/x --prompt-file ask.jsonl --temperature 0.7 --json[/cyan]
          Sample an answer to each line of a file, and print JSON

    Args:
        model: A Hugging Face folder, a run, or a step-N folder of a run.
        overrides: Settings of sparsity and topology, train.kernel, train.dtype and
            train.compile. By default, a run keeps its sparsity, a Hugging Face model is dense, and
            one worker computes.
        prompt: Text to continue; give the option several times for several prompts.
        prompt_file: File with one prompt, which is the whole text; or a .jsonl file with a prompt
            per line, {"prompt": "text"} or {"ids": [1, 2]}. - reads one prompt from stdin.
        max_new: Maximum number of tokens to generate for a prompt.
        temperature: Divides the logits before sampling; 0 = always the most likely token.
        top_p: Sample from the smallest set of most likely tokens with this total probability.
        top_k: Sample from this many most likely tokens; 0 = from all.
        seed: Seed of the samples. The number of workers does not change a sample.
        ignore_end: Continue after a token that ends a text.
        beyond: Allow more positions than the model was trained for.
        tokenizer: Folder with a tokenizer to use instead of the model's.
        as_json: Print one JSON object per prompt instead of text.
    """
    from mtrain_cli.inference.sampling import Sampling

    sampling = Sampling(temperature, top_p, top_k, seed)
    sampling.require_valid()
    given = _prompts(prompt, prompt_file)
    words = list(overrides or ())
    from mtrain_cli.inference.model_source import open_source

    source = open_source(model, words)
    from mtrain_cli.launch.environment import resolve_environment

    environment = resolve_environment(source.config)
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.inference.limits import longer_than_trained, require_prompts
    from mtrain_cli.inference.text import open_codec
    from mtrain_cli.inference.worker import TARGET, GenerateRequest, answer

    codec = open_codec(source, tokenizer)
    ids = [codec.encode(one, n) if isinstance(one, str) else one for n, one in given.items()]
    require_prompts(source, ids, max_new, beyond=beyond, names=list(given))
    tokens = max(map(len, ids)) + max_new
    if line := longer_than_trained(source, tokens):
        warn([f"prompt and --max-new have up to {tokens:,} tokens; {line}"])
    request = GenerateRequest(
        path=str(source.path.absolute()),
        is_folder=source.is_folder,
        prompts=ids,
        max_new=max_new,
        sampling=sampling,
        ignore_end=ignore_end,
        tokenizer=None if tokenizer is None else str(tokenizer.absolute()),
        as_json=as_json,
    )
    if environment.dims.workers == 1:
        answer(request, source.config, environment)
        return
    raise typer.Exit(launch_workers(TARGET, request.save, source.config, environment, words))


def launch_workers(
    target: str, save: Callable[[RunDir], None], config: Any, environment: Any, words: list[str]
) -> int:
    """Run a model on several workers, and return the exit code. Nothing stays on the disk.

    target: what each worker runs. save: writes what the workers read into their folder.
    """
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.job import job_rank
    from mtrain_cli.launch.local import launch
    from mtrain_cli.launch.temporary_folders import private_folder

    with private_folder() as folder:
        place = {"name": "generate", "dir": str(folder / "generate"), "restarts": 0}
        config = config.changed(run=place)
        run = run_dir.create(config, words)
        if not job_rank():
            save(run)
        return launch(run, environment, resume=False, target=target, config=config, saves=False)


def _prompts(texts: list[str] | None, file: str | None) -> dict[str, str | list[int]]:
    """Return the prompts, each a text or token ids, by their names for messages."""
    if texts and file is not None:
        raise ConfigError(f"--prompt-file {file}: --prompt already gives a prompt; give only one")
    if texts:
        names = [f"--prompt number {n}" for n in range(1, len(texts) + 1)]
        return dict(zip(names if len(texts) > 1 else ["the prompt"], texts, strict=True))
    if file is None:
        raise ConfigError(
            "no prompt: give --prompt TEXT, --prompt-file FILE, or --prompt-file - for stdin"
        )
    from mtrain_cli.data.checked_files import explain_read_errors

    name = f"--prompt-file {file}"
    path = Path(file).expanduser()
    try:
        if file == STDIN:
            return {name: sys.stdin.buffer.read().decode("utf-8")}
        with explain_read_errors(f"{name}:", f"{name}: no such file"):
            text = path.read_bytes().decode("utf-8-sig" if path.suffix == JSONL else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is not UTF-8 text (byte {error.start:,})") from None
    if path.suffix != JSONL:
        return {name: text}
    prompts: dict[str, str | list[int]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        match json_object(line):
            case {"prompt": str(prompt), **rest} if rest.get("ids") is None:
                prompts[f"{name}: line {number}"] = prompt
            case {"ids": list(ids), **rest} if rest.get("prompt") is None and all(
                type(one) is int for one in ids
            ):
                prompts[f"{name}: line {number}"] = ids
            case _:
                raise ConfigError(
                    f"{name}: line {number} is not a JSON object with "
                    'either "prompt": "text" or "ids": [1, 2]'
                )
    if not prompts:
        raise ConfigError(f"{name}: has no prompt")
    return prompts
