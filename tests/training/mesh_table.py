"""Print how much loss and gradients of many meshes differ from those of one worker as a table.

`PYTHONPATH=tests python -m training.mesh_table [CASES]`.

`cases` chooses runs so that each two values of different columns stand together in at least one
run, where mtrain allows both at once. A run takes one step in float32 with eight sequences of
random weights and at most four workers, or eight in the last rows. Each row has the relative
difference of the loss, and of the gradient that differs most, in the Frobenius norm.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations, product
from math import prod

from training.test_pipeline import differences

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.environment import resolve_environment

SMALL = (
    "model.num_heads=8", "model.num_kv_heads=4", "model.num_layers=8", "train.global_batch=8",
    "topology.device=cpu", "train.dtype=float32",
)  # fmt: skip
SPARSE = ("sparsity.block=16", "sparsity.dense_steps=0")
# Settings that change the loss: the run of one worker has them, too.
MODEL = {
    "attention": {
        "dense": (),
        "vertical_slash": (
            *SPARSE, "sparsity=vertical_slash", "sparsity.last_q=16", "sparsity.min_slashes=2",
            "sparsity.max_slashes=5", "sparsity.min_columns=4", "sparsity.max_columns=12",
        ),
        "moba": (*SPARSE, "sparsity=moba", "sparsity.chunk=32", "sparsity.top_k=2"),
    },
    "tokens": {
        "one": ("seq=256", "data.document_mask=false"),
        "packed": ("seq=256",),
        "padded": ("seq=243",),
    },
    "embeddings": {"tied": (), "untied": ("model.tie_word_embeddings=false",)},
}  # fmt: skip
# Settings that change how workers share a step.
RUN = {
    "exchange": {
        name: (f"topology.exchange={name}",) for name in ("all_gather", "ring", "ulysses")
    },
    "schedule": {
        "gpipe": ("topology.schedule=gpipe",),
        "1f1b": ("topology.schedule=1f1b",),
        "v=2": ("topology.virtual_stages=2",),
    },
    "batch": {str(size): (f"train.micro_batch={size}",) for size in (1, 2)},
    "recompute": {
        name: (f"train.activation_checkpoint={name}",) for name in ("none", "selective", "full")
    },
    "shard": {
        name: (f"train.shard={name}",) for name in ("full", "gradients", "optimizer")
    },
}  # fmt: skip
DEGREES = {"pp": (1, 2, 4), "dp": (1, 2), "cp": (1, 2, 4), "tp": (1, 2, 4)}
COLUMNS = [*DEGREES, *MODEL, *RUN]
WORKERS, MOST = 4, 8
# Of a pipeline or of a context group: without one, the value has no meaning.
ONLY_WITH = {"schedule": "pp", "exchange": "cp"}

Case = dict[str, object]
Pair = tuple[tuple[str, object], tuple[str, object]]


def words(case: Case, groups: dict[str, dict[str, tuple[str, ...]]]) -> tuple[str, ...]:
    return tuple(word for name in groups for word in groups[name].get(str(case[name]), ()))


def workers(case: Case) -> int:
    return prod(int(str(case[name])) for name in DEGREES)


@cache
def allowed(given: tuple[tuple[str, object], ...]) -> bool:
    """Whether mtrain accepts the settings of a case."""
    case = dict(given)
    degrees = (
        f"topology.pipeline_parallel={case['pp']}", f"topology.context_parallel={case['cp']}",
        f"topology.tensor_parallel={case['tp']}", f"topology.workers={workers(case)}",
        "topology.block_size=16", "model.hidden_size=32", "model.head_dim=8",
        "model.intermediate_size=44",
    )  # fmt: skip
    try:
        resolve_environment(compose([*SMALL, *words(case, MODEL), *words(case, RUN), *degrees]))
    except ConfigError:
        return False
    return True


def pairs(case: Case) -> set[Pair]:
    return set(combinations(((name, case[name]) for name in COLUMNS if case[name] != ""), 2))


def every_case() -> Iterator[Case]:
    """Yield all combinations of values, without values that have no meaning."""
    values = [*DEGREES.values(), *MODEL.values(), *RUN.values()]
    for chosen in product(*values):
        case: Case = dict(zip(COLUMNS, chosen, strict=True))
        if workers(case) > MOST:
            continue
        for name, degree in ONLY_WITH.items():
            if case[degree] == 1:
                case[name] = ""
        yield case


def possible_pairs(given: Iterable[Case]) -> set[Pair]:
    return {pair for case in given for pair in pairs(case)}


@cache
def cases(seed: int = 1) -> tuple[Case, ...]:
    """Return runs that cover all pairs of values which an allowed run has.

    The runs of at most ``WORKERS`` workers come first. Each choice takes, of some random runs, the
    one with the most pairs that no run before it has.
    """
    draw = random.Random(seed)
    everything = list(every_case())
    missing, found = possible_pairs(everything), list[Case]()
    for most in (WORKERS, MOST):
        some = [case for case in everything if workers(case) <= most]
        while True:
            near = [case for case in draw.sample(some, 3000) if pairs(case) & missing]
            near.sort(key=lambda case: -len(pairs(case) & missing))
            chosen = next((c for c in near if allowed(tuple(c.items()))), None)
            if chosen is None:
                chosen = _last_resort(some, missing)
            if chosen is None:
                break
            found.append(chosen)
            missing -= pairs(chosen)
    return tuple(found)


def _last_resort(some: list[Case], missing: set[Pair]) -> Case | None:
    """Return an allowed run with a missing pair. Remove pairs from ``missing`` that none has."""
    for pair in sorted(missing, key=str):
        with_it = [case for case in some if pair in pairs(case)]
        random.Random(0).shuffle(with_it)
        for case in with_it[:50]:
            if allowed(tuple(case.items())):
                return case
    return None


def main(count: int | None) -> None:
    """Print the table."""
    chosen = cases()[:count]
    print(f"| {' | '.join(COLUMNS)} | loss | worst gradient | of |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    worst, began = [0.0, 0.0], time.monotonic()
    for case in chosen:
        degrees = tuple(int(str(case[name])) for name in ("pp", "cp", "tp"))
        model, run = (*SMALL, *words(case, MODEL)), words(case, RUN)
        found = differences(workers(case), degrees, model, run)
        loss = found.pop("loss")
        found.pop("squared norm")
        name = max(found, key=found.__getitem__)
        worst = [max(worst[0], loss), max(worst[1], found[name])]
        cells = " | ".join(str(case[column]) for column in COLUMNS)
        print(f"| {cells} | {loss:.1e} | {found[name]:.1e} | `{name}` |", flush=True)
    print(
        f"\n{len(chosen)} runs, {len(possible_pairs(chosen))} pairs of values, "
        f"{time.monotonic() - began:.0f} s: loss {worst[0]:.1e}, gradients {worst[1]:.1e}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else None)
