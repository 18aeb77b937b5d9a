"""Find settings on the command line that have no effect, and say why.

Only keys that the user typed are checked. Defaults and recipes also serve other runs, so keys in
defaults and recipes may well have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mtrain_cli.config import eval_tasks, keys
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, ULYSSES
from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.overrides import parse
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import Config

_RING_KEYS = ("topology.prefetch", "topology.circulates", "topology.columns")
_MEMORY_KEYS = ("topology.gpu_memory_gib", "topology.host_memory_gib")
_CHUNK = "topology.balanced_chunk"


def repeated_keys(words: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Return a line for each override that a later override of the same key or group replaces."""
    seen, lines = dict[str, str](), []
    groups = open_groups(config_dir)
    for word in words:
        parsed = parse([word], groups)
        for name in (*parsed.groups, *parsed.values):
            if name in seen:
                lines.append(f"{seen[name]}: has no effect, since {word} follows; give {name} once")
            seen[name] = word
    return lines


def unused_keys(
    words: Sequence[str],
    config: Config,
    config_dir: Path | None = None,
    *,
    exchange: str = "",
    device: str = "",
    layout: str = "",
) -> list[Problem]:
    """Return a line for each key in the overrides ``words`` that has no effect in ``config``.

    Args:
        exchange: the exchange that ``topology.exchange=auto`` has chosen; "" if unknown.
        device: the device that ``topology.device=auto`` has chosen; "" if unknown.
        layout: the layout that ``topology.layout=auto`` has chosen; "" if unknown. Keys that depend
            on an unknown choice are not reported.
    """
    given = parse(words, open_groups(config_dir)).values
    exchange = exchange or ("" if config.topology.exchange == "auto" else config.topology.exchange)
    device = device or ("" if config.topology.device == "auto" else config.topology.device)
    reasons: dict[str, str] = {}  # the first reason of each key
    for name, why in (*_ineffective_keys(config), *_ineffective_topology(config, exchange, device)):
        reasons.setdefault(name, f"has no effect, {why}")
    if layout not in ("", "balanced") and config.topology.chunk:
        chosen = f"topology.layout={layout} (chosen by auto) has no chunks"
        reasons[_CHUNK] = f"has no effect, {chosen}"
    if config.optim.warmup_steps > config.train.steps:
        why = (
            f"train.steps={config.train.steps} ends first; the learning rate never reaches optim.lr"
        )
        reasons["optim.warmup_steps"] = why
    return [
        Problem(f"{name}={keys.show(given[name])}: {why}", name)
        for name, why in reasons.items()
        if name in given
    ]


def unused_by_model(words: Sequence[str], configs: Sequence[Config]) -> list[str]:
    """Return a line for each key that has no effect when a trained model generates or is measured.

    Args:
        configs: configurations of a model under several patterns. A line counts if it holds for
            all.
    """
    found = [_unused_by_model(words, config) for config in configs]
    return [line for line in found[0] if all(line in others for others in found)]


def _unused_by_model(words: Sequence[str], config: Config) -> list[str]:
    # The memory of the host limits the prompts on a CPU.
    unused = unused_keys(words, config)
    lines: list[str] = [line for line in unused if line.key not in _MEMORY_KEYS]
    if config.topology.context_workers != 1:
        return lines
    given = parse(words, open_groups()).values
    return lines + [
        f"{name}={keys.show(given[name])}: has no effect, one worker computes each whole prompt; "
        "give topology.workers=2 or more"
        for name in ("topology.layout", "topology.exchange")
        if name in given
    ]


def unused_after_auto(
    words: Sequence[str], config: Config, exchange: str, layout: str
) -> list[str]:
    """Return the lines of `unused_keys` about keys that only rings or the balanced layout use.

    Call this function after ``auto`` has chosen ``exchange`` and ``layout``. Before these choices,
    `unused_keys` does not report these keys.
    """
    unused = unused_keys(words, config, exchange=exchange, layout=layout)
    by_exchange = _RING_KEYS if config.topology.exchange == "auto" else ()
    by_layout = (_CHUNK,) if config.topology.layout == "auto" else ()
    return [line for line in unused if line.key in (*by_exchange, *by_layout)]


