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
from mtrain_cli.config.mask_settings import MaskSettings
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
from mtrain_cli.config.pattern_settings import SPARSE_KINDS, PatternSettings
from mtrain_cli.config.plugins import callbacks_expected, data_kinds, data_kinds_expected
from mtrain_cli.config.problem import ConfigError as ConfigError

# Ranges and upper limits that several keys share. Each limit has a reason, which messages show.
_OVERFLOW = (100, "products in bfloat16 would overflow or lose all precision")
_SEQUENCES = (10**6, "mtrain keeps a list of them")
_MIB = (2**20, "1 TiB")
_TEXT = at_least(2).up_to(*TOKENS_OF_SEQ)
_WORKERS = POSITIVE.up_to(2**14, "planning takes time for every worker")
_HEADS = POSITIVE.up_to(65_535, "the limit of a CUDA grid")
_STAGES = POSITIVE.up_to(10_000, "the maximum of model.num_layers")
_PARTS = Range("must be auto or a whole number from 0 to 16", lambda value: 0 <= value <= 16)
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
FP8S = ("none", "mlp", "all")
FP8_ALIGNMENT = 16  # widths of fp8 products on a GPU are multiples
CHECKPOINTS = ("none", "selective", "sequence_selective", "full")
LOSS_GRADIENTS = ("forward", "recompute")
PERPLEXITY, NIAH = EVAL_TASKS = ("perplexity", "niah")
FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral")
TRANSFORMERS = "transformers"
ROPE_SCALINGS = ("none", "yarn", "llama3")
_RATIO = ABOVE_ZERO.up_to(10**6, "float32 would round the smaller terms away")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, and its scaling beyond the length of the original training.

    theta: base of the rotary frequencies
    scaling: method that extends the model beyond original_max_position
    factor: yarn: extended / original length; auto = seq / original_max_position, at least 1
    original_max_position: tokens per sequence in the model's original training
    beta_fast: yarn: dimensions with more turns within original_max_position stay unscaled
    beta_slow: yarn: dimensions with fewer turns are interpolated
    low_freq_factor: llama3: wavelengths above original_max_position / this are fully scaled
    high_freq_factor: llama3: wavelengths below original_max_position / this stay unscaled
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
    score: softmax = over all experts; sigmoid = of each expert alone
    normalize: divide the scores of a token's chosen experts by their sum
    scale: factor of the chosen experts' scores
    dense_layers: number of first layers with one MLP of model.intermediate_size instead of experts
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
    family: Hugging Face architecture for import and export; transformers = the model of
        train.init_from=FOLDER in the code of transformers (docs/library.md)
    vocab_size: rows of the embedding; auto = from train.init_from, else of the data's tokenizer,
        rounded up to a multiple of 8
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
    family: str = option((*FAMILIES, TRANSFORMERS))
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

    @property
    def is_foreign(self) -> bool:
        """Whether transformers computes the model. The keys then give only what attention needs."""
        return self.family == TRANSFORMERS

    def require_own(self) -> None:
        """Raise ConfigError for a model of transformers."""
        if self.is_foreign:
            known = "`mtrain train` and `mtrain checkpoint export`"
            raise ConfigError(f"model.family={TRANSFORMERS}: works with {known} only")

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
    cluster: cluster that plans and `mtrain simulate` assume without a GPU: a name in conf/cluster
        or the path of such a YAML file; auto = one host of H200s
    workers: number of workers; auto = all GPUs of the job, or 2 on a CPU
    context_parallel: workers that share one sequence; auto = all that tensor_parallel and
        pipeline_parallel leave
    tensor_parallel: workers that share each layer's heads and MLP, with sequence parallelism; must
        divide both numbers of heads, model.intermediate_size and the workers of a node
    tensor_chunks: chunks of tokens after attention, whose messages overlap with other chunks; auto
        = up to 4, by size
    expert_parallel: workers over which the experts of a layer are dealt; must divide
        model.moe.experts and the workers of a stage; auto = the fastest by predicted time
    expert_chunks: chunks of tokens in which experts compute; more need less memory, but more passes
        over the weights; auto = what train.tile_mib needs, and 2 if 64K tokens share dealt experts
    pipeline_parallel: number of stages, which hold different layers
    schedule: order of a pipeline's passes: gpipe = all forward first; 1f1b = in turn; interleaved =
        1f1b with several virtual stages per worker; auto = by virtual_stages
    virtual_stages: separate parts of the model in each stage (interleaved); more idle less and send
        more messages
    stage_layers: layers of each (virtual) stage, such as [9,9,9,8]; auto = by their cost
    gpu_memory_gib: memory of each GPU in plans and train.memory=auto; auto = read from the GPU, or
        an H200's
    host_memory_gib: host memory per GPU in plans and train.memory=auto; auto = an equal share of
        this machine's memory, or 128 without a GPU
    gpus_per_node: workers per node; a smaller number than a host's divides it into virtual nodes;
        auto = as launched
    layout: which worker holds which tokens; balanced = assigned per batch from its masks; auto =
        zigzag for dense attention without data.document_mask, else striped; balanced where cheaper
    exchange: how keys and values reach the queries; auto = chosen by bytes, links and memory
    ulysses: workers in a group that trades tokens for heads (all-to-all), before the groups
        exchange keys and values; auto = all with exchange=ulysses, else 1
    chunks: all_gather and group_cast: groups of heads, each gathered while the previous one
        computes; auto = by size and memory
    stages: group_cast: parts in which received keys are computed, after own keys and while later
        parts travel; 0 = compute when all keys are there; auto = by predicted time
    stages_backward: group_cast: the same in backward, whose gradients return part by part
    prefetch: ring: number of hops that run ahead of the computation
    circulates: ring: what circulates in the backward pass; auto = whichever needs fewer bytes
    columns: ring: once = gather the keys of the index's columns once; in_steps = compute columns in
        the ring steps; auto = chosen by cost
    gradient_dtype: dtype in which gradients of keys and queries travel; sums stay in float32
    block_size: tokens per block, the unit of the striped layout
    balanced_chunk: tokens per chunk, the unit of the balanced layout; auto = by a worker's tokens
    timeout_s: time that a collective may take before the run fails
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
    stages: int | str = option(_PARTS)
    stages_backward: int | str = option(_PARTS)
    prefetch: int = option(_WORKERS)
    circulates: str = option(("auto", "kv", "queries"))
    columns: str = option(("auto", "once", "in_steps"))
    gradient_dtype: str = option(("float32", "bfloat16"))
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
    path: file or folder of the corpus, or its URL; with data.mix, the folder with its corpora
    mix: weights of corpora by folder or file name, such as {code: 0.3, book: 0.7}, or a YAML file
        of them; null = one corpus
    tokenizer: bytes, the path of a Hugging Face tokenizer.json, or auto = the tokenizer of
        train.init_from if it has one, else bytes
    bos: start each document with the tokenizer's begin token; auto = if its post-processor adds
        one. A token store was prepared with `mtrain data prepare --bos`
    text_key: text: key or column of the text in .jsonl, .json and .parquet files
    token_dtype: tokens: integers of a .bin file; auto = uint16 if the vocabulary fits
    mask_key: tokens: column with each document's mask, a list of slices; null = none
    positions_key: tokens: column with each token's rotary position; null = as in the sequence
    messages_key: chat: key or column of the messages of a conversation
    tools_key: chat: key or column of the tools that it may call
    chat_template: chat: a Jinja file; auto = the template in the folder of data.tokenizer
    train_on: chat: messages that the loss counts: assistant, last = the last of these, or all. A
        message with train: true or false decides for itself
    train_on_end: chat: require a special token at the end of each message that the loss counts
    too_long: a conversation of more than seq tokens: error, skip, or truncate_left = keep its end
    on_error: chat: stop at a record that cannot be read, or skip and count it
    verify: bytes to compare with their checksums: sampled = some of each file; full = all; auto =
        all of less than 256m tokens and at a resume, else sampled
    document_mask: keep attention inside each packed document
    shuffle: shuffle the documents once, by seed, before packing
    eval_sequences: sequences held out of training, to evaluate the loss by position; 0 = none. Each
        corpus of data.mix holds out its share, at least one
    """

    kind: str = option(data_kinds, expected=data_kinds_expected)
    path: str | None = option()
    mix: dict[str, float] | str | None = option()
    tokenizer: str = option()
    bos: bool | str = option()
    text_key: str = option()
    token_dtype: str = option(("auto", "uint16", "uint32"))
    mask_key: str | None = option()
    positions_key: str | None = option()
    messages_key: str = option()
    tools_key: str = option()
    chat_template: str = option()
    train_on: str = option(("assistant", "last", "all"))
    train_on_end: bool = option()
    too_long: str = option(("error", "skip", "truncate_left"))
    on_error: str = option(("stop", "skip"))
    verify: str = option(("auto", "sampled", "full"))
    document_mask: bool = option()
    shuffle: bool = option()
    eval_sequences: int = option(NOT_NEGATIVE.up_to(*_SEQUENCES))


SCHEDULES = ("cosine", "linear", "wsd", "constant")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and the schedule of its learning rate.

    lr: peak learning rate; auto = 2e-4 for adapters, 2e-5 with train.init_from, otherwise
        0.256 / model.hidden_size
    betas: beta1 and beta2 of AdamW
    eps: epsilon of AdamW
    weight_decay: decoupled weight decay, applied to matrices only
    warmup_steps: number of steps of linear warm-up; 0 = none
    schedule: shape of the learning rate after warm-up; wsd = constant, then linear decay at the end
    min_lr_ratio: final learning rate of cosine, linear and wsd, as a fraction of lr
    decay_steps: steps over which the rate falls; auto = all after warm-up, or (wsd) the last 20 %
    schedule_steps: length of the schedule; auto = up to train.steps. A resumed run keeps its length
        unless you set this key, optim.schedule or optim.decay_steps
    rewarm: with --resume only: true = restart the schedule at the checkpoint, with a new warm-up;
        the run then stores that step in this key
    clip_norm: maximum global gradient norm; 0 = no clipping
    skip_spikes: skip the update of a step whose loss or gradient norm is a spike (run.spike_sigma)
    offload: keep float32 weights and AdamW states in host memory, and run AdamW on the host
    offload_gradients: with optim.offload: copy each gradient to host memory when it is complete
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
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685), the only weights that train. model.family=transformers.

    rank: rank of each adapter; 0 = no adapters, all weights train
    alpha: the product of an adapter counts alpha / rank times
    targets: names of the linear layers with adapters, such as [q_proj,v_proj]; auto = all of them
    quantize: bits of the other weights of linear layers: none = train.dtype; nf4 = 4 (QLoRA,
        arXiv:2305.14314), whole on each worker
    """

    rank: int = option(_WIDTH)
    alpha: float = option(ABOVE_ZERO.up_to(2**22, "the limit of train.lora.rank"))
    targets: tuple[str, ...] | str = option(expected="auto, or a list such as [q_proj,v_proj]")
    quantize: str = option(("none", "nf4"))


