"""Explain an out-of-memory error: list the tensors that fill the memory.

The error lists the largest groups of tensors, the file oom-rank-N.json all of them. Parameters,
gradients, optimizer states and gathered weights have the parameter's name; other tensors that of a
variable on the stack, or a description of their shape in sizes of the run ("tokens x hidden").
Python cannot see tensors that only autograd holds: on a GPU, the allocator reports their sizes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mtrain_cli.config.parallel_checks import refused_settings
from mtrain_cli.config.schema import Config
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment, host_memory
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.model.decoder import DecoderLayer
from mtrain_cli.training.memory import size

if TYPE_CHECKING:
    from mtrain_cli.training.trainer import Trainer

SHOWN = 10  # groups of tensors listed in the error
_OUT_OF_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator: (can't allocate|not enough) memory", re.IGNORECASE
)
_GAPS = 0.1  # share of a GPU's memory above which the error reports unused memory of the allocator
PARAMETERS, GRADIENTS = "parameters", "gradients"
OPTIMIZER, GATHERED = "optimizer states", "gathered weights"
ACTIVATIONS, LOGITS, REST = "activations", "logits", "other"
# What a frame of the stack computes, by file or function.
_PARTS = {
    "model/loss.py": "LM head and loss",
    "torch/optim/": "optimizer",
    "model/feed_forward.py": "MLP",
    "parallel/exchange.py": "attention",
    "parallel/context_attention.py": "attention",
    "torch/distributed/fsdp": "weights gathered or gradients reduced",
    "training/checkpointer.py": "checkpoint",
    ":project": "q, k and v",
    ":finish": "MLP",
    ":to_empty": "making the model",
}


class MemoryFullError(RunError):
    """A worker ran out of memory. The message lists the largest tensors and suggests changes."""


@dataclass(frozen=True)
class HeldTensors:
    """A group of tensors of one kind, such as `PARAMETERS`, shape and dtype.

    name: name of the first tensor of the group.
    shape: shape of each tensor. None if only the allocator knows the tensors.
    """

    kind: str
    name: str
    shape: tuple[int, ...] | None
    dtype: str
    count: int
    bytes: int

    @property
    def text(self) -> str:
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        shape = f"{list(self.shape)} {self.dtype}, " if self.shape is not None else ""
        return f"{size(self.bytes):>12}  {self.kind}: {shape}{self.name}{more}"


@dataclass
class RunContext:
    """The state of a run, for an out-of-memory message.

    names: name of each sharded parameter, by `id` of the parameter. Recorded at the start, because
        a layer holds gathered parameters, not its sharded ones, while the layer computes.
    """

    config: Config
    environment: Environment
    trainer: Trainer | None = None
    names: dict[int, str] = field(default_factory=dict)

    def begin(self, trainer: Trainer) -> Trainer:
        self.trainer, self.config = trainer, trainer.config
        self.names = {id(parameter): name for name, parameter in trainer.decoder.named_parameters()}
        return trainer


@contextlib.contextmanager
def explain_out_of_memory(
    config: Config, environment: Environment, run: RunDir
) -> Iterator[RunContext]:
    """Raise `MemoryFullError` in place of out-of-memory errors of the ``with`` block.

    Yield a `RunContext`. Call `RunContext.begin` when the trainer exists.
    """
    context = RunContext(config, environment)
    try:
        yield context
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RunError) or not is_out_of_memory(error):
            raise
        raise MemoryFullError(_explain(error, context, run)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a failed allocation."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or _OUT_OF_MEMORY.search(str(error)) is not None


def _explain(error: BaseException, context: RunContext, run: RunDir) -> str:
    cuda, rank = context.environment.device == "cuda", context.environment.rank
    groups = held_tensors(context, error)
    counted = torch.cuda.memory_allocated() if cuda else sum(group.bytes for group in groups)
    where, advice = failure_location(error), _advice(context, groups)
    first = f"rank {rank} ran out of {'GPU ' * cuda}memory {where}"
    if tried := re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error)):
        first += f": it tried to allocate {tried[1]} more"
    lines = [first, _describe_room(counted, cuda)]
    report: dict[str, Any] = {"error": str(error).splitlines()[0], "where": where}
    report |= {"allocated": counted, "estimate": None, "advice": advice}
    if context.trainer is not None:
        memory = context.trainer.plan.memory
        largest = sorted(memory.peak.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name.replace('_', ' ')} {size(number)}" for name, number in largest)
        estimate = f"--dry-run estimates {size(memory.allocated)} at the peak"
        lines.append(f"{estimate} ({memory.peak.name}: {parts})")
        outside = {"allocated": memory.allocated, "reserve": memory.reserve}
        report["estimate"] = {"moment": memory.peak.name, **outside, **memory.peak.parts}
    lines += [group.text for group in groups[:SHOWN]]
    if more := groups[SHOWN:]:
        rest = size(sum(group.bytes for group in more))
        lines.append(f"{rest:>12}  in {len(more)} more groups of tensors")
    lines.append(f"To fit, try: {'; '.join(advice)}")
    file = run.path / f"oom-rank-{rank}.json"
    with contextlib.suppress(OSError):
        report["tensors"] = [asdict(group) for group in groups]
        file.write_text(json.dumps(report, indent=1))
        lines.append(f"All tensors: {file}")
    if cuda:
        snapshot = file.with_suffix(".pickle")
        with contextlib.suppress(OSError, RuntimeError):
            torch.cuda.memory._dump_snapshot(str(snapshot))
            lines.append(f"Allocator snapshot, for https://pytorch.org/memory_viz: {snapshot}")
    return "\n".join(lines)


def _describe_room(counted: int, cuda: bool) -> str:
    if not cuda:
        return f"tensors take {size(counted)} of the {size(host_memory())} of this machine"
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    line = f"allocated {size(counted)} of {size(total)}; CUDA context, NCCL and other processes "
    line += f"hold {size(total - free - reserved)}"
    if (gaps := reserved - counted) > _GAPS * total:
        line += f"; the allocator holds {size(gaps)} more in fragments. "
        line += "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return line


def _advice(context: RunContext, groups: list[HeldTensors]) -> list[str]:
    """Return suggestions that save memory. Begin with the kind of tensors that takes the most."""
    by_kind: dict[str, int] = defaultdict(int)
    for group in groups:
        by_kind[group.kind] += group.bytes
    total = max(1, sum(by_kind.values()))
    kinds = [kind for kind, number in by_kind.items() if number >= total / 10]
    kinds.sort(key=by_kind.__getitem__, reverse=True)
    changes = dict.fromkeys(_change(kind, context.config) for kind in kinds)
    more = "GPUs" if context.environment.device == "cuda" else "memory"
    least = f"more {more} or a shorter seq (now {context.config.seq:,})"
    return [*filter(None, changes), least]


def _change(kind: str, config: Config) -> str:
    """Return a setting that shrinks tensors of this kind, or "" if no setting does."""
    train, refused = config.train, refused_settings(config)
    if kind in (GRADIENTS, GATHERED) and train.shard != "full":
        return "train.shard=full"
    offload = "optim.offload"
    if kind in (PARAMETERS, OPTIMIZER) and not config.optim.offload and offload not in refused:
        return f"{offload}=true"
    if kind in (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED):
        return "more workers, to share parameters and optimizer states"
    if kind == LOGITS:
        return f"train.loss_chunk_mib={chunk // 4}" if (chunk := train.loss_chunk_mib) > 64 else ""
    if train.activation_checkpoint != "full":
        return "train.activation_checkpoint=full"
    offload = "train.offload_activations"
    return "" if train.offload_activations is True or offload in refused else f"{offload}=true"


def failure_location(error: BaseException) -> str:
    """Describe where in the step an error was raised, such as the layer and the direction.

    The stack of the error shows the layer and the direction, the worker's progress record the step
    and, for an error outside the layers, the last activity.
    """
    backward, layer, part = False, None, ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        place = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        backward = backward or place.endswith((":backward", ":_engine_run_backward"))
        module = _layer_in(frame)
        # In backward, only `ctx` of `feed_forward` knows the layer.
        layer = getattr(frame.f_locals.get("ctx"), "layer", layer)
        layer = layer if module is None else module.index
        part = next((what for word, what in _PARTS.items() if word in place), part)
    here = progress_record.own_activity()
    step = here.training_step if here is not None else None
    parts = [f"in training step {step}" if step else "before the first training step"]
    if layer is not None:
        direction = "backward" if backward else "forward"
        parts.append(f"{direction} of layer {layer}{f' ({part})' if part else ''}")
    else:
        doing = here is not None and here.doing and f"last activity: {here.doing}"
        parts += [text for text in ("backward" * backward, part, doing) if text]
    return ", ".join(parts)


def held_tensors(context: RunContext, error: BaseException) -> list[HeldTensors]:
    """Return all tensors on the run's device, grouped by kind, shape and dtype, largest first."""
    named = _named(context.trainer, context.names) if context.trainer is not None else {}
    variables = dict(_variables(error))
    groups: dict[tuple[str, tuple[int, ...] | None, str], list[tuple[str, int]]] = defaultdict(list)
    seen: set[int] = set()
    names = _ShapeNames(context)
    for tensor in _tensors(context.environment.device):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in seen:
            continue
        seen.add(address)
        kind, name = named.get(address) or (
            names.kind(tensor),
            variables.get(address) or names.describe(tensor),
        )
        dtype = str(tensor.dtype).removeprefix("torch.")
        groups[kind, tuple(tensor.shape), dtype].append((name, storage.nbytes()))
    if context.environment.device == "cuda":
        for number in _unseen_blocks(seen):
            kept = names.activations.get(number)
            name = f"kept for backward, as {kept}" if kept else "known only to the allocator"
            groups[ACTIVATIONS if kept else REST, None, name].append((name, number))
    held = [
        HeldTensors(kind, members[0][0], shape, dtype, len(members), sum(n for _, n in members))
        for (kind, shape, dtype), members in groups.items()
    ]
    return sorted(held, key=lambda group: -group.bytes)


