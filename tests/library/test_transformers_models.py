"""transformers models over two processes equal one process with transformers' own attention."""

from __future__ import annotations

import gloo
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")

from slow_cases import mostly_slow  # noqa: E402

from mtrain_cli import api  # noqa: E402
from mtrain_cli.library.context_parallel import ContextParallel  # noqa: E402
from mtrain_cli.library.settings import Processes, compose_settings  # noqa: E402
from mtrain_cli.model import transformers_models  # noqa: E402

SEQ, WINDOW = 200, 30
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": {},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": WINDOW},
    # One layer has a window, and scores have a scale of their own.
    "gemma3_text": {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Soft caps, which are low enough to matter, under a window, too.
    "gemma2": {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 0.02,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Learnable sinks.
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Latent attention: keys are 16 wide, values 8.
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}  # fmt: skip


def model_of(family: str, attention: str = "mtrain", **changed):
    torch.manual_seed(0)
    settings = {**COMMON, **FAMILIES.get(family, {}), **changed}
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model.train()


def batches() -> list[dict[str, torch.Tensor]]:
    """Two packed sequences with other documents; a part of the labels is left out."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for lengths in ([60, 140], [110, 7, 83]):
        ids = torch.randint(3, 64, (1, SEQ), generator=generator)
        labels = ids.clone()
        labels[:, 20:90] = -100
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        made.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return made


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def library(*words: str, **arguments) -> ContextParallel:
    cp = api.context_parallel(None, "topology.block_size=16", *words, seq=SEQ, **arguments)
    cp.register()
    return cp


def trained(
    _rank: int, world: int, family: str, words: tuple[str, ...], arguments: dict[str, str]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of two batches in flight, with activation checkpointing."""
    cp, model = library(*words, **arguments), model_of(family)
    cp.check(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    losses = [model(**cp.inputs(**batch)).loss for batch in batches()]
    for loss in losses:
        loss.backward()
    total, found = torch.stack(losses).sum().detach(), gradients(model)
    if world > 1:
        for tensor in (total, *found.values()):
            torch.distributed.all_reduce(tensor)
    return total.item(), found


def expected_of(family: str, *, together: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by transformers' eager attention, with labels that no document shares.

    together: take the mean over the labels of both batches, instead of a sum of two means.
    """
    model, total, made = model_of(family, "eager"), 0.0, batches()
    for batch in made:
        batch["labels"][batch["position_ids"] == 0] = -100
    targets = sum(int((batch["labels"] != -100).sum()) for batch in made)
    for batch in made:
        more = masks_of(batch["position_ids"]) if family == "gpt_oss" else {}
        count = {"num_items_in_batch": targets} if together else {}
        loss = model(**batch, **more, **count, use_cache=False).loss
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def masks_of(position_ids: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """The masks of GPT-OSS, whose own leave out the documents in transformers 5.24."""
    document, at = torch.cumsum(position_ids[0] == 0, 0), torch.arange(SEQ)
    full = (document[:, None] == document) & (at[:, None] >= at)
    near = full & (at[:, None] - at < WINDOW)

    def added(seen: torch.Tensor) -> torch.Tensor:
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]

    return {"attention_mask": {"full_attention": added(full), "sliding_attention": added(near)}}


def assert_equal(found, expected, tolerance: float = 3e-6) -> None:
    (loss, own), (other_loss, other) = found, expected
    assert loss == pytest.approx(other_loss, rel=1e-6)
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        error = (tensor - other[name]).abs().max()
        assert error <= tolerance * other[name].abs().max(), name


@mostly_slow("family", list(FAMILIES), keep=(0, 1, 2))
def test_two_processes_train_what_one_does_with_eager_attention(family):
    expected = expected_of(family)
    for found in gloo.run(2, trained, family, (), {"layout": "balanced", "exchange": "group_cast"}):
        assert_equal(found, expected)


def sharded(_rank: int, world: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of two replicas of two processes under FSDP2, one sequence each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = api.context_parallel(mesh["cp"], "topology.block_size=16", seq=SEQ)
    cp.register()
    model, everyone = model_of("llama"), init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    cp.check(model)
    inputs = cp.inputs(**batches()[mesh.get_local_rank("dp")])
    labels = torch.tensor(inputs["num_items_in_batch"])
    torch.distributed.all_reduce(labels)
    inputs["num_items_in_batch"] = int(labels) // 2  # both processes of a replica count them
    loss = model(**inputs).loss
    (world * loss).backward()
    total = loss.detach()
    torch.distributed.all_reduce(total)
    return total.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_heads_that_processes_share_have_their_sinks():
    expected = expected_of("gpt_oss")
    for found in gloo.run(2, trained, "gpt_oss", (), {"exchange": "ulysses"}):
        assert_equal(found, expected)


def test_fsdp_over_replicas_and_context_groups_gives_the_gradients_of_one_process():
    expected = expected_of("llama", together=True)
    for found in gloo.run(4, sharded):
        assert_equal(found, expected)


SPARSE = ("sparsity.block=16", "sparsity.min_columns=4", "sparsity.max_columns=8")


def test_a_sparse_pattern_gives_the_same_on_any_number_of_processes():
    words = (*SPARSE, "sparsity.p_s=0.3", "sparsity.dense_layers=1", "model.num_layers=2")
    settings = "llama", words, {"sparsity": "vertical_slash"}
    alone, (dense_loss, _) = trained(0, 1, *settings), expected_of("llama")
    assert abs(alone[0] - dense_loss) > 1e-4
    for found in gloo.run(2, trained, *settings):
        assert_equal(found, alone)


def test_a_batch_measures_the_largest_logits_of_a_model():
    cp, model = library(), model_of("gemma3_text")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    made = cp.inputs(**batches()[0], max_logits=True)
    model(**made).loss.backward()
    assert sorted(made["mtrain"].max_logits) == [0, 1]
    assert all(found.shape == (4,) for found in made["mtrain"].max_logits.values())


def test_labels_of_other_documents_and_of_padding_do_not_count():
    cp, batch = library(), batches()[1]
    made = cp.inputs(**batch)
    targets = cp.gather(made["shift_labels"])[0]
    expected = np.append(batch["labels"][0, 1:].numpy(), -100)
    expected[[109, 116]] = -100
    assert targets.tolist() == expected.tolist()
    assert made["num_items_in_batch"] == int((expected != -100).sum())
    assert (made["labels"][0, SEQ:] == -100).all()
    assert "labels" not in cp.inputs(batch["input_ids"])


REFUSED = (
    (
        "qwen3_next",
        {
            **EXPERTS, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "layers 0: linear_attention is neither full nor sliding attention; a process would see "
        "only its own tokens there",
    ),
    ("falcon_mamba", {}, "layers 0, 1: linear_attention is neither full nor sliding attention"),
    (
        "stablelm", {},
        "StableLmForCausalLM: does not pass keyword arguments on to its attention",
    ),
    (
        "qwen2_moe",
        {
            **EXPERTS, "use_sliding_window": True, "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "layer 0: has sliding_window=30 in its mask, and does not pass it to its attention",
    ),
    (
        "phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 30},
        "layer 0: has sliding_window=30 in its mask, and does not pass it to its attention",
    ),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1: not supported; set it to 0"),
    (
        "qwen3_moe", {"output_router_logits": True},
        "output_router_logits=True: not supported; set it to False",
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changed", "problem"), REFUSED, ids=[family for family, _, _ in REFUSED]
)
def test_check_refuses_what_would_be_wrong(family, changed, problem):
    with pytest.raises(api.ConfigError) as raised:
        library().check(model_of(family, **changed))
    assert raised.value.problems[0].startswith(problem)
    assert "\n" not in raised.value.problems[0]


class Changed(torch.nn.Module):
    """A feed-forward part with a change of its output."""

    def __init__(self, mlp, change):
        super().__init__()
        self.mlp, self.change = mlp, change

    def forward(self, x_BNC):
        return self.change(x_BNC, self.mlp(x_BNC))


def mixing(x_BNC: torch.Tensor, out_BNC: torch.Tensor) -> torch.Tensor:
    return out_BNC + 1e-6 * torch.nn.functional.pad(x_BNC, (0, 0, 1, 0))[:, :-1]


def rounding(x_BNC: torch.Tensor, out_BNC: torch.Tensor) -> torch.Tensor:
    """Round otherwise with another token 5, as experts do when one of them gets one token more."""
    other = (1e4 * x_BNC[:, 5, 0].nan_to_num()).sin()
    return out_BNC * (1 + 1e-6 * other)


def test_check_finds_what_mixes_tokens_and_no_rounding():
    cp, model = library(), model_of("llama")
    mlp = model.model.layers[1].mlp
    model.model.layers[1].mlp = Changed(mlp, rounding)
    cp.check(model)
    model.model.layers[1].mlp = Changed(mlp, mixing)
    with pytest.raises(api.ConfigError, match="a token changes the outputs of 1 other token; ther"):
        cp.check(model)


def test_check_refuses_frequencies_that_depend_on_the_largest_position():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = model_of("llama", rope_parameters=rope, max_position_embeddings=1024)
    for size, seq in ((2, "1k"), (1, "2k"), (2, "2k")):
        settings = compose_settings(size, (), seq=seq)
        cp = ContextParallel(settings, Processes(0, [tuple(range(size))]))
        if (size, seq) != (2, "2k"):
            cp.check(model)
            continue
        with pytest.raises(api.ConfigError, match="rope_type=dynamic: beyond 1024 positions"):
            cp.check(model)


def test_check_refuses_other_attention_and_encoders():
    library()
    with pytest.raises(api.ConfigError, match="attn_implementation=sdpa: load the model with"):
        library().check(model_of("llama", "sdpa"))
    config = transformers.AutoConfig.for_model(
        "bert", hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=64
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="mtrain")
    with pytest.raises(api.ConfigError, match="attention to later tokens"):
        library().check(model)
    words = (*SPARSE, "sparsity.dense_layers=1", "model.num_layers=5")
    cp = library(*words, sparsity="vertical_slash")
    with pytest.raises(api.ConfigError, match=r"model\.num_layers=5: the model has 2"):
        cp.check(model_of("llama"))


class TokenShift(torch.nn.Module):
    """A part of a layer in which a token sees the one before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, dims=1)


def test_check_measures_whether_tokens_mix_outside_of_attention():
    model = model_of("llama")
    model.model.layers[1].mlp = TokenShift()
    with pytest.raises(api.ConfigError) as raised:
        library().check(model)
    assert str(raised.value) == (
        "LlamaForCausalLM: without attention, a token changes the outputs of 1 other token; there, "
        "a process would see only its own tokens"
    )
    model = model_of("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(api.ConfigError, match="1 of its 2 layers call the registered attention"):
        library().check(model)


def test_check_leaves_the_model_in_training():
    model = model_of("llama")
    model.model.layers[0].eval()
    library().check(model)
    assert model.training
    assert not model.model.layers[0].mlp.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_calls_that_would_be_wrong_are_refused():
    cp, model, ids = library(), model_of("llama"), torch.ones(1, SEQ, dtype=torch.int64)
    with pytest.raises(api.ConfigError, match="the model was called without a batch"):
        model(ids)
    made = cp.inputs(ids)
    with pytest.raises(api.ConfigError, match=r"attention_mask: the batch has the masks"):
        model(**made, attention_mask=torch.ones(1, 1, 256, 256))
    with pytest.raises(api.ConfigError, match="attention_mask: hides tokens"):
        cp.inputs(ids, attention_mask=torch.zeros_like(ids))
    with pytest.raises(api.ConfigError, match="seq=200"):
        cp.inputs(ids[:, 1:])
    assert model(**made).past_key_values is None
    cached = model(**{**made, "use_cache": True}).past_key_values
    with pytest.raises(api.ConfigError, match=r"layer 0: 208 queries see 416 keys; a cache"):
        model(**cp.inputs(ids), past_key_values=cached)


def other_tokens(rank: int, _world: int) -> str:
    with pytest.raises(api.ConfigError) as raised:
        library().inputs(torch.full((1, SEQ), rank))
    return str(raised.value)


def other_labels(rank: int, _world: int) -> str:
    ids = torch.zeros(1, SEQ, dtype=torch.int64)
    with pytest.raises(api.ConfigError) as raised:
        library().inputs(ids, labels=ids + rank)
    return str(raised.value)


def test_processes_compare_their_first_labels():
    for message in gloo.run(2, other_labels):
        assert message.startswith("labels: differ between the processes [0, 1]")


def test_a_mask_that_hides_tokens_is_refused():
    cp, model = library(), model_of("llama")
    made = cp.inputs(batches()[0]["input_ids"])
    mask = torch.ones_like(made["input_ids"])
    model(**made, attention_mask=mask)
    mask[0, :5] = 0
    with pytest.raises(api.ConfigError, match="attention_mask: has zeros; padding belongs at the"):
        model(**cp.inputs(batches()[0]["input_ids"]), attention_mask=mask)


def test_labels_end_with_a_document_of_slices():
    ids = torch.arange(SEQ)[None]
    positions = torch.cat([torch.arange(100), torch.arange(SEQ - 100)])[None]
    slices = np.array([(0, 100, 0, 100, 1), (100, SEQ, 100, SEQ, 1)])
    made = library().inputs(ids, ids, position_ids=positions, slices=slices)
    assert made["num_items_in_batch"] == SEQ - 2


def test_processes_compare_their_first_tokens():
    (message, again) = gloo.run(2, other_tokens)
    assert message == again
    assert message.startswith("input_ids: differ between the processes [0, 1]")


def test_a_name_is_registered_once():
    cp = library()
    cp.register()
    transformers.AttentionInterface.register("mtrain", lambda *_, **__: None)
    try:
        with pytest.raises(api.ConfigError, match="another package has registered attn_impl"):
            cp.register()
    finally:
        transformers.AttentionInterface.register("mtrain", transformers_models.attention)
