"""Compare the sizes of a model in a configuration with those of its stored tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtrain_cli.config.problem import Problem, Setting
from mtrain_cli.config.schema import ModelConfig

# The size that the first dimension of a tensor gives, by the end of the tensor's name.
_ROWS = {
    "embed_tokens.weight": "vocab_size",
    ".mlp.gate_proj.weight": "intermediate_size",
    ".self_attn.q_proj.weight": "num_heads",
    ".self_attn.k_proj.weight": "num_kv_heads",
}


def wrong_sizes(
    model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], stored: object, given: object
) -> list[Problem]:
    """Return a line for each size of a configuration that the stored tensors contradict.

    A line names a cause, where a list of all tensors would be long.

    Args:
        shapes: of the stored tensors, by name.
        stored: where the tensors are, for the messages.
        given: the file of the configuration, for the messages.
    """
    return [
        Problem(
            Setting(f"model.{name}", getattr(model, name)),
            f": the weights in {stored} have {size}. Correct {given}",
        )
        for name, size in _sizes(model, shapes)
        if size != getattr(model, name)
    ]


def _sizes(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Yield each size that the tensors give, by the name of its key."""
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    if layers:
        yield "num_layers", len(layers)
    for end, key in _ROWS.items():
        shape = next((shape for name, shape in shapes.items() if name.endswith(end)), ())
        if len(shape) != 2:
            continue
        rows = shape[0]
        if key == "vocab_size":
            yield "hidden_size", shape[1]
        if "heads" not in key:
            yield key, rows
        elif rows % model.head_dim == 0:
            yield key, rows // model.head_dim
