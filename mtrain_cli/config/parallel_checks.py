"""Check how the degrees of parallelism and the layout divide workers, model, sequence and batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd, prod
from operator import attrgetter
from typing import Any

from mtrain_cli.config.cluster import file_of
from mtrain_cli.config.keys import conflict, show
from mtrain_cli.config.pattern_settings import BLOCKS
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import (
    DENSE_KEYS,
    MIN_BLOCK,
    MOST_CHUNKS,
    MOST_CHUNKS_PER_WORKER,
    Config,
    ConfigError,
    ModelConfig,
)
from mtrain_cli.config.sizes import divisors, with_count

BALANCE_LOSS = 0.001  # train.balance_loss=auto (DeepSeek-V2 and Qwen3 use 0.001 to 0.003)
# Settings that need all experts, whole layers or the whole model on each worker, and the value that
# turns each of them off.
NEED_ALL_EXPERTS = {"optim.offload": False, "optim.offload_gradients": False}
NEED_WHOLE_LAYERS = NEED_ALL_EXPERTS
NEED_WHOLE_MODEL = {"train.offload_activations": False, **NEED_WHOLE_LAYERS, "train.eval_tasks": ()}
_WITHOUT_STAGES = {"schedule": "auto", "virtual_stages": 1, "stage_layers": "auto"}
# Settings of the router, and the values with which a dense model has none.
_OF_ROUTERS = {
    "train.balance_loss": ("auto", 0),
    "train.router_z_loss": (0,),
    "train.balance_bias": (0,),
}
_TENSOR_SIZES = ("num_heads", "num_kv_heads", "intermediate_size")


def problems(config: Config) -> Iterator[str]:
    """Yield a line for each conflict among the keys of ``topology``, model, sequence and batch."""
    if config.topology.cluster != "auto":
        try:
            file_of(config.topology.cluster)
        except ValueError as error:
            yield conflict(config, "{topology.cluster}: {error}", error=error)
    for check in (_experts, _degrees, tensor_problems, _pipeline, _blocks, _chunks, _batch):
        yield from check(config)


def common_divisor(model: ModelConfig) -> int:
    """Return the largest tensor degree that a model allows. It is a multiple of all others."""
    return gcd(*(getattr(model, name) for name in _TENSOR_SIZES))


def balance_loss(config: Config) -> float:
    """Return the coefficient of the balance loss; 0 for a dense model."""
    given = config.train.balance_loss
    if config.model.moe.experts == 0:
        return 0.0
    return BALANCE_LOSS if isinstance(given, str) else float(given)


def unsupported(config: Config, degree: str, turned_off: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that a kind of parallelism does not support.

    degree: key of its degree. turned_off: the settings, with the value that turns each of them off.
    """
    for key, off in turned_off.items():
        if attrgetter(key)(config) != off:
            yield f"{{{degree}}}: does not support {{{key}}}; give {key}={show(off)}"


def refused_settings(config: Config) -> set[str]:
    """Return the keys of the settings that a run's kinds of parallelism do not support."""
    topology = config.topology
    refused = set(NEED_WHOLE_LAYERS if topology.tensor_parallel > 1 else ())
    refused |= set(NEED_WHOLE_MODEL if topology.pipeline_parallel > 1 else ())
    return refused | set(NEED_ALL_EXPERTS if topology.expert_parallel != 1 else ())


def require_degree_1(config: Config, degree: str, command: str) -> None:
    """Raise ConfigError if ``topology``'s ``degree`` is above 1, which ``command`` cannot do."""
    if (value := getattr(config.topology, degree)) > 1:
        key = f"topology.{degree}"
        line = f"{key}={value}: not supported by `{command}`; leave this setting out"
        raise ConfigError(Problem(line, key, value=value))


