"""``topology.stages=auto`` chooses the stages of each micro-batch, alike on all workers."""

from __future__ import annotations

import gloo
import numpy as np
import pytest
import torch
from training.masked_runs import SMALL

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.exchange import Plan
from mtrain_cli.training.stage_prices import PricedStages, StagePrices
from mtrain_cli.training.trainer import Trainer

WORDS = [
    *("seq=96", "data.kind=text", "train.steps=3", "data.document_mask=true", *SMALL),
    *("topology.exchange=group_cast", "topology.layout=zigzag"),
]


def trained(
    rank: int, world: int, words: list[str]
) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
    """Train three steps. Return the stages of all micro-batches, and the weights."""
    chosen = []
    price, make = StagePrices.of, Plan.make

    def of(self, layout, masks):
        found = price(self, layout, masks)
        assert found.forward.keys() == {*range(world)}, "each other worker may be a stage"
        best = masks[0].pairs % world, masks[0].pairs // world % world
        times = [{n: 1.0 if n == b else 2.0 for n in range(world)} for b in best]
        return PricedStages(*times, self.given)

    def planned(exchange, *given, **more):
        plan = make(exchange, *given, **more)
        chosen.append((plan.schedule.stages, plan.schedule.stages_backward))
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagePrices, "of", of)
        patch.setattr(Plan, "make", staticmethod(planned))
        config = compose([*WORDS, *words, f"topology.workers={world}"])
        trainer = Trainer(config, gloo.environment(rank, world))
        for _ in range(3):
            trainer.train_step(False)
        weights = [p.detach().clone() for p in trainer.decoder.parameters()]
        trainer.close()
    return chosen, [w.full_tensor() if hasattr(w, "full_tensor") else w for w in weights]


def both(rank: int, world: int, data: str):
    fixed = ["topology.stages=0", "topology.stages_backward=0"]
    return [trained(rank, world, [data, *words]) for words in ([], fixed)]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_micro_batches_have_their_own_stages_and_train_alike(world, tmp_path):
    drawn = np.random.default_rng(0)
    for number in range(40):  # documents shorter than a sequence
        (tmp_path / f"{number}.txt").write_text("long context " * int(drawn.integers(1, 7)))
    data = f"data.path={tmp_path}"
    found = gloo.run(world, both, data)
    chosen = [stages for (stages, _), _ in found]
    assert len(set(chosen[0])) > 1
    assert all(of_rank == chosen[0] for of_rank in chosen)
    assert {pair for _, (fixed, _) in found for pair in fixed} == {(0, 0)}
    (_, weights), (_, wanted) = found[0]
    for ours, theirs in zip(weights, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
