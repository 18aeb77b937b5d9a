"""A decoder that transformers computes, with mtrain's attention: ``model.family=transformers``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mtrain_cli import install_command
from mtrain_cli.config.keys import first_few
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.plugins import ADAPTERS, installed, reason, what
from mtrain_cli.config.schema import TRANSFORMERS, Config, ConfigError
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.model import huggingface
from mtrain_cli.model.decoder import Attend, Decoder
from mtrain_cli.model.huggingface_config import format_value, read_json, read_mask
from mtrain_cli.model.routing import Routing
from mtrain_cli.model.tokenizer_files import TokenizerFiles
from mtrain_cli.model.transformers_models import NAME, PROBED, Probe, problems, register
from mtrain_cli.model.verify import read_with_transformers, require_transformers
from mtrain_cli.parallel.layer_groups import own_region

_KEY = f"model.family={TRANSFORMERS}"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")


def read_definition(folder: Path) -> Any:
    """Return transformers' configuration of a folder. Raise ConfigError if it has no such model."""
    version = f"transformers {require_transformers(_KEY)}"
    from transformers.models.auto import modeling_auto

    path = folder / "config.json"
    kind = read_json(path).get("model_type")
    if not isinstance(kind, str) or kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"{path}: model_type={format_value(kind)}: no decoder of {version}")
    definition = read_with_transformers(folder, "AutoConfig")
    if definition.get_text_config() is not definition:
        raise ConfigError(f"{path}: model_type={kind}: has more parts than a decoder of text")
    if getattr(definition, "quantization_config", None) is not None:
        raise ConfigError(f"{path}: quantization_config: quantized weights cannot be trained")
    return definition


def read_foreign(folder: Path) -> tuple[dict[str, Any], MaskSettings | None]:
    """Return the keys of ``model`` that attention, loss and messages need, and the mask."""
    definition = read_definition(folder)

    def first(*names: str, usual: Any = None) -> Any:
        return next((value for n in names if (value := getattr(definition, n, None))), usual)

    hidden, heads = first("hidden_size"), first("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        raise ConfigError(f"{folder}/config.json: layers have no common width and number of heads")
    model = {
        "name": folder.resolve().name,
        "family": TRANSFORMERS,
        "vocab_size": definition.vocab_size,
        "hidden_size": hidden,
        "num_layers": definition.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": first("num_key_value_heads", usual=heads),
        "head_dim": first("qk_head_dim", "head_dim", usual=hidden // heads),
        "tie_word_embeddings": bool(definition.tie_word_embeddings),
        "rope.original_max_position": first("max_position_embeddings", usual=2**20),
    }
    return {f"model.{n}": v for n, v in model.items()}, read_mask(folder, definition.to_dict())


def _whole(folder: Path, *, weights: bool = False, attention: str = NAME) -> Any:
    """Build the model of a folder in float32, with the folder's weights or random ones."""
    options = {"attn_implementation": attention, "dtype": torch.float32}
    definition, kind = read_definition(folder), "AutoModelForCausalLM"
    if weights:
        safe = {"use_safetensors": True, "output_loading_info": True}  # no pickled weights
        model, loaded = read_with_transformers(folder, kind, config=definition, **safe, **options)
        for problem, names in filter(itemgetter(1), loaded.items()):
            shown = first_few(sorted(map(str, names)))
            raise ConfigError(f"{folder}: {problem.replace('_', ' ')} of the model: {shown}")
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(definition, **options)
    head = getattr(model, "lm_head", None)
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(head, nn.Linear) or not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"{folder}: {type(model).__name__} has no model.layers or lm_head")
    return model


class TransformersDecoder(Decoder):
    """A decoder of transformers with the methods of `Decoder` that training calls.

    Make one on the meta device, allocate it by ``to_empty(device=...)``, then `load` it.
    """

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)
        register()
        self.model_config, self._config = config.model, config
        # A run keeps a copy of config.json, since the folder of its weights may go.
        kept, given = RunDir(Path(config.run.dir)).definition, Path(config.train.init_from or "")
        self._folder = kept if kept.is_dir() else given
        whole, kind = _whole(self._folder), config.train.activation_checkpoint
        if config.train.lora.rank:
            adapters().add(whole, config.train.lora)
        self.model = whole.model.train()
        if not config.model.tie_word_embeddings:
            self.lm_head = whole.lm_head
        # The names that `Decoder` reads, without a second entry in checkpoints.
        self.__dict__["layers"] = whole.model.layers
        self.__dict__["embed_tokens"] = whole.get_input_embeddings()
        if kind != "none":
            if not whole.supports_gradient_checkpointing:
                raise ConfigError(f"train.activation_checkpoint={kind}: {_KEY} needs none")
            old = self.model.gradient_checkpointing_enable  # its name in transformers 5.0
            enable = getattr(self.model, "activation_checkpointing_enable", old)
            enable({"use_reentrant": False})

    def hidden(
        self, tokens_BN: Tensor, positions_BN: Tensor, attend: Attend,
        routing: Routing | None = None,  # noqa: ARG002 - transformers routes by itself
    ) -> Tensor:  # fmt: skip
        def attention(
            q: Tensor, k: Tensor, v: Tensor, layer: int, *, sinks: Tensor | None, **_: Any
        ) -> Tensor:
            width = v.shape[-1]  # latent attention has narrower values
            v = nn.functional.pad(v, (0, q.shape[-1] - width))
            return attend(q, k, v, layer, *([] if sinks is None else [sinks]))[..., :width]

        inputs = {"input_ids": tokens_BN, "position_ids": positions_BN, "use_cache": False}
        batch = SimpleNamespace(attention=attention, shows_later_keys=False)
        hidden = self.model(**inputs, mtrain=batch)
        return cast(Tensor, hidden.last_hidden_state)

    @torch.no_grad()
    def load(self) -> None:
        """Fill parameters and buffers from the whole model on the CPU, which is checked first.

        Without weights in ``train.init_from``, and if a checkpoint will replace them, they are
        random. Raises ConfigError for a model or weights that would be wrong.
        """
        config, given = self._config, Path(self._config.train.init_from or "")
        resumes = RunDir(Path(config.run.dir)).last_step() is not None
        adapted = config.train.lora.rank > 0  # a checkpoint has the adapters only
        weights = (adapted or not resumes) and check_weights(given)
        if adapted and not weights:
            why = "has no weights for the adapters to adapt; put back those of the start"
            raise ConfigError(f"train.init_from={given}: {why}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            whole = _whole(given if weights else self._folder, weights=weights).eval()
            wrong = problems(whole, config, shows_later=False) or list(_problems(whole, config))
            if adapted and not wrong:
                adapters().add(whole, replace(config.train.lora, quantize="none"))
        if wrong:
            raise ConfigError(*(f"{_KEY}: {line}" for line in wrong))
        values = dict(whole.named_parameters()) | dict(whole.named_buffers())
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if not tensor.numel() and values[name].numel():
                layer = self.get_submodule(name.rpartition(".")[0])
                adapters().quantize(layer, config.train.lora, values[name], tensor.device)
            elif isinstance(tensor, DTensor):
                tensor.to_local().copy_(values[name][own_region(tensor)])
            else:  # buffers that no checkpoint holds, too
                tensor.copy_(values[name])


def adapters() -> Any:
    """Return the module of the entry point that makes adapters (`mtrain_extras.lora.adapter`)."""
    entry = installed(ADAPTERS)[0]
    try:
        return entry.load()
    except ImportError as error:
        why = f"{what(entry)} cannot be loaded ({reason(error)}); {install_command('lora')}"
        raise ConfigError(f"train.lora: {why}") from error


def check_weights(folder: Path) -> bool:
    """Return whether a folder has weights. Raise ConfigError for those that are not read."""
    if not (has := huggingface.has_weights(folder)):
        for file in (file for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern)):
            raise ConfigError(f"{file}: not read; give {huggingface.SINGLE}, or no weights at all")
    huggingface.verify_sums(folder)
    return has


