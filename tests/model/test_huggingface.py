"""Weights survive writing and loading bit for bit, and damaged folders are refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gloo
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA3, SEQ, YARN, edit_config, export, make_decoder, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mtrain_cli.config.schema import FAMILIES, ConfigError, ModelConfig
from mtrain_cli.launch.failures import RunError
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.huggingface import (
    INDEX,
    SINGLE,
    SUMS,
    HuggingFaceFolder,
    load_into,
    overlaps,
    parameter_shapes,
    stored_parts,
    verify_sums,
    whole,
    write_folder,
)
from mtrain_cli.model.tokenizer_files import of_folder


def empty_decoder(model: ModelConfig) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(model)
    return decoder


def load_decoder(model: ModelConfig, folder: Path) -> dict[str, Tensor]:
    decoder = empty_decoder(model)
    decoder.to_empty(device="cpu")
    load_into(decoder, folder)
    return {name: value.detach() for name, value in decoder.named_parameters()}


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    tensors = load_file(folder / SINGLE) | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    save_file(
        {name: value for name, value in tensors.items() if value is not None},
        folder / SINGLE,
        {"format": "pt"},
    )
    (folder / SUMS).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("dtype", "max_file_bytes"), [(torch.float32, 40_000), (torch.bfloat16, 10**9)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_every_bit_and_transformers_opens_it(
    tmp_path, family, max_file_bytes, dtype
):
    transformers = pytest.importorskip("transformers")
    model = tiny_model(family, tied=False, rope=LLAMA3 if family == "llama" else YARN)
    weights = export(tmp_path / "hf", model, dtype, max_file_bytes=max_file_bytes)
    assert (tmp_path / "hf" / INDEX).exists() == (max_file_bytes < 10**9)
    read = load_decoder(model, tmp_path / "hf")
    assert all(torch.equal(read[name], weights[name].float()) for name in weights)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert theirs.dtype == dtype
    for name, value in theirs.state_dict().items():
        # transformers stacks experts in memory, as mtrain does.
        name = name.removeprefix("model.").replace("_proj", "") if "experts" in name else name
        assert torch.equal(value, weights[name.removeprefix("model.")]), name
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_decoder(model, tmp_path / "theirs")
    assert all(torch.equal(again[name], weights[name].float()) for name in weights)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 64}}),
        # Outside rope_parameters, unlike in other releases; frequencies follow from 64, not 512.
        ("llama", {"original_max_position_embeddings": 64, "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "rope_theta": 5e5}}),
        ("mistral", {"sliding_window": None, "head_dim": 24}),
        ("mistral", {"sliding_window": 31, "head_dim": 24}),
        ("mistral", {"sliding_window": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "num_hidden_layers": 3,
            "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "num_hidden_layers": 3,
            "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "norm_topk_prob": True}),
        ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
            "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 20}),
        ("mixtral", {"num_local_experts": 4}),
        ("mixtral", {"num_local_experts": 4, "sliding_window": 31, "head_dim": 24}),
    ],
)  # fmt: skip
def test_models_saved_by_transformers_give_the_same_logits(tmp_path, family, changes):
    transformers = pytest.importorskip("transformers")
    from mtrain_cli.model.verify import verify

    shape = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(shape | changes))
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(theirs.lm_head.weight, std=0.2)
    theirs.save_pretrained(tmp_path)
    agreement = verify(tmp_path, 256)
    assert agreement.largest_difference < 1e-3 < agreement.largest_logit


def load_on_workers(
    rank: int,  # noqa: ARG001
    world: int,
    folder: str,
    model: ModelConfig,
) -> tuple[dict[str, Tensor], int]:
    read = []
    original = HuggingFaceFolder.read_region

    def read_region(self, *args):
        for place, tensor in original(self, *args):
            read.append(tensor.numel())
            yield place, tensor

    HuggingFaceFolder.read_region = read_region
    decoder = empty_decoder(model)
    mesh = init_device_mesh("cpu", (world,))
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    decoder.to_empty(device="cpu")
    load_into(decoder, folder)
    return {name: value.full_tensor() for name, value in decoder.named_parameters()}, sum(read)


@pytest.mark.parametrize(
    ("world", "family"), [(2, "qwen3_moe"), pytest.param(3, "qwen2", marks=pytest.mark.slow)]
)
def test_sharded_workers_load_the_same_weights_and_read_only_their_rows(tmp_path, world, family):
    model = tiny_model(family)
    weights = export(tmp_path / "hf", model, max_file_bytes=40_000)
    results = gloo.run(world, load_on_workers, str(tmp_path / "hf"), model)
    for values, _ in results:
        assert all(torch.equal(values[name], weights[name]) for name in weights)
    assert sum(count for _, count in results) == sum(value.numel() for value in weights.values())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
        (lambda f: edit_config(f, model_type="gpt2"),
            "model_type=gpt2: must be one of qwen2, qwen3, llama, mistral"),
        (lambda f: edit_config(f, hidden_size=...), "config.json: hidden_size is missing"),
        (lambda f: edit_config(f, hidden_size="many"),
            "hidden_size=many: must be a positive integer"),
        (lambda f: edit_config(f, hidden_act="gelu"),
            'hidden_act="gelu" is not supported; only "silu" is'),
        (lambda f: edit_config(f, use_sliding_window=True, sliding_window=0),
            "sliding_window=0: must be a positive integer"),
        (lambda f: edit_config(f, use_sliding_window=True, max_window_layers=-1),
            "max_window_layers=-1: must be an integer, 0 or more"),
        (lambda f: edit_config(f, use_sliding_window=True, sliding_window=9, layer_types=[
            "full_attention", "sliding_attention", "full_attention"]),
            "sliding_window=9: is the window of 1 of 3 layers; mtrain gives the window to all"),
        (lambda f: edit_config(f, layer_types=["chunked_attention"] * 2),
            'layer_types has "chunked_attention", which is not supported'),
        (lambda f: edit_config(f, layer_types=["full_attention"]),
            "layer_types has 1 value, but num_hidden_layers=3; give one value for each layer"),
        (lambda f: edit_config(f, partial_rotary_factor=0.5),
            "partial_rotary_factor=0.5 is not supported"),
        (lambda f: edit_config(f, mlp_bias=True), "mlp_bias=true is not supported"),
        (lambda f: edit_config(f, quantization_config={"bits": 4}), "quantization_config="),
        (lambda f: edit_config(f, tie_word_embeddings=1),
            "tie_word_embeddings=1: must be true or false"),
        (
            lambda f: edit_config(f, rope_parameters=None,
                rope_scaling={"type": "yarn", "factor": 2.0, "mscale": 1, "mscale_all_dim": 2}),
            "mscale",
        ),
        (lambda f: edit_config(f, layer_types=["full_attention"] + ["sliding_attention"] * 2),
            'layer_types has "sliding_attention", but config.json has no sliding window'),
        (lambda f: edit_config(f, model_type="mistral", sliding_window="wide"),
            "sliding_window=wide: must be a positive integer"),
        (lambda f: edit_config(f, rope_theta=5e5),
            "rope_parameters.rope_theta=10000.0 and rope_theta=500000.0 contradict each other"),
        (
            lambda f: edit_config(f, rope_scaling={"type": "yarn", "factor": 2.0}),
            "rope_scaling.type=yarn and rope_parameters.rope_type=default contradict",
        ),
        (
            lambda f: edit_config(f, rope_parameters={"full_attention": {"rope_theta": 1e6}}),
            "rope_parameters.full_attention: settings per layer type are not supported",
        ),
        (lambda f: edit_config(f, rope_parameters=None, rope_scaling=[8.0]),
            "rope_scaling must be a JSON object"),
        (
            lambda f: edit_config(f, rope_parameters=None,
                rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "rope_type=dynamic is not supported; only default, yarn and llama3 are. Give a",
        ),
        (
            lambda f: edit_config(f, rope_parameters=None,
                rope_scaling={"type": "yarn", "factor": 2.0, "truncate": False}),
            "truncate=false is not supported; only true is. Remove it",
        ),
        (
            lambda f: edit_config(f, rope_parameters=None,
                rope_scaling={"type": "yarn", "factor": 2.0, "attention_factor": 1.0}),
            "attention_factor=1.0 is not.* Remove it to use that",
        ),
        (lambda f: (f / SINGLE).unlink(), f"has neither {SINGLE} nor {INDEX}"),
        (lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-100]),
            f"{SINGLE}: truncated or corrupt safetensors file"),
        (lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:100]),
            f"{SINGLE}: truncated or corrupt safetensors file"),
        (lambda f: (f / SINGLE).write_bytes(b""),
            f"{SINGLE}: truncated or corrupt safetensors file"),
        (lambda f: edit_tensors(f, model__norm__weight=None),
            "tensor model.norm.weight is missing"),
        (lambda f: edit_tensors(f, model__norm__weight=torch.ones(39)),
            r"norm.weight has shape \(39,\); .*config.json requires \(40,\)"),
        (lambda f: edit_tensors(f, model__norm__bias=torch.ones(40)),
            "tensor model.norm.bias is in no model of"),
        (lambda f: edit_tensors(f, lm_head__weight=torch.ones(97, 40)),
            r"lm_head.weight differs .* Set tie_word_embeddings=false .* or remove the tensor"),
        (lambda f: ((f / "config.json").unlink(), (f / "adapter_config.json").write_text("{}")),
            "config.json: no such file. This is a PEFT adapter: merge it with"),
        (lambda f: ((f / SINGLE).unlink(), (f / "adapter_config.json").write_text("{}")),
            "has neither .* This is a PEFT adapter: merge it with"),
        (lambda f: edit_config(f, num_attention_heads=2, head_dim=32),
            "k_proj.weight has shape .*config.json requires .* tensors are wrong"),
        (lambda f: edit_config(f, num_hidden_layers=5),
            r"hf: tensor model.layers.3.* is missing; .*config.json requires it .24 tensors"),
    ],
)  # fmt: skip
def test_a_damaged_folder_gives_an_error_that_names_the_damage(tmp_path, damage, message):
    export(tmp_path / "hf", tiny_model())
    damage(tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        HuggingFaceFolder(tmp_path / "hf")


def test_a_missing_file_is_named(tmp_path):
    export(tmp_path / "hf", tiny_model(), max_file_bytes=40_000)
    lost = sorted((tmp_path / "hf").glob("model-*"))[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=f"{lost.name}: no such file"):
        HuggingFaceFolder(tmp_path / "hf")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("", f"tensor model.norm.weight is missing, though {INDEX} lists it here"),
        ("/etc/passwd", "weight_map names the file .* which is not in this folder"),
        ("../model.safetensors", "weight_map names the file .* which is not in this folder"),
        ("..", "weight_map names the file .* which is not in this folder"),
    ],
)
def test_a_wrong_index_is_named(tmp_path, file, message):
    export(tmp_path / "hf", tiny_model(), max_file_bytes=40_000)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    other = index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["model.norm.weight"] = file or other
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        HuggingFaceFolder(tmp_path / "hf")


def test_a_stored_tied_head_and_stored_frequencies_are_ignored(tmp_path):
    weights = export(tmp_path / "hf", tiny_model("llama"))
    edit_tensors(
        tmp_path / "hf",
        lm_head__weight=weights["embed_tokens.weight"].clone(),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
    )
    read = load_decoder(tiny_model("llama"), tmp_path / "hf")
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_a_decoder_of_another_shape_is_refused_before_anything_is_loaded(tmp_path):
    export(tmp_path / "hf", tiny_model())
    # 2 heads of 32 have the same matrices as 4 heads of 16.
    decoder = make_decoder(tiny_model(num_heads=2, num_kv_heads=1, head_dim=32, rms_norm_eps=1e-5))
    before = {name: value.detach().clone() for name, value in decoder.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        load_into(decoder, tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    assert list(caught.value.problems) == [
        f"model.num_heads=2: {config} says 4",
        f"model.num_kv_heads=1: {config} says 2",
        f"model.head_dim=32: {config} says 16",
        f"model.rms_norm_eps=1e-05: {config} says 1e-06",
    ]
    assert all(torch.equal(value, before[name]) for name, value in decoder.named_parameters())


def test_loading_maps_no_more_than_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Mapped pages of a file count as memory of the process."""
    export(tmp_path, tiny_model(), max_file_bytes=40_000)
    mapped = []

    def fill(parameter, read) -> None:
        mapped.append(_maps(tmp_path))
        for place, tensor in read(whole(parameter.shape)):
            parameter[place].copy_(tensor)
        mapped.append(_maps(tmp_path))

    monkeypatch.setattr("mtrain_cli.model.huggingface._fill", fill)
    load_decoder(tiny_model(), tmp_path)
    assert set(mapped[2::2]) == {0}  # before the first, the headers of all files were checked
    assert set(mapped[3::2]) == {1}


