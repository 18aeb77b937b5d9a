"""Checks across the fields of a configuration that need no GPU, process group or model.

`launch/environment.py` checks whether sizes fit the GPUs at hand; the kernel registry, whether
a kernel supports the request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mtrain_cli.config import keys
from mtrain_cli.config.schema import (
    CHECKPOINTS,
    MOST_LINES,
    PATTERN_KEYS,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    SparsityConfig,
    TopologyConfig,
    TrainConfig,
)
from mtrain_cli.config.sizes import format_size

BYTE_VOCABULARY = 264  # 256 bytes, begin, end and padding, rounded up to a multiple of 8
TEXT = "a .txt, .md, .py, .jsonl or .parquet file, or a folder of them"
_INPUTS = {
    "text": TEXT,
    "tokens": "the output of `mtrain data prepare`, or a .npy or .bin of token ids",
    "mds": "a folder of MDS shards with an index.json",
}
_MANIFESTS = {"tokens": "meta.json", "mds": "index.json"}  # file that each kind of folder must hold
BLOCKS = (16, 32, 64, 128)  # sizes that a dynamic index may have
MIN_BLOCK = 16  # one tensor-core tile; smaller blocks would only enlarge the index
BLOCKS = (16, 32, 64, 128)  # of a dynamic index
MIN_BLOCK = 16  # one tensor-core tile; smaller blocks would only cost index


def problems(config: Config) -> list[str]:
    """Return every conflict in ``config``, one line ``key=value: reason`` each."""
    ranges = list(_ranges(config))
    if any(_beyond(name, value) for name, value in keys.values(config).items()):
        return ranges  # the checks below loop up to some of these numbers
    return [
        *ranges,
        *_model(config.model),
        *_topology(config.topology),
        *_blocks(config),
        *_sparsity(config.sparsity, config.seq),
        *_batch(config.train, config.topology),
        *_data(config.data, config.model),
        *_optim(config),
        *_train(config.train, config.topology),
        *_offload(config.train, config.model.num_layers),
        *_gradients(config.optim),
        *_evaluation(config),
        *_run(config),
    ]


_POSITIVE = ("must be at least 1", lambda value: value >= 1)
_ABOVE_ZERO = ("must be above 0", lambda value: value > 0)
_NOT_NEGATIVE = ("must be 0 or more", lambda value: value >= 0)
_SHARE = ("must be above 0 and at most 1", lambda value: 0 < value <= 1)
_LINES = ("must be between 0 and 2^31 - 1", lambda value: 0 <= value < 2**31)
_FRACTION = ("must be between 0 and 1", lambda value: 0 <= value <= 1)

# Allowed range of each number. Words (auto) and null are not checked here.
_RANGE: dict[str, tuple[str, Callable[[float], bool]]] = {
    "seq": ("must be at least 2, a token and the one to predict", lambda value: value >= 2),
    "seed": ("must be between 0 and 2^63 - 1", lambda value: 0 <= value < 2**63),
    "model.vocab_size": ("must be at least 2", lambda value: value >= 2),
    "model.hidden_size": _POSITIVE,
    "model.num_layers": _POSITIVE,
    "model.num_heads": _POSITIVE,
    "model.num_kv_heads": _POSITIVE,
    "model.head_dim": _POSITIVE,
    "model.intermediate_size": _POSITIVE,
    "model.rms_norm_eps": _ABOVE_ZERO,
    "model.init_std": _ABOVE_ZERO,
    "model.rope.theta": ("must be above 1", lambda value: value > 1),
    "model.rope.factor": ("must be auto or a number of at least 1", lambda value: value >= 1),
    "model.rope.original_max_position": _POSITIVE,
    "model.rope.beta_fast": _ABOVE_ZERO,
    "model.rope.beta_slow": _ABOVE_ZERO,
    "model.rope.low_freq_factor": _ABOVE_ZERO,
    "model.rope.high_freq_factor": _ABOVE_ZERO,
    "topology.workers": _POSITIVE,
    "topology.context_parallel": _POSITIVE,
    "topology.gpus_per_node": _POSITIVE,
    "topology.gpu_memory_gib": _ABOVE_ZERO,
    "topology.host_memory_gib": _ABOVE_ZERO,
    "topology.ulysses": _POSITIVE,
    "topology.chunks": _POSITIVE,
    "topology.prefetch": _POSITIVE,
    "topology.block_size": (
        f"must be a power of two, at least {MIN_BLOCK}",
        lambda value: value >= MIN_BLOCK and int(value) & (int(value) - 1) == 0,
    ),
    "topology.timeout_s": (
        "must be at least 1 second, or the workers give each other up while they start",
        lambda value: value >= 1,
    ),
    "sparsity.block": (
        "must be 16, 32, 64 or 128",
        lambda value: value in BLOCKS,
    ),
    "sparsity.dense_steps": _NOT_NEGATIVE,
    "sparsity.last_q": _POSITIVE,
    "sparsity.windows": _POSITIVE,
    "sparsity.p_v": _SHARE,
    "sparsity.p_s": _SHARE,
    "sparsity.sink_tokens": _LINES,
    "sparsity.min_columns": _LINES,
    "sparsity.max_columns": _NOT_NEGATIVE,
    "sparsity.min_slashes": ("must be between 1 and 2^31 - 1", lambda value: 1 <= value < 2**31),
    "sparsity.max_slashes": _NOT_NEGATIVE,
    "sparsity.stride": _POSITIVE,
    "sparsity.threshold": _SHARE,
    "sparsity.chunk": _POSITIVE,
    "sparsity.top_k": _POSITIVE,
    "sparsity.slashes": _NOT_NEGATIVE,
    "sparsity.columns": _NOT_NEGATIVE,
    "sparsity.density": _FRACTION,
    "optim.lr": _ABOVE_ZERO,
    "optim.eps": _ABOVE_ZERO,
    "optim.weight_decay": _NOT_NEGATIVE,
    "optim.warmup_steps": _NOT_NEGATIVE,
    "optim.min_lr_ratio": _FRACTION,
    "optim.decay_steps": _POSITIVE,
    "optim.schedule_steps": _POSITIVE,
    "optim.rewarm": ("must be true or false", lambda value: value >= 0),
    "optim.clip_norm": _NOT_NEGATIVE,
    "train.steps": _POSITIVE,
    "train.global_batch": _POSITIVE,
    "train.micro_batch": _POSITIVE,
    "train.checkpoint_keep": _FRACTION,
    "train.offload_activations": (
        "must be true, false or a number of layers, 0 or more",
        lambda value: value >= 0,
    ),
    "train.keep_mlp": (
        "must be true, false or a number of layers, 0 or more",
        lambda value: value >= 0,
    ),
    "train.tile_mib": _NOT_NEGATIVE,
    "train.loss_chunk_mib": _POSITIVE,
    "train.eval_every": _NOT_NEGATIVE,
    "train.z_loss": _NOT_NEGATIVE,
    "train.checkpoint_every": _NOT_NEGATIVE,
    "data.eval_sequences": _NOT_NEGATIVE,
    "train.keep_checkpoints": _POSITIVE,
    "profile.every": _NOT_NEGATIVE,
    "run.log_every": _POSITIVE,
    "run.restarts": ("must be auto or a whole number, 0 or more", lambda value: value >= 0),
    "run.spike_sigma": (
        "must be 0 or at least 3: below 3, ordinary steps count as spikes",
        lambda value: value == 0 or value >= 3,
    ),
    "run.straggler": ("must be auto or a number, 0 or more", lambda value: value >= 0),
}


@dataclass(frozen=True)
class UpperLimit:
    """The largest allowed value of a number, and why no run needs a larger one."""

    value: float
    reason: str

    def text(self, key: str) -> str:
        shown = format_size(int(self.value)) if key in keys.TOKEN_COUNTS else f"{self.value:,.0f}"
        return f"at most {shown} ({self.reason})"


MOST_TOKENS = UpperLimit(
    2**26, "a plan and a batch hold a table of all positions, 0.5 GiB at this length"
)
MOST_STEPS = UpperLimit(10**9, "a year at 30 steps a second")
MOST_WORKERS = UpperLimit(2**14, "a plan visits every worker")
_HEADS = UpperLimit(65_535, "a GPU kernel's grid has no more places for heads")
_SEQUENCES = UpperLimit(10**6, "every sequence is listed")
_GIB = UpperLimit(2**20, "1 PiB")
_MIB = UpperLimit(2**20, "1 TiB")
_OVERFLOW = UpperLimit(100, "products in bfloat16 would overflow or lose all precision")
_RATIO = UpperLimit(10**6, "float32 would round smaller terms away")
_FEW_LINES = UpperLimit(2**31 - 1, "an index numbers its columns and slashes in 32 bits")
_VAST = 2.0**100  # a power of two, since some keys require one
_OTHERS = UpperLimit(10**9, "no run has more")

# Upper limits for keys whose range above has none. Larger values overflow or keep a plan busy for
# hours.
_MOST: dict[str, UpperLimit] = {
    "seq": MOST_TOKENS,
    "model.vocab_size": UpperLimit(2**31 - 1, "token ids are 32-bit numbers"),
    "model.hidden_size": UpperLimit(2**20, "ten times the widest model known"),
    "model.intermediate_size": UpperLimit(2**22, "ten times the widest model known"),
    "model.num_layers": UpperLimit(10_000, "ten times the deepest model known"),
    "model.num_heads": _HEADS,
    "model.num_kv_heads": _HEADS,
    "model.head_dim": UpperLimit(4096, "no kernel takes wider heads"),
    "model.rms_norm_eps": UpperLimit(1, "it would outweigh the values it protects from 0"),
    "model.init_std": _OVERFLOW,
    "model.rope.theta": UpperLimit(1e12, "angles are float32"),
    "model.rope.factor": UpperLimit(MOST_TOKENS.value, "seq has no more tokens"),
    "model.rope.original_max_position": MOST_TOKENS,
    "model.rope.beta_fast": _RATIO,
    "model.rope.beta_slow": _RATIO,
    "model.rope.low_freq_factor": _RATIO,
    "model.rope.high_freq_factor": _RATIO,
    "topology.workers": MOST_WORKERS,
    "topology.context_parallel": MOST_WORKERS,
    "topology.gpus_per_node": MOST_WORKERS,
    "topology.ulysses": MOST_WORKERS,
    "topology.prefetch": MOST_WORKERS,
    "topology.chunks": _HEADS,
    "topology.gpu_memory_gib": _GIB,
    "topology.host_memory_gib": _GIB,
    "topology.block_size": UpperLimit(MOST_TOKENS.value, "seq has no more tokens"),
    "topology.timeout_s": UpperLimit(2 * 10**6, "23 days; NCCL counts milliseconds in 32 bits"),
    "sparsity.dense_steps": MOST_STEPS,
    "sparsity.last_q": UpperLimit(MOST_TOKENS.value, "seq has no more tokens"),
    "sparsity.windows": UpperLimit(MOST_TOKENS.value, "seq has no more tokens"),
    "sparsity.max_columns": _FEW_LINES,
    "sparsity.max_slashes": _FEW_LINES,
    "sparsity.stride": UpperLimit(max(BLOCKS), "no block is larger"),
    "sparsity.chunk": UpperLimit(MOST_TOKENS.value, "seq has no more tokens"),
    "sparsity.top_k": UpperLimit(MOST_TOKENS.value, "seq has no more chunks"),
    "sparsity.slashes": _FEW_LINES,
    "sparsity.columns": _FEW_LINES,
    "data.eval_sequences": _SEQUENCES,
    "optim.lr": _OVERFLOW,
    "optim.eps": UpperLimit(1, "it would outweigh the values it protects from 0"),
    "optim.weight_decay": _OVERFLOW,
    "optim.warmup_steps": MOST_STEPS,
    "optim.clip_norm": UpperLimit(1e12, "0 turns clipping off"),
    "train.steps": MOST_STEPS,
    "train.global_batch": _SEQUENCES,
    "train.micro_batch": _HEADS,
    "train.tile_mib": _MIB,
    "train.loss_chunk_mib": _MIB,
    "train.z_loss": _OVERFLOW,
    "train.eval_every": MOST_STEPS,
    "train.checkpoint_every": MOST_STEPS,
    "profile.every": MOST_STEPS,
    "run.log_every": MOST_STEPS,
}


def upper_limit(name: str) -> UpperLimit | None:
    """Return a number's upper limit, or None if its range already has one."""
    return _MOST.get(name, _OTHERS) if name in _RANGE and _RANGE[name][1](_VAST) else None