def _experts(config: Config) -> Iterator[str]:
    moe, layers, degree = config.model.moe, config.model.num_layers, config.topology.expert_parallel
    if not moe.experts:
        given = [key for key, value in DENSE_KEYS.items() if attrgetter(key)(config) != value]
        given += [key for key, off in _OF_ROUTERS.items() if attrgetter(key)(config) not in off]
        if degree not in ("auto", 1):
            given.append("topology.expert_parallel")
        if given:
            shown = ", ".join(f"{{{key}}}" for key in given)
            needs = "needs {model.moe.experts!s}, such as those of model=tiny_moe"
            yield f"{shown}: {needs}, or leave it out"
        return
    if degree != 1:
        if isinstance(degree, int) and degree > 1 and moe.experts > 0 and moe.experts % degree:
            allowed = divisors(moe.experts)
            yield f"{{topology.expert_parallel}}: must divide {{model.moe.experts}}: {allowed}"
        yield from unsupported(config, "topology.expert_parallel", NEED_ALL_EXPERTS)
    if not 1 <= moe.top_k <= moe.experts:
        yield "{model.moe.top_k}: must be between 1 and {model.moe.experts}"
    if moe.expert_size < 1:
        yield "{model.moe.expert_size}: must be at least 1; give an expert's width"
    if moe.dense_layers >= layers >= 1:
        yield "{model.moe.dense_layers}: leaves no layer of {model.num_layers} with experts"
    if config.train.keep_mlp:
        yield "{train.keep_mlp}: does not support experts; give train.keep_mlp=false"


def _degrees(config: Config) -> Iterator[str]:
    """Yield an error if a degree, or the product of several, does not divide the workers."""
    topology = config.topology
    workers, context = topology.workers, topology.context_parallel
    sharing = {
        "tensor_parallel": topology.tensor_parallel,
        "pipeline_parallel": topology.pipeline_parallel,
        **({"context_parallel": context} if isinstance(context, int) else {}),
    }
    nodes = topology.gpus_per_node
    if not isinstance(workers, int) or min(workers, *sharing.values()) < 1 or nodes == 0:
        return
    alone = {**sharing, **({"gpus_per_node": nodes} if isinstance(nodes, int) else {})}
    limits = {"tensor_parallel": common_divisor(config.model) or 1}
    wrong = [name for name, value in alone.items() if workers % value]
    for name in wrong:
        allowed = divisors(gcd(workers, limits.get(name, workers)))
        yield f"{{topology.{name}}}: does not divide {{topology.workers}}; allowed: {allowed}"
    if not wrong and workers % prod(sharing.values()):
        names = " x ".join(f"{{topology.{name}}}" for name, value in sharing.items() if value > 1)
        yield f"{names}: does not divide {{topology.workers}}"


def tensor_problems(config: Config) -> Iterator[str]:
    """Yield a line for each setting that contradicts ``topology.tensor_parallel``."""
    degree, model = config.topology.tensor_parallel, config.model
    sizes = [getattr(model, name) for name in _TENSOR_SIZES]
    if degree <= 1 or min(sizes) < 1:
        return
    if any(size % degree for size in sizes):
        yield (
            "{topology.tensor_parallel}: must divide {model.num_heads}, {model.num_kv_heads} and "
            f"{{model.intermediate_size}}; allowed: {divisors(common_divisor(model))}"
        )
    yield from unsupported(config, "topology.tensor_parallel", NEED_WHOLE_LAYERS)


def splits_layers(config: Config, degree: int, per_node: int) -> bool:
    """Return whether tensor groups of this degree divide a node and can share the layers."""
    changed = config.changed(topology={"tensor_parallel": degree})
    return per_node % degree == 0 and not any(tensor_problems(changed))


def _pipeline(config: Config) -> Iterator[str]:
    topology, layers = config.topology, config.model.num_layers
    stages, parts = topology.pipeline_parallel, topology.virtual_stages
    counts = topology.stage_layers
    if min(stages, parts, layers, topology.tensor_parallel) < 1:
        return
    if stages == 1:
        for name, value in _WITHOUT_STAGES.items():
            if getattr(topology, name) != value:
                yield f"{{topology.{name}}}: needs {{topology.pipeline_parallel!s}} of at least 2"
        return
    yield from unsupported(config, "topology.pipeline_parallel", NEED_WHOLE_MODEL)
    if topology.schedule == "interleaved" and parts == 1:
        yield "{topology.schedule}: needs {topology.virtual_stages!s} of at least 2"
    elif topology.schedule in ("gpipe", "1f1b") and parts > 1:
        yield "{topology.virtual_stages}: needs topology.schedule=interleaved"
    if stages * parts > layers:
        count = f"{stages * parts} stages for {{model.num_layers}}"
        yield f"{{topology.pipeline_parallel}}: {count}; each needs a layer"
    elif not isinstance(counts, str):
        if len(counts) != stages * parts:
            yield f"{{topology.stage_layers}}: must have {stages * parts} numbers, one per stage"
        elif min(counts) < 1:
            yield "{topology.stage_layers}: each stage needs at least 1 layer"
        elif sum(counts) != layers:
            yield f"{{topology.stage_layers}}: adds up to {sum(counts)}, not {{model.num_layers}}"
    context, train = topology.context_workers, config.train
    if isinstance(topology.workers, int) and isinstance(context, int) and context > 0:
        data = topology.workers // (stages * topology.tensor_parallel * context)
        if data and train.micro_batch >= 1 and train.global_batch >= 1:
            yield from uneven_rounds(config, data)


