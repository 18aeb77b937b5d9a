"""Check a configuration for conflicts between its keys. This needs no GPU and no process group.

`launch/environment.py` checks whether the sizes fit the GPUs. The kernel registry checks whether a
kernel supports what the configuration asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import gcd
from pathlib import Path
from typing import Any

from mtrain_cli.config import (
    dense_layers,
    eval_tasks,
    expert_checks,
    keys,
    pipeline_parallel,
    tensor_parallel,
)
from mtrain_cli.config.cluster import file_of
from mtrain_cli.config.foreign_words import hub_hint
from mtrain_cli.config.mask_settings import mask_problems
from mtrain_cli.config.pattern_settings import BLOCKS
from mtrain_cli.config.plugins import callback_names
from mtrain_cli.config.problem import IfHas, Problem, Setting
from mtrain_cli.config.schema import (
    CHECKPOINTS,
    MIN_BLOCK,
    MOST_CHUNKS,
    MOST_CHUNKS_PER_WORKER,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    TopologyConfig,
    TrainConfig,
)
from mtrain_cli.config.sizes import with_count
from mtrain_cli.config.suggest import adapter_hint, no_such
from mtrain_cli.config.variants import Variant

BYTE_VOCABULARY = 264  # 256 bytes, begin, end and padding, rounded up to a multiple of 8
TEXT = "a .txt, .md, .py, .jsonl, .json or .parquet file, or a folder of them"
_INPUTS = {
    "text": TEXT,
    "tokens": "the output of `mtrain data prepare`, or a .npy or .bin of token ids",
    "mds": "a folder of MDS shards with an index.json",
}
# {data.kind: file that the folder must hold}
_MANIFESTS = {"tokens": "meta.json", "mds": "index.json"}


def problems(config: Config) -> list[str]:
    """Return a line ``key=value: reason`` for each conflict in ``config``."""
    values = keys.values(config)
    ranges = list(_ranges(values))
    bounds = ((keys.all_keys()[name].range, value) for name, value in values.items())
    if any(bound is not None and bound.is_beyond(value) for bound, value in bounds):
        return ranges  # the checks below contain loops whose length is one of these numbers
    mask, pattern = config.mask, config.sparsity
    return [
        *ranges,
        *_model(config.model),
        *expert_checks.problems(config),
        *_topology(config.topology, config.model),
        *tensor_parallel.problems(config),
        *pipeline_parallel.problems(config),
        *_blocks(config),
        *_balanced_chunk(config),
        *(pattern.problems(config.seq) if _is_complete(pattern) else ()),
        *(mask_problems(mask, config.seq, pattern.pattern) if _is_complete(mask) else ()),
        *_mixed_layers(config),
        *dense_layers.problems(config),
        *_batch(config.train, config.topology),
        *_data(config.data, config.model),
        *_columns(config),
        *_optim(config),
        *_train(config.train, config.topology),
        *_offload(config.train, config.model.num_layers),
        *eval_tasks.problems(config),
        *_callbacks(config.train),
        *_run(config),
    ]


def _ranges(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if (problem := keys.all_keys()[name].out_of_range(value)) is not None:
            yield f"{name}={keys.show(value)}: {problem}"


def _model(model: ModelConfig) -> Iterator[str]:
    heads, kv_heads, rope = model.num_heads, model.num_kv_heads, model.rope
    if heads >= 1 and kv_heads >= 1 and heads % kv_heads:
        line = f"model.num_kv_heads={kv_heads}: does not divide model.num_heads={heads}"
        yield f"{line}; allowed: {_divisors(heads)}"
    if model.head_dim % 2:
        yield (
            f"model.head_dim={model.head_dim}: must be even, since the rotary embedding rotates "
            "pairs of dimensions"
        )
    if rope.scaling == "yarn" and rope.beta_fast <= rope.beta_slow:
        slow = f"model.rope.beta_slow={rope.beta_slow}"
        yield f"model.rope.beta_fast={rope.beta_fast}: must be above {slow}"
    if rope.scaling == "llama3":
        if rope.factor == "auto":
            yield (
                "model.rope.factor=auto: is derived for scaling=yarn only; "
                "model.rope.scaling=llama3 needs a number such as 8"
            )
        if rope.high_freq_factor <= rope.low_freq_factor:
            low = f"model.rope.low_freq_factor={rope.low_freq_factor}"
            yield f"model.rope.high_freq_factor={rope.high_freq_factor}: must be above {low}"


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def allowed_degrees(config: Config) -> dict[str, str]:
    """Return the degrees that model, workers and the other degrees allow.

    The keys are those of degrees that are no ``auto``.
    """
    topology, layers = config.topology, config.model.num_layers
    tensor = tensor_parallel.common_divisor(config.model)
    stages = f"1 to {layers}"
    if isinstance(topology.workers, int):
        tensor = gcd(_workers_left(topology, topology.pipeline_parallel), tensor)
        left = _workers_left(topology, topology.tensor_parallel)
        stages = ", ".join(str(n) for n in range(1, layers + 1) if left % n == 0)
    return {
        "topology.tensor_parallel": _divisors(tensor),
        "topology.pipeline_parallel": stages,
    }


def _workers_left(topology: TopologyConfig, degree: int) -> int:
    """Return the number of workers beside a degree and context_parallel, if these divide them.

    Otherwise return the number of all workers: another error names the degree that does not fit.
    """
    assert isinstance(topology.workers, int)
    context = topology.context_parallel
    taken = degree * (context if isinstance(context, int) else 1)
    fits = taken > 0 and topology.workers % taken == 0
    return topology.workers // taken if fits else topology.workers


def _topology(topology: TopologyConfig, model: ModelConfig) -> Iterator[str]:
    if topology.cluster != "auto":
        try:
            file_of(topology.cluster)
        except ValueError as error:
            yield f"topology.cluster={topology.cluster}: {error}"
    workers, context, node = topology.workers, topology.context_parallel, topology.gpus_per_node
    numbers = {"workers": workers, "context_parallel": context, "gpus_per_node": node}
    numbers["tensor_parallel"] = tensor = topology.tensor_parallel
    if any(isinstance(value, int) and value < 1 for value in numbers.values()):
        return
    for name in ("context_parallel", "gpus_per_node", "tensor_parallel"):
        value = numbers[name]
        if isinstance(workers, int) and isinstance(value, int) and workers % value:
            line = f"topology.{name}={value}: does not divide topology.workers={workers}"
            if name == "tensor_parallel":
                fits = gcd(workers, tensor_parallel.common_divisor(model))
                yield f"{line}; allowed: {_divisors(fits)}"
                continue
            shared = tensor if name == "context_parallel" and workers % tensor == 0 else 1
            yield f"{line}; allowed: auto, {_divisors(workers // shared)}"
    if isinstance(workers, int) and isinstance(context, int) and workers % context == 0:
        groups = workers // context
        if workers % tensor == 0 and groups % tensor:
            yield (
                f"topology.tensor_parallel={tensor}: does not divide the "
                f"{with_count(groups, 'worker')} that "
                f"topology.context_parallel={context} leaves of topology.workers={workers}; "
                f"allowed: {_divisors(groups)}"
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
    workers = topology.context_workers
    blocks = -(-config.seq // topology.block_size)
    if config.layout == "striped" and isinstance(workers, int) and workers > max(1, blocks):
        yield Problem(
            Setting("topology.block_size", topology.block_size),
            f": seq={config.seq} has only {with_count(blocks, 'such block')} for {workers} "
            "workers; ",
            _smaller(config.seq, workers, blocks),
        )


def _balanced_chunk(config: Config) -> Iterator[str]:
    topology, sparse = config.topology, config.sparsity.block
    chunk, layout = topology.balanced_chunk, topology.layout
    if not isinstance(chunk, int) or chunk < 1 or config.seq < 2:
        return
    given = f"topology.balanced_chunk={chunk}"
    if layout not in ("balanced", "auto"):
        yield (
            f"{given}: only topology.layout=balanced has chunks, not topology.layout={layout}; "
            "give topology.layout=balanced, or topology.balanced_chunk=auto"
        )
    elif sparse in BLOCKS and chunk % sparse:
        yield (
            f"{given}: must be a multiple of sparsity.block={sparse}, since workers hold whole "
            "pattern blocks"
        )
    else:
        workers = topology.context_workers
        yield from number_of_chunks(config, workers if isinstance(workers, int) else 1)


def number_of_chunks(config: Config, workers: int) -> Iterator[str]:
    """Yield what is wrong with the number of chunks that ``topology.balanced_chunk`` makes.

    workers: number of workers that share a sequence.
    """
    topology, seq = config.topology, config.seq
    chunk, block = topology.balanced_chunk, config.sparsity.block or MIN_BLOCK
    if not isinstance(chunk, int) or topology.layout not in ("balanced", "auto"):
        return
    chunks = -(-seq // chunk)
    given = f"topology.balanced_chunk={chunk}: seq={seq} has {with_count(chunks, 'such chunk')}"
    most = max(MOST_CHUNKS, MOST_CHUNKS_PER_WORKER * workers)
    if chunks < workers:
        longest = seq // workers // block * block
        fewer = Problem("fewer workers", IfHas("seq", " or a longer seq"))
        advice = f"chunks of at most {longest}" if longest else fewer
        yield Problem(f"{given} for {workers} workers; give ", advice)
    elif chunks > most:
        shortest = -(-seq // (most * block)) * block
        yield (
            f"{given}, and a batch could take minutes to plan; at most {most:,} are allowed. Give "
            f"chunks of at least {shortest}"
        )


def _smaller(seq: int, workers: int, blocks: int) -> Problem:
    """Return advice for a sequence of ``seq`` tokens that has fewer blocks than workers."""
    if workers * MIN_BLOCK > seq:
        most = max(1, seq // MIN_BLOCK)
        smaller = f" and topology.block_size={MIN_BLOCK}"
        or_more = f", or at most {most}{smaller}" if most > blocks else ""
        most_workers = f"give at most {with_count(blocks, 'worker')}{or_more}"
        return Problem(most_workers, IfHas("seq", ", or a longer seq"))
    block = MIN_BLOCK
    while -(-seq // (2 * block)) >= workers:
        block *= 2
    longer = IfHas("seq", ", a longer seq")
    return Problem("give fewer workers", longer, f" or blocks of at most {block}")


def variant_keys(leaves: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each null key that the pattern or mask needs, and each set key of others.

    Args:
        leaves: value of every key, by dotted name.
    """
    for section, variants in keys.VARIANTS.items():
        yield from _keys_of_kind(leaves, section, variants)