def allowed(key: keys.ConfigKey) -> str:
    """Return what a key allows, including the range of numbers, for `mtrain config show`."""
    # Null only says that the pattern lacks the key.
    kind = key.allowed.removesuffix(" or null") if key.name.startswith("sparsity.") else key.allowed
    if key.name not in _RANGE:
        return kind
    reason = _RANGE[key.name][0].removeprefix("must be ")
    least = reason if reason.startswith("auto") else f"{kind}, {reason}"
    bound = upper_limit(key.name)
    return least if bound is None else f"{least}, {bound.text(key.name)}"


def out_of_range(name: str, value: object) -> str | None:
    """Return what is wrong with a number, worded to follow ``key=value: ``.

    None if it is in range or not a number.
    """
    if name not in _RANGE or not isinstance(value, int | float):
        return None
    problem, fits = _RANGE[name]
    if not fits(value):
        return problem
    bound = upper_limit(name)
    return f"must be {bound.text(name)}" if bound is not None and _beyond(name, value) else None


def _beyond(name: str, value: object) -> bool:
    bound = upper_limit(name)
    return bound is not None and isinstance(value, int | float) and value > bound.value


def _ranges(config: Config) -> Iterator[str]:
    for name, value in keys.values(config).items():
        if (problem := out_of_range(name, value)) is not None:
            yield f"{name}={keys.show(value)}: {problem}"


