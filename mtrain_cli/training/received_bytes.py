"""How many bytes reach one worker in a step, from the schedule of its exchange and its shards."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain_cli.config.schema import Config
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.schedule import make_schedule
from mtrain_cli.step.program import Message, layers, traffic
from mtrain_cli.training.attention_memory import shard_sizes
from mtrain_cli.training.flops import own_tiles, recomputed_attention
from mtrain_cli.training.state_memory import largest_states


@dataclass(frozen=True, kw_only=True)
class ReceivedBytes:
    """How many bytes reach one worker.

    forward, backward: KV and its gradients, per layer and micro-batch.
    tensor_forward, tensor_backward: hidden states and their gradients that tensor parallelism
        moves, per layer and micro-batch.
    weights: weights and their gradients, per optimizer step.
    host: between device and host with an offloaded optimizer, per optimizer step.
    """

    forward: int
    backward: int
    weights: int
    host: int = 0
    tensor_forward: int = 0
    tensor_backward: int = 0

    def in_step(self, passes: int) -> tuple[int, int, int]:
        """Return bytes of keys, hidden states and weights in a step of layers x micro-batches."""
        keys, hidden = self.forward + self.backward, self.tensor_forward + self.tensor_backward
        return passes * keys, passes * hidden, self.weights


def received_bytes(
    config: Config,
    *,
    layout: Layout,
    exchange: ExchangeChoice,
    workers: int,
    micro_batches: int,
    dtype_bytes: int,
) -> ReceivedBytes:
    """Count the bytes of a run, with the KV that recomputation sends again.

    Messages of a pipeline (`PipelinePlan.received`) and columns of a ring are not counted.
    """
    sizes = shard_sizes(config.of_worker, layout, exchange, dtype_bytes)
    schedule = make_schedule(exchange.name, exchange.options(layout.workers))
    forward, backward = (lower(schedule, 0, backward=b) for b in (False, True))
    again = forward.recomputed(recomputed_attention(config.train, layout, exchange.heads))
    states = largest_states(config, workers, micro_batches, dtype_bytes)
    message, number = message_bytes(config, layout, dtype_bytes), config.model.num_layers
    tensor_forward, tensor_backward = tensor_messages(config)
    return ReceivedBytes(
        forward=int(forward.sent(sizes)),
        backward=int(backward.sent(sizes)) + int(again.sent(sizes)),
        weights=states.sent(),
        host=states.over_host_link(),
        tensor_forward=tensor_forward * message // number,
        tensor_backward=tensor_backward * message // number,
    )


def tensor_messages(config: Config) -> tuple[int, int]:
    """Return the messages of hidden states in each pass of all layers, if each has one tile."""
    train, row = config.train, {Message.HIDDEN: 1}
    checkpointed = train.activation_checkpoint != "none"
    kinds = layers(config.model, checkpointed=checkpointed, tiled=True, keep_mlp=train.keep_mlp)
    return (
        sum(number * traffic(layer.forward(), row) for number, layer in kinds),
        sum(number * traffic(layer.backward(), row) for number, layer in kinds),
    )


def message_bytes(config: Config, layout: Layout, dtype_bytes: int) -> int:
    """Return the bytes of such a message that reach one worker."""
    own, _ = own_tiles(config, layout, dtype_bytes)
    return own * (config.topology.tensor_parallel - 1) * config.model.hidden_size * dtype_bytes
