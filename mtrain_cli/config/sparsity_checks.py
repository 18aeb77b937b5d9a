"""Check the keys under ``sparsity`` and ``mask``, and which layers they leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtrain_cli.config import keys
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.pattern_settings import pattern_keys as settings_keys
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import Config


def pattern_keys(leaves: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a line for each null key that the pattern needs, and each set key that it does not use.

    Args:
        leaves: value of every key, by dotted name.
    """
    pattern = leaves["sparsity.pattern"]
    own = {f"sparsity.{name}" for name in settings_keys(pattern)}
    given = {name: value for name, value in leaves.items() if name.startswith("sparsity.")}
    del given["sparsity.pattern"]
    absent = [name for name in given if name in own and given[name] is None]
    foreign = {
        name: value for name, value in given.items() if name not in own and value is not None
    }
    if len(absent) > 1:
        # The user set sparsity.pattern without its group. One line for this cause is enough.
        yield Problem(
            f"sparsity.pattern={pattern}: needs {', '.join(absent)}; "
            f"give sparsity={pattern}, which sets them, instead of sparsity.pattern",
            "sparsity.pattern",
            *absent,
        )
    elif "sparsity.block" in foreign and "sparsity.dense_steps" in foreign:
        yield Problem(
            f"sparsity.pattern={pattern}: other keys still belong to another pattern; "
            f"give sparsity={pattern} instead of sparsity.pattern",
            "sparsity.pattern",
        )
    else:
        for name in absent:
            yield Problem(
                f"{name}=null: sparsity.pattern={pattern} needs a value; "
                f"sparsity={pattern} gives a default",
                name,
                "sparsity.pattern",
            )
        for name, value in foreign.items():
            leaf = name.partition(".")[2]
            users = (f"sparsity={user}" for user in PATTERNS if leaf in settings_keys(user))
            yield Problem(
                f"{name}={keys.show(value)}: is not a key of sparsity.pattern={pattern}; "
                f"allowed with {', '.join(users)}",
                name,
                "sparsity.pattern",
            )


def problems(config: Config) -> Iterator[str]:
    """Yield the conflicts of the pattern and the mask, which depend on the sequence, too."""
    settings = config.sparsity
    # `pattern_keys` reports null keys.
    if None not in (getattr(settings, name) for name in settings.own_keys()):
        for line in settings.problems(config.seq):
            yield Problem(line, "sparsity.", "seq")
    for line in config.mask.problems(config.seq, settings.pattern):
        yield Problem(line, "mask.", "seq", "sparsity.pattern")
    yield from _mixed_layers(config)
    layers = config.model.num_layers
    if (settings.dense_layers or 0) >= layers >= 1:
        allowed = f"at most {layers - 1}" if layers > 1 else "0"
        yield (
            "{sparsity.dense_layers}: leaves no sparse layer of {model.num_layers}; give "
            f"{allowed}, or sparsity=dense"
        )


def _mixed_layers(config: Config) -> Iterator[str]:
    mask, layers = config.mask, config.model.num_layers
    if layers < 1 or not mask.is_mixed:
        return
    if (mask.full_first or 0) and all(map(mask.is_full, range(layers))):
        yield (
            "{mask.full_first}: leaves no layer of {model.num_layers} with the window; give fewer, "
            "or mask=causal"
        )
    if (mask.full_every or 0) > layers:
        yield (
            f"{{mask.full_every}}: exceeds {{model.num_layers}}, so no layer would be full; "
            f"allowed: 0 and 2 to {layers}"
        )
