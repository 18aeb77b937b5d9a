"""Context parallelism in axolotl, as a plug-in of its own. See docs/library.md."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch.distributed.device_mesh import init_device_mesh

from mtrain_cli import api
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.sizes import divisors
from mtrain_cli.integrations.trainer import ContextParallelMixin

_ARGUMENTS = ("layout", "exchange", "sparsity", "mask", "kernel")


class MtrainArgs(BaseModel):
    """What the plug-in adds to axolotl's settings.

    mtrain: ``size``, the processes of a context group (all if it is left out), ``settings``, a list
        of overrides, and arguments of `api.context_parallel`.
    """

    mtrain: dict[str, Any] | None = None


class MtrainPlugin(BasePlugin):  # type: ignore[misc]
    """Give axolotl's models mtrain's attention, and its trainer context groups."""

    def get_input_args(self) -> str:
        return f"{__name__}.{MtrainArgs.__name__}"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Raise ConfigError for a wrong key below ``mtrain`` or a size that does not divide."""
        given = dict(cfg.mtrain or {})
        size, settings = given.pop("size", None), given.pop("settings", ())
        for name in sorted(set(given) - {*_ARGUMENTS}):
            allowed = ", ".join(("size", "settings", *_ARGUMENTS))
            raise ConfigError(f"mtrain.{name}: unknown key; allowed: {allowed}")
        self._cp = api.context_parallel(
            _group(size), *settings, seq=cfg.sequence_len, **{k: str(v) for k, v in given.items()}
        )
        self._cp.register()
        # axolotl's own key allows no names but those that it knows.
        model.set_attn_implementation("mtrain")

    def get_trainer_cls(self, cfg: Any) -> type:  # noqa: ARG002
        from axolotl.core.trainers.base import AxolotlTrainer

        cp = self._cp

        class Counting(AxolotlTrainer):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                # axolotl asks the layers below the head, which take no number of labels.
                self.model_accepts_loss_kwargs = True

        class ContextParallelTrainer(ContextParallelMixin, Counting):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, cp=cp, **kwargs)

        return ContextParallelTrainer


def _group(size: int | None) -> Any:
    """Return a dimension of a mesh of groups of ``size`` processes; None for all processes."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if size is None or size == world:
        return None
    if not isinstance(size, int) or size < 1 or world % size:
        raise ConfigError(f"mtrain.size={size}: must divide {world} processes: {divisors(world)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (world // size, size), mesh_dim_names=("dp", "cp"))["cp"]
