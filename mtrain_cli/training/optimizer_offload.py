"""Float32 weights and AdamW states in host memory, stepped by the CPU.

The device keeps weight shards in the compute dtype, and gradients: 2 + 4 bytes per weight instead
of 16. Each step sends 4 bytes per weight to the host and 2 bytes back. With
`optim.offload_gradients`, gradients move as they are reduced. PyTorch's CPUOffloadPolicy instead
transfers 12 bytes per weight and micro-batch, and waits for every gradient.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from mtrain_cli.config.schema import OptimConfig
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.experts import expert_layers, reset_biases
from mtrain_cli.parallel.fsdp import on_reduced_gradients, unit_parameters
from mtrain_cli.parallel.pinned_memory import PinnedMemory
from mtrain_cli.training.optimizer import make_optimizer, squared_norm


@dataclass(frozen=True)
class _ParameterUnit:
    """A unit of FSDP: this worker's shards of a layer, or of the parameters outside the layers."""

    device: list[Tensor]  # in the compute dtype
    host: list[Tensor]  # in float32
    masters: list[nn.Parameter]  # to which the shards on the host belong
    offsets: list[int]  # of each shard in the packed gradients
    packed: int  # number of elements of the packed gradients

    def of(self, packed: Tensor) -> list[Tensor]:
        places = zip(self.offsets, self.host, strict=True)
        return [packed[at : at + shard.numel()].view(shard.shape) for at, shard in places]


class OffloadedOptimizer:
    """Float32 weights of a sharded decoder on the host (the masters), and their optimizer.

    masters: a decoder on the host. Call `send` after initializing or loading its parameters.
    last_micro_batch: whether the current backward pass is the last of its step.
    """

    def __init__(self, decoder: Decoder, masters: Decoder, optim: OptimConfig) -> None:
        self.masters = masters
        parameters = list(decoder.parameters())
        self.device = parameters[0].device
        _mirror(decoder, masters)
        reset_biases(masters, torch.device("cpu"))
        routers = (expert_layers(each.layers) for each in (decoder, masters))
        self._routers = list(zip(*routers, strict=True))
        self.optimizer = make_optimizer(masters, optim)
        self._units = list(map(_unit, unit_parameters(decoder), unit_parameters(masters)))
        self._reduced: list[Tensor | None] = [None] * len(self._units)
        self.last_micro_batch = True
        self._squares: list[Tensor] = []  # squared gradient norm of each offloaded unit
        self._offload_events: list[torch.cuda.Event | None] = [None] * len(self._units)
        self._offloaded_units: list[int] = []  # units offloaded in this step, in order
        self._link = _HostLink(self.device)
        dtype = parameters[0].dtype
        most = max(unit.packed for unit in self._units)
        memory = PinnedMemory(self.device)
        # Host memory for gradients: of all units with optim.offload_gradients, otherwise of two
        # units. One unit is copied while the other one is stepped.
        self._gradients: list[list[Tensor]] | None = None
        self._down: list[Tensor] = []
        if optim.offload_gradients:
            self._gradients = [
                [memory.tensor(h.shape, torch.float32) for h in unit.host] for unit in self._units
            ]
        else:
            self._down = [memory.tensor((most,), torch.float32) for _ in range(2)]
        self._up = [memory.tensor((most,), dtype) for _ in range(2)]
        on_reduced_gradients(decoder, self._add)

    def _add(self, number: int, packed: Tensor) -> None:
        """Add the reduced gradients of a unit in one micro-batch, in float32."""
        # FSDP2 frees `packed` after this hook, when the current stream may not yet have read it.
        self._link.record_use(packed)
        held = self._reduced[number]
        # `float` makes no copy of a float32 tensor.
        held = packed.float() if held is None else held.add_(packed)
        self._reduced[number] = held
        if self._gradients is not None and self.last_micro_batch:
            self._offload_gradients(number, held)

    def _offload_gradients(self, number: int, packed: Tensor) -> None:
        """Send a unit's gradients to the host, after the operations queued on the current stream.

        At most one earlier unit is in transit: the device must not hold the gradients of all.
        """
        assert self._gradients is not None
        if len(self._offloaded_units) >= 2:
            _wait(self._offload_events[self._offloaded_units[-2]])
        self._offloaded_units.append(number)
        self._squares.append(squared_norm([packed], self.device))
        self._link.begin()
        with self._link.down():
            parts = self._units[number].of(packed)
            for gradient, part in zip(self._gradients[number], parts, strict=True):
                gradient.copy_(part, non_blocking=True)
            self._offload_events[number] = self._link.event()
        self._link.keep_until_copied(packed)
        self._reduced[number] = None

    def gradients(self) -> list[Tensor]:
        return [packed for packed in self._reduced if packed is not None]

    def squared_norm(self) -> Tensor:
        return torch.stack([squared_norm(self.gradients(), self.device), *self._squares]).sum()

    def drop_gradients(self) -> None:
        for packed in self.gradients():
            self._link.keep_until_copied(packed)
        self._reduced = [None] * len(self._units)
        self._squares.clear()
        self._offloaded_units.clear()

    def step(self, scale: float = 1.0) -> None:
        """Run AdamW on the host with `scale` times the gradients, unit by unit.

        Meanwhile the next unit's gradients move to the host and the previous weights back.
        """
        link, units = self._link, self._units
        if self._gradients is None and scale != 1.0:
            torch._foreach_mul_(self.gradients(), scale)
        link.begin()
        fetched = [self._fetch_gradients(0)]
        sent: list[torch.cuda.Event | None] = []
        for number, unit in enumerate(units):
            if number + 1 < len(units):
                # The unit that used this buffer before has been stepped.
                fetched.append(self._fetch_gradients(number + 1))
            _wait(fetched[number])
            if self._gradients is None:
                gradients = unit.of(self._down[number % 2])
            else:
                gradients = self._gradients[number]
                if scale != 1.0:
                    torch._foreach_mul_(gradients, scale)
            for master, gradient in zip(unit.masters, gradients, strict=True):
                assert isinstance(master, DTensor)
                master.grad = _shard_of(master, gradient, master.device_mesh)
            self.optimizer.step()
            for master in unit.masters:
                master.grad = None
            if number >= 2:
                _wait(sent[number - 2])
            sent.append(self._send(number))
        link.end()
        self.drop_gradients()

    def send(self) -> None:
        """Copy all masters to the device. Call this after filling the masters."""
        for mine, master in self._routers:
            mine.selection_bias = master.selection_bias.to(self.device, copy=True)
        self._link.begin()
        for number in range(len(self._units)):
            _wait(self._send(number))
        self._link.end()

    def _fetch_gradients(self, number: int) -> torch.cuda.Event | None:
        if self._gradients is not None:
            return self._offload_events[number]
        packed = self._reduced[number]
        assert packed is not None, "a unit without gradients"
        with self._link.down():
            self._down[number % 2][: len(packed)].copy_(packed, non_blocking=True)
            return self._link.event()

    def _send(self, number: int) -> torch.cuda.Event | None:
        unit, packed = self._units[number], self._up[number % 2]
        rounded = unit.of(packed)
        with torch.no_grad():
            torch._foreach_copy_(rounded, unit.host)
            with self._link.up():
                for shard, value in zip(unit.device, rounded, strict=True):
                    shard.copy_(value, non_blocking=True)
                return self._link.event()


