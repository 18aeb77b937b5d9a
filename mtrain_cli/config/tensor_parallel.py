"""Settings that tensor parallelism allows, and the commands that do not support it."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import Config, ConfigError

_SIZES = ("num_heads", "num_kv_heads", "intermediate_size")
# Settings that need whole layers on each worker, and the value that turns each of them off.
NEED_WHOLE_LAYERS = {
    "train.offload_activations": False,
    "optim.offload": False,
    "optim.offload_gradients": False,
    "profile.every": 0,
}


def problems(config: Config) -> Iterator[str]:
    """Yield a line for each setting that contradicts ``topology.tensor_parallel``."""
    degree, model = config.topology.tensor_parallel, config.model
    sizes = {f"model.{name}": getattr(model, name) for name in _SIZES}
    if degree <= 1 or min(sizes.values()) < 1:
        return
    given = f"topology.tensor_parallel={degree}"
    if any(size % degree for size in sizes.values()):
        *first, last = (f"{name}={size}" for name, size in sizes.items())
        common = gcd(*sizes.values())
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        yield f"{given}: must divide {', '.join(first)} and {last}; allowed: {allowed}"
    for key, off in NEED_WHOLE_LAYERS.items():
        group, _, name = key.partition(".")
        value = getattr(getattr(config, group), name)
        if value != off:
            yield f"{given}: does not support {key}={show(value)}; give {key}={show(off)}"


def require_whole_layers(config: Config, command: str) -> None:
    """Raise ConfigError if a command without tensor parallelism is to use it.

    Args:
        command: the command, such as ``mtrain simulate``.
    """
    degree = config.topology.tensor_parallel
    if degree > 1:
        raise ConfigError(
            f"topology.tensor_parallel={degree}: only `mtrain train` supports it, not `{command}`; "
            "leave this setting out"
        )
