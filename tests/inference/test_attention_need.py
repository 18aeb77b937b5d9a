"""The memory that generation expects to need covers what it needs, and is not much more."""

from __future__ import annotations

from pathlib import Path

import gloo
import pytest
from inference.small_models import engine, tokens, write_run
from slow_cases import mostly_slow
from training.allocations import LiveBytes

from mtrain_cli.inference.limits import AttentionNeed, MemoryNeed
from mtrain_cli.inference.sampling import Sampling

NEW = 8
_MODEL = (
    "model.num_layers=4", "model.hidden_size=256", "model.head_dim=64",
    "model.intermediate_size=1024", "model.num_heads=4", "model.num_kv_heads=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("need") / "run"
    write_run(folder, *_MODEL)
    return folder


def expected_and_needed(
    rank: int, world: int, run: str, words: tuple[str, ...], prompt: int, together: int
) -> tuple[int, int]:
    """Generate on this process. Return the bytes that it should need, and those that it needed."""
    found = engine(Path(run), *words, environment=gloo.environment(rank, world))
    need = MemoryNeed.of(found.config, found.environment)
    with LiveBytes(list(found.decoder.parameters())) as live:
        prompts = [tokens(prompt, seed=seed) for seed in range(together)]
        list(found.generate(prompts, NEW, Sampling()))
    return need.bytes(prompt, NEW, together), live.peak


@mostly_slow(
    ("words", "prompt", "together", "most"),
    [
        ((), 1024, 1, 1.3),
        pytest.param((), 8192, 1, 1.3, marks=pytest.mark.slow),
        pytest.param((), 2048, 4, 1.3, marks=pytest.mark.slow),
        pytest.param(("train.dtype=bfloat16",), 4096, 1, 1.4, marks=pytest.mark.slow),
        pytest.param(("train.kernel=reference",), 1024, 1, 1.6, marks=pytest.mark.slow),
        pytest.param(("sparsity=vertical_slash",), 8192, 1, 1.5, marks=pytest.mark.slow),
        (("sparsity=vertical_slash", "sparsity.dense_layers=3"), 2048, 1, 2.5),
        pytest.param(("sparsity=xattention",), 8192, 1, 1.5, marks=pytest.mark.slow),
        (("sparsity=moba",), 1024, 1, 1.5),
        pytest.param(
            ("sparsity=moba", "sparsity.gate=block"), 4096, 1, 2.5, marks=pytest.mark.slow
        ),
    ],
    keep=(0,),
)
def test_the_estimate_covers_the_tensors_of_generation(run, words, prompt, together, most):
    expected, needed = expected_and_needed(0, 1, str(run), words, prompt, together)
    assert needed <= expected <= most * needed


@pytest.mark.parametrize(
    "words", [(), pytest.param(("sparsity=vertical_slash",), marks=pytest.mark.slow)]
)
def test_the_estimate_covers_each_of_two_workers(run, words):
    arguments = (str(run), ("topology.workers=2", *words), 4096, 1)
    for expected, needed in gloo.run(2, expected_and_needed, *arguments):
        assert needed <= expected <= 2.5 * needed


def test_an_index_counts_for_the_kernel_that_reads_it(run):
    """On a GPU there are no masks, but lists and slots of what the index chose."""
    words = ("topology.device=cpu", "sparsity=xattention")
    found = engine(run, *words)
    need = MemoryNeed.of(found.config, found.environment, found.choices).attention
    assert need.of(0) == (0, 0)
    short, long = need.index(8192), need.index(65536)
    assert short[0] == 0
    # Pairs of blocks grow with the square of the length.
    assert 60 * short[1] < long[1] < 68 * short[1]


@pytest.mark.parametrize("layers", ["3", "[0,2,3]"])
def test_dense_layers_have_masks_and_no_index(run, layers):
    def need(*words: str) -> AttentionNeed:
        found = engine(run, "topology.device=cpu", *words)
        return MemoryNeed.of(found.config, found.environment, found.choices).attention

    dense, sparse = need(), need("sparsity=vertical_slash")
    mixed = need("sparsity=vertical_slash", f"sparsity.dense_layers={layers}")
    one, every = mixed.index(8192), sparse.index(8192)
    assert (4 * one[0], one[1]) == every
    calls = [each.kernel(8192, 8192) for each in (dense, sparse, mixed)]
    assert calls[2] == tuple(map(max, calls[0], calls[1]))
    assert calls[2][0] == calls[0][0] > calls[1][0]