def _keys_of_kind(
    leaves: Mapping[str, Any], section: str, variants: keys.Variants
) -> Iterator[str]:
    selector = f"{section}.{variants.selector}"
    chosen = leaves[selector]
    own = variants.own_keys(chosen)
    given = {
        key: leaves[name]
        for name in keys.all_keys()
        if name.startswith(f"{section}.") and name != selector and (key := name.split(".")[1])
    }
    absent = [f"{section}.{key}" for key in own if given[key] is None]
    if len(absent) > 1:
        # The user set the selector without its group. One line for this cause is enough.
        yield (
            f"{selector}={chosen}: needs {', '.join(absent)}; give {section}={chosen}, which sets "
            f"them, instead of {selector}"
        )
        return
    foreign = {key: value for key, value in given.items() if key not in own and value is not None}
    if "block" in foreign and "dense_steps" in foreign:
        yield (
            f"{selector}={chosen}: other keys still belong to another pattern; "
            f"give {section}={chosen} instead of {selector}"
        )
        return
    for name in absent:
        yield f"{name}=null: {selector}={chosen} needs a value; {section}={chosen} gives a default"
    for key, value in foreign.items():
        users = (f"{section}={kind}" for kind in variants.kinds if key in variants.own_keys(kind))
        yield (
            f"{section}.{key}={keys.show(value)}: is not a key of {selector}={chosen}; "
            f"allowed with {', '.join(users)}"
        )


