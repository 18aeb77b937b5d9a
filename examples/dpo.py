"""Train on preferences by DPO (arXiv:2305.18290): all processes share each sequence.

    torchrun --nproc-per-node 8 examples/dpo.py MODEL PAIRS.jsonl [--seq 64k] [--sparsity NAME]

Each line of the file is an object of ``prompt``, ``chosen`` and ``rejected``: texts, or messages
that have a role and a content. The loss is that of TRL's DPOTrainer."""

import argparse
import json
import os
from itertools import accumulate
from operator import and_, eq
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtrain_cli import api

parser = argparse.ArgumentParser()
parser.add_argument("model", help="a folder or a name of the Hugging Face Hub")
parser.add_argument("pairs", type=Path)
parser.add_argument("--seq", default="64k", help="most tokens of a prompt and its answer")
parser.add_argument("--sparsity", default="dense")
parser.add_argument("--beta", type=float, default=0.1)
parser.add_argument("--lr", type=float, default=1e-6)
parser.add_argument("--pairs-per-step", type=int, default=1)
parser.add_argument("--output", default="dpo")
options = parser.parse_args()
if not options.pairs.is_file():
    parser.error(f"{options.pairs}: no such file")

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
world, first = dist.get_world_size(), dist.get_rank() == 0
cp = api.context_parallel(seq=options.seq, sparsity=options.sparsity)
cp.register()
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(
    options.model, attn_implementation="mtrain", dtype=torch.float32
)
cp.check(model)
model.to(device).gradient_checkpointing_enable({"use_reentrant": False})
low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
sharding = {"mesh": init_device_mesh(device.type, (world,))}
sharding |= {"mp_policy": low} if device.type == "cuda" else {}
for layer in model.model.layers:
    fully_shard(layer, **sharding)
fully_shard(model, **sharding)
# FSDP2 shows sharded parameters only before the first forward pass and after a backward pass.
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)


def ids_of(said: str | list[dict[str, str]], **more: bool) -> list[int]:
    if isinstance(said, str):
        return tokenizer(said)["input_ids"]
    return tokenizer.apply_chat_template(said, return_dict=True, **more)["input_ids"]


def with_end(answer: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    is_open = isinstance(answer, str) and not answer.endswith(tokenizer.eos_token)
    return answer + tokenizer.eos_token if is_open else answer


def inputs_of(number: int, line: str) -> dict[str, torch.Tensor]:
    """Return the chosen and the rejected sequence. Labels begin where tokens leave the prompt."""
    place = f"{options.pairs}, line {number}"
    try:
        pair = json.loads(line)
        _ = [pair[name] for name in ("prompt", "chosen", "rejected")]
    except (ValueError, LookupError, TypeError) as error:
        raise SystemExit(
            f"{place}: needs JSON with prompt, chosen and rejected ({error})"
        ) from None
    prompt = ids_of(pair["prompt"], add_generation_prompt=True)
    answers = [ids_of(pair["prompt"] + with_end(pair[name])) for name in ("chosen", "rejected")]
    kept = min(map(sum, (accumulate(map(eq, prompt, answer), and_) for answer in answers)))
    ids, labels = torch.zeros(2, cp.seq, dtype=torch.long), torch.full((2, cp.seq), -100)
    documents = torch.ones(2, cp.seq, dtype=torch.long)  # padding is a document of its own
    for row, answer in enumerate(answers):
        if len(answer) > cp.seq:
            raise SystemExit(f"{place}: has {len(answer)} tokens; give a larger --seq")
        ids[row, : len(answer)] = torch.tensor(answer)
        labels[row, kept : len(answer)] = torch.tensor(answer[kept:])
        documents[row, : len(answer)] = 0
    return {"input_ids": ids, "labels": labels, "documents": documents}


def margin_of(pair: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return log p(chosen) - log p(rejected), the same on all processes."""
    inputs = cp.inputs(**pair)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    chosen, rejected = cp.logprobs(model, on_device)[0]
    return chosen - rejected


pairs = [inputs_of(*one) for one in enumerate(options.pairs.read_text().splitlines(), 1)]
if len(pairs) < options.pairs_per_step:
    raise SystemExit(f"{options.pairs}: has {len(pairs)} pairs, fewer than a step needs")
with torch.no_grad():
    references = [margin_of(pair) for pair in pairs]  # once, by the model before training
together = options.pairs_per_step
for step in range(len(pairs) // together):
    loss = torch.zeros((), device=device)
    for number in range(step * together, (step + 1) * together):
        part = -logsigmoid(options.beta * (margin_of(pairs[number]) - references[number]))
        (world * part / together).backward()  # FSDP2 averages, and the group needs the sum
        loss += part.detach() / together
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    if first:
        print(f"step {step + 1}: loss {loss.item():.6f}, gradient {norm.item():.5f}", flush=True)
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=whole)  # on the first process
if first:
    model.save_pretrained(options.output, state_dict=state)
    tokenizer.save_pretrained(options.output)
dist.barrier()
dist.destroy_process_group()
