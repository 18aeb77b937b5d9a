"""`mtrain profile imbalance`: measure how long each worker computes, and which workers wait."""

from __future__ import annotations

import itertools
import sys
from typing import Annotated

import typer

from mtrain_cli.commands.completion import complete_exchanges, complete_layouts
from mtrain_cli.commands.options import (
    MOST_SAMPLES,
    MOST_STEPS,
    Overrides,
    SummaryAsJson,
    bounded,
    flag,
    name_list,
    option,
    parse_names,
    print_summary,
    with_measurement_folder,
)
from mtrain_cli.commands.profile import app, keys_for, require_known_keys
from mtrain_cli.commands.train import require_data, require_resolvable
from mtrain_cli.config import keys
from mtrain_cli.config.exchanges import exchange_name
from mtrain_cli.config.parallel_checks import require_degree_1
from mtrain_cli.config.pattern_settings import PATTERNS, DenseSettings, VerticalSlashSettings
from mtrain_cli.config.schema import Config, ConfigError


@app.command("imbalance")
def imbalance(
    overrides: Overrides = None,
    layout: Annotated[str, name_list(complete_layouts)] = "",
    exchange: Annotated[str, name_list(complete_exchanges)] = "",
    pattern: Annotated[str, name_list()] = "",
    seq: Annotated[str, option("N,...")] = "",
    steps: Annotated[int, bounded(1, MOST_SAMPLES)] = 3,
    warmup: Annotated[int, bounded(0, MOST_STEPS)] = 1,
    every: Annotated[int, bounded(1, MOST_STEPS)] = 1,
    attention_only: Annotated[bool, flag("--attention-only")] = False,
    peer: Annotated[bool, flag("--peer")] = False,
    as_json: SummaryAsJson = False,
) -> None:
    """Measure how long each worker computes, which workers wait, for whom, and why.

    Runs real training steps. For each recorded step, every case computes forward and backward from
    the same weights and tokens, with and without recording. Then the model is updated.
    Imbalance degrees are the largest attention time over the mean: worker-level across the workers
    of a step, step-level across the steps of a worker. 1 is perfect. The records are saved in
    measurements/, for `mtrain report`.

    If you name neither an exchange nor a pattern, it compares dense attention with a small
    vertical_slash index on a ring, and prints these settings. With --exchange auto, it measures the
    attention that `mtrain train` would run. `mtrain profile-balance` is the same command.

    [bold]Examples[/bold]

      [cyan]mtrain profile imbalance --layout zigzag[/cyan]
          Compare a sparse ring with a dense one, within a minute on two CPU cores
      [cyan]mtrain profile imbalance --layout zigzag,striped --exchange ring sparsity=moba[/cyan]
          Compare two layouts with one dynamic index

    Args:
        layout: Layouts to compare; by default topology.layout.
        exchange: Exchanges to compare; by default topology.exchange, or a ring if you name no
            pattern either.
        pattern: Patterns to compare; by default the pattern of sparsity=, or dense and
            vertical_slash if you name no exchange either. A setting sparsity.KEY=... applies to
            each pattern that has the key.
        seq: Sequence lengths to compare; only with --attention-only.
        steps: Number of recorded training steps per case.
        warmup: Number of training steps before the first recorded step.
        every: Record one of every N training steps.
        attention_only: Measure the attention of one layer on random data, or of one layer of each
            kind under mask.full_every or sparsity.dense_layers. With data.mask_key, the masks are
            those of the first sequences of the data. No model is needed, so sequences may be longer
            than a model's memory allows.
        peer: With --attention-only on GPUs: also time dense attention with PyTorch's context
            parallelism (all-gather, cuDNN, bfloat16).
    """
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.job import job_rank
    from mtrain_cli.launch.local import launch

    words = list(overrides or ())
    if seq and not attention_only:
        raise ConfigError(
            f"--seq {seq}: only with --attention-only; otherwise give one length, as seq=N"
        )
    if peer and not attention_only:
        raise ConfigError("--peer: compares one layer's attention; add --attention-only")
    typed = {"--layout": layout, "--exchange": exchange, "--pattern": pattern, "--seq": seq}
    cases, remark = _cases(words, {name: parse_names(name, text) for name, text in typed.items()})
    config = with_measurement_folder(cases[0][1])
    environment = resolve_environment(config)
    dims, dtype = environment.dims, config.train.dtype
    on_gpus = environment.device != "cpu"
    if peer and not (on_gpus and dims.cp == dims.workers and dtype != "float32"):
        raise ConfigError(
            "--peer: PyTorch's context parallelism with cuDNN needs GPUs in one context group, and "
            "bfloat16; leave it out"
        )
    for _, case in cases:
        if attention_only:
            for degree in ("tensor_parallel", "pipeline_parallel"):
                require_degree_1(case, degree, "mtrain profile imbalance --attention-only")
        require_resolvable(case, environment)
        if not attention_only or case.data.mask_key is not None:
            require_data(case)
    if remark and not job_rank():
        print(f"mtrain: {remark}", file=sys.stderr)
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.profiling.measurement import ATTENTION_ONLY, TARGETS, TRAINING, MeasurementPlan

    run = run_dir.create(config, words)
    mode = ATTENTION_ONLY if attention_only else TRAINING
    MeasurementPlan(mode, cases, steps, warmup, every, peer, quiet=as_json).save(run)
    code = launch(run, environment, resume=False, target=TARGETS[mode], config=config, saves=False)
    print_summary(run, as_json)
    raise typer.Exit(code)


