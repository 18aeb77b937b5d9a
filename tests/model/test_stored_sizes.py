"""A configuration that contradicts stored tensors gets one line for each size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model.moe_models import moe_model
from model.tiny_models import tiny_model

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.model.huggingface import check_tensors, parameter_shapes


@pytest.mark.parametrize("model", [tiny_model(), tiny_model("qwen3"), moe_model()])
def test_a_model_agrees_with_its_own_tensors(model):
    shapes = parameter_shapes(model)
    check_tensors(model, shapes, shapes, "folder", "file")


@pytest.mark.parametrize(
    "name",
    ["num_layers", "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads",
     "moe.experts", "moe.expert_size"],
)  # fmt: skip
def test_a_wrong_size_is_one_line_with_both_values(name):
    model = moe_model() if "." in name else tiny_model()
    part, _, key = name.rpartition(".")
    inner = getattr(model, part) if part else model
    trained = getattr(inner, key)
    inner = replace(inner, **{key: 2 * trained})
    edited = replace(model, **{part: inner}) if part else inner
    with pytest.raises(ConfigError) as caught:
        check_tensors(edited, parameter_shapes(model), parameter_shapes(edited), "step-9", "file")
    (line,) = caught.value.problems
    assert line == f"model.{name}={2 * trained}: the weights in step-9 have {trained}. Correct file"
    assert (line.key, line.value) == (f"model.{name}", 2 * trained)


def test_wrong_tensors_are_named_up_to_eight():
    model = tiny_model()
    shapes = parameter_shapes(model)
    stored = {name: shape for name, shape in shapes.items() if name.endswith("q_proj.weight")}
    with pytest.raises(ConfigError) as caught:
        check_tensors(model, stored | {"x": (1,)}, shapes, "folder", "file", {"x": "part"})
    first, *others, last = caught.value.problems
    assert first == "folder: tensor embed_tokens.weight is missing"
    assert (len(others), last) == (7, f"... and {len(shapes) - 3 + 1 - 8} more like these")
