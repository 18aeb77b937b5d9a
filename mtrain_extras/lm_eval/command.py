"""`mtrain eval lm-eval`: the tasks of lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from mtrain_cli.commands.evaluate import Common, Model, Words, run_evaluation
from mtrain_cli.commands.options import MOST_SAMPLES, bounded, option, parse_names, with_options
from mtrain_cli.config.schema import ConfigError

_MOST_SHOTS = 1024


@with_options(Common, "length")
def lm_eval(
    common: Common,
    model: Model,
    tasks: Annotated[str, option("NAME,...")],
    overrides: Words = None,
    include_path: Annotated[Path | None, option("DIR")] = None,
    num_fewshot: Annotated[int | None, bounded(0, _MOST_SHOTS)] = None,
    samples: Annotated[int | None, bounded(1, MOST_SAMPLES)] = None,
) -> None:
    """Run tasks of lm-evaluation-harness, which has hundreds: short questions to whole books.

    Needs the extra lm-eval. lm-eval reads the data of a task from the Hugging Face Hub or from its
    cache. A task may contain code, which runs: give only task files that you trust.

    [bold]Examples[/bold]

      [cyan]mtrain eval lm-eval Qwen2.5-3B --tasks arc_easy,hellaswag --samples 200[/cyan]
          Answer 200 questions of two tasks
      [cyan]mtrain eval lm-eval runs/latest --tasks my_task --include-path tasks[/cyan]
          Run a task that tasks/my_task.yaml describes

    Args:
        model: A Hugging Face folder, a run, or a step-N folder of a run.
        tasks: Names of tasks or groups; `lm-eval ls tasks` lists them.
        overrides: Settings of sparsity and topology, train.kernel and train.dtype.
        include_path: Folder with further tasks, as YAML files.
        num_fewshot: Solved examples before each question, for tasks that do not prescribe 0.
        samples: Samples of each task; by default all.
    """
    from mtrain_extras.lm_eval.tasks import HarnessOptions

    names = parse_names("--tasks", tasks)
    if not names:
        raise ConfigError(f"--tasks {tasks!r}: give at least one task")
    if include_path is not None and not include_path.is_dir():
        reason = "is a file" if include_path.exists() else "no such folder"
        raise ConfigError(f"--include-path {include_path}: {reason}; give a folder of YAML files")
    folder = None if include_path is None else str(include_path.expanduser().absolute())
    options = HarnessOptions(tuple(names), folder, num_fewshot)
    run_evaluation("lm-eval", common, model, overrides, samples or 0, [0], options=asdict(options))
