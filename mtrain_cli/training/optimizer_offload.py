"""Float32 weights and AdamW states in host memory, stepped there by the CPU; the device keeps shards in the compute dtype.

Of the 16 bytes that training holds for each weight of a shard, 6 stay on the device: 2 of weights in bfloat16, 4 of gradients, which come
one by one in backward. In a step the device sends 4 and gets 2. With ``optim.offload_gradients`` they leave as they come, and where a
step is one micro-batch 2 bytes stay. PyTorch's own CPUOffloadPolicy keeps nothing on the device, but
reads the float32 weights from the host for every gather, so twice a micro-batch, sends down the gradients of each, and waits for every
gradient that is added to one before: 12 bytes a micro-batch, 768 a step of 64, instead of 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mtrain_cli.config.schema import OptimConfig
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.parallel.fsdp import on_reduced_gradients, unit_parameters
from mtrain_cli.parallel.pinned_memory import PinnedMemory
from mtrain_cli.training.optimizer import make_optimizer, squared_norm


@dataclass(frozen=True)
class _ParameterUnit:
    """The shards of a layer, or of what is outside the layers. device, host: shards on the device and their float32 masters. masters: the
    parameters of the latter. offsets: where in its packed gradients each begins.
    """

    device: list[Tensor]
    host: list[Tensor]
    masters: list[nn.Parameter]
    offsets: list[int]
    packed: int

    def of(self, packed: Tensor) -> list[Tensor]:
        """The gradients in a packed tensor."""
        return [
            packed[at : at + h.numel()].view(h.shape)
            for at, h in zip(self.offsets, self.host, strict=True)
        ]


class OffloadedOptimizer:
    """Masters and optimizer of a decoder that `shard_parameters` has sharded and `to_empty` has put on its device.

    masters: a decoder of the same names on the host, to be initialised or loaded and then sent by `send`.
    """

    def __init__(self, decoder: nn.Module, masters: Decoder, optim: OptimConfig) -> None:
        self.masters = masters
        parameters = list(decoder.parameters())
        self.device = parameters[0].device
        _mirror(decoder, masters)
        self.optimizer = make_optimizer(masters, optim)
        self._units = [
            _unit(mine, theirs)
            for mine, theirs in zip(unit_parameters(decoder), unit_parameters(masters), strict=True)
        ]
        self._reduced: list[Tensor | None] = [None] * len(self._units)
        self.last_micro_batch = (
            True  # whether the backward pass at hand ends a step: then gradients are complete
        )
        self._squares: list[Tensor] = []  # of the norm of each unit's gradients that have left
        self._offload_events: list[torch.cuda.Event | None] = [None] * len(self._units)
        self._offloaded_units: list[int] = []  # units whose gradients left in this step, in that order
        self._link = _HostLink(self.device)
        dtype = parameters[0].dtype
        most = max(unit.packed for unit in self._units)
        memory = PinnedMemory(self.device)
        # Gradients that left, for each master; or as many as two units have, so that one unit travels while another one is stepped.
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
        """Gradients of micro-batches add up in float32, whatever they were reduced in."""
        # FSDP2 lets go of them behind this hook, and would write the next ones there without waiting for the stream that reads them here.
        self._link.record_use(packed)
        held = self._reduced[number]
        if held is None:
            held = packed.float()  # the tensor itself where it is float32 already
        else:
            held += packed
        self._reduced[number] = held
        if self._gradients is not None and self.last_micro_batch:
            self._offload_gradients(number, held)

    def _offload_gradients(self, number: int, packed: Tensor) -> None:
        """Sends a unit's gradients to the host, behind what the current stream has been given: that of FSDP2's reductions. No more than two
        units are on the way: the host, which may queue many layers ahead, waits for the one before them, or their memory would pile up.
        """
        assert self._gradients is not None
        if len(self._offloaded_units) >= 2:
            _wait(self._offload_events[self._offloaded_units[-2]])
        self._offloaded_units.append(number)
        self._squares.append(squared_norm([packed], self.device))
        self._link.begin()
        with self._link.down():
            for gradient, part in zip(
                self._gradients[number], self._units[number].of(packed), strict=True
            ):
                gradient.copy_(part, non_blocking=True)
            self._offload_events[number] = self._link.event()
        self._link.keep_until_copied(packed)
        self._reduced[number] = None

    def gradients(self) -> list[Tensor]:
        """All that a worker holds on the device, float32; padding, which is 0, included."""
        return [packed for packed in self._reduced if packed is not None]

    def squared_norm(self) -> Tensor:
        """Of the gradients of a step, a float32 scalar on the device."""
        return torch.stack([squared_norm(self.gradients(), self.device), *self._squares]).sum()

    def drop_gradients(self) -> None:
        for packed in self.gradients():
            self._link.keep_until_copied(packed)
        self._reduced = [None] * len(self._units)
        self._squares.clear()
        self._offloaded_units.clear()

    def step(self, scale: float = 1.0) -> None:
        """AdamW on the host with ``scale`` times the gradients, unit by unit; while one is stepped the next one's gradients come and the
        weights of the one before leave.
        """
        link, units = self._link, self._units
        if self._gradients is None and scale != 1.0:
            torch._foreach_mul_(self.gradients(), scale)
        link.begin()
        fetched = [self._fetch_gradients(0)]
        sent: list[torch.cuda.Event | None] = []
        for number, unit in enumerate(units):
            if number + 1 < len(units):
                # Its buffer was read by the step of the unit before, which is over.
                fetched.append(self._fetch_gradients(number + 1))
            _wait(fetched[number])
            if self._gradients is None:
                gradients = unit.of(self._down[number % 2])
            else:
                gradients = self._gradients[number]
                if scale != 1.0:
                    torch._foreach_mul_(gradients, scale)
            for master, gradient in zip(unit.masters, gradients, strict=True):
                master.grad = _as_dtensor(master, gradient)
            self.optimizer.step()
            for master in unit.masters:
                master.grad = None
            if number >= 2:
                _wait(sent[number - 2])
            sent.append(self._send(number))
        link.end()
        self.drop_gradients()

    def send(self) -> None:
        """All masters to the device, after they were filled."""
        self._link.begin()
        for number in range(len(self._units)):
            _wait(self._send(number))
        self._link.end()

    def _fetch_gradients(self, number: int) -> torch.cuda.Event | None:
        """The event behind which a unit's gradients are on the host; they begin to travel unless they have left already."""
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
    """Streams to and from a device, which do not wait for one another; on a CPU everything happens at once, in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = (
            (torch.cuda.Stream(device), torch.cuda.Stream(device))
            if device.type == "cuda"
            else None
        )

    def begin(self) -> None:
        """Transfers that follow see what the device has been told so far."""
        for stream in self._streams or ():
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """What the device is told from now on sees the transfers; the host does not wait."""
        for stream in self._streams or ():
            torch.cuda.current_stream(self.device).wait_stream(stream)

    @contextmanager
    def _on(self, direction: int) -> Iterator[None]:
        if self._streams is None:
            yield
            return
        with torch.cuda.stream(self._streams[direction]):
            yield

    def down(self):
        return self._on(0)

    def up(self):
        return self._on(1)

    def event(self) -> torch.cuda.Event | None:
        """Of all transfers so far on the stream at hand."""
        if self._streams is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def record_use(self, tensor: Tensor) -> None:
        """The memory of another stream's tensor is used again when the current one has done with it, too."""
        if self._streams is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def keep_until_copied(self, tensor: Tensor) -> None:
        """A tensor of another stream's memory, which is about to be let go, may still be read here and on its way to the host."""
        if self._streams is not None:
            tensor.record_stream(self._streams[0])
        self.record_use(tensor)


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()


def _mirror(decoder: nn.Module, masters: nn.Module) -> None:
    """Gives masters float32 host tensors, sharded as decoder's parameters are."""
    sharded = dict(decoder.named_parameters())
    mesh = None
    for name, _ in list(masters.named_parameters()):
        parameter = sharded[name]
        assert isinstance(parameter, DTensor)
        # Host tensors of a mesh of devices would be moved there.
        mesh = mesh or init_device_mesh(
            "cpu", (parameter.device_mesh.size(),), mesh_dim_names=("shard",)
        )
        local = torch.empty(parameter.to_local().shape)
        held = DTensor.from_local(
            local,
            mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        module, _, last = name.rpartition(".")
        setattr(masters.get_submodule(module), last, nn.Parameter(held))


def _as_dtensor(master: Tensor, local: Tensor) -> DTensor:
    assert isinstance(master, DTensor)
    return DTensor.from_local(
        local,
        master.device_mesh,
        master.placements,
        run_check=False,
        shape=master.shape,
        stride=master.stride(),
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
