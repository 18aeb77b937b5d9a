"""Families of transformers under every pattern, layout and exchange equal one process.

Dense attention is compared with transformers' eager attention, and a pattern with the library in
one process. The slow test prints the table of docs/library.md: run it with ``-m slow -s -n 0``.
"""

from __future__ import annotations

import gloo
import pytest
import torch

pytest.importorskip("transformers")

from library.test_transformers_models import (
    FAMILIES,
    SPARSE,
    batches,
    expected_of,
    gradients,
    library,
    model_of,
)

PATTERNS = {
    "dense": (),
    "vertical_slash": (*SPARSE, "sparsity.p_s=0.3"),
    "block_topk": ("sparsity.block=16", "sparsity.score=exact", "sparsity.density=0.45"),
}
WAYS = (
    ("zigzag", "ring"),
    ("striped", "ring"),
    ("striped", "all_gather"),
    ("contiguous", "ulysses"),
    ("balanced", "group_cast"),
)
Results = tuple[float, dict[str, torch.Tensor]]


def trained_by(family: str, sparsity: str, **arguments: str) -> Results:
    """Loss and gradients of two batches, summed over the processes."""
    cp, model = library(*PATTERNS[sparsity], sparsity=sparsity, **arguments), model_of(family)
    losses = [model(**cp.inputs(**batch)).loss for batch in batches()]
    torch.stack(losses).sum().backward()
    loss, found = torch.stack(losses).sum().detach(), gradients(model)
    if len(cp.processes.ranks) > 1:
        for tensor in (loss, *found.values()):
            torch.distributed.all_reduce(tensor)
    return loss.item(), found


def errors(_rank: int, world: int, family: str, expected: dict[str, Results]):
    """The relative error of the loss and of the worst gradient, by pattern, layout and exchange."""
    made = {}
    for sparsity, (loss, of_one) in expected.items():
        for layout, exchange in WAYS:
            if exchange == "ulysses" and 4 % world:
                continue
            own, found = trained_by(family, sparsity, layout=layout, exchange=exchange)
            assert found.keys() == of_one.keys()
            worst = max(
                float((found[name] - tensor).abs().max() / tensor.abs().max())
                for name, tensor in of_one.items()
            )
            made[sparsity, layout, exchange] = abs(own / loss - 1), worst
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_patterns_layouts_and_exchanges_change_nothing(family):
    expected = {name: trained_by(family, name) for name in PATTERNS if name != "dense"}
    expected["dense"] = expected_of(family)
    if family != "mistral":  # all of whose layers have a window, and so no index
        assert abs(expected["dense"][0] - expected["block_topk"][0]) > 1e-5
    for world in (2, 3):
        found = gloo.run(world, errors, family, expected)[0]
        for sparsity in PATTERNS:
            of_pattern = [both for (name, *_), both in found.items() if name == sparsity]
            loss, gradient = (max(values) for values in zip(*of_pattern, strict=True))
            print(f"| {family} | {sparsity} | {world} | {loss:.1e} | {gradient:.1e} |")
        assert all(loss < 1e-6 and gradient < 5e-6 for loss, gradient in found.values()), found
