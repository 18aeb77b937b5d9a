"""Settings that need a model with experts, and settings that such a model does not support."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from operator import attrgetter

from mtrain_cli.config.expert_settings import DENSE_KEYS
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import divisors
from mtrain_cli.config.tensor_parallel import unsupported

BALANCE_LOSS = 0.001  # train.balance_loss=auto (DeepSeek-V2 and Qwen3 use 0.001 to 0.003)
# Settings that need all experts on each worker, and the value that turns each of them off.
NEED_ALL_EXPERTS = {"optim.offload": False, "optim.offload_gradients": False}
# Settings of the router, and the values with which a dense model has none.
_OF_ROUTERS = {
    "train.balance_loss": ("auto", 0),
    "train.router_z_loss": (0,),
    "train.balance_bias": (0,),
    "train.expert_capacity": (0,),
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
    hint = "leave this setting out, or choose experts, such as model=tiny_moe"
    has_no = "a model with {model.moe.experts} has no"
    others = [key for key, value in DENSE_KEYS.items() if attrgetter(key)(config) != value]
    if config.model.moe.top_k and config.model.moe.expert_size:  # a model with experts, but none
        given = ", ".join(f"{{{key}}}" for key in others)
        yield (
            f"{{model.moe.experts}}: contradicts {given}; give a number of experts, or choose a "
            "dense model, such as model=tiny"
        )
        others = []
    others += [key for key, off in _OF_ROUTERS.items() if attrgetter(key)(config) not in off]
    for key in others:
        yield f"{{{key}}}: {has_no} router; {hint}"
    if config.topology.expert_parallel not in ("auto", 1):
        yield f"{{topology.expert_parallel}}: {has_no} experts; {hint}"


def _expert_parallel(config: Config) -> Iterator[str]:
    degree, experts = config.topology.expert_parallel, config.model.moe.experts
    if degree == 1:
        return
    if isinstance(degree, int) and degree > 1 and experts > 0 and experts % degree:
        workers, stages = config.topology.workers, max(1, config.topology.pipeline_parallel)
        of_stage = workers // stages if isinstance(workers, int) else 0  # 0: unknown
        more = "" if of_stage else ", if it divides the workers"
        yield (
            "{topology.expert_parallel}: must divide {model.moe.experts}; allowed: auto, "
            f"{divisors(gcd(experts, of_stage))}{more}"
        )
    yield from unsupported(config, "topology.expert_parallel", NEED_ALL_EXPERTS)


def _model(config: Config) -> Iterator[str]:
    moe, layers = config.model.moe, config.model.num_layers
    yield from _expert_parallel(config)
    if not 1 <= moe.top_k <= moe.experts:
        yield "{model.moe.top_k}: must be between 1 and {model.moe.experts}"
    if moe.expert_size < 1:
        yield "{model.moe.expert_size}: must be at least 1; give an expert's width"
    if moe.dense_layers >= layers >= 1:
        yield (
            "{model.moe.dense_layers}: leaves no layer of {model.num_layers} with experts; "
            f"allowed: 0 to {layers - 1}, or model.moe.experts=0"
        )
    if config.train.keep_mlp:
        yield "{train.keep_mlp}: does not support experts; give train.keep_mlp=false"
