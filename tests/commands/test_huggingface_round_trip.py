"""A transformers folder is trained for three steps and exported to a folder that generates text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import mtrain

TEXT = "Some words of a wo\u0308rld.  \u6f22\u5b57\n\tdef f(x): return x\n"
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "qwen3": {
        "rope_parameters": {
            "rope_theta": 1e6,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", CHANGES)
@pytest.mark.parametrize("tokenizer", ["bytes", "own"])
def test_a_transformers_folder_survives_training_and_export(
    tmp_path: Path, family: str, tokenizer: str
) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from mtrain_cli.data.tokenizers import open_tokenizer, train_bpe

    shape = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **(shape | CHANGES[family]))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    if tokenizer == "own":
        train_bpe([TEXT * 9, "the quick brown fox\n" * 30], 400, tmp_path / "hf" / "tokenizer.json")
    (tmp_path / "docs").mkdir()
    for number in range(3):
        (tmp_path / "docs" / f"{number}.md").write_text(f"# Title {number}\n" + TEXT * 60)
    run = mtrain(
        tmp_path, "train", "train.init_from=hf", "data=text", "data.path=docs", "seq=256",
        "train.steps=3", "train.compile=false",
        "topology.device=cpu", "topology.workers=1", "run.name=run",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    warning = "text is encoded as bytes, since it has no tokenizer.json"
    assert (warning in " ".join(run.stdout.split())) is (tokenizer == "bytes")
    exported = mtrain(tmp_path, "checkpoint", "export", "runs/run", "out", "--dtype", "float32")
    assert exported.returncode == 0, exported.stderr
    verified = mtrain(tmp_path, "checkpoint", "verify", "out", "--tokens", "128")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    model, theirs = (
        kind.from_pretrained(tmp_path / "out")
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    assert model.config.model_type == family
    ours = open_tokenizer("bytes" if tokenizer == "bytes" else str(tmp_path / "hf"))
    assert theirs(TEXT).input_ids == ours.encode([TEXT])[0].tolist()
    assert theirs.decode(theirs(TEXT).input_ids) == TEXT
    assert (
        theirs.eos_token_id
        == model.config.eos_token_id
        == model.generation_config.eos_token_id
        == ours.eos
    )
    generated = model.generate(
        **theirs("Some words", return_tensors="pt"),
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
    )
    assert theirs.decode(generated[0]).startswith("Some words")
