"""The messages of tensor parallelism in a layer: their order among the products, and their bytes.

Every message gathers or adds up rows of the residual stream, so that a worker receives the rows of
the other workers of its tensor group: (t - 1) own_tokens hidden_size elements for degree t.

The programs of a tile list what `model.feed_forward` does, in its order. Tests compare both. A word
is a matrix product with the weight of that name, or one of `SEND`, `NEXT` and `WAIT`.
"""

from __future__ import annotations

from mtrain_cli.config.schema import Config, ModelConfig, TrainConfig
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.training.flops import own_tiles

# SEND starts a message, NEXT lets the other tiles go on, WAIT waits for the oldest message.
SEND, NEXT, WAIT = "send", "next", "wait"
_TO_GATE = ("o", SEND, NEXT, WAIT, SEND, NEXT, WAIT)
_FROM_GATE = (
    *("down", "down", "gate", "up", "gate", "up", SEND, NEXT, WAIT),
    *(SEND, NEXT, WAIT, "o", "o"),
)
FORWARD_TILE = (*_TO_GATE, "gate", "up", "down", SEND, NEXT, WAIT)
BACKWARD_TILE = (*_TO_GATE, SEND, "gate", "up", WAIT, *_FROM_GATE)
# If the forward pass kept the products (train.keep_mlp)
KEPT_BACKWARD_TILE = (SEND, SEND, NEXT, WAIT, WAIT, *_FROM_GATE)
# Before attention, a layer gathers its normed input and waits. Backward adds up the gradient.
BEFORE_ATTENTION = 1
FORWARD_MESSAGES = BEFORE_ATTENTION + FORWARD_TILE.count(SEND)
# A layer with experts adds up the sums after attention. Its experts compute own tokens.
EXPERT_FORWARD_MESSAGES = BEFORE_ATTENTION + 1


def messages_before_attention(train: TrainConfig) -> int:
    """Return the messages of a layer's backward pass outside the tiles.

    One adds up the gradient. With activation checkpointing, another gathers the input again.
    """
    return BEFORE_ATTENTION * (1 + (train.activation_checkpoint != "none"))


def expert_backward_messages(train: TrainConfig) -> int:
    """Return the messages in the backward pass of a layer with experts.

    It sends the gradient of each forward message, and with activation checkpointing repeats all of
    them.
    """
    return EXPERT_FORWARD_MESSAGES * (1 + (train.activation_checkpoint != "none"))


def forward_messages(model: ModelConfig) -> int:
    """Return the number of messages in the forward pass of all layers, if each has one tile."""
    dense = model.num_layers - model.expert_layers
    return dense * FORWARD_MESSAGES + model.expert_layers * EXPERT_FORWARD_MESSAGES


def backward_messages(config: Config) -> int:
    """Return the number of messages in the backward pass of all layers, if each has one tile.

    A layer sends the gradient of each forward message. It repeats the two messages between
    attention and the MLP's gate, but only the second if it keeps its MLP products. With activation
    checkpointing, it also repeats the message before attention.
    """
    model, train = config.model, config.train
    dense = model.num_layers - model.expert_layers
    kept = layers_with_products(train.keep_mlp, dense)
    return (
        dense * messages_before_attention(train)
        + (dense - kept) * BACKWARD_TILE.count(SEND)
        + kept * KEPT_BACKWARD_TILE.count(SEND)
        + model.expert_layers * expert_backward_messages(train)
    )


def message_bytes(config: Config, layout: Layout, dtype_bytes: int) -> int:
    """Return the bytes of one message that reach one worker, in all tiles."""
    own, _ = own_tiles(config, layout, dtype_bytes)
    return own * row_bytes(config, dtype_bytes)


def row_bytes(config: Config, dtype_bytes: int) -> int:
    """Return the bytes that reach one worker for each of its own rows, in one message."""
    others = config.topology.tensor_parallel - 1
    return others * config.model.hidden_size * dtype_bytes
