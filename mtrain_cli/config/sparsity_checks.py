"""Check the keys under ``sparsity`` and ``mask``, and which layers they leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtrain_cli.config import keys
from mtrain_cli.config.mask_settings import mask_problems
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import Config
from mtrain_cli.config.variants import Variant


def variant_keys(leaves: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a line for each null key that the pattern or mask needs, and each set key of others.

    Args:
        leaves: value of every key, by dotted name.
    """
    for section, variants in keys.VARIANTS.items():
        yield from _keys_of_kind(leaves, section, variants)


def _keys_of_kind(
    leaves: Mapping[str, Any], section: str, variants: keys.Variants
) -> Iterator[Problem]:
    selector = f"{section}.{variants.selector}"
    chosen = leaves[selector]
    own = [f"{section}.{key}" for key in variants.own_keys(chosen)]
    names = (name for name in keys.all_keys() if name.startswith(f"{section}."))
    given = {name: leaves[name] for name in names if name != selector}
    absent = [name for name in own if given[name] is None]
    foreign = {
        name: value for name, value in given.items() if name not in own and value is not None
    }
    if len(absent) > 1:
        # The user set the selector without its group. One line for this cause is enough.
        yield Problem(
            f"{selector}={chosen}: needs {', '.join(absent)}; give {section}={chosen}, which sets "
            f"them, instead of {selector}",
            selector,
            *absent,
        )
    elif "sparsity.block" in foreign and "sparsity.dense_steps" in foreign:
        yield Problem(
            f"{selector}={chosen}: other keys still belong to another pattern; "
            f"give {section}={chosen} instead of {selector}",
            selector,
        )
    else:
        for name in absent:
            yield Problem(
                f"{name}=null: {selector}={chosen} needs a value; "
                f"{section}={chosen} gives a default",
                name,
                selector,
            )
        for name, value in foreign.items():
            key = name.removeprefix(f"{section}.")
            kinds = (kind for kind in variants.kinds if key in variants.own_keys(kind))
            yield Problem(
                f"{name}={keys.show(value)}: is not a key of {selector}={chosen}; "
                f"allowed with {', '.join(f'{section}={kind}' for kind in kinds)}",
                name,
                selector,
            )


def _is_complete(settings: Variant) -> bool:
    """Return whether all keys of a kind have a value. `variant_keys` reports null keys."""
    return None not in (getattr(settings, name) for name in settings.own_keys())


def problems(config: Config) -> Iterator[str]:
    """Yield the conflicts of the pattern and the mask, which depend on the sequence, too."""
    settings, mask = config.sparsity, config.mask
    if _is_complete(settings):
        for line in settings.problems(config.seq):
            yield Problem(line, "sparsity.", "seq")
    if _is_complete(mask):
        for line in mask_problems(mask, config.seq, settings.pattern):
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
    if layers < 1 or not mask.is_mixed or not _is_complete(mask):
        return
    if mask.full_first and all(map(mask.is_full, range(layers))):
        yield (
            "{mask.full_first}: leaves no layer of {model.num_layers} with the window; give fewer, "
            "or mask=causal"
        )
    if mask.full_every > layers:
        yield (
            f"{{mask.full_every}}: exceeds {{model.num_layers}}, so no layer would be full; "
            f"allowed: 0 and 2 to {layers}"
        )
