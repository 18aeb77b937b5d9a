"""Settings of runs: files that cannot be read."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys
from mtrain_cli.config.documents import UnreadableError
from mtrain_cli.reporting.run_settings import attention_lines, read_settings, with_choices


@pytest.mark.parametrize("content", [b"a: " + b"[" * 5000, b"\xff\xfe", b"a: [", b"- 1"])
def test_settings_that_cannot_be_read_say_why(tmp_path, content):
    file = tmp_path / "resolved.yaml"
    file.write_bytes(content)
    with pytest.raises(UnreadableError, match=r"nested|UTF-8|line 1|no settings"):
        read_settings(file)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a: &x [*x]", "nested too deeply"),
        ("a: &x {b: *x}", "nested too deeply"),
        (f"seed: 0\nnote: {'x' * 10_001}", "note is longer than 10,000 characters"),
        (f"seed: 0x{'f' * 5000}", "too many digits"),
    ],
)
def test_settings_that_cannot_be_shown_say_why(tmp_path, content, why):
    file = tmp_path / "resolved.yaml"
    file.write_text(content)
    with pytest.raises(UnreadableError, match=why):
        read_settings(file)
    file.write_text(f"note: {'x' * 10_000}")
    assert len(read_settings(file)["note"]) == 10_000


def test_choices_replace_auto_and_nothing_is_added():
    settings = {"topology.exchange": "auto", "topology.layout": "zigzag", "seed": 0}
    chosen = {"topology.exchange": "ring", "topology.layout": "zigzag", "train.kernel": "sdpa"}
    assert with_choices(settings, chosen) == {
        "topology.exchange": "ring (auto)",
        "topology.layout": "zigzag",
        "seed": 0,
    }


def test_the_lines_on_attention_name_mask_layout_and_exchange():
    words = ["mask=sliding_window", "mask.window=64", "topology.exchange=ring"]
    settings = with_choices(keys.values(compose(words)), {"topology.layout": "balanced"})
    assert attention_lines(settings) == [
        "mask: kind sliding_window, window 64, global_tokens 0, full_every 0, full_first 0, "
        "document_mask true",
        "workers: workers auto, context_parallel auto, layout balanced (auto), exchange ring",
        "attention: pattern dense, kernel auto, dtype auto",
    ]
    (_, line, *_) = attention_lines(keys.values(compose(["topology.tensor_parallel=2"])))
    assert line.startswith(
        "workers: workers auto, context_parallel auto, tensor_parallel 2, layout"
    )
    (line, *_) = attention_lines(keys.values(compose(["mask=video"], plan=True)))
    assert "kind video, " in line
    assert "causal false" in line
    assert attention_lines({"data.mask_key": "mask", "mask.kind": "causal"}) == [
        "mask: mask_key mask, kind causal"
    ]
    assert attention_lines({}) == []


def test_the_line_on_attention_names_layers_and_steps_that_are_dense():
    def line(*words: str) -> str:
        (line,) = [
            one
            for one in attention_lines(keys.values(compose(list(words))))
            if one.startswith("attention: ")
        ]
        return line

    sparse = "sparsity=vertical_slash"
    assert line(sparse) == "attention: pattern vertical_slash, kernel auto, dtype auto"
    assert line(sparse, "sparsity.dense_layers=2", "model.num_layers=8").startswith(
        "attention: pattern vertical_slash, dense_layers 2 of 8, kernel"
    )
    assert "vertical_slash, dense_steps 5, kernel" in line(sparse, "sparsity.dense_steps=5")
    unknown = {"sparsity.pattern": "moba", "sparsity.dense_layers": 2}
    assert attention_lines(unknown) == ["attention: pattern moba, dense_layers 2"]
    assert attention_lines({"sparsity.dense_layers": 2, "train.kernel": "sdpa"}) == [
        "attention: kernel sdpa"
    ]