def _is_complete(settings: Variant) -> bool:
    """Return whether all keys of a kind have a value. `variant_keys` reports null keys."""
    return None not in (getattr(settings, name) for name in settings.own_keys())


def _callbacks(train: TrainConfig) -> Iterator[str]:
    for name in train.callbacks:
        if name not in (names := callback_names()):
            given = f"train.callbacks={keys.show(train.callbacks)}: {name}"
            none = "no such callback: no installed package has one"
            yield f"{given}: {no_such('callback', name, names) if names else none}"


def _mixed_layers(config: Config) -> Iterator[str]:
    mask, layers = config.mask, config.model.num_layers
    every, first = mask.full_every, mask.full_first
    if layers < 1 or not mask.is_mixed:
        return
    if first and all(map(mask.is_full, range(layers))):
        yield (
            f"mask.full_first={first}: leaves no layer of model.num_layers={layers} with the "
            f"window; give fewer, or mask=causal"
        )
    if every > layers:
        yield (
            f"mask.full_every={every}: exceeds model.num_layers={layers}, so no layer would be "
            f"full; allowed: 0 and 2 to {layers}"
        )


def _batch(train: TrainConfig, topology: TopologyConfig) -> Iterator[str]:
    if train.global_batch < 1 or train.micro_batch < 1:
        return
    line = f"train.global_batch={train.global_batch}: must be a multiple of"
    micro_batch = f"train.micro_batch={train.micro_batch}"
    workers, context = topology.workers, topology.context_parallel
    sharing = topology.tensor_parallel * topology.pipeline_parallel
    if train.global_batch % train.micro_batch:
        yield f"{line} {micro_batch}"
    elif not isinstance(workers, int) or not isinstance(context, int) or context < 1:
        return
    elif workers >= 1 and workers % (context * sharing) == 0:
        groups = workers // (context * sharing)
        if train.global_batch % (groups * train.micro_batch):
            yield (
                f"{line} {groups * train.micro_batch}: {micro_batch} for each of the {groups} "
                f"context groups (topology.workers={workers}, topology.context_parallel={context})"
            )


