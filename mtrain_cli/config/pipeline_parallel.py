"""Settings that pipeline parallelism allows."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from mtrain_cli.config.keys import conflict
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import divisors, with_count
from mtrain_cli.config.tensor_parallel import NEED_WHOLE_LAYERS, unsupported

# Settings that need the whole model on each worker, and the value that turns each of them off.
NEED_WHOLE_MODEL = {
    "train.offload_activations": False,
    **NEED_WHOLE_LAYERS,
    "train.eval_tasks": (),
}
_DEFAULTS = {"schedule": "auto", "virtual_stages": 1, "stage_layers": "auto"}


def problems(config: Config) -> Iterator[str]:
    """Yield a line for each setting that contradicts ``topology.pipeline_parallel``."""
    topology, layers = config.topology, config.model.num_layers
    stages, parts = topology.pipeline_parallel, topology.virtual_stages
    if min(stages, parts, layers, topology.tensor_parallel) < 1:
        return
    if stages == 1:
        for name, value in _DEFAULTS.items():
            if getattr(topology, name) != value:
                yield f"{{topology.{name}}}: needs {{topology.pipeline_parallel!s}} of at least 2"
        return
    yield from unsupported(config, "topology.pipeline_parallel", NEED_WHOLE_MODEL)
    if topology.schedule == "interleaved" and parts == 1:
        yield "{topology.schedule}: needs {topology.virtual_stages!s} of at least 2"
    elif topology.schedule in ("gpipe", "1f1b") and parts > 1:
        yield (
            "{topology.virtual_stages}: {topology.schedule} has one per worker; give "
            "topology.schedule=interleaved, or topology.virtual_stages=1"
        )
    if stages * parts > layers:
        what = with_count(stages, "stage") + f" x {parts} virtual stages" * (parts > 1)
        yield f"{{topology.pipeline_parallel}}: {what} for {{model.num_layers}}; each needs a layer"
    else:
        yield from _stage_layers(config)
    yield from _degrees(config)


def _stage_layers(config: Config) -> Iterator[str]:
    """Yield an error if ``topology.stage_layers`` does not deal out the layers."""
    topology = config.topology
    counts, expected = topology.stage_layers, topology.pipeline_parallel * topology.virtual_stages
    if isinstance(counts, str):
        return
    if len(counts) != expected:
        by = "{topology.pipeline_parallel}"
        if topology.virtual_stages > 1:
            by += " x {topology.virtual_stages}"
        has = with_count(len(counts), "number")
        yield f"{{topology.stage_layers}}: has {has}; must have {expected} ({by})"
    elif min(counts) < 1:
        yield "{topology.stage_layers}: each stage needs at least 1 layer"
    elif sum(counts) != config.model.num_layers:
        yield f"{{topology.stage_layers}}: adds up to {sum(counts)}; must be {{model.num_layers}}"


def _degrees(config: Config) -> Iterator[str]:
    """Yield an error if the degrees do not divide the workers, or the stages not the step."""
    topology, train = config.topology, config.train
    workers, context = topology.workers, topology.context_workers
    if not isinstance(workers, int) or workers < 1:
        return
    names = ["pipeline_parallel", "tensor_parallel"]
    if isinstance(topology.context_parallel, int):
        names.append("context_parallel")
    degrees = {name: getattr(topology, name) for name in names}
    product = prod(degrees.values())
    if product < 1 or workers % product:
        above = [f"{{topology.{name}}}" for name, value in degrees.items() if value > 1]
        more, allowed = f" = {product}", ""
        if len(above) == 1:
            more, allowed = "", f"; allowed: {divisors(workers, config.model.num_layers)}"
        yield f"{' x '.join(above)}{more}: does not divide {{topology.workers}}{allowed}"
        return
    assert isinstance(context, int)
    data = workers // (topology.pipeline_parallel * topology.tensor_parallel * context)
    if data and train.micro_batch >= 1 and train.global_batch >= 1:
        yield from uneven_rounds(config, data)


def uneven_rounds(config: Config, data: int) -> Iterator[Problem]:
    """Yield an error if an interleaved schedule cannot share out the micro-batches of a step.

    Args:
        data: number of context groups.
    """
    topology, train = config.topology, config.train
    stages, sequences = topology.pipeline_parallel, data * train.micro_batch
    count = train.global_batch // sequences
    if topology.virtual_stages == 1 or train.global_batch % sequences or count % stages == 0:
        return
    yield conflict(
        config,
        f"{{train.global_batch}}: gives each stage {count} micro-batch{'es' * (count != 1)}; "
        "{topology.schedule!s}=interleaved needs a multiple of {topology.pipeline_parallel}, so a "
        f"multiple of {sequences * stages} sequences",
    )