def _named(trainer: Trainer, names: dict[int, str]) -> dict[int, tuple[str, str]]:
    """Return the kind and name of each tensor that belongs to a parameter, by storage address."""
    by_address: dict[int, tuple[str, str]] = {}

    def add(tensor: Any, kind: str, name: str) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        with contextlib.suppress(RuntimeError, AttributeError):
            by_address.setdefault(local.untyped_storage().data_ptr(), (kind, name))

    for parameter, state in trainer.optimizer.state.items():
        for key, value in state.items():
            add(value, OPTIMIZER, f"{key} of {names.get(id(parameter), 'a parameter')}")
    sharded = [(name, parameter) for name, parameter in trainer.decoder.named_parameters()]
    for module in trainer.decoder.modules():
        for fsdp in _fsdp_parameters(module):
            name = names.get(id(fsdp.sharded_param), "a layer")
            gathered = getattr(fsdp, "_unsharded_param", None)
            for tensor in (*getattr(fsdp, "all_gather_outputs", ()), gathered):
                add(tensor, GATHERED, name)
            sharded.append((name, fsdp.sharded_param))
    for name, parameter in sharded:
        add(parameter, PARAMETERS, name)
        add(parameter.grad, GRADIENTS, name)
    return by_address


def _fsdp_parameters(module: Any) -> list[Any]:
    """Return FSDP2's private list of a module's parameters. Empty if PyTorch has no such list."""
    with contextlib.suppress(AttributeError):  # also of None
        return list(module._get_fsdp_state()._fsdp_param_group.fsdp_params)
    return []