def require_manifest(data: DataConfig) -> None:
    """Check that data.path is a folder of token ids with its meta.json or index.json, or an array.

    Call this function before a run starts, but not for a plan, which needs no data. Opening the
    dataset checks the content of the file.

    Raises:
        ConfigError: the file is missing, or data.path is a file of another kind.
    """
    name = _MANIFESTS.get(data.kind)
    folder = Path(data.path or "").expanduser()
    if name is None or data.path is None or data.mix is not None:
        return
    arrays = (".npy", ".bin") if data.kind == "tokens" else ()
    if folder.is_file() and folder.suffix not in arrays:
        raise ConfigError(
            f"data.path={data.path}: is another kind of file; give {_INPUTS[data.kind]}"
        )
    if not folder.is_dir() or (folder / name).is_file():
        return
    line = f"data.path={data.path}: no {name} in it; give {_INPUTS[data.kind]}"
    if inside := sorted(path.parent.name for path in folder.glob(f"*/{name}")):
        line += f"; these folders in it have one: {', '.join(inside[:8])} (name them in data.mix)"
    raise ConfigError(line)


def _data(data: DataConfig, model: ModelConfig) -> Iterator[str]:
    expected = _INPUTS.get(data.kind, "")
    if data.kind == "stdlib":
        for name, value in (("path", data.path), ("mix", data.mix)):
            if value is not None:
                line = f"data.{name}={keys.show(value)}: data=stdlib has no {name}"
                yield f"{line}; add data=text, data=tokens or data=mds"
    elif data.mix is not None:
        yield from _mix(data, expected)
    elif data.path is None:
        yield f"data.path is not set: data={data.kind} needs it, or data.mix; give {expected}"
    elif not Path(data.path).expanduser().exists():
        yield f"data.path={data.path}: no such file or folder; give {expected}"
    if data.kind in ("tokens", "mds"):
        return  # already tokenized; the vocabulary is checked when the data are opened
    if data.tokenizer == "bytes":
        if 2 <= model.vocab_size < BYTE_VOCABULARY:
            needs = f"data.tokenizer=bytes needs at least {BYTE_VOCABULARY}"
            yield f"model.vocab_size={model.vocab_size}: {needs}"
        return
    tokenizer, given = Path(data.tokenizer).expanduser(), f"data.tokenizer={data.tokenizer}"
    if tokenizer.is_dir():
        inside = tokenizer / "tokenizer.json"
        named = f", {inside}" if inside.is_file() else ""
        yield f"{given}: is a folder; give its tokenizer.json{named}"
    elif not tokenizer.is_file():
        yield f"{given}: no such file; give the path of a Hugging Face tokenizer.json, or bytes"


