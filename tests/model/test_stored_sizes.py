"""A configuration that contradicts stored tensors gets one line for each size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model.moe_models import moe_model
from model.tiny_models import tiny_model

from mtrain_cli.model.huggingface import parameter_shapes
from mtrain_cli.model.stored_sizes import wrong_sizes


@pytest.mark.parametrize("model", [tiny_model(), tiny_model("qwen3"), moe_model()])
def test_a_model_agrees_with_its_own_tensors(model):
    assert wrong_sizes(model, parameter_shapes(model), "folder", "file") == []


@pytest.mark.parametrize(
    "name",
    ["num_layers", "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"],
)
def test_a_wrong_size_is_one_line_with_both_values(name):
    model = tiny_model()
    trained = getattr(model, name)
    edited = replace(model, **{name: 2 * trained})
    (line,) = wrong_sizes(edited, parameter_shapes(model), "step-9", "file")
    assert line == f"model.{name}={2 * trained}: the weights in step-9 have {trained}. Correct file"
    assert (line.key, line.value) == (f"model.{name}", 2 * trained)


@pytest.mark.parametrize(("name", "trained"), [("experts", 6), ("expert_size", 24)])
def test_a_wrong_size_of_experts_is_one_line_with_both_values(name, trained):
    model = moe_model()
    edited = replace(model, moe=replace(model.moe, **{name: 2 * trained}))
    (line,) = wrong_sizes(edited, parameter_shapes(model), "step-9", "file")
    assert line.startswith(f"model.moe.{name}={2 * trained}: the weights in step-9 have {trained}.")
