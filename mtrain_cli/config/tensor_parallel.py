"""Settings that tensor parallelism allows, and the commands that do not support it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import Config, ConfigError, ModelConfig

_SIZES = ("num_heads", "num_kv_heads", "intermediate_size")
# Settings that need whole layers on each worker, and the value that turns each of them off.
NEED_WHOLE_LAYERS = {
    "optim.offload": False,
    "optim.offload_gradients": False,
}


def common_divisor(model: ModelConfig) -> int:
    """Return the largest degree that the sizes of a model allow. It is a multiple of all others."""
    return gcd(*(getattr(model, name) for name in _SIZES))


def problems(config: Config) -> Iterator[str]:
    """Yield a line for each setting that contradicts ``topology.tensor_parallel``."""
    degree, model = config.topology.tensor_parallel, config.model
    sizes = {f"model.{name}": getattr(model, name) for name in _SIZES}
    if degree <= 1 or min(sizes.values()) < 1:
        return
    given = f"topology.tensor_parallel={degree}"
    if any(size % degree for size in sizes.values()):
        *first, last = (f"{name}={size}" for name, size in sizes.items())
        common = common_divisor(model)
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        yield f"{given}: must divide {', '.join(first)} and {last}; allowed: {allowed}"
    yield from unsupported(config, given, NEED_WHOLE_LAYERS)


def unsupported(config: Config, given: str, turned_off: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that a kind of parallelism does not support.

    Args:
        given: key and value of its degree.
        turned_off: the settings, with the value that turns each of them off.
    """
    for key, off in turned_off.items():
        group, _, name = key.partition(".")
        value = getattr(getattr(config, group), name)
        if value != off:
            yield f"{given}: does not support {key}={show(value)}; give {key}={show(off)}"


def require_whole_layers(config: Config, command: str) -> None:
    """Raise ConfigError if a command without tensor parallelism is to use it.

    Args:
        command: the command, such as ``mtrain simulate``.
    """
    refuse(config, "tensor_parallel", command)


def refuse(config: Config, degree: str, command: str) -> None:
    """Raise ConfigError if a degree of parallelism that a command does not support is above 1.

    Args:
        degree: name of its key in ``topology``.
        command: the command, such as ``mtrain simulate``.
    """
    if (value := getattr(config.topology, degree)) > 1:
        raise ConfigError(
            f"topology.{degree}={value}: not supported by `{command}`; leave this setting out"
        )
