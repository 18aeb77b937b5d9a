"""Explain an out-of-memory error: list the tensors that fill the memory.

The error lists the largest groups of tensors, the file oom-rank-N.json all of them. Parameters,
gradients, optimizer states and gathered weights have the parameter's name; other tensors that of a
variable on the stack. Python cannot see tensors that only autograd holds: on a GPU, the allocator
reports their sum.
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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mtrain_cli.config.schema import Config
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment, host_memory
from mtrain_cli.launch.failures import reporting_out_of_memory
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.training.memory import size

if TYPE_CHECKING:
    from mtrain_cli.training.trainer import Trainer

SHOWN = 10  # groups of tensors listed in the error
_GAPS = 0.1  # share of a GPU's memory above which the error reports unused memory of the allocator
PARAMETERS, GRADIENTS = "parameters", "gradients"
OPTIMIZER, GATHERED = "optimizer states", "gathered weights"
ACTIVATIONS, REST = "activations", "other"


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
    """Raise RunError with the largest tensors for out-of-memory errors of the ``with`` block.

    Yield a `RunContext`. Call `RunContext.begin` when the trainer exists.
    """
    context = RunContext(config, environment)
    with reporting_out_of_memory(lambda error: _explain(error, context, run)):
        yield context


def _explain(error: BaseException, context: RunContext, run: RunDir) -> str:
    cuda, rank = context.environment.device == "cuda", context.environment.rank
    groups = held_tensors(context, error)
    counted = torch.cuda.memory_allocated() if cuda else sum(group.bytes for group in groups)
    where = _failure_location()
    first = f"rank {rank} ran out of {'GPU ' * cuda}memory {where}"
    if tried := re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error)):
        first += f": it tried to allocate {tried[1]} more"
    lines = [first, _describe_room(counted, cuda)]
    report: dict[str, Any] = {"error": str(error).splitlines()[0], "where": where}
    report |= {"allocated": counted, "estimate": None}
    if context.trainer is not None and not context.config.model.is_foreign:
        memory = context.trainer.plan.memory
        largest = sorted(memory.peak.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name.replace('_', ' ')} {size(number)}" for name, number in largest)
        estimate = f"--dry-run estimates {size(memory.allocated)} at the peak"
        lines.append(f"{estimate} ({memory.peak.name}: {parts})")
        outside = {"allocated": memory.allocated, "reserve": memory.reserve}
        report["estimate"] = {"moment": memory.peak.name, **outside, **memory.peak.parts}
    lines += [group.text for group in groups[:SHOWN]]
    if others := groups[SHOWN:]:
        rest = size(sum(group.bytes for group in others))
        lines.append(f"{rest:>12}  in {len(others)} more groups of tensors")
    tries_auto = context.config.train.memory == "manual" and not context.config.model.is_foreign
    auto = "train.memory=auto, " * tries_auto
    more = f"more {'GPUs' if cuda else 'memory'} or a shorter seq (now {context.config.seq:,})"
    lines.append(f"To fit, try {auto}{more}")
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


def _failure_location() -> str:
    """Return the training step, and what this worker's progress record noted last."""
    here = progress_record.own_activity()
    if here is None or not here.training_step:
        return "before the first training step"
    activity = f", last activity: {here.doing}" if here.doing else ""
    return f"in training step {here.training_step}{activity}"


def held_tensors(context: RunContext, error: BaseException) -> list[HeldTensors]:
    """Return all tensors on the run's device, grouped by kind, shape and dtype, largest first.

    The first tensor of the model names its group.
    """
    named = _named(context.trainer, context.names) if context.trainer is not None else {}
    variables, order = dict(_variables(error)), {address: n for n, address in enumerate(named)}
    groups: dict[tuple[str, _Shape, str], list[tuple[int, str, int]]] = defaultdict(list)
    seen: set[int] = set()
    for tensor in _tensors(context.environment.device):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in seen:
            continue
        seen.add(address)
        unnamed = REST, variables.get(address, "not named"), tuple(tensor.shape)
        kind, name, shape = named.get(address, unnamed)
        dtype = str(tensor.dtype).removeprefix("torch.")
        member = order.get(address, len(order)), name, storage.nbytes()
        groups[kind, shape, dtype].append(member)
    held = [
        HeldTensors(kind, min(members)[1], shape, dtype, len(members), sum(m[-1] for m in members))
        for (kind, shape, dtype), members in groups.items()
    ]
    if context.environment.device == "cuda":
        unseen = torch.cuda.memory_allocated() - sum(group.bytes for group in held)
        name = "kept for backward, and buffers that only the allocator knows"
        held.append(HeldTensors(ACTIVATIONS, name, None, "", 1, unseen))
    return sorted(held, key=lambda group: -group.bytes)


_Shape = tuple[int, ...]


def _named(trainer: Trainer, names: dict[int, str]) -> dict[int, tuple[str, str, _Shape]]:
    """Return kind, name and shape of each tensor that belongs to a parameter, by storage address.

    Other tensors may share the storage, with other shapes.
    """
    by_address: dict[int, tuple[str, str, _Shape]] = {}

    def add(tensor: Any, kind: str, name: str) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        with contextlib.suppress(RuntimeError, AttributeError):
            address = local.untyped_storage().data_ptr()
            by_address.setdefault(address, (kind, name, tuple(local.shape)))

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
        where = frame.f_code.co_qualname
        for name, value in list(frame.f_locals.items()):
            for tensor in value[:8] if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                    with contextlib.suppress(RuntimeError, NotImplementedError):
                        yield tensor.untyped_storage().data_ptr(), f"{name} in {where}"