def _ineffective_topology(config: Config, exchange: str, device: str) -> Iterator[tuple[str, str]]:
    """Yield each key of ``topology`` that has no effect, and the reason."""
    traits = EXCHANGE_TRAITS.get(exchange)
    if exchange and (traits is None or traits.gathers):
        chosen = " (chosen by auto)" if config.topology.exchange == "auto" else ""
        for name in _RING_KEYS:
            if name == "topology.circulates" and config.topology.circulates == "queries":
                continue  # `choose_exchange` refuses it
            yield name, f"topology.exchange={exchange}{chosen} is not a ring"
    topology = config.topology
    alone = topology.ulysses == topology.context_workers not in (1, "auto")
    if alone and topology.exchange != ULYSSES:
        why = f"topology.ulysses={topology.ulysses} leaves no workers to exchange keys with"
        yield "topology.exchange", why
    if config.sparsity.column_bound == 0:
        yield "topology.columns", f"sparsity.pattern={config.sparsity.pattern} chooses no columns"
    if config.topology.tensor_parallel == 1:
        yield "topology.tensor_chunks", "topology.tensor_parallel=1; a worker shares no layer"
    if config.model.moe.experts == 0:
        yield "topology.expert_chunks", "model.moe.experts=0; no layer has experts"
    if device == "cpu":
        for name in _MEMORY_KEYS:
            yield name, "workers on a CPU share the machine's memory"
    if config.layout != "striped":
        why = f"the layout is {config.layout}; only topology.layout=striped uses it"
        yield "topology.block_size", why


# {key: (deciding key, value)}: the key has an effect only if the deciding key has this value
_READERS = {
    "train.checkpoint_keep": ("train.activation_checkpoint", "sequence_selective"),
    "data.text_key": ("data.kind", "text"),
    "data.token_dtype": ("data.kind", "tokens"),
    "model.rope.beta_fast": ("model.rope.scaling", "yarn"),
    "model.rope.beta_slow": ("model.rope.scaling", "yarn"),
    "model.rope.low_freq_factor": ("model.rope.scaling", "llama3"),
    "model.rope.high_freq_factor": ("model.rope.scaling", "llama3"),
}
_PLAIN_TEXT = (".txt", ".md", ".py")
_INTERVALS = ("train.checkpoint_every", "train.eval_every", "profile.every")


def _ineffective_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key outside ``topology`` that has no effect, and the reason."""
    values = keys.values(config)
    for name, (reader, needed) in _READERS.items():
        # train.memory=auto may choose sequence_selective.
        is_open = name == "train.checkpoint_keep" and config.train.memory == "auto"
        if values[reader] != needed and not is_open:
            yield name, f"{reader}={values[reader]}; only {reader}={needed} uses it"
    path = config.data.path
    if config.data.kind == "text" and path and Path(path).suffix.lower() in _PLAIN_TEXT:
        yield "data.text_key", f"data.path={path} is plain text, which has no keys"
    if config.data.kind == "tokens":
        why = "the store keeps the begin tokens chosen by `mtrain data prepare --bos`"
        if not path or Path(path).suffix not in (".npy", ".bin"):
            yield "data.bos", why
    yield from eval_tasks.without_effect(config)
    for name in _INTERVALS:
        if values[name] > config.train.steps:
            yield name, f"train.steps={config.train.steps} ends first"
    if config.optim.schedule == "constant":
        for name in ("optim.min_lr_ratio", "optim.schedule_steps"):
            yield name, "optim.schedule=constant does not lower the learning rate"
    if config.model.rope.scaling == "none":
        yield "model.rope.factor", "model.rope.scaling=none scales nothing"
    if config.train.init_from is not None:
        yield "model.init_std", f"weights come from train.init_from={config.train.init_from}"
