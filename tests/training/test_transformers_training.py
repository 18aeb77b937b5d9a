"""`mtrain train model.family=transformers` computes what mtrain's decoder and transformers do."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import gloo
import pytest
import torch
from rich.console import Console
from torch.nn import functional

transformers = pytest.importorskip("transformers")

from slow_cases import mostly_slow  # noqa: E402

from mtrain_cli.composition.compose import compose  # noqa: E402
from mtrain_cli.config import resolved_file  # noqa: E402
from mtrain_cli.config.schema import Config, ConfigError  # noqa: E402
from mtrain_cli.launch import run_dir  # noqa: E402
from mtrain_cli.model import transformers_decoder  # noqa: E402
from mtrain_cli.training.checkpointer import Checkpointer  # noqa: E402
from mtrain_cli.training.conversion import export_checkpoint  # noqa: E402
from mtrain_cli.training.dry_run import fits, render  # noqa: E402
from mtrain_cli.training.planning import make_plan  # noqa: E402
from mtrain_cli.training.trainer import Trainer  # noqa: E402

WINDOW = 30
COMMON = {
    "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": {},
    # Learnable sinks, experts and windows.
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
    # Windows, a scale of the scores, a tied LM head, and a buffer that no checkpoint holds.
    "gemma3_text": {"query_pre_attn_scalar": 32, **MIXED},
    "granite": {"logits_scaling": 8.0},
}
SMALL = [
    "seq=256", "train.steps=6", "train.global_batch=2", "optim.warmup_steps=2", "optim.lr=1e-3",
    "topology.device=cpu", "topology.workers=2",
]  # fmt: skip
FULL = "train.activation_checkpoint=full"
SPARSE = [
    "sparsity=vertical_slash", "sparsity.max_columns=64", "sparsity.last_q=32",
    "sparsity.max_slashes=1", "sparsity.min_slashes=1",
]  # fmt: skip


def folder_of(path: Path, family: str = "llama", *, weights: bool = True, **changed) -> Path:
    torch.manual_seed(0)
    settings = {**COMMON, **FAMILIES[family], **changed}
    config = transformers.AutoConfig.for_model(family, **settings)
    if not weights:
        config.save_pretrained(path)
        return path
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    model.save_pretrained(path)
    return path


def words_of(folder: Path, *words: str) -> list[str]:
    return [*SMALL, "model.family=transformers", f"train.init_from={folder}", *words]


def steps(rank: int, world: int, config: Config, count: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of the next steps, from the newest checkpoint and into another."""
    trainer = Trainer(config, gloo.environment(rank, world))
    checkpointer = None
    if config.run.dir != "auto":
        checkpointer = Checkpointer(Path(config.run.dir) / "checkpoints", keep=2)
    if checkpointer and checkpointer.latest() is not None:
        trainer.resume(checkpointer)
    results = [trainer.train_step(stop=False) for _ in range(count)]
    if checkpointer:
        checkpointer.save(trainer.step, trainer.state())
        checkpointer.wait()
    trainer.close()
    return [(result.loss, result.grad_norm) for result in results]


def created(*words: str) -> Config:
    run = run_dir.create(compose(words), [])
    run.release()
    return resolved_file.load(run.resolved)


@mostly_slow("words", [[], SPARSE, ["train.shard=gradients", "data.bos=true"]], keep=(1,))
@pytest.mark.parametrize("tied", [False, True])
def test_llama_trains_as_in_the_own_decoder(tmp_path, words, tied):
    folder = folder_of(tmp_path / "hf", tie_word_embeddings=tied)
    own = gloo.run(2, steps, compose([*SMALL, f"train.init_from={folder}", *words]), 3)[0]
    foreign = gloo.run(2, steps, compose(words_of(folder, *words)), 3)[0]
    torch.testing.assert_close(foreign, own, rtol=1e-6, atol=2e-6)


