"""Time the prompt and the new tokens of a model: mtrain, and transformers in the same run.

    python profiles/generation_speed.py /tmp/qwen3b --tokens 1000,131072
    python profiles/generation_speed.py /tmp/qwen3b --tokens 131072,524288 --workers 2 --no-peer

If FOLDER does not exist, the script writes the Qwen2.5-3B shape with random weights there. Prompts
are random ids. The script prints a Markdown table with a row for each length and implementation:

- prompt: seconds of the forward pass over the prompt, and tokens per second
- new token: milliseconds, mean over all new tokens but the first
- equal ids: how many of the first new tokens are those of the peer
- peak: most memory that the tensors of one GPU took, with the weights

With ``--workers`` W, W processes with a GPU each share every prompt in mtrain's rows. One process
computes the peer's row. A row fails, and the next goes on, if a GPU runs out
of memory.

The peer is transformers with PyTorch's scaled_dot_product_attention and a DynamicCache. The sparse
row keeps 5 % of the diagonals and 2,048 columns of each head. Each prompt runs twice, and the
second time counts, unless the first took more than 20 s.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from worker_pool import Pool, RunFailed

from mtrain_cli import api

LONG = 20.0  # seconds after which a prompt does not run again
BLOCK = 128  # tokens of a block of a pattern on a GPU


@dataclass(frozen=True)
class Row:
    """Times of one prompt, in seconds, the new ids, and the most memory of a GPU in GiB."""

    prompt: float
    token: float
    ids: list[int]
    peak_gib: float = 0.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="Hugging Face folder; made if it does not exist")
    parser.add_argument("--tokens", default="1000,131072", help="lengths of the prompts")
    parser.add_argument("--new", type=int, default=33, help="new tokens, at least 2")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--workers", type=int, default=1, help="processes that share a prompt")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    lengths = [int(word) for word in given.tokens.split(",")]
    if given.new < 2:
        parser.error(f"--new {given.new}: give at least 2")
    folder, device = given.folder, given.device
    if not folder.exists():
        write_random(folder, device)
    print("| tokens | what | prompt s | tokens/s | new token ms | equal ids | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    with Pool(given.workers, device) as pool:
        for length in lengths:
            first = None
            for name, load, workers in implementations(given.workers, given.peer):
                what = name if workers == 1 else f"{name}, {workers} workers"
                try:
                    row = pool.call(time_prompt, load, folder, device, length, given.new,
                                    workers=workers, limit_s=550)  # fmt: skip
                except RunFailed as error:
                    print(f"| {length:,} | {what} | failed: {error} |", flush=True)
                    continue
                first = first or row
                print(line(length, what, row, first), flush=True)


def write_random(folder: Path, device: str) -> None:
    """Write the Qwen2.5-3B shape with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = Qwen2Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, max_position_embeddings=32768,
        rope_theta=1e6, tie_word_embeddings=True, rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen2ForCausalLM(shape)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # a worker process computes on this GPU


def prompt(folder: Path, length: int) -> list[int]:
    """Return random ids of the model's vocabulary."""
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    return np.random.default_rng(0).integers(0, vocabulary, length).tolist()


Run = Callable[[list[int], int], Row]
Load = Callable[[Path, str, int], Run]


def implementations(workers: int, peer: bool) -> list[tuple[str, Load, int]]:
    """Return what to measure: a name, a function that loads it for a length, and its workers."""
    found: list[tuple[str, Load, int]] = []
    if peer:
        found.append(("transformers, dense", load_peer, 1))
    found.append(("mtrain, dense", load_dense, workers))
    found.append(("mtrain, sparse", load_sparse, workers))
    return found


def time_prompt(
    _rank: int, _workers: int, load: Load, folder: Path, device: str, length: int, new: int
) -> Row:
    """Return the times of a prompt, as one of the processes that share it."""
    run = load(folder, device, length)
    run(prompt(folder, min(length, 1000)), new)  # starts kernels and allocator
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = measure(run, prompt(folder, length), new)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    # NCCL does not end a communicator while a CUDA graph has its operations.
    del run
    gc.collect()
    return replace(row, peak_gib=peak)


def sparse_words(length: int) -> list[str]:
    """Return the settings of a pattern with fixed numbers of columns and diagonals."""
    slashes = max(1, round(0.05 * length / BLOCK))
    columns = min(2048, length // 2)
    return [
        "sparsity=vertical_slash",
        *(f"sparsity.{end}_columns={columns}" for end in ("min", "max")),
        *(f"sparsity.{end}_slashes={slashes}" for end in ("min", "max")),
    ]


def load_dense(folder: Path, device: str, _length: int) -> Run:
    """Load mtrain's model with dense attention."""
    return load_mtrain(folder, device, [])


def load_sparse(folder: Path, device: str, length: int) -> Run:
    """Load mtrain's model with sparse attention to prompts of a length."""
    return load_mtrain(folder, device, sparse_words(length))


def load_mtrain(folder: Path, device: str, words: list[str]) -> Run:
    """Load mtrain's model into this process, or into all processes of the group."""
    model = api.load(folder, *words, device=device)

    def run(ids: list[int], new: int) -> Row:
        [found] = model.generate(ids, max_new=new, ignore_end=True, beyond=True)
        return Row(found.prefill_seconds, found.decode_seconds / (new - 1), found.ids)

    return run


def load_peer(folder: Path, device: str, _length: int) -> Run:
    """Load the model with transformers, in the dtype of mtrain on this device."""
    from transformers import AutoModelForCausalLM, DynamicCache

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model = loaded.to(device).eval()

    @torch.inference_mode()
    def run(ids: list[int], new: int) -> Row:
        cache = DynamicCache()
        tokens, found, times = torch.tensor([ids], device=device), [], [time.perf_counter()]
        for _ in range(new):
            out = model(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
            tokens = out.logits[:, -1:].argmax(-1)
            found.append(int(tokens))  # waits for the GPU
            times.append(time.perf_counter())
        return Row(times[1] - times[0], (times[-1] - times[1]) / (new - 1), found)

    return run


def measure(run: Run, ids: list[int], new: int) -> Row:
    """Run a prompt twice, or once if that takes long. Return the last row."""
    row = run(ids, new)
    long = torch.tensor(float(row.prompt > LONG))
    dist.broadcast(long, 0)  # all processes decide alike
    return row if long else run(ids, new)


def line(length: int, name: str, row: Row, peer: Row) -> str:
    """Return a row of the table."""
    same = next((i for i, (a, b) in enumerate(zip(row.ids, peer.ids, strict=True)) if a != b), None)
    equal = len(row.ids) if same is None else same
    return (
        f"| {length:,} | {name} | {row.prompt:.3f} | {length / row.prompt:,.0f} "
        f"| {1e3 * row.token:.2f} | {equal} of {len(row.ids)} | {row.peak_gib:.1f} |"
    )


if __name__ == "__main__":
    main()
