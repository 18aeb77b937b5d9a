"""`mtrain eval`: evaluate a model on long contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_attentions, complete_models, complete_overrides
from mtrain_cli.commands.options import (
    MOST_DOCUMENTS,
    MOST_SAMPLES,
    argument,
    bounded,
    flag,
    name_list,
    option,
    parse_items,
    parse_names,
    parse_whole_number,
    token_count,
    token_lengths,
    warn,
    with_options,
    writing,
)
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.problem import ConfigError, Names
from mtrain_cli.config.schema import NIAH, PERPLEXITY, Config
from mtrain_cli.config.sizes import format_size, parse_share

if TYPE_CHECKING:
    from mtrain_cli.evaluation.request import EvaluationRequest, Weights
    from mtrain_cli.inference.model_source import ModelSource
    from mtrain_cli.launch.environment import Environment

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)
Model = Annotated[Path, argument("MODEL", complete_models)]
# The options of `mtrain data needles` that have another name or none in `mtrain eval niah`.
_NEEDLES = Names(other={"pairs": "needles"}, lacks=("questions",))
Words = Annotated[list[str] | None, argument("OVERRIDES", complete_overrides)]


@app.callback()
def evaluate() -> None:
    """Evaluate a model on long contexts, with dense and with sparse attention.

    Each command takes several lengths and patterns at once. Results go to a folder in the run,
    which `mtrain report` shows. To continue a stopped evaluation, repeat the command.

    [bold]Examples[/bold]

      [cyan]mtrain eval perplexity runs/latest --length 4k --text README.md[/cyan]
          Measure the loss of whole sequences by context
      [cyan]mtrain eval niah runs/latest --length 8k,64k --attention dense,vertical_slash[/cyan]
          Find needles at every depth, at two lengths, with dense and with sparse attention
      [cyan]mtrain eval ruler Qwen2.5-3B --length 32k,128k topology.workers=8[/cyan]
          Score six tasks of RULER on eight GPUs
    """


@dataclass(frozen=True)
class Common:
    """Options of all evaluations.

    length: Tokens of a sample, such as 8k,64k,512k.
    attention: Patterns for the prompts, such as dense,vertical_slash; by default that of the
        run, and dense for a Hugging Face model. A key such as sparsity.p_v=0.9 applies to each
        pattern that has it.
    checkpoints: Checkpoints of the run: newest, all, or steps such as 100,200.
    out: Folder for the results; by default evaluation/ in the run's folder, or
        measurements/eval-NAME for a Hugging Face folder.
    tokenizer: Folder with a tokenizer to use instead of the model's.
    beyond: Allow more positions than the model was trained for.
    as_json: Print one JSON object per result instead of tables.
    """

    length: Annotated[str, option("N,...")] = "4k"
    attention: Annotated[str | None, name_list(complete_attentions)] = None
    checkpoints: Annotated[str, option("newest|all|N,...")] = "newest"
    out: Annotated[Path | None, option("DIR")] = None
    tokenizer: Annotated[Path | None, option("DIR")] = None
    beyond: Annotated[bool, flag("--beyond")] = False
    as_json: Annotated[bool, flag("--json")] = False


@app.command()
@with_options(Common)
def perplexity(
    common: Common,
    model: Model,
    overrides: Words = None,
    text: Annotated[str | None, option("PATH")] = None,
    text_key: Annotated[str, option("NAME")] = "text",
    samples: Annotated[int | None, bounded(1, MOST_SAMPLES)] = None,
    short: Annotated[str | None, option("N")] = None,
    keys_from: Annotated[Path | None, option("DIR")] = None,
) -> None:
    """Measure the loss of whole sequences, by the number of earlier tokens.

    [bold]Examples[/bold]

      [cyan]mtrain eval perplexity runs/latest --length 4k --text README.md[/cyan]
          Measure the loss on the text of a file
      [cyan]mtrain eval perplexity Qwen2.5-3B --text books --length 32k,128k --short 4k[/cyan]
          Also measure the tokens that need more than 4k of context, as LongPPL does

    Args:
        model: A Hugging Face folder, a run, or a step-N folder of a run.
        overrides: Settings of sparsity and topology, train.kernel and train.dtype.
        text: File or folder of text (.txt, .md, .py, .jsonl, .json, .parquet). Each sequence is
            whole and comes from one document. By default, what the run held out.
        text_key: Key or column that holds the text.
        samples: Maximum number of sequences of each length; by default 8.
        short: Also measure the key tokens: those whose log-probability rises by more than 2 nats
            over this much context, and is above -2 (LongPPL). The newest of the checkpoints and the
            first attention choose them.
        keys_from: Take the key tokens from this folder of results, so that all models are measured
            on the same tokens.
    """
    from mtrain_cli.evaluation.request import PerplexityOptions

    if keys_from is not None and short is None:
        raise ConfigError(f"--keys-from {keys_from}: needs --short N, with which it was measured")
    tokens = None if short is None else token_count("--short", short)
    least = min(token_lengths("--length", common.length))
    if tokens is not None and tokens > least - 2:
        raise ConfigError(
            f"--short {short}: no token of a sequence of {least:,} tokens has more context than "
            "that; give a smaller --short or a larger --length"
        )
    options = PerplexityOptions(text, text_key, tokens, _text(keys_from))
    run_evaluation(PERPLEXITY, common, model, overrides, samples or 8, perplexity=options)


@app.command()
@with_options(Common)
def niah(
    common: Common,
    model: Model,
    overrides: Words = None,
    form: Annotated[str, option("sentences|python")] = "sentences",
    haystack: Annotated[str, option("stdlib|PATH")] = "stdlib",
    needles: Annotated[int, bounded(1, 2048)] = 10,
    chains: Annotated[str, option("SHARE")] = "0",
    samples: Annotated[int, bounded(1, MOST_SAMPLES)] = 10,
    seed: Annotated[int, bounded(0, MOST_DOCUMENTS)] = 1,
) -> None:
    """Find needles, hidden facts, at every depth of a text.

    Each sequence hides several needles and asks for all of them. The text contains the answers, so
    one forward pass scores them. An answer is right if each of its tokens is the most likely one;
    greedy decoding would then begin with it. With a sparse pattern, the queries of the answers are
    sparse, too; in `mtrain generate` and `mtrain eval ruler`, new tokens attend to everything.

    [bold]Examples[/bold]

      [cyan]mtrain eval niah runs/latest --length 8k,64k --attention dense,vertical_slash[/cyan]
          Compare dense and sparse attention at ten depths
      [cyan]mtrain eval niah runs/latest --form python --needles 64 --chains 25%[/cyan]
          Ask in the form of `mtrain data needles`, on which the run was trained

    Args:
        model: A Hugging Face folder, a run, or a step-N folder of a run.
        overrides: Settings of sparsity and topology, train.kernel and train.dtype.
        form: sentences: "The magic number of calm-otter is 4817263." python: the lines of
            `mtrain data needles`, half of whose questions are near the end.
        haystack: Text around the needles: a file or folder, or 'stdlib' for Python's own sources.
        needles: Needles in each sequence; sentences are at equally spaced depths.
        chains: Share of the questions of --form python that follow a link.
        samples: Sequences of each length.
        seed: Determines names, numbers and places.
    """
    from mtrain_cli.evaluation.request import NeedleOptions
    from mtrain_cli.evaluation.retrieval import PYTHON, SENTENCES

    if form not in (SENTENCES, PYTHON):
        raise ConfigError(f"--form {form}: expected {SENTENCES} or {PYTHON}")
    share = parse_chains(chains)
    if share and form == SENTENCES:
        raise ConfigError(f"--chains {chains}: only with --form {PYTHON}")
    options = NeedleOptions(form, haystack, needles, share, seed)
    run_evaluation(NIAH, common, model, overrides, samples, niah=options)


def run_evaluation(
    kind: str,
    common: Common,
    model: Path,
    overrides: list[str] | None,
    samples: int,
    lengths: Sequence[int] = (),
    **options: Any,
) -> None:
    """Check everything, evaluate, and show the results.

    lengths: those of --length by default; 0 for samples with lengths of their own.
    """
    from mtrain_cli.inference.limits import longer_than_trained

    words = list(overrides or ())
    lengths = lengths or token_lengths("--length", common.length)
    sources = _sources(model, words, common.attention)
    first = next(iter(sources.values()))
    if not common.beyond and max(lengths) > first.max_position:
        raise ConfigError(
            f"--length {common.length}: the model has {first.max_position:,} positions; give at "
            f"most {format_size(first.max_position)}, or add --beyond to go on anyway"
        )
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.evaluation.request import EvaluationRequest
    from mtrain_cli.evaluation.results import FOLDER, locked, model_name, require_own
    from mtrain_cli.evaluation.runner import find
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.job import job_rank
    from mtrain_cli.launch.run_dir import run_of

    weights = _weights([*sources.values()], common.checkpoints)
    if "perplexity" in options and options["perplexity"].short is not None:
        weights = weights[::-1]  # the newest checkpoint chooses the key tokens of all
    root = first.path.resolve() if first.is_folder else run_of(first.path)
    usual = Path("measurements", f"eval-{root.name}") if first.is_folder else root / FOLDER
    out = common.out or usual
    require_own(out, model_name(root, out))
    request = EvaluationRequest(
        kind=kind,
        out=str(out.absolute()),
        model=model_name(root, out),
        weights=weights,
        attentions=tuple(sources),
        lengths=tuple(lengths),
        samples=samples,
        tokenizer=_text(common.tokenizer),
        **options,
    )
    configs = tuple(source.config for source in sources.values())
    environment = resolve_environment(first.config)
    lines: list[str] = []
    if line := longer_than_trained(first, max(lengths)):
        lines.append(f"--length {common.length}: {line}")
    tasks = None
    if (other := find(kind)) is not None:
        tasks = other.check(request, first, beyond=common.beyond)
    else:
        lines += _check_samples(request, first)
    warn(lines)
    with contextlib.ExitStack() as stack:
        if not job_rank():
            with writing(f"--out {out}"):
                stack.enter_context(locked(out))
        if code := _evaluate(request, configs, environment, words, tasks):
            raise typer.Exit(code)
    _show(request, as_json=common.as_json)


def _sources(model: Path, words: Sequence[str], attention: str | None) -> dict[str, ModelSource]:
    """Return the model under each attention, by the name of the pattern."""
    from mtrain_cli.commands.profile import keys_for, require_known_keys
    from mtrain_cli.inference.model_source import open_source, servable_patterns

    if attention is None:
        source = open_source(model, words)
        return {source.config.sparsity.pattern: source}
    names = parse_names("--attention", attention, servable_patterns())
    for word in words:
        if word.startswith(("sparsity=", "sparsity.pattern=")):
            raise ConfigError(f"{word}: --attention {attention} gives the patterns; leave one out")
    keys = [word for word in words if word.startswith("sparsity.")]
    rest = [word for word in words if not word.startswith("sparsity.")]
    require_known_keys(keys, names, names)
    own = open_source(model, rest).config.sparsity.pattern
    sources = {}
    for name in names:
        pattern = [] if name == own else [f"sparsity={name}"]  # its own keeps the run's settings
        sources[name] = open_source(model, [*rest, *pattern, *keys_for(name, keys)])
    return sources


def _weights(sources: Sequence[ModelSource], checkpoints: str) -> tuple[Weights, ...]:
    """Return the weights by step; ``all`` leaves damaged and unlearned ones out, and warns."""
    from mtrain_cli.evaluation.request import Weights
    from mtrain_cli.launch.run_dir import checkpoints_of

    source = sources[0]
    if source.is_folder:
        if checkpoints != "newest":
            raise ConfigError(f"--checkpoints {checkpoints}: a Hugging Face folder has none")
        return (Weights.of_folder(source.path),)
    if checkpoints == "newest":
        return (_newest(source.path),)
    by_step = {int(p.name.removeprefix("step-")): p for p in checkpoints_of(source.path)[::-1]}
    steps = list(by_step)
    if checkpoints != "all":
        steps = sorted(set(parse_items("--checkpoints", checkpoints, parse_whole_number, "1,20")))
    learning = [one.config.sparsity for one in sources if one.config.sparsity.has_learned_state]
    dense = max((sparsity.dense_steps for sparsity in learning), default=0)
    intact = []
    for step in steps:
        if checkpoints == "all" and step <= dense:
            warn([
                f"step {step}: sparsity.dense_steps={dense} made all steps until then dense, so "
                "the index has not learned; it is left out"
            ])  # fmt: skip
            continue
        if step not in by_step:
            held = ", ".join(map(str, by_step))
            raise ConfigError(
                f"--checkpoints {checkpoints}: {source.path} has no checkpoint of step {step}; it "
                f"has {held}"
            )
        try:
            intact.append(Weights.of_checkpoint(by_step[step]))
        except ConfigError as error:
            if checkpoints != "all":
                raise
            warn([f"{error.problems[0]}; it is left out"])
    if not intact:
        learned = " whose index has learned" if dense else ""
        raise ConfigError(
            f"--checkpoints {checkpoints}: {source.path} has no intact checkpoint{learned}"
        )
    return tuple(intact)


def _newest(path: Path) -> Weights:
    """Return the weights of the newest intact checkpoint, which `mtrain generate` would load."""
    from mtrain_cli.evaluation.request import Weights
    from mtrain_cli.training.checkpoint_files import CheckpointReader
    from mtrain_cli.training.checkpointer import CheckpointError, newest_intact

    def use(folder: Path) -> Weights:
        CheckpointReader(folder)  # also reads its metadata, in which a stranger may have put code
        return Weights.of_checkpoint(folder)

    try:
        return newest_intact(path, use, lambda line: warn([line]))
    except CheckpointError as error:
        raise ConfigError(*str(error).splitlines()) from None


def _check_samples(request: EvaluationRequest, source: ModelSource) -> list[str]:
    """Make the first samples, so that mistakes are reported before any work. Return warnings."""
    from mtrain_cli.evaluation.perplexity import Perplexity
    from mtrain_cli.evaluation.request import open_measurement
    from mtrain_cli.evaluation.runner import tokenizer_text
    from mtrain_cli.inference.limits import require_hidden_labels, require_known_ids
    from mtrain_cli.inference.text import open_codec

    codec = open_codec(source, request.tokenizer)
    measurement = open_measurement(request, source, codec)
    require_hidden_labels(source.config, "this evaluation")
    tokenizer, vocabulary = tokenizer_text(request, source), source.config.model.vocab_size
    for cell in measurement.cells():
        samples = []
        if cell.length == min(request.lengths):
            with _NEEDLES.in_errors():
                samples = [next(measurement.items(cell))["ids"]]
        if isinstance(measurement, Perplexity):
            samples += [sequence.ids for sequence in measurement.sequences[cell.length]]
        for ids in samples:
            require_known_ids(ids, vocabulary, str(cell), tokenizer)
    remarks = measurement.remarks.values() if isinstance(measurement, Perplexity) else ()
    return [f"perplexity: {line}" for line in remarks]


def _evaluate(
    request: EvaluationRequest,
    configs: tuple[Config, ...],
    environment: Environment,
    words: list[str],
    tasks: Any,
) -> int:
    """Evaluate on one worker or on several. Return the exit code."""
    from mtrain_cli.evaluation.runner import STOPPED, TARGET, evaluate, make_runner

    if environment.dims.workers == 1:
        try:
            evaluate(make_runner(request, configs, environment, tasks=tasks), environment)
        except KeyboardInterrupt:
            typer.echo(STOPPED, err=True)
            raise
        return 0
    from mtrain_cli.commands.generate import launch_workers

    code = launch_workers(
        TARGET, lambda run: request.save(run.path, configs), configs[0], environment, words
    )
    if code in (130, 143):  # Ctrl-C, or the end of a job
        typer.echo(STOPPED, err=True)
    return code


def _show(request: EvaluationRequest, *, as_json: bool) -> None:
    from mtrain_cli.evaluation.results import read_results
    from mtrain_cli.launch.job import job_rank

    if job_rank():
        return
    steps = {weights.step for weights in request.weights}
    results = [
        result
        for result in read_results(Path(request.out))
        if result.task.partition(":")[0] in (request.kind, "file")
        and result.length in (*request.lengths, 0)
        and result.attention in request.attentions
        and result.step in steps
    ]
    if as_json:
        for result in sorted(results, key=lambda result: result.step or 0):
            typer.echo(json_text(asdict(result)))
        return
    from mtrain_cli.reporting.evaluations import show_evaluations
    from mtrain_cli.reporting.terminal import make_console

    console = make_console()
    show_evaluations(console, results)
    console.print(f"files  {request.out}", soft_wrap=True)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.expanduser().absolute())


def parse_chains(text: str) -> float:
    try:
        share = parse_share(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--chains {text}: must be a share from 0 to 1, such as 0.25 or 25%")
    return share