def _maps(folder: Path) -> int:
    """Return how many files of a folder this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[-1] for line in lines if f"{folder}/" in line})


def test_rotary_settings_may_differ_from_the_folder(tmp_path):
    weights = export(tmp_path / "hf", tiny_model())
    read = load_decoder(tiny_model(rope=YARN), tmp_path / "hf")
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_an_existing_folder_is_not_touched(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "precious").write_text("x")
    with pytest.raises(ConfigError, match=r"already exists\. Give a new or empty folder"):
        export(tmp_path / "hf", tiny_model())
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (OSError(28, "No space left on device"), RunError),
        (SafetensorError("I/O error: No space left on device (os error 28)"), RunError),
        (PermissionError(13, "Permission denied"), ConfigError),
    ],
)
def test_a_failed_write_leaves_nothing_and_disk_errors_are_run_errors(tmp_path, raised, kind):
    model = tiny_model()

    def read(names):  # noqa: ARG001
        raise raised

    with pytest.raises(
        kind, match=r"hf: could not be written .*(No space left on device|Permission denied)"
    ):
        write_folder(tmp_path / "hf", model, read, rope_factor=1.0, seq=SEQ, dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_tokenizer_files_and_token_ids_are_copied(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "hidden_size": 1})
    )
    export(tmp_path / "hf", tiny_model(), tokenizer=of_folder(tmp_path / "source"))
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == 7
    assert config["hidden_size"] == 40


@pytest.mark.parametrize("max_file_bytes", [10**9, 40_000])
def test_one_flipped_bit_of_an_exported_file_is_found(tmp_path, max_file_bytes):
    folder = tmp_path / "hf"
    export(folder, tiny_model("llama"), max_file_bytes=max_file_bytes)
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    assert len((folder / SUMS).read_text().splitlines()) == len(files) >= 2
    source, parts = HuggingFaceFolder(folder), len(files)
    verify_sums(source.path)
    for number, path in enumerate(files):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ConfigError, match=rf"{path.name}: has changed since the export"):
            verify_sums(source.path)
        # Each caller of several checks its own files only.
        assert [n for n in range(parts) if _is_damaged(source, n, parts)] == [number]
        path.unlink()
        assert _is_damaged(source, 0, 1)
        path.write_bytes(content)


def _is_damaged(source, part, parts):
    try:
        verify_sums(source.path, part, parts)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("line", ["x", f"{'0' * 64}  ../secret", f"{'0' * 64}  a/b", "\xff"])
def test_a_damaged_list_of_checksums_is_one_line(tmp_path, line):
    export(tmp_path / "hf", tiny_model("llama"))
    (tmp_path / "hf" / SUMS).write_bytes(line.encode("latin-1"))
    with pytest.raises(ConfigError, match=SUMS):
        verify_sums(tmp_path / "hf")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_unique_and_shapes_add_up(family):
    model = tiny_model(family, tied=False)
    shapes = parameter_shapes(model)
    parts = [part for name, shape in shapes.items() for part in stored_parts(name, shape, model)]
    assert len({part.name for part in parts}) == len(parts)
    numbers = (torch.Size(shape).numel() for shape in shapes.values())
    assert sum(torch.Size(part.shape).numel() for part in parts) == sum(numbers)


def test_any_region_is_read_from_the_parts_that_it_covers():
    model = tiny_model("mixtral")
    name, shape = "layers.1.mlp.experts.gate_up", (6, 112, 40)
    assert parameter_shapes(model)[name] == shape
    values = torch.arange(6 * 112 * 40).view(shape)
    parts = stored_parts(name, shape, model)
    stored = {p.name: values[p.region].view(p.shape) for p in parts}
    cuts = itertools.product(
        [slice(0, 6), slice(2, 5)], [slice(0, 112), slice(50, 60), slice(0, 20)], [slice(7, 30)]
    )
    for region in [*cuts, whole(shape)]:
        result = torch.full(shape, -1)[region]
        for stored_name, rows, place in overlaps(parts, region):
            result[place] = stored[stored_name][rows]
        assert torch.equal(result, values[region]), region
    one = list(overlaps(parts, (slice(2, 3), slice(0, 20), slice(0, 40))))
    assert [part for part, _, _ in one] == ["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