def _model(model: ModelConfig) -> Iterator[str]:
    heads, kv_heads, rope = model.num_heads, model.num_kv_heads, model.rope
    if heads >= 1 and kv_heads >= 1 and heads % kv_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield (
            f"model.num_kv_heads={kv_heads}: does not divide model.num_heads={heads}; "
            f"allowed: {divisors}"
        )
    if model.head_dim % 2:
        yield (
            f"model.head_dim={model.head_dim}: must be even, since the rotary embedding rotates "
            "pairs of dimensions"
        )
    if rope.scaling == "yarn" and rope.beta_fast <= rope.beta_slow:
        yield (
            f"model.rope.beta_fast={rope.beta_fast}: must be above "
            f"model.rope.beta_slow={rope.beta_slow}"
        )
    if rope.scaling == "llama3":
        if rope.factor == "auto":
            yield (
                "model.rope.factor=auto: is derived for scaling=yarn only; "
                "model.rope.scaling=llama3 needs a number such as 8"
            )
        if rope.high_freq_factor <= rope.low_freq_factor:
            low, high = rope.low_freq_factor, rope.high_freq_factor
            yield (
                f"model.rope.high_freq_factor={high}: must be above "
                f"model.rope.low_freq_factor={low}"
            )


def _topology(topology: TopologyConfig) -> Iterator[str]:
    workers, context, node = topology.workers, topology.context_parallel, topology.gpus_per_node
    numbers = {"workers": workers, "context_parallel": context, "gpus_per_node": node}
    if any(isinstance(value, int) and value < 1 for value in numbers.values()):
        return
    for name in ("context_parallel", "gpus_per_node"):
        value = numbers[name]
        if isinstance(workers, int) and isinstance(value, int) and workers % value:
            divisors = ", ".join(str(n) for n in range(1, workers + 1) if workers % n == 0)
            yield (
                f"topology.{name}={value}: does not divide topology.workers={workers}; "
                f"allowed: auto, {divisors}"
            )
    if isinstance(context, int) and isinstance(node, int) and context % node and node % context:
        yield (
            f"topology.context_parallel={context}: must divide topology.gpus_per_node={node} or be "
            "a multiple of it, so that a context group shares a node evenly or fills whole nodes"
        )