# Keys whose values can be compared, and the option that lists these values.
_COMPARED = {
    "seq": "--seq",
    "sparsity": "--pattern",
    "topology.layout": "--layout",
    "topology.exchange": "--exchange",
}


# Groups and keys that choose an exchange or a pattern.
_CHOOSING = (
    *("recipe", "sparsity", "topology.exchange", "topology.ulysses", "topology.chunks"),
    *("topology.stages", "topology.stages_backward", "topology.circulates"),
)


def _cases(words: list[str], typed: dict[str, list[str]]) -> tuple[list[tuple[str, Config]], str]:
    """Return every combination with its label, and a remark for the user."""
    from mtrain_cli.launch.environment import resolve_environment

    cases = _combinations(words, typed)
    named = {word.partition("=")[0] for word in words}
    chosen = (
        typed["--exchange"] or typed["--pattern"] or any(k.startswith(_CHOOSING) for k in named)
    )
    if chosen or cases[0][1].topology.exchange != "auto":  # the latter by the group topology
        return cases, ""
    seq, added = min(config.seq for _, config in cases), []
    if not (typed["--seq"] or named & {"seq", "model"}) and (
        resolve_environment(cases[0][1]).device == "cpu"
    ):
        seq, added = 1024, ["seq=1k"]  # within a minute
    # Random weights attend evenly, so without maximums an index keeps nearly all pairs. This one
    # keeps a sixteenth of the slashes and of the columns.
    block = 16 if seq < 16_384 else 128
    added += [
        f"sparsity.block={block}",
        f"sparsity.max_slashes={max(2, seq // block // 16)}",
        f"sparsity.max_columns={max(64, min(4096, seq // 16))}",
    ]
    ring = exchange_name(gathers=False, hierarchical=False)
    compared = {"--exchange": [ring], "--pattern": [DenseSettings.name, VerticalSlashSettings.name]}
    try:
        cases = _combinations([*words, *added], typed | compared)
    except ConfigError:
        return cases, ""
    shown = [f"{option} {','.join(names)}" for option, names in compared.items()]
    return cases, (
        f"compares a sparse ring with a dense one: {' '.join([*shown, *added])}. To choose "
        "otherwise, name an exchange or a pattern; --exchange auto takes those of `mtrain train`"
    )


def _combinations(words: list[str], typed: dict[str, list[str]]) -> list[tuple[str, Config]]:
    from mtrain_cli.composition.compose import compose

    for word in words:
        key = word.partition("=")[0]
        option = _COMPARED.get("sparsity" if key == "sparsity.pattern" else key)
        if option is not None and typed[option]:
            raise ConfigError(
                f"{word}: {option} {','.join(typed[option])} already compares this setting; give "
                "only one of the two"
            )
    for key, compares in _COMPARED.items():
        allowed = list(PATTERNS) if key == "sparsity" else keys.all_keys()[key].choices
        if allowed and typed[compares]:
            parse_names(compares, ",".join(typed[compares]), allowed)
    for value in typed["--seq"]:
        try:
            keys.all_keys()["seq"].convert(value)
        except ValueError as error:
            raise ConfigError(f"--seq {value}: {error}") from None
    patterns = typed["--pattern"]
    sparse = [word for word in words if word.startswith("sparsity.")] if patterns else []
    rest = [word for word in words if word not in sparse]
    require_known_keys(sparse, patterns, patterns)
    cases = []
    for values in itertools.product(*(typed[option] or [""] for option in _COMPARED.values())):
        compared = dict(zip(_COMPARED, values, strict=True))
        pairs = [f"{key}={value}" for key, value in compared.items() if value]
        config = compose([*rest, *pairs, *keys_for(compared["sparsity"], sparse)])
        topology = config.topology
        label = f"{config.sparsity.pattern} {topology.layout} {topology.exchange}"
        several = len(typed["--seq"]) > 1
        cases.append((f"{label} {compared['seq']}" if several else label, config))
    return cases