_SPIKES = Range(
    "must be at least 3 (below 3, ordinary steps count as spikes)", lambda value: value >= 3
)


@dataclass(frozen=True, kw_only=True)
class RollbackConfig:
    """Going back to the last checkpoint, and on without the data since, when the loss spikes.

    limit: most rollbacks of a run, which then stops; 0 = never go back
    sigma: robust standard deviations of a spike above the median of the last 64 steps; a loss or
        gradient that is not finite is a spike, too
    """

    limit: int = option(NOT_NEGATIVE)
    sigma: float = option(_SPIKES)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch, arithmetic and memory of a run, and its checkpoints.

    steps: number of optimizer steps
    epochs: passes over the data, which then give train.steps; null = train.steps counts
    global_batch: number of sequences per optimizer step, over all workers
    micro_batch: number of sequences per forward pass of one context group
    dtype: compute dtype, while parameters and optimizer states stay float32; auto = bfloat16 on
        GPUs, float32 on CPUs
    fp8: matrix products in fp8 (e4m3), but not the gradients of weights: none; mlp = gate, up and
        down, which backward then recomputes in every layer without keep_mlp; all = also q, k, v and
        o; needs bfloat16 and, on a GPU, compute capability 8.9 (docs/benchmarks.md)
    kernel: local attention kernel; auto = the fastest kernel that supports the run
    activation_checkpoint: what a layer keeps for its backward pass: none = everything; selective =
        its input and the attention output; sequence_selective = that output of only the last
        train.checkpoint_keep of a worker's tokens; full = its input only
    memory: auto = choose the fastest memory keys that fit, among those with their default value:
        activation_checkpoint, checkpoint_keep, keep_mlp, offload_activations, tile_mib,
        loss_chunk_mib, shard, optim.offload and optim.offload_gradients
    shard: what a micro-batch communicates: full = weights and gradients (ZeRO-3); gradients =
        gradients (ZeRO-2); optimizer = nothing before the last micro-batch (ZeRO-1)
    reduce_dtype: dtype in which gradients are summed over workers; over micro-batches, float32
    checkpoint_keep: sequence_selective: share of a worker's tokens, from the last one on
    offload_activations: move the activations that layers keep to pinned host memory: true = of all
        layers; N = of the first N layers; not with train.activation_checkpoint=none
    keep_mlp: keep the MLP's gate and up outputs: true = in all layers; N = in the last N layers
    tile_mib: maximum MiB of temporary tensors in the norm and MLP of a layer, which compute larger
        ones in tiles of the sequence; 0 = no limit
    compile: apply torch.compile to the loss and to layers around attention; auto = on GPUs only
    loss_chunk_mib: maximum MiB of logits at a time, in the fused LM head and loss
    loss_gradients: form the loss's gradients with the loss, or in the backward pass (recompute)
    z_loss: coefficient of logsumexp^2, added to the gradient but not to the reported loss; 0 = none
        (PaLM uses 1e-4)
    balance_loss: experts: coefficient of the loss that balances the experts of a layer within each
        sequence, added to the gradient only; auto = 0.001; 0 = none
    router_z_loss: experts: coefficient of the mean logsumexp^2 of a router's scores, added to the
        gradient only; 0 = none (ST-MoE uses 0.001)
    balance_bias: experts: step of a bias in the router's choice, up for experts with few tokens,
        else down; 0 = none (DeepSeek-V3: 0.001)
    init_from: Hugging Face folder, or org/name@revision on the Hub, with the initial weights, and
        the model if no model=... is set; null = random weights
    eval_every: steps between evaluations on the held-out sequences and of train.eval_tasks, besides
        those at the start and end; 0 = none
    eval_tasks: tasks of `mtrain eval` to measure during training: perplexity, niah
    callbacks: callbacks of other installed packages that follow the run (docs/extending.md)
    checkpoint_every: number of steps between checkpoints; 0 = only at the end
    keep_checkpoints: number of newest checkpoints to keep
    keep_every: number of steps between checkpoints that also stay for good; 0 = keep none
    checkpoint_at_end: save a checkpoint when the run ends
    skip_nonfinite: most steps in a row whose update is left out because a loss or gradient is not
        finite; 0 = such a step stops the run, or rolls it back
    deterministic: use bitwise repeatable kernels, which are slower on GPUs
    """

    steps: int = option(POSITIVE.up_to(*STEPS))
    epochs: float | None = option(ABOVE_ZERO)
    global_batch: int = option(POSITIVE.up_to(*_SEQUENCES))
    micro_batch: int = option(_HEADS)
    dtype: str = option(DTYPES)
    fp8: str = option(FP8S)
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
    keep_every: int = option(_STEPS_OR_0)
    checkpoint_at_end: bool = option()
    skip_nonfinite: int = option(_STEPS_OR_0)
    deterministic: bool = option()
    rollback: RollbackConfig
    lora: LoraConfig


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Samples of the tasks that train.eval_tasks names. The keys are options of `mtrain eval`, too.

    length: tokens of a sample, or a list of lengths; auto = seq
    samples: number of samples of each task and length
    """

    length: tuple[int, ...] | int | str = option(
        _TEXT,
        tokens=True,
        expected="auto, a number of tokens such as 8k, or a list such as [8k,64k]",
    )
    samples: int = option(POSITIVE.up_to(*_SEQUENCES))

    def lengths(self, seq: int) -> tuple[int, ...]:
        """Return the lengths of samples. seq: tokens of a training sequence."""
        if isinstance(self.length, str):
            return (seq,)
        given = (self.length,) if isinstance(self.length, int) else self.length
        return tuple(dict.fromkeys(given))


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which training steps are recorded.

    every: steps from one recorded step to the next, for `mtrain report`; 0 = record none
    """

    every: int = option(_STEPS_OR_0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes its files, what it prints, and what it does when a worker fails.

    name: name of the run; auto = model, seq and time
    dir: folder of the run; auto = runs/<name>
    log_every: number of steps between progress lines
    loggers: trackers that follow the run: tensorboard, wandb, mlflow, trackio, or another package's
    project: name of the project, or MLflow's experiment, in these trackers
    remote: URL of a folder, such as s3://bucket/runs, that gets a copy of the run while it trains;
        a run that is missing here resumes from it; null = none
    restarts: most automatic restarts after the loss of a worker; auto = while each finds a newer
        checkpoint than the one before; 0 = never restart
    spike_sigma: warn of a loss or gradient norm this many robust standard deviations above the
        median of the last 64 steps; 0 = never
    straggler: warn of a worker that takes longer than the others for the same work by this fraction
        or more; auto = 0.1 on GPUs, 0.5 on CPUs; 0 = never
    leave_out_stragglers: restart a job without the nodes of such workers, if the run fits those
        that are left
    """

    name: str = option()
    dir: str = option()
    log_every: int = option(POSITIVE.up_to(*STEPS))
    loggers: tuple[str, ...] = option(expected="a list of trackers such as [wandb,tensorboard]")
    project: str = option()
    remote: str | None = option()
    restarts: int | str = option(at_least(0, "must be auto or a whole number, 0 or more"))
    spike_sigma: float = option(
        Range(f"must be 0, or {_SPIKES.rule[8:]}", lambda value: value == 0 or value >= 3)
    )
    straggler: float | str = option(at_least(0, "must be auto or a number, 0 or more"))
    leave_out_stragglers: bool = option()


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
    def layer_kinds(self) -> dict[str, list[int]]:
        """The layers by `SPARSE_KINDS` or `mask_settings.LAYER_KINDS`; by "" if all are alike."""
        layers = self.model.num_layers
        if not (dense := self.sparsity.dense_of(layers)):
            return self.mask.layer_kinds(layers)
        return dict(zip(SPARSE_KINDS, (self.pattern_layers, sorted(dense)), strict=True))

    @property
    def pattern_layers(self) -> list[int]:
        """The layers that ``sparsity.dense_layers`` leaves to the pattern."""
        dense = self.sparsity.dense_of(self.model.num_layers)
        return [layer for layer in range(self.model.num_layers) if layer not in dense]

    @property
    def of_worker(self) -> Config:
        """The configuration with the part of the model that one worker's layers compute."""
        degree = self.topology.tensor_parallel
        return self if degree == 1 else replace(self, model=self.model.part(degree))

    def changed(self, **groups: Mapping[str, Any]) -> Config:
        """Return a copy with other values, such as ``changed(topology={"workers": 8})``."""
        new = {name: replace(getattr(self, name), **values) for name, values in groups.items()}
        return replace(self, **new)