def _columns(config: Config) -> Iterator[str]:
    """Yield the conflicts of masks and positions that come from the data."""
    data, mask, pattern = config.data, config.mask, config.sparsity.pattern
    columns = {
        "masks": ("mask_key", data.mask_key),
        "positions": ("positions_key", data.positions_key),
    }
    given = {
        what: f"data.{name}={value}" for what, (name, value) in columns.items() if value is not None
    }
    what = " and ".join(given)
    if given and data.kind != "tokens":
        options = " ".join(f"--{columns[name][0].replace('_', '-')}" for name in given)
        yield (
            f"{', '.join(given.values())}: data={data.kind} has no {what} for its documents; give "
            f"data=tokens and what `mtrain data prepare --tokens-key {options}` wrote"
        )
    if given and not data.document_mask:
        verb = "gives" if len(given) == 1 else "give"
        yield (
            f"data.document_mask=false: {' and '.join(given.values())} {verb} each document {what} "
            "of its own, so attention stays inside; give data.document_mask=true"
        )
    if data.mask_key is None:
        return
    by_data = f"data.mask_key={data.mask_key}"
    if mask.kind != "causal":
        yield f"mask.kind={mask.kind}: {by_data} takes the mask from the data; give mask=causal"
    if pattern != "dense":
        yield (
            f"sparsity.pattern={pattern}: needs a mask in which each query sees one interval of "
            f"keys up to itself, which {by_data} does not promise; give sparsity=dense"
        )


def _mix(data: DataConfig, expected: str) -> Iterator[str]:
    """Yield what is wrong with the weights and folders of ``data.mix``.

    A YAML file of weights must exist. Opening the dataset checks its content.

    Args:
        expected: text that says what the name of a corpus must be.
    """
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
        place = "here; if they are in one folder, add data.path=FOLDER"
        place = f"in data.path={data.path}" if data.path else place
        line = f"data.mix: {keys.first_few(missing)}: no such folder or file {place}"
        yield f"{line}; each name must be {expected}"


