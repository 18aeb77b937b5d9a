"""The typed configuration that all code below the command line receives.

Each Hydra group is one frozen dataclass. Each key is a field made by `option`, with its help and
its allowed values. This module does not import Hydra: `composition/compose.py` turns the composed
YAML into a `Config`, and `validate.py` looks for conflicts between keys. If a key has a unit, its
name ends in the unit: _mib, _gib or _s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, ClassVar

from mtrain_cli.config.exchanges import exchange_names
from mtrain_cli.config.mask_settings import LAYER_KINDS, MaskSettings
from mtrain_cli.config.option import (
    ABOVE_ZERO,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    STEPS,
    TABLE_OF_POSITIONS,
    TOKENS_OF_SEQ,
    Range,
    at_least,
    option,
)
from mtrain_cli.config.pattern_settings import PatternSettings
from mtrain_cli.config.plugins import callbacks_expected
from mtrain_cli.config.problem import ConfigError as ConfigError

# Ranges and upper limits that several keys share. Each limit has a reason, which messages show.
_OVERFLOW = (100, "products in bfloat16 would overflow or lose all precision")
_SEQUENCES = (10**6, "mtrain keeps a list of them")
_MIB = (2**20, "1 TiB")
_TEXT = at_least(2).up_to(*TOKENS_OF_SEQ)
_WORKERS = POSITIVE.up_to(2**14, "planning takes time for every worker")
_HEADS = POSITIVE.up_to(65_535, "the limit of a CUDA grid")
_STAGES = POSITIVE.up_to(10_000, "the maximum of model.num_layers")
_GIB = ABOVE_ZERO.up_to(2**20, "1 PiB")
_EPSILON = ABOVE_ZERO.up_to(1, "more would outweigh the values that it protects from 0")
_STEPS_OR_0 = NOT_NEGATIVE.up_to(*STEPS)
_LAYERS = at_least(0, "must be true, false or a number of layers, 0 or more")
MIN_BLOCK = 16  # one tensor-core tile; smaller blocks would only enlarge the index
# The time to plan a balanced layout grows with the square of the number of chunks: 4 s for 4,096.
MOST_CHUNKS = 4096
MOST_CHUNKS_PER_WORKER = 32  # of auto; more would cut a shard into small pieces

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
PIPELINE_SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved")
KERNELS = ("auto", "reference", "sdpa", "triton", "flash4")
DTYPES = ("auto", "float32", "bfloat16")
MEMORIES = ("manual", "auto")
SHARDS = ("full", "gradients", "optimizer")
REDUCE_DTYPES = ("float32", "bfloat16")
CHECKPOINTS = ("none", "selective", "sequence_selective", "full")
LOSS_GRADIENTS = ("forward", "recompute")
SENTENCES, PYTHON = NEEDLE_FORMS = ("sentences", "python")
PERPLEXITY, NIAH = EVAL_TASKS = ("perplexity", "niah")
FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral")
ROPE_SCALINGS = ("none", "yarn", "llama3")
_RATIO = ABOVE_ZERO.up_to(10**6, "float32 would round the smaller terms away")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, and its scaling beyond the length of the original training.

    theta: base of the rotary frequencies
    scaling: method that extends the model to positions beyond original_max_position
    factor: extended length divided by original_max_position; auto = seq / original_max_position, at
        least 1 (yarn only)
    original_max_position: number of tokens per sequence in the model's original training; YaRN
        scales from this length
    beta_fast: yarn: dimensions that make more turns than this within original_max_position stay
        unscaled
    beta_slow: yarn: dimensions that make fewer turns than this within original_max_position are
        interpolated
    low_freq_factor: llama3: wavelengths above original_max_position / low_freq_factor are fully
        scaled
    high_freq_factor: llama3: wavelengths below original_max_position / high_freq_factor stay
        unscaled
    """

    theta: float = option(
        Range("must be above 1", lambda value: value > 1).up_to(1e12, "angles are in float32")
    )
    scaling: str = option(ROPE_SCALINGS)
    factor: float | str = option(
        at_least(1, "must be auto or a number of at least 1").up_to(*TOKENS_OF_SEQ)
    )
    original_max_position: int = option(POSITIVE.up_to(*TABLE_OF_POSITIONS), tokens=True)
    beta_fast: float = option(_RATIO)
    beta_slow: float = option(_RATIO)
    low_freq_factor: float = option(_RATIO)
    high_freq_factor: float = option(_RATIO)