def _tensors(device: str) -> Iterator[Tensor]:
    """Yield the tensors with storage on `device` that Python's garbage collector knows."""
    gc.unfreeze()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor) and not isinstance(candidate, DTensor):
            with contextlib.suppress(RuntimeError, NotImplementedError, ReferenceError):
                if candidate.device.type == device and candidate.layout == torch.strided:
                    candidate.untyped_storage().data_ptr()
                    yield candidate


def _variables(error: BaseException) -> Iterator[tuple[int, str]]:
    """Yield the storage address and name of each tensor in a stack variable, outermost first."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer = _layer_in(frame)
        where = frame.f_code.co_qualname + (f" of layer {layer.index}" if layer else "")
        for name, value in list(frame.f_locals.items()):
            for tensor in value[:8] if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                    with contextlib.suppress(RuntimeError, NotImplementedError):
                        yield tensor.untyped_storage().data_ptr(), f"{name} in {where}"


def _layer_in(frame: FrameType) -> DecoderLayer | None:
    """Return the decoder layer among the variables of a frame, or None."""
    variables = frame.f_locals.values()
    return next((value for value in variables if isinstance(value, DecoderLayer)), None)


class _ShapeNames:
    """Describes tensors by their shape, in sizes of the run such as "tokens x hidden"."""

    def __init__(self, context: RunContext) -> None:
        model, train = context.config.of_worker.model, context.config.train
        tokens, e = context.config.seq, 4
        if context.trainer is not None:
            choices = context.trainer.choices
            tokens, e = choices.layout.tokens_per_worker, choices.dtype.itemsize
        rows = tokens * train.micro_batch
        own_rows = -(-rows // context.config.topology.tensor_parallel)
        self._tokens = {tokens, rows, own_rows}
        self._vocabulary = model.vocab_size
        self._sizes = {
            model.vocab_size: "vocabulary",
            model.intermediate_size: "MLP width",
            model.hidden_size: "hidden",
            model.num_heads: "heads",
            model.num_kv_heads: "key-value heads",
            model.head_dim: "head_dim",
            **dict.fromkeys(self._tokens, "tokens"),
        }
        self.activations = {
            e * rows * model.intermediate_size: "[tokens, MLP width]",
            e * rows * model.num_kv_heads * model.head_dim: "keys or values",
            e * rows * model.num_heads * model.head_dim: "queries or attention output",
            4 * rows * model.num_heads: "log-sum-exp of attention",
            e * own_rows * model.hidden_size: "[tokens, hidden]",
        }

    def kind(self, tensor: Tensor) -> str:
        dims = set(tensor.shape)
        if not tensor.is_floating_point():
            return REST
        if self._vocabulary in dims and tensor.ndim == 2 and not tensor.requires_grad:
            return LOGITS
        return ACTIVATIONS if dims & self._tokens else REST

    def describe(self, tensor: Tensor) -> str:
        names = [self._sizes.get(dim, str(dim)) for dim in tensor.shape if dim != 1]
        return " x ".join(names) if set(tensor.shape) & set(self._sizes) else "not named"


def _unseen_blocks(seen: set[int]) -> Iterator[int]:
    """Yield the size of each block of the GPU's allocator whose address is not in `seen`."""
    for segment in torch.cuda.memory_snapshot():
        if segment.get("device") != torch.cuda.current_device():
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block.get("address", address) not in seen:
                yield block.get("requested_size") or block["size"]
            address += block["size"]