def uneven_rounds(config: Config, data: int) -> Iterator[Problem]:
    """Yield an error if an interleaved schedule cannot share out the micro-batches of a step.

    data: number of context groups.
    """
    topology, train = config.topology, config.train
    stages, sequences = topology.pipeline_parallel, data * train.micro_batch
    count = train.global_batch // sequences
    if topology.virtual_stages == 1 or train.global_batch % sequences or count % stages == 0:
        return
    yield conflict(
        config,
        f"{{train.global_batch}}: gives each stage {count} micro-batches; "
        "{topology.schedule!s}=interleaved needs a multiple of {topology.pipeline_parallel}, so a "
        f"multiple of {sequences * stages} sequences",
    )


def _blocks(config: Config) -> Iterator[str]:
    topology, sparse = config.topology, config.sparsity.block
    workers = topology.context_workers
    if topology.block_size < 1 or config.seq < 2 or config.layout != "striped":
        return
    if sparse in BLOCKS and topology.block_size % sparse:
        yield "{topology.block_size}: must be a multiple of {sparsity.block} in a striped layout"
    blocks = -(-config.seq // topology.block_size)
    if isinstance(workers, int) and workers > max(1, blocks):
        yield (
            f"{{topology.block_size}}: {{seq}} has only {with_count(blocks, 'such block')} for "
            f"{workers} workers; give fewer workers or smaller blocks, {MIN_BLOCK} at least"
        )


def _chunks(config: Config) -> Iterator[str]:
    topology, sparse = config.topology, config.sparsity.block
    chunk, workers = topology.balanced_chunk, topology.context_workers
    if not isinstance(chunk, int) or chunk < 1 or config.seq < 2:
        return
    if topology.layout not in ("balanced", "auto"):
        yield "{topology.balanced_chunk}: needs topology.layout=balanced, not {topology.layout}"
    elif sparse in BLOCKS and chunk % sparse:
        yield "{topology.balanced_chunk}: must be a multiple of {sparsity.block}"
    else:
        yield from number_of_chunks(config, workers if isinstance(workers, int) else 1)


def number_of_chunks(config: Config, workers: int) -> Iterator[Problem]:
    """Yield what is wrong with the number of chunks that ``topology.balanced_chunk`` makes.

    workers: number of workers that share a sequence.
    """
    chunk, layout = config.topology.balanced_chunk, config.topology.layout
    if not isinstance(chunk, int) or layout not in ("balanced", "auto"):
        return
    chunks, most = -(-config.seq // chunk), max(MOST_CHUNKS, MOST_CHUNKS_PER_WORKER * workers)
    if not workers <= chunks <= most:
        size = "smaller" if chunks < workers else "larger"
        line = f"{{topology.balanced_chunk}}: {{seq}} has {with_count(chunks, 'such chunk')}"
        allowed = f"allowed: {workers} (one per worker) to {most:,}; give {size} chunks"
        yield conflict(config, f"{line}; {allowed}")


def _batch(config: Config) -> Iterator[str]:
    train, topology = config.train, config.topology
    workers, context = topology.workers, topology.context_parallel
    if train.global_batch < 1 or train.micro_batch < 1:
        return
    if train.global_batch % train.micro_batch:
        yield "{train.global_batch}: must be a multiple of {train.micro_batch}"
    elif isinstance(workers, int) and isinstance(context, int):
        sharing = context * topology.tensor_parallel * topology.pipeline_parallel
        if sharing < 1 or workers < 1 or workers % sharing:
            return
        groups = workers // sharing
        if train.global_batch % (groups * train.micro_batch):
            each = f"{{train.micro_batch}} for each of the {groups} context groups"
            whole = f"must be a multiple of {groups * train.micro_batch}: {each}"
            yield f"{{train.global_batch}}: {whole} ({{topology.workers}})"
