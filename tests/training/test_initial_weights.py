"""Plan and banner say how a run contradicts the folder of its weights."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands.typed_line import simulate
from rich.console import Console

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import Config
from mtrain_cli.model.tokenizer_files import of_bytes
from mtrain_cli.training.dry_run import banner, beyond_reach, position_rows, render, weights_rows
from mtrain_cli.training.planning import make_plan

QWEN = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 2048, "rope_theta": 1e6,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def banner_lines(folder: Path, *words: str, **changes: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps(QWEN | changes))
    return encoding(compose([f"train.init_from={folder}", "seq=2k", *words]))


def encoding(config: Config) -> list[str]:
    (_, *rows) = weights_rows(config)
    return [text for _, text in rows if "the run needs" not in text]


def test_positions_beyond_the_folders_reach_are_reported(folder: Path) -> None:
    def line(*words: str, **changes: Any) -> str:
        banner_lines(folder, **changes)
        return beyond_reach(compose([f"train.init_from={folder}", "seq=8k", *words]))

    exceeds = "seq=8k exceeds the 2k tokens that the model's rotary positions cover. Give "
    remedy = "model.rope.scaling=yarn model.rope.factor=4"
    assert line() == f"{exceeds}{remedy}."
    assert line(*remedy.split()) == line("model.rope.theta=2e6") == line("seq=2k") == ""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert line(rope_scaling=yarn) == f"{exceeds}model.rope.factor=16."
    assert line("model.rope.factor=16", rope_scaling=yarn) == ""
    (row,) = position_rows(compose([f"train.init_from={folder}", "seq=8k"]))
    assert row[0] == "warning"


@pytest.mark.parametrize(
    ("words", "covered", "remedy"),
    [
        (["model=llama8b", "seq=1m"], "128k", "model.rope.scaling=yarn model.rope.factor=128"),
        (["model=llama1b", "seq=1m"], "128k", "model.rope.scaling=yarn model.rope.factor=128"),
        (["model=llama14b", "seq=10k"], "4k", "model.rope.scaling=yarn model.rope.factor=3"),
        (["model=qwen3b", "seq=512k", "model.rope.factor=4"], "128k", "model.rope.factor=16"),
        (["model=llama8b", "seq=128k"], None, ""),
        (["model=qwen3b", "seq=512k"], None, ""),
        ([], None, ""),
        (["seq=16k"], None, ""),  # the default model has no released weights
    ],
)
def test_a_preset_gets_a_note_on_the_positions_that_it_covers(words, covered, remedy):
    config = compose(words)
    rows = position_rows(config)
    if covered is None:
        assert rows == []
        return
    ((label, line),) = rows
    assert label == "note"
    assert f" exceeds the {covered} tokens that the rotary positions of model=" in line
    assert line.endswith(f"; released weights need {remedy}.")
    assert position_rows(compose([*words, *remedy.split()])) == [], "the remedy helps"


def test_plan_banner_and_simulation_show_the_line():
    plan = make_plan(compose(["model=llama8b", "seq=1m", "topology=h100_4x8"]))
    line = beyond_reach(plan.config)
    for shown in (render(plan), banner(plan, Path("runs/x"), "stdlib")):
        console = Console(file=io.StringIO(), width=400, color_system=None)
        console.print(shown)
        assert line in console.file.getvalue()
    shown = simulate("model=llama8b seq=1m --no-files --layout zigzag --exchange ring")
    assert f"note   {line[:60]}" in shown.stdout


EXAMPLES = re.compile(r"mtrain train ([^`\n\[]*?seq=[^`\n\[]*)")


def test_no_example_exceeds_the_positions_of_its_model():
    root = Path(__file__).parents[2]
    pages = [*root.glob("docs/*.md"), root / "README.md", *root.glob("mtrain_cli/commands/*.py")]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages]
    found = [words for text in texts for words in EXAMPLES.findall(text)]
    assert len(found) > 20
    for words in found:
        kept = [
            w for w in words.split("#")[0].split() if re.match(r"(model|seq|recipe)[\w.]*=\S", w)
        ]
        assert beyond_reach(compose([*kept, "mask=causal"], plan=True)) == "", words
    for recipe in root.glob("conf/recipe/*.yaml"):
        assert beyond_reach(compose([f"recipe={recipe.stem}"], plan=True)) == "", recipe


def test_bytes_for_another_tokenizers_model_are_reported(folder: Path) -> None:
    lines = banner_lines(folder, "data.tokenizer=bytes")
    assert lines[0].startswith(
        "text is encoded as bytes, but the weights expect the ids of their own tokenizer."
    )
    (folder / "tokenizer.json").unlink()
    assert "since it has no tokenizer.json" in banner_lines(folder)[0]


def test_bytes_for_a_model_of_bytes_are_no_mistake(folder: Path) -> None:
    of_bytes().write(folder)
    assert banner_lines(folder, "data.tokenizer=bytes", vocab_size=264) == []


def test_a_resumed_run_does_not_need_the_folder_of_its_weights(folder: Path) -> None:
    banner_lines(folder)
    config = compose([f"train.init_from={folder}"])
    (folder / "config.json").unlink()
    assert encoding(config) == []
