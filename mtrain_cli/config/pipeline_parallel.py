"""Settings that pipeline parallelism allows."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count
from mtrain_cli.config.tensor_parallel import NEED_WHOLE_LAYERS, refuse, unsupported

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
    given = f"topology.pipeline_parallel={stages}"
    if stages == 1:
        for name, value in _DEFAULTS.items():
            if (set_to := getattr(topology, name)) != value:
                key = f"topology.{name}={show(set_to)}"
                yield f"{key}: needs topology.pipeline_parallel of at least 2"
        return
    yield from unsupported(config, given, NEED_WHOLE_MODEL)
    if topology.schedule == "interleaved" and parts == 1:
        yield "topology.schedule=interleaved: needs topology.virtual_stages of at least 2"
    elif topology.schedule in ("gpipe", "1f1b") and parts > 1:
        yield (
            f"topology.virtual_stages={parts}: topology.schedule={topology.schedule} has one per "
            "worker; give topology.schedule=interleaved, or topology.virtual_stages=1"
        )
    if stages * parts > layers:
        what = with_count(stages, "stage") + f" x {parts} virtual stages" * (parts > 1)
        yield f"{given}: {what} for model.num_layers={layers}; each needs a layer"
    else:
        yield from _stage_layers(config)
    yield from _degrees(config)


def _stage_layers(config: Config) -> Iterator[str]:
    """Yield an error if ``topology.stage_layers`` does not deal out the layers."""
    topology, layers = config.topology, config.model.num_layers
    counts, expected = topology.stage_layers, topology.pipeline_parallel * topology.virtual_stages
    if isinstance(counts, str):
        return
    given = f"topology.stage_layers={show(counts)}"
    if len(counts) != expected:
        by = f"topology.pipeline_parallel={topology.pipeline_parallel}"
        if topology.virtual_stages > 1:
            by += f" x topology.virtual_stages={topology.virtual_stages}"
        yield f"{given}: has {with_count(len(counts), 'number')}; must have {expected} ({by})"
    elif min(counts) < 1:
        yield f"{given}: each stage needs at least 1 layer"
    elif sum(counts) != layers:
        yield f"{given}: adds up to {sum(counts)}; must be model.num_layers={layers}"


def _degrees(config: Config) -> Iterator[str]:
    """Yield an error if the degrees do not divide the workers, or the stages not the step."""
    topology, train = config.topology, config.train
    workers, context = topology.workers, topology.context_workers
    if not isinstance(workers, int) or workers < 1:
        return
    degrees = {
        "pipeline_parallel": topology.pipeline_parallel,
        "tensor_parallel": topology.tensor_parallel,
    }
    if isinstance(topology.context_parallel, int):
        degrees["context_parallel"] = topology.context_parallel
    shown = " x ".join(f"topology.{name}={value}" for name, value in degrees.items() if value > 1)
    product = 1
    for value in degrees.values():
        product *= value
    if product < 1 or workers % product:
        more, allowed = f" = {product}", ""
        if shown.count("=") == 1:
            most = min(workers, config.model.num_layers)
            fits = ", ".join(str(n) for n in range(1, most + 1) if workers % n == 0)
            more, allowed = "", f"; allowed: {fits}"
        yield f"{shown}{more}: does not divide topology.workers={workers}{allowed}"
        return
    assert isinstance(context, int)
    data = workers // (topology.pipeline_parallel * topology.tensor_parallel * context)
    if data and train.micro_batch >= 1 and train.global_batch >= 1:
        yield from uneven_rounds(config, data)


def uneven_rounds(config: Config, data: int) -> Iterator[str]:
    """Yield an error if an interleaved schedule cannot share out the micro-batches of a step.

    Args:
        data: number of context groups.
    """
    topology, train = config.topology, config.train
    stages, sequences = topology.pipeline_parallel, data * train.micro_batch
    count = train.global_batch // sequences
    if topology.virtual_stages == 1 or train.global_batch % sequences or count % stages == 0:
        return
    yield (
        f"train.global_batch={train.global_batch}: gives each stage "
        f"{count} micro-batch{'es' * (count != 1)}; topology.schedule=interleaved needs "
        f"a multiple of topology.pipeline_parallel={stages}, so a multiple of "
        f"{sequences * stages} sequences"
    )


def require_whole_model(config: Config, command: str) -> None:
    """Raise ConfigError if a command without pipeline parallelism is to use it.

    Args:
        command: the command, such as ``mtrain simulate``.
    """
    refuse(config, "pipeline_parallel", command)
