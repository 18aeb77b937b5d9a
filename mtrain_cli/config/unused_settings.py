"""Find settings on the command line that have no effect, and say why.

Only keys that the user typed are checked. Defaults and recipes also serve other runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mtrain_cli.config import keys
from mtrain_cli.config.data_kinds import KINDS
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, HEAD_SHARING
from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.overrides import parse
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import Config

# {key: (deciding key, value)}: the key has an effect only if the deciding key has this value
_READERS = {
    "model.rope.beta_fast": ("model.rope.scaling", "yarn"),
    "model.rope.beta_slow": ("model.rope.scaling", "yarn"),
    "model.rope.low_freq_factor": ("model.rope.scaling", "llama3"),
    "model.rope.high_freq_factor": ("model.rope.scaling", "llama3"),
}
# {key: (deciding key, value)}: the key has no effect if the deciding key has this value
_IDLE = {
    "model.rope.factor": ("model.rope.scaling", "none"),
    "optim.min_lr_ratio": ("optim.schedule", "constant"),
    "optim.schedule_steps": ("optim.schedule", "constant"),
    "train.rollback.sigma": ("train.rollback.limit", 0),
    "topology.tensor_chunks": ("topology.tensor_parallel", 1),
    "topology.expert_chunks": ("model.moe.experts", 0),
}
_INTERVALS = ("train.checkpoint_every", "train.eval_every", "profile.every", "optim.warmup_steps")


def unused_keys(
    words: Sequence[str],
    config: Config,
    config_dir: Path | None = None,
    *,
    exchange: str = "",
    device: str = "",
) -> list[Problem]:
    """Return a line for each key in the overrides ``words`` that has no effect in ``config``.

    exchange, device: what ``auto`` has chosen; "" if unknown, which leaves out keys that depend on
    it.
    """
    given = parse(words, open_groups(config_dir)).values
    exchange = exchange or ("" if config.topology.exchange == "auto" else config.topology.exchange)
    device = device or ("" if config.topology.device == "auto" else config.topology.device)
    reasons: dict[str, str] = {}  # the first reason of each key
    for name, why in _ineffective_keys(config, exchange, device):
        reasons.setdefault(name, why)
    return [
        Problem(f"{name}={keys.show(given[name])}: has no effect, {why}", name)
        for name, why in reasons.items()
        if name in given
    ]


def _ineffective_keys(config: Config, exchange: str, device: str) -> Iterator[tuple[str, str]]:
    """Yield each key that has no effect, and the reason."""
    values = keys.values(config)
    for name, (reader, needed) in _READERS.items():
        if values[reader] != needed:
            yield name, f"{reader}={values[reader]}; only {reader}={needed} uses it"
    own = {key for kind in KINDS.values() for key in kind.keys} - {*KINDS[config.data.kind].keys}
    for key in own:
        users = " or ".join(name for name, kind in KINDS.items() if key in kind.keys)
        yield f"data.{key}", f"data.kind={config.data.kind}; only data.kind={users} uses it"
    for name, (reader, value) in _IDLE.items():
        if values[reader] == value:
            yield name, f"{reader}={value} does not use it"
    if config.train.activation_checkpoint != "sequence_selective" and config.train.memory != "auto":
        yield "train.checkpoint_keep", "only train.activation_checkpoint=sequence_selective uses it"
    for name in _INTERVALS:
        if values[name] > config.train.steps:
            yield name, f"train.steps={config.train.steps} ends first"
    for name in ("eval.length", "eval.samples") if not config.train.eval_tasks else ():
        yield name, "train.eval_tasks=[] names no task"
    if config.train.init_from is not None:
        yield "model.init_std", f"weights come from train.init_from={config.train.init_from}"
    traits = EXCHANGE_TRAITS.get(exchange)
    if exchange and (traits is None or traits.gathers):
        for name in ("topology.prefetch", "topology.columns", "topology.circulates"):
            # `choose_exchange` refuses queries.
            if name != "topology.circulates" or config.topology.circulates != "queries":
                yield name, f"topology.exchange={exchange} is not a ring"
    if exchange in HEAD_SHARING:
        yield "topology.gradient_dtype", f"topology.exchange={exchange} sends gradients as computed"
    if config.sparsity.column_bound == 0:
        yield "topology.columns", f"sparsity.pattern={config.sparsity.pattern} chooses no columns"
    if device == "cpu":
        for name in ("topology.gpu_memory_gib", "topology.host_memory_gib"):
            yield name, "workers on a CPU share the machine's memory"
    if config.layout != "striped":
        yield "topology.block_size", f"the layout is {config.layout}; only striped uses it"