class _HostLink:
    """Streams for copies to the host (down) and to a GPU (up). On a CPU, copies are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def begin(self) -> None:
        """Make later transfers wait for the operations queued on the device so far."""
        for stream in self._streams or ():
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """Make later operations on the device wait for the transfers so far, without blocking."""
        for stream in self._streams or ():
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def down(self) -> AbstractContextManager[object]:
        return nullcontext() if self._streams is None else torch.cuda.stream(self._streams[0])

    def up(self) -> AbstractContextManager[object]:
        return nullcontext() if self._streams is None else torch.cuda.stream(self._streams[1])

    def event(self) -> torch.cuda.Event | None:
        if self._streams is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def record_use(self, tensor: Tensor) -> None:
        """Keep the memory of another stream's tensor until the current stream has read it."""
        if self._streams is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def keep_until_copied(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that is about to be freed until its copy to the host ends."""
        if self._streams is not None:
            tensor.record_stream(self._streams[0])
        self.record_use(tensor)


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()


def _mirror(decoder: nn.Module, masters: nn.Module) -> None:
    """Give `masters` float32 parameters on the host, sharded like the decoder's parameters."""
    sharded = dict(decoder.named_parameters())
    first = next(iter(sharded.values()))
    assert isinstance(first, DTensor)
    # Use a mesh of CPUs: on the device's mesh, PyTorch would move host tensors to the device.
    mesh = init_device_mesh("cpu", (first.device_mesh.size(),), mesh_dim_names=("shard",))
    for name, _ in list(masters.named_parameters()):
        parameter = sharded[name]
        assert isinstance(parameter, DTensor)
        held = _shard_of(parameter, torch.empty(parameter.to_local().shape), mesh)
        module, _, last = name.rpartition(".")
        setattr(masters.get_submodule(module), last, nn.Parameter(held))


def _shard_of(like: DTensor, local: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor with this worker's shard `local`, and shape and placement of `like`."""
    return DTensor.from_local(
        local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _unit(device: list[nn.Parameter], masters: list[nn.Parameter]) -> _ParameterUnit:
    offsets, at = [], 0
    for parameter in device:
        assert isinstance(parameter, DTensor)
        offsets.append(at)
        rows = -(-parameter.shape[0] // parameter.device_mesh.size())
        at += rows * parameter[:1].numel() if parameter.ndim > 1 else rows
    return _ParameterUnit(
        [_local(p) for p in device], [_local(p) for p in masters], masters, offsets, at
    )


def _local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()
