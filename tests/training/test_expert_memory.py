"""The tensors that autograd keeps of a layer's experts take the bytes of the closed form."""

from __future__ import annotations

import pytest
import torch
from allocations import LiveBytes
from training.test_memory import steps_of

from mtrain_cli.composition.compose import compose
from mtrain_cli.model.decoder import SwiGLU
from mtrain_cli.model.experts import MixtureOfExperts
from mtrain_cli.model.routing import Decision, RouterOptions, Routing
from mtrain_cli.training.layer_memory import ExpertMemory

SEQ, BATCH = 512, 2
NO_EXPERTS = [f"model.moe.{name}=0" for name in ("top_k", "expert_size", "dense_layers")]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings", [(), ("shared_size=48",), ("score=sigmoid", "normalize=false", "top_k=3")]
)
def test_kept_bytes_equal_the_formulas(settings, dtype, z_loss):
    model = compose(["model=tiny_moe", *(f"model.moe.{word}" for word in settings)]).model
    shared = SwiGLU(model.hidden_size, model.moe.shared_size) if model.moe.shared_size else None
    module = MixtureOfExperts(model, 0, shared).to(dtype)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(BATCH, SEQ, model.hidden_size, dtype=dtype, requires_grad=True)
    slots = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    routing = Routing(slots, [SEQ] * BATCH, SEQ, model.moe, 1, RouterOptions(BATCH, 0.1, z_loss))
    memory = ExpertMemory(model, BATCH * SEQ, BATCH, dtype.itemsize, z_loss=bool(z_loss))
    decisions: list[Decision] = []
    of_routing = [each for each in vars(routing).values() if isinstance(each, torch.Tensor)]
    with LiveBytes([*module.parameters(), x, *of_routing]) as live:
        before = live.now()
        out = module(x, routing, decisions)
        kept = live.now() - before - out.untyped_storage().nbytes()
    assert kept == pytest.approx(memory.saved + memory.decision, rel=0.01)
    sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in of_routing}
    assert sum(sizes.values()) == pytest.approx(memory.inputs, rel=0.03)


def step(*words):
    (found,) = steps_of(
        ["model=tiny_moe", "model.num_layers=6", "model.moe.dense_layers=2", "seq=4k", *words],
        4, exchange="all_gather", kernel="flash4",
    )  # fmt: skip
    return found


def test_offloaded_layers_leave_the_decisions_of_their_routers_on_the_device():
    found = step("train.offload_activations=true", "train.activation_checkpoint=full")
    plain, experts = (found.memory_of(layer) for layer in (1, 2))
    assert plain.decision == 0 < experts.decision
    assert found.kept(6) == 2 * experts.kept + 2 * experts.decision
    assert found.kept(3) == plain.kept + experts.kept


def test_layers_with_experts_need_their_own_weights_and_inputs():
    found, whole = step(), step().states.whole
    assert found.memory_of(2).weights == 2 * whole[True] != found.memory_of(1).weights
    first, second = (
        found.backward_of(layer, 0, scatters=False).working_weights for layer in (2, 3)
    )
    assert second - first == 2 * (whole[True] - whole[False])
    plain = [moment.inputs for moment in step("model.moe.experts=0", *NO_EXPERTS).moments()]
    with_experts = [moment.inputs for moment in found.moments()]
    # Inputs stay throughout a step.
    assert len({*plain}) == len({*with_experts}) == 1
    assert with_experts[0] - plain[0] == found.memory_of(2).experts.inputs > 0
