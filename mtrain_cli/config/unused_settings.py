"""Find settings on the command line that have no effect on the run, each with what would read it.

Only what the user typed is checked: defaults and recipe lines also serve other runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mtrain_cli.config import keys
from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.overrides import parse
from mtrain_cli.config.schema import Config

RINGS = ("ring", "hierarchical_ring")
_RING_KEYS = ("topology.prefetch", "topology.circulates", "topology.columns")
_COLUMNS = ("vertical_slash", "fixed")  # patterns that choose columns


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
        exchange, device: what the topology's ``auto`` resolves to; "" if unknown, and keys that
            may then have an effect are not reported.
    """
    given = parse(words, open_groups(config_dir)).values
    exchange = exchange or ("" if config.topology.exchange == "auto" else config.topology.exchange)
    device = device or ("" if config.topology.device == "auto" else config.topology.device)
    lines: list[str] = []
    for name, why in (*_ineffective_keys(config), *_ineffective_topology(config, exchange, device)):
        line = f"{name}={keys.show(given.get(name))}: {why}"
        if (
            name in given
            and line not in lines
            and not any(line.startswith(f"{name}=") for line in lines)
        ):
            lines.append(line)
    return lines


def unused_ring_keys(words: Sequence[str], config: Config, exchange: str) -> list[str]:
    """Return `unused_keys` for the keys that depend on what ``topology.exchange=auto`` chose."""
    if config.topology.exchange != "auto":
        return []
    return [
        line
        for line in unused_keys(words, config, exchange=exchange)
        if line.startswith(_RING_KEYS)
    ]


def _ineffective_topology(config: Config, exchange: str, device: str) -> Iterator[tuple[str, str]]:
    if exchange and exchange not in RINGS:
        chosen = " (chosen by auto)" if config.topology.exchange == "auto" else ""
        for name in _RING_KEYS:
            yield name, f"has no effect, topology.exchange={exchange}{chosen} is not a ring"
    if config.sparsity.pattern not in _COLUMNS:
        yield (
            "topology.columns",
            f"has no effect, sparsity.pattern={config.sparsity.pattern} chooses no columns",
        )
    if device == "cpu":
        for name in ("topology.gpu_memory_gib", "topology.host_memory_gib"):
            yield name, "has no effect, workers on a CPU share the machine's memory"


def _ineffective_keys(config: Config) -> Iterator[tuple[str, str]]:
    train, data, optim, rope = config.train, config.data, config.optim, config.model.rope
    if train.activation_checkpoint != "sequence_selective" and train.memory == "manual":
        yield (
            "train.checkpoint_keep",
            f"has no effect, train.activation_checkpoint={train.activation_checkpoint}; "
            "only sequence_selective reads it",
        )
    if data.kind != "text":
        yield (
            "data.text_key",
            f"has no effect, data.kind={data.kind} reads no text from jsonl or parquet; "
            "data.kind=text does",
        )
    if data.kind != "tokens":
        yield (
            "data.token_dtype",
            f"has no effect, data.kind={data.kind} reads no .bin; data.kind=tokens does",
        )
    if optim.warmup_steps > train.steps:
        yield (
            "optim.warmup_steps",
            f"train.steps={train.steps} ends first; the learning rate never reaches optim.lr",
        )
    if optim.schedule == "constant":
        for name in ("optim.min_lr_ratio", "optim.schedule_steps"):
            yield name, "has no effect, optim.schedule=constant does not lower the learning rate"
    for name, every in (
        ("train.checkpoint_every", train.checkpoint_every),
        ("train.eval_every", train.eval_every),
        ("profile.every", config.profile.every),
    ):
        if every > train.steps:
            yield name, f"has no effect, train.steps={train.steps} ends first"
    if config.layout != "striped":
        yield (
            "topology.block_size",
            f"has no effect, the layout is {config.layout}; only topology.layout=striped uses it",
        )
    if rope.scaling == "none":
        yield "model.rope.factor", "has no effect, model.rope.scaling=none scales nothing"
    for kind, names in (
        ("yarn", ("beta_fast", "beta_slow")),
        ("llama3", ("low_freq_factor", "high_freq_factor")),
    ):
        if rope.scaling != kind:
            for name in names:
                yield (
                    f"model.rope.{name}",
                    f"has no effect, model.rope.scaling={rope.scaling}; only {kind} reads it",
                )
    if train.init_from is not None:
        yield (
            "model.init_std",
            f"has no effect, weights come from train.init_from={train.init_from}",
        )