def _optim(config: Config) -> Iterator[str]:
    optim = config.optim
    if optim.skip_spikes and not config.run.spike_sigma:
        yield (
            "optim.skip_spikes=true: needs run.spike_sigma to define a spike; "
            "give it a number of at least 3, such as 8"
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield f"optim.betas={keys.show(optim.betas)}: each must be at least 0 and below 1"
    if optim.offload_gradients and not optim.offload:
        yield (
            "optim.offload_gradients=true: needs optim.offload=true, which runs the optimizer in "
            "host memory; give both"
        )
    yield from schedule(config)


def schedule(config: Config) -> Iterator[str]:
    """Yield the conflicts in the learning rate schedule."""
    optim = config.optim
    decay = f"optim.decay_steps={optim.decay_steps}"
    if optim.decay_steps != "auto" and optim.schedule == "constant":
        yield (
            f"{decay}: optim.schedule=constant never decays; give optim.decay_steps=auto, or "
            "optim.schedule=cosine, linear or wsd"
        )
    begin = 0 if optim.rewarm is True else int(optim.rewarm)
    span = config.train.steps - begin
    if isinstance(optim.schedule_steps, int):
        span = optim.schedule_steps
        if optim.schedule != "constant" and span <= optim.warmup_steps:
            yield (
                f"optim.schedule_steps={span}: must be above optim.warmup_steps="
                f"{optim.warmup_steps}, or no steps are left for the decay"
            )
            return
    if optim.schedule != "wsd" or not isinstance(optim.decay_steps, int):
        return
    # The last warm-up step is the first at the peak.
    most = span - 1 - optim.warmup_steps
    if optim.decay_steps > most:
        allowed = f"allowed: 1 to {most}" if most >= 1 else "give fewer optim.warmup_steps"
        yield (
            f"{decay}: the schedule has {span} steps, and {optim.warmup_steps} of them are warm-up "
            f"(optim.warmup_steps); {allowed}"
        )


def _offload(train: TrainConfig, layers: int) -> Iterator[str]:
    too_many = f"exceeds model.num_layers={layers}; allowed: true, false or 0 to {layers}"
    if train.keep_mlp > layers >= 1:
        yield f"train.keep_mlp={keys.show(train.keep_mlp)}: {too_many}"
    offload = f"train.offload_activations={keys.show(train.offload_activations)}"
    if train.offload_activations > layers >= 1:
        yield f"{offload}: {too_many}"
    elif train.offload_activations and train.activation_checkpoint == "none":
        others = ", ".join(kind for kind in CHECKPOINTS if kind != "none")
        why = "train.activation_checkpoint=none keeps too much to move"
        yield f"{offload}: {why}; allowed values of that key: {others}"


def _train(train: TrainConfig, topology: TopologyConfig) -> Iterator[str]:
    if train.kernel == "flash4":
        if topology.device == "cpu":
            yield (
                "train.kernel=flash4: runs on GPUs only, not with topology.device=cpu; "
                "allowed on a CPU: auto, reference, sdpa"
            )
        if train.dtype == "float32":
            yield (
                "train.kernel=flash4: computes in bfloat16, not train.dtype=float32; "
                "allowed with float32: auto, reference, sdpa"
            )
    if train.shard == "optimizer" and train.reduce_dtype == "bfloat16":
        yield (
            "train.reduce_dtype=bfloat16: train.shard=optimizer would sum the gradients of "
            "micro-batches in bfloat16; give float32, which is sent only once per step"
        )
    if train.init_from is not None:
        folder = Path(train.init_from).expanduser()
        given = f"train.init_from={train.init_from}"
        if not folder.is_dir():
            reason = "is a file" if folder.exists() else "no such folder"
            wanted = "a Hugging Face folder with config.json and .safetensors files"
            yield f"{given}: {reason}; give {wanted}{hub_hint(train.init_from)}"
        elif not (folder / "config.json").is_file():
            yield f"{given}: has no config.json; give a Hugging Face folder{adapter_hint(folder)}"


def _run(config: Config) -> Iterator[str]:
    train = config.train
    if train.eval_every > 0 and config.data.eval_sequences == 0 and not train.eval_tasks:
        yield (
            f"train.eval_every={train.eval_every}: no held-out sequences to evaluate on; add "
            "data.eval_sequences=4, for example, or train.eval_tasks=[niah]"
        )
    if not re.fullmatch(r"[\w.+=-]+", config.run.name) or config.run.name in (".", ".."):
        yield (
            f"run.name={config.run.name}: may only contain letters, digits and . _ - + =, since it "
            "names a folder; run.dir takes any path"
        )
    if config.run.dir != config.run.dir.strip():
        lost = "begins or ends with a space, which is easily lost; leave the space out"
        yield f"run.dir='{config.run.dir}': {lost}"
    if config.run.dir == "":
        yield "run.dir=: give a folder, or auto for runs/<name>"
