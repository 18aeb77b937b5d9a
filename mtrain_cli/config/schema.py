"""The typed configuration that all code below the command line sees.

One frozen dataclass per Hydra group. A field's ``help`` is what `mtrain config show` prints beside it; ``choices`` are its allowed words.
Nothing here knows Hydra: `compose.py` turns the composed YAML into a `Config`, `validate.py` checks it across fields.
Counts are in tokens, sizes in MiB or GiB where the name says so, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(help: str, choices: tuple[str, ...] = (), **default: Any) -> Any:
    """A dataclass field with the line of help and the allowed words that the command line shows."""
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

# The patterns and the keys of each, beside `pattern` itself.
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
MOST_LINES = (
    1 << 24
)  # lines among which budgets choose: their numbers share an int64 with their mass (`sparsity.pattern.ranking`)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched beyond the length that the model was trained on."""

    theta: float = option("base of the rotary frequencies")
    scaling: str = option("how positions beyond original_max_position are reached", ROPE_SCALINGS)
    factor: float | str = option("stretch; auto = seq / original_max_position, at least 1 (yarn)")
    original_max_position: int = option(
        "tokens the model was first trained on; the YaRN ramp starts from it"
    )
    beta_fast: float = option("YaRN: rotations above which a dimension is left alone")
    beta_slow: float = option("YaRN: rotations below which a dimension is interpolated")
    low_freq_factor: float = option("llama3 scaling only")
    high_freq_factor: float = option("llama3 scaling only")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder."""

    name: str = option("name shown in banners and run names")
    family: str = option("Hugging Face architecture to import from and export to", FAMILIES)
    vocab_size: int = option(
        "rows of the embedding; auto = of train.init_from, else the ids of the data's tokenizer in a multiple of 8"
    )
    hidden_size: int = option("width of the residual stream")
    num_layers: int = option("decoder layers")
    num_heads: int = option("query heads")
    num_kv_heads: int = option("key-value heads; divides num_heads (GQA)")
    head_dim: int = option("width of one head")
    intermediate_size: int = option("width of the SwiGLU MLP")
    qkv_bias: bool = option("bias on the q, k and v projections (Qwen2)")
    qk_norm: bool = option("RMSNorm on q and k per head (Qwen3)")
    tie_word_embeddings: bool = option("LM head shares the embedding's weight")
    rms_norm_eps: float = option("epsilon of RMSNorm")
    init_std: float = option("standard deviation of random initialisation")
    rope: RopeConfig = option("rotary embedding")


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """Workers, and how a sequence is spread over them."""

    device: str = option("where workers compute", ("auto", "cpu", "cuda"))
    workers: int | str = option("processes in all; auto = all GPUs of the job, else 2 on CPU")
    context_parallel: int | str = option("workers that share one sequence; auto = all of them")
    gpu_memory_gib: float | str = option(
        "memory of a GPU that plans and train.memory=auto reckon with; auto = what it has, else H200's"
    )
    host_memory_gib: float | str = option(
        "host memory of each GPU that plans and train.memory=auto reckon with; auto = its share of this machine's, else 128"
    )
    gpus_per_node: int | str = option("workers per (virtual) node; auto = as launched")
    layout: str = option(
        "which worker holds which tokens; auto = zigzag for dense attention without data.document_mask, else striped",
        ("auto", *LAYOUTS),
    )
    exchange: str = option("how keys and values reach the queries", EXCHANGES)
    ulysses: int | str = option(
        "workers that trade tokens for heads before keys move; auto = all of them for exchange=ulysses, else 1"
    )
    chunks: int | str = option(
        "all_gather: parts of the heads, each moved while the one before is computed; on one worker just computed one by one"
    )
    prefetch: int = option("ring: hops posted ahead of the computation")
    circulates: str = option(
        "ring: what travels in the backward pass; auto = what is fewer bytes",
        ("auto", "kv", "queries"),
    )
    columns: str = option(
        "ring: single columns of an index, gathered once or left to the steps",
        ("auto", "once", "in_steps"),
    )
    block_size: int = option("tokens per block, the unit of striping")
    timeout_s: float = option("seconds a collective may take before the run ends with an error")


@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """Which query-key pairs are computed. A key that the pattern does not have is null."""

    pattern: str = option("how the index is estimated", PATTERNS)
    block: int | None = option("tokens of a block, the unit in which pairs are chosen")
    dense_steps: int | None = option("first steps of a run that compute every pair")
    last_q: int | None = option(
        "vertical_slash: queries of a window that are probed, spread evenly over whole blocks"
    )
    windows: int | None = option(
        "vertical_slash: windows, evenly spread; the last one ends the sequence. With packed documents one probes the last of them alone"
    )
    p_v: float | None = option("vertical_slash: share of the probed attention that columns hold")
    p_s: float | None = option(
        "vertical_slash: share of the probed attention that block diagonals hold"
    )
    joint: bool | None = option(
        "vertical_slash: columns count only what lies outside the chosen diagonals"
    )
    index_per: str | None = option(
        "vertical_slash: heads that share an index", ("query_head", "kv_group")
    )
    sink_tokens: int | None = option("vertical_slash: first columns that are always kept")
    min_columns: int | None = option("vertical_slash: fewest columns a head")
    max_columns: int | None = option("vertical_slash: most columns a head; 0 = any number")
    min_slashes: int | None = option(
        "vertical_slash: fewest block diagonals a head; from 2 on, the first two are always kept"
    )
    max_slashes: int | None = option("vertical_slash: most block diagonals a head; 0 = any number")
    stride: int | None = option("xattention: side of the squares whose antidiagonals are summed")
    threshold: float | None = option("xattention: share of a row's scores that its blocks hold")
    chunk: int | None = option("moba: keys of a chunk")
    top_k: int | None = option(
        "moba: chunks that a query (or block of queries) sees, its own included"
    )
    gate: str | None = option(
        "moba: who chooses chunks, every query by itself or the queries of a block together",
        ("query", "block"),
    )
    slashes: int | None = option("fixed: block diagonals a head; given alone, density is 0")
    columns: int | None = option("fixed: columns a head")
    density: float | None = option(
        "fixed: share of the causal blocks that diagonals fill, unless slashes is given"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    kind: str = option("reader of the corpus", ("stdlib", "text", "tokens", "mds"))
    path: str | None = option(
        "file or folder of the corpus; with mix, the folder that holds its corpora"
    )
    mix: dict[str, float] | str | None = option(
        "weights of several corpora by folder or file, {code: 0.3, book: 0.7}, or a YAML file of them"
    )
    tokenizer: str = option(
        "bytes, the path of a Hugging Face tokenizer.json, or auto: that of train.init_from where it has one, else bytes"
    )
    text_key: str = option("column or key that holds the text in jsonl and parquet")
    token_dtype: str = option(
        "tokens: numbers in a .bin; auto = uint16 if model.vocab_size fits",
        ("auto", "uint16", "uint32"),
    )
    document_mask: bool = option("attention stays inside each packed document")
    shuffle: bool = option("shuffle documents once, by seed, before packing")
    eval_sequences: int = option(
        "sequences held out of training, for losses by position; with mix about as many, at least one of each corpus"
    )


SCHEDULES = ("cosine", "linear", "wsd", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float | str = option(
        "peak learning rate; auto = 0.256 / hidden_size from random weights, 2e-5 from train.init_from"
    )
    betas: tuple[float, float] = option("AdamW betas")
    eps: float = option("AdamW epsilon")
    weight_decay: float = option("decoupled weight decay, on matrices only")
    warmup_steps: int = option("steps of linear warm-up")
    schedule: str = option(
        "learning rate after warm-up; wsd: constant, then linear at the end", SCHEDULES
    )
    min_lr_ratio: float = option("cosine, linear and wsd end at lr * min_lr_ratio")
    decay_steps: int | str = option(
        "steps over which the rate falls, behind the warm-up or for wsd at the end; then it stays. auto = all behind the warm-up, of wsd "
        "the last 20 %"
    )
    schedule_steps: int | str = option(
        "steps that the schedule spans; auto = to train.steps. A resume with other train.steps keeps the number, unless it gives this key, "
        "optim.schedule or optim.decay_steps"
    )
    rewarm: bool | int = option(
        "true, with --resume: the schedule begins anew at the checkpoint, warm-up included, and spans the steps to train.steps; the run "
        "keeps that step here"
    )
    clip_norm: float = option("global gradient norm is clipped to this; 0 = never")
    skip_spikes: bool = option(
        "leave out the update of a step whose loss or gradient norm is a spike, see run.spike_sigma"
    )
    offload: bool = option(
        "float32 weights and AdamW states stay in host memory and are stepped there; the GPU keeps bfloat16 weights"
    )
    offload_gradients: bool = option(
        "with optim.offload: gradients leave for host memory as they come, those of several micro-batches with the last one"
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run: how long, how much at once, and with which arithmetic."""

    steps: int = option("optimizer steps")
    global_batch: int = option("sequences per optimizer step, whatever the number of workers")
    micro_batch: int = option("sequences per forward pass on one context group")
    dtype: str = option(
        "compute dtype; parameters and optimizer states stay float32. auto = bfloat16 on GPU, float32 on CPU",
        DTYPES,
    )
    kernel: str = option("local attention implementation", KERNELS)
    activation_checkpoint: str = option(
        "what a layer keeps for its backward pass; all but none keep its input: selective also the attention output of every token, "
        "sequence_selective that of the last train.checkpoint_keep of each worker's tokens, full no more; the rest is recomputed",
        CHECKPOINTS,
    )
    memory: str = option(
        "manual = as its keys say; auto = the fastest setting that fits, of those of these keys that have their default value: "
        "activation_checkpoint, checkpoint_keep, keep_mlp, offload_activations, tile_mib, loss_chunk_mib, shard, optim.offload, "
        "optim.offload_gradients",
        MEMORIES,
    )
    shard: str = option(
        "what is gathered anew or reduced in each micro-batch: full = weights and gradients (ZeRO-3), gradients = gradients alone, weights "
        "stay whole for the step (ZeRO-2), optimizer = nothing before the last one, gradients add up whole in float32 (ZeRO-1)",
        SHARDS,
    )
    reduce_dtype: str = option(
        "in what gradients are added up over workers; over micro-batches always in float32",
        REDUCE_DTYPES,
    )
    checkpoint_keep: float = option(
        "sequence_selective: share of the tokens, the last ones, whose attention is not computed twice"
    )
    offload_activations: bool | int = option(
        "what layers keep waits in pinned host memory: true = of all of them, a number = of so many, the first ones, which wait longest; "
        "not with train.activation_checkpoint=none"
    )
    keep_mlp: bool | int = option(
        "the first products of the MLP stay for the backward pass and are not computed twice: true = of all layers, a number = of so many; "
        "4 model.intermediate_size + 2 model.hidden_size bytes a token and layer in bfloat16"
    )
    tile_mib: int = option(
        "MiB of temporaries after attention (norm, MLP), more are computed in tiles of the sequence; 0 = no bound"
    )
    compile: bool | str = option(
        "torch.compile the parts of a layer around attention and the loss; auto = on GPUs"
    )
    loss_chunk_mib: int = option("MiB of logits that exist at once in the fused LM head and loss")
    loss_gradients: str = option(
        "when the loss forms its gradients; recompute = in backward, from logits computed again",
        LOSS_GRADIENTS,
    )
    z_loss: float = option(
        "coefficient of logsumexp^2, added to the gradient and not to the loss that is shown; 0 = none, PaLM has 1e-4"
    )
    init_from: str | None = option(
        "Hugging Face folder (config.json and safetensors) to start from, which gives the model where no model=... does; "
        "none = random initialisation"
    )
    eval_every: int = option(
        "steps between evaluations of data.eval_sequences, which is done at both ends in any case; 0 = there alone"
    )
    checkpoint_every: int = option("steps between checkpoints; 0 = only at the end")
    keep_checkpoints: int = option("newest checkpoints that stay")
    checkpoint_at_end: bool = option("save when the run ends")
    deterministic: bool = option("bitwise repeatable kernels, slower on GPU")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Recorded steps of a training."""

    every: int = option(
        "record every N-th step, in profile/ of the run, for `mtrain report`; 0 = none"
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run leaves its files, what it shows, and what it does when a worker is lost."""

    name: str = option("name of the run; auto = model, seq and time")
    dir: str = option("folder of this run; auto = runs/<name>")
    log_every: int = option("steps between lines of progress")
    tensorboard: bool = option("also write TensorBoard events")
    restarts: int | str = option(
        "times that a run which lost a worker begins again by itself; auto = whenever there is a newer checkpoint than at the last restart"
    )
    spike_sigma: float = option(
        "warn of a loss or gradient norm so many robust standard deviations above the median of the last 64 steps; 0 = never"
    )
    straggler: float | str = option(
        "warn of a worker that takes this share longer than the others for the same work; auto = 0.1 on GPUs, 0.5 on CPUs; 0 = never"
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a command needs. ``seq`` is in tokens."""

    seq: int = option("tokens per sequence; 512k = 524288, 1m = 1048576")
    seed: int = option("seed of initialisation and data order")
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
        """``topology.layout``, or what its auto means. Where every query sees all earlier tokens, zigzag divides the work as evenly as
        stripes do, in few large rectangles, which kernels compute faster (3 to 7 % of a step on four H200s, profiles/notes.md).
        """
        if self.topology.layout != "auto":
            return self.topology.layout
        return (
            "zigzag"
            if self.sparsity.pattern == "dense" and not self.data.document_mask
            else "striped"
        )


class ConfigError(ValueError):
    """One or more mistakes in a configuration, each a full line that names key, value and what is allowed."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
