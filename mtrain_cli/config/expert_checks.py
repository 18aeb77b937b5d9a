"""Settings that need a model with experts, and settings that such a model does not support."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain_cli.config.expert_settings import DENSE_KEYS
from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import Config
from mtrain_cli.config.tensor_parallel import unsupported

BALANCE_LOSS = 0.001  # train.balance_loss=auto (DeepSeek-V2 and Qwen3 use 0.001 to 0.003)
# Settings that need all experts on each worker, and the value that turns each of them off.
NEED_ALL_EXPERTS = {"optim.offload": False, "optim.offload_gradients": False}
# Settings of the router, and the values with which a dense model has none.
_OF_ROUTERS = {
    "balance_loss": ("auto", 0),
    "router_z_loss": (0,),
    "balance_bias": (0,),
    "expert_capacity": (0,),
}


def problems(config: Config) -> Iterator[str]:
    """Yield a line for each setting that contradicts ``model.moe``."""
    yield from _model(config) if config.model.moe.experts else _dense(config)


def balance_loss(config: Config) -> float:
    """Return the coefficient of the balance loss; 0 for a dense model."""
    given = config.train.balance_loss
    if config.model.moe.experts == 0:
        return 0.0
    return BALANCE_LOSS if isinstance(given, str) else float(given)


def _dense(config: Config) -> Iterator[str]:
    hint = "has no router; leave this setting out, or choose experts, such as model=tiny_moe"
    values = {key: getattr(config.model.moe, key.rpartition(".")[2]) for key in DENSE_KEYS}
    others = {key: value for key, value in values.items() if value != DENSE_KEYS[key]}
    if config.model.moe.top_k and config.model.moe.expert_size:  # a model with experts, but none
        given = ", ".join(f"{key}={show(value)}" for key, value in others.items())
        yield (
            f"model.moe.experts=0: contradicts {given}; give a number of experts, or choose a "
            "dense model, such as model=tiny"
        )
    else:
        for key, value in others.items():
            yield f"{key}={show(value)}: a model with model.moe.experts=0 {hint}"
    for name, off in _OF_ROUTERS.items():
        value = getattr(config.train, name)
        if value not in off:
            yield f"train.{name}={show(value)}: a model with model.moe.experts=0 {hint}"
    degree = config.topology.expert_parallel
    if degree not in ("auto", 1):
        yield (
            f"topology.expert_parallel={show(degree)}: a model with model.moe.experts=0 has no "
            "experts; leave this setting out, or choose experts, such as model=tiny_moe"
        )


def _expert_parallel(config: Config) -> Iterator[str]:
    degree, experts = config.topology.expert_parallel, config.model.moe.experts
    if degree == 1:
        return
    given = f"topology.expert_parallel={show(degree)}"
    if isinstance(degree, int) and degree > 1 and experts > 0 and experts % degree:
        workers, stages = config.topology.workers, max(1, config.topology.pipeline_parallel)
        of_stage = workers // stages if isinstance(workers, int) else 0  # 0: unknown
        fitting = [n for n in range(1, experts + 1) if experts % n == 0 and of_stage % n == 0]
        allowed = ", ".join(map(str, fitting))
        more = "" if of_stage else ", if it divides the workers"
        yield f"{given}: must divide model.moe.experts={experts}; allowed: auto, {allowed}{more}"
    yield from unsupported(config, given, NEED_ALL_EXPERTS)


def _model(config: Config) -> Iterator[str]:
    model, moe = config.model, config.model.moe
    yield from _expert_parallel(config)
    if not 1 <= moe.top_k <= moe.experts:
        yield (
            f"model.moe.top_k={moe.top_k}: must be between 1 and model.moe.experts={moe.experts}"
        )
    if moe.expert_size < 1:
        yield f"model.moe.expert_size={moe.expert_size}: must be at least 1; give an expert's width"
    if moe.dense_layers >= model.num_layers >= 1:
        yield (
            f"model.moe.dense_layers={moe.dense_layers}: leaves no layer of "
            f"model.num_layers={model.num_layers} with experts; allowed: 0 to "
            f"{model.num_layers - 1}, or model.moe.experts=0"
        )
    if config.train.keep_mlp:
        yield (
            f"train.keep_mlp={show(config.train.keep_mlp)}: does not support experts; give "
            "train.keep_mlp=false"
        )
