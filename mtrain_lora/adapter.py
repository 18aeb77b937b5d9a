"""LoRA (arXiv:2106.09685) on a model of transformers, with peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import peft
from safetensors.torch import save_file
from torch import Tensor, nn

from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import ConfigError, LoraConfig

_NAME = "default"  # peft's name of an adapter
_PREFIX = "base_model.model."  # begins the names of tensors in a PEFT folder


def add(model: nn.Module, settings: LoraConfig) -> None:
    """Put adapters into the linear layers of a model and freeze its other weights.

    Raises ConfigError if no layer has a name of ``train.lora.targets``.
    """
    _inject(model, settings)


def merge(model: nn.Module, settings: LoraConfig, weights: Mapping[str, Tensor]) -> None:
    """Add the products of trained adapters to the weights of a whole model.

    weights: the adapters' tensors, by their names in ``model`` with adapters.
    """
    tuner = _inject(model, settings)
    _, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    tuner.merge_and_unload(safe_merge=True)


def write(folder: Path, settings: LoraConfig, weights: Mapping[str, Tensor], base: str) -> None:
    """Write the adapters as a PEFT folder. base: name or folder of the model that they adapt."""
    config = _config(settings)
    config.base_model_name_or_path, config.inference_mode = base, True
    config.task_type = peft.TaskType.CAUSAL_LM
    named = {
        _PREFIX + name.replace(f".{_NAME}.", "."): tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    content = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in config.to_dict().items()
    }
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _config(settings: LoraConfig) -> peft.LoraConfig:
    targets = settings.targets
    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear" if isinstance(targets, str) else list(targets),
    )


def _inject(model: nn.Module, settings: LoraConfig) -> peft.LoraModel:
    try:
        return peft.LoraModel(model, _config(settings), _NAME)
    except ValueError as error:
        linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        given = f"train.lora.targets={show(settings.targets)}"
        raise ConfigError(f"{given}: no such linear layers. The model has {names}") from error
