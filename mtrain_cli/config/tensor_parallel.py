"""Settings that tensor parallelism allows, and the commands that do not support it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from operator import attrgetter
from typing import Any

from mtrain_cli.config.keys import show
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import Config, ConfigError, ModelConfig
from mtrain_cli.config.sizes import divisors

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
    sizes = [getattr(model, name) for name in _SIZES]
    if degree <= 1 or min(sizes) < 1:
        return
    if any(size % degree for size in sizes):
        yield (
            "{topology.tensor_parallel}: must divide {model.num_heads}, {model.num_kv_heads} and "
            f"{{model.intermediate_size}}; allowed: {divisors(common_divisor(model))}"
        )
    yield from unsupported(config, "topology.tensor_parallel", NEED_WHOLE_LAYERS)


def unsupported(config: Config, degree: str, turned_off: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that a kind of parallelism does not support.

    Args:
        degree: key of its degree.
        turned_off: the settings, with the value that turns each of them off.
    """
    for key, off in turned_off.items():
        if attrgetter(key)(config) != off:
            yield f"{{{degree}}}: does not support {{{key}}}; give {key}={show(off)}"


def require_degree_1(config: Config, degree: str, command: str) -> None:
    """Raise ConfigError if a degree of parallelism that a command does not support is above 1.

    Args:
        degree: name of its key in ``topology``.
        command: the command, such as ``mtrain simulate``.
    """
    if (value := getattr(config.topology, degree)) > 1:
        key = f"topology.{degree}"
        line = f"{key}={value}: not supported by `{command}`; leave this setting out"
        raise ConfigError(Problem(line, key, value=value))
