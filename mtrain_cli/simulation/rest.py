"""What a training step computes beside attention: FLOP of matrix products, and bytes that element-wise kernels read and write, of one rank.

T tokens of a rank and micro-batch (pads included), C hidden, A = heads * head_dim, K = kv_heads * head_dim, I intermediate, V vocabulary,
P_l weights of a layer, P_r of the others, W workers, e bytes of the compute dtype. Products are those of `training.flops`; bytes follow
`model.decoder`, `model.loss` and FSDP2's copies, line by line, with norms, rotation and gates fused as ``torch.compile`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mtrain_cli.simulation.calibration import HIGH, LOW
from mtrain_cli.simulation.cluster import Constant
from mtrain_cli.simulation.costs import Costs
from mtrain_cli.training.dry_run import Plan
from mtrain_cli.training.flops import layer_shapes, recomputed_matmul, root_shapes
from mtrain_cli.training.memory import MIB, sharded_numbers

EAGER = Constant.of(2.8, "measured", "a step of 32K on one H200 takes 10 to 15 % longer uncompiled (profiles/notes.md)", 2.0, 3.5)
LAUNCHES = Constant.of(16, "guess", "kernels of the compiled parts of a layer and of FSDP2, forward; twice as many backward", 8, 40)
_LOGITS = 20  # bytes a logit: written, largest, sum, gradient read and written, all float32 (`model.loss`); beside it e for the last
_ADAMW = 28  # bytes a number of a shard: parameter, two states read and written, gradient read; float32


@dataclass(frozen=True)
class Work:
    """flop: of matrix products. moved: bytes of element-wise kernels. launches: kernels that the host starts."""

    flop: float = 0.0
    moved: float = 0.0
    launches: float = 0.0


@dataclass(frozen=True)
class Rest:
    """forward, recomputed, backward: of a layer and micro-batch. loss: LM head and loss, both directions, with the embedding and the last
    norm, of a micro-batch. optimizer: gradient norm, clipping and AdamW, of a step. gather, root_gather: bytes that arrive at a rank when
    the weights of a layer, or those outside of the layers, are gathered; reduce, root_reduce: when their gradients are scattered.
    """

    forward: Work
    recomputed: Work
    backward: Work
    loss: Work
    optimizer: Work
    gather: float
    reduce: float
    root_gather: float
    root_reduce: float

    @staticmethod
    def of(plan: Plan) -> Rest:
        config, model, train, e = plan.config, plan.config.model, plan.config.train, 2 if plan.dtype == "bfloat16" else 4
        workers = plan.environment.workers
        tokens = plan.layout.tokens_per_worker * train.micro_batch
        hidden, wide = model.hidden_size, model.intermediate_size
        rotated = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        matmul = plan.parameters.layer_matmul
        layer, root = plan.parameters.layer, sum(prod(shape) for shape in root_shapes(model).values())
        shard = sharded_numbers(layer_shapes(model).values(), workers) * model.num_layers + sharded_numbers(
            root_shapes(model).values(), workers
        )
        eager = 1.0 if train.compile != False else EAGER.value  # noqa: E712 - auto compiles on GPUs
        again = recomputed_matmul(model, train.activation_checkpoint) / model.num_layers
        logits, head = tokens * model.vocab_size, model.vocab_size * hidden
        chunks = -(-4 * logits // (train.loss_chunk_mib * MIB))
        launches = LAUNCHES.value
        # Weights are cast, gathered and copied out; gradients copied in and added to the shard.
        copied_out, copied_in = 2 * e * layer + (4 + e) * layer / workers, (4 + e) * layer + 12 * layer / workers
        of_root = 2 * e * root + (4 + e) * root + (4 + e + 12) * root / workers
        share = (workers - 1) / workers
        return Rest(
            forward=Work(
                2.0 * matmul * tokens, eager * e * tokens * (9 * hidden + rotated + 3 * wide) + copied_out, launches
            ),
            recomputed=Work(
                2.0 * again * tokens,
                eager * e * tokens * (6 * hidden + rotated + 3 * wide) if again else 0.0,
                launches if again else 0.0,
            ),
            backward=Work(
                4.0 * matmul * tokens, eager * e * tokens * (15 * hidden + rotated + 5 * wide) + copied_out + copied_in, 2 * launches
            ),
            loss=Work(
                6.0 * head * tokens,
                # Logits; the float32 gradient of the LM head, read and written by every chunk and cast once; the embedding, forward and
                # backward, whose gradient is added to that of the head where they are tied; the last norm; FSDP2's copies.
                (_LOGITS + e) * logits + 8 * head * chunks + (4 + e) * head + e * (3 * head + 6 * tokens * hidden) + of_root,
                10.0 * chunks,
            ),
            optimizer=Work(0.0, float(shard * (4 + (8 if config.optim.clip_norm else 0) + _ADAMW)), 50.0),
            gather=e * layer * share,
            reduce=4 * layer * share,
            root_gather=e * root * share,
            root_reduce=4 * root * share,
        )  # fmt: skip


@dataclass(frozen=True)
class Spent:
    """us of some work: matrix products, element-wise kernels, and what the host is longer in launching than the GPU in computing."""

    matrices: float
    elements: float
    host: float

    @property
    def us(self) -> float:
        return self.matrices + self.elements + self.host


def priced(work: Work, costs: Costs) -> Spent:
    gpu = costs.cluster.gpu
    matrices = work.flop / (costs.rate(gpu.gemm_tflops) * 1e6)
    elements = costs.copied(work.moved)
    host = work.launches * _share(costs) * costs.burden(gpu.launch_us)
    return Spent(matrices, elements, max(0.0, host - matrices - elements))


def _share(costs: Costs) -> float:
    """Of the launches that are counted."""
    return {LOW: LAUNCHES.low, HIGH: LAUNCHES.high}.get(costs.bound, LAUNCHES.value) / LAUNCHES.value
