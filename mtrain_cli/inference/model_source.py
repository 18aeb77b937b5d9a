"""Find the model that a path names, without torch, and load it: whole, or a part of each layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.composition import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.parallel_checks import require_degree_1
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.problem import ConfigError, Names, setting
from mtrain_cli.config.schema import Config
from mtrain_cli.config.suggest import adapter_hint, no_such
from mtrain_cli.launch.job import current_job
from mtrain_cli.launch.run_dir import RESOLVED, NotARunError, find_source, run_of
from mtrain_cli.model import huggingface_config

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from mtrain_cli.model.decoder import Decoder
    from mtrain_cli.parallel.layer_groups import TensorGroup

# The settings that do not belong to the model.
_SETTABLE = ("sparsity", "topology", "train.kernel", "train.dtype", "train.compile")
_OF_TRAINING = tuple(
    f"topology.{key}"
    for key in ("context_parallel", "expert_parallel", "expert_chunks", "pipeline_parallel",
                "schedule", "virtual_stages", "stage_layers")
)  # fmt: skip
_GIVEN_BY_MODEL = Names(lacks=("seq",))


@dataclass(frozen=True)
class ModelSource:
    """A model on disk, and how to run it.

    config: model, mask, pattern, topology, kernel and dtype. ``seq`` is the sequence length of
        training, from which an automatic rotary factor follows.
    """

    path: Path  # a Hugging Face folder, a run, its checkpoints folder, or a checkpoint
    is_folder: bool  # whether ``path`` is a Hugging Face folder
    config: Config

    @property
    def rope_factor(self) -> float:
        """The factor by which the model stretches positions. A prompt does not change it."""
        from mtrain_cli.model.rope import rope_factor

        return rope_factor(self.config.model.rope, self.config.seq)

    @property
    def max_position(self) -> int:
        """The number of positions for which the model was trained or stretched."""
        if self.is_folder:
            return self.config.seq
        return huggingface_config.max_position(
            self.config.model.rope, self.rope_factor, self.config.seq
        )


def open_source(path: Path, overrides: Sequence[str] = ()) -> ModelSource:
    """Find a model and read its configuration, but no weights.

    By default a run keeps its pattern, a Hugging Face folder is dense, and one worker computes.
    ConfigError if the path names no model, an override is not one of ``sparsity``, ``topology``,
    train.kernel, train.dtype or train.compile, or the pattern ignores its input.
    """
    for word in overrides:
        key, _, value = word.partition("=")
        if key in _OF_TRAINING and word != "topology.pipeline_parallel=1":
            raise ConfigError(
                f"{word}: in `mtrain generate` and `mtrain eval`, all workers share each prompt, "
                "and each holds all layers and experts; leave this setting out"
            )
        if key in ("sparsity", "sparsity.pattern") and value not in PATTERNS:
            raise ConfigError(f"{word}: {no_such('sparsity', value, servable_patterns())}")
        if not is_settable(key):
            raise ConfigError(
                f"{word}: the model gives this setting; allowed: sparsity=, topology=, their keys, "
                "train.kernel=, train.dtype= and train.compile="
            )
    is_folder = (path / "config.json").is_file() and not (path / RESOLVED).is_file()
    # One worker computes, unless torchrun or srun started several. Nothing is compiled: compiling
    # takes longer than it saves on a few prompts.
    workers = [] if current_job() is not None else ["topology.workers=1"]
    defaults = [*workers, "train.compile=false"]
    if is_folder:
        model, seq = huggingface_config.read_config(path)
        mask = huggingface_config.read_mask(path) or CAUSAL
        # The sizes that `topology.tensor_parallel` must divide.
        names = "num_heads", "num_kv_heads", "intermediate_size"
        sizes = [f"model.{name}={getattr(model, name)}" for name in names]
        with _GIVEN_BY_MODEL.in_errors():
            config = compose.compose([*defaults, *sizes, f"seq={seq}", *overrides])
        config = dataclasses.replace(config, seq=seq, model=model, mask=mask)
        config = config.changed(data={"document_mask": False})  # a prompt is one document
        if config.sparsity.has_learned_state:
            raise ConfigError(
                f"sparsity.score=learned: {path} holds no learned index; give the run that trained "
                "it, sparsity.score=exact, or sparsity=dense"
            )
    else:
        path = _find_run(path)
        with _GIVEN_BY_MODEL.in_errors():
            config = _config_of_run(run_of(path), compose.compose(defaults), overrides)
    config.model.require_own()
    require_degree_1(config, "pipeline_parallel", "mtrain generate` or `mtrain eval")
    if PATTERNS[config.sparsity.pattern].synthetic:
        raise ConfigError(
            f"{setting('sparsity')}={config.sparsity.pattern}: chooses keys without regard to the "
            "prompt, so the model would read another text; allowed: "
            f"{', '.join(servable_patterns())}"
        )
    return ModelSource(path, is_folder, config)


def is_settable(key: str) -> bool:
    """Return whether a key does not belong to the model."""
    return key in _SETTABLE or key.startswith(("sparsity.", "topology."))


def servable_patterns() -> list[str]:
    """Return the names of the patterns that look at their input."""
    return [name for name, settings in PATTERNS.items() if not settings.synthetic]


def _find_run(path: Path) -> Path:
    try:
        return find_source(path)
    except NotARunError:
        reason = "no model here" if path.exists() else "no such folder"
        raise ConfigError(
            f"{path}: {reason}{adapter_hint(path)}. Give a Hugging Face folder (config.json and "
            ".safetensors files), a run such as runs/latest, or a checkpoint of a run"
        ) from None


def _config_of_run(run: Path, defaults: Config, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run, with the overrides instead of its topology."""
    saved = resolved_file.load(run / RESOLVED)
    # A model needs neither the optimizer nor the folders of its run, which may be gone, and the run
    # used memory and arithmetic for its own devices.
    train = dataclasses.replace(
        defaults.train, tile_mib=saved.train.tile_mib, loss_chunk_mib=saved.train.loss_chunk_mib
    )
    base = dataclasses.replace(
        saved, topology=defaults.topology, train=train, optim=defaults.optim,
        profile=defaults.profile, data=defaults.data,
    )  # fmt: skip
    return dataclasses.replace(compose.resume(base, overrides), data=saved.data)


