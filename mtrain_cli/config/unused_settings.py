"""Find settings on the command line that have no effect, and say what would read them.

Only what the user typed is checked: defaults and recipe lines also serve other runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mtrain_cli.config import keys
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.overrides import parse
from mtrain_cli.config.schema import Config

_RINGS = [name for name, traits in EXCHANGE_TRAITS.items() if not traits.gathers]
_RING_KEYS = ("topology.prefetch", "topology.circulates", "topology.columns")


def repeated_keys(words: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Return a line for each key or group that is given more than once; the last one wins."""
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
) -> list[str]:
    """Return a line for each key of ``words`` that ``config`` does not use.

    Args:
        exchange, device: what ``auto`` resolves to in ``topology``. If it is "" (unknown), keys
            that may have an effect are not reported.
    """
    given = parse(words, open_groups(config_dir)).values
    exchange = exchange or ("" if config.topology.exchange == "auto" else config.topology.exchange)
    device = device or ("" if config.topology.device == "auto" else config.topology.device)
    reasons: dict[str, str] = {}  # the first reason of each key
    for name, why in (*_ineffective_keys(config), *_ineffective_topology(config, exchange, device)):
        if name in given:
            reasons.setdefault(name, why)
    return [f"{name}={keys.show(given[name])}: {why}" for name, why in reasons.items()]


def unused_ring_keys(words: Sequence[str], config: Config, exchange: str) -> list[str]:
    """Return `unused_keys` for the keys that depend on what ``topology.exchange=auto`` chose."""
    if config.topology.exchange != "auto":
        return []
    unused = unused_keys(words, config, exchange=exchange)
    return [line for line in unused if line.startswith(_RING_KEYS)]


def _ineffective_topology(config: Config, exchange: str, device: str) -> Iterator[tuple[str, str]]:
    if exchange and exchange not in _RINGS:
        chosen = " (chosen by auto)" if config.topology.exchange == "auto" else ""
        for name in _RING_KEYS:
            if name == "topology.circulates" and config.topology.circulates == "queries":
                continue  # `choose_exchange` refuses it
            yield name, f"has no effect, topology.exchange={exchange}{chosen} is not a ring"
    if config.sparsity.column_bound == 0:
        pattern = f"sparsity.pattern={config.sparsity.pattern}"
        yield "topology.columns", f"has no effect, {pattern} chooses no columns"
    if device == "cpu":
        for name in ("topology.gpu_memory_gib", "topology.host_memory_gib"):
            yield name, "has no effect, workers on a CPU share the machine's memory"


def _ineffective_keys(config: Config) -> Iterator[tuple[str, str]]:
    train, kind, optim = config.train, config.data.kind, config.optim
    scaling, checkpoint = config.model.rope.scaling, train.activation_checkpoint
    if checkpoint != "sequence_selective" and train.memory == "manual":
        why = f"train.activation_checkpoint={checkpoint}; only sequence_selective reads it"
        yield "train.checkpoint_keep", f"has no effect, {why}"
    if kind != "text":
        why = f"data.kind={kind} reads no text from jsonl or parquet; data.kind=text does"
        yield "data.text_key", f"has no effect, {why}"
    if kind != "tokens":
        why = f"data.kind={kind} reads no .bin; data.kind=tokens does"
        yield "data.token_dtype", f"has no effect, {why}"
    ends_first = f"train.steps={train.steps} ends first"
    if optim.warmup_steps > train.steps:
        yield "optim.warmup_steps", f"{ends_first}; the learning rate never reaches optim.lr"
    if optim.schedule == "constant":
        for name in ("optim.min_lr_ratio", "optim.schedule_steps"):
            yield name, "has no effect, optim.schedule=constant does not lower the learning rate"
    for name, every in (
        ("train.checkpoint_every", train.checkpoint_every),
        ("train.eval_every", train.eval_every),
        ("profile.every", config.profile.every),
    ):
        if every > train.steps:
            yield name, f"has no effect, {ends_first}"
    if config.layout != "striped":
        why = f"the layout is {config.layout}; only topology.layout=striped uses it"
        yield "topology.block_size", f"has no effect, {why}"
    if scaling == "none":
        yield "model.rope.factor", "has no effect, model.rope.scaling=none scales nothing"
    for reader, names in (
        ("yarn", ("beta_fast", "beta_slow")),
        ("llama3", ("low_freq_factor", "high_freq_factor")),
    ):
        for name in names if scaling != reader else ():
            why = f"model.rope.scaling={scaling}; only {reader} reads it"
            yield f"model.rope.{name}", f"has no effect, {why}"
    if train.init_from is not None:
        why = f"weights come from train.init_from={train.init_from}"
        yield "model.init_std", f"has no effect, {why}"
