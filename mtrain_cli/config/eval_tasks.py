"""Settings of the tasks that a training run evaluates."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain_cli.config.keys import all_keys, conflict, show
from mtrain_cli.config.option import MOST_TOKENS
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.schema import EVAL_TASKS, NIAH, PERPLEXITY, SENTENCES, Config
from mtrain_cli.config.sizes import format_size
from mtrain_cli.config.suggest import no_such

_COMMON = ("eval.length", "eval.samples")  # keys of all tasks


def problems(config: Config) -> Iterator[str]:
    """Yield a line for each mistake in ``train.eval_tasks`` and ``eval``."""
    tasks, chosen = config.train.eval_tasks, config.eval
    for task in tasks:
        if task not in EVAL_TASKS:
            why = no_such("task", task, EVAL_TASKS)
            yield conflict(config, "{train.eval_tasks}: {task}: {why}", task=task, why=why)
    if not tasks:
        return
    lengths = chosen.lengths(config.seq)
    if not lengths or not all(2 <= length <= MOST_TOKENS for length in lengths):
        most = format_size(MOST_TOKENS)
        yield f"{{eval.length}}: must be from 2 to {most} tokens"
    if chosen.chains and chosen.form == SENTENCES:
        yield "{eval.chains}: only with {eval.form!s}=python"
    if PERPLEXITY in tasks and not config.data.eval_sequences:
        yield (
            f"{{train.eval_tasks}}: {PERPLEXITY} needs held-out sequences; add "
            "{data.eval_sequences!s}=4"
        )
    if PATTERNS[config.sparsity.pattern].synthetic:
        yield (
            f"{{train.eval_tasks}}: sparsity={config.sparsity.pattern} chooses keys without regard "
            "to the text, so the tasks would measure another text"
        )


def without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of ``eval`` that has no effect, and the reason."""
    tasks = config.train.eval_tasks
    for name in all_keys():
        if not name.startswith("eval."):
            continue
        if not tasks:
            yield name, "train.eval_tasks=[] names no task"
        elif NIAH not in tasks and name not in _COMMON:
            yield name, f"train.eval_tasks={show(tasks)} does not contain {NIAH}"
