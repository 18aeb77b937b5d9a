"""Bytes that tensor parallelism moves between workers.

Every message gathers or adds up rows of the residual stream, so that a worker receives the rows of
the other workers of its tensor group: (t - 1) own_tokens hidden_size elements for degree t.
"""

from __future__ import annotations

from mtrain_cli.config.schema import Config, TrainConfig
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.training.flops import own_tiles

FORWARD_MESSAGES = 4  # the normed inputs of attention and MLP, and the results of both


def backward_messages(train: TrainConfig, layers: int) -> int:
    """Return the number of messages in the backward pass of all layers.

    A layer sends the gradient of each forward message. It repeats the two messages between
    attention and the MLP's gate, but only the second if it keeps its MLP products. With activation
    checkpointing, it also repeats the message before attention.
    """
    again = 2 + (train.activation_checkpoint != "none")
    return layers * (4 + again) - layers_with_products(train.keep_mlp, layers)


def message_bytes(config: Config, layout: Layout, dtype_bytes: int) -> int:
    """Return the bytes of one message that reach one worker, in all tiles."""
    own, _ = own_tiles(config, layout, dtype_bytes)
    others = config.topology.tensor_parallel - 1
    return others * own * config.model.hidden_size * dtype_bytes
