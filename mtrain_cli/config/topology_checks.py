"""Check how workers, degrees and layout of a run divide its sequences and its batch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mtrain_cli.config import tensor_parallel
from mtrain_cli.config.cluster import file_of
from mtrain_cli.config.keys import conflict
from mtrain_cli.config.pattern_settings import BLOCKS
from mtrain_cli.config.problem import Problem, if_has
from mtrain_cli.config.schema import (
    MIN_BLOCK,
    MOST_CHUNKS,
    MOST_CHUNKS_PER_WORKER,
    Config,
    TopologyConfig,
)
from mtrain_cli.config.sizes import divisors, with_count


def problems(config: Config) -> Iterator[str]:
    """Yield the conflicts among the keys of ``topology``, and with the sequence and the batch."""
    if config.topology.cluster != "auto":
        try:
            file_of(config.topology.cluster)
        except ValueError as error:
            yield conflict(config, "{topology.cluster}: {error}", error=error)
    yield from _degrees(config)
    yield from _blocks(config)
    yield from _balanced_chunk(config)
    yield from _batch(config)


def allowed_degrees(config: Config) -> dict[str, str]:
    """Return the degrees that model, workers and the other degrees allow.

    The keys are those of degrees that are no ``auto``.
    """
    topology, layers = config.topology, config.model.num_layers
    tensor = tensor_parallel.common_divisor(config.model)
    stages = f"1 to {layers}"
    if isinstance(topology.workers, int):
        tensor = gcd(_workers_left(topology, topology.pipeline_parallel), tensor)
        stages = divisors(_workers_left(topology, topology.tensor_parallel), layers)
    return {
        "topology.tensor_parallel": divisors(tensor),
        "topology.pipeline_parallel": stages,
    }


def _workers_left(topology: TopologyConfig, degree: int) -> int:
    """Return the workers divided by a degree and context_parallel, or all if these do not fit."""
    assert isinstance(topology.workers, int)
    context = topology.context_parallel
    taken = degree * (context if isinstance(context, int) else 1)
    fits = taken > 0 and topology.workers % taken == 0
    return topology.workers // taken if fits else topology.workers


def _degrees(config: Config) -> Iterator[str]:
    topology = config.topology
    workers, context, tensor = (
        topology.workers,
        topology.context_parallel,
        topology.tensor_parallel,
    )
    numbers = (workers, context, topology.gpus_per_node, tensor)
    if not isinstance(workers, int) or any(isinstance(n, int) and n < 1 for n in numbers):
        return
    shared = tensor if workers % tensor == 0 else 1
    common = gcd(workers, tensor_parallel.common_divisor(config.model))
    fitting = {
        "context_parallel": f"auto, {divisors(workers // shared)}",
        "gpus_per_node": f"auto, {divisors(workers)}",
        "tensor_parallel": divisors(common),
    }
    for name, allowed in fitting.items():
        value = getattr(topology, name)
        if isinstance(value, int) and workers % value:
            yield f"{{topology.{name}}}: does not divide {{topology.workers}}; allowed: {allowed}"
    if isinstance(context, int) and workers % context == 0 and workers % tensor == 0:
        groups = workers // context
        if groups % tensor:
            yield (
                f"{{topology.tensor_parallel}}: does not divide the {with_count(groups, 'worker')} "
                "that {topology.context_parallel} leaves of {topology.workers}; allowed: "
                f"{divisors(groups)}"
            )


def _blocks(config: Config) -> Iterator[str]:
    topology, sparse = config.topology, config.sparsity.block
    if topology.block_size < 1 or config.seq < 2 or config.layout != "striped":
        return
    if sparse in BLOCKS and topology.block_size % sparse:
        yield (
            "{topology.block_size}: must be a multiple of {sparsity.block}, since the striped "
            "layout deals out whole pattern blocks"
        )
    workers = topology.context_workers
    blocks = -(-config.seq // topology.block_size)
    if isinstance(workers, int) and workers > max(1, blocks):
        yield (
            f"{{topology.block_size}}: {{seq}} has only {with_count(blocks, 'such block')} for "
            f"{workers} workers; {_smaller(config.seq, workers, blocks)}"
        )


def _smaller(seq: int, workers: int, blocks: int) -> str:
    """Return advice for a sequence of ``seq`` tokens that has fewer blocks than workers."""
    if workers * MIN_BLOCK > seq:
        most = max(1, seq // MIN_BLOCK)
        smaller = f" and topology.block_size={MIN_BLOCK}"
        or_more = f", or at most {most}{smaller}" if most > blocks else ""
        longer = if_has("seq", ", or a longer seq")
        return f"give at most {with_count(blocks, 'worker')}{or_more}{longer}"
    block = MIN_BLOCK
    while -(-seq // (2 * block)) >= workers:
        block *= 2
    return f"give fewer workers{if_has('seq', ', a longer seq')} or blocks of at most {block}"


def _balanced_chunk(config: Config) -> Iterator[str]:
    topology, sparse = config.topology, config.sparsity.block
    chunk, workers = topology.balanced_chunk, topology.context_workers
    if not isinstance(chunk, int) or chunk < 1 or config.seq < 2:
        return
    if topology.layout not in ("balanced", "auto"):
        yield (
            "{topology.balanced_chunk}: only topology.layout=balanced has chunks, not "
            "{topology.layout}; give topology.layout=balanced, or topology.balanced_chunk=auto"
        )
    elif sparse in BLOCKS and chunk % sparse:
        yield (
            "{topology.balanced_chunk}: must be a multiple of {sparsity.block}, since workers hold "
            "whole pattern blocks"
        )
    else:
        yield from number_of_chunks(config, workers if isinstance(workers, int) else 1)


def number_of_chunks(config: Config, workers: int) -> Iterator[Problem]:
    """Yield what is wrong with the number of chunks that ``topology.balanced_chunk`` makes.

    workers: number of workers that share a sequence.
    """
    topology, seq = config.topology, config.seq
    chunk, block = topology.balanced_chunk, config.sparsity.block or MIN_BLOCK
    if not isinstance(chunk, int) or topology.layout not in ("balanced", "auto"):
        return
    chunks = -(-seq // chunk)
    most = max(MOST_CHUNKS, MOST_CHUNKS_PER_WORKER * workers)
    if chunks < workers:
        longest = seq // workers // block * block
        fewer = f"fewer workers{if_has('seq', ' or a longer seq')}"
        advice = f"chunks of at most {longest}" if longest else fewer
        wrong = f" for {workers} workers; give {advice}"
    elif chunks > most:
        shortest = -(-seq // (most * block)) * block
        wrong = (
            f", and a batch could take minutes to plan; at most {most:,} are allowed. Give "
            f"chunks of at least {shortest}"
        )
    else:
        return
    line = f"{{topology.balanced_chunk}}: {{seq}} has {with_count(chunks, 'such chunk')}{wrong}"
    yield conflict(config, line)


def _batch(config: Config) -> Iterator[str]:
    train, topology = config.train, config.topology
    if train.global_batch < 1 or train.micro_batch < 1:
        return
    workers, context = topology.workers, topology.context_parallel
    sharing = topology.tensor_parallel * topology.pipeline_parallel
    if train.global_batch % train.micro_batch:
        yield "{train.global_batch}: must be a multiple of {train.micro_batch}"
    elif not isinstance(workers, int) or not isinstance(context, int) or context < 1:
        return
    elif workers >= 1 and workers % (context * sharing) == 0:
        groups = workers // (context * sharing)
        if train.global_batch % (groups * train.micro_batch):
            yield (
                f"{{train.global_batch}}: must be a multiple of {groups * train.micro_batch}: "
                f"{{train.micro_batch}} for each of the {groups} context groups "
                "({topology.workers}, {topology.context_parallel})"
            )
