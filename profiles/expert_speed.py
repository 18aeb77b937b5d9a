"""Time mixtures of experts on GPUs: mtrain, plain torch, and transformers in the same call.

    python profiles/expert_speed.py products
    python profiles/expert_speed.py layer
    python profiles/expert_speed.py parts
    python profiles/expert_speed.py model --seq 32k,8k
    python profiles/expert_speed.py model --seq 128k --layers 8 --alone
    python profiles/expert_speed.py model --toy
    python profiles/expert_speed.py trace --seq 32k,8k --layers 8 --attention dense

Each call prints a Markdown table row by row. A row that fails has its reason, and the next row
follows.

- products: one GPU. Grouped products of gate and up and of the down projection, with rows of as
  many experts, against dense products of equal FLOP. even: each row goes to a random expert. zipf:
  the shares of the experts fall as 1 / rank^0.5. Inputs are larger than the L2 cache
- layer: one GPU. Router, dispatch, experts and their sum, forward and with the backward pass,
  without recomputation. It first prints relative errors against float64. The router of
  transformers computes in bfloat16, so some tokens get other experts. host ms: time to queue the
  forward pass. The GPU waits a few milliseconds before each timing, so that the host is ahead
- parts: one GPU. The parts of mtrain's layer, each alone, and the whole layer. rate: of FLOP, or of
  the bytes that the part must read and write. Rows with `instead` are not in the layer: they
  are other ways to compute a part
- model: two GPUs. Steps of mtrain's trainer, each with one sequence that both GPUs share, and of
  transformers, where each GPU has a sequence of its own (it does not share sequences), at the first
  length of `--seq`. experts: EP 1 gathers the weights of all experts, EP 2 sends rows to them. MFU
  counts active parameters; with sparse attention, computed pairs and recomputation, too. peak and
  estimate: memory of tensors on the first GPU. all-to-all: of a step recorded by torch's profiler,
  the share in which rows travel and nothing computes (exposed), or in which the message waits for
  the other GPU (waits), and the exposed share of the time of these messages. check: the losses of
  all timed steps with each degree, which must agree: a wrong result must not look fast
- trace: two GPUs. One step of mtrain's trainer after `--steps` others, recorded by torch's profiler
  on the first worker: GPU time by kind of kernel, idle time and what the host did meanwhile, host
  waits, launches, allocations, and the longest kernels

Times are medians; those of steps leave out the first two. `--toy` runs tiny sizes on CPU processes,
to test the script.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import expert_layers
import expert_parts
import expert_steps
import expert_trace
import torch
from measured_runs import Pool

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.sizes import parse_size

TINY = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=2",
    "model.head_dim=16", "model.intermediate_size=128", "model.vocab_size=300",
    "model.moe.experts=8", "model.moe.top_k=2", "model.moe.expert_size=32",
    "topology.block_size=128",
)  # fmt: skip
CHECKED = 512  # tokens of the comparison of layers


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["products", "layer", "parts", "model", "trace"])
    parser.add_argument("--model", default="qwen3_30b_a3b", help="a model of `mtrain config list`")
    parser.add_argument("--seq", help="tokens, or several numbers with commas")
    parser.add_argument("--layers", type=int, help="of steps; default: the most of 12 that fit")
    parser.add_argument("--degrees", default="1,2", help="of steps: expert-parallel degrees")
    parser.add_argument("--attention", default="dense,vertical_slash", help="of steps")
    parser.add_argument("--alone", action="store_true", help="of `model`: no run of transformers")
    parser.add_argument("--set", action="append", default=[], help="of `model`: KEY=VALUE")
    parser.add_argument("--steps", type=int, default=5, help="training steps of a run, at least 3")
    parser.add_argument(
        "--limit", type=float, default=500, help="seconds after which no row starts"
    )
    parser.add_argument(
        "--tile-kib", type=int, default=4 << 20, help="temporary tensors of `layer` and `parts`"
    )
    parser.add_argument("--logs", type=Path, help="existing folder for what the workers print")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on a CPU")
    given = parser.parse_args()
    began = time.monotonic()
    device = "cpu" if given.toy else "cuda"
    usual = {"products": "8k,32k,128k", "layer": "32k", "parts": "32k", "model": "32k,128k"}
    usual["trace"] = "32k"
    words = given.seq or ("512" if given.toy else usual[given.what])
    lengths = [parse_size(word) for word in words.split(",")]
    names = (f"model={given.model}", *(TINY if given.toy else ()))
    if given.what not in ("model", "trace"):
        model = compose([*names, f"seq={lengths[0]}"]).model
        sizes = expert_layers.Sizes(model, device, given.tile_kib << 10)
        torch.manual_seed(0)
        if given.what == "products":
            rows = expert_layers.products(sizes, lengths)
        elif given.what == "parts":
            rows = (line for tokens in lengths for line in expert_parts.parts(sizes, tokens))
        else:
            rows = (
                line
                for part in (
                    expert_layers.check_layers(sizes, CHECKED),
                    *(expert_layers.layer(sizes, tokens) for tokens in lengths),
                )
                for line in part
            )
        for line in rows:
            print(line, flush=True)
        return
    attentions = {name: expert_steps.ATTENTIONS[name] for name in given.attention.split(",")}
    if given.toy:
        small = ("sparsity.min_columns=64", "sparsity.max_columns=64")
        attentions = {name: (*each, *(small if each else ())) for name, each in attentions.items()}
    layers = 2 if given.toy and given.layers is None else given.layers
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(expert_steps.WORKERS, device, given.logs) as pool,
    ):
        bench = expert_steps.Bench(
            names,
            tuple(lengths),
            tuple(int(word) for word in given.degrees.split(",")),
            attentions,
            given.steps,
            device,
            Path(folder),
            pool,
            began,
            given.limit,
        )
        bench = replace(bench, model=(*bench.model, *given.set))
        if given.what == "trace":
            lines = expert_trace.tables(bench, layers)
        else:
            lines = expert_steps.model(bench, layers, peer=not given.alone)
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
