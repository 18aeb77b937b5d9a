"""Time whole training steps of the peers: transformers' Qwen2 with FSDP2 and Liger's kernels.

    torchrun --nproc-per-node 2 profiles/peer_steps.py
    torchrun --nproc-per-node 2 profiles/peer_steps.py --attention context_parallel
    torchrun --nproc-per-node 2 profiles/peer_steps.py --recompute mlp --fp8 rowwise_with_gw_hp
    torchrun --nproc-per-node 2 profiles/peer_steps.py --toy

The model has the shape of Qwen2.5-3B and random weights. AdamW is fused, the batch is 1, and all
workers share each sequence. Two ways to share attention:

- ulysses: all-to-alls around FlashAttention-4. KV heads are repeated if workers outnumber them.
- context_parallel: PyTorch's, which gathers the keys and values, with cuDNN's attention. KV heads
  are repeated before, one for each head.

--recompute says what the backward pass computes again: whole layers, as transformers'
`gradient_checkpointing_enable` does, or only the MLPs. --fp8 computes the products of the MLPs in
fp8 with a recipe of torchao, whose MLPs are compiled.

The time is the median of the steps after the first. --toy runs a tiny model on CPU processes, with
PyTorch's own attention and loss, to test the script.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mtrain_cli.config.sizes import format_size, parse_size

QWEN3B = {
    "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936,
}  # fmt: skip
TOY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 300,
}  # fmt: skip


class Exchange(torch.autograd.Function):
    """Give each worker all tokens of its heads, or back all heads of its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: bool) -> Tensor:
        ctx.gather = gather
        return _exchanged(x, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _exchanged(grad, not ctx.gather), None


def _exchanged(x: Tensor, gather: bool) -> Tensor:
    """Exchange ``[S / W, H, D]`` for ``[S, H / W, D]`` if ``gather``, else the other way."""
    workers = dist.get_world_size()
    if gather:
        send = x.unflatten(1, (workers, -1)).transpose(0, 1).contiguous()
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send)
        return received.flatten(0, 1)
    send = x.contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    return received.unflatten(0, (workers, -1)).transpose(0, 1).flatten(1, 2)


