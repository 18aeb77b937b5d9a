"""Settings of the command line that change nothing in the run at hand: each is named in one line, with what would read it.

Only what was typed is looked at. A default, or a line of a recipe, is there for other runs too.
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
_COLUMNS = ("vertical_slash", "fixed")  # patterns that choose single columns


def repeated(words: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """A line for each key and group that is given more than once; the last one counts."""
    found, lines = dict[str, str](), []
    groups = open_groups(config_dir)
    for word in words:
        one = parse([word], groups)
        for name in (*one.groups, *one.values):
            if name in found:
                lines.append(
                    f"{found[name]}: has no effect, since {word} comes later; give {name} once"
                )
            found[name] = word
    return lines


def idle(
    words: Sequence[str],
    config: Config,
    config_dir: Path | None = None,
    *,
    exchange: str = "",
    device: str = "",
) -> list[str]:
    """A line for each key of ``words`` that ``config`` does not use.

    exchange, device: what an ``auto`` of the topology stands for, where that is known; without it a key that may be of use is passed over.
    """
    given = parse(words, open_groups(config_dir)).values
    exchange = exchange or ("" if config.topology.exchange == "auto" else config.topology.exchange)
    device = device or ("" if config.topology.device == "auto" else config.topology.device)
    lines: list[str] = []
    for name, why in (*_keys(config), *_of_choices(config, exchange, device)):
        line = f"{name}={keys.show(given.get(name))}: {why}"
        if (
            name in given
            and line not in lines
            and not any(line.startswith(f"{name}=") for line in lines)
        ):
            lines.append(line)
    return lines


def idle_ring_keys(words: Sequence[str], config: Config, exchange: str) -> list[str]:
    """`idle`, of the keys about which ``topology.exchange=auto`` decides when the run begins."""
    if config.topology.exchange != "auto":
        return []
    return [line for line in idle(words, config, exchange=exchange) if line.startswith(_RING_KEYS)]


def _of_choices(config: Config, exchange: str, device: str) -> Iterator[tuple[str, str]]:
    if exchange and exchange not in RINGS:
        chosen = " (chosen by auto)" if config.topology.exchange == "auto" else ""
        for name in _RING_KEYS:
            yield name, f"has no effect, topology.exchange={exchange}{chosen} is no ring"
    if config.sparsity.pattern not in _COLUMNS:
        yield (
            "topology.columns",
            f"has no effect, sparsity.pattern={config.sparsity.pattern} chooses no single columns",
        )
    if device == "cpu":
        for name in ("topology.gpu_memory_gib", "topology.host_memory_gib"):
            yield name, "has no effect, workers on a CPU share the memory of the machine"


def _keys(config: Config) -> Iterator[tuple[str, str]]:
    train, data, optim, rope = config.train, config.data, config.optim, config.model.rope
    if train.activation_checkpoint != "sequence_selective" and train.memory == "manual":
        yield (
            "train.checkpoint_keep",
            f"has no effect, train.activation_checkpoint={train.activation_checkpoint}; only sequence_selective reads it",
        )
    if data.kind != "text":
        yield (
            "data.text_key",
            f"has no effect, data.kind={data.kind} reads no text from jsonl or parquet; data.kind=text does",
        )
    if data.kind != "tokens":
        yield (
            "data.token_dtype",
            f"has no effect, data.kind={data.kind} reads no .bin; data.kind=tokens does",
        )
    if optim.warmup_steps > train.steps:
        yield (
            "optim.warmup_steps",
            f"train.steps={train.steps} ends before; the learning rate never reaches optim.lr",
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
            yield name, f"has no effect, train.steps={train.steps} ends before"
    if config.layout != "striped":
        yield (
            "topology.block_size",
            f"has no effect, the layout is {config.layout}; blocks are those of topology.layout=striped",
        )
    if rope.scaling == "none":
        yield "model.rope.factor", "has no effect, model.rope.scaling=none stretches nothing"
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