SOFTMAX, SIGMOID = SCORES = ("softmax", "sigmoid")
_EXPERTS = NOT_NEGATIVE.up_to(65_536, "a router has a score for each of them")
_WIDTH = NOT_NEGATIVE.up_to(2**22, "ten times the widest model known")


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The experts of each layer: small MLPs, of which a router chooses a few for each token.

    experts: number of experts per layer; 0 = a dense model, which has one MLP per layer
    top_k: number of experts that compute each token
    expert_size: width of an expert's SwiGLU MLP
    shared_size: width of one more MLP, which computes all tokens; 0 = none
    score: score of an expert: softmax = over all experts; sigmoid = of each expert alone
    normalize: divide the scores of a token's chosen experts by their sum
    scale: factor of the chosen experts' scores
    dense_layers: number of layers at the start of the model that have an MLP of
        model.intermediate_size instead of experts
    """

    experts: int = option(_EXPERTS, default=0)
    top_k: int = option(_EXPERTS, default=0)
    expert_size: int = option(_WIDTH, default=0)
    shared_size: int = option(_WIDTH, default=0)
    score: str = option(SCORES, default=SOFTMAX)
    normalize: bool = option(default=True)
    scale: float = option(ABOVE_ZERO.up_to(10**6, "float32 would overflow"), default=1.0)
    dense_layers: int = option(
        NOT_NEGATIVE.up_to(10_000, "the maximum of model.num_layers"), default=0
    )


DENSE = MoeConfig()
# {key: value} of a model without experts. Files of models may leave these keys out.
DENSE_KEYS: dict[str, Any] = {
    f"model.moe.{item.name}": getattr(DENSE, item.name) for item in fields(MoeConfig)
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder.

    name: name of the model in banners and run names
    family: Hugging Face architecture for import and export
    vocab_size: number of rows of the embedding; auto = from train.init_from, else the vocabulary
        size of the data's tokenizer, rounded up to a multiple of 8
    hidden_size: width of the residual stream
    num_layers: number of decoder layers
    num_heads: number of query heads
    num_kv_heads: number of key-value heads (GQA); must divide num_heads
    head_dim: width of one head
    intermediate_size: width of the SwiGLU MLP
    qkv_bias: add a bias to the q, k and v projections (Qwen2)
    qk_norm: apply RMSNorm to q and k per head (Qwen3)
    tie_word_embeddings: share one weight between the embedding and the LM head
    rms_norm_eps: epsilon of RMSNorm
    init_std: standard deviation of the random initial weights
    """

    # The keys that trained weights determine. The others (rotary settings, name, init_std) can
    # change without new weights.
    SHAPE: ClassVar[tuple[str, ...]] = (
        "family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
        "head_dim", "intermediate_size", "qkv_bias", "qk_norm", "tie_word_embeddings",
        "rms_norm_eps", *(key.removeprefix("model.") for key in DENSE_KEYS),
    )  # fmt: skip

    name: str = option()
    family: str = option(FAMILIES)
    vocab_size: int = option(at_least(2).up_to(2**31 - 1, "token ids are 32-bit numbers"))
    hidden_size: int = option(POSITIVE.up_to(2**20, "ten times the widest model known"))
    num_layers: int = option(POSITIVE.up_to(10_000, "ten times the deepest model known"))
    num_heads: int = option(_HEADS)
    num_kv_heads: int = option(_HEADS)
    head_dim: int = option(POSITIVE.up_to(4096, "no kernel takes wider heads"))
    intermediate_size: int = option(POSITIVE.up_to(2**22, "ten times the widest model known"))
    qkv_bias: bool = option()
    qk_norm: bool = option()
    tie_word_embeddings: bool = option()
    rms_norm_eps: float = option(_EPSILON)
    init_std: float = option(ABOVE_ZERO.up_to(*_OVERFLOW))
    rope: RopeConfig
    moe: MoeConfig = DENSE

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts instead of one MLP. layer: number of the layer."""
        return self.moe.experts > 0 and layer >= self.moe.dense_layers

    @property
    def expert_layers(self) -> int:
        """Number of layers that have experts."""
        return max(0, self.num_layers - self.moe.dense_layers) if self.moe.experts else 0

    def part(self, degree: int) -> ModelConfig:
        """Return the model with an equal part of the heads and of the MLP's width.

        degree: number of parts, which divides the numbers of heads and the width.
        """
        return replace(
            self,
            num_heads=self.num_heads // degree,
            num_kv_heads=self.num_kv_heads // degree,
            intermediate_size=self.intermediate_size // degree,
        )

    def shape_differences(self, other: ModelConfig) -> list[tuple[str, Any, Any]]:
        """Return (key, own value, value of ``other``) for each shape key that differs."""
        pairs = ((name, *map(attrgetter(name), (self, other))) for name in self.SHAPE)
        return [(f"model.{name}", ours, theirs) for name, ours, theirs in pairs if ours != theirs]


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """The workers, and how they share a sequence.

    device: device type of the workers; auto = cuda if a GPU is usable, else cpu
    cluster: cluster that plans and `mtrain simulate` assume without a GPU: a name in conf/cluster,
        or the path of such a YAML file; auto = one host of H200s
    workers: number of workers; auto = all GPUs of the job, or 2 on a CPU
    context_parallel: number of workers that share one sequence; auto = all workers, divided by
        tensor_parallel and pipeline_parallel
    tensor_parallel: number of workers that share each layer's heads and MLP, with sequence
        parallelism; must divide model.num_heads, model.num_kv_heads, model.intermediate_size and
        the workers of a node
    tensor_chunks: tensor_parallel: number of chunks of tokens in which a layer computes its part
        after attention; the messages of a chunk overlap with other chunks; auto = up to 4, by size
    expert_parallel: number of workers over which the experts of each layer are dealt; must divide
        model.moe.experts and the workers of a stage; auto = the degree with the shortest predicted
        time; with train.memory=auto, the fastest together with the memory keys
    expert_chunks: number of chunks of tokens in which experts are computed; more chunks need less
        memory, but more passes over the weights; auto = what train.tile_mib needs, and with
        expert_parallel up to 4 if a worker holds too few experts to compute them in parts
    pipeline_parallel: number of stages, which hold different layers
    schedule: pipeline_parallel: order of forward and backward passes; gpipe = all forward passes
        first; 1f1b = in turn; interleaved = as 1f1b, with several virtual stages per worker; auto =
        interleaved with virtual_stages above 1, else 1f1b
    virtual_stages: pipeline_parallel: number of separate parts of the model that each stage holds
        (schedule=interleaved); more parts idle less and send more messages
    stage_layers: pipeline_parallel: number of layers of each (virtual) stage, such as [9,9,9,8];
        auto = by the cost of the layers and of the LM head
    gpu_memory_gib: memory of each GPU, for plans and train.memory=auto; auto = read from the GPU,
        or an H200's if there is no GPU
    host_memory_gib: host memory per GPU, for plans and train.memory=auto; auto = an equal share of
        this machine's memory, or 128 if there is no GPU
    gpus_per_node: number of workers per node; if a host has more workers, this number divides the
        host into virtual nodes; auto = as launched
    layout: which worker holds which tokens; balanced = assigned per batch from its masks; auto =
        zigzag for dense attention without data.document_mask, else striped; balanced for masks
        with which it costs less
    exchange: how keys and values reach the queries; auto = chosen by bytes, links and memory
    ulysses: number of workers in a group that trades tokens for heads (all-to-all); the groups then
        exchange keys and values; auto = all workers with exchange=ulysses, else 1
    chunks: all_gather and group_cast: number of groups of heads; each group is gathered while the
        previous one is computed; auto = chosen by size and memory
    stages: group_cast: 1 = compute when all keys have arrived; 2 = a worker's own keys while others
        travel; 3 = hierarchical_group_cast: own keys, keys of the node, then the others; auto = for
        dense attention the fastest by more than 2 %, by predicted times; else 1
    prefetch: ring: number of hops that run ahead of the computation
    circulates: ring: what circulates in the backward pass: keys and values, or queries; auto =
        whichever needs fewer bytes
    columns: ring: once = gather the keys of the index's columns once; in_steps = compute columns in
        the ring steps; auto = chosen by cost
    block_size: number of tokens per block, the unit of the striped layout
    balanced_chunk: number of tokens per chunk, the unit of the balanced layout; auto = by the
        tokens of a worker
    timeout_s: time in seconds that a collective may take before the run fails
    """

    device: str = option(("auto", "cpu", "cuda"))
    cluster: str = option()
    workers: int | str = option(_WORKERS)
    context_parallel: int | str = option(_WORKERS)
    tensor_parallel: int = option(_WORKERS)
    tensor_chunks: int | str = option(_HEADS)
    expert_parallel: int | str = option(_WORKERS)
    expert_chunks: int | str = option(_HEADS)
    pipeline_parallel: int = option(_WORKERS)
    schedule: str = option(PIPELINE_SCHEDULES)
    virtual_stages: int = option(_STAGES)
    stage_layers: tuple[int, ...] | str = option(
        expected="auto, or a list of whole numbers such as [9,9,9,8]"
    )
    gpu_memory_gib: float | str = option(_GIB)
    host_memory_gib: float | str = option(_GIB)
    gpus_per_node: int | str = option(_WORKERS)
    layout: str = option(("auto", *LAYOUTS))
    exchange: str = option(exchange_names)
    ulysses: int | str = option(_WORKERS)
    chunks: int | str = option(_HEADS)
    stages: int | str = option(Range("must be 1, 2 or 3", lambda value: value in (1, 2, 3)))
    prefetch: int = option(_WORKERS)
    circulates: str = option(("auto", "kv", "queries"))
    columns: str = option(("auto", "once", "in_steps"))
    block_size: int = option(
        Range(
            f"must be a power of two, at least {MIN_BLOCK}",
            lambda value: value >= MIN_BLOCK and int(value) & (int(value) - 1) == 0,
        ).up_to(*TOKENS_OF_SEQ),
        tokens=True,
    )
    balanced_chunk: int | str = option(
        Range(
            f"must be a multiple of {MIN_BLOCK}, at least {MIN_BLOCK}",
            lambda value: value >= MIN_BLOCK and value % MIN_BLOCK == 0,
        ).up_to(*TOKENS_OF_SEQ),
        tokens=True,
    )
    timeout_s: float = option(
        at_least(1, "must be at least 1 second, or collectives time out while workers start").up_to(
            2 * 10**6, "23 days; NCCL counts milliseconds in 32 bits"
        )
    )

    @property
    def context_workers(self) -> int | str:
        """Number of workers of a context group; ``auto`` if it depends on the machine."""
        if isinstance(self.context_parallel, int) or not isinstance(self.workers, int):
            return self.context_parallel
        sharing = self.tensor_parallel * self.pipeline_parallel
        # Another error names a degree below 1.
        return max(1, self.workers // sharing) if sharing > 0 else self.context_parallel

    @property
    def chunk(self) -> int | None:
        """``topology.balanced_chunk``; None for auto."""
        return self.balanced_chunk if isinstance(self.balanced_chunk, int) else None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus, its tokenizer, and how its documents are packed.

    kind: format of the corpus
    path: file or folder of the corpus; with data.mix, the folder that holds its corpora
    mix: weights of several corpora by folder or file name, such as {code: 0.3, book: 0.7}, or a
        YAML file of them; null = one corpus
    tokenizer: bytes, the path of a Hugging Face tokenizer.json, or auto = the tokenizer of
        train.init_from if it has one, else bytes
    bos: whether each document starts with the begin token of the tokenizer; auto = if its
        post-processor adds one. A token store was prepared with `mtrain data prepare --bos`
    text_key: text: key or column that holds the text in .jsonl, .json and .parquet files
    token_dtype: tokens: integer type of a .bin file; auto = uint16 if model.vocab_size fits, else
        uint32
    mask_key: tokens: column with the mask of each document as a list of slices, which
        `mtrain data prepare --mask-key` keeps; null = none
    positions_key: tokens: column with the rotary position of each token, which
        `mtrain data prepare --positions-key` keeps; null = the positions in the sequence
    verify: bytes to compare with their checksums: sampled = a sample of each file, in milliseconds;
        full = all; auto = all when you resume a run or the data have less than 256m tokens, else
        a sample
    document_mask: keep attention inside each packed document
    shuffle: shuffle the documents once, by seed, before packing
    eval_sequences: number of sequences held out of training, to evaluate the loss by position; 0 =
        none. With data.mix, each corpus holds out its share, but at least one sequence
    """

    kind: str = option(("stdlib", "text", "tokens", "mds"))
    path: str | None = option()
    mix: dict[str, float] | str | None = option()
    tokenizer: str = option()
    bos: bool | str = option()
    text_key: str = option()
    token_dtype: str = option(("auto", "uint16", "uint32"))
    mask_key: str | None = option()
    positions_key: str | None = option()
    verify: str = option(("auto", "sampled", "full"))
    document_mask: bool = option()
    shuffle: bool = option()
    eval_sequences: int = option(NOT_NEGATIVE.up_to(*_SEQUENCES))