def _problems(whole: Any, config: Config) -> Iterator[str]:
    """Yield what the trainer would compute otherwise than transformers."""
    model, mask, probe = config.model, config.mask, Probe()
    ids, positions = torch.arange(PROBED)[None] % model.vocab_size, torch.arange(PROBED)[None]
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False, "mtrain": probe}
    head = whole.get_input_embeddings() if model.tie_word_embeddings else whole.lm_head
    logits_BNV = nn.functional.linear(whole.model(**inputs).last_hidden_state, head.weight)
    if whole.lm_head.bias is not None or not torch.equal(whole(**inputs).logits, logits_BNV):
        yield "a bias, scale or cap of the logits is not supported"
    if cap := getattr(whole.config, "attn_logit_softcapping", None):
        yield f"attn_logit_softcapping={cap}: only `api.context_parallel` caps scores"
    expected = model.num_heads, model.num_kv_heads, model.head_dim
    for layer, (heads, window, _) in probe.calls.items():
        if heads != expected:
            yield f"layer {layer}: (heads, key heads, width) {heads}, in config.json {expected}"
        own = None if mask.is_full(layer) else mask.plain_window
        theirs, ours = (None if w is None or w >= config.seq else w for w in (window, own))
        if theirs != ours:
            yield f"mask.kind={mask.kind}: layer {layer} has the window {theirs}; leave mask out"
    has_sinks = any(sinks for *_, sinks in probe.calls.values())
    if has_sinks and (kind := config.train.activation_checkpoint) == "sequence_selective":
        yield f"train.activation_checkpoint={kind}: learnable sinks need selective, full or none"


def export_foreign(
    target: Path, definition: Path, config: Config, weights: Mapping[str, Tensor],
    dtype: torch.dtype, tokenizer: TokenizerFiles | None, *, adapter: bool = False,
) -> None:  # fmt: skip
    """Write a Hugging Face folder as transformers does, or the adapters as a PEFT folder.

    definition: a folder with config.json. config: that of the run, whose `train.init_from` still
        has the weights that trained adapters are merged into.
    """
    lora, given = config.train.lora, ""
    if lora.rank:
        given = config.train.init_from or ""
        if not adapter and not (Path(given).is_dir() and check_weights(Path(given))):
            gone = "the adapters' model is not there; put it back, or export them with --adapter"
            raise ConfigError(f"train.init_from={given}: {gone}")
    with huggingface.writing(target) as folder:
        if adapter:
            adapters().write(folder, lora, {n: t.to(dtype) for n, t in weights.items()}, given)
        else:
            whole = _whole(Path(given) if given else definition, weights=bool(given),
                           attention="eager")  # fmt: skip
            if given:
                adapters().merge(whole, lora, weights)
            else:
                _fill(whole, weights, definition)
            for parameter in whole.parameters():
                parameter.data = parameter.data.to(dtype)
            for key, value in ({} if tokenizer is None else tokenizer.ids).items():
                setattr(whole.config, key, value)
            whole.save_pretrained(folder)
        for file in folder.glob("*.safetensors"):  # only their owner may read them
            file.chmod(next(folder.glob("*config.json")).stat().st_mode)
        if tokenizer is not None:
            tokenizer.write(folder)


def _fill(whole: Any, weights: Mapping[str, Tensor], definition: Path) -> None:
    """Set all weights of a model, which must have these shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}
    if whole.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    stored = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    huggingface.check_tensors(stored, shapes, "checkpoint", definition / "config.json")
    whole.load_state_dict(weights, strict=False)