def _blocks(config: Config) -> Iterator[str]:
    topology, sparse = config.topology, config.sparsity.block
    if topology.block_size < 1 or config.seq < 2:
        return
    if config.layout == "striped" and sparse in BLOCKS and topology.block_size % sparse:
        yield (
            f"topology.block_size={topology.block_size}: must be a multiple of "
            f"sparsity.block={sparse}, since the striped layout deals out whole pattern blocks"
        )
    workers = (
        topology.context_parallel
        if isinstance(topology.context_parallel, int)
        else topology.workers
    )
    if config.layout == "striped" and isinstance(workers, int) and workers > 1:
        blocks = -(-config.seq // topology.block_size)
        if blocks < workers:
            yield (
                f"topology.block_size={topology.block_size}: seq={config.seq} has only {blocks} "
                f"such blocks for {workers} workers; " + _smaller(config.seq, workers, blocks)
            )


def _smaller(seq: int, workers: int, blocks: int) -> str:
    """Return advice on what to give instead. blocks: the number of blocks."""
    if workers * MIN_BLOCK > seq:
        most = max(1, seq // MIN_BLOCK)
        smaller = (
            f", or at most {most} and topology.block_size={MIN_BLOCK}" if most > blocks else ""
        )
        return f"give at most {blocks} workers{smaller}, or a longer seq"
    return f"give fewer workers, a longer seq or blocks of at most {_largest_block(seq, workers)}"


def _largest_block(seq: int, workers: int) -> int:
    """Return the largest power of two that leaves a block for each worker."""
    block = MIN_BLOCK
    while -(-seq // (2 * block)) >= workers:
        block *= 2
    return block


def _sparsity(sparsity: SparsityConfig, seq: int) -> Iterator[str]:
    own = PATTERN_KEYS[sparsity.pattern]
    absent = [f"sparsity.{name}" for name in own if getattr(sparsity, name) is None]
    if len(absent) > 1:
        # The pattern was set without its group: one cause, so one line instead of one per key.
        yield (
            f"sparsity.pattern={sparsity.pattern}: needs {', '.join(absent)}; "
            f"give sparsity={sparsity.pattern}, which sets them, instead of sparsity.pattern"
        )
        return
    if (
        sparsity.pattern == "dense"
        and sparsity.block is not None
        and sparsity.dense_steps is not None
    ):
        yield (
            "sparsity.pattern=dense: other keys still belong to another pattern; "
            "give sparsity=dense instead of sparsity.pattern"
        )
        return
    complete = True
    for name, value in vars(sparsity).items():
        if name == "pattern":
            continue
        if name in own and value is None:
            complete = False
            yield (
                f"sparsity.{name}=null: sparsity.pattern={sparsity.pattern} needs a value; "
                f"sparsity={sparsity.pattern} gives a default"
            )
        if name not in own and value is not None:
            allowed = ", ".join(own) or "none"
            yield (
                f"sparsity.{name}={keys.show(value)}: is not a key of "
                f"sparsity.pattern={sparsity.pattern}; its keys: {allowed}"
            )
    if not complete:
        return
    if sparsity.pattern == "vertical_slash":
        s = sparsity
        assert s.max_columns is not None
        assert s.min_columns is not None
        assert s.sink_tokens is not None
        assert s.max_slashes is not None
        assert s.min_slashes is not None
        assert s.last_q is not None
        least = max(s.min_columns, s.sink_tokens)
        if 0 < s.max_columns < least:
            which = "min_columns" if s.min_columns >= s.sink_tokens else "sink_tokens"
            yield (
                f"sparsity.max_columns={s.max_columns}: is below the {least} columns of "
                f"sparsity.{which}; give 0 (no limit) or at least {least}"
            )
        if 0 < s.max_slashes < s.min_slashes:
            least = s.min_slashes
            yield (
                f"sparsity.max_slashes={s.max_slashes}: is below sparsity.min_slashes={least}; "
                f"give 0 (no limit) or at least {least}"
            )
        if seq > MOST_LINES:
            yield (
                f"seq={seq}: sparsity.pattern=vertical_slash can choose among at most "
                f"{MOST_LINES} columns"
            )
        if seq >= 1 and s.last_q > seq:
            yield f"sparsity.last_q={s.last_q}: is above seq={seq}"
        elif s.windows is not None and s.last_q >= 1 and seq >= 1 and s.windows * s.last_q > seq:
            yield (
                f"sparsity.windows={s.windows}: windows of sparsity.last_q={s.last_q} queries "
                f"would overlap; seq={seq} has room for {seq // s.last_q}"
            )
    if sparsity.pattern == "xattention":
        assert sparsity.block is not None
        assert sparsity.stride is not None
        if sparsity.stride >= 1 and sparsity.block % sparsity.stride:
            yield (
                f"sparsity.stride={sparsity.stride}: does not divide "
                f"sparsity.block={sparsity.block}"
            )
    if sparsity.pattern == "moba":
        assert sparsity.block is not None
        assert sparsity.chunk is not None
        if sparsity.block >= 1 and sparsity.chunk % sparsity.block:
            yield (
                f"sparsity.chunk={sparsity.chunk}: must be a multiple of "
                f"sparsity.block={sparsity.block}"
            )
    if sparsity.pattern == "fixed" and sparsity.density and sparsity.slashes:
        given = f"sparsity.density={keys.show(sparsity.density)}"
        yield (
            f"sparsity.slashes={sparsity.slashes}: {given} already sets the number of slashes; "
            "give one of them, or 0 for the other"
        )
    if sparsity.pattern == "fixed" and not sparsity.density and not sparsity.slashes:
        yield (
            "sparsity.slashes=0: give a number of slashes, or their share of the blocks as "
            "sparsity.density"
        )


def _batch(train: TrainConfig, topology: TopologyConfig) -> Iterator[str]:
    if train.global_batch < 1 or train.micro_batch < 1:
        return
    if train.global_batch % train.micro_batch:
        yield (
            f"train.global_batch={train.global_batch}: must be a multiple of "
            f"train.micro_batch={train.micro_batch}"
        )
        return
    workers, context = topology.workers, topology.context_parallel
    if (
        isinstance(workers, int)
        and isinstance(context, int)
        and context >= 1
        and workers >= 1
        and workers % context == 0
    ):
        groups = workers // context
        if train.global_batch % (groups * train.micro_batch):
            yield (
                f"train.global_batch={train.global_batch}: must be a multiple of "
                f"{groups * train.micro_batch}: train.micro_batch={train.micro_batch} for each of "
                f"the {groups} context groups (topology.workers={workers}, "
                f"topology.context_parallel={context})"
            )


def require_manifest(data: DataConfig) -> None:
    """Check that a data folder holds its manifest, for a run that is about to start.

    The manifest itself is checked when the data are opened. A plan needs no data.

    Raises:
        ConfigError: the manifest is missing.
    """
    name = _MANIFESTS.get(data.kind)
    folder = Path(data.path or "").expanduser()
    if (
        name is None
        or data.path is None
        or data.mix is not None
        or not folder.is_dir()
        or (folder / name).is_file()
    ):
        return
    inside = sorted(path.parent.name for path in folder.glob(f"*/{name}"))
    hint = (
        f"; these folders in it have one: {', '.join(inside[:8])} (name them in data.mix)"
        if inside
        else ""
    )
    raise ConfigError(f"data.path={data.path}: no {name} in it; give {_INPUTS[data.kind]}{hint}")


def _data(data: DataConfig, model: ModelConfig) -> Iterator[str]:
    expected = _INPUTS.get(data.kind, "")
    if data.kind == "stdlib":
        for name, value in (("path", data.path), ("mix", data.mix)):
            if value is not None:
                yield (
                    f"data.{name}={keys.show(value)}: data=stdlib has no {name}; add data=text, "
                    "data=tokens or data=mds"
                )
    elif data.mix is not None:
        yield from _mix(data, expected)
    elif data.path is None:
        yield f"data.path=null: data={data.kind} needs it; give {expected}"
    elif not Path(data.path).expanduser().exists():
        yield f"data.path={data.path}: no such file or folder; give {expected}"
    if data.kind in ("tokens", "mds"):
        return  # already tokenized; the vocabulary is checked when the data are opened
    if data.tokenizer == "bytes":
        if 2 <= model.vocab_size < BYTE_VOCABULARY:
            yield (
                f"model.vocab_size={model.vocab_size}: data.tokenizer=bytes needs at least "
                f"{BYTE_VOCABULARY}"
            )
        return
    tokenizer = Path(data.tokenizer).expanduser()
    if tokenizer.is_dir():
        inside = tokenizer / "tokenizer.json"
        yield f"data.tokenizer={data.tokenizer}: is a folder; give its tokenizer.json" + (
            f", {inside}" if inside.is_file() else ""
        )
    elif not tokenizer.is_file():
        yield (
            f"data.tokenizer={data.tokenizer}: no such file; give bytes or the path of a Hugging "
            "Face tokenizer.json"
        )


def _mix(data: DataConfig, expected: str) -> Iterator[str]:
    """Check the weights and folders of a mixture. A YAML file of them is checked when opened."""
    if isinstance(data.mix, str):
        if not Path(data.mix).expanduser().is_file():
            yield (
                f"data.mix={data.mix}: no such file; give weights such as "
                "data.mix={code: 0.3, book: 0.7}, or a YAML file of them"
            )
        return
    assert data.mix is not None
    if not data.mix:
        yield "data.mix={}: names no corpus; give weights such as {code: 0.3, book: 0.7}, or null"
    for name, weight in data.mix.items():
        if weight <= 0:
            yield (
                f"data.mix={keys.show(data.mix)}: the weight of {name} must be above 0; "
                "leave out corpora you do not want"
            )
    missing = [name for name in data.mix if not Path(data.path or ".", name).expanduser().exists()]
    if missing:
        place = (
            f"in data.path={data.path}"
            if data.path
            else "here; if they are in one folder, add data.path=FOLDER"
        )
        first = ", ".join(missing[:3]) + (
            f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        )
        yield f"data.mix: {first}: no such folder or file {place}; each name must be {expected}"


def _optim(config: Config) -> Iterator[str]:
    optim = config.optim
    if optim.skip_spikes and not config.run.spike_sigma:
        yield (
            "optim.skip_spikes=true: needs run.spike_sigma to define a spike; "
            "give it a number of at least 3, such as 8"
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield f"optim.betas={keys.show(optim.betas)}: each must be at least 0 and below 1"
    yield from schedule(config)


def schedule(config: Config) -> Iterator[str]:
    """Yield conflicts in the learning rate schedule."""
    optim = config.optim
    decay = f"optim.decay_steps={optim.decay_steps}"
    if optim.decay_steps != "auto" and optim.schedule == "constant":
        yield (
            f"{decay}: optim.schedule=constant never decays; give optim.decay_steps=auto, or "
            "optim.schedule=cosine, linear or wsd"
        )
    if (
        isinstance(optim.schedule_steps, int)
        and optim.schedule != "constant"
        and optim.schedule_steps <= optim.warmup_steps
    ):
        yield (
            f"optim.schedule_steps={optim.schedule_steps}: must be above "
            f"optim.warmup_steps={optim.warmup_steps}, or no steps are left for the decay"
        )
        return
    if optim.schedule != "wsd" or not isinstance(optim.decay_steps, int):
        return
    begin = 0 if optim.rewarm is True else int(optim.rewarm)
    span = (
        optim.schedule_steps
        if isinstance(optim.schedule_steps, int)
        else config.train.steps - begin
    )
    # The last warm-up step is the first at the peak.
    most = span - 1 - optim.warmup_steps
    if optim.decay_steps > most:
        allowed = f"allowed: 1 to {most}" if most >= 1 else "give fewer optim.warmup_steps"
        yield (
            f"{decay}: the schedule has {span} steps, of which {optim.warmup_steps} are warm-up "
            f"(optim.warmup_steps); {allowed}"
        )


def _offload(train: TrainConfig, layers: int) -> Iterator[str]:
    if train.keep_mlp > layers >= 1:
        yield (
            f"train.keep_mlp={keys.show(train.keep_mlp)}: model.num_layers={layers}; "
            f"allowed: true, false or 0 to {layers}"
        )
    offload = f"train.offload_activations={keys.show(train.offload_activations)}"
    if train.offload_activations > layers >= 1:
        yield f"{offload}: model.num_layers={layers}; allowed: true, false or 0 to {layers}"
    elif train.offload_activations and train.activation_checkpoint == "none":
        others = ", ".join(kind for kind in CHECKPOINTS if kind != "none")
        yield (
            f"{offload}: train.activation_checkpoint=none keeps too much to move; "
            f"allowed with it: {others}"
        )


def _gradients(optim: OptimConfig) -> Iterator[str]:
    if optim.offload_gradients and not optim.offload:
        yield (
            "optim.offload_gradients=true: needs optim.offload=true, which runs the optimizer in "
            "host memory; give both"
        )


def _train(train: TrainConfig, topology: TopologyConfig) -> Iterator[str]:
    if train.kernel == "flash4":
        if topology.device == "cpu":
            yield (
                "train.kernel=flash4: runs on GPUs only, not with topology.device=cpu; "
                "allowed there: auto, reference, sdpa"
            )
        if train.dtype == "float32":
            yield (
                "train.kernel=flash4: computes in bfloat16, not train.dtype=float32; "
                "allowed with it: auto, reference, sdpa"
            )
    if train.shard == "optimizer" and train.reduce_dtype == "bfloat16":
        yield (
            "train.reduce_dtype=bfloat16: train.shard=optimizer would sum the gradients of "
            "micro-batches in bfloat16; give float32, which is sent only once per step"
        )
    if train.init_from is not None:
        folder = Path(train.init_from).expanduser()
        if not folder.is_dir():
            reason = "is a file" if folder.exists() else "no such folder"
            yield (
                f"train.init_from={train.init_from}: {reason}; give a Hugging Face folder with "
                "config.json and .safetensors files"
            )
        elif not (folder / "config.json").is_file():
            yield (
                f"train.init_from={train.init_from}: has no config.json; give a Hugging Face folder"
            )


def _evaluation(config: Config) -> Iterator[str]:
    if config.train.eval_every > 0 and config.data.eval_sequences == 0:
        yield (
            f"train.eval_every={config.train.eval_every}: no held-out sequences to evaluate on; "
            "add data.eval_sequences=4, for example"
        )


def _run(config: Config) -> Iterator[str]:
    if not re.fullmatch(r"[\w.+=-]+", config.run.name) or config.run.name in (".", ".."):
        yield (
            f"run.name={config.run.name}: may only contain letters, digits and . _ - + =, since it "
            "names a folder"
        )
    if config.run.dir != config.run.dir.strip():
        yield (
            f"run.dir='{config.run.dir}': begins or ends with a space, which is easily lost; "
            "leave the space out"
        )
    if config.run.dir == "":
        yield "run.dir=: give a folder, or auto for runs/<name>"
