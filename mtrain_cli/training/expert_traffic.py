"""Bytes that experts move: rows of tokens, or weights; and which degrees fit.

With expert parallelism, rows of tokens travel to the workers of their experts. Without it, FSDP
gathers the weights of all experts and reduces their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.model.tiling import ONE_ADDITION, expert_chunks, expert_parts, scored_row
from mtrain_cli.parallel.fsdp import sharded_dimension
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.step.interpreters import traffic
from mtrain_cli.step.layer import Layer
from mtrain_cli.step.program import Message
from mtrain_cli.step.weights import weight_messages
from mtrain_cli.training.state_memory import BYTES

_ROW = 16  # bytes: grouped products on a GPU need widths that are a multiple of this
# Time per layer and micro-batch that a degree above 1 takes beyond products, rows, copies and
# messages, in microseconds. In the forward pass of each layer the host waits for the numbers of
# rows, so it cannot queue work ahead. Two H100s of one host, 8 layers of Qwen3-30B-A3B, degree 2
# against 1 (profiles/notes.md, 2026-11-26): 2.2 ms at 32K and 5.7 ms at 8K, where less computation
# hides the host. This is their mean.
HOST_WAIT_US = 4000.0


@dataclass(frozen=True)
class ExpertTraffic:
    """Bytes that reach one worker in an optimizer step, for the experts of one layer.

    degree: expert-parallel degree.
    rows: rows of tokens and their gradients, if each expert computes as many tokens.
    weights: weights of experts and their gradients.
    """

    degree: int
    rows: int
    weights: int

    @property
    def total(self) -> int:
        return self.rows + self.weights


def expert_traffic(
    config: Config, dims: ParallelDims, layout: Layout, dtype_bytes: int, degree: int
) -> ExpertTraffic:
    """Return the bytes of an expert-parallel degree.

    A row travels to its expert and back, and so does its gradient. The second forward pass of a
    checkpointed layer sends the row again, but not back.

    With tensor parallelism and degree 1, each worker of a tensor group has the same shard of the
    experts, and adds up its gradients with the others once a step.
    """
    model, train, moe = config.model, config.train, config.model.moe
    workers = dims.dp * dims.cp * dims.tp
    micro_batches = train.global_batch // (train.micro_batch * dims.dp)
    tokens = train.micro_batch * layout.tokens_per_worker / dims.tp
    layer = Layer(experts=True, checkpointed=train.activation_checkpoint != "none")
    row = message_bytes(model.hidden_size, dtype_bytes)
    pair = traffic(layer.forward(), row) + traffic(layer.backward(), row)
    rows = micro_batches * tokens * moe.top_k * (degree - 1) / degree * pair
    whole = 3 * moe.experts * moe.expert_size * model.hidden_size / degree
    copies = dims.tp if degree == 1 else 1
    others = 1 - degree * copies / workers
    e, r = dtype_bytes, BYTES[train.reduce_dtype]
    sizes = {Message.GATHER: e, Message.GATHER_AGAIN: e, Message.REDUCE: r}
    bytes_each = traffic(weight_messages(train.shard, micro_batches), sizes)
    summed = summed_bytes(whole, copies, workers)
    return ExpertTraffic(degree, round(rows), round(whole * others * bytes_each + summed))


def summed_bytes(elements: float, copies: int, workers: int) -> float:
    """Return the bytes that reach a worker when copies of gradients are added up, once a step.

    It is an all-reduce in float32 of a worker's shard.

    Args:
        elements: number of weights.
        copies: number of workers that hold the same shard.
        workers: number of all workers of a stage.
    """
    return 2 * (1 - 1 / copies) * 4 * elements * copies / workers


def require_experts_fit(config: Config, dims: ParallelDims, dtype_bytes: int, device: str) -> None:
    """Check the experts against the workers and the device.

    Raises:
        ConfigError: the degree does not fit the workers or the sizes of the experts, or a GPU
            cannot compute experts of these sizes.
    """
    given = config.topology.expert_parallel
    if not config.model.moe.experts:
        return
    if isinstance(given, int) and (problem := degree_problem(config, dims, given)) is not None:
        allowed = ", ".join(map(str, allowed_degrees(config, dims)))
        raise ConfigError(f"topology.expert_parallel={given}: {problem}; allowed: auto, {allowed}")
    if device == "cuda" and (problem := grouped_problem(config, dtype_bytes)) is not None:
        raise ConfigError(problem)


def degrees_in_a_node(config: Config, dims: ParallelDims, per_node: int) -> list[int]:
    """Return the allowed degrees whose groups stay in a node, from which `auto` chooses.

    An expert group begins at a multiple of its degree, so it stays in a node if the degree divides
    the workers of the node.
    """
    return [n for n in allowed_degrees(config, dims) if per_node % n == 0]


def allowed_degrees(config: Config, dims: ParallelDims) -> list[int]:
    """Return the expert-parallel degrees that fit the workers and the experts."""
    most = min(dims.dp * dims.cp * dims.tp, config.model.moe.experts)
    return [n for n in range(1, most + 1) if degree_problem(config, dims, n) is None]


def degree_problem(config: Config, dims: ParallelDims, degree: int) -> str | None:
    """Return why a degree does not fit, or None if it fits."""
    workers, moe = dims.dp * dims.cp * dims.tp, config.model.moe
    if workers % degree:
        return f"does not divide the {with_count(workers, 'worker')}{_of_stage(dims)}"
    if moe.experts % degree:
        return f"does not divide model.moe.experts={moe.experts}"
    sizes = (moe.experts, 2 * moe.expert_size, config.model.hidden_size)
    shards = workers // degree
    if degree > 1:
        for shape in (sizes, (sizes[0], sizes[2], moe.expert_size)):
            if sharded_dimension(shape, shards) is None:
                return (
                    f"leaves {with_count(shards, 'worker')} to share an expert's weight of "
                    f"{shape[1]} x {shape[2]}, and neither size is a multiple of {shards}"
                )
    return None


def _of_stage(dims: ParallelDims) -> str:
    return f" of a stage (topology.pipeline_parallel={dims.pp})" if dims.pp > 1 else ""


def grouped_problem(config: Config, dtype_bytes: int) -> str | None:
    """Return why grouped products on a GPU refuse the sizes of the experts, or None."""
    sizes = {
        "model.moe.expert_size": config.model.moe.expert_size,
        "model.hidden_size": config.model.hidden_size,
    }
    for key, size in sizes.items():
        if size * dtype_bytes % _ROW:
            return f"{key}={size}: grouped products need a multiple of {_ROW // dtype_bytes}"
    return None


def message_bytes(hidden: int, dtype_bytes: int) -> dict[Message, int]:
    """Return the bytes of a pair in each kind of message.

    hidden: size of a hidden state.
    """
    row, scored = hidden * dtype_bytes, scored_row(hidden, dtype_bytes) * dtype_bytes
    sizes = {Message.ROWS: row, Message.ROWS_BACK: row}
    return sizes | {Message.SCORED: scored, Message.SCORED_BACK: scored}


def copied_rows(degree: int, *, recomputes: bool) -> tuple[float, float]:
    """Return how often a pair's row is read or written because rows travel: forward, backward.

    Rows that leave, and those that return, are copied before their message; rows of own experts are
    copied to where others return.

    recomputes: whether layers are checkpointed. Then rows travel twice in backward.
    """
    if degree == 1:
        return 0.0, 0.0
    leave = (degree - 1) / degree
    return 2 * leave + 2, 2 * leave * (1 + recomputes) + 2


def summed_gradients(weights: float, e: int, chunks: int, parts: int) -> float:
    """Return the bytes that adding up the gradients of experts reads and writes.

    Args:
        weights: number of elements of the worker's experts.
        e: bytes of the compute dtype.
        chunks: number of chunks of tokens. More than two are added up in float32.
        parts: number of parts of the experts, whose gradients move to one tensor.
    """
    if chunks > ONE_ADDITION:
        return weights * ((8 + 2 * e) * chunks + 4 + e)
    return weights * e * (3 * (chunks > 1) + 2 * (parts > 1))


def chunks_and_parts(config: Config, tokens: int, e: int, degree: int) -> tuple[int, int]:
    """Return the number of chunks of tokens, and of parts of a worker's experts.

    Args:
        tokens: number of own tokens of a worker.
        e: bytes of the compute dtype.
    """
    model, topology = config.model, config.topology
    chunks = expert_chunks(
        tokens, model.hidden_size, model.moe, e, config.train.tile_mib << 20,
        degree=degree, chunks=topology.expert_chunks,
    )  # fmt: skip
    return chunks, 1 if degree == 1 else expert_parts(tokens, model.moe.experts // degree, chunks)
