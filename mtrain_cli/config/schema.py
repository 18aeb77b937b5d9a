"""The typed configuration that all code below the command line receives.

One frozen dataclass per Hydra group. A field's ``help`` is its line in `mtrain config show` and in
the configuration reference; ``choices`` are its allowed values. Nothing here imports Hydra:
`compose.py` turns the composed YAML into a `Config`, and `validate.py` checks it across fields.
Counts are in tokens, sizes in MiB or GiB where the name says so, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(help: str, choices: tuple[str, ...] = (), **default: Any) -> Any:
    """Return a dataclass field with its help line and allowed values."""
    return field(metadata={"help": help, "choices": choices}, **default)


LAYOUTS = ("contiguous", "zigzag", "striped")
EXCHANGES = (
    "auto",
    "all_gather",
    "hierarchical_all_gather",
    "ring",
    "hierarchical_ring",
    "ulysses",
)
KERNELS = ("auto", "reference", "sdpa", "triton", "flash4")
DTYPES = ("auto", "float32", "bfloat16")
MEMORIES = ("manual", "auto")
SHARDS = ("full", "gradients", "optimizer")
REDUCE_DTYPES = ("float32", "bfloat16")
CHECKPOINTS = ("none", "selective", "sequence_selective", "full")
LOSS_GRADIENTS = ("forward", "recompute")
ROPE_SCALINGS = ("none", "yarn", "llama3")
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")

# The keys of each pattern, besides `pattern` itself.
PATTERN_KEYS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "vertical_slash": (
        "block", "dense_steps", "last_q", "windows", "p_v", "p_s", "joint", "index_per",
        "sink_tokens", "min_columns", "max_columns", "min_slashes", "max_slashes",
    ),
    "xattention": ("block", "dense_steps", "stride", "threshold"),
    "moba": ("block", "dense_steps", "chunk", "top_k", "gate"),
    "fixed": ("block", "dense_steps", "slashes", "columns", "density"),
}  # fmt: skip
PATTERNS = tuple(PATTERN_KEYS)
# Most columns or slashes to choose from: `sparsity.pattern.ranking` packs a line's number and its
# mass into one int64.
MOST_LINES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, and its scaling beyond the length of the original training."""

    theta: float = option("base of the rotary frequencies")
    scaling: str = option("method to reach positions beyond original_max_position", ROPE_SCALINGS)
    factor: float | str = option(
        "context extension factor; auto = seq / original_max_position, at least 1 (yarn only)"
    )
    original_max_position: int = option(
        "tokens per sequence in the model's original training; YaRN scales from this length"
    )
    beta_fast: float = option(
        "yarn: dimensions that turn more often than this over the original length stay unscaled"
    )
    beta_slow: float = option(
        "yarn: dimensions that turn less often than this over the original length are interpolated"
    )
    low_freq_factor: float = option(
        "llama3: wavelengths above original_max_position / low_freq_factor are fully scaled"
    )
    high_freq_factor: float = option(
        "llama3: wavelengths below original_max_position / high_freq_factor stay unscaled"
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder."""

    name: str = option("model name in banners and run names")
    family: str = option("Hugging Face architecture for import and export", FAMILIES)
    vocab_size: int = option(
        "rows of the embedding; auto = from train.init_from, else the vocabulary of the data's "
        "tokenizer rounded up to a multiple of 8"
    )
    hidden_size: int = option("width of the residual stream")
    num_layers: int = option("number of decoder layers")
    num_heads: int = option("number of query heads")
    num_kv_heads: int = option("number of key-value heads (GQA); must divide num_heads")
    head_dim: int = option("width of one head")
    intermediate_size: int = option("width of the SwiGLU MLP")
    qkv_bias: bool = option("add a bias to the q, k and v projections (Qwen2)")
    qk_norm: bool = option("apply RMSNorm to q and k per head (Qwen3)")
    tie_word_embeddings: bool = option("share one weight between the embedding and the LM head")
    rms_norm_eps: float = option("epsilon of RMSNorm")
    init_std: float = option("standard deviation of the random initial weights")
    rope: RopeConfig = option("rotary embedding")


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """Workers, and how they share a sequence."""

    device: str = option(
        "device type of the workers; auto = cuda if a GPU is usable, else cpu",
        ("auto", "cpu", "cuda"),
    )
    workers: int | str = option("number of workers; auto = all GPUs of the job, or 2 on a CPU")
    context_parallel: int | str = option(
        "number of workers that share one sequence; auto = all of them"
    )
    gpu_memory_gib: float | str = option(
        "GiB of GPU memory assumed by plans and train.memory=auto; auto = read from the GPU, or an "
        "H200's if there is none"
    )
    host_memory_gib: float | str = option(
        "GiB of host memory per GPU assumed by plans and train.memory=auto; auto = an equal share "
        "of this machine's, or 128 if there is no GPU"
    )
    gpus_per_node: int | str = option("workers per (virtual) node; auto = as launched")
    layout: str = option(
        "assignment of tokens to workers; auto = zigzag for dense attention without "
        "data.document_mask, else striped",
        ("auto", *LAYOUTS),
    )
    exchange: str = option(
        "how keys and values reach the queries; auto = chosen by bytes, links and memory",
        EXCHANGES,
    )
    ulysses: int | str = option(
        "number of workers that trade tokens for heads (all-to-all) before the rest of the "
        "exchange; auto = all of them with exchange=ulysses, else 1"
    )
    chunks: int | str = option(
        "all_gather: number of head groups, each gathered while the previous one is computed (on "
        "one worker, computed in turn to save memory); auto = chosen by size and memory"
    )
    prefetch: int = option("ring: number of hops posted ahead of the computation")
    circulates: str = option(
        "ring: what circulates in the backward pass; auto = whichever moves fewer bytes",
        ("auto", "kv", "queries"),
    )
    columns: str = option(
        "ring: gather an index's columns once, or compute them in the steps; auto = chosen by cost",
        ("auto", "once", "in_steps"),
    )
    block_size: int = option("tokens per block, the unit of the striped layout")
    timeout_s: float = option("seconds that a collective may take before the run fails")


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """Which query-key pairs are computed. Keys that the pattern does not use are null."""

    pattern: str = option("method that estimates the index", PATTERNS)
    block: int | None = option("tokens per block, the unit in which pairs are chosen")
    dense_steps: int | None = option("number of first training steps that use dense attention")
    last_q: int | None = option(
        "vertical_slash: queries probed per window, spread evenly over whole blocks"
    )
    windows: int | None = option(
        "vertical_slash: number of evenly spaced probe windows, the last at the end of the "
        "sequence; one window probes only the last of several packed documents"
    )
    p_v: float | None = option("vertical_slash: share of the probed attention that columns cover")
    p_s: float | None = option("vertical_slash: share of the probed attention that slashes cover")
    joint: bool | None = option(
        "vertical_slash: choose columns by the attention that the slashes leave uncovered"
    )
    index_per: str | None = option(
        "vertical_slash: group of heads that shares one index", ("query_head", "kv_group")
    )
    sink_tokens: int | None = option("vertical_slash: number of first columns always kept")
    min_columns: int | None = option("vertical_slash: minimum number of columns per head")
    max_columns: int | None = option(
        "vertical_slash: maximum number of columns per head; 0 = no limit"
    )
    min_slashes: int | None = option(
        "vertical_slash: minimum number of slashes per head; 2 or more always keeps the first two"
    )
    max_slashes: int | None = option(
        "vertical_slash: maximum number of slashes per head; 0 = no limit"
    )
    stride: int | None = option("xattention: side of the squares whose antidiagonals are summed")
    threshold: float | None = option(
        "xattention: share of a row's scores that the chosen blocks cover"
    )
    chunk: int | None = option("moba: keys per chunk")
    top_k: int | None = option("moba: number of chunks per query or query block, its own included")
    gate: str | None = option(
        "moba: choose chunks for each query, or for each block of queries", ("query", "block")
    )
    slashes: int | None = option("fixed: number of slashes per head; if given alone, density is 0")
    columns: int | None = option("fixed: number of columns per head")
    density: float | None = option(
        "fixed: share of the causal blocks that slashes fill; 0 = use slashes instead"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    kind: str = option("format of the corpus", ("stdlib", "text", "tokens", "mds"))
    path: str | None = option(
        "file or folder of the corpus; with data.mix, the folder that holds its corpora"
    )
    mix: dict[str, float] | str | None = option(
        "weights of several corpora by folder or file name, {code: 0.3, book: 0.7}, or a YAML file "
        "of such weights; null = one corpus"
    )
    tokenizer: str = option(
        "bytes, the path of a Hugging Face tokenizer.json, or auto = the tokenizer of "
        "train.init_from if it has one, else bytes"
    )
    text_key: str = option("field that holds the text in jsonl and parquet files")
    token_dtype: str = option(
        "tokens: integer type of a .bin file; auto = uint16 if model.vocab_size fits, else uint32",
        ("auto", "uint16", "uint32"),
    )
    document_mask: bool = option("restrict attention to within each packed document")
    shuffle: bool = option("shuffle the documents once, by seed, before packing")
    eval_sequences: int = option(
        "number of sequences held out to evaluate the loss by position; with data.mix "
        "approximate, at least one per corpus; 0 = none"
    )


SCHEDULES = ("cosine", "linear", "wsd", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float | str = option(
        "peak learning rate; auto = 0.256 / model.hidden_size from random weights, 2e-5 with "
        "train.init_from"
    )
    betas: tuple[float, float] = option("AdamW betas")
    eps: float = option("AdamW epsilon")
    weight_decay: float = option("decoupled weight decay, applied to matrices only")
    warmup_steps: int = option("number of steps of linear warm-up; 0 = none")
    schedule: str = option(
        "shape of the learning rate after warm-up; wsd = constant, then linear decay at the end",
        SCHEDULES,
    )
    min_lr_ratio: float = option(
        "final learning rate of cosine, linear and wsd, as a fraction of lr"
    )
    decay_steps: int | str = option(
        "number of decay steps, after warm-up or (wsd) at the end of the schedule; auto = all "
        "steps after warm-up, or (wsd) the last 20 %"
    )
    schedule_steps: int | str = option(
        "length of the schedule in steps; auto = up to train.steps. A resumed run keeps its length "
        "unless you set this key, optim.schedule or optim.decay_steps"
    )
    rewarm: bool | int = option(
        "true, with --resume only: restart the schedule at the checkpoint, warm-up included, and "
        "end it at train.steps; the run stores the step of the restart here"
    )
    clip_norm: float = option("maximum global gradient norm; 0 = no clipping")
    skip_spikes: bool = option(
        "skip the update of a step whose loss or gradient norm is a spike, see run.spike_sigma"
    )
    offload: bool = option(
        "keep float32 weights and AdamW states in host memory and update them there; the GPU keeps "
        "bfloat16 weights"
    )
    offload_gradients: bool = option(
        "with optim.offload: copy each gradient to host memory as soon as it is complete, during "
        "the last micro-batch"
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run: length, batch, arithmetic and memory."""

    steps: int = option("number of optimizer steps")
    global_batch: int = option("sequences per optimizer step over all workers")
    micro_batch: int = option("sequences per forward pass of one context group")
    dtype: str = option(
        "compute dtype; parameters and optimizer states stay float32. auto = bfloat16 on GPUs, "
        "float32 on CPUs",
        DTYPES,
    )
    kernel: str = option(
        "local attention kernel; auto = the first by preference that supports the run", KERNELS
    )
    activation_checkpoint: str = option(
        "what a layer keeps for its backward pass; the rest is recomputed. none = everything; "
        "selective = its input and the attention output; sequence_selective = its input and the "
        "attention output of the last train.checkpoint_keep of each worker's tokens; full = its "
        "input only",
        CHECKPOINTS,
    )
    memory: str = option(
        "manual = use the memory keys as set; auto = choose the fastest combination that fits. "
        "auto changes only keys left at their default, among activation_checkpoint, "
        "checkpoint_keep, keep_mlp, offload_activations, tile_mib, loss_chunk_mib, shard, "
        "optim.offload and optim.offload_gradients",
        MEMORIES,
    )
    shard: str = option(
        "what micro-batches gather and reduce: full = weights and gradients (ZeRO-3); gradients = "
        "gradients only, weights stay whole for the step (ZeRO-2); optimizer = nothing until the "
        "last micro-batch, gradients accumulate whole in float32 (ZeRO-1)",
        SHARDS,
    )
    reduce_dtype: str = option(
        "dtype in which gradients are summed over workers; the sum over micro-batches is always "
        "float32",
        REDUCE_DTYPES,
    )
    checkpoint_keep: float = option(
        "sequence_selective: share of each worker's tokens, the last ones, whose attention is kept"
    )
    offload_activations: bool | int = option(
        "move the activations that layers keep to pinned host memory: true = of all layers, N = of "
        "the first N layers, which wait longest; not with train.activation_checkpoint=none"
    )
    keep_mlp: bool | int = option(
        "keep the MLP's first products instead of recomputing them: true = in all layers, N = in N "
        "layers; costs 4 model.intermediate_size + 2 model.hidden_size bytes per token and layer "
        "in bfloat16"
    )
    tile_mib: int = option(
        "MiB of temporaries in the layer parts after attention (norm, MLP); larger ones are "
        "computed in tiles of the sequence; 0 = no limit"
    )
    compile: bool | str = option(
        "apply torch.compile to the loss and the layer parts around attention; auto = on GPUs only"
    )
    loss_chunk_mib: int = option("MiB of logits that exist at once in the fused LM head and loss")
    loss_gradients: str = option(
        "pass that forms the gradients of the loss; recompute = the backward pass, which "
        "recomputes the logits",
        LOSS_GRADIENTS,
    )
    z_loss: float = option(
        "coefficient of logsumexp^2, added to the gradient but not to the reported loss; 0 = none "
        "(PaLM uses 1e-4)"
    )
    init_from: str | None = option(
        "Hugging Face folder (config.json and safetensors) with the initial weights, which also "
        "gives the model if no model=... is set; null = random weights"
    )
    eval_every: int = option(
        "steps between evaluations on the held-out sequences (data.eval_sequences), besides those "
        "at the start and end of the run; 0 = only at the start and end"
    )
    checkpoint_every: int = option("steps between checkpoints; 0 = only at the end")
    keep_checkpoints: int = option("number of newest checkpoints to keep")
    checkpoint_at_end: bool = option("save a checkpoint when the run ends")
    deterministic: bool = option("use bitwise repeatable kernels, slower on GPUs")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which training steps are recorded."""

    every: int = option(
        "steps between recorded steps, written to profile/ in the run for `mtrain report`; 0 = none"
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes its files, what it prints, and what it does when a worker fails."""

    name: str = option("name of the run; auto = model, seq and time")
    dir: str = option("folder of the run; auto = runs/<name>")
    log_every: int = option("steps between progress lines")
    tensorboard: bool = option("also write TensorBoard events")
    restarts: int | str = option(
        "automatic restarts after the loss of a worker; auto = as long as there is a newer "
        "checkpoint than at the last restart; 0 = never"
    )
    spike_sigma: float = option(
        "warn of a loss or gradient norm this many robust standard deviations above the median of "
        "the last 64 steps; 0 = never"
    )
    straggler: float | str = option(
        "warn of a worker that takes this fraction longer than the others for the same work; "
        "auto = 0.1 on GPUs, 0.5 on CPUs; 0 = never"
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a command needs."""

    seq: int = option("tokens per sequence; 512k = 524288, 1m = 1048576")
    seed: int = option("seed of the initial weights and the data order")
    model: ModelConfig = option("model=...")
    topology: TopologyConfig = option("topology=...")
    sparsity: SparsityConfig = option("sparsity=...")
    data: DataConfig = option("data=...")
    optim: OptimConfig = option("optim=...")
    train: TrainConfig = option("train=...")
    profile: ProfileConfig = option("profile=...")
    run: RunConfig = option("run=...")

    @property
    def layout(self) -> str:
        """``topology.layout``, with auto resolved.

        For dense attention, zigzag balances the work as well as stripes do, and its few large
        rectangles are faster to compute (3 to 7 % of a step on four H200s, profiles/notes.md).
        """
        if self.topology.layout != "auto":
            return self.topology.layout
        return (
            "zigzag"
            if self.sparsity.pattern == "dense" and not self.data.document_mask
            else "striped"
        )


class ConfigError(ValueError):
    """One or more mistakes in a configuration.

    problems: one line each, which names the key, its value and what is allowed.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
