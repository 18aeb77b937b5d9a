"""Compare the shapes of stored tensors with those that a configuration describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import ConfigError, ModelConfig

_SHOWN_PROBLEMS = 8
_GATE_UP = ".experts.gate_up"  # of all experts: [experts, 2 * expert_size, hidden_size]
# The size that the rows of a matrix give, by the end of its name. Checkpoints and Hugging Face
# folders name the matrices of experts differently.
_ROWS = {
    "embed_tokens.weight": "vocab_size",
    ".mlp.gate_proj.weight": "intermediate_size",
    ".self_attn.q_proj.weight": "num_heads",
    ".self_attn.k_proj.weight": "num_kv_heads",
    ".mlp.gate.weight": "moe.experts",
    ".block_sparse_moe.gate.weight": "moe.experts",
    ".experts.0.gate_proj.weight": "moe.expert_size",
    ".experts.0.w1.weight": "intermediate_size",
    _GATE_UP: "moe.expert_size",
}


def check_tensors(
    model: ModelConfig,
    stored: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    folder: object,
    given: object,
    file_of: Mapping[str, object] | None = None,
) -> None:
    """Raise ConfigError unless the stored tensors have the expected shapes.

    A size of the model that they contradict is one line; other tensors are at most nine.

    Args:
        stored, expected: shapes of tensors by name.
        folder, given: where the tensors are, and the file of the configuration.
        file_of: the file of each tensor, if a folder has several.
    """
    problems: list[str] = [
        Problem(
            f"model.{key}={ours}: the weights in {folder} have {size}. Correct {given}",
            f"model.{key}",
            value=ours,
        )
        for key, size in _sizes(model, stored)
        if size != (ours := attrgetter(key)(model))
    ]
    if not problems:
        wrong = {
            name: f"has shape {stored[name]}; {given} requires {shape}"
            if name in stored
            else "is missing"
            for name, shape in expected.items()
            if stored.get(name) != shape
        } | dict.fromkeys(sorted(stored.keys() - expected), f"is in no model of {given}")
        problems = [
            f"{(file_of or {}).get(name, folder)}: tensor {name} {why}"
            for name, why in list(wrong.items())[:_SHOWN_PROBLEMS]
        ]
        if more := len(wrong) - len(problems):
            problems.append(f"... and {more} more like these")
    if problems:
        raise ConfigError(*problems)


def _sizes(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Yield each size that the tensors give, by the name of its key."""
    parts = (name.removeprefix("model.").split(".") for name in shapes)
    layers = {part[1] for part in parts if part[0] == "layers"}
    if layers:
        yield "num_layers", len(layers)
    for end, key in _ROWS.items():
        shape = next((shape for name, shape in shapes.items() if name.endswith(end)), ())
        if end == _GATE_UP and len(shape) == 3:
            yield key, shape[1] // 2
        if len(shape) != 2:
            continue
        rows = shape[0]
        if key == "vocab_size":
            yield "hidden_size", shape[1]
        if "heads" not in key:
            yield key, rows
        elif rows % model.head_dim == 0:
            yield key, rows // model.head_dim