SCHEDULES = ("cosine", "linear", "wsd", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and the schedule of its learning rate.

    lr: peak learning rate; auto = 2e-5 with train.init_from, otherwise 0.256 / model.hidden_size
    betas: beta1 and beta2 of AdamW
    eps: epsilon of AdamW
    weight_decay: decoupled weight decay, applied to matrices only
    warmup_steps: number of steps of linear warm-up; 0 = none
    schedule: shape of the learning rate after warm-up; wsd = constant, then linear decay at the end
    min_lr_ratio: final learning rate of cosine, linear and wsd, as a fraction of lr
    decay_steps: number of steps over which the learning rate falls; auto = all steps after warm-up,
        or (wsd) the last 20 %
    schedule_steps: length of the schedule; auto = up to train.steps. A resumed run keeps its length
        unless you set this key, optim.schedule or optim.decay_steps
    rewarm: with --resume only: true = restart the schedule at the checkpoint, with a new warm-up,
        and end it at train.steps. The run then stores the step of the restart in this key
    clip_norm: maximum global gradient norm; 0 = no clipping
    skip_spikes: skip the update of a step whose loss or gradient norm is a spike (run.spike_sigma)
    offload: keep float32 weights and AdamW states in host memory, and run AdamW on the host; the
        GPU keeps bfloat16 weights
    offload_gradients: with optim.offload: copy each gradient to host memory as soon as it is
        complete, during the last micro-batch
    """

    lr: float | str = option(ABOVE_ZERO.up_to(*_OVERFLOW))
    betas: tuple[float, float] = option()
    eps: float = option(_EPSILON)
    weight_decay: float = option(NOT_NEGATIVE.up_to(*_OVERFLOW))
    warmup_steps: int = option(_STEPS_OR_0)
    schedule: str = option(SCHEDULES)
    min_lr_ratio: float = option(FRACTION)
    decay_steps: int | str = option(POSITIVE)
    schedule_steps: int | str = option(POSITIVE)
    rewarm: bool | int = option(at_least(0, "must be true or false"))
    clip_norm: float = option(NOT_NEGATIVE.up_to(1e12, "to turn clipping off, give 0"))
    skip_spikes: bool = option()
    offload: bool = option()
    offload_gradients: bool = option()


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch, arithmetic and memory of a run, and its checkpoints.

    steps: number of optimizer steps
    global_batch: number of sequences per optimizer step, over all workers
    micro_batch: number of sequences per forward pass of one context group
    dtype: compute dtype; parameters and optimizer states stay float32. auto = bfloat16 on GPUs,
        float32 on CPUs
    kernel: local attention kernel; auto = the fastest kernel that supports the run
    activation_checkpoint: what a layer keeps for its backward pass; the rest is recomputed. none =
        everything; selective = its input and the attention output; sequence_selective = the
        attention output of only the last train.checkpoint_keep of each worker's tokens; full = its
        input only
    memory: manual = use the memory keys as they are; auto = choose the fastest combination that
        fits, and change only memory keys with their default value. The memory keys:
        activation_checkpoint, checkpoint_keep, keep_mlp, offload_activations, tile_mib,
        loss_chunk_mib, shard, optim.offload and optim.offload_gradients
    shard: what each micro-batch communicates: full = gathers weights and reduces gradients
        (ZeRO-3); gradients = reduces gradients, while weights stay whole (ZeRO-2); optimizer =
        nothing before the last micro-batch, while gradients accumulate whole in float32 (ZeRO-1)
    reduce_dtype: dtype in which gradients are summed over workers. Over micro-batches, they are
        always summed in float32
    checkpoint_keep: with activation_checkpoint=sequence_selective: fraction of each worker's
        tokens, counted from the last token, whose attention output is kept
    offload_activations: move the activations that layers keep to pinned host memory: true = of all
        layers; N = of the first N layers; not with train.activation_checkpoint=none
    keep_mlp: keep the MLP's gate and up outputs instead of recomputing them: true = in all layers;
        N = in the last N layers
    tile_mib: maximum MiB of temporary tensors in the parts of a layer after attention (norm, MLP).
        A part that needs more is computed in tiles of the sequence; 0 = no limit
    compile: apply torch.compile to the loss and to the parts of a layer around attention; auto = on
        GPUs only
    loss_chunk_mib: maximum MiB of logits in memory at a time, in the fused LM head and loss
    loss_gradients: when to form the gradients of the loss: forward = together with the loss;
        recompute = in the backward pass, from recomputed logits
    z_loss: coefficient of logsumexp^2, added to the gradient but not to the reported loss; 0 = none
        (PaLM uses 1e-4)
    balance_loss: experts: coefficient of the loss that balances the experts of a layer within each
        sequence, added to the gradient only; auto = 0.001; 0 = none
    router_z_loss: experts: coefficient of the mean logsumexp^2 of a router's scores, added to the
        gradient only; 0 = none (ST-MoE uses 0.001)
    balance_bias: experts: step by which each update changes a bias per expert that only affects the
        router's choice, up for experts with few tokens, else down; 0 = none (DeepSeek-V3: 0.001)
    init_from: Hugging Face folder (config.json and safetensors) with the initial weights, which
        also gives the model if no model=... is set; null = random weights
    eval_every: number of steps between evaluations on the held-out sequences and of
        train.eval_tasks, besides those at the start and end of the run; 0 = none
    eval_tasks: tasks of `mtrain eval` to measure during training: perplexity, niah
    callbacks: callbacks of other installed packages that follow the run (docs/extending.md)
    checkpoint_every: number of steps between checkpoints; 0 = only at the end
    keep_checkpoints: number of newest checkpoints to keep
    checkpoint_at_end: save a checkpoint when the run ends
    deterministic: use bitwise repeatable kernels, which are slower on GPUs
    """

    steps: int = option(POSITIVE.up_to(*STEPS))
    global_batch: int = option(POSITIVE.up_to(*_SEQUENCES))
    micro_batch: int = option(_HEADS)
    dtype: str = option(DTYPES)
    kernel: str = option(KERNELS)
    activation_checkpoint: str = option(CHECKPOINTS)
    memory: str = option(MEMORIES)
    shard: str = option(SHARDS)
    reduce_dtype: str = option(REDUCE_DTYPES)
    checkpoint_keep: float = option(FRACTION)
    offload_activations: bool | int = option(_LAYERS)
    keep_mlp: bool | int = option(_LAYERS)
    tile_mib: int = option(NOT_NEGATIVE.up_to(*_MIB))
    compile: bool | str = option()
    loss_chunk_mib: int = option(POSITIVE.up_to(*_MIB))
    loss_gradients: str = option(LOSS_GRADIENTS)
    z_loss: float = option(NOT_NEGATIVE.up_to(*_OVERFLOW))
    balance_loss: float | str = option(
        at_least(0, "must be auto or a number, 0 or more").up_to(*_OVERFLOW)
    )
    router_z_loss: float = option(NOT_NEGATIVE.up_to(*_OVERFLOW))
    balance_bias: float = option(NOT_NEGATIVE.up_to(*_OVERFLOW))
    init_from: str | None = option()
    eval_every: int = option(_STEPS_OR_0)
    eval_tasks: tuple[str, ...] = option(expected="a list of tasks such as [niah,perplexity]")
    callbacks: tuple[str, ...] = option(expected=callbacks_expected)
    checkpoint_every: int = option(_STEPS_OR_0)
    keep_checkpoints: int = option(POSITIVE)
    checkpoint_at_end: bool = option()
    deterministic: bool = option()


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Samples of the tasks that train.eval_tasks names. The keys are options of `mtrain eval`, too.

    length: tokens of a sample, or a list of lengths; auto = seq
    samples: number of samples of each task and length
    form: niah: sentences, or python = the lines of `mtrain data needles`
    haystack: niah: file or folder of the text around the needles; stdlib = Python's own sources
    needles: niah: number of needles in each sequence
    chains: niah: share of the questions that follow a link; form=python only
    seed: niah: determines names, numbers and places
    """

    length: tuple[int, ...] | int | str = option(
        _TEXT,
        tokens=True,
        expected="auto, a number of tokens such as 8k, or a list such as [8k,64k]",
    )
    samples: int = option(POSITIVE.up_to(*_SEQUENCES))
    form: str = option(NEEDLE_FORMS)
    haystack: str = option()
    needles: int = option(POSITIVE.up_to(2048, "the maximum of `mtrain eval niah`"))
    chains: float = option(FRACTION)
    seed: int = option(NOT_NEGATIVE)

    def lengths(self, seq: int) -> tuple[int, ...]:
        """Return the lengths of samples. seq: tokens of a training sequence."""
        if isinstance(self.length, str):
            return (seq,)
        given = (self.length,) if isinstance(self.length, int) else self.length
        return tuple(dict.fromkeys(given))


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which training steps are recorded.

    every: number of steps from one recorded step to the next; 0 = record no steps. The records go
        to the run's folder profile/, for `mtrain report`
    """

    every: int = option(_STEPS_OR_0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes its files, what it prints, and what it does when a worker fails.

    name: name of the run; auto = model, seq and time
    dir: folder of the run; auto = runs/<name>
    log_every: number of steps between progress lines
    tensorboard: also write TensorBoard events
    restarts: maximum number of automatic restarts after the loss of a worker; auto = no limit while
        each restart finds a newer checkpoint than the previous restart; 0 = never restart
    spike_sigma: warn of a spike: a loss or gradient norm that is this many robust standard
        deviations above the median of the last 64 steps; 0 = never
    straggler: warn of a straggler: a worker that takes longer than the others for the same work by
        this fraction or more; auto = 0.1 on GPUs, 0.5 on CPUs; 0 = never
    """

    name: str = option()
    dir: str = option()
    log_every: int = option(POSITIVE.up_to(*STEPS))
    tensorboard: bool = option()
    restarts: int | str = option(at_least(0, "must be auto or a whole number, 0 or more"))
    spike_sigma: float = option(
        Range(
            "must be 0, or at least 3 (below 3, ordinary steps count as spikes)",
            lambda value: value == 0 or value >= 3,
        )
    )
    straggler: float | str = option(at_least(0, "must be auto or a number, 0 or more"))


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration: one attribute per group, and the keys that belong to no group.

    seq: number of tokens per sequence; 512k = 524288, 1m = 1048576
    seed: seed of the initial weights and of the data order
    """

    seq: int = option(
        at_least(2, "must be at least 2 (a token and the next one, to predict)").up_to(
            *TABLE_OF_POSITIONS
        ),
        tokens=True,
    )
    seed: int = option(Range("must be between 0 and 2^63 - 1", lambda value: 0 <= value < 2**63))
    model: ModelConfig
    topology: TopologyConfig
    mask: MaskSettings
    sparsity: PatternSettings
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    eval: EvalConfig
    profile: ProfileConfig
    run: RunConfig

    @property
    def layout(self) -> str:
        """``topology.layout``, or the layout that auto stands for.

        For dense attention, zigzag balances as well as striped, and its few large rectangles are
        faster: a step on four H200s takes 3 to 7 % less time (profiles/notes.md).
        """
        if self.topology.layout != "auto":
            return self.topology.layout
        is_even = self.sparsity.pattern == "dense" and not self.data.document_mask
        return "zigzag" if is_even else "striped"

    @property
    def of_worker(self) -> Config:
        """The configuration with the part of the model that one worker's layers compute."""
        degree = self.topology.tensor_parallel
        return self if degree == 1 else replace(self, model=self.model.part(degree))

    def changed(self, **groups: Mapping[str, Any]) -> Config:
        """Return a copy with other values, such as ``changed(topology={"workers": 8})``."""
        new = {name: replace(getattr(self, name), **values) for name, values in groups.items()}
        return replace(self, **new)


# The kinds of layers under `sparsity.dense_layers`.
SPARSE_KINDS = ("sparse", "dense")
EVERY_KIND = (*LAYER_KINDS, *SPARSE_KINDS)


def layer_kinds(config: Config) -> dict[str, list[int]]:
    """Return the numbers of the layers of each kind.

    The keys are `LAYER_KINDS` or `SPARSE_KINDS`, or "" if all layers are alike.
    """
    layers = config.model.num_layers
    dense = config.sparsity.dense_of(layers)
    if not dense:
        return config.mask.layer_kinds(layers)
    sparse = [layer for layer in range(layers) if layer not in dense]
    return dict(zip(SPARSE_KINDS, (sparse, sorted(dense)), strict=True))


def last_layers(config: Config) -> str:
    """Return ``the last 2 layers``: those that are dense in a sparse model; "" without any."""
    number = config.sparsity.dense_layers or 0
    if number < 2:
        return "the last layer" * number
    return f"the last {number} layers"