def token_losses(rank: int, world: int, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and losses of the first sequence, from the newest checkpoint."""
    trainer = Trainer(config, gloo.environment(rank, world))
    trainer.resume(Checkpointer(Path(config.run.dir) / "checkpoints", keep=2))
    batch = trainer.batch_maker([trainer.dataset[0]])
    inputs = batch.tokens, batch.positions, batch.labels
    losses = trainer.decoder.token_losses(*inputs, trainer.attention_of(batch))
    trainer.close()
    return batch.tokens, losses


@mostly_slow("words", [[], ["topology.exchange=ulysses", "topology.layout=contiguous"]], keep=(1,))
def test_sinks_train_with_kept_outputs_and_shared_heads(tmp_path, words):
    folder = folder_of(tmp_path / "hf", "gpt_oss")
    alone = gloo.run(1, steps, compose(words_of(folder, FULL, "topology.workers=1")), 3)[0]
    shared = gloo.run(2, steps, compose(words_of(folder, *words)), 3)[0]
    torch.testing.assert_close(shared, alone, rtol=1e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text"])
def test_a_run_resumes_exports_and_equals_transformers(tmp_path, family):
    folder = folder_of(tmp_path / "hf", family)
    common = FULL, "data.document_mask=false"
    whole = created(*words_of(folder, f"run.dir={tmp_path / 'whole'}", *common))
    undisturbed = gloo.run(2, steps, whole, 4)[0]
    alone = gloo.run(1, steps, compose(words_of(folder, *common, "topology.workers=1")), 4)[0]
    torch.testing.assert_close(alone, undisturbed, rtol=1e-6, atol=2e-6)

    run = created(*words_of(folder, f"run.dir={tmp_path / 'run'}", *common))
    first = gloo.run(2, steps, run, 2)[0]
    shutil.rmtree(folder)  # the run has all that it needs
    assert first + gloo.run(2, steps, run, 2)[0] == undisturbed

    export_checkpoint(tmp_path / "run", tmp_path / "out", dtype=torch.float32)
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", **options
    )
    assert not any(loaded.values()), loaded
    tokens, losses = gloo.run(1, token_losses, run)[0]
    logits = model(tokens, use_cache=False).logits[0, :-1]
    expected = functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    torch.testing.assert_close(losses[0, :-1], expected, rtol=1e-5, atol=1e-5)


def test_a_folder_without_weights_begins_at_random_by_seed(tmp_path):
    folder = folder_of(tmp_path / "hf", weights=False)
    one, other = (compose(words_of(folder, f"seed={seed}")) for seed in (0, 1))
    first = gloo.run(2, steps, one, 1)
    assert first == gloo.run(2, steps, one, 1)
    assert first != gloo.run(2, steps, other, 1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["topology.tensor_parallel=2"], "topology.tensor_parallel=2"),
        (["topology.pipeline_parallel=2"], "topology.pipeline_parallel=2"),
        (["topology.expert_parallel=2"], "topology.expert_parallel=2"),
        (["optim.offload=true"], "optim.offload=true"),
        (["train.offload_activations=true"], "train.offload_activations=true"),
        (["train.memory=auto"], "train.memory=auto"),
        (["train.keep_mlp=true"], "train.keep_mlp=true"),
        (["train.eval_tasks=[niah]"], "train.eval_tasks=[niah]"),
        (["model.num_layers=3"], "model.num_layers=3 (not 2)"),
        (["model.rope.theta=5e5"], "model.rope.theta=500000"),
        (["train.init_from=null"], "model.family=transformers: needs train.init_from=FOLDER"),
    ],
)
def test_settings_of_the_own_decoder_are_refused(tmp_path, words, line):
    folder = folder_of(tmp_path, weights=False)
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        compose(words_of(folder, *words))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"model_type": "none"}, "model_type=none: no decoder of transformers"),
        ({"model_type": "t5"}, "model_type=t5: no decoder of transformers"),
        ({"hidden_size": "x"}, "transformers .* rejects this folder"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized weights"),
        ({"layer_types": ["full_attention", "conv"]}, "conv"),
    ],
)
def test_a_config_json_that_cannot_be_trained_is_one_line(tmp_path, changed, line):
    file = folder_of(tmp_path, weights=False) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ConfigError, match=line) as caught:
        compose(words_of(tmp_path))
    assert len(caught.value.problems) == 1
    assert "\n" not in caught.value.problems[0]


def test_no_code_of_a_folder_runs(tmp_path):
    file = folder_of(tmp_path, weights=False) / "config.json"
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": code}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    gloo.run(1, steps, compose(words_of(tmp_path, "topology.workers=1")), 1)
    assert not (tmp_path / "ran").exists()


def refusal(rank: int, world: int, config: Config) -> tuple[str, ...]:
    try:
        Trainer(config, gloo.environment(rank, world))
    except ConfigError as error:
        return tuple(error.problems)
    return ()


@mostly_slow(
    ("family", "words", "line"),
    [
        (
            "gpt_oss",
            ["train.activation_checkpoint=sequence_selective"],
            "train.activation_checkpoint=sequence_selective: learnable sinks need selective, full",
        ),
        ("gemma3_text", ["mask=causal"], "mask.kind=causal: layer 0 has the window 30"),
        ("granite", [], "a bias, scale or cap of the logits is not supported"),
    ],
    keep=(0,),
)
def test_a_model_that_would_be_wrong_is_refused_before_the_first_step(
    tmp_path, family, words, line
):
    config = compose(words_of(folder_of(tmp_path, family, weights=False), *words))
    for problems in gloo.run(2, refusal, config):
        assert len(problems) == 1
        assert problems[0].startswith(f"model.family=transformers: {line}")


def test_incomplete_and_pickled_weights_are_refused(tmp_path):
    folder = folder_of(tmp_path / "hf", num_hidden_layers=1)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 2}))
    config = compose(words_of(folder, "topology.workers=1"))
    (problems,) = gloo.run(1, refusal, config)
    assert len(problems) == 1
    assert "missing keys of the model" in problems[0]
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: not read"):
        transformers_decoder.check_weights(folder)


def test_a_plan_estimates_nothing(tmp_path):
    plan = make_plan(compose(words_of(folder_of(tmp_path, weights=False))))
    console = Console(file=io.StringIO(), width=200)
    console.print(render(plan))
    text = console.file.getvalue()
    for topic in ("FLOP", "traffic", "checkpoint", "memory"):
        assert re.search(rf"^{topic} +not estimated", text, re.M), topic
    assert not re.search(r"GiB|\d [KMGTPE]?FLOP|parameters|theta|on disk|peak", text)
    assert fits(plan)
