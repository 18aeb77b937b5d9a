"""`train.lora`: adapters train as in peft, resume, merge, and export; other weights stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gloo
import pytest
import torch
from torch.nn import functional

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from mtrain_cli.composition.compose import compose  # noqa: E402
from mtrain_cli.config import resolved_file  # noqa: E402
from mtrain_cli.config.schema import Config, ConfigError  # noqa: E402
from mtrain_cli.launch import run_dir  # noqa: E402
from mtrain_cli.model.transformers_decoder import TransformersDecoder  # noqa: E402
from mtrain_cli.training.checkpoint_files import CheckpointReader, tensors_of  # noqa: E402
from mtrain_cli.training.checkpointer import Checkpointer  # noqa: E402
from mtrain_cli.training.conversion import export_checkpoint  # noqa: E402
from mtrain_cli.training.optimizer import ADAPTERS_LR, peak_learning_rate  # noqa: E402
from mtrain_cli.training.trainer import Trainer  # noqa: E402

SMALL = [
    "seq=128", "train.steps=6", "train.global_batch=2", "optim.warmup_steps=1", "optim.lr=1e-2",
    "topology.device=cpu", "model.family=transformers", "train.lora.rank=4", "train.lora.alpha=8",
    "data.document_mask=false", "optim.weight_decay=0", "optim.clip_norm=0",
    "optim.schedule=constant",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen2", vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, initializer_range=0.1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def words(folder: Path, *more: str, workers: int = 2) -> list[str]:
    return [*SMALL, f"train.init_from={folder}", f"topology.workers={workers}", *more]


def created(*words: str) -> Config:
    run = run_dir.create(compose(words), [])
    run.release()
    return resolved_file.load(run.resolved)


def trained(rank: int, world: int, config: Config, count: int) -> tuple[list[float], dict]:
    """Losses of the next steps of a run, and the weights that stay; leaves a checkpoint."""
    trainer = Trainer(config, gloo.environment(rank, world))
    checkpointer = Checkpointer(Path(config.run.dir) / "checkpoints", keep=2)
    if checkpointer.latest() is not None:
        trainer.resume(checkpointer)
    losses = [trainer.train_step(stop=False).loss for _ in range(count)]
    checkpointer.save(trainer.step, trainer.state(), asynchronous=False)
    kept = {
        name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone()
        for name, parameter in trainer.decoder.named_parameters()
        if not parameter.requires_grad
    }
    trainer.close()
    return losses, kept


def with_peft(rank: int, world: int, folder: Path, config: Config, count: int) -> list[float]:
    """Losses of the same steps by peft and transformers alone, from mtrain's first adapters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = peft.get_peft_model(model, settings)
    trainer = Trainer(config, gloo.environment(rank, world))
    ours = {
        f"base_model.model.{name}": parameter.full_tensor()
        for name, parameter in trainer.decoder.named_parameters()
        if parameter.requires_grad
    }
    theirs = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        parameter.data.copy_(ours[name])
    optimizer = torch.optim.AdamW(
        theirs.values(), lr=1e-2, betas=config.optim.betas, eps=config.optim.eps, weight_decay=0.0
    )
    losses = []
    for step in range(count):
        numbers = (trainer.sampler.sequence(2 * step + i) for i in range(2))
        samples = [trainer.dataset[number] for number in numbers]
        tokens, labels = (
            torch.stack([torch.from_numpy(getattr(one, name)).long() for one in samples])
            for name in ("tokens", "labels")
        )
        logits = model(tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    trainer.close()
    return losses


def test_adapters_train_as_in_peft_and_other_weights_stay(tmp_path, folder):
    run = created(*words(folder, f"run.dir={tmp_path / 'run'}"))
    losses, kept = gloo.run(2, trained, run, 4)[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in kept.items():
        assert torch.equal(weight, base[name.replace(".base_layer", "")]), name
    assert len(kept) == len(base), "all weights of the model are frozen"
    alone = created(*words(folder, f"run.dir={tmp_path / 'alone'}", workers=1))
    expected = gloo.run(1, with_peft, folder, alone, 4)[0]
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6)


def token_losses(rank: int, world: int, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and losses of the first sequence, from the newest checkpoint."""
    trainer = Trainer(config, gloo.environment(rank, world))
    trainer.resume(Checkpointer(Path(config.run.dir) / "checkpoints", keep=2))
    batch = trainer.batch_maker([trainer.dataset[0]])
    inputs = batch.tokens, batch.positions, batch.labels
    losses = trainer.decoder.token_losses(*inputs, trainer.attention_of(batch))
    trainer.close()
    return batch.tokens, losses


def test_a_run_resumes_bitwise_from_small_checkpoints_and_exports(tmp_path, folder):
    common = "train.lora.targets=[q_proj,v_proj]", "train.activation_checkpoint=full"
    base = shutil.copytree(folder, tmp_path / "base")
    whole = created(*words(base, f"run.dir={tmp_path / 'whole'}", *common))
    undisturbed = gloo.run(2, trained, whole, 4)[0][0]
    run = created(*words(base, f"run.dir={tmp_path / 'run'}", *common))
    first = gloo.run(2, trained, run, 2)[0][0]
    assert first + gloo.run(2, trained, run, 2)[0][0] == undisturbed

    stored = tensors_of(CheckpointReader(tmp_path / "run/checkpoints/step-4").metadata, "model.")
    assert len(stored) == 8, "A and B of two kinds in two layers"
    assert all(".lora_" in name for name in stored)

    export_checkpoint(tmp_path / "run", tmp_path / "merged", dtype=torch.float32)
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    )
    export_checkpoint(tmp_path / "run", tmp_path / "peft", dtype=torch.float32, adapter=True)
    about = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(base)
    assert (about["r"], about["lora_alpha"]) == (4, 8)
    assert about["target_modules"] == ["q_proj", "v_proj"]
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "peft", attn_implementation="eager"
    )
    tokens, losses = gloo.run(1, token_losses, run)[0]
    for model in merged, adapted:
        logits = model(tokens, use_cache=False).logits[0, :-1]
        expected = functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        torch.testing.assert_close(losses[0, :-1], expected, rtol=1e-5, atol=1e-5)

    shutil.rmtree(base)
    with pytest.raises(ConfigError, match=r"train.init_from=.*base: the adapters' model is not"):
        export_checkpoint(tmp_path / "run", tmp_path / "none", dtype=torch.float32)
    export_checkpoint(tmp_path / "run", tmp_path / "saved", dtype=torch.float32, adapter=True)
    with pytest.raises(ConfigError, match=r"train.init_from=.*base: has no weights for the adapt"):
        TransformersDecoder(run).load()  # as a resume does


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["full", "optimizer"])
def test_frozen_weights_have_the_dtype_of_the_computation(tmp_path, folder, shard):
    more = (
        "train.dtype=bfloat16",
        f"train.shard={shard}",
        "seq=256",
        "sparsity=vertical_slash",
    )
    run = created(*words(folder, f"run.dir={tmp_path / 'run'}", *more))
    losses, kept = gloo.run(2, trained, run, 4)[0]
    assert {weight.dtype for weight in kept.values()} == {torch.bfloat16}
    alone = created(*words(folder, f"run.dir={tmp_path / 'alone'}", *more, workers=1))
    torch.testing.assert_close(losses, gloo.run(1, trained, alone, 4)[0][0], rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_two_workers_train_on_weights_of_4_bits_like_one(tmp_path, folder):
    pytest.importorskip("bitsandbytes")
    quantized = "train.lora.quantize=nf4", "optim.lr=1e-3"
    runs = {
        name: created(*words(folder, f"run.dir={tmp_path / name}", *more, workers=workers))
        for name, workers, more in (("1", 1, quantized), ("2", 2, quantized), ("plain", 1, ()))
    }
    alone, shared, plain = (
        gloo.run(int(run.topology.workers), trained, run, 3)[0] for run in runs.values()
    )
    torch.testing.assert_close(shared[0], alone[0], rtol=2e-6, atol=2e-6)
    assert abs(alone[0][0] - plain[0][0]) > 1e-4, "4 bits round"
    name = "model.layers.1.mlp.up_proj.base_layer.weight"
    assert shared[1][name].dtype == torch.uint8
    assert shared[1][name].numel() == plain[1][name].numel() // 2, "two weights a byte"
    again = created(*words(folder, f"run.dir={tmp_path / 'again'}", *quantized))
    first = gloo.run(2, trained, again, 2)[0][0]
    assert first + gloo.run(2, trained, again, 1)[0][0] == shared[0]
    export_checkpoint(tmp_path / "again", tmp_path / "merged", dtype=torch.float32)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("model.family=auto", "train.lora.rank=4: needs model.family=transformers"),
        ("train.lora.rank=-1", "train.lora.rank=-1: must be"),
        ("train.lora.alpha=0", "train.lora.alpha=0: must be"),
        ("train.lora.quantize=int8", "train.lora.quantize=int8: "),
        ("train.lora.targets=3", "train.lora.targets=3: expected auto, or a list such as"),
    ],
)
def test_wrong_settings_are_refused(folder, word, problem):
    with pytest.raises(ConfigError) as caught:
        compose([*words(folder), word])
    assert problem in str(caught.value)


def test_names_without_a_layer_are_refused(folder):
    for wrong in "nosuch", "lm_head", "embed_tokens":
        config = compose(words(folder, f"train.lora.targets=[q_proj,{wrong}]"))
        with pytest.raises(ConfigError, match=rf"{wrong} is none of the linear layers.*o_proj"):
            TransformersDecoder(config)


def test_adapters_have_a_higher_rate(folder):
    config = compose([*words(folder), "optim.lr=auto"])
    assert peak_learning_rate(config) == ADAPTERS_LR


@pytest.mark.slow
def test_only_a_run_with_adapters_exports_them(tmp_path, folder):
    config = created(*words(folder, "train.lora.rank=0", f"run.dir={tmp_path / 'run'}"))
    gloo.run(1, trained, config.changed(topology={"workers": 1}), 0)
    with pytest.raises(ConfigError, match=r"--adapter: .* has no adapters"):
        export_checkpoint(Path(config.run.dir), tmp_path / "x", dtype=torch.float32, adapter=True)