def load_decoder(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], None] | None = None,
    tensor: TensorGroup | None = None,
    mesh: DeviceMesh | None = None,
    learned: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Decoder, int | None]:
    """Load the model on one device. Return it, and the step of its checkpoint if it has one.

    Raises ConfigError if the weights are missing, damaged or of another shape.

    Args:
        dtype: dtype of all weights.
        report: called with the reason why a damaged checkpoint is skipped.
        tensor: the workers that share each layer; None if this worker computes whole layers.
        mesh: the same workers as a device mesh, if there are some.
        learned: what the pattern learns, to fill from the checkpoint.
    """
    import torch

    from mtrain_cli.model.decoder import Decoder
    from mtrain_cli.model.huggingface import load_into
    from mtrain_cli.model.loss import LossOptions
    from mtrain_cli.model.parallelize import cut_layers, execute_layers
    from mtrain_cli.model.tiling import LayerExecution

    train = source.config.train
    loss = LossOptions(chunk_bytes=train.loss_chunk_mib << 20)
    with torch.device("meta"):
        decoder = Decoder(source.config.model, source.rope_factor, loss)
    if mesh is not None:
        cut_layers(decoder, mesh)
    decoder.to(dtype).to_empty(device=device)
    decoder.requires_grad_(False)
    execution = LayerExecution(
        compile=train.compile is True,
        any_length=True,
        tile_bytes=train.tile_mib << 20,
        tensor=tensor,
        tensor_chunks=source.config.topology.tensor_chunks,
    )
    execute_layers(decoder, execution)
    if source.is_folder:
        load_into(decoder, source.path)
        return decoder.eval(), None
    return decoder.eval(), _load_checkpoint(decoder, source, report, learned)


def _load_checkpoint(
    decoder: Decoder,
    source: ModelSource,
    report: Callable[[str], None] | None,
    learned: Mapping[str, torch.Tensor] | None,
) -> int:
    """Read the weights and the biases of routers tensor by tensor. Return the checkpoint's step."""
    from mtrain_cli.model.experts import reset_biases
    from mtrain_cli.model.huggingface import check_tensors
    from mtrain_cli.sparsity.pattern import layers_without_learning
    from mtrain_cli.training import checkpointer

    reset_biases(decoder)  # float32, whatever the dtype of the weights
    parameters = {name: one.detach() for name, one in decoder.state_dict().items()}

    def targets(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        expected = {name: tuple(one.shape) for name, one in parameters.items()}
        given = run_of(source.path) / RESOLVED
        check_tensors(shapes, expected, source.path, given)
        return parameters

    try:
        step, _ = checkpointer.load_model_state(source.path, report, targets, learned)
    except checkpointer.CheckpointError as error:
        raise ConfigError(*str(error).splitlines()) from error
    if layers_without_learning(learned or {}):
        raise ConfigError(
            f"{source.path}: until the checkpoint of step {step}, sparsity.dense_steps="
            f"{source.config.sparsity.dense_steps} made all steps dense, so its index has not "
            "learned; give a later checkpoint, sparsity.score=exact or sparsity=dense"
        )
    return step