def ulysses(attend: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
    """Return this worker's outputs, ``[S / W, H, D]``, of q, k, v ``[1, heads, S / W, D]``."""
    workers, (q, k, v) = dist.get_world_size(), (t[0].transpose(0, 1) for t in qkv)
    copies = max(workers // k.shape[1], 1)
    k, v = (t.repeat_interleave(copies, 1) for t in (k, v))
    out = attend(*(Exchange.apply(t, True)[None] for t in (q, k, v)))
    return Exchange.apply(out[0], False)


def flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of ``[1, S, heads, D]`` with FlashAttention-4."""
    from flash_attn.cute.interface import flash_attn_func

    out = flash_attn_func(q, k, v, causal=True)
    return out[0] if isinstance(out, tuple) else out


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of ``[1, S, heads, D]`` with PyTorch."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def attention_of(given: argparse.Namespace) -> Callable[..., tuple[Tensor, None]]:
    """Return attention with the arguments that transformers passes."""

    def attend(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> Any:
        if given.attention == "ulysses":
            return ulysses(sdpa if given.toy else flash4, q, k, v)[None], None
        return sdpa(*(t.transpose(1, 2) for t in (q, k, v))).contiguous(), None

    return attend


class Step(nn.Module):
    """The loss of the tokens of a worker."""

    def __init__(self, model: Qwen2ForCausalLM, toy: bool) -> None:
        super().__init__()
        self.model, self.toy = model, toy

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """Return the mean loss. All arguments are ``[1, S / W]``."""
        decoder, weight = self.model.model, self.model.lm_head.weight
        x = decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        if self.toy:
            return functional.cross_entropy(functional.linear(x, weight).float(), labels[0])
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss(reduction="mean")(weight, x, labels[0])


def build(given: argparse.Namespace, device: torch.device) -> Step:
    """Make the model on the device, with its fused kernels, recomputation and shards."""
    ALL_ATTENTION_FUNCTIONS.register("peer", attention_of(given))
    config = Qwen2Config(
        **(TOY if given.toy else QWEN3B), max_position_embeddings=1 << 22, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = "peer"
    torch.manual_seed(0)
    with device:
        model = Qwen2ForCausalLM(config)
    model.train()
    if not given.toy:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2(
            rope=True, rms_norm=True, swiglu=given.fp8 == "none", cross_entropy=False,
            fused_linear_cross_entropy=False, model=model,
        )  # fmt: skip
    if given.fp8 != "none":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(given.fp8),
            module_filter_fn=lambda _, name: ".mlp." in name,
        )
    layers = model.model.layers
    for layer in layers:
        if given.fp8 != "none":
            layer.mlp.forward = torch.compile(layer.mlp.forward)
        if given.recompute == "mlp":
            layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=False)
    if given.recompute == "layers":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step, mesh = Step(model, given.toy), init_device_mesh(device.type, (dist.get_world_size(),))
    low = None if given.toy else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for unit in (*layers, step):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    for unit in (*layers, step):  # gloo cannot average
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
    return step


def shared(given: argparse.Namespace, mesh: Any, *whole: Tensor) -> AbstractContextManager[None]:
    """Return a context in which PyTorch shares these tensors, ``[1, S]``, among the workers."""
    if given.attention == "ulysses":
        return nullcontext()
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    set_rotate_method("allgather")
    stack = ExitStack()
    stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    stack.enter_context(context_parallel(mesh, buffers=whole, buffer_seq_dims=(1, 1, 1)))
    return stack


def train(given: argparse.Namespace, seq: int, step: Step, device: torch.device) -> str:
    """Train on random ids, and return a row of the table."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    cuda, lr = device.type == "cuda", 1e-2 if given.toy else 1e-5  # toys learn within a few steps
    optimizer = torch.optim.AdamW(step.parameters(), lr=lr, fused=cuda)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    mesh, vocabulary = init_device_mesh(device.type, (workers,)), step.model.config.vocab_size
    seconds: list[float] = []
    for number in range(given.steps):
        generator = torch.Generator(device).manual_seed(number)
        ids = torch.randint(0, vocabulary, (1, seq), generator=generator, device=device)
        whole = [ids, ids.roll(-1, 1), torch.arange(seq, device=device)[None]]
        if given.attention == "ulysses":
            whole = [t.chunk(workers, 1)[rank].contiguous() for t in whole]
        dist.barrier()
        began = time.perf_counter()
        with shared(given, mesh, *whole):
            loss = step(*whole)
            (loss / workers).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach() / workers
        dist.all_reduce(total)
        assert torch.isfinite(total), f"step {number + 1} has the loss {float(total)}"
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:] or seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return (
        f"| {format_size(seq)} | {given.attention} | {given.recompute} | {given.fp8} | "
        f"{median:.2f} | {seq / median / workers:,.0f} | {peak:.1f} | {float(total):.4f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seq", default="128k", help="tokens, or several numbers with commas")
    parser.add_argument("--attention", default="ulysses", choices=["ulysses", "context_parallel"])
    parser.add_argument("--recompute", default="layers", choices=["layers", "mlp"])
    parser.add_argument(
        "--fp8", default="none", choices=["none", "rowwise_with_gw_hp", "rowwise", "tensorwise"]
    )
    parser.add_argument("--steps", type=int, default=4, help="training steps; the first warms up")
    parser.add_argument("--toy", action="store_true", help="a tiny model on CPU processes")
    given = parser.parse_args()
    device = torch.device("cpu" if given.toy else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    step = build(given, device)
    if dist.get_rank() == 0:
        print("| seq | attention | recomputed | fp8 | s / step | tokens/s/GPU | peak GiB | loss |")
        print("|---" * 8 + "|", flush=True)
    for seq in map(parse_size, ("512" if given.toy else given.seq).split(",")):
        row = train(given, seq, step, device)
        if dist.get_rank() == 0:
            print(row, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
